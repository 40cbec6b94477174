"""Owns the memory of what a hybrid model's recurrent layers keep of sequences, block by block, and what computes there.

Which sequence has which block, ``kv_cache`` and ``scheduler`` decide; ``pagedcore_kernels.state_layout`` defines the
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pagedcore.errors import InternalError, InvalidConfig
from pagedcore.protocols import RaggedRows
from pagedcore_kernels.cpu.recurrence.states import RecurrentStates
from pagedcore_kernels.cpu.runtime.huge_pages import populate
from pagedcore_kernels.state_layout import StateLayout


class StatePool:
    """State blocks on the CPU; a ``StateStore``.

    Invariant: ``states`` computes in ``pool``, which is allocated once and stays until ``close``.
    """

    def __init__(self, layout: StateLayout, num_states: int) -> None:
        """Allocate the blocks.

        Raises:
            InvalidConfig: there is not one block, or the memory for them cannot be had.
        """
        self.layout, self._num_states, self._num_host_states = layout, num_states, 0
        self._host: torch.Tensor | None = None
        self.open_again()

    def open_again(self) -> None:
        """Allocate what ``close`` has freed, with whatever bytes. Raises as ``__init__``."""
        self.pool: torch.Tensor = self._allocate(self._num_states, "states", "kv_cache_memory, or max_num_seqs")
        self.states: RecurrentStates | None = RecurrentStates(self.layout, self.pool)
        if self._num_host_states:
            try:
                self.allocate_host(self._num_host_states)
            except BaseException:
                self.close()
                raise

    def allocate_host(self, num_states: int) -> None:
        """Make room for so many state blocks on the host. Raises as ``__init__``."""
        self._host = self._allocate(num_states, "host_kv_memory", "host_kv_memory")
        self._num_host_states = num_states
        populate(self._host)

    def _allocate(self, num_states: int, what: str, setting: str) -> torch.Tensor:
        if num_states < 1:
            raise InvalidConfig(f"{what}: got {num_states} state blocks, allowed is at least 1.")
        try:
            return self.layout.allocate(num_states)
        except (RuntimeError, MemoryError, TypeError):
            raise InvalidConfig(
                f"{what}: got {num_states} state blocks of {self.layout.state_bytes} bytes, more than this machine "
                f"gives. Lower {setting}."
            ) from None

    def close(self) -> None:
        """Free all memory, also while this object is referenced."""
        self.states, self.pool, self._host = None, torch.empty(0, dtype=torch.uint8), None

    def planned(self, batch: RaggedRows) -> RecurrentStates:
        """Return what computes the recurrent layers of a batch.

        Raises:
            InternalError: there is no memory, or the batch does not say where its states are.
        """
        if self.states is None or batch.state_reads is None:
            raise InternalError("forward: the model keeps states, and the batch has none")
        self.states.plan(batch)
        return self.states

    def read_states(self, state_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return the bytes of state blocks, shape [N, state_bytes]."""
        contents: npt.NDArray[np.uint8] = self.pool.numpy()[list(state_ids)]
        return contents

    def read_host_states(self, state_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return the bytes of state blocks of the host, shape [N, state_bytes]."""
        contents: npt.NDArray[np.uint8] = self._require_host().numpy()[list(state_ids)]
        return contents

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy state blocks to the host: (source, destination)."""
        _copy(self.pool, self._require_host(), pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy state blocks from the host."""
        _copy(self._require_host(), self.pool, pairs)

    def _require_host(self) -> torch.Tensor:
        if self._host is None:
            raise InternalError("states: there is no host memory")
        return self._host

    def write_states(self, state_ids: Sequence[int], contents: npt.NDArray[np.uint8]) -> None:
        """Overwrite state blocks.

        Raises:
            InternalError: the bytes are not those of so many blocks.
        """
        if contents.shape != (len(state_ids), self.layout.state_bytes):
            raise InternalError(f"write: got bytes of shape {contents.shape} for {len(state_ids)} states")
        self.pool.numpy()[list(state_ids)] = contents


def _copy(source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    # Why not torch's copies: as in ``kv_pool``.
    sources, destinations = source.numpy(), destination.numpy()
    for here, there in pairs:
        destinations[there] = sources[here]
