"""The memory for window blocks: how many there are, for a model whose layers with a window have memory of their own.

Blocks and window blocks share one budget of bytes. A sequence takes a block for all of its positions, and window blocks
for those in its window and in the chunk that is computed. There are as many as all sequences that may run can use at
once; if that is more than half of the blocks that a pool of one kind would have, half as many.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pagedcore.config.engine_config import EngineConfig
from pagedcore.config.memory_budget import format_memory
from pagedcore.protocols import HostsKVPool, KeepsStates, KeepsWindows
from pagedcore.scheduler.window_rows import most_windows

if TYPE_CHECKING:
    from pagedcore.protocols import ModelBackend, WindowStore

_log = logging.getLogger("pagedcore")


class WindowMemory:
    """The window blocks of one engine's backend; none if no layer of its model gives up what has left its window.

    Invariant: there are enough for two sequences, or none.
    """

    def __init__(
        self, backend: ModelBackend, config: EngineConfig, block_size: int, length: int, *, has_draft_model: bool
    ) -> None:
        """Look at the model; ``length`` is the longest context in tokens."""
        self.window = self.num_windows = 0
        """Positions that layers with a window read, and window blocks; 0: the pool has one kind of blocks."""
        self.wanted_block_bytes = 0
        """Bytes that a window block would have; 0: there can be none."""
        self._layers = backend.windows if isinstance(backend, KeepsWindows) else None
        if self._layers is None or not self._layers.window or not isinstance(backend, HostsKVPool):
            return
        # Why: what moves to the host, or is guessed by a second model, has one kind of blocks; so have hybrids.
        has_one_kind = config.host_kv_memory is not None or has_draft_model or (
            isinstance(backend, KeepsStates) and backend.state_bytes > 0)
        if has_one_kind or not can_have_windows(self._layers.window, block_size, length):
            return
        self._block_size, self._config = block_size, config
        self.wanted_block_bytes = self._layers.block_bytes(block_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one window block, which are none of a block then; 0: there are none."""
        return self.wanted_block_bytes if self.num_windows else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all window blocks."""
        return self.num_windows * self.wanted_block_bytes

    def take(self, num_blocks: int, most_blocks: int = 0) -> None:
        """Choose the number of window blocks.

        Args:
            num_blocks: that a pool of one kind would have.
            most_blocks: window blocks that are of no use to others, which would have more blocks than they need.
        """
        if self.wanted_block_bytes and self._layers is not None:
            window = self._layers.window
            self.num_windows = num_windows_for(num_blocks, most_blocks, window, self._block_size, self._config)
            self.window = window if self.num_windows else 0

    def plan(self) -> None:
        """Let the backend allocate them with its next pool, which frees them too."""
        if self._layers is not None and self.num_windows:
            self._layers.use(self.num_windows)

    @property
    def store(self) -> WindowStore | None:
        """What moves window blocks, once they are allocated."""
        return self._layers.store if self._layers is not None and self.num_windows else None

    def log_sum(self) -> None:
        """Say how many there are."""
        if self.num_windows:
            _log.info(
                "window blocks: %d, %d bytes each: %s in all, for layers that read %d tokens back", self.num_windows,
                self.wanted_block_bytes, format_memory(self.num_bytes), self.window,
            )


def can_have_windows(window: int, block_size: int, length: int) -> bool:
    """Whether layers that read ``window`` positions ever leave two blocks behind in a context of so many."""
    return window <= length - 2 * block_size


def num_windows_for(
    num_blocks: int, most_blocks: int, window: int, block_size: int, config: EngineConfig
) -> int:
    """Return how many window blocks an engine has; 0: too few for two sequences, so the pool has one kind of blocks.

    Args:
        num_blocks: that a pool of one kind would have.
        most_blocks: as for ``WindowMemory.take``.
        window: positions that layers with a window read.
        block_size: tokens per block.
        config: says how many sequences run, with how many tokens in a step.
    """
    of_sequence = most_windows(window, block_size)
    wanted = config.max_num_seqs * of_sequence - (-config.max_num_batched_tokens // block_size)
    count = min(wanted, max(num_blocks // 2, most_blocks))
    return count if count >= 2 * of_sequence else 0
