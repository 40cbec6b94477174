"""All metrics of an engine at one moment: what the recorder fills and ``prometheus.py`` writes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from pagedcore.metrics.definitions import Histogram
from pagedcore.plugins.hookspecs import EngineInfo
from pagedcore.requests.stats import EngineStats


@dataclass(slots=True)
class Distribution:
    """Counts of observations by bucket, and their sum.

    Invariant: ``counts[i]`` are those in (bounds[i - 1], bounds[i]]; the last one, those above every bound.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, weight: int = 1) -> None:
        """Count ``weight`` observations of ``value``."""
        self.counts[bisect_left(self.bounds, value)] += weight
        self.total += value * weight

    def copy(self) -> Distribution:
        """Return the same numbers, which no longer change."""
        other = Distribution(self.bounds, self.total)
        other.counts = self.counts.copy()
        return other


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that is shown, at one moment."""

    info: EngineInfo
    stats: EngineStats | None
    finished: dict[str, int]
    """Requests by finish reason."""
    distributions: list[tuple[Histogram, Distribution]]
