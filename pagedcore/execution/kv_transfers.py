"""Carries out the transfers that the scheduler books: starts them, measures them, reports their ends.

States are copied when their transfer starts, before its blocks are. Decides nothing. A transfer that the store cannot
start, or does not end in time, has failed; no other transfer and no sequence waits for it. ``kv_pool`` moves the bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from pagedcore.config.limits import MAX_TRANSFER_S
from pagedcore.errors import InternalError, InvalidConfig, is_passing
from pagedcore.execution.machine import free_memory_bytes
from pagedcore.kv_cache.block_manager import BlockManager
from pagedcore.kv_cache.host_cache import Direction, Transfer
from pagedcore.kv_cache.prefix_cache import BlockMemory
from pagedcore.kv_cache.windowed_blocks import WindowedBlocks
from pagedcore.protocols import CacheStore, Clock, PopulatesBlocks, StateStore, WindowStore
from pagedcore.scheduler.cost_model import CostModel
from pagedcore.scheduler.swapping import Swapping

_log = logging.getLogger("pagedcore")

_CALIBRATION_BLOCKS: Final = (1, 8)
_PAUSE_S: Final = 0.001
_MOST_AHEAD_BYTES: Final = 2**28
"""The most memory that is taken before it is used, and how many times as much must be free for it."""
_LEAVES_FREE: Final = 4


class KVTransfers:
    """The transfers of one engine.

    Invariant: every transfer that was started is reported to the scheduler exactly once when it ends, and before that
        timed out exactly once if it takes longer than ``longest_s`` seconds.
    """

    def __init__(
        self, store: CacheStore | None, moves: Swapping, clock: Clock, longest_s: float = MAX_TRANSFER_S,
        states: StateStore | None = None, windows: WindowStore | None = None,
    ) -> None:
        self._windows = windows
        self._store, self._moves, self._clock, self._longest_s = store, moves, clock, longest_s
        self._states = states
        self._started_s: dict[int, float] = {}
        self._late: set[int] = set()
        self._polled: Sequence[tuple[int, bool]] = ()
        self._is_never_populated = False
        self._told: set[str] = set()

    def copy(self, pairs: Sequence[tuple[int, int]], blocks: BlockManager) -> None:
        """Copy device blocks, and their window blocks, before the next step computes."""
        if pairs and self._store is not None:
            self._store.copy_blocks(pairs)
        if self._windows is not None and isinstance(blocks, WindowedBlocks):
            self._windows.copy_blocks(blocks.window_pairs(pairs))

    def populate(self, device: BlockMemory) -> bool:
        """Let the store clear a piece of memory for blocks to come; return whether there is another piece.

        Why as many blocks again as hold something: a burst like those before finds its memory ready, and an engine that
        does little takes little.
        """
        store, num_used = self._store, device.num_used_blocks + device.num_cached_blocks
        if not isinstance(store, PopulatesBlocks) or self._is_never_populated:
            return False
        try:
            if free_memory_bytes() < _LEAVES_FREE * _MOST_AHEAD_BYTES:
                return False
        except InvalidConfig:  # the system's fault, and a passing one
            return False
        try:
            return bool(store.populate(num_used + min(num_used, _MOST_AHEAD_BYTES // store.block_bytes)))
        except Exception as error:  # the store may be the user's own, and nothing depends on this
            self._is_never_populated = not is_passing(error)
            again = "it is not asked again" if self._is_never_populated else "it is asked again later"
            self._tell_once(f"KV pool: the store cannot take memory ahead ({type(error).__name__}); {again}")
            return False

    def advance(self) -> None:
        """Book the transfers that have ended, and start those that are due."""
        self.settle()
        if self._moves.due:
            self.start(self._moves.take_due())

    def start(self, transfers: Iterable[Transfer]) -> None:
        """Start transfers, and book those that have ended by then."""
        for transfer in transfers:
            begin = self._beginning_of(transfer.direction)
            self._started_s[transfer.transfer_id] = self._clock.now()
            try:
                if transfer.state_moves:
                    self._copy_states(transfer.direction, [move[:2] for move in transfer.state_moves])
                begin(transfer.transfer_id, transfer.pairs)
            except Exception:
                self._report(transfer.transfer_id, is_ok=False)
        self.settle()

    def settle(self, *, wait: bool = False) -> None:
        """Book the transfers that have ended, and time out late ones; ``wait``: wait a moment for one to end."""
        if self._store is None or not (self._started_s or self._late):
            return
        try:
            # Why kept until all are booked: an interrupt may come before, and the store reports each once.
            self._polled = self._polled or self._store.poll_transfers(wait=wait)
            ended = [(int(transfer_id), bool(is_ok)) for transfer_id, is_ok in self._polled]
        except MemoryError:  # this machine's fault, not the store's
            raise
        except Exception as error:  # the store may be the user's own; what it does not report is timed out
            self._tell_once(f"host KV: the store cannot say which transfers have ended ({type(error).__name__})")
            ended = []
            if wait:
                # Why: nothing can run until a transfer ends or is timed out; other programs need the core meanwhile.
                time.sleep(_PAUSE_S)
        for transfer_id, is_ok in ended:
            if transfer_id in self._started_s or transfer_id in self._late:
                self._report(transfer_id, is_ok=is_ok)
        self._polled = ()
        self._time_out_late()

    def drain(self) -> None:
        """Wait until nothing is in flight and forget it all, unbooked. Raises ``InternalError`` if that takes too long.
        """
        under_way = {*self._started_s, *self._late} - {int(transfer_id) for transfer_id, _ in self._polled}
        end_s = time.monotonic() + self._longest_s
        while under_way and self._store is not None:
            under_way -= {int(transfer_id) for transfer_id, _ in self._store.poll_transfers(wait=True)}
            if under_way and time.monotonic() > end_s:
                raise InternalError(f"host KV: {len(under_way)} transfers have not ended in {self._longest_s:g} s")
        self._started_s.clear()
        self._late.clear()
        self._polled = ()

    def _tell_once(self, message: str) -> None:
        """Log the error at hand, unless the same was logged before: it may come with every step."""
        if message not in self._told:
            self._told.add(message)
            _log.exception("%s", message)

    def _time_out_late(self) -> None:
        latest_s = self._clock.now() - self._longest_s
        for transfer_id in [one for one, started_s in self._started_s.items() if started_s < latest_s]:
            _log.warning(
                "host KV: a transfer has not ended in %g s; its sequence continues without it, and the host is not "
                "used until it ends", self._longest_s,
            )
            del self._started_s[transfer_id]
            self._late.add(transfer_id)
            self._moves.time_out_transfer(transfer_id)

    def calibrate(self, costs: CostModel, num_blocks: int, num_states: int) -> None:
        """Measure transfers of a few blocks each way, with one of ``num_states`` if there are some, before the pool
        holds anything.

        Raises ``InvalidConfig`` if the store fails or takes too long.
        """
        num_moved = min(1, num_states)
        if self._store is None:
            return
        for count in _CALIBRATION_BLOCKS:
            pairs = [(block, block) for block in range(min(count, num_blocks))]
            # Why: the first time touches fresh pages, which is not what a transfer costs later.
            for is_measured in (False, True):
                for direction in Direction:
                    seconds = self._time(self._store, direction, pairs, num_moved)
                    if is_measured:
                        costs.moves[direction].observe(costs.units(len(pairs), num_moved), seconds)

    def _time(
        self, store: CacheStore, direction: Direction, pairs: Sequence[tuple[int, int]], num_states: int
    ) -> float:
        before = self._clock.now()
        try:
            if num_states:
                self._copy_states(direction, [(0, 0)])
            self._beginning_of(direction)(0, pairs)
            while not store.poll_transfers(wait=True):
                if self._clock.now() - before > self._longest_s:
                    raise InvalidConfig(
                        f"host_kv_memory: the cache_store has not moved {len(pairs)} blocks in {self._longest_s:g} s. "
                        "Leave host_kv_memory, or repair the store."
                    )
        except InvalidConfig:
            raise
        except Exception as error:  # the store may be the user's own
            raise InvalidConfig(
                f"host_kv_memory: the cache_store failed to move {len(pairs)} blocks ({type(error).__name__}). "
                "Leave host_kv_memory, or repair the store."
            ) from error
        return self._clock.now() - before

    def _beginning_of(self, direction: Direction) -> Callable[[int, Sequence[tuple[int, int]]], None]:
        assert self._store is not None  # Invariant: only an engine with a store has a host cache
        return self._store.start_swap_out if direction is Direction.OUT else self._store.start_swap_in

    def _copy_states(self, direction: Direction, pairs: Sequence[tuple[int, int]]) -> None:
        assert self._states is not None  # Invariant: only an engine with such a store has states on the host
        (self._states.swap_out if direction is Direction.OUT else self._states.swap_in)(pairs)

    def _report(self, transfer_id: int, *, is_ok: bool) -> None:
        self._late.discard(transfer_id)
        now_s = self._clock.now()
        seconds = now_s - self._started_s.pop(transfer_id, now_s)
        self._moves.complete_transfer(transfer_id, seconds, is_ok=is_ok)
