"""The host's blocks, the sequences they are pinned for, and the transfers between host and device.

A transfer holds a reference to every block it reads and every block it writes, so no block of it is given to another
sequence before it has completed, in time, late or failed. Contents are registered only when they have arrived. One
that takes too long is timed out: it keeps the blocks that it may still write to, and its result is discarded.
``kv_cache_manager`` changes this and the device's tables together. Source: the state machine of vLLM's KV offloading
and the race reports about it and SGLang's (prepare, complete, publish).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, replace
from enum import Enum

from pagedcore.errors import InternalError
from pagedcore.kv_cache.block_pool import BlockPool
from pagedcore.kv_cache.eviction import EvictionPolicy
from pagedcore.kv_cache.memory_snapshot import MemorySnapshot, take_snapshot
from pagedcore.kv_cache.prefix_cache import Content, PrefixCache


class Direction(Enum):
    """Which way the bytes go."""

    OUT = "device to host"
    IN = "host to device"


@dataclass(frozen=True, slots=True)
class BlockMove:
    """One block to copy, and what it holds."""

    source: int
    destination: int
    content: Content


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies of whole blocks that start together and complete together.

    Invariant: every block in it carries one reference of the transfer until it is popped.
    """

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

    @property
    def written_blocks(self) -> tuple[int, ...]:
        """The blocks that it writes to, in the memory that it goes to."""
        return tuple(move.destination for move in self.moves)

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(source, destination) of every copy."""
        return tuple((move.source, move.destination) for move in self.moves)


class HostCache:
    """Prefix cache, pins and transfers of the host.

    Invariant: a sequence has at most one transfer that is not cancelled.
    Invariant: while a transfer that was timed out has not ended, none begins, so that a store that hangs costs the
        blocks of the transfers in flight and no others.
    """

    __slots__ = ("_cancelled", "_in_flight", "_num_transfers", "_pins", "_pool", "_timed_out", "cache")

    def __init__(self, num_blocks: int, policy: EvictionPolicy) -> None:
        self._pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self._pool, policy)
        self._pins: dict[int, tuple[int, ...]] = {}
        self._in_flight: dict[int, Transfer] = {}
        self._cancelled: set[int] = set()
        self._timed_out: set[int] = set()
        self._num_transfers = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the host's pool."""
        return self._pool.num_blocks

    @property
    def num_available_blocks(self) -> int:
        """Blocks without a reference."""
        return self._pool.num_available

    @property
    def num_used_blocks(self) -> int:
        """Blocks that are pinned or in a transfer."""
        return self._pool.num_blocks - self._pool.num_available

    @property
    def num_cached_blocks(self) -> int:
        """Blocks without a reference whose contents can be found."""
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
        """Whether a transfer is in flight that has not been timed out."""
        return len(self._in_flight) > len(self._timed_out)

    @property
    def is_stuck(self) -> bool:
        """Whether a transfer has been timed out and has not ended; the host is not used until then."""
        return bool(self._timed_out)

    @property
    def withholds_blocks(self) -> bool:
        """Whether a transfer that was timed out keeps device blocks."""
        return any(self._in_flight[transfer_id].device_blocks for transfer_id in self._timed_out)

    @property
    def num_leaving_blocks(self) -> int:
        """Device blocks that will be available when the outgoing transfers have completed."""
        return sum(len(one.device_blocks) for one in self._in_flight.values() if one.direction is Direction.OUT)

    def is_moving(self, sequence_id: int) -> bool:
        """Whether the sequence has a transfer in flight that is not cancelled."""
        return any(
            one.sequence_id == sequence_id and one.transfer_id not in self._cancelled
            for one in self._in_flight.values()
        )

    def has_pins(self, sequence_id: int) -> bool:
        """Whether blocks are kept for this sequence."""
        return sequence_id in self._pins

    def num_missing_blocks(self, known: Iterable[Content]) -> int:
        """How many of these contents the host does not hold."""
        return sum(self.cache.find(content) is None for content in known)

    def pin(self, sequence_id: int, block_ids: tuple[int, ...]) -> None:
        """Keep blocks that the host holds for a sequence that has no pins."""
        self.hold_blocks(block_ids)
        self._pins[sequence_id] = block_ids

    def pin_arriving(self, sequence_id: int) -> int:
        """Keep the blocks of a sequence's outgoing transfer for it; return how many positions, 0 without one."""
        for one in self._in_flight.values():
            is_its_own = one.sequence_id == sequence_id and one.transfer_id not in self._cancelled
            if is_its_own and one.direction is Direction.OUT:
                self._in_flight[one.transfer_id] = replace(one, is_pinned=True)
                return one.num_tokens
        return 0

    def free_pins(self, sequence_id: int) -> None:
        """Free the blocks that are pinned for a sequence."""
        self.free_blocks(self._pins.pop(sequence_id, ()))

    def blocks_kept_for(self, sequence_ids: Collection[int]) -> set[int]:
        """Return the blocks that are pinned, or will be when they have arrived, for these sequences."""
        kept = {block_id for sequence_id in sequence_ids for block_id in self._pins.get(sequence_id, ())}
        for one in self._in_flight.values():
            if one.is_pinned and one.sequence_id in sequence_ids and one.transfer_id not in self._cancelled:
                kept.update(one.host_blocks)
        return kept

    def free_sequence(self, sequence_id: int) -> None:
        """Free a sequence's pins and cancel its transfers: they keep their blocks and complete for no sequence."""
        self.free_pins(sequence_id)
        self._cancelled |= {one.transfer_id for one in self._in_flight.values() if one.sequence_id == sequence_id}

    def allocate_blocks(self, known: ListOf[Content]) -> list[tuple[int, bool]] | None:
        """Hold the blocks that have these contents and allocate the others, or change nothing without room.

        Returns:
            For each content its block, and whether it has to be copied there.
        """
        present = [self.cache.find(content) for content in known]
        held = [block_id for block_id in present if block_id is not None]
        self.hold_blocks(held)
        fresh = self.cache.allocate(present.count(None))
        if fresh is None:
            self.free_blocks(held)
            return None
        places = iter(fresh)
        return [(block_id, False) if block_id is not None else (next(places), True) for block_id in present]

    def hold_blocks(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block."""
        for block_id in block_ids:
            self.cache.hold_block(block_id)

    def free_blocks(self, block_ids: ListOf[int]) -> None:
        """Free a reference to each block, last first."""
        for block_id in reversed(block_ids):
            self.cache.free_block(block_id)

    def add_transfer(
        self, direction: Direction, sequence_id: int, moves: tuple[BlockMove, ...], device_blocks: tuple[int, ...],
        host_blocks: tuple[int, ...], num_tokens: int, *, is_pinned: bool = False,
    ) -> Transfer:
        """Book a transfer; the references to its blocks pass to it."""
        self._num_transfers += 1
        transfer = Transfer(
            self._num_transfers, direction, sequence_id, moves, device_blocks, host_blocks, num_tokens, is_pinned
        )
        self._in_flight[transfer.transfer_id] = transfer
        return transfer

    def time_out(self, transfer_id: int) -> tuple[int, ...]:
        """Time a transfer out: keep its write targets, free its sources; what could not be loaded is evicted.

        Returns:
            Device blocks that the transfer does not hold any more; the caller frees them.

        Raises:
            InternalError: it is not in flight, or was timed out before.
        """
        transfer = self._in_flight.get(transfer_id)
        if transfer is None or transfer_id in self._timed_out:
            raise InternalError(f"transfer {transfer_id} is not in flight")
        is_out, written = transfer.direction is Direction.OUT, transfer.written_blocks
        kept = replace(transfer, device_blocks=() if is_out else written, host_blocks=written if is_out else ())
        self._in_flight[transfer_id] = kept
        self._timed_out.add(transfer_id)
        if not is_out:
            self.evict_sources(transfer)
        self.free_blocks([block_id for block_id in transfer.host_blocks if block_id not in kept.host_blocks])
        if transfer_id not in self._cancelled:
            self.free_sequence(transfer.sequence_id)
        return tuple(block_id for block_id in transfer.device_blocks if block_id not in kept.device_blocks)

    def pop_transfer(self, transfer_id: int) -> tuple[Transfer, bool, bool]:
        """Remove a transfer that has ended; return it, whether its sequence needs it, and whether it ended in time.

        Raises:
            InternalError: there is no such transfer.
        """
        transfer = self._in_flight.pop(transfer_id, None)
        if transfer is None:
            raise InternalError(f"transfer {transfer_id} is not in flight")
        is_needed, is_in_time = transfer_id not in self._cancelled, transfer_id not in self._timed_out
        self._cancelled.discard(transfer_id)
        self._timed_out.discard(transfer_id)
        return transfer, is_needed, is_in_time

    def receive(self, transfer: Transfer, *, is_needed: bool) -> None:
        """Register the blocks of an outgoing transfer that has succeeded, and pin or free them."""
        registered = {move.destination: self._register(move) for move in transfer.moves}
        host_blocks = tuple(registered.get(block_id, block_id) for block_id in transfer.host_blocks)
        if is_needed and transfer.is_pinned:
            self._pins[transfer.sequence_id] = host_blocks
        else:
            self.free_blocks(host_blocks)

    def evict_sources(self, transfer: Transfer) -> None:
        """Evict what a transfer could not read, so that it is computed and not loaded again."""
        for move in transfer.moves:
            self.cache.evict_block(move.source)

    def snapshot(self) -> MemorySnapshot:
        """Copy the bookkeeping for the state laws."""
        holds = Counter(block_id for blocks in self._pins.values() for block_id in blocks)
        holds.update(block_id for one in self._in_flight.values() for block_id in one.host_blocks)
        return take_snapshot(self._pool, self.cache, holds)

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
