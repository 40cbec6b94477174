"""The state laws of scheduler and cache, as a pure check of an immutable snapshot.

``EngineConfig(check_invariants=True)`` checks them after every step: in tests, and where a user reports a bug.
Otherwise no engine imports this file. What the slots of the blocks hold is checked by ``shadow``.

    S1   free blocks + idle blocks + referenced blocks = all blocks, on the device and on the host
    S2   a block's reference count is the number of tables, transfers, pins and copies it is in
    S3   the free list has no duplicates and only blocks without references or contents
    S4   a block is in two tables only where both sequences may share and are equal up to its end
    S5   a table has exactly the blocks of the computed positions, in flight those of the reserved ones
    S6   a sequence is in exactly one place, its status says which, and only those in a place have a table or
         pins; a finished one that is parked has pins too
    S7   a sequence has a table, or pins on the host, or a transfer in flight, and never two of these; only one whose
         first step is in flight keeps its pins until it is committed
    S8   keys and cached blocks are one to one, every cached block's parent is cached, and every idle block is cached
    S9   computed < known while waiting or running; known <= allowed; known tokens never change
    S10  waiting sequences that never started, and running ones, are within their bounds
    S11  of a model that keeps states, on the device and on the host: a state block's references are the sequences that
         have it or write it and the transfers that it is part of; one that is free, or kept for nobody, has none; no
         step reads and writes one, nor writes it twice; a kept one has the key of a cached block; a sequence has a
         state exactly if it has a table and computed positions, and one on the host exactly if it has pins there
    S12  of a model with windows: a window block's references are the sequences that hold it and the copies that read
         it; one that is free, or stays with a cached block, has none; between steps a sequence holds the window blocks
         of what its next token reads, and of one block more at most
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedcore.errors import InternalError
from pagedcore.kv_cache.memory_snapshot import BlockSnapshot, MemorySnapshot, StateSnapshot
from pagedcore.requests.observers import EngineObserver
from pagedcore.sequence import Sequence, SequenceStatus

if TYPE_CHECKING:
    from pagedcore.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class SequenceState:
    """The part of one sequence that the laws are about."""

    sequence_id: int
    status: SequenceStatus
    token_ids: tuple[int, ...]
    num_computed_tokens: int
    max_total_tokens: int
    cache_root: bytes = b""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Scheduler and cache at one moment, as plain values."""

    blocks: BlockSnapshot
    waiting: tuple[SequenceState, ...]
    running: tuple[SequenceState, ...]
    moving: frozenset[int]
    """Sequences with a transfer in flight."""
    reserved: Mapping[int, int]
    """Positions that the step in flight reserved up to, by sequence id."""
    num_never_started: int
    max_num_waiting: int
    max_num_seqs: int
    parked: frozenset[int] = frozenset()
    """Sequences that may have pins on the host although they neither wait nor run."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One law that does not hold."""

    law: str
    what: str


def snapshot(scheduler: Scheduler) -> Snapshot:
    """Copy everything that the laws are about."""
    host = scheduler.kv_cache.host
    return Snapshot(
        blocks=scheduler.kv_cache.bookkeeping(),
        waiting=_states(scheduler.waiting),
        running=_states(scheduler.running),
        moving=frozenset(filter(host.is_moving, [one.sequence_id for one in host.in_flight.values()])),
        reserved={row.sequence.sequence_id: row.end for row in scheduler.rows_in_flight},
        num_never_started=scheduler.waiting.num_never_started,
        max_num_waiting=scheduler.waiting.limit,
        max_num_seqs=scheduler.rules.max_num_seqs,
        parked=frozenset(scheduler.moves.parked),
    )


class InvariantChecker(EngineObserver):
    """Checks the laws of one scheduler after every step, also those about what must not change in between."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._before: Snapshot | None = None

    def step_ended(self) -> None:
        """Raise as ``check``."""
        self.check()

    def check(self, *further: Violation) -> None:
        """Raise ``InternalError`` with every law that is broken now, and with what else was found."""
        now = snapshot(self._scheduler)
        violations, self._before = [*check(now, self._before), *further], now
        if violations:
            broken = "; ".join(f"{one.law}: {one.what}" for one in violations)
            raise InternalError(f"broken laws of scheduler and cache: {broken}")


def check(now: Snapshot, before: Snapshot | None = None) -> list[Violation]:
    """List every broken law, S1 first; ``before`` is an earlier snapshot, for what must not have changed."""
    laws = (_s1(now), _s2(now), _s3(now), _s4(now), _s5(now), _s6(now), _s7(now), _s8(now), _s9(now, before), _s10(now),
            _s11(now), _s12(now))
    return [violation for law in laws for violation in law]


def _states(sequences: Iterable[Sequence]) -> tuple[SequenceState, ...]:
    return tuple(
        SequenceState(
            s.sequence_id, s.status, tuple(s.token_ids), s.num_computed_tokens, s.max_total_tokens, s.block_root
        )
        for s in sequences
    )


def _memories(now: Snapshot) -> Iterator[tuple[str, MemorySnapshot]]:
    yield "", now.blocks.device
    if now.blocks.host is not None:
        yield "host ", now.blocks.host


def _s1(now: Snapshot) -> Iterator[Violation]:
    for where, memory in _memories(now):
        num_free, num_idle = len(set(memory.free_blocks)), len(memory.idle_blocks)
        num_referenced = sum(count > 0 for count in memory.reference_counts)
        if num_free + num_idle + num_referenced != len(memory.reference_counts):
            what = f"{num_free} free + {num_idle} idle + {num_referenced} referenced of {len(memory.reference_counts)}"
            yield Violation("S1", f"{what} {where}blocks")


def _s2(now: Snapshot) -> Iterator[Violation]:
    for where, memory in _memories(now):
        for block, count in enumerate(memory.reference_counts):
            if count != (held := memory.holders.get(block, 0)):
                yield Violation("S2", f"{where}block {block} has {count} references and {held} holders")


def _s3(now: Snapshot) -> Iterator[Violation]:
    for where, memory in _memories(now):
        for block, times in Counter(memory.free_blocks).items():
            if times > 1:
                yield Violation("S3", f"{where}block {block} is {times} times in the free list")
            if (count := memory.reference_counts[block]) > 0:
                yield Violation("S3", f"{where}block {block} is free and has {count} references")
            if block in memory.idle_blocks:
                yield Violation("S3", f"{where}block {block} is free and idle")


def _s4(now: Snapshot) -> Iterator[Violation]:
    known = {state.sequence_id: (state.cache_root, state.token_ids) for state in now.waiting + now.running}
    contents: dict[int, tuple[bytes, tuple[int, ...]]] = {}
    for sequence_id, table in now.blocks.tables.items():
        root, tokens = known.get(sequence_id, (b"", ()))
        for place, block in enumerate(table):
            content = root, tokens[: (place + 1) * now.blocks.block_size]
            if contents.setdefault(block, content) != content:
                yield Violation("S4", f"block {block} of sequence {sequence_id} holds other tokens in another table")


def _s5(now: Snapshot) -> Iterator[Violation]:
    for state in now.waiting + now.running:
        positions = max(state.num_computed_tokens, now.reserved.get(state.sequence_id, 0))
        needed = -(-positions // now.blocks.block_size)
        held = len(now.blocks.tables.get(state.sequence_id, ()))
        if held != needed:
            yield Violation("S5", f"sequence {state.sequence_id} has {held} blocks for {positions} positions")


def _s6(now: Snapshot) -> Iterator[Violation]:
    places = Counter(state.sequence_id for state in now.waiting + now.running)
    for sequence_id, times in places.items():
        if times > 1:
            yield Violation("S6", f"sequence {sequence_id} is in {times} places")
    for sequence_id in now.blocks.tables.keys() - places.keys():
        yield Violation("S6", f"sequence {sequence_id} has blocks and neither waits nor runs")
    for sequence_id in now.blocks.pins.keys() - places.keys() - now.parked:
        yield Violation("S6", f"sequence {sequence_id} has pins on the host and neither waits, runs nor is parked")
    for place, states in ((SequenceStatus.WAITING, now.waiting), (SequenceStatus.RUNNING, now.running)):
        for state in states:
            if state.status is not place:
                yield Violation("S6", f"sequence {state.sequence_id} is {state.status.value} among the {place.value}")


def _s7(now: Snapshot) -> Iterator[Violation]:
    starting = {state.sequence_id for state in now.waiting} & now.reserved.keys()
    for sequence_id in (now.blocks.tables.keys() & now.blocks.pins.keys()) - starting:
        yield Violation("S7", f"sequence {sequence_id} has a table and pins on the host")
    for sequence_id in now.blocks.tables.keys() & now.moving:
        yield Violation("S7", f"sequence {sequence_id} has a table and a transfer in flight")


def _s8(now: Snapshot) -> Iterator[Violation]:
    for where, memory in _memories(now):
        cached = memory.registered
        blocks = Counter(one.block_id for one in cached.values())
        for block, times in blocks.items():
            if times > 1:
                yield Violation("S8", f"{where}block {block} is cached under {times} keys")
            if block in memory.free_blocks:
                yield Violation("S8", f"{where}block {block} is free and its contents can be found")
        for block in memory.idle_blocks - blocks.keys():
            yield Violation("S8", f"{where}block {block} is idle and its contents cannot be found")
        for one in cached.values():
            if not one.is_first and one.parent_key not in cached:
                yield Violation("S8", f"{where}block {one.block_id} is cached and its parent is not")


def _s9(now: Snapshot, before: Snapshot | None) -> Iterator[Violation]:
    known_before = {state.sequence_id: state.token_ids for state in before.waiting + before.running} if before else {}
    for state in now.waiting + now.running:
        num_known, computed = len(state.token_ids), state.num_computed_tokens
        if not 0 <= computed < num_known:
            yield Violation("S9", f"sequence {state.sequence_id}: {computed} computed of {num_known} known tokens")
        if num_known > state.max_total_tokens:
            yield Violation("S9", f"sequence {state.sequence_id}: {num_known} tokens of {state.max_total_tokens}")
        earlier = known_before.get(state.sequence_id, ())
        if state.token_ids[: len(earlier)] != earlier:
            yield Violation("S9", f"sequence {state.sequence_id}: known tokens have changed")


def _s10(now: Snapshot) -> Iterator[Violation]:
    if now.num_never_started > now.max_num_waiting:
        yield Violation("S10", f"{now.num_never_started} new sequences wait, the bound is {now.max_num_waiting}")
    if len(now.running) > now.max_num_seqs:
        yield Violation("S10", f"{len(now.running)} sequences run, the bound is {now.max_num_seqs}")


def _s11(now: Snapshot) -> Iterator[Violation]:
    if (states := now.blocks.states) is None:
        return
    yield from _broken_states(states, now.blocks.device, "")
    if now.blocks.host is not None and now.blocks.host_states is not None:
        yield from _broken_states(now.blocks.host_states, now.blocks.host, "host ")
        for number in now.blocks.host_states.current.keys() ^ now.blocks.pins.keys():
            yield Violation("S11", f"sequence {number} has pins on the host and no state there, or a state alone")
    has_state = {one.sequence_id for one in now.waiting + now.running if one.num_computed_tokens}
    starting = now.reserved.keys() - has_state
    for number in (states.current.keys() - starting) ^ has_state:
        yield Violation("S11", f"sequence {number} has a state without computed positions, or these without a state")
    for number in (states.current.keys() | states.written.keys()) - now.blocks.tables.keys():
        yield Violation("S11", f"sequence {number} has a state and no table")
    for number in states.written.keys() - now.reserved.keys():
        yield Violation("S11", f"sequence {number} writes a state and is in no step")


def _broken_states(states: StateSnapshot, memory: MemorySnapshot, where: str) -> Iterator[Violation]:
    holds, written = Counter(states.current.values()), Counter(states.written.values())
    kept, free = {one.state_id for one in states.kept.values()}, Counter(states.free_blocks)
    num_states = len(states.reference_counts)
    if not {*holds, *written, *kept, *free, *states.idle_blocks} <= set(range(num_states)):
        yield Violation("S11", f"a {where}state is none of the {num_states} there are")
    for state_id, count in enumerate(states.reference_counts):
        num_holders = holds[state_id] + written[state_id] + states.moving.get(state_id, 0)
        if count != num_holders:
            yield Violation("S11", f"{where}state {state_id} has {count} references and {num_holders} holders")
        if written[state_id] and (num_holders > 1 or state_id in kept):
            yield Violation("S11", f"{where}state {state_id} is written and is found, read or written elsewhere")
        is_free, is_idle = free[state_id], state_id in states.idle_blocks
        if is_free + is_idle + (count > 0) != 1 or (is_idle and state_id not in kept) or (is_free and state_id in kept):
            yield Violation("S11", f"{where}state {state_id} is not either free, kept or held")
    for key, one in states.kept.items():
        if key not in memory.registered:
            yield Violation("S11", f"{where}state {one.state_id} is kept and the KV before it is not")


def _s12(now: Snapshot) -> Iterator[Violation]:
    if (windows := now.blocks.windows) is None:
        return
    free, cached = Counter(windows.free_blocks), {one.block_id for one in now.blocks.device.registered.values()}
    for one, count in enumerate(windows.reference_counts):
        if count != (held := windows.holders.get(one, 0)):
            yield Violation("S12", f"window block {one} has {count} references and {held} holders")
        if free[one] + (one in windows.idle_blocks) + (count > 0) != 1:
            yield Violation("S12", f"window block {one} is not either free, kept or held")
    for one, block in windows.kept.items():
        if one not in windows.idle_blocks or block not in cached or windows.of_block[block] != one:
            yield Violation("S12", f"window block {one} is kept for block {block}, which is not cached with it")
    size = now.blocks.block_size
    for state in now.waiting + now.running:
        table = now.blocks.tables.get(state.sequence_id)
        if table is None or not state.num_computed_tokens:
            continue
        read, passed = state.num_computed_tokens + 1 - windows.window, windows.passed.get(state.sequence_id, 0)
        if passed > max(0, read) // size or (
                state.sequence_id not in now.reserved and passed < max(0, read - 1) // size):
            yield Violation("S12", f"sequence {state.sequence_id} has passed {passed} blocks and reads from {read} on")
        if any(windows.of_block[block] < 0 for block in table[passed:]):
            yield Violation("S12", f"sequence {state.sequence_id} has a block without a window block")
