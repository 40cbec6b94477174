"""Memory sizes as text, and one budget that several engines in a process draw their KV pools from.

It allocates nothing and does not read the machine. A KV pool is allocated once, when its engine starts, and never moves
or grows, so an engine keeps what it draws at its start until it is closed. ``engine/kv_memory.py`` draws.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pagedcore.errors import InvalidConfig, MemoryBudgetExceeded, show

_UNITS: Final = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
                 "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "B": 1}
_LIKE_A_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt])", re.IGNORECASE)
_SIZES: Final = 'bytes or text such as "512MiB" or "2GiB"'


def parse_memory(given: int | float | str | None, *, free_bytes: int, what: str = "kv_cache_memory") -> int | None:
    """Turn bytes, text such as ``"2GiB"``, or a share (float between 0 and 1) of ``free_bytes`` into bytes.

    Raises:
        InvalidConfig: ``given`` is none of these, nor ``None``; the message calls it ``what``.
    """
    if given is None:
        return None
    num_bytes = _parse_size(given) if isinstance(given, str) else given
    if type(num_bytes) is float and 0 < num_bytes < 1:
        return int(num_bytes * free_bytes)
    if type(num_bytes) is int and 0 < num_bytes < 2**63:
        return num_bytes
    raise InvalidConfig(
        f"{what}: got {show(given)}, allowed is {_SIZES}, or a share between 0 and 1. {_nearest_size(given)}".rstrip()
    )


def _nearest_size(given: object) -> str:
    found = _LIKE_A_SIZE.match(given[:64]) if isinstance(given, str) else None
    return f"Did you mean {found[1]}{found[2].upper()}iB?" if found else ""


def _parse_size(text: str) -> int | None:
    cleaned = text.strip().upper().replace(" ", "")
    unit = next((unit for unit in _UNITS if cleaned.endswith(unit)), "")
    try:
        return int(float(cleaned.removesuffix(unit)) * _UNITS[unit]) if unit else int(cleaned)
    except (ValueError, OverflowError):
        return None


def format_memory(num_bytes: int) -> str:
    """Write a number of bytes with a binary unit: ``1536`` is "1.5 KiB"."""
    unit = next((unit for unit in ("TiB", "GiB", "MiB", "KiB") if num_bytes >= _UNITS[unit.upper()]), None)
    return f"{num_bytes / _UNITS[unit.upper()]:.1f} {unit}" if unit else f"{num_bytes} bytes"


class MemoryLease:
    """Bytes drawn from a budget, until ``close`` or until the lease is garbage-collected.

    Invariant: the bytes go back exactly once.
    """

    def __init__(self, num_bytes: int, give_back: Callable[[int], None]) -> None:
        self.num_bytes = num_bytes
        self._finalizer = weakref.finalize(self, give_back, num_bytes)

    def close(self) -> None:
        """Give the bytes back; a second call does nothing."""
        self._finalizer()


class MemoryBudget:
    """Memory that the KV pools of several engines in one process may take together, or their weights too.

        budget = MemoryBudget("4GiB")
        small = Engine.from_pretrained("a", kv_cache_memory=budget.share("1GiB"))
        large = Engine.from_pretrained("b", kv_cache_memory=budget)

    An engine that is given the budget draws what it can use of what is left; one that is given a share draws exactly
    that, in whole blocks; either is refused if the budget does not have it. Closing an engine, or losing the last
    reference to it, gives its bytes back. This is a ledger of reservations: bytes never move between engines that run.
    It is thread-safe. With ``counts_weights`` each engine draws the weights of its model beside its pool, before it
    reads them.

    Invariant: the leases that are out never add up to more than ``total_bytes``.
    """

    def __init__(self, total: int | str, *, counts_weights: bool = False) -> None:
        """Open a budget of so many bytes, or of text such as ``"4GiB"``.

        Raises:
            InvalidConfig: it is neither.
        """
        self.counts_weights = counts_weights
        """Whether it has weights too; see ``SharedEngines``, which lets engines sleep to make room."""
        num_bytes = None if isinstance(total, float) else parse_memory(total, free_bytes=0, what="total")
        if num_bytes is None:
            raise InvalidConfig(f"total: got {show(total)}, allowed is {_SIZES}.")
        self.total_bytes = num_bytes
        """All there is to draw."""
        self._drawn = 0
        self._lock = threading.Lock()
        # Why: the garbage collector may give a lease back while this thread holds the lock; appending needs none.
        self._returned: deque[int] = deque()

    @property
    def left_bytes(self) -> int:
        """What can be drawn now."""
        with self._lock:
            return self._settle()

    def share(self, most: int | float | str) -> BudgetShare:
        """Name a part of this budget for one engine: bytes, text, or a float below 1 as a share of the total.

        Nothing is drawn until an engine starts with it; two engines that are given the same share draw it twice.

        Raises:
            InvalidConfig: ``most`` is none of these.
        """
        num_bytes = parse_memory(most, free_bytes=self.total_bytes, what="share")
        if num_bytes is None:
            raise InvalidConfig(f"share: got None, allowed is {_SIZES}, or a share between 0 and 1.")
        return BudgetShare(self, num_bytes)

    def draw(self, at_least: int, at_most: int | None = None, *, unit: int = 1) -> MemoryLease:
        """Take as much as is left, in multiples of ``unit`` bytes, from ``at_least`` to ``at_most`` bytes.

        Args:
            at_least: bytes without which nothing is taken.
            at_most: bytes beyond which nothing is of use; ``None``: ``at_least``.
            unit: bytes of what is counted.

        Raises:
            MemoryBudgetExceeded: less than ``at_least`` bytes are left.
        """
        with self._lock:
            left = self._settle()
            num_bytes = min(left, at_least if at_most is None else at_most) // unit * unit
            if num_bytes < at_least:
                raise MemoryBudgetExceeded(at_least, left, self.total_bytes)
            self._drawn += num_bytes
        return MemoryLease(num_bytes, self._returned.append)

    def _settle(self) -> int:
        """Account for returned leases and return what is left; the caller holds the lock."""
        while self._returned:
            self._drawn -= self._returned.popleft()
        return self.total_bytes - self._drawn


@dataclass(frozen=True, slots=True)
class BudgetShare:
    """So many bytes of a budget, for one engine."""

    budget: MemoryBudget
    num_bytes: int
