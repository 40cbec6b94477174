"""Arrays of a step, copied to where those of the last step were, so that recorded calls find the present ones there."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class KeptArrays:
    """Copies of arrays by name.

    Invariant: arrays of one name and about one size have one address.
    """

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, int], npt.NDArray[Any]] = {}

    def keep(self, name: str, array: npt.NDArray[Any]) -> int:
        """Copy an array and return the copy's address."""
        room = self.room(name, array.size, array.dtype)
        room[:] = array
        return int(room.ctypes.data)

    def room(self, name: str, size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return room for so many elements, at an address that others of this name and about this size have had."""
        key = name, max(64, 1 << (size - 1).bit_length())
        if key not in self._arrays:
            self._arrays[key] = np.zeros(key[1], dtype)
        return self._arrays[key][:size]
