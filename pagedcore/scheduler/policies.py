"""Scheduling policies: a sort key and one permission, never a scheduler of their own.

Sequences are admitted in the order of the key, and preempted in the reverse order. A custom policy is a function
without arguments that returns a ``Policy``, registered in the plugin table ``schedulers``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagedcore.scheduler.waiting_queue import BY_ARRIVAL
from pagedcore.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Policy:
    """How sequences are ordered, and when waiting ones may start."""

    name: str
    order: Callable[[Sequence], Any]
    """Sort key, smallest first, asked for when a sequence is added to a queue. Ties go by sequence id. If it raises, or
    its values cannot be ordered (NaN), the engine logs it once and goes over to "fcfs"."""
    admits_while_running: bool = True
    """``False``: a new batch starts only when the one before has finished completely."""
    has_priorities: bool = False
    """Whether the order looks at ``Sequence.priority``; if not, requests with another priority than 0 are refused."""
    cache_bonus: int = 8
    """How many arrivals later a request with a cached prefix may be and still start first; it gains one place for each
    cached block. No request is overtaken by more later ones than this."""


def fcfs() -> Policy:
    """First come, first served."""
    return Policy("fcfs", BY_ARRIVAL)


def priority() -> Policy:
    """Highest priority first, first come first served among equals."""
    return Policy("priority", lambda sequence: (-sequence.priority, sequence.arrival), has_priorities=True)


def static() -> Policy:
    """First come, first served, in batches that run to their end: static batching, for comparison."""
    return Policy("static", BY_ARRIVAL, admits_while_running=False, cache_bonus=0)
