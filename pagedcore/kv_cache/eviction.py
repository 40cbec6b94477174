"""Eviction policies: the order in which cached blocks are evicted when room is needed.

A policy is a key function over the usage of a cached block, smallest first. Under every policy a block is evicted
after the idle blocks that continue it: without their parent they could not be found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol


class Usage(Protocol):
    """What a policy may look at. Times count the uses of the whole cache."""

    num_hits: int
    """How often the block was found in the cache."""
    last_used: int
    """When the block last lost its last reference."""
    first_used: int
    """When the block was registered."""


EvictionPolicy = Callable[[Usage], tuple[int, ...]]


def least_recently_used(usage: Usage) -> tuple[int, ...]:
    """Evict the block whose last use is the longest ago."""
    return (usage.last_used,)


def least_frequently_used(usage: Usage) -> tuple[int, ...]:
    """Evict the block that was found least often; among equals, the least recently used."""
    return usage.num_hits, usage.last_used


def first_in_first_out(usage: Usage) -> tuple[int, ...]:
    """Evict the block that was registered first."""
    return (usage.first_used,)


POLICIES: Final[dict[str, EvictionPolicy]] = {
    "lru": least_recently_used,
    "lfu": least_frequently_used,
    "fifo": first_in_first_out,
}
