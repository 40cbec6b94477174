"""Shadow tags: what every KV slot should hold, kept beside the memories, moved with the bytes, compared at every read.

A tag is written when a step has computed its slot, follows the block through copies, swaps and files, and is compared
with what the reading sequence expects before each forward; a state of recurrent layers has the tag of its last
position. Blocks that are freed, or given to a new owner, are filled
with NaN, so that a kernel that reads them shows it. ``check_invariants=True`` builds this; no other engine imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListOf
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedcore.analysis.diagnosis.invariants import InvariantChecker, Violation
from pagedcore.errors import InternalError
from pagedcore.execution.model_runner import ModelRunner
from pagedcore.kv_cache.hybrid_blocks import HybridBlocks
from pagedcore.kv_cache.windowed_blocks import WindowedBlocks
from pagedcore.sequence import Sequence

if TYPE_CHECKING:
    import torch

    from pagedcore.execution.sampler import SampledTokens
    from pagedcore.kv_cache.block_manager import BlockManager
    from pagedcore.protocols import CacheStore, StateStore, WindowStore
    from pagedcore.scheduler.plan import ScheduledRow
    from pagedcore.scheduler.scheduler import Scheduler

Tags = npt.NDArray[np.int64]
"""Shape [..., 3]: cache root, position, and digest of all tokens up to there."""
_NOTHING: Final = (0, -1, 0)
_FOREIGN: Final = (0, -2, 0)
"""Of bytes from another process, whose file is what proves them."""
_ANY_ROOT: Final = 0
_MOST_READ: Final = 4096
"""Blocks that were read and whose tags are known if they are written again; older ones count as another process's."""
_NAN: Final = 0xFF
"""Of these bytes, every number is NaN in float32, bfloat16, float16 and float8; of integers, the scale is."""
_Pairs = ListOf[tuple[int, int]]


class ShadowTags:
    """The tags of all slots of the device and of the host, and the violations that were found.

    Invariant: the tags of a free block say that it holds nothing.
    """

    def __init__(
        self, num_blocks: int, num_host_blocks: int, block_size: int, num_states: int = 0, num_host_states: int = 0
    ) -> None:
        self.block_size = block_size
        self.states: Tags = np.full((num_states, 3), _NOTHING)
        self.host_states: Tags = np.full((num_host_states, 3), _NOTHING)
        self.device: Tags = np.full((num_blocks, block_size, 3), _NOTHING)
        self.host: Tags = np.full((num_host_blocks, block_size, 3), _NOTHING)
        self.violations: list[Violation] = []
        self.digests: dict[int, list[int]] = {}
        """Of all tokens up to each position, by sequence id."""

    def expected(self, sequence: Sequence, start: int, end: int, drafts: tuple[int, ...] = ()) -> Tags:
        """Return the tags of a sequence's positions, shape [end - start, 3], the last of which are of drafts."""
        digests = self.digests.setdefault(sequence.sequence_id, [])
        for token_id in sequence.token_ids[len(digests) : end]:
            digests.append(hash((digests[-1] if digests else 0, token_id)))
        if drafts:
            digests = digests[: end - len(drafts)]
            for token_id in drafts:
                digests.append(hash((digests[-1], token_id)))
        tags = np.full((end - start, 3), hash(sequence.block_root) or 1)
        tags[:, 1], tags[:, 2] = np.arange(start, end), digests[start:end]
        return tags

    def write(self, table: npt.NDArray[np.int32], start: int, tags: Tags | tuple[int, int, int], end: int) -> None:
        """Tag the slots of positions ``start`` to ``end``."""
        positions = np.arange(start, end)
        self.device[table[positions // self.block_size], positions % self.block_size] = tags

    def check_read(self, sequence: Sequence, table: npt.NDArray[np.int32], end: int, start: int = 0) -> None:
        """Record a violation if a slot from ``start`` to ``end`` has another tag than the sequence expects."""
        positions = np.arange(start, end)
        found = self.device[table[positions // self.block_size], positions % self.block_size]
        same = found == (wanted := self.expected(sequence, start, end))
        same[:, 0] |= found[:, 0] == _ANY_ROOT
        wrong = np.flatnonzero(~same.all(axis=1) & (found[:, 1] != _FOREIGN[1]))
        if len(wrong):
            place = int(wrong[0])
            position, block = start + place, int(table[(start + place) // self.block_size])
            self.violations.append(Violation(
                "tags", f"sequence {sequence.sequence_id} reads position {position} in block {block}, "
                f"which holds {_describe(found[place], wanted[place])}",
            ))

    def check_state(self, sequence: Sequence, state_id: int, end: int) -> None:
        """Record a violation if a state is not that of a sequence's first ``end`` positions."""
        found, wanted = self.states[state_id], self.expected(sequence, end - 1, end)[0]
        is_known = found[0] in (_ANY_ROOT, wanted[0]) and (found[1:] == wanted[1:]).all()
        if not is_known and found[1] != _FOREIGN[1]:
            self.violations.append(Violation(
                "tags", f"sequence {sequence.sequence_id} goes on at position {end} from state {state_id}, which is "
                f"behind {_describe(found, wanted)}",
            ))

    def keep(self, sequence_ids: Iterable[int]) -> None:
        """Forget what is known of all other sequences; it is computed again if one comes back."""
        kept = {one: self.digests[one] for one in sequence_ids if one in self.digests}
        self.digests.clear()
        self.digests.update(kept)


def _describe(found: Tags, wanted: Tags) -> str:
    if found[1] == _NOTHING[1]:
        return "nothing"
    if found[0] not in (_ANY_ROOT, wanted[0]):
        return f"position {found[1]} of another cache root"
    return f"position {found[1]}" if found[1] != wanted[1] else "this position of other tokens"


class ShadowStore:
    """A ``CacheStore`` that moves the tags with the bytes of another one, and poisons blocks. Over a ``WindowStore``
    it is one.
    """

    def __init__(self, store: Any, tags: ShadowTags) -> None:
        self._store, self._tags = store, tags
        self._moving: dict[int, tuple[Tags, list[int], Tags]] = {}
        self._read: dict[bytes, Tags] = {}
        self._is_poisoned = np.ones(len(tags.device), dtype=np.bool_)
        """Blocks that need no poison: those that have some, and those that never held anything."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        num_bytes: int = self._store.block_bytes
        return num_bytes

    def allocate_host(self, num_blocks: int) -> None:
        """Pass it on."""
        self._store.allocate_host(num_blocks)

    def copy_blocks(self, pairs: _Pairs) -> None:
        """Copy device blocks and their tags."""
        self.poison(destination for _, destination in pairs)
        self._store.copy_blocks(pairs)
        for source, destination in pairs:
            self._tags.device[destination] = self._tags.device[source]
            self._is_poisoned[destination] = self._is_poisoned[source]

    def start_swap_out(self, transfer_id: int, pairs: _Pairs) -> None:
        """Begin to copy device blocks to host blocks; they have no tags until that has ended."""
        self._start(self._store.start_swap_out, transfer_id, pairs, self._tags.device, self._tags.host)

    def start_swap_in(self, transfer_id: int, pairs: _Pairs) -> None:
        """Begin to copy host blocks to device blocks; they have no tags until that has ended."""
        self.poison(destinations := [destination for _, destination in pairs])
        self._is_poisoned[destinations] = False
        self._start(self._store.start_swap_in, transfer_id, pairs, self._tags.host, self._tags.device)

    def _start(
        self, begin: Callable[[int, _Pairs], None], transfer_id: int, pairs: _Pairs, source: Tags, destination: Tags
    ) -> None:
        sources, destinations = [one for one, _ in pairs], [other for _, other in pairs]
        # Why now: the blocks that are read may get another owner before a late end.
        self._moving[transfer_id] = destination, destinations, source[sources]
        destination[destinations] = _NOTHING
        begin(transfer_id, pairs)

    def poll_transfers(self, *, wait: bool) -> list[tuple[int, bool]]:
        """Return the ended transfers; the tags of those that succeeded have arrived."""
        ended = list(self._store.poll_transfers(wait=wait))
        for transfer_id, is_ok in ended:
            memory, blocks, tags = self._moving.pop(transfer_id, (self._tags.host, [], self._tags.host[:0]))
            memory[blocks] = tags if is_ok else _NOTHING
        return ended

    def read_blocks(self, block_ids: ListOf[int]) -> npt.NDArray[np.uint8]:
        """Return the bytes of device blocks, and remember their tags until they are written again."""
        return self._remember(self._store.read_blocks(block_ids), self._tags.device[list(block_ids)])

    def read_host_blocks(self, block_ids: ListOf[int]) -> npt.NDArray[np.uint8]:
        """Do the same for host blocks."""
        return self._remember(self._store.read_host_blocks(block_ids), self._tags.host[list(block_ids)])

    def write_blocks(self, block_ids: ListOf[int], contents: npt.NDArray[np.uint8]) -> None:
        """Overwrite device blocks; bytes that were read here have the same tags, for whichever root reads them now."""
        self._store.write_blocks(block_ids, contents)
        for block_id, block in zip(block_ids, contents, strict=True):
            self._tags.device[block_id] = self._read.get(_digest(block), _FOREIGN)
            self._is_poisoned[block_id] = False

    def divide(self, blocks: npt.NDArray[np.uint8]) -> ListOf[npt.NDArray[np.uint8]]:
        """Pass it on."""
        divided: ListOf[npt.NDArray[np.uint8]] = self._store.divide(blocks)
        return divided

    def poison(self, block_ids: Iterable[int]) -> None:
        """Fill device blocks with NaN that hold something; their tags say that they hold nothing."""
        dirty = [block_id for block_id in block_ids if not self._is_poisoned[block_id]]
        if dirty:
            self._store.write_blocks(dirty, np.full((len(dirty), self.block_bytes), _NAN, dtype=np.uint8))
        self._is_poisoned[dirty] = True
        self._tags.device[dirty] = _NOTHING

    def note_written(self, block_ids: npt.NDArray[np.int32]) -> None:
        """Note that a step writes to these blocks."""
        self._is_poisoned[block_ids] = False

    def _remember(self, contents: npt.NDArray[np.uint8], tags: Tags) -> npt.NDArray[np.uint8]:
        tags[..., 0] = _ANY_ROOT
        for block, own in zip(contents, tags, strict=True):
            known = self._read.setdefault(_digest(block), own)
            if not np.array_equal(known, own):
                # Why: equal bytes of different tokens tell nothing.
                known[...] = _FOREIGN
        while len(self._read) > _MOST_READ:
            del self._read[next(iter(self._read))]
        return contents


class ShadowStates:
    """A ``StateStore`` that moves the tags with the bytes of another one, and poisons states."""

    def __init__(self, store: StateStore, tags: ShadowTags) -> None:
        self._store, self._tags = store, tags
        self._read: dict[bytes, Tags] = {}

    def allocate_host(self, num_states: int) -> None:
        """Pass it on."""
        self._store.allocate_host(num_states)

    def swap_out(self, pairs: _Pairs) -> None:
        """Copy states to the host, with their tags."""
        self._move(self._store.swap_out, pairs, self._tags.states, self._tags.host_states)

    def swap_in(self, pairs: _Pairs) -> None:
        """Copy states from the host, with their tags."""
        self._move(self._store.swap_in, pairs, self._tags.host_states, self._tags.states)

    def _move(self, move: Callable[[_Pairs], None], pairs: _Pairs, source: Tags, destination: Tags) -> None:
        # Why first: of copies that fail half-way nothing is known.
        destination[[there for _, there in pairs]] = _NOTHING
        move(pairs)
        for here, there in pairs:
            destination[there] = source[here]

    def read_states(self, state_ids: ListOf[int]) -> npt.NDArray[np.uint8]:
        """Return the bytes of states, and remember their tags until they are written again."""
        return self._remember(self._store.read_states(state_ids), self._tags.states, state_ids)

    def read_host_states(self, state_ids: ListOf[int]) -> npt.NDArray[np.uint8]:
        """Do the same for states of the host."""
        return self._remember(self._store.read_host_states(state_ids), self._tags.host_states, state_ids)

    def _remember(self, contents: npt.NDArray[np.uint8], tags: Tags, state_ids: ListOf[int]) -> npt.NDArray[np.uint8]:
        for state, state_id in zip(contents, state_ids, strict=True):
            self._read[_digest(state)] = np.array([_ANY_ROOT, *tags[state_id, 1:]])
        while len(self._read) > _MOST_READ:
            del self._read[next(iter(self._read))]
        return contents

    def write_states(self, state_ids: ListOf[int], contents: npt.NDArray[np.uint8]) -> None:
        """Overwrite states; bytes that were read here have the same tags."""
        self._store.write_states(state_ids, contents)
        for state_id, state in zip(state_ids, contents, strict=True):
            self._tags.states[state_id] = self._read.get(_digest(state), _FOREIGN)

    def poison(self, state_ids: ListOf[int]) -> None:
        """Fill states with NaN that hold something; their tags say that they hold nothing."""
        dirty = [one for one in state_ids if self._tags.states[one, 1] != _NOTHING[1]]
        if dirty:
            self._store.write_states(dirty, np.full_like(self._store.read_states(dirty), _NAN))
        self._tags.states[dirty] = _NOTHING


def _digest(block: npt.NDArray[np.uint8]) -> bytes:
    return blake2b(block.tobytes(), digest_size=16).digest()


class ShadowWindows(NamedTuple):
    """The tags of window blocks, and what moves these."""

    tags: ShadowTags
    store: ShadowStore


class ShadowRunner(ModelRunner):
    """A ``ModelRunner`` that compares the tags of what a step reads, and tags what it has computed."""

    def __init__(
        self, runner: ModelRunner, tags: ShadowTags, store: ShadowStore | None, states: ShadowStates | None,
        windows: ShadowWindows | None,
    ) -> None:
        self.__dict__.update(vars(runner))
        self._tags, self._store, self._states, self._windows = tags, store, states, windows

    def execute(self, rows: ListOf[ScheduledRow], block_manager: BlockManager) -> SampledTokens:
        """Compute ``rows``. Raises as ``ModelRunner.execute``, and ``InternalError`` before a wrong slot is read."""
        tag = self._begin(rows, block_manager)
        sampled = super().execute(rows, block_manager)
        tag()
        return sampled

    def launch(self, rows: ListOf[ScheduledRow], block_manager: BlockManager) -> torch.Tensor:
        """Begin to compute ``rows``. Raises as ``ModelRunner.launch``, and as ``execute``."""
        self._tag_launched = self._begin(rows, block_manager)
        return super().launch(rows, block_manager)

    def choose(self, logits: torch.Tensor, rows: ListOf[ScheduledRow]) -> Callable[[], SampledTokens]:
        """As ``ModelRunner.choose``; by now all tokens are known that were computed."""
        self._tag_launched()
        return super().choose(logits, rows)

    def _begin(self, rows: ListOf[ScheduledRow], block_manager: BlockManager) -> Callable[[], None]:
        """Check what rows read; return what tags what they have computed, but for sequences that have ended."""
        # Why copies: tables of sequences that end meanwhile are cut.
        tables = [one.block_ids.copy() for one in block_manager.tables(row.sequence.sequence_id for row in rows)]
        for row, table in zip(rows, tables, strict=True):
            _prepare(row, table, self._tags, self._store)
        of_windows = list[npt.NDArray[np.int32]]()
        if isinstance(block_manager, WindowedBlocks) and self._windows is not None:
            of_windows = [block_manager.windows.of_block[table] for table in tables]
            for row, table in zip(rows, of_windows, strict=True):
                _prepare(row, table, *self._windows, max(0, row.start + 1 - block_manager.window))
        written = self._prepare_states(rows, block_manager) if isinstance(block_manager, HybridBlocks) else []
        if self._tags.violations:
            raise InternalError("; ".join(one.what for one in self._tags.violations))

        def tag() -> None:
            for place, (row, table) in enumerate(zip(rows, tables, strict=True)):
                if row.sequence.finish_reason is not None:
                    continue
                tags = self._tags.expected(row.sequence, row.start, row.end, row.drafts)
                self._tags.write(table, row.start, tags, row.end)
                if of_windows and self._windows is not None:
                    self._windows.tags.write(of_windows[place], row.start, tags, row.end)
                if written:
                    self._tags.states[written[place]] = tags[-1]

        return tag

    def _prepare_states(self, rows: ListOf[ScheduledRow], blocks: HybridBlocks) -> list[int]:
        """Check the states that a step reads; return those that it writes."""
        written = [blocks.states.written[row.sequence.sequence_id] for row in rows]
        for row in rows:
            if row.start:
                self._tags.check_state(row.sequence, blocks.states.current[row.sequence.sequence_id], row.start)
        if self._states is not None:
            self._states.poison(written)
        self._tags.states[written] = _NOTHING
        return written


def _prepare(
    row: ScheduledRow, table: npt.NDArray[np.int32], tags: ShadowTags, store: ShadowStore | None, first: int = 0
) -> None:
    """Check what a row reads, from a position on."""
    block_size = tags.block_size
    tags.check_read(row.sequence, table, row.start, first)
    if store is not None:
        store.poison(table[-(-row.start // block_size) :].tolist())
        store.note_written(table[row.start // block_size :])
    # Why: a step that fails half-way leaves slots of which nothing is known.
    tags.write(table, row.start, _NOTHING, row.end)


class ShadowChecker(InvariantChecker):
    """Checks the laws and the tags after every step, and poisons what is free."""

    def __init__(
        self, scheduler: Scheduler, tags: ShadowTags, store: ShadowStore | None, states: ShadowStates | None,
        windows: ShadowWindows | None,
    ) -> None:
        super().__init__(scheduler)
        self._tags, self._store, self._states, self._windows = tags, store, states, windows

    def check(self, *further: Violation) -> None:
        """Raise ``InternalError`` with every law that is broken now, and every wrong read since the last check."""
        super().check(*self._tags.violations, *further)
        assert self._before is not None  # Invariant: the laws were just checked
        blocks, device = self._before.blocks, list(self._before.blocks.device.free_blocks)
        if self._store is not None:
            self._store.poison(device)
        self._tags.device[device] = _NOTHING
        if blocks.host is not None:
            self._tags.host[list(blocks.host.free_blocks)] = _NOTHING
        if blocks.host_states is not None:
            self._tags.host_states[list(blocks.host_states.free_blocks)] = _NOTHING
        if blocks.states is not None and self._states is not None:
            self._states.poison(blocks.states.free_blocks)
        if blocks.windows is not None and self._windows is not None:
            self._windows.store.poison(blocks.windows.free_blocks)
        self._tags.keep(state.sequence_id for state in self._before.waiting + self._before.running)


def shadow(
    scheduler: Scheduler, store: CacheStore | None, states: StateStore | None, windows: WindowStore | None,
    runner: ModelRunner,
) -> tuple[CacheStore | None, StateStore | None, WindowStore | None, ModelRunner, InvariantChecker]:
    """Return the stores and the runner with tags beside them, and what checks both after every step."""
    device, host = scheduler.kv_cache.device, scheduler.kv_cache.host
    num_states = device.states.num_states if isinstance(device, HybridBlocks) else 0
    tags = ShadowTags(device.num_blocks, host.num_blocks, device.block_size, num_states, host.states.num_states)
    shadowed = ShadowStore(store, tags) if store is not None else None
    shadowed_states = ShadowStates(states, tags) if states is not None else None
    shadowed_windows = None
    if windows is not None and isinstance(device, WindowedBlocks):
        own = ShadowTags(device.windows.num_windows, 0, device.block_size)
        own.violations, own.digests = tags.violations, tags.digests
        shadowed_windows = ShadowWindows(own, ShadowStore(windows, own))
    return (shadowed, shadowed_states, shadowed_windows.store if shadowed_windows is not None else windows,
            ShadowRunner(runner, tags, shadowed, shadowed_states, shadowed_windows),
            ShadowChecker(scheduler, tags, shadowed, shadowed_states, shadowed_windows))
