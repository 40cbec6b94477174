"""Runs a workload under a scheduling policy and measures it: the same engine, the same kernels, another policy.

All requests arrive at once; the clock starts when the first is handed over and stops with the last token. A short
warm-up comes before, so that no kernel is compiled while the clock runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedcore import SamplingParams

if TYPE_CHECKING:
    from pagedcore import Engine
    from pagedcore.bench.workloads import Workload
    from pagedcore.outputs import RequestMetrics

_WARM_UP_TOKENS = 8
"""Tokens generated, and most prompt tokens taken, by each request of the warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One workload under one policy. Times in seconds."""

    policy: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    wall_s: float
    num_steps: int
    num_slots: int
    """Requests that could be computed in one step: no more than there are."""
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
    rows_per_step: tuple[int, ...]
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompt and generated tokens per second."""
    slot_utilisation: float
    """Share of slots that computed something for a request; the rest was idle or held by a finished one."""


def measure(engine: Engine, workload: Workload, policy: str, on_progress: Callable[[int], None]) -> Measurement:
    """Run ``workload`` once under the engine's ``policy`` and measure it.

    The engine has no other requests, and room for all of these in its waiting queue. ``on_progress`` is called with the
    number of tokens generated in each step.

    Raises:
        InvalidRequest: a prompt does not fit the engine's model.
    """
    # Why: backwards, so that the prefix cache holds nothing of the workload afterwards.
    warm_up = [list(prompt[: -_WARM_UP_TOKENS - 1 : -1]) for prompt in workload.prompts[:2]]
    engine.generate(warm_up, _exactly(min(_WARM_UP_TOKENS, *workload.num_outputs)), show_progress=False)
    before, rows_per_step = engine.stats(), []
    num_rows = before.num_rows
    start = time.perf_counter()
    requests = [engine.add_request(list(prompt), _exactly(count))
                for prompt, count in zip(workload.prompts, workload.num_outputs, strict=True)]
    while engine.has_pending_requests():
        on_progress(len(engine.step_pending()))
        rows_per_step.append(engine.stats().num_rows - num_rows)
        num_rows += rows_per_step[-1]
    wall_s = time.perf_counter() - start
    after = engine.stats()
    metrics = [request.output().metrics for request in requests]
    for request in requests:
        request.remove()
    first_token_times = [(one.first_token_s or one.arrival_s) - one.arrival_s for one in metrics]
    num_outputs = after.num_generated_tokens - before.num_generated_tokens
    num_steps, num_rows = after.num_steps - before.num_steps, after.num_rows - before.num_rows
    num_slots = min(after.max_num_seqs, len(requests))
    # Why: the last token of a request is never computed, only sampled.
    needed = workload.num_prompt_tokens + num_outputs - len(requests)
    return Measurement(
        policy=policy, num_requests=len(requests), num_prompt_tokens=workload.num_prompt_tokens,
        num_output_tokens=num_outputs, wall_s=wall_s, num_steps=num_steps, num_slots=num_slots, num_rows=num_rows,
        num_recomputed_tokens=after.num_computed_tokens - before.num_computed_tokens - needed,
        num_preemptions=after.num_preemptions - before.num_preemptions, rows_per_step=tuple(rows_per_step),
        ttft_mean_s=statistics.mean(first_token_times), ttft_p50_s=percentile(first_token_times, 0.5),
        ttft_p95_s=percentile(first_token_times, 0.95),
        token_interval_p50_s=statistics.median(map(_token_interval, metrics, workload.num_outputs)),
        output_tokens_per_s=num_outputs / wall_s,
        total_tokens_per_s=(workload.num_prompt_tokens + num_outputs) / wall_s,
        slot_utilisation=num_rows / (num_steps * num_slots),
    )


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
