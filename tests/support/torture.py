"""How large randomised tests are: ``TORTURE_SCALE`` multiplies their volume, 1 if it is not set."""

from __future__ import annotations

import os


def scaled(n: int) -> int:
    """Return ``n`` times the scale, at least 1."""
    return max(1, round(n * float(os.environ.get("TORTURE_SCALE", "1"))))
