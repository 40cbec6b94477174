"""Runs a workload under a way of batching and measures it: the same engine and kernels, another schedule.

All requests arrive at once; the clock starts when the first is handed over and stops with the last token. A short
warm-up comes before, so that no kernel is compiled while the clock runs.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pagedcore import SamplingParams

if TYPE_CHECKING:
    from pagedcore import Engine
    from pagedcore.bench.workloads import Workload
    from pagedcore.outputs import RequestMetrics

MODES: Final[dict[str, dict[str, Any]]] = {
    "none": {"scheduling_policy": "fcfs", "max_num_seqs": 1},
    "static": {"scheduling_policy": "static"},
    "continuous": {"scheduling_policy": "fcfs"},
}
"""Settings of the engine by the way of batching: one request at a time; batches that run until their longest request
ends; a request starts as soon as there is a slot."""
_WARM_UP_TOKENS = 8
"""Tokens generated, and most prompt tokens taken, by each request of the warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One workload under one way of batching. Times in seconds."""

    mode: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    wall_s: float
    num_steps: int
    num_slots: int
    """Requests that could be computed in one step, if batches were formed: no more than there are."""
    num_rows: int
    """Slots that computed something, summed over the steps."""
    num_recomputed_tokens: int
    """Positions computed more than once, because a preemption took their blocks."""
    num_preemptions: int
    ttft_mean_s: float
    """Time to first token, from a request's arrival."""
    ttft_p50_s: float
    ttft_p95_s: float
    token_interval_p50_s: float
    """Time from one token of a request to its next: each request's mean, and of these the median."""
    latency_p50_s: float
    """Time from a request's arrival to its last token."""
    latency_p95_s: float
    rows_per_step: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    """First and last step of each request, from 0, in the order of their arrivals."""
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompt and generated tokens per second."""
    slot_utilisation: float
    """Share of slots that computed something for a request; the rest was idle or held by a finished one."""
    saturated_utilisation: float
    """The same, of the steps after which requests still waited; 0 if none ever did."""
    padding_waste: float
    """Share of positions that are padding where batches run to their end as rectangles; 0 where they do not."""

    def rows(self) -> list[int]:
        """Return the row of each request: the first one that is free when it starts."""
        free_from, rows = list[int](), [0] * len(self.spans)
        for number in sorted(range(len(self.spans)), key=lambda number: self.spans[number][0]):
            first, last = self.spans[number]
            row = next((row for row, step in enumerate(free_from) if step <= first), len(free_from))
            free_from[row : row + 1] = [last + 1]
            rows[number] = row
        return rows


def measure(
    engine: Engine, workload: Workload, mode: str, on_progress: Callable[[int], None], num_slots: int | None = None
) -> Measurement:
    """Run ``workload`` once on an engine whose settings are those of ``mode``, and measure it.

    The engine has no other requests, and room for all of these in its waiting queue. ``on_progress`` is called with the
    number of tokens generated in each step. Utilisation is counted of ``num_slots``; ``None``: of those of the engine.

    Raises:
        InvalidRequest: a prompt does not fit the engine's model.
    """
    # Why: backwards, so that the prefix cache holds nothing of the workload afterwards.
    warm_up = [list(prompt[: -_WARM_UP_TOKENS - 1 : -1]) for prompt in workload.prompts[:2]]
    engine.generate(warm_up, _exactly(min(_WARM_UP_TOKENS, *workload.num_outputs)), show_progress=False)
    before, rows_per_step, num_waiting, starts = engine.stats(), list[int](), list[int](), list[float]()
    num_rows = before.num_rows
    start = time.perf_counter()
    requests = [engine.add_request(list(prompt), _exactly(count))
                for prompt, count in zip(workload.prompts, workload.num_outputs, strict=True)]
    while engine.has_pending_requests():
        starts.append(time.monotonic())
        on_progress(len(engine.step_pending()))
        now = engine.stats()
        rows_per_step.append(now.num_rows - num_rows)
        num_waiting.append(now.num_waiting)
        num_rows = now.num_rows
    wall_s = time.perf_counter() - start
    after = engine.stats()
    metrics = [request.output().metrics for request in requests]
    for request in requests:
        request.remove()
    num_outputs = after.num_generated_tokens - before.num_generated_tokens
    num_slots = min(num_slots or after.max_num_seqs, len(requests))
    ttfts = [(one.first_token_s or one.arrival_s) - one.arrival_s for one in metrics]
    latencies = [(one.finished_s or one.arrival_s) - one.arrival_s for one in metrics]
    # Why: the last token of a request is never computed, only sampled.
    needed = workload.num_prompt_tokens + num_outputs - len(requests)
    saturated = [rows for rows, waiting in zip(rows_per_step, num_waiting, strict=True) if waiting]
    return Measurement(
        mode=mode, num_requests=len(requests), num_prompt_tokens=workload.num_prompt_tokens,
        num_output_tokens=num_outputs, wall_s=wall_s, num_steps=len(rows_per_step), num_slots=num_slots,
        num_rows=sum(rows_per_step), rows_per_step=tuple(rows_per_step),
        num_recomputed_tokens=max(0, after.num_computed_tokens - before.num_computed_tokens - needed),
        num_preemptions=after.num_preemptions - before.num_preemptions,
        ttft_mean_s=statistics.mean(ttfts), ttft_p50_s=percentile(ttfts, 0.5), ttft_p95_s=percentile(ttfts, 0.95),
        token_interval_p50_s=statistics.median(map(_token_interval, metrics, workload.num_outputs)),
        latency_p50_s=percentile(latencies, 0.5), latency_p95_s=percentile(latencies, 0.95),
        spans=tuple(_span(one, starts) for one in metrics), output_tokens_per_s=num_outputs / wall_s,
        total_tokens_per_s=(workload.num_prompt_tokens + num_outputs) / wall_s,
        slot_utilisation=sum(rows_per_step) / (len(rows_per_step) * num_slots),
        saturated_utilisation=sum(saturated) / max(1, len(saturated) * num_slots),
        padding_waste=workload.padding_waste(num_slots) if mode == "static" else 0.0,
    )


def _span(metrics: RequestMetrics, starts: list[float]) -> tuple[int, int]:
    """Return the first and the last step of a request; ``starts`` are those of all steps on the engine's clock."""
    first_s, last_s = metrics.first_scheduled_s or 0.0, metrics.finished_s or 0.0
    return bisect_right(starts, first_s) - 1, bisect_right(starts, last_s) - 1


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 100) * len(ordered) // 100) - 1)]


def _exactly(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def _token_interval(metrics: RequestMetrics, num_outputs: int) -> float:
    if metrics.first_token_s is None or metrics.finished_s is None:
        return 0.0
    return (metrics.finished_s - metrics.first_token_s) / max(1, num_outputs - 1)
