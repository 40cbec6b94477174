"""The memory of one engine's KV pool: how many blocks it has, where their bytes come from, and when they go back.

Owns the sum at an engine's start and says it through the logger "pagedcore". The pool is allocated once and never
moves; ``kv_cache/`` says which sequence holds which of its blocks. Read ``memory_budget.py`` for the budget that
several engines share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from pagedcore.config.engine_config import EngineConfig
from pagedcore.config.memory_budget import BudgetShare, MemoryBudget, MemoryLease, format_memory, parse_memory
from pagedcore.engine.state_memory import StateMemory
from pagedcore.engine.window_memory import WindowMemory
from pagedcore.errors import InvalidConfig
from pagedcore.execution.machine import free_memory_bytes
from pagedcore.protocols import HostsKVPool, MeasuresSteps, MovesKVBlocks

if TYPE_CHECKING:
    from pagedcore.engine.draft_models import LoadedDraftModel
    from pagedcore.protocols import CacheStore, ModelBackend

_log = logging.getLogger("pagedcore")

_MOST_NAMES: Final = 2**18
Leased = Literal["kv", "states", "windows", "weights", "draft"]
DEFAULT_MEMORY_SHARE: Final = 0.3
"""Share of a machine's free memory that a KV pool takes at most when nothing is said; pages count once touched."""


class KVMemory:
    """The KV pool of one engine, allocated in its backend.

    Invariant: what was drawn from a budget goes back when the pool is closed or lost, or ``give_back`` is called.
    """

    def __init__(
        self, backend: ModelBackend, config: EngineConfig, draft: LoadedDraftModel | None = None,
        weights: MemoryLease | None = None,
    ) -> None:
        """Choose the number of blocks, draw their bytes from the budget if there is one, and allocate.

        A model that guesses has as many blocks in a pool of its own: sizes and budgets are those of both together, and
        a budget has its weights too. ``weights`` is what was drawn for the model's own.

        Raises:
            InvalidConfig: the setting has not room for one block, or the machine does not give so much.
            MemoryBudgetExceeded: the budget has not that much left.
        """
        pool = _pool_of(backend)
        self.block_size = config.block_size if config.block_size is not None else backend.block_size
        self._own_bytes = pool.kv_block_bytes(self.block_size)
        beside = _pool_of(draft.backend) if draft is not None else None
        self._block_bytes = self._own_bytes + (beside.kv_block_bytes(self.block_size) if beside is not None else 0)
        self._draft_bytes = draft.weight_bytes if draft is not None else 0
        self._length = context_length(backend.max_model_len, config)
        self._per_sequence = -(-self._length // self.block_size)
        most = config.max_num_seqs * self._per_sequence
        num_blocks = config.num_kv_blocks if config.num_kv_blocks is not None else most
        self.states = StateMemory(backend, config, num_blocks * self.block_size, self._block_bytes // self.block_size)
        """The states of the model's recurrent layers, if it has some."""
        self.windows = WindowMemory(
            backend, config, self.block_size, self._length, has_draft_model=draft is not None)
        """The window blocks, if layers with a window have memory of their own."""
        self.backends = (backend,) if draft is None else (backend, draft.backend)
        """What has a pool: the model, and one that guesses."""
        self._budget: MemoryBudget | None = None
        self._leases: dict[Leased, MemoryLease] = {} if weights is None else {"weights": weights}
        self._drawn: dict[Leased, int] = {what: lease.num_bytes for what, lease in self._leases.items()}
        free_bytes, self.num_host_blocks = pool.free_kv_bytes(), self._choose_num_host_blocks(config)
        with ExitStack() as undo:
            self.num_blocks = self._choose_num_blocks(backend, config, free_bytes, undo)
            self.num_bytes = self.num_blocks * self._own_bytes + self.windows.num_bytes
            """Bytes of the pool, padding and window blocks included, without that of a model that guesses."""
            self.windows.plan()
            backend.allocate_kv(self.num_blocks, self.block_size)
            undo.callback(pool.release_kv)
            self.states.allocate()
            if draft is not None and beside is not None:
                draft.backend.allocate_kv(self.num_blocks, self.block_size)
                undo.callback(beside.release_kv)
            self.store: CacheStore | None = backend.cache_store if isinstance(backend, MovesKVBlocks) else None
            """What moves the blocks, where the backend has that."""
            if self.num_host_blocks:
                self._allocate_host(self.store)
            self._undo = undo.pop_all()
        self._log_sum(free_bytes)
        self.states.log_sum()
        self.windows.log_sum()

    @property
    def state_weight(self) -> float:
        """As how many KV blocks a state counts where blocks are moved."""
        return self.states.weight(self._own_bytes)

    def close(self) -> None:
        """Let the backend free the pool, where it can, and give back what was drawn; a second call does nothing.

        Why: the backend may belong to the caller, and have another engine's pool by the time of a second call.
        """
        self._undo.close()

    def give_back(self, level: int) -> None:
        """Give back what was drawn from a budget for the pool, states with it, and at level 2 for weights."""
        for what in [one for one in self._leases if one in ("kv", "states", "windows") or level == 2]:
            self._leases.pop(what).close()

    def draw_again(self) -> None:
        """Draw what ``give_back`` has given. Raises ``MemoryBudgetExceeded``; then the caller gives back all again."""
        for what, num_bytes in self._drawn.items():
            if self._budget is not None and what not in self._leases:
                self._leases[what] = self._budget.draw(num_bytes)

    def draw_second(self) -> MemoryLease | None:
        """Draw what a second copy of the weights takes, on any thread; ``None``: no budget counts them.

        Raises:
            MemoryBudgetExceeded: the budget has not that much left.
        """
        held = self._leases.get("weights")
        return None if self._budget is None or held is None else self._budget.draw(held.num_bytes)

    def _choose_num_host_blocks(self, config: EngineConfig) -> int:
        free_bytes = free_memory_bytes()
        num_bytes = parse_memory(config.host_kv_memory, free_bytes=free_bytes, what="host_kv_memory")
        if num_bytes is not None and not self._own_bytes <= num_bytes <= free_bytes:
            raise InvalidConfig(
                f"host_kv_memory: got {num_bytes} bytes, allowed is at least one block ({self._own_bytes} bytes) and "
                f"at most the {free_bytes} bytes that are free."
            )
        if num_bytes is None:
            return 0
        num_bytes = self.states.take_on_host(num_bytes, self._own_bytes)
        return num_bytes // self._own_bytes if self._own_bytes else self._num_names(self.states.num_host_states)

    def _allocate_host(self, store: CacheStore | None) -> None:
        if store is None:
            raise InvalidConfig("host_kv_memory: this model backend has no cache_store to move blocks with; leave it.")
        store.allocate_host(self.num_host_blocks)

    def _choose_num_blocks(
        self, backend: ModelBackend, config: EngineConfig, free_bytes: int, undo: ExitStack
    ) -> int:
        given = config.kv_cache_memory
        if isinstance(given, MemoryBudget | BudgetShare):
            return self._draw(given, config, undo)
        if config.num_kv_blocks is not None:
            self.states.take(int(DEFAULT_MEMORY_SHARE * free_bytes), has_kv=False, what="num_kv_blocks: free memory")
            self._take_windows(config.num_kv_blocks * self._block_bytes, config)
            return config.num_kv_blocks
        num_bytes = parse_memory(given, free_bytes=free_bytes)
        if num_bytes is not None:
            num_bytes = self.states.take(num_bytes, has_kv=self._block_bytes > 0, what="kv_cache_memory")
            return self._whole_blocks(self._take_windows(num_bytes, config), config)
        fitting = int(DEFAULT_MEMORY_SHARE * free_bytes)
        if isinstance(backend, MeasuresSteps):
            rows, tokens = config.max_num_seqs, config.max_num_batched_tokens
            measured = backend.fitting_kv_bytes(min(tokens, rows * self._length), rows)
            fitting = fitting if measured is None else measured
        fitting = self.states.take(fitting, has_kv=self._block_bytes > 0, what="free memory")
        fitting = self._take_windows(fitting, config)
        if not self._block_bytes:
            return self._names(config)
        return max(1, min(self._useful_blocks(config), fitting // self._block_bytes))

    def _draw(self, source: MemoryBudget | BudgetShare, config: EngineConfig, undo: ExitStack) -> int:
        wanted = config.num_kv_blocks
        if isinstance(source, BudgetShare):
            num_bytes = self._take_states(source.num_bytes - self._draft_bytes, wanted)
            num_bytes = self._take_windows(num_bytes, config)
            unit = self._block_bytes
            wanted = wanted if wanted is not None else self._whole_blocks(num_bytes, config)
            if wanted * unit > num_bytes:
                raise InvalidConfig(
                    f"num_kv_blocks: got {wanted} ({wanted * unit} bytes), allowed is up to "
                    f"{num_bytes // unit}, this engine's share of the memory budget."
                )
            source = source.budget
        else:
            left = self._take_states(source.left_bytes - self._draft_bytes, wanted)
            self._take_windows(left, config)
            unit = self._block_bytes
        self._budget = source
        # Why not a method: what has a cycle goes to the garbage collector, and its bytes are missed until then.
        undo.callback(_close_all, self._leases)
        if self._draft_bytes:
            self._leases["draft"], self._drawn["draft"] = source.draw(self._draft_bytes), self._draft_bytes
        if self.states.num_bytes:
            self._leases["states"], self._drawn["states"] = source.draw(self.states.num_bytes), self.states.num_bytes
        if self.windows.num_bytes:
            self._leases["windows"] = source.draw(self.windows.num_bytes)
            self._drawn["windows"] = self.windows.num_bytes
        useful = self._useful_blocks if unit else self._names
        at_most = wanted if wanted is not None else useful(config)
        lease = source.draw((wanted or 1) * unit, at_most * unit, unit=max(1, unit))
        self._leases["kv"], self._drawn["kv"] = lease, lease.num_bytes
        return lease.num_bytes // unit if unit else at_most

    def _take_states(self, num_bytes: int, num_blocks: int | None) -> int:
        """Let states have of a budget what they may, beside so many KV blocks if these are given; return the rest."""
        kv_bytes = (num_blocks or 0) * self._block_bytes
        has_kv = num_blocks is None and self._block_bytes > 0
        return kv_bytes + self.states.take(num_bytes - kv_bytes, has_kv=has_kv, what="kv_cache_memory")

    def _take_windows(self, num_bytes: int, config: EngineConfig) -> int:
        """Let window blocks have what they may of a budget for blocks of one kind; return the rest. Without those a
        block is smaller.
        """
        whole, useful = self._block_bytes, self._useful_blocks(config)
        if not whole:
            return num_bytes
        given, of_windows = config.num_kv_blocks, self.windows.wanted_block_bytes
        num_blocks = given if given is not None else min(useful, num_bytes // whole)
        beyond = (num_bytes - useful * (whole - of_windows)) // of_windows if of_windows and given is None else 0
        self.windows.take(num_blocks, beyond)
        self._own_bytes -= self.windows.block_bytes
        self._block_bytes -= self.windows.block_bytes
        return num_bytes - self.windows.num_bytes

    def _whole_blocks(self, num_bytes: int, config: EngineConfig) -> int:
        if not self._block_bytes:
            return self._names(config)
        if num_bytes < self._block_bytes:
            raise InvalidConfig(
                f"kv_cache_memory: got {num_bytes} bytes, allowed is at least one block ({self._block_bytes} bytes)."
            )
        return num_bytes // self._block_bytes

    def _names(self, config: EngineConfig) -> int:
        """Return the blocks of a model without attention layers, which have no bytes and are the names of its states:
        those of every slot, and as far as numbers cost nothing, of every state.
        """
        return max(self._useful_blocks(config), self._num_names(self.states.num_states))

    def _num_names(self, num_states: int) -> int:
        return min(_MOST_NAMES, num_states * self._per_sequence)

    def _useful_blocks(self, config: EngineConfig) -> int:
        """Return the blocks of every slot at full length; more could never be used."""
        return self.states.max_num_seqs * self._per_sequence

    def _log_sum(self, free_bytes: int) -> None:
        num_bytes = self.num_blocks * self._block_bytes + self.windows.num_bytes
        _log.info(
            "KV pool: %d blocks of %d tokens, %d bytes each: %s in all, for %d tokens or %d sequences of %d tokens; "
            "%s of memory were free", self.num_blocks, self.block_size, self._block_bytes,
            format_memory(num_bytes), self.num_blocks * self.block_size,
            self.num_blocks // self._per_sequence, self._length, format_memory(free_bytes),
        )
        if num_bytes > free_bytes:
            _log.warning(
                "KV pool: its %s are more than the %s of memory that were free; lower kv_cache_memory or num_kv_blocks",
                format_memory(num_bytes), format_memory(free_bytes),
            )


def draw_weights(config: EngineConfig, weight_bytes: Callable[[], int]) -> MemoryLease | None:
    """Draw the weights of a model that is not read yet, where the budget of an engine counts them.

    Raises:
        MemoryBudgetExceeded: the budget has not enough left, for a share of its own not with the share.
    """
    source = config.kv_cache_memory
    budget, beside = (source.budget, source.num_bytes) if isinstance(source, BudgetShare) else (source, 0)
    if not (isinstance(budget, MemoryBudget) and budget.counts_weights):
        return None
    num_bytes = weight_bytes()
    # Why together first: a pool that has no room is refused before weights are read for nothing.
    budget.draw(num_bytes + beside).close()
    return budget.draw(num_bytes)


def _close_all(leases: dict[Leased, MemoryLease]) -> None:
    while leases:
        leases.popitem()[1].close()


def _pool_of(backend: ModelBackend) -> HostsKVPool:
    return backend if isinstance(backend, HostsKVPool) else _PlainPool(backend)


@dataclass(frozen=True, slots=True)
class _PlainPool:
    """What is assumed of a backend that is no ``HostsKVPool``; its pool is freed with it."""

    backend: ModelBackend

    def free_kv_bytes(self) -> int:
        return free_memory_bytes()

    def kv_block_bytes(self, block_size: int) -> int:
        return max(1, block_size * self.backend.kv_bytes_per_token)

    def release_kv(self) -> None:
        pass


def context_length(limit: int, config: EngineConfig) -> int:
    """Return the longest context of an engine in tokens; ``limit`` is the model's.

    Raises:
        InvalidConfig: ``max_model_len`` is more than the model was made for.
    """
    wanted = config.max_model_len
    if wanted is not None and wanted > limit:
        raise InvalidConfig(f"max_model_len: got {wanted}, allowed is up to {limit}, what the model was made for.")
    return wanted if wanted is not None else limit
