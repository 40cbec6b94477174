"""Block manager and block pool against dictionaries: any sequence of calls, compared after each.

The manager's model keeps the list of block ids of every sequence and knows two things the manager must obey: a block
is held by one sequence at a time, and committed blocks of a sequence never change.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedcore.cache.block_manager import BlockManager, Reservation
from pagedcore.cache.block_pool import BlockPool
from pagedcore.errors import InternalError

SEQUENCES = st.integers(min_value=0, max_value=4)


class BlockManagerModel(RuleBasedStateMachine):
    """Reserve, commit, cancel, free, in any order, with closings repeated and out of turn."""

    closed = Bundle("closed")

    @initialize(num_blocks=st.integers(1, 16), block_size=st.integers(1, 4))
    def build(self, num_blocks: int, block_size: int) -> None:
        self.manager = BlockManager(num_blocks, block_size)
        self.tables: dict[int, list[int]] = {}
        self.reservation: Reservation | None = None
        self.grown: dict[int, list[int]] = {}

    @precondition(lambda self: self.reservation is None)
    @rule(demands=st.dictionaries(SEQUENCES, st.integers(0, 20), max_size=4))
    def reserve(self, demands: dict[int, int]) -> None:
        size = self.manager.block_size
        needed = {sid: max(0, -(-n // size) - len(self.tables.get(sid, []))) for sid, n in demands.items()}
        for sid, num_blocks in needed.items():
            assert self.manager.num_blocks_needed(sid, demands[sid]) == num_blocks
        fits = sum(needed.values()) <= self.manager.num_free_blocks
        self.reservation = self.manager.reserve(demands.items())
        assert (self.reservation is not None) == fits
        if fits:
            self.grown = {sid: self._new_blocks_of(sid, num) for sid, num in needed.items() if num}

    def _new_blocks_of(self, sid: int, num_blocks: int) -> list[int]:
        block_ids: list[int] = self.manager.table(sid).block_ids.tolist()
        held = self.tables.get(sid, [])
        assert block_ids[: len(held)] == held
        assert len(block_ids) == len(held) + num_blocks
        return block_ids[len(held) :]

    @precondition(lambda self: self.reservation is not None)
    @rule(target=closed)
    def commit(self) -> tuple[Reservation, bool]:
        assert self.reservation is not None
        self.reservation.commit()
        for sid, block_ids in self.grown.items():
            self.tables[sid] = self.tables.get(sid, []) + block_ids
        return self._close(), True

    @precondition(lambda self: self.reservation is not None)
    @rule(target=closed)
    def cancel(self) -> tuple[Reservation, bool]:
        assert self.reservation is not None
        self.reservation.cancel()
        return self._close(), False

    def _close(self) -> Reservation:
        assert self.reservation is not None
        reservation, self.reservation, self.grown = self.reservation, None, {}
        return reservation

    @rule(pair=closed, commits=st.booleans())
    def close_again(self, pair: tuple[Reservation, bool], commits: bool) -> None:
        reservation, was_committed = pair
        close = reservation.commit if commits else reservation.cancel
        if commits == was_committed:
            close()
        else:
            with pytest.raises(InternalError):
                close()

    @rule(sid=SEQUENCES)
    def free(self, sid: int) -> None:
        expected = len(self.tables.pop(sid, [])) + len(self.grown.pop(sid, []))
        assert self.manager.free(sid) == expected

    @rule(sid=SEQUENCES, data=st.data())
    def read_slots(self, sid: int, data: st.DataObject) -> None:
        blocks, size = self.tables.get(sid, []), self.manager.block_size
        if not blocks:
            return
        end = data.draw(st.integers(0, len(blocks) * size))
        start = data.draw(st.integers(0, end))
        slots = self.manager.table(sid).slots(start, end, size).tolist()
        assert slots == [blocks[p // size] * size + p % size for p in range(start, end)]

    @invariant()
    def tables_are_those_of_the_model(self) -> None:
        sids = self.tables.keys() | self.grown.keys()
        expected = {sid: tuple(self.tables.get(sid, []) + self.grown.get(sid, [])) for sid in sids}
        assert dict(self.manager.snapshot().tables) == expected

    @invariant()
    def every_block_is_free_or_held_once(self) -> None:
        state = self.manager.snapshot()
        held = [block for table in state.tables.values() for block in table]
        assert sorted([*held, *state.free_blocks]) == list(range(self.manager.num_blocks))
        assert [state.reference_counts[block] for block in held] == [1] * len(held)
        assert self.manager.num_used_blocks == len(held) == round(self.manager.usage * self.manager.num_blocks)

    def teardown(self) -> None:
        """Whatever happened, freeing everybody leaves an empty pool."""
        if hasattr(self, "manager"):
            for sid in range(5):
                self.manager.free(sid)
            assert self.manager.num_free_blocks == self.manager.num_blocks


class BlockPoolModel(RuleBasedStateMachine):
    """Allocation, sharing and freeing against a dictionary of reference counts."""

    @initialize(num_blocks=st.integers(1, 6))
    def build(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.counts = dict.fromkeys(range(num_blocks), 0)

    @rule(num_blocks=st.integers(0, 4))
    def allocate(self, num_blocks: int) -> None:
        num_free = sum(count == 0 for count in self.counts.values())
        taken = self.pool.allocate(num_blocks)
        assert (taken is not None) == (num_blocks <= num_free)
        for block_id in taken or ():
            assert self.counts[block_id] == 0
            self.counts[block_id] = 1

    @rule(block_id=st.integers(-1, 6), frees=st.booleans())
    def share_or_free(self, block_id: int, frees: bool) -> None:
        call = self.pool.free if frees else self.pool.share
        if self.counts.get(block_id, 0) > 0:
            call(block_id)
            self.counts[block_id] += -1 if frees else 1
        else:
            with pytest.raises(InternalError):
                call(block_id)

    @invariant()
    def counts_and_free_list_are_those_of_the_model(self) -> None:
        assert self.pool.reference_counts == tuple(self.counts.values())
        assert sorted(self.pool.free_blocks) == [block for block, count in self.counts.items() if count == 0]


TestBlockManager = BlockManagerModel.TestCase
TestBlockManager.settings = settings(max_examples=100, stateful_step_count=50, deadline=None, print_blob=True)
TestBlockManager.__doc__ = "The manager agrees with a dictionary after every call, whatever the calls."

TestBlockPool = BlockPoolModel.TestCase
TestBlockPool.settings = settings(max_examples=50, stateful_step_count=50, deadline=None, print_blob=True)
TestBlockPool.__doc__ = "The pool agrees with a dictionary of counts after every call, whatever the calls."
