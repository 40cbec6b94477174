"""Eviction policies: which cached block is forgotten first when room is needed.

A policy is a key function over what is known of a cached block, smallest first. Whatever the policy, a block is
never forgotten before the idle blocks that continue it: without their past they could not be found again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol


class Usage(Protocol):
    """What a policy may look at. Times are counts of uses of the whole cache."""

    @property
    def num_hits(self) -> int:
        """Times that somebody found the block in the cache."""
        ...

    @property
    def last_used(self) -> int:
        """When the block was last given up by somebody."""
        ...

    @property
    def first_used(self) -> int:
        """When the block came into the cache."""
        ...


EvictionPolicy = Callable[[Usage], tuple[int, ...]]


def least_recently_used(usage: Usage) -> tuple[int, ...]:
    """Forget what nobody has used for longest."""
    return (usage.last_used,)


def least_frequently_used(usage: Usage) -> tuple[int, ...]:
    """Forget what was found least often; among equals, what nobody has used for longest."""
    return usage.num_hits, usage.last_used


def first_in_first_out(usage: Usage) -> tuple[int, ...]:
    """Forget what came first."""
    return (usage.first_used,)


POLICIES: Final[dict[str, EvictionPolicy]] = {
    "lru": least_recently_used,
    "lfu": least_frequently_used,
    "fifo": first_in_first_out,
}
