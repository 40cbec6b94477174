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
        self.layout, self._num_states = layout, num_states
        self.open_again()

    def open_again(self) -> None:
        """Allocate what ``close`` has freed, with whatever bytes. Raises as ``__init__``."""
        if self._num_states < 1:
            raise InvalidConfig(f"states: got {self._num_states} blocks, allowed is at least 1.")
        try:
            self.pool: torch.Tensor = self.layout.allocate(self._num_states)
        except (RuntimeError, MemoryError, TypeError):
            raise InvalidConfig(
                f"states: got {self._num_states} blocks of {self.layout.state_bytes} bytes, more than this machine "
                "gives. Lower kv_cache_memory, or max_num_seqs."
            ) from None
        self.states: RecurrentStates | None = RecurrentStates(self.layout, self.pool)

    def close(self) -> None:
        """Free all memory, also while this object is referenced."""
        self.states, self.pool = None, torch.empty(0, dtype=torch.uint8)

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

    def write_states(self, state_ids: Sequence[int], contents: npt.NDArray[np.uint8]) -> None:
        """Overwrite state blocks.

        Raises:
            InternalError: the bytes are not those of so many blocks.
        """
        if contents.shape != (len(state_ids), self.layout.state_bytes):
            raise InternalError(f"write: got bytes of shape {contents.shape} for {len(state_ids)} states")
        self.pool.numpy()[list(state_ids)] = contents
