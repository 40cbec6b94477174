"""The memory for states of a model with recurrent layers: how many blocks, and how many sequences may run with them.

States and KV share one budget of bytes, and so they do on the host. A running sequence takes two blocks, one that it
reads and one that it writes; as many again keep states from which later requests begin, or more where states are small
beside KV. Where that is more than half of the budget, fewer are kept, down to one for each sequence that runs, and then
fewer sequences run: neither kind of memory can be all taken by the other.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pagedcore.config.engine_config import EngineConfig
from pagedcore.config.memory_budget import format_memory
from pagedcore.errors import InvalidConfig
from pagedcore.protocols import KeepsStates

if TYPE_CHECKING:
    from pagedcore.protocols import ModelBackend, StateStore

_log = logging.getLogger("pagedcore")

LEAST_STATES: Final = 2
"""Of one running sequence: what it reads, and what it writes."""
STATES_PER_ROW: Final = LEAST_STATES + 1
"""Where memory is short, one is kept for each sequence that runs."""
TOKENS_PER_STATE: Final = 128
"""A state is kept for so many tokens of KV, or for more, so that states take no more than a 16th of its bytes."""
MOST_SHARE: Final = 0.5
"""Of a budget that KV is in too."""


def num_useful_states(num_seqs: int, num_tokens: int, state_bytes: int, token_bytes: int) -> int:
    """Return how many states serve so many running sequences, with KV of so many tokens in all.

    Args:
        num_seqs: sequences that run at once.
        num_tokens: tokens of all KV blocks.
        state_bytes: of one state; 0 for a model that keeps none.
        token_bytes: of the KV of a token; 0 for a model without attention.
    """
    if not state_bytes:
        return 0
    apart = max(TOKENS_PER_STATE, 16 * state_bytes // token_bytes) if token_bytes else num_tokens + 1
    return LEAST_STATES * num_seqs + max(LEAST_STATES * num_seqs, num_tokens // apart)


class StateMemory:
    """The state blocks of one engine's backend; none if its model keeps no states.

    Invariant: two blocks are there for each sequence that may run.
    """

    def __init__(self, backend: ModelBackend, config: EngineConfig, most_tokens: int, token_bytes: int) -> None:
        """Look at the model, whose KV takes ``token_bytes`` for each of ``most_tokens`` at most."""
        self._backend = backend if isinstance(backend, KeepsStates) and backend.state_bytes else None
        self.state_bytes = self._backend.state_bytes if self._backend is not None else 0
        """Of one block; 0: there are none."""
        self.num_states = 0
        self.num_host_states = 0
        """Blocks of the host tier."""
        self._wanted, self._most_tokens, self._token_bytes = config.max_num_seqs, most_tokens, token_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_states * self.state_bytes

    @property
    def max_num_seqs(self) -> int:
        """How many sequences may run."""
        return min(self._wanted, max(1, self.num_states // STATES_PER_ROW)) if self.state_bytes else self._wanted

    def take(self, num_bytes: int, *, has_kv: bool, what: str) -> int:
        """Choose the number of blocks that a budget has room for; return the bytes that are left for KV.

        Args:
            num_bytes: of the budget.
            has_kv: whether KV needs some of it.
            what: the setting that it comes from, for a message.

        Raises:
            InvalidConfig: it has not room for one sequence.
        """
        if not self.state_bytes:
            return num_bytes
        room = int(num_bytes * MOST_SHARE) if has_kv else num_bytes
        if room < LEAST_STATES * self.state_bytes:
            least = int(LEAST_STATES * self.state_bytes / (MOST_SHARE if has_kv else 1))
            raise InvalidConfig(
                f"{what}: got {num_bytes} bytes, allowed is at least {least} for this model: {LEAST_STATES} states of "
                f"{self.state_bytes} bytes" + (", and as much for KV." if has_kv else "."))
        num_tokens = min(self._most_tokens, num_bytes // self._token_bytes) if has_kv else self._most_tokens
        useful = num_useful_states(self._wanted, num_tokens, self.state_bytes, self._token_bytes)
        self.num_states = min(useful, room // self.state_bytes)
        return num_bytes - self.num_bytes

    def take_on_host(self, num_bytes: int, block_bytes: int) -> int:
        """Choose the number of blocks that a host tier has room for; return the bytes that are left for KV.

        Args:
            num_bytes: of the host tier.
            block_bytes: of a KV block; 0: KV has no bytes.

        Raises:
            InvalidConfig: it has not room for one state, and for KV.
        """
        if not self.state_bytes:
            return num_bytes
        room = int(num_bytes * MOST_SHARE) if block_bytes else num_bytes
        if room < max(self.state_bytes, block_bytes):
            least = int(max(self.state_bytes, block_bytes) / (MOST_SHARE if block_bytes else 1))
            raise InvalidConfig(
                f"host_kv_memory: got {num_bytes} bytes, allowed is at least {least} for this model: a state of "
                f"{self.state_bytes} bytes" + (", and as much for KV." if block_bytes else "."))
        # Why not more than blocks: each is found by one of these.
        per_block = num_bytes // (self.state_bytes + block_bytes) if block_bytes else room
        self.num_host_states = min(room // self.state_bytes, per_block)
        return num_bytes - self.num_host_states * self.state_bytes

    def weight(self, block_bytes: int) -> float:
        """Return as how many KV blocks a state counts where blocks are moved."""
        return self.state_bytes / max(1, block_bytes)

    def allocate(self) -> None:
        """Allocate the blocks in the backend, which frees them with its KV.

        Raises ``InvalidConfig`` if there are to be some on the host, and the backend has nothing to move them with.
        """
        if self._backend is None:
            return
        self._backend.allocate_states(self.num_states)
        if self.num_host_states:
            if self._backend.state_store is None:
                raise InvalidConfig("host_kv_memory: this model backend has no state_store to move states with; leave "
                                    "it.")
            self._backend.state_store.allocate_host(self.num_host_states)

    @property
    def store(self) -> StateStore | None:
        """What moves the blocks, where there are some."""
        return self._backend.state_store if self._backend is not None else None

    def followed_by(self, config: EngineConfig) -> EngineConfig:
        """Return the settings with as many running sequences as have states; others stay as they are."""
        if (most := self.max_num_seqs) == config.max_num_seqs:
            return config
        _log.warning(
            "states: %d sequences run at most, not %d (max_num_seqs): each takes %d states of %s; for more raise "
            "kv_cache_memory", most, config.max_num_seqs, STATES_PER_ROW, format_memory(self.state_bytes),
        )
        return replace(config, max_num_seqs=most, max_num_waiting=config.waiting_limit,
                       min_batch_size=min(config.min_batch_size, most))

    def log_sum(self) -> None:
        """Say how many there are."""
        if self._backend is not None:
            _log.info(
                "state pool: %d states, %s each: %s in all, for %d running sequences and %d states that are kept",
                self.num_states, format_memory(self.state_bytes), format_memory(self.num_bytes), self.max_num_seqs,
                self.num_states - LEAST_STATES * self.max_num_seqs,
            )
