"""Where the KV of idle sequences is kept: pinned on the host, in a file, or nowhere; for how long; and the way back.

Owns the decisions and the ledger. ``Parking`` runs between two steps on the engine's thread and never blocks;
``ParkedFile`` reads and writes files, on any thread. Losing parked KV costs time and changes no completion, so every
refusal ends in "computed again". The caller is ``session``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Literal

import numpy as np

from pagedcore.config.limits import MAX_PARKED_HOST_SHARE
from pagedcore.execution.kv_transfers import KVTransfers
from pagedcore.kv_cache.hybrid_blocks import HybridBlocks
from pagedcore.kv_cache.prefix_match import contents, find_blocks
from pagedcore.kv_cache.windowed_blocks import WindowedBlocks
from pagedcore.protocols import CacheStore, Clock, StateStore, WindowStore
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.sequence import Sequence, SequenceStatus
from pagedcore.sessions.kv_file import KVCopy, KVDirectory, KVSpec, read_kv, reason_of, write_kv
from pagedcore.sessions.operation import Operation

_log = logging.getLogger("pagedcore")

Tier = Literal["host", "disk", "tokens"]


@dataclass(frozen=True, slots=True)
class ParkedState:
    """What is kept of a session that was parked."""

    tier: Tier
    """"tokens": no KV is kept; the next turn uses what the caches still hold and computes the rest again."""
    num_tokens_kept: int
    """Positions that need not be computed again as long as this state lasts."""
    expires_s: float | None = None
    """When the KV is freed, in seconds of the engine's clock; ``None``: when the session is closed."""


@dataclass(frozen=True, slots=True, eq=False)
class ParkedFile:
    """A sequence's KV in a file, or on its way there; usable from any thread."""

    directory: KVDirectory
    path: Path
    spec: KVSpec
    kv: KVCopy | None = None
    """What ``write`` writes."""

    def write(self) -> bool:
        """Write the file; return whether it is complete and was not removed from its directory meanwhile."""
        assert self.kv is not None  # Invariant: only what was copied is written
        try:
            write_kv(self.path, self.kv, self.spec)
        except Exception as error:  # of whatever kind: no room, no memory; the session continues without its KV
            _log.warning("parking: the KV file could not be written (%s); only tokens are kept", reason_of(error))
            return False
        if self.path not in self.directory.files:
            self.directory.remove(self.path)
            return False
        return True

    def read(self) -> KVCopy | None:
        """Return the KV of the file as far as it is proven."""
        return read_kv(self.path, self.spec)


@dataclass(slots=True)
class _Parked:
    sequence: Sequence
    state: ParkedState
    file: ParkedFile | None = None


@dataclass(eq=False, repr=False)
class Parking:
    """Parked sequences of one engine.

    Invariant: a sequence is in the ledger from the time it was parked until its next turn, its expiry or its end.
    """

    scheduler: Scheduler
    transfers: KVTransfers
    store: CacheStore | None
    kv_format: str
    directory: KVDirectory
    clock: Clock
    change: Callable[[], AbstractContextManager[None]]
    """Makes what is done within it complete or undone, and keeps other threads out."""
    num_short_tokens: int | None = None
    """As of a ``Sequence``."""
    state_store: StateStore | None = None
    """What moves states, where the model keeps some."""
    state_bytes: int = 0
    """Of one of these; 0: it keeps none."""
    window_store: WindowStore | None = None
    """What moves window blocks, where layers with a window have some."""
    is_asleep: bool = field(default=False, init=False)
    """Whether there is no memory for blocks: files stay, and nothing is loaded from them."""
    _parked: dict[int, _Parked] = field(default_factory=dict, init=False)
    num_renewals: int = field(default=0, init=False)
    """How often all KV became worthless."""
    next_expiry_s: float = field(default=math.inf, init=False)
    """When ``expire`` has something to free next, in seconds of the clock."""

    def state(self, sequence: Sequence) -> ParkedState | None:
        """Return where a sequence is parked; ``None``: it is not."""
        self.expire()
        parked = self._parked.get(sequence.sequence_id)
        if parked is None:
            return None
        host = self.scheduler.kv_cache.host
        if parked.state.tier == "host" and not host.blocks_kept_for((sequence.sequence_id,)):
            # Why: the transfer to the host can fail after ``park_on_host`` has returned.
            return self.park_tokens(sequence)
        return parked.state

    def renew(self, sequence: Sequence, ttl_s: float | None) -> ParkedState:
        """Let a parked sequence expire in so many seconds from now."""
        parked = self._parked[sequence.sequence_id]
        parked.state = replace(parked.state, expires_s=self._expiry(ttl_s))
        return parked.state

    def has_room_on_host(self, sequence: Sequence) -> bool:
        """Whether there is a host tier, and a further parked sequence may pin its blocks there."""
        host = self.scheduler.kv_cache.host
        if self.is_asleep or not host.num_blocks:
            return False
        kept = host.blocks_kept_for(self._parked.keys())
        # Why: counted as if it shared no block, which saves a look-up of each.
        needed = self.scheduler.kv_cache.device.blocks_for(len(sequence.token_ids) - 1)
        if len(kept) + needed > MAX_PARKED_HOST_SHARE * host.num_blocks:
            return False
        num_states = host.num_states_kept_for(self._parked.keys()) + 1 if host.states.num_states else 0
        return num_states <= MAX_PARKED_HOST_SHARE * host.states.num_states

    def park_on_host(self, sequence: Sequence, ttl_s: float | None) -> ParkedState | None:
        """Pin a finished sequence's KV on the host; ``None`` if parked sequences have too little room there."""
        if not self.has_room_on_host(sequence):
            return None
        with self.change():
            num_tokens = self.scheduler.moves.park(sequence)
            self.transfers.advance()
        return self._record(sequence, "host", num_tokens, ttl_s) if num_tokens else None

    def park_tokens(self, sequence: Sequence) -> ParkedState:
        """Note that only tokens are kept of a sequence."""
        self.free_kv(sequence)
        return self._record(sequence, "tokens", 0, None)

    def park_on_disk(self, sequence: Sequence, ttl_s: float | None) -> Operation[ParkedState]:
        """Write the KV of a sequence that is in memory to a file, and remove the file if a turn has begun meanwhile."""
        file, is_kept, num_renewals = self._new_file(sequence), False, self.num_renewals
        if file is None:
            return self.park_tokens(sequence)
        try:
            is_written: bool = yield file.write
            is_idle = sequence.status is SequenceStatus.FINISHED
            is_kept = is_written and is_idle and num_renewals == self.num_renewals
        finally:
            if not is_kept:
                self.directory.remove(file.path)
        if not is_kept:
            return self.park_tokens(sequence) if is_idle else ParkedState("tokens", 0)
        self.free_kv(sequence)
        return self._record(sequence, "disk", len(file.spec.token_ids), ttl_s, replace(file, kv=None))

    def _new_file(self, sequence: Sequence) -> ParkedFile | None:
        kv = self.copy_kv(sequence)
        if kv is None:
            return None
        spec = replace(self.spec(sequence.token_ids, kv.num_tokens), key=self.directory.secret)
        try:
            return ParkedFile(self.directory, self.directory.name_file(), spec, kv)
        except Exception as error:  # of whatever kind: no directory, no memory
            _log.warning("parking: the directory for KV files cannot be made (%s)", reason_of(error))
            return None

    def file_of(self, sequence: Sequence) -> ParkedFile | None:
        """Return the file that a sequence is parked in; ``None``: it is in none, or has expired."""
        self.expire()
        parked = self._parked.get(sequence.sequence_id)
        return parked.file if parked is not None else None

    def fetch_kv(self, sequence: Sequence) -> int:
        """Begin to copy a sequence's blocks from the host to the device; return positions, 0 without room."""
        with self.change():
            num_tokens = self.scheduler.moves.fetch(sequence)
            self.transfers.advance()
        if num_tokens:
            del self._parked[sequence.sequence_id]
        return num_tokens

    def load_kv(self, sequence: Sequence, kv: KVCopy) -> int:
        """Put copied blocks into the prefix cache as far as the device has room; return the positions there now."""
        if self.is_asleep:
            return 0
        with self.change():
            return self._load_kv(sequence, kv)

    def _load_kv(self, sequence: Sequence, kv: KVCopy) -> int:
        blocks, store = self.scheduler.kv_cache.device, self.store
        cache, here = blocks.cache, find_blocks(blocks.hasher, sequence, kv.num_tokens, blocks.cache)
        lacking = list(contents(blocks.hasher, sequence, kv.num_tokens))[len(here.block_ids) :]
        for block_id in here.block_ids:
            cache.hold_block(block_id)
        # Why: every running sequence may need a block in the next step.
        room = max(0, blocks.num_available_blocks - len(self.scheduler.running))
        fresh = cache.allocate(min(len(lacking), room)) or []
        if isinstance(blocks, WindowedBlocks):
            blocks.windows.clear(fresh)
        try:
            if self.window_store is not None and kv.windows is None:
                whole = self.window_store.divide(kv.blocks)
                first = self._first_window(kv.num_tokens)
                kv = replace(kv, blocks=whole[0], windows=whole[1][first:])
            if store is not None and fresh:
                start = len(here.block_ids)
                store.write_blocks(fresh, kv.blocks[start : start + len(fresh)])
                for block_id, content in zip(fresh, lacking, strict=False):
                    cache.register_block(block_id, content)
            if isinstance(blocks, HybridBlocks):
                self._load_state(blocks, sequence, kv)
            if isinstance(blocks, WindowedBlocks):
                self._load_windows(blocks, [*here.block_ids, *fresh], kv)
        except Exception as error:  # the store may be the user's own
            _log.warning("parking: KV could not be loaded (%s); it is computed again", reason_of(error))
            return here.num_tokens
        finally:
            for block_id in reversed([*here.block_ids, *fresh]):
                cache.free_block(block_id)
        if self.state_bytes or self.window_store is not None:
            return blocks.find(sequence, kv.num_tokens).num_tokens
        return here.num_tokens + sum(len(content.token_ids) for content in lacking[: len(fresh)])

    def _load_state(self, blocks: HybridBlocks, sequence: Sequence, kv: KVCopy) -> None:
        """Put the state behind copied blocks into the cache, if all of these are there and it is not."""
        *_, content = contents(blocks.hasher, sequence, kv.num_tokens)
        if kv.state is None or self.state_store is None or (state_id := blocks.take_state_for(content)) is None:
            return
        try:
            self.state_store.write_states([state_id], kv.state[np.newaxis])
            blocks.states.keep(content, state_id, kv.num_tokens)
        finally:
            blocks.states.free(state_id)

    def _load_windows(self, blocks: WindowedBlocks, block_ids: ListOf[int], kv: KVCopy) -> None:
        """Put the window blocks of copied blocks into the cache, as far as they lack some and there is room."""
        assert self.window_store is not None  # Invariant: only an engine with window blocks has these
        assert kv.windows is not None
        first, of_block = self._first_window(kv.num_tokens), blocks.windows.of_block
        lacking = [place for place in range(first, len(block_ids)) if of_block[block_ids[place]] < 0]
        taken = [block_ids[place] for place in lacking]
        if not taken or not blocks.windows.has_room_for(len(taken), ()):
            return
        blocks.windows.allocate(taken)
        try:
            self.window_store.write_blocks(of_block[taken].tolist(), kv.windows[[place - first for place in lacking]])
        except BaseException:
            for block_id in taken:
                blocks.cache.evict_block(block_id)
            raise
        finally:
            blocks.windows.free(taken, is_end=True)

    def _first_window(self, num_tokens: int) -> int:
        blocks = self.scheduler.kv_cache.device
        return blocks.first_read(num_tokens) if isinstance(blocks, WindowedBlocks) else 0

    def copy_kv(self, sequence: Sequence) -> KVCopy | None:
        """Copy the KV of a sequence from the device or the host, whichever has more; ``None``: there is none."""
        here, there = self.scheduler.kv_cache.find(sequence)
        if self.store is None or not (here.num_tokens or there.num_tokens):
            return None
        try:
            is_there, found = (True, there) if here.num_tokens < there.num_tokens else (False, here)
            state, states = None, self.state_store
            if found.state >= 0:
                if states is None:
                    return None
                state = (states.read_host_states if is_there else states.read_states)([found.state])[0]
            read = self.store.read_host_blocks if is_there else self.store.read_blocks
            windows, blocks = None, self.scheduler.kv_cache.device
            if self.window_store is not None and isinstance(blocks, WindowedBlocks):
                last = list(found.block_ids[blocks.first_read(found.num_tokens) :])
                windows = self.window_store.read_blocks(blocks.windows.of_block[last].tolist())
            return KVCopy(found.num_tokens, read(found.block_ids), state, windows)
        except Exception as error:  # the store may be the user's own, or there is no memory for the copy
            _log.warning("parking: KV could not be copied (%s); only tokens are kept", reason_of(error))
            return None

    def spec(self, token_ids: ListOf[int], num_tokens: int | None = None) -> KVSpec:
        """Describe the KV of a sequence's first ``num_tokens`` tokens, or all, as this engine makes it."""
        block_bytes = self.store.block_bytes if self.store is not None else 0
        is_long = self.num_short_tokens is not None and len(token_ids) > self.num_short_tokens
        form = sha256(f"{self.kv_format} long".encode()).hexdigest() if is_long else self.kv_format
        blocks, window_bytes = self.scheduler.kv_cache.device, self.window_store.block_bytes if self.window_store else 0
        window = blocks.window if isinstance(blocks, WindowedBlocks) else 0
        return KVSpec(tuple(token_ids[:num_tokens]), blocks.block_size, block_bytes, form, self.state_bytes,
                      window_bytes, window)

    def take_weights(self, kv_format: str) -> None:
        """Keep only tokens of what is parked, as its KV was computed with other weights; the caller forgets blocks."""
        self.kv_format, self.num_renewals = kv_format, self.num_renewals + 1
        for parked in list(self._parked.values()):
            self.unpark(parked.sequence)
            self._record(parked.sequence, "tokens", 0, None)

    def unpark(self, sequence: Sequence) -> None:
        """Remove a sequence and its file from the ledger; blocks pinned on the host stay until they are loaded."""
        parked = self._parked.pop(sequence.sequence_id, None)
        if parked is not None and parked.file is not None:
            self.directory.remove(parked.file.path)

    def free_kv(self, sequence: Sequence) -> None:
        """Free all KV that is kept for a sequence, if it is parked."""
        if sequence.sequence_id in self._parked:
            with self.change():
                self.unpark(sequence)
                self.scheduler.moves.free_on_host(sequence)

    def expire(self) -> None:
        """Free the KV whose time is over."""
        if (now := self.clock.now()) < self.next_expiry_s:
            return
        for parked in list(self._parked.values()):
            if parked.state.expires_s is not None and parked.state.expires_s <= now:
                self.free_kv(parked.sequence)
        expiries = [one.state.expires_s for one in self._parked.values() if one.state.expires_s is not None]
        self.next_expiry_s = min(expiries, default=math.inf)

    def close(self) -> None:
        """Free all KV and remove all files; a second call does nothing."""
        for parked in list(self._parked.values()):
            self.free_kv(parked.sequence)
        self.directory.close()

    def _record(
        self, sequence: Sequence, tier: Tier, num_tokens: int, ttl_s: float | None, file: ParkedFile | None = None
    ) -> ParkedState:
        state = ParkedState(tier, num_tokens, self._expiry(ttl_s))
        self._parked[sequence.sequence_id] = _Parked(sequence, state, file)
        return state

    def _expiry(self, ttl_s: float | None) -> float | None:
        if ttl_s is None:
            return None
        expires_s = self.clock.now() + ttl_s
        self.next_expiry_s = min(self.next_expiry_s, expires_s)
        return expires_s
