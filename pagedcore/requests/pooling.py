"""From the hidden states of one text to its vector, whatever steps they come in.

The sum of the wanted positions is taken one position after the other, in float64, so that chunks, company and a step
that is computed again change no bit of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pagedcore.errors import InternalError

if TYPE_CHECKING:
    from pagedcore.protocols import FloatArray

_SMALLEST_LENGTH: Final = 1e-12
"""What a shorter vector is divided by, as torch's ``normalize`` does."""


@dataclass(slots=True, eq=False)
class TextReader:
    """Reads the hidden states of one text and makes the vector that is their mean.

    The last state alone is the mean of one. Invariant: ``_read`` is one object, changed at once: how many positions
    from ``first`` on are in the sum, and the sum, float64 [hidden size].
    """

    first: int
    """The first position that counts."""
    dimensions: int | None
    """Numbers of the vector that are kept, the first ones; ``None``: all."""
    normalize: bool
    """Whether what is kept gets the length 1."""
    _read: tuple[int, Any] = (0, 0.0)

    def read(self, start: int, states: FloatArray) -> bool:
        """Take the states of positions from ``start`` on; return whether they are finite. See ``ReadsHidden``."""
        count, total = self._read
        known = self.first + count - start
        if known < 0:
            raise InternalError(f"a reader of position {self.first + count} was given position {start}")
        if not np.isfinite(states).all():
            return False
        for state in states[known:]:
            # Why in this order: any other one, of pairs or of chunks, may round differently.
            total, count = total + state.astype(np.float64), count + 1
        self._read = count, total
        return True

    def begin_anew(self) -> None:
        """Forget what was read: all positions will come again, with other states."""
        self._read = 0, 0.0

    def vector(self) -> FloatArray:
        """Return the vector of what was read, float32, read-only. Raises ``InternalError`` if that is nothing."""
        count, total = self._read
        if not count:
            raise InternalError("a vector was asked for of a text that was not read")
        mean = (total / count)[: self.dimensions]
        if self.normalize:
            # Why fsum: its result does not depend on how a processor adds.
            mean = mean / max(math.sqrt(math.fsum((mean * mean).tolist())), _SMALLEST_LENGTH)
        vector: FloatArray = mean.astype(np.float32)
        vector.setflags(write=False)
        return vector
