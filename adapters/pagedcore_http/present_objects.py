"""Objects that are there when a server starts are left out of garbage collections as long as it runs.

They stay anyway, and to look for garbage among all that torch and a framework import stalls every stream for 0.2 s.
"""

from __future__ import annotations

import gc
from typing import Final

_MOST_OF_PYTHON: Final = 1000
"""Objects that may be left out when a program begins: CPython 3.12 does so with 375 of its own. A host's ``gc.freeze``
leaves out all that there are, 5,000 at the least."""


class PresentObjects:
    """What was there at the start, from ``keep`` to ``release``."""

    def __init__(self) -> None:
        self._are_ours = False

    def keep(self) -> None:
        """Collect garbage, then leave out what is left."""
        gc.collect()
        # Why: to unfreeze is for all objects at once, also for those that somebody else has frozen.
        self._are_ours = gc.get_freeze_count() < _MOST_OF_PYTHON
        gc.freeze()

    def release(self) -> None:
        """Let the collector look at everything again, unless somebody else had left objects out before."""
        if self._are_ours:
            gc.unfreeze()
        self._are_ours = False
