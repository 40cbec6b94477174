"""Host memory as a second home of KV blocks: what was moved there, for whom it is kept, and what is on its way.

The host has a prefix cache of its own, so whatever was moved out can be found by anybody with the same tokens until
its room is needed; blocks that are pinned for a sequence stay. Decides nothing and moves no bytes: ``scheduling``
decides, ``execution`` copies, and this books it. Source: the lessons listed in vLLM's and SGLang's race reports; a
transfer owns its blocks until it has completed, and only then is anything published.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pagedcore.errors import InternalError
from pagedcore.kv_cache.block_pool import BlockPool
from pagedcore.kv_cache.eviction import EvictionPolicy
from pagedcore.kv_cache.memory_snapshot import MemorySnapshot, take_snapshot
from pagedcore.kv_cache.prefix_cache import PrefixCache
from pagedcore.kv_cache.prefix_match import PrefixMatch, contents
from pagedcore.kv_cache.transfers import BlockMove, Direction, Transfer
from pagedcore.sequence import Sequence

if TYPE_CHECKING:
    from pagedcore.kv_cache.block_manager import BlockManager


class HostCache:
    """The host's blocks, pins and transfers of one block manager.

    Invariant: a sequence has at most one transfer that is meant for it, and no table while it has one.
    Invariant: a pinned sequence has no table.
    Invariant: while a transfer that was given up has not ended, none begins, so that a store that stands still costs
        the blocks of what was under way and no others.
    """

    __slots__ = ("_device", "_in_flight", "_num_transfers", "_orphans", "_overdue", "_pins", "_pool", "cache")

    def __init__(self, device: BlockManager, num_blocks: int, policy: EvictionPolicy) -> None:
        self._device = device
        self._pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self._pool, policy)
        self._pins: dict[int, tuple[int, ...]] = {}
        self._in_flight: dict[int, Transfer] = {}
        self._orphans: set[int] = set()
        self._overdue: set[int] = set()
        self._num_transfers = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the host's pool."""
        return self._pool.num_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that are pinned or on their way."""
        return self._pool.num_blocks - self.cache.num_available

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that nobody holds and whose contents can be found."""
        return self._pool.num_idle

    @property
    def pins(self) -> Mapping[int, tuple[int, ...]]:
        """Host blocks kept for sequences, by sequence id."""
        return dict(self._pins)

    @property
    def in_flight(self) -> tuple[Transfer, ...]:
        """Transfers that have not completed."""
        return tuple(self._in_flight.values())

    @property
    def has_awaited(self) -> bool:
        """Whether a transfer is under way that has not been given up."""
        return len(self._in_flight) > len(self._overdue)

    @property
    def is_stuck(self) -> bool:
        """Whether a transfer has been given up and has not ended; the host is then of no use."""
        return bool(self._overdue)

    @property
    def withholds_blocks(self) -> bool:
        """Whether such a transfer keeps device blocks."""
        return any(self._in_flight[transfer_id].device_blocks for transfer_id in self._overdue)

    @property
    def num_leaving_blocks(self) -> int:
        """Device blocks that will be available when the outgoing transfers have completed."""
        return sum(len(one.device_blocks) for one in self._in_flight.values() if one.direction is Direction.OUT)

    def is_moving(self, sequence_id: int) -> bool:
        """Whether a transfer that is meant for this sequence has not completed."""
        return any(
            one.sequence_id == sequence_id and one.transfer_id not in self._orphans
            for one in self._in_flight.values()
        )

    def has_pins(self, sequence_id: int) -> bool:
        """Whether blocks are kept for this sequence."""
        return sequence_id in self._pins

    def num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks of the sequence's first positions that the host does not hold yet."""
        known = contents(self._device.hasher, sequence, num_tokens)
        return sum(self.cache.find(content) is None for content in known)

    def begin_swap_out(self, sequence: Sequence, *, is_pinned: bool) -> Transfer | None:
        """Hand a sequence's table to a transfer to the host, or change nothing when it has too little room or is stuck.

        Args:
            sequence: holds blocks for exactly its computed positions.
            is_pinned: keep the copies for this sequence until it takes them back; else only while there is room.
        """
        if self.is_stuck:
            return None
        num_tokens = sequence.num_computed_tokens
        known = list(contents(self._device.hasher, sequence, num_tokens))
        present = [self.cache.find(content) for content in known]
        held = [block_id for block_id in present if block_id is not None]
        for block_id in held:
            self.cache.hold(block_id)
        fresh = self.cache.allocate(present.count(None))
        if fresh is None:
            self._release(held)
            return None
        self._device.register_all(sequence)
        device_blocks = self._device.take_table(sequence.sequence_id)
        if len(device_blocks) != len(known):
            raise InternalError(f"swap out: {len(device_blocks)} blocks for {num_tokens} positions")
        places = iter(fresh)
        host_blocks = [block_id if block_id is not None else next(places) for block_id in present]
        moves = tuple(
            BlockMove(device_blocks[i], host_blocks[i], known[i]) for i in range(len(known)) if present[i] is None
        )
        return self._begin(
            Direction.OUT, sequence.sequence_id, moves, device_blocks, tuple(host_blocks), num_tokens, is_pinned
        )

    def begin_swap_in(self, sequence: Sequence, match: PrefixMatch) -> Transfer | None:
        """Start to load the host's part of a match, or change nothing when the device has too little room."""
        device, num_shared = self._device.cache, len(match.device_blocks)
        for block_id in match.device_blocks:
            device.hold(block_id)
        fresh = device.allocate(len(match.host_blocks))
        if fresh is None:
            for block_id in reversed(match.device_blocks):
                device.release(block_id)
            return None
        for block_id in match.host_blocks:
            self.cache.hold(block_id)
        known = list(contents(self._device.hasher, sequence, match.num_tokens))[num_shared:]
        moves = tuple(map(BlockMove, match.host_blocks, fresh, known))
        return self._begin(
            Direction.IN, sequence.sequence_id, moves, (*match.device_blocks, *fresh), match.host_blocks,
            match.num_tokens, False,
        )

    def pin(self, sequence_id: int, block_ids: tuple[int, ...]) -> None:
        """Keep blocks that are here for a sequence that has no pins."""
        for block_id in block_ids:
            self.cache.hold(block_id)
        self._pins[sequence_id] = block_ids

    def pin_arriving(self, sequence_id: int) -> int:
        """Keep what is on its way here for a sequence; return how many positions, 0 if nothing is."""
        for one in self._in_flight.values():
            is_its_own = one.sequence_id == sequence_id and one.transfer_id not in self._orphans
            if is_its_own and one.direction is Direction.OUT:
                self._in_flight[one.transfer_id] = replace(one, is_pinned=True)
                return one.num_tokens
        return 0

    def blocks_kept_for(self, sequence_ids: Collection[int]) -> set[int]:
        """Return the blocks that are pinned, or will be when they have arrived, for these sequences."""
        kept = {block_id for sequence_id in sequence_ids for block_id in self._pins.get(sequence_id, ())}
        for one in self._in_flight.values():
            if one.is_pinned and one.sequence_id in sequence_ids and one.transfer_id not in self._orphans:
                kept.update(one.host_blocks)
        return kept

    def abandon(self, sequence_id: int) -> None:
        """Note that a sequence takes nothing back: its pins are free, its transfers complete for nobody."""
        self._release(self._pins.pop(sequence_id, ()))
        self._orphans |= {one.transfer_id for one in self._in_flight.values() if one.sequence_id == sequence_id}

    def give_up(self, transfer_id: int) -> None:
        """Believe a transfer no more: it keeps what it may still write to, what it only reads is free.

        Its sequence goes on without it. What could not be loaded is found on the host no more.

        Raises:
            InternalError: it is not in flight, or was given up before.
        """
        transfer = self._in_flight.get(transfer_id)
        if transfer is None or transfer_id in self._overdue:
            raise InternalError(f"transfer {transfer_id} is not in flight")
        is_out, written = transfer.direction is Direction.OUT, transfer.written_blocks
        kept = replace(transfer, device_blocks=() if is_out else written, host_blocks=written if is_out else ())
        self._in_flight[transfer_id] = kept
        self._overdue.add(transfer_id)
        if not is_out:
            for move in transfer.moves:
                self.cache.discard(move.source)
        self._release([block_id for block_id in transfer.host_blocks if block_id not in kept.host_blocks])
        self._release_on_device([one for one in transfer.device_blocks if one not in kept.device_blocks])
        if transfer_id not in self._orphans:
            self.abandon(transfer.sequence_id)

    def complete(self, transfer_id: int, *, is_ok: bool) -> tuple[Transfer, bool]:
        """Book the end of a transfer; return it, and whether its sequence now has what the transfer was for.

        Raises:
            InternalError: there is no such transfer.
        """
        transfer = self._in_flight.pop(transfer_id, None)
        if transfer is None:
            raise InternalError(f"transfer {transfer_id} is not in flight")
        is_wanted = transfer_id not in self._orphans
        self._orphans.discard(transfer_id)
        if transfer_id in self._overdue:
            self._overdue.discard(transfer_id)
            self._release(transfer.host_blocks)
            self._release_on_device(transfer.device_blocks)
            return transfer, False
        if transfer.direction is Direction.OUT:
            self._arrive_on_host(transfer, is_ok=is_ok, is_wanted=is_wanted)
        else:
            self._arrive_on_device(transfer, is_ok=is_ok, is_wanted=is_wanted)
        return transfer, is_ok and is_wanted

    def snapshot(self) -> MemorySnapshot:
        """Copy the bookkeeping for the checker of invariants."""
        holds = Counter(block_id for blocks in self._pins.values() for block_id in blocks)
        holds.update(block_id for one in self._in_flight.values() for block_id in one.host_blocks)
        return take_snapshot(self._pool, self.cache, holds)

    def _begin(
        self, direction: Direction, sequence_id: int, moves: tuple[BlockMove, ...], device_blocks: tuple[int, ...],
        host_blocks: tuple[int, ...], num_tokens: int, is_pinned: bool,
    ) -> Transfer:
        self._num_transfers += 1
        transfer = Transfer(
            self._num_transfers, direction, sequence_id, moves, device_blocks, host_blocks, num_tokens, is_pinned
        )
        self._in_flight[transfer.transfer_id] = transfer
        return transfer

    def _arrive_on_host(self, transfer: Transfer, *, is_ok: bool, is_wanted: bool) -> None:
        host_blocks = transfer.host_blocks
        if is_ok:
            published = {move.destination: self._publish(move) for move in transfer.moves}
            host_blocks = tuple(published.get(block_id, block_id) for block_id in host_blocks)
        if is_ok and is_wanted and transfer.is_pinned:
            self._pins[transfer.sequence_id] = host_blocks
        else:
            self._release(host_blocks)
        self._release_on_device(transfer.device_blocks)

    def _publish(self, move: BlockMove) -> int:
        """Register a block that has arrived; return the one that can be found from now on, with the reference to it."""
        self.cache.register(move.destination, move.content)
        found = self.cache.find(move.content)
        if found is None or found == move.destination:
            return move.destination
        # Why: somebody else's transfer of the same block came first; the copy that nobody finds is of no use.
        self.cache.hold(found)
        self.cache.release(move.destination)
        return found

    def _arrive_on_device(self, transfer: Transfer, *, is_ok: bool, is_wanted: bool) -> None:
        device, num_shared = self._device.cache, len(transfer.device_blocks) - len(transfer.moves)
        num_registered = num_shared
        for move in transfer.moves:
            if is_ok and device.register(move.destination, move.content):
                num_registered += len(move.content.token_ids) == self._device.block_size
            if not is_ok:
                # Why: what could not be read once is not tried again; the sequence computes it instead.
                self.cache.discard(move.source)
        if is_ok and is_wanted:
            self._device.give_table(transfer.sequence_id, transfer.device_blocks, num_registered)
        else:
            self._release_on_device(transfer.device_blocks)
        self._release(transfer.host_blocks)
        if is_wanted:
            self._release(self._pins.pop(transfer.sequence_id, ()))

    def _release(self, host_blocks: tuple[int, ...] | list[int]) -> None:
        for block_id in reversed(host_blocks):
            self.cache.release(block_id)

    def _release_on_device(self, device_blocks: tuple[int, ...] | list[int]) -> None:
        for block_id in reversed(device_blocks):
            self._device.cache.release(block_id)
