"""The host's blocks, the sequences they are pinned for, and the transfers between host and device.

A transfer holds a reference to every block it reads or writes until it has completed, in time, late or failed.
Contents are registered when they have arrived. A transfer that takes too long is timed out: it keeps the blocks that
it may still write to, and its result is discarded. Source: the state machine of vLLM's KV offloading and the race
reports about it and SGLang's (prepare, complete, publish).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from collections.abc import Sequence as ListOf
from copy import copy
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, count
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from pagedcore.errors import InternalError
from pagedcore.kv_cache.eviction import EvictionPolicy
from pagedcore.kv_cache.memory_snapshot import MemorySnapshot, StateSnapshot
from pagedcore.kv_cache.prefix_cache import BlockMemory, Content, KeyOf
from pagedcore.kv_cache.state_blocks import StateBlocks

_UNKNOWN: Final = Content(b"", b"", (), True)
_NOTHING_KNOWN: Final[Mapping[int, ListOf[Content]]] = MappingProxyType({})


class Direction(Enum):
    """Which way the bytes go."""

    OUT = "device to host"
    IN = "host to device"


class BlockMove(NamedTuple):
    """One block to copy, and what it holds."""

    source: int
    destination: int
    content: Content


class StateMove(NamedTuple):
    """One state to copy."""

    source: int
    destination: int
    content: Content
    """Of the KV block that ends at its position."""
    end: int
    """That position."""
    num_saved: int
    """As of a ``KeptState``."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies of whole blocks that start together and complete together, and of states, which end as they start."""

    transfer_id: int
    direction: Direction
    sequence_id: int
    moves: tuple[BlockMove, ...]
    device_blocks: tuple[int, ...]
    """All device blocks the transfer holds, in the order of the sequence's positions."""
    host_blocks: tuple[int, ...]
    """All host blocks the transfer holds."""
    num_tokens: int
    """Positions of the sequence that are complete when the transfer is."""
    is_pinned: bool = False
    """Of an outgoing transfer: whether the host keeps the blocks for the sequence until it takes them back."""
    device_states: tuple[int, ...] = ()
    """All state blocks of the device that it holds; none once it was timed out. The last one is the sequence's."""
    host_states: tuple[int, ...] = ()
    """All state blocks of the host that it holds, as many."""
    state_moves: tuple[StateMove, ...] = ()

    @classmethod
    def of(cls, state: ListOf[Any], known: ListOf[Content]) -> Transfer:
        """Make a transfer again of what ``snapshot`` returned, and of what its sequence's blocks hold."""
        number, way, owner, device_blocks, host_blocks, num_tokens, is_pinned, moves, *of_states = state
        at_end = dict(zip(accumulate(len(one.token_ids) for one in known), known, strict=True))
        device_states, host_states, state_moves = of_states or ((), (), ())
        copies = tuple(BlockMove(source, target, at_end.get(end, _UNKNOWN)) for source, target, end in moves)
        return cls(number, Direction(way), owner, copies, tuple(device_blocks), tuple(host_blocks), num_tokens,
                   is_pinned, tuple(device_states), tuple(host_states),
                   tuple(StateMove(source, target, at_end[end], end, saved)
                         for source, target, end, saved in state_moves))

    def snapshot(self, *, is_late: bool) -> list[Any]:
        """Copy it as plain values; what a block holds, as the position up to which it does.

        That is 0 if it is late: what is copied then is not used.
        """
        places = {block_id: place for place, block_id in enumerate(self.device_blocks)}
        last, moves = len(self.device_blocks) - 1, list[list[int]]()
        for move in self.moves:
            place = places.get(move.source if self.direction is Direction.OUT else move.destination, last)
            end = self.num_tokens if place == last else (place + 1) * len(move.content.token_ids)
            moves.append([move.source, move.destination, 0 if is_late else end])
        plain = [self.transfer_id, self.direction.value, self.sequence_id, list(self.device_blocks),
                 list(self.host_blocks), self.num_tokens, self.is_pinned, moves]
        if not self.device_states:
            return plain
        return [*plain, list(self.device_states), list(self.host_states), [
            [one.source, one.destination, one.end, one.num_saved] for one in self.state_moves]]

    @property
    def written_blocks(self) -> tuple[int, ...]:
        """The blocks that it writes to, in the memory that it goes to."""
        return tuple(move.destination for move in self.moves)

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(source, destination) of every copy."""
        return tuple((move.source, move.destination) for move in self.moves)


class HostCache(BlockMemory):
    """Prefix cache, pins and transfers of the host, which has no blocks where the configuration gives it no memory.

    Invariant: a block's references are the pins and transfers it is part of.
    Invariant: a sequence has at most one transfer that is not cancelled.
    Invariant: while a transfer that was timed out has not ended, none begins, so that a store that hangs costs the
        blocks of the transfers in flight and no others.
    Invariant: a state is pinned for a sequence exactly if blocks are, where the model keeps states.
    """

    def __init__(self, num_blocks: int, policy: EvictionPolicy, num_states: int = 0, block_size: int = 1) -> None:
        super().__init__(num_blocks, policy)
        self.states = StateBlocks(num_states, block_size)
        """States beside the blocks, of a model that keeps some; ``current`` are the pinned ones."""
        self._connect_states()
        self.pins: dict[int, tuple[int, ...]] = {}
        """Host blocks kept for sequences, by sequence id; not for changing."""
        self.in_flight: dict[int, Transfer] = {}
        """Transfers that have not completed, by id; not for changing."""
        self._cancelled: set[int] = set()
        self._timed_out: set[int] = set()
        self.transfer_ids = count(1)

    def reset(self) -> None:
        """As ``BlockMemory.reset``; there are no pins and no transfers then."""
        super().reset()
        self.states.reset()
        self._connect_states()
        for collection in (self.pins, self.in_flight, self._cancelled, self._timed_out):
            collection.clear()

    def _connect_states(self) -> None:
        if self.states.num_states:
            self.cache.forget_state = self.states.forget

    @property
    def has_awaited(self) -> bool:
        """Whether a transfer is in flight that has not been timed out."""
        return len(self.in_flight) > len(self._timed_out)

    @property
    def is_stuck(self) -> bool:
        """Whether a transfer has been timed out and has not ended; the host is not used until then."""
        return bool(self._timed_out)

    @property
    def withholds_blocks(self) -> bool:
        """Whether a transfer that was timed out keeps device blocks."""
        return any(self.in_flight[transfer_id].device_blocks for transfer_id in self._timed_out)

    @property
    def num_leaving_blocks(self) -> int:
        """Device blocks that will be available when the outgoing transfers have completed."""
        return sum(len(one.device_blocks) for one in self.in_flight.values() if one.direction is Direction.OUT)

    def is_moving(self, sequence_id: int) -> bool:
        """Whether the sequence has a transfer in flight that is not cancelled."""
        return self._transfer_of(sequence_id) is not None

    def pin(self, sequence_id: int, block_ids: tuple[int, ...], state: int = -1) -> None:
        """Keep blocks that the host holds for a sequence that has no pins, and the state behind them if there is one.
        """
        self.hold_blocks(block_ids)
        self.pins[sequence_id] = block_ids
        if state >= 0:
            self.states.give(sequence_id, state)

    def pin_arriving(self, sequence_id: int) -> int:
        """Keep the blocks of a sequence's outgoing transfer for it; return how many positions, 0 without one."""
        transfer = self._transfer_of(sequence_id)
        if transfer is None or transfer.direction is Direction.IN:
            return 0
        self.in_flight[transfer.transfer_id] = replace(transfer, is_pinned=True)
        return transfer.num_tokens

    def free_pins(self, sequence_id: int) -> None:
        """Free the blocks that are pinned for a sequence."""
        self.free_references(self.pins.pop(sequence_id, ()))
        self.states.release(sequence_id)

    def blocks_kept_for(self, sequence_ids: Collection[int]) -> set[int]:
        """Return the blocks that are pinned, or will be when they have arrived, for these sequences."""
        kept = {block_id for sequence_id in sequence_ids for block_id in self.pins.get(sequence_id, ())}
        for one in self.in_flight.values():
            if one.is_pinned and one.sequence_id in sequence_ids and one.transfer_id not in self._cancelled:
                kept.update(one.host_blocks)
        return kept

    def num_states_kept_for(self, sequence_ids: Collection[int]) -> int:
        """Count the states that are pinned, or will be when they have arrived, for these sequences."""
        arriving = sum(one.is_pinned and one.sequence_id in sequence_ids for one in self.in_flight.values())
        return arriving + sum(number in sequence_ids for number in self.states.current)

    def free_sequence(self, sequence_id: int) -> None:
        """Free a sequence's pins and cancel its transfers: they keep their blocks and complete for no sequence."""
        self.free_pins(sequence_id)
        self._cancelled |= {one.transfer_id for one in self.in_flight.values() if one.sequence_id == sequence_id}

    def allocate_contents(self, known: ListOf[Content]) -> list[tuple[int, bool]] | None:
        """Hold the blocks that have these contents and allocate the others, or change nothing without room.

        Returns:
            For each content its block, and whether it has to be copied there.
        """
        present = [self.cache.find(content) for content in known]
        held = [block_id for block_id in present if block_id is not None]
        blocks = self.allocate_blocks(held, present.count(None))
        if blocks is None:
            return None
        places = iter(blocks[len(held) :])
        return [(block_id, False) if block_id is not None else (next(places), True) for block_id in present]

    def allocate_states(self, keys: ListOf[bytes]) -> list[tuple[int, bool]] | None:
        """Hold the states that are kept under these keys and allocate the others, or change nothing without room.

        Returns:
            For each key its state block, and whether it has to be copied there.
        """
        present = [kept.state_id if (kept := self.states.find(key)) is not None else None for key in keys]
        held = [state_id for state_id in present if state_id is not None]
        if not self.states.has_room_for(len(keys) - len(held), held):
            return None
        for state_id in held:
            self.states.hold(state_id)
        places = iter(self.states.allocate(len(keys) - len(held)))
        return [(one, False) if one is not None else (next(places), True) for one in present]

    def add_transfer(self, transfer: Transfer) -> Transfer:
        """Book a transfer and return it; the references to its blocks pass to it."""
        self.in_flight[transfer.transfer_id] = transfer
        return transfer

    def device_states_of(self, transfer_id: int) -> tuple[int, ...]:
        """Return the states of the device that a transfer holds, if it is in flight."""
        return transfer.device_states if (transfer := self.in_flight.get(transfer_id)) is not None else ()

    def time_out(self, transfer_id: int) -> tuple[int, ...]:
        """Time a transfer out: keep its write targets, free its sources; what could not be loaded is evicted. Of states
        nothing is kept: their copies have ended.

        Returns:
            Device blocks that the transfer does not hold any more; the caller frees them.

        Raises:
            InternalError: it is not in flight, or was timed out before.
        """
        transfer = self.in_flight.get(transfer_id)
        if transfer is None or transfer_id in self._timed_out:
            raise InternalError(f"transfer {transfer_id} is not in flight")
        is_out, written = transfer.direction is Direction.OUT, transfer.written_blocks
        kept = replace(transfer, device_blocks=() if is_out else written, host_blocks=written if is_out else (),
                       device_states=(), host_states=(), state_moves=())
        self.in_flight[transfer_id] = kept
        self._timed_out.add(transfer_id)
        if not is_out:
            self.evict_sources(transfer)
        self.free_references([block_id for block_id in transfer.host_blocks if block_id not in kept.host_blocks])
        self.free_states(transfer)
        if transfer_id not in self._cancelled:
            self.free_sequence(transfer.sequence_id)
        return tuple(block_id for block_id in transfer.device_blocks if block_id not in kept.device_blocks)

    def pop_transfer(self, transfer_id: int) -> tuple[Transfer, bool, bool]:
        """Remove a transfer that has ended; return it, whether its sequence needs it, and whether it ended in time.

        Raises ``InternalError`` if it is not in flight.
        """
        transfer = self.in_flight.pop(transfer_id, None)
        if transfer is None:
            raise InternalError(f"transfer {transfer_id} is not in flight")
        is_needed, is_in_time = transfer_id not in self._cancelled, transfer_id not in self._timed_out
        self._cancelled.discard(transfer_id)
        self._timed_out.discard(transfer_id)
        return transfer, is_needed, is_in_time

    def receive(self, transfer: Transfer, *, is_needed: bool) -> None:
        """Register the blocks and states of an outgoing transfer that has succeeded, and pin or free them."""
        registered = {move.destination: self._register(move) for move in transfer.moves}
        host_blocks = tuple(registered.get(block_id, block_id) for block_id in transfer.host_blocks)
        for move in transfer.state_moves:
            if self.cache.find(move.content) is not None:
                self.states.keep(move.content, move.destination, move.num_saved)
        if is_needed and transfer.is_pinned:
            self.pins[transfer.sequence_id] = host_blocks
            if transfer.host_states:
                self.states.give(transfer.sequence_id, self._arrived_state(transfer))
        else:
            self.free_references(host_blocks)
        self.free_states(transfer)

    def _arrived_state(self, transfer: Transfer) -> int:
        """Return the state of a transfer's sequence that can be found, also if another transfer has brought it."""
        number, moves = transfer.host_states[-1], transfer.state_moves
        is_new = bool(moves) and moves[-1].destination == number
        found = self.states.find(moves[-1].content.key) if is_new else None
        return found.state_id if found is not None else number

    def free_states(self, transfer: Transfer) -> None:
        """Free the states of the host that a transfer holds."""
        for state_id in transfer.host_states:
            self.states.free(state_id)

    def evict_sources(self, transfer: Transfer) -> None:
        """Evict what a transfer could not read, so that it is computed and not loaded again."""
        for move in transfer.moves:
            self.cache.evict_block(move.source)
        for one in transfer.state_moves:
            self.states.forget(one.content.key)

    def bookkeeping(self) -> MemorySnapshot:
        """Copy the bookkeeping for the state laws."""
        holds = Counter(block_id for blocks in self.pins.values() for block_id in blocks)
        holds.update(block_id for one in self.in_flight.values() for block_id in one.host_blocks)
        return self._bookkeeping(holds)

    def states_bookkeeping(self) -> StateSnapshot | None:
        """Copy the bookkeeping of the states for the state laws, if there are any."""
        if not self.states.num_states:
            return None
        return self.states.bookkeeping(state_id for one in self.in_flight.values() for state_id in one.host_states)

    def snapshot(self) -> dict[str, Any]:
        """As ``BlockMemory.snapshot``, with pins and transfers, and with states if there are any."""
        return {
            **super().snapshot(), "pins": [[number, list(blocks)] for number, blocks in self.pins.items()],
            "in_flight": [one.snapshot(is_late=one.transfer_id in self._timed_out) for one in self.in_flight.values()],
            "cancelled": sorted(self._cancelled), "timed_out": sorted(self._timed_out),
            "next_transfer_id": next(copy(self.transfer_ids)),
            **({"states": self.states.snapshot(self.cache)} if self.states.num_states else {}),
        }

    def restore(
        self, state: Mapping[str, Any], key_of: KeyOf, known: Mapping[int, ListOf[Content]] = _NOTHING_KNOWN
    ) -> None:
        """As ``BlockMemory.restore``; ``known`` is what the positions of each transfer that is not late hold."""
        super().restore(state, key_of)
        self.in_flight.update((one[0], Transfer.of(one, known.get(one[0], ()))) for one in state["in_flight"])
        if self.states.num_states:
            self.states.restore(
                state["states"], self.cache, [one for move in self.in_flight.values() for one in move.host_states])
        self.pins.update((number, tuple(blocks)) for number, blocks in state["pins"])
        self._cancelled, self._timed_out = set(state["cancelled"]), set(state["timed_out"])
        self.transfer_ids = count(state["next_transfer_id"])

    def _transfer_of(self, sequence_id: int) -> Transfer | None:
        """Return the sequence's transfer that is not cancelled."""
        for one in self.in_flight.values():
            if one.sequence_id == sequence_id and one.transfer_id not in self._cancelled:
                return one
        return None

    def _register(self, move: BlockMove) -> int:
        """Register an arrived block; return the block with these contents, which the reference passes to."""
        self.cache.register_block(move.destination, move.content)
        found = self.cache.find(move.content)
        if found is None or found == move.destination:
            return move.destination
        # Why: another transfer of the same contents has arrived first; this copy cannot be found.
        self.cache.hold_block(found)
        self.cache.free_block(move.destination)
        return found
