"""How much a suite of random cases runs: little in ``make test``, as much as there is time for in ``make torture``."""

from __future__ import annotations

import os


def scaled(n: int) -> int:
    """Return how many cases to run where ``make test`` runs ``n``: ``TORTURE_SCALE`` times as many, at least one.

    Seeds begin at ``first_seed``, so that every round of ``make torture`` runs other ones.
    """
    return max(1, round(n * float(os.environ.get("TORTURE_SCALE", "1"))))


def first_seed() -> int:
    """Return the seed that a suite's random cases begin at: ``TORTURE_SEED``, 0 in ``make test``."""
    return int(os.environ.get("TORTURE_SEED", "0"))
