"""What came of a simulation, as numbers: throughput, latencies, goodput, utilisation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedcore.analysis.load_simulation.replica import Outcome, Replica
from pagedcore.config import field_rules as rules

_LATENCY = rules.number(0, above_low=True).or_none()


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What a request has to meet to count as goodput; ``None``: no target.

    Raises:
        InvalidConfig: a target is not a positive number.
    """

    ttft_ms: float | None = None
    """Time to the first token."""
    tpot_ms: float | None = None
    """Mean time from one token to the next."""

    def __post_init__(self) -> None:
        for one in fields(self):
            _LATENCY.check(one.name, getattr(self, one.name), rules.invalid_setting)

    def are_met_by(self, outcome: Outcome) -> bool:
        """Whether a request was completed in time."""
        if outcome.ttft_s is None or outcome.tpot_s is None:
            return False
        return (outcome.ttft_s * 1e3 <= (self.ttft_ms or math.inf)
                and outcome.tpot_s * 1e3 <= (self.tpot_ms or math.inf))


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Mean and percentiles of one kind of times, in seconds; 0 where there are none."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float

    @classmethod
    def of(cls, seconds: Iterable[float], counts: npt.ArrayLike | None = None) -> Latencies:
        """Describe times, each of which counts once, or as often as ``counts`` says.

        A percentile is the smallest time that at least this share of all do not exceed.
        """
        times = np.asarray(list(seconds), np.float64)
        if not len(times):
            return cls(mean_s=0.0, p50_s=0.0, p90_s=0.0, p99_s=0.0)
        weights = np.ones(len(times)) if counts is None else np.asarray(counts, np.float64)
        order = np.argsort(times, kind="stable")
        reached = np.cumsum(weights[order])
        places = np.searchsorted(reached, np.array((0.5, 0.9, 0.99)) * reached[-1] - 1e-9)
        p50, p90, p99 = times[order][places].tolist()
        return cls(mean_s=float(times @ weights / reached[-1]), p50_s=p50, p90_s=p90, p99_s=p99)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSummary:
    """What one tenant got."""

    num_requests: int
    num_completed: int
    computed_tokens_per_s: float
    """Prompt tokens that were not cached, and generated ones, of completed requests."""
    ttft: Latencies
    latency: Latencies


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A simulation in numbers; rates are per second of the virtual clock, from 0 to the last token."""

    num_replicas: int
    num_requests: int
    num_completed: int
    refusals: dict[str, int]
    """Requests that were not completed, by reason."""
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompt and generated tokens of completed requests."""
    ttft: Latencies
    token_interval: Latencies
    """Times from each token of a request to its next."""
    latency: Latencies
    """From the arrival to the last token."""
    goodput_per_s: float
    """Requests that meet the targets."""
    goodput_share: float
    """Their share of all requests, refused ones among these."""
    num_steps: int
    busy_share: float
    """Share of the time in which a replica computes a step."""
    slot_utilisation: float
    """Rows of all steps over steps times ``max_num_seqs``."""
    kv_utilisation: float
    """Positions that steps read over positions of the pool, in the mean over the time in steps."""
    most_blocks: int
    """That sequences of one replica have held at once, those of the step in flight included."""
    most_windows: int
    """Such window blocks; 0: there are none."""
    cached_share: float
    """Share of prompt tokens that were found in the cache."""
    num_preemptions: int
    tenants: dict[str, TenantSummary]
    """By name; empty if no request names one."""


class SimulationResult:
    """Every request's outcome, in the order of arrivals, and every replica's timeline."""

    def __init__(self, outcomes: ListOf[Outcome], replicas: ListOf[Replica], max_num_seqs: int) -> None:
        self.outcomes = outcomes
        self.timelines = [one.timeline for one in replicas]
        self.max_num_seqs = max_num_seqs
        self._busy_s = sum(one.busy_s for one in replicas)
        self._most_blocks = max(one.most_blocks for one in replicas)
        self._most_windows = max(one.most_windows for one in replicas)
        self._position_share_s = sum(one.position_seconds / one.num_positions for one in replicas)

    def summary(self, targets: Targets) -> Summary:
        """Put everything in numbers."""
        done = [one for one in self.outcomes if one.finished_s is not None]
        duration_s = max([one.finished_s for one in done if one.finished_s is not None], default=0.0)
        num_output, num_input = sum(one.num_output for one in done), sum(one.num_input for one in done)
        num_good, num_steps = sum(map(targets.are_met_by, self.outcomes)), sum(len(one.end_s) for one in self.timelines)
        pairs = [(np.asarray(one.interval_s), np.asarray(one.interval_count)) for one in self.timelines]
        intervals, counts = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        return Summary(
            num_replicas=len(self.timelines), num_requests=len(self.outcomes), num_completed=len(done),
            refusals=dict(sorted(Counter(one.refusal for one in self.outcomes if one.refusal).items())),
            duration_s=duration_s,
            requests_per_s=_ratio(len(done), duration_s), output_tokens_per_s=_ratio(num_output, duration_s),
            total_tokens_per_s=_ratio(num_input + num_output, duration_s),
            ttft=Latencies.of(one.ttft_s for one in done if one.ttft_s is not None),
            token_interval=Latencies.of(intervals, counts),
            latency=Latencies.of(one.finished_s - one.arrival_s for one in done if one.finished_s is not None),
            goodput_per_s=_ratio(num_good, duration_s), goodput_share=_ratio(num_good, len(self.outcomes)),
            num_steps=num_steps, busy_share=_ratio(self._busy_s, duration_s * len(self.timelines)),
            slot_utilisation=_ratio(sum(sum(one.num_rows) for one in self.timelines), num_steps * self.max_num_seqs),
            kv_utilisation=_ratio(self._position_share_s, self._busy_s),
            most_blocks=self._most_blocks, most_windows=self._most_windows,
            cached_share=_ratio(sum(one.num_cached for one in done), num_input),
            num_preemptions=sum(one.num_preemptions for one in self.outcomes),
            tenants=self._tenants(duration_s),
        )

    def _tenants(self, duration_s: float) -> dict[str, TenantSummary]:
        by_name = dict[str, list[Outcome]]()
        for one in self.outcomes:
            by_name.setdefault(one.tenant, []).append(one)
        names = sorted(by_name) if set(by_name) - {""} else []
        return {name: _tenant_summary(by_name[name], duration_s) for name in names}

    def requests(self) -> list[dict[str, Any]]:
        """Return every request as plain data, in the order of arrivals."""
        names = Outcome.__slots__
        return [{name: getattr(one, name) for name in names} for one in self.outcomes]


def _tenant_summary(outcomes: ListOf[Outcome], duration_s: float) -> TenantSummary:
    done = [one for one in outcomes if one.finished_s is not None]
    return TenantSummary(
        num_requests=len(outcomes), num_completed=len(done),
        computed_tokens_per_s=_ratio(sum(one.num_input - one.num_cached + one.num_output for one in done), duration_s),
        ttft=Latencies.of(one.ttft_s for one in done if one.ttft_s is not None),
        latency=Latencies.of(one.finished_s - one.arrival_s for one in done if one.finished_s is not None),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
