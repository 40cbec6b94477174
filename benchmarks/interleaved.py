"""Repeats ways of doing the same thing in turn, A B C D, B C D A, ..., and compares them pair by pair.

A machine that others use too is slow for a while and fast for a while. What ran in the same round ran under nearly the
same conditions, so ratios are taken within rounds, and their median and spread are reported.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from math import comb


def turns(ways: Sequence[str], num_rounds: int) -> Iterator[list[str]]:
    """Yield the ways in order, each round one place further, so that none always comes first."""
    for number in range(num_rounds):
        start = number % len(ways)
        yield [*ways[start:], *ways[:start]]


class Budget:
    """Time that may be used."""

    def __init__(self, minutes: float) -> None:
        self._start_s = time.monotonic()
        self._end_s = self._start_s + 60 * minutes

    def has_time_for_another(self, num_done: int) -> bool:
        """Whether one more like those ``num_done`` would end in time."""
        now_s = time.monotonic()
        return num_done == 0 or now_s + (now_s - self._start_s) / num_done <= self._end_s


def median_and_spread(values: Sequence[float], shown: Callable[[float], str] = "{:.3f}".format) -> str:
    """Say the median, and in brackets the smallest and the largest."""
    return f"{shown(statistics.median(values))} ({shown(min(values))} - {shown(max(values))})"


def ratios(some: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return some / others, round by round."""
    return [one / other for one, other in zip(some, others, strict=True)]


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the order statistics that enclose the median with this confidence."""
    ordered, number = sorted(values), len(values)
    tail, place = 0.0, 0
    while place < number // 2 and tail + comb(number, place) / 2**number <= (1 - confidence) / 2:
        tail += comb(number, place) / 2**number
        place += 1
    place = max(0, place - 1)
    return ordered[place], ordered[number - 1 - place]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
