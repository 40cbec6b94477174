"""The rotary angles of all positions, taken from the model's own rotary embedding.

Owns a table that grows with the longest context seen. Every variant whose angles depend on the position alone works,
because the model's own module computes them; it never knows which variant that is.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from pagedcore.errors import ModelNotSupported

_FIRST_SIZE: Final = 1024


class RotaryAngles:
    """Cosines and sines by position, as ``RotaryWriter`` reads them.

    Invariant: a row never changes once it is in the table.
    """

    def __init__(self, rotary: Any, head_size: int, dtype: torch.dtype) -> None:
        """Make the first rows.

        Args:
            rotary: called with a tensor of the model's dtype and positions [1, n]; returns cosines and sines [1, n, D].
            head_size: D.
            dtype: number format of the model, which the angles are rounded to.

        Raises:
            ModelNotSupported: the module does not rotate the two halves of a whole head alike.
        """
        self._rotary = rotary
        self._head_size = head_size
        self._dtype = dtype
        self._table = torch.empty(0, head_size)
        self.upto(_FIRST_SIZE)

    def upto(self, num_positions: int) -> torch.Tensor:
        """Return float32 [n, D] with n at least ``num_positions``: D / 2 cosines, then D / 2 sines."""
        known = len(self._table)
        if num_positions > known:
            self._table = torch.cat([self._table, self._rows(known, max(num_positions, 2 * known))])
        return self._table

    def _rows(self, begin: int, end: int) -> torch.Tensor:
        cosines, sines = self._rotary(torch.empty(0, dtype=self._dtype), torch.arange(begin, end)[None])
        half = self._head_size // 2
        for angles in (cosines, sines):
            if angles.shape != (1, end - begin, 2 * half) or not torch.equal(angles[..., :half], angles[..., half:]):
                raise ModelNotSupported("model: its rotary embedding does not turn both halves of a head alike.")
        return torch.cat([cosines[0, :, :half], sines[0, :, :half]], dim=-1).float().contiguous()
