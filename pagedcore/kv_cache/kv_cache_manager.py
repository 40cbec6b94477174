"""Device and host as one KV cache: what both together hold of a sequence, and transfers that change both.

Owns the block tables of the device (``block_manager``) and the blocks of the host (``host_cache``), which do not know
each other. Decides nothing and moves no bytes: the scheduler decides, ``execution`` copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as ListOf
from dataclasses import replace
from typing import Any

from pagedcore.errors import InternalError
from pagedcore.kv_cache.block_manager import BlockManager
from pagedcore.kv_cache.eviction import EvictionPolicy, least_recently_used
from pagedcore.kv_cache.host_cache import BlockMove, Direction, HostCache, StateMove, Transfer
from pagedcore.kv_cache.hybrid_blocks import HybridBlocks
from pagedcore.kv_cache.memory_snapshot import BlockSnapshot
from pagedcore.kv_cache.prefix_cache import Content
from pagedcore.kv_cache.prefix_match import FoundBlocks, PrefixMatch, contents, find_blocks
from pagedcore.kv_cache.state_blocks import StateBlocks
from pagedcore.kv_cache.state_match import find_with_state, num_saved
from pagedcore.kv_cache.windowed_blocks import WindowedBlocks
from pagedcore.sequence import Sequence


class KVCacheManager:
    """The KV cache of one engine.

    Invariant: a sequence with a transfer that is not cancelled, or with pins, has no table on the device.

    Args:
        num_blocks: of the device.
        block_size: tokens per block.
        num_host_blocks: of the host; 0 to keep nothing there.
        policy: the order of eviction, in either memory.
        secret: of the content keys; see ``BlockHasher``.
        copies_blocks: whether a partly matching block can be copied; else only full ones are shared.
        num_states: state blocks of the device; 0 for a model that keeps no states.
        num_host_states: state blocks of the host, of such a model that has a host.
        state_weight: as how many blocks a state counts where blocks are moved.
        num_windows: window blocks of the device; 0: no layer gives up what has left its window. With some, nothing is
            on the host, and there are no states.
        window: positions that layers with a window read at most, if there are window blocks.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, num_host_blocks: int = 0,
        policy: EvictionPolicy = least_recently_used, secret: bytes = b"", copies_blocks: bool = True,
        num_states: int = 0, num_host_states: int = 0, state_weight: float = 0.0, num_windows: int = 0, window: int = 0,
    ) -> None:
        self.state_weight = state_weight
        self.device = BlockManager(num_blocks, block_size, policy=policy, secret=secret, copies_blocks=copies_blocks)
        self._states: StateBlocks | None = None
        """The device's; ``None`` for a model that keeps none."""
        if num_states:
            self.device = hybrid = HybridBlocks(
                num_blocks, block_size, num_states, policy=policy, secret=secret, copies_blocks=copies_blocks)
            self._states = hybrid.states
        elif num_windows:
            self.device = WindowedBlocks(num_blocks, block_size, num_windows, window, policy=policy, secret=secret,
                                         copies_blocks=copies_blocks)
        self.host = HostCache(num_host_blocks, policy, num_host_states, block_size)

    def reset(self) -> None:
        """Forget everything in both memories; no transfer may be in flight."""
        self.device.reset()
        self.host.reset()

    def match(self, sequence: Sequence) -> PrefixMatch:
        """Find the longest beginning of a sequence that the device or the host holds."""
        is_host_used = self.host.num_blocks > 0 and not self.host.is_stuck
        match = self.device.match(sequence, self.host.cache if is_host_used else None)
        if not is_host_used or self._states is None:
            return match
        hasher, size = self.device.hasher, self.device.block_size
        there = self._find_on_host(sequence, sequence.num_reusable_tokens)
        if there.num_tokens <= match.num_tokens:
            return match
        here = find_blocks(hasher, sequence, there.num_tokens // size * size, self.device.cache).block_ids
        return PrefixMatch(here, host_blocks=there.block_ids[len(here) :], num_tokens=there.num_tokens, shorter=match,
                           host_state=there.state)

    def find(self, sequence: Sequence) -> tuple[FoundBlocks, FoundBlocks]:
        """Find what the device and what the host holds of a sequence's positions, the last one left out."""
        num_tokens = len(sequence.token_ids) - 1
        return self.device.find(sequence, num_tokens), self._find_on_host(sequence, num_tokens)

    def _find_on_host(self, sequence: Sequence, num_tokens: int) -> FoundBlocks:
        hasher, host = self.device.hasher, self.host
        if self._states is not None:
            return find_with_state(hasher, sequence, num_tokens, host.cache, host.states)
        return find_blocks(hasher, sequence, num_tokens, host.cache)

    def num_blocks_to_copy(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks of the sequence's first positions that the host does not hold yet."""
        known = contents(self.device.hasher, sequence, num_tokens)
        return sum(self.host.cache.find(content) is None for content in known)

    def num_tokens_to_save(self, sequence: Sequence, num_tokens: int) -> int:
        """Positions of the sequence's first ones that the host could spare it from computing, if they were copied."""
        if self._states is not None:
            return num_tokens - self._find_on_host(sequence, num_tokens).num_tokens
        return self.num_blocks_to_copy(sequence, num_tokens) * self.device.block_size

    def has_states_for(self, running: ListOf[Sequence], num_more: int) -> bool:
        """Whether so many sequences more can be loaded or run, each with the two states that a step takes.

        Why counted so: whatever runs, or has been loaded, has two for certain; then a step never lacks one.
        """
        states, in_flight = self._states, self.host.in_flight.values()
        if states is None:
            return True
        num_loaded = len(states.current.keys() - {one.sequence_id for one in running})
        num_moving = sum(len(one.device_states) for one in in_flight)
        num_moving += sum(one.direction is Direction.IN for one in in_flight if one.device_states)
        return 2 * (len(running) + num_loaded + num_more) + num_moving <= states.num_states

    def begin_swap_out(self, sequence: Sequence, *, is_pinned: bool) -> Transfer | None:
        """Hand a sequence's table to a transfer to the host.

        Args:
            sequence: its table has blocks for exactly its computed positions.
            is_pinned: keep the copies for this sequence until it takes them back; else only while there is room.

        Returns:
            ``None``, with nothing changed: the host is stuck or has too little room, or there is no table.
        """
        device, host, num_tokens = self.device, self.host, sequence.num_computed_tokens
        if host.is_stuck or not device.num_blocks_of(sequence.sequence_id):
            return None
        known = list(contents(device.hasher, sequence, num_tokens))
        places = host.allocate_contents(known)
        if places is None:
            return None
        device.register_all(sequence)
        states = self._states_to_host(sequence, known, is_pinned=is_pinned)
        if states is None:
            host.free_references([block_id for block_id, _ in places])
            return None
        device_blocks = device.take_table(sequence.sequence_id)
        if len(device_blocks) != len(known):
            raise InternalError(f"swap out: {len(device_blocks)} blocks for {num_tokens} positions")
        moves = tuple(
            BlockMove(source, destination, content)
            for source, (destination, is_new), content in zip(device_blocks, places, known, strict=True) if is_new
        )
        return host.add_transfer(Transfer(
            next(host.transfer_ids), Direction.OUT, sequence.sequence_id, moves, device_blocks,
            tuple(block_id for block_id, _ in places), num_tokens, is_pinned, *states,
        ))

    def _states_to_host(
        self, sequence: Sequence, known: ListOf[Content], *, is_pinned: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[StateMove, ...]] | None:
        """Take the states that go to the host with a sequence's KV, as a ``Transfer`` has them; ``None``: no room.

        It is the sequence's own; and of one that is finished also that which it began from, where others may too.
        """
        device, host, number, own = self.device, self.host, sequence.sequence_id, self._states
        if own is None:
            return (), (), ()
        ends, held = [sequence.num_computed_tokens], [own.current[number]]
        place, rest = divmod(sequence.num_cached_tokens or 0, device.block_size)
        if not is_pinned and 0 < place < len(known) and not rest:
            begun = own.find(known[place - 1].key)
            if begun is not None and host.states.find(begun.key) is None and host.states.num_available > 1:
                ends, held = [place * device.block_size, *ends], [begun.state_id, *held]
        of_ends = [known[-(-end // device.block_size) - 1] for end in ends]
        places = host.allocate_states([one.key for one in of_ends])
        if places is None:
            return None
        moves = tuple(
            StateMove(source, target, content, end, num_saved(device.hasher, sequence, end, host.states))
            for source, (target, is_new), content, end in zip(held, places, of_ends, ends, strict=True) if is_new
        )
        for state_id in held[:-1]:
            own.hold(state_id)
        own.take(number)
        return tuple(held), tuple(state_id for state_id, _ in places), moves

    def begin_swap_in(self, sequence: Sequence, match: PrefixMatch) -> Transfer | None:
        """Start to load the host's part of a match, or change nothing when the device has too little room."""
        device, host, num_shared = self.device, self.host, len(match.device_blocks)
        if self._states is not None and not self._states.has_room_for(1):
            return None
        device_blocks = device.allocate_blocks(match.device_blocks, len(match.host_blocks))
        if device_blocks is None:
            return None
        host.hold_blocks(match.host_blocks)
        known = list(contents(device.hasher, sequence, match.num_tokens))
        moves = tuple(map(BlockMove, match.host_blocks, device_blocks[num_shared:], known[num_shared:]))
        return host.add_transfer(Transfer(
            next(host.transfer_ids), Direction.IN, sequence.sequence_id, moves, device_blocks, match.host_blocks,
            match.num_tokens, False, *self._state_from_host(sequence, match, known[-1]),
        ))

    def _state_from_host(
        self, sequence: Sequence, match: PrefixMatch, last: Content
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[StateMove, ...]]:
        """Take room for the state of a match, whose last block holds ``last``, as a ``Transfer`` has it."""
        states, source = self._states, match.host_state
        if states is None:
            return (), (), ()
        self.host.states.hold(source)
        (target,) = states.allocate(1)
        saved = num_saved(self.device.hasher, sequence, match.num_tokens, states)
        return (target,), (source,), (StateMove(source, target, last, match.num_tokens, saved),)

    def time_out_transfer(self, transfer_id: int) -> None:
        """Let a sequence continue without a transfer. Raises as ``HostCache.time_out``."""
        states = self.host.device_states_of(transfer_id)
        self.device.free_references(self.host.time_out(transfer_id))
        self._free_states(states)

    def complete_transfer(self, transfer_id: int, *, is_ok: bool) -> tuple[Transfer, bool]:
        """Book the end of a transfer; return it, and whether its sequence now has what the transfer was for.

        Raises ``InternalError`` if it is not in flight.
        """
        device, host = self.device, self.host
        transfer, is_needed, is_in_time = host.pop_transfer(transfer_id)
        if is_in_time and transfer.direction is Direction.IN:
            self._end_swap_in(transfer, is_ok=is_ok, is_needed=is_needed)
        else:
            if is_in_time and is_ok:
                host.receive(transfer, is_needed=is_needed)
            else:
                host.free_references(transfer.host_blocks)
                host.free_states(transfer)
            device.free_references(transfer.device_blocks)
            self._free_states(transfer.device_states)
        return transfer, is_ok and is_needed and is_in_time

    def evict_sequence(self, sequence: Sequence) -> None:
        """Free a sequence's table, and evict from either memory what it has computed and what continues that."""
        first_block = tuple(sequence.token_ids[: min(sequence.num_computed_tokens, self.device.block_size)])
        for cache in (self.device.cache, self.host.cache):
            for root in {sequence.cache_root, sequence.block_root}:
                cache.evict_beginnings(root, first_block)
        self.device.evict_blocks(sequence.sequence_id, spares_shared=False)

    def bookkeeping(self) -> BlockSnapshot:
        """Copy the bookkeeping for the state laws."""
        host, in_flight = self.host, self.host.in_flight.values()
        blocks = [block_id for one in in_flight for block_id in one.device_blocks]
        states = [state_id for one in in_flight for state_id in one.device_states]
        return replace(self.device.bookkeeping(blocks, states), host=host.bookkeeping(), pins=dict(host.pins),
                       host_states=host.states_bookkeeping())

    def snapshot(self) -> dict[str, Any]:
        """Copy the state of either memory as plain values: "device" and "host"."""
        return {"device": self.device.snapshot(), "host": self.host.snapshot()}

    def restore(self, state: Mapping[str, Any], moving: Mapping[int, Sequence]) -> None:
        """Let both empty memories be as they were copied.

        Args:
            state: what ``snapshot`` returned, of a cache of the same sizes.
            moving: the sequence of each transfer in flight that was not timed out.

        Raises ``ValueError``, ``KeyError`` or the like for a state that is not consistent.
        """
        hasher, host = self.device.hasher, state["host"]
        lengths = {number: num_tokens for number, _, _, _, _, num_tokens, *_ in host["in_flight"]}
        # Safety: a forged length must not cost more than the tokens that there are.
        known = {number: tuple(contents(hasher, one, min(lengths[number], len(one.token_ids))))
                 for number, one in moving.items()}
        self.host.restore(host, hasher.key, known)
        in_flight = self.host.in_flight.values()
        self.device.restore(state["device"], hasher.key, [one for move in in_flight for one in move.device_states])

    def _end_swap_in(self, transfer: Transfer, *, is_ok: bool, is_needed: bool) -> None:
        device, host = self.device, self.host
        num_registered = len(transfer.device_blocks) - len(transfer.moves)
        for move in transfer.moves if is_ok else ():
            if device.cache.register_block(move.destination, move.content):
                num_registered += len(move.content.token_ids) == device.block_size
        if not is_ok:
            host.evict_sources(transfer)
        if is_ok and is_needed:
            device.add_table(transfer.sequence_id, transfer.device_blocks, num_registered)
        else:
            device.free_references(transfer.device_blocks)
        self._end_loads_of_states(transfer, is_ok=is_ok, is_needed=is_needed)
        host.free_references(transfer.host_blocks)
        host.free_states(transfer)
        if is_needed:
            host.free_pins(transfer.sequence_id)

    def _end_loads_of_states(self, transfer: Transfer, *, is_ok: bool, is_needed: bool) -> None:
        if (states := self._states) is None:
            return
        for move in transfer.state_moves if is_ok else ():
            if self.device.cache.find(move.content) is not None:
                states.keep(move.content, move.destination, move.num_saved)
            if is_needed:
                states.give(transfer.sequence_id, move.destination)
        self._free_states(transfer.device_states)

    def _free_states(self, state_ids: ListOf[int]) -> None:
        if self._states is not None:
            for state_id in state_ids:
                self._states.free(state_id)
