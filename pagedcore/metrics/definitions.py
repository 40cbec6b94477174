"""Which metrics there are: one line each, with where the number comes from and what vLLM's dashboards call it.

Has the form of their values too: what the recorder fills and ``prometheus.py`` writes. A new counter of
``EngineStats`` becomes a metric by one line in ``SCALARS``. Names get their prefix, ``pagedcore_`` or ``vllm:``, in
``prometheus.py``.

Times are differences of the engine's monotonic clock: queue = arrival to first scheduled, prefill = first scheduled
to first token, decode = first to last token. A preemption therefore lengthens what it interrupts, prefill or decode,
and what is recomputed after it counts as no new prompt token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from pagedcore.outputs import RequestOutput
from pagedcore.plugins.hookspecs import EngineInfo
from pagedcore.requests.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number that the engine keeps itself and that is read at each scrape."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    read: Callable[[EngineStats], float]
    vllm_name: str = ""


@dataclass(frozen=True, slots=True)
class Histogram:
    """A distribution: over requests where ``read`` is given, else over steps."""

    name: str
    unit: Literal["seconds", "tokens", "completions"]
    help: str
    vllm_name: str = ""
    read: Callable[[RequestOutput], float | None] = lambda _: None
    """The value of a finished request; ``None``: it has none."""
    weigh: Callable[[RequestOutput], int] = lambda _: 1
    """How many observations of that value the request stands for."""


def longest_completion(request: RequestOutput) -> int:
    """Tokens of the longest completion of a request."""
    return max(len(one.token_ids) for one in request.outputs)


def token_interval_s(request: RequestOutput) -> float | None:
    """Seconds from one token to the next, on average over a request."""
    decode_s = between("first_token_s", "finished_s")(request)
    return None if decode_s is None else decode_s / max(1, longest_completion(request) - 1)


def between(start: str, end: str) -> Callable[[RequestOutput], float | None]:
    """Read the seconds between two moments of ``RequestMetrics``; none if one of them never came."""
    def read(request: RequestOutput) -> float | None:
        first, last = getattr(request.metrics, start), getattr(request.metrics, end)
        return None if first is None or last is None else last - first

    return read


SCALARS: Final = (
    Scalar("requests_running", "gauge", "Completions being computed.", lambda s: s.num_running, "num_requests_running"),
    Scalar("requests_waiting", "gauge", "Completions waiting for room.", lambda s: s.num_waiting,
           "num_requests_waiting"),
    Scalar("kv_cache_usage_ratio", "gauge", "Share of KV blocks in use, 0 to 1.",
           lambda s: s.num_blocks_used / max(1, s.num_blocks), "kv_cache_usage_perc"),
    Scalar("kv_blocks", "gauge", "KV blocks there are.", lambda s: s.num_blocks),
    Scalar("kv_blocks_used", "gauge", "KV blocks in use.", lambda s: s.num_blocks_used),
    Scalar("kv_blocks_cached", "gauge", "Unreferenced KV blocks that stay cached until evicted.",
           lambda s: s.num_blocks_cached),
    Scalar("host_kv_blocks_used", "gauge", "Host blocks that hold KV.", lambda s: s.num_host_blocks_used),
    Scalar("requests_swapped", "gauge", "Waiting completions whose KV is on the host.", lambda s: s.num_swapped,
           "num_requests_swapped"),
    Scalar("prefix_cache_looked_up_tokens", "counter", "Tokens that might have been found in the prefix cache.",
           lambda s: s.num_looked_up_tokens, "prefix_cache_queries"),
    Scalar("prefix_cache_found_tokens", "counter", "Tokens that were found there.", lambda s: s.num_cached_tokens,
           "prefix_cache_hits"),
    Scalar("kv_swapped_out_bytes", "counter", "KV bytes moved to the host.", lambda s: s.swapped_out_bytes),
    Scalar("kv_swapped_in_bytes", "counter", "KV bytes brought back from there.", lambda s: s.swapped_in_bytes),
    Scalar("kv_cache_bytes", "gauge", "Size of the KV pool.", lambda s: s.kv_bytes),
    Scalar("states", "gauge", "State blocks of a model with recurrent layers; 0 for others.", lambda s: s.num_states),
    Scalar("states_used", "gauge", "State blocks of completions that run.", lambda s: s.num_states_used),
    Scalar("states_kept", "gauge", "States kept for requests that begin alike.", lambda s: s.num_states_kept),
    Scalar("states_evicted", "counter", "Kept states that were evicted for others.", lambda s: s.num_states_evicted),
    Scalar("host_states_used", "gauge", "State blocks of the host tier in use.", lambda s: s.num_host_states_used),
    Scalar("host_states_kept", "gauge", "States on the host for requests that begin alike.",
           lambda s: s.num_host_states_kept),
    Scalar("window_blocks", "gauge", "Blocks of layers with a window; 0 for models whose layers keep all positions.",
           lambda s: s.num_windows),
    Scalar("window_blocks_used", "gauge", "Window blocks of completions that run.", lambda s: s.num_windows_used),
    Scalar("window_blocks_kept", "gauge", "Window blocks kept for requests that begin alike.",
           lambda s: s.num_windows_kept),
    Scalar("window_blocks_evicted", "counter", "Kept window blocks that were evicted for others.",
           lambda s: s.num_windows_evicted),
    Scalar("state_bytes", "gauge", "Size of the state blocks.", lambda s: s.state_bytes),
    Scalar("steps", "counter", "Steps computed.", lambda s: s.num_steps),
    Scalar("step_rows", "counter", "Rows of all steps: completions that advanced.", lambda s: s.num_rows),
    Scalar("computed_tokens", "counter", "Positions computed, recomputed ones again.", lambda s: s.num_computed_tokens),
    Scalar("prompt_tokens", "counter", "Prompt tokens accepted.", lambda s: s.num_prompt_tokens, "prompt_tokens"),
    Scalar("generation_tokens", "counter", "Tokens generated.", lambda s: s.num_generated_tokens, "generation_tokens"),
    Scalar("drafted_tokens", "counter", "Tokens that were guessed ahead and computed.",
           lambda s: s.num_drafted_tokens, "spec_decode_num_draft_tokens"),
    Scalar("accepted_tokens", "counter", "Those of them that were right.",
           lambda s: s.num_accepted_tokens, "spec_decode_num_accepted_tokens"),
    Scalar("adapters", "gauge", "Adapters that requests may name.", lambda s: s.num_adapters),
    Scalar("adapters_in_slots", "gauge", "Adapters that rows can be computed with now.",
           lambda s: s.num_adapters_in_slots),
    Scalar("adapter_bytes", "gauge", "Bytes of adapters in slots or on their way there.", lambda s: s.adapter_bytes),
    Scalar("adapter_loads", "counter", "Times an adapter came into a slot.", lambda s: s.num_adapter_loads),
    Scalar("adapter_failures", "counter", "Times one could not be read when it was needed.",
           lambda s: s.num_adapter_failures),
    Scalar("preemptions", "counter", "Times a completion was preempted.", lambda s: s.num_preemptions,
           "num_preemptions"),
    Scalar("promises", "counter", "Deadlines that were promised.", lambda s: s.num_promises),
    Scalar("promises_kept", "counter", "Promised deadlines that were kept.", lambda s: s.num_promises_kept),
    Scalar("promises_broken", "counter", "Promised deadlines that were not.", lambda s: s.num_promises_broken),
    Scalar("promises_refused", "counter", "Deadlines that could not be promised.", lambda s: s.num_promises_refused),
    Scalar("quotes", "counter", "Own quotes whose requests have ended.", lambda s: s.num_quotes),
    Scalar("quotes_held", "counter", "Those of them whose interval held.", lambda s: s.num_quotes_held),
)

REQUEST_HISTOGRAMS: Final = (
    Histogram("time_to_first_token_seconds", "seconds", "From arrival to the first token.",
              "time_to_first_token_seconds", between("arrival_s", "first_token_s")),
    Histogram("inter_token_latency_seconds", "seconds", "From a token to the next: each request's mean, once per pair.",
              "inter_token_latency_seconds", token_interval_s,
              lambda request: sum(max(0, len(one.token_ids) - 1) for one in request.outputs)),
    Histogram("e2e_request_latency_seconds", "seconds", "From arrival to the end.",
              "e2e_request_latency_seconds", between("arrival_s", "finished_s")),
    Histogram("request_queue_time_seconds", "seconds", "From arrival to the first step.",
              "request_queue_time_seconds", between("arrival_s", "first_scheduled_s")),
    Histogram("request_prefill_time_seconds", "seconds", "From the first step to the first token.",
              "request_prefill_time_seconds", between("first_scheduled_s", "first_token_s")),
    Histogram("request_decode_time_seconds", "seconds", "From the first token to the end.",
              "request_decode_time_seconds", between("first_token_s", "finished_s")),
    Histogram("request_inference_time_seconds", "seconds", "From the first step to the end.",
              "request_inference_time_seconds", between("first_scheduled_s", "finished_s")),
    Histogram("request_prompt_tokens", "tokens", "Tokens before the completion.",
              "request_prompt_tokens", lambda request: len(request.prompt_token_ids)),
    Histogram("request_generation_tokens", "tokens", "Tokens of all completions.",
              "request_generation_tokens", lambda request: request.usage.num_output_tokens),
    Histogram("request_max_generation_tokens", "tokens", "Tokens of the longest completion.",
              "request_max_num_generation_tokens", longest_completion),
    Histogram("request_answers", "completions", "Completions asked for.",
              "request_params_n", lambda request: len(request.outputs)),
)

ITERATION_TOKENS: Final = Histogram("iteration_tokens", "tokens", "Positions computed in a step.",
                                    "iteration_tokens_total")
STEP_INTERVAL: Final = Histogram("step_interval_seconds", "seconds",
                                 "From a step's end to the next one's while requests ran: their pause between tokens.")

FINISH_REASONS: Final = ("stop", "length", "abort", "error")
"""In this order, the last one that any completion of a request has is the request's."""


def one_two_five(low_exponent: int, limit: float) -> tuple[float, ...]:
    """Bucket bounds 1, 2, 5 in every decade from ``10**low_exponent`` on; the last is the first to reach ``limit``."""
    bounds: list[float] = []
    exponent = low_exponent
    while not bounds or bounds[-1] < limit:
        # Why: from text, because 5 * 10.0**-4 is not the number that is nearest to 0.0005.
        bounds += [float(f"{digit}e{exponent}") for digit in (1, 2, 5)]
        exponent += 1
    return tuple(bound for i, bound in enumerate(bounds) if i == 0 or bounds[i - 1] < limit)


def bounds_of(histogram: Histogram, max_model_len: int) -> tuple[float, ...]:
    """Return the bucket bounds of a histogram for a model of that context length."""
    if histogram.unit == "seconds":
        return one_two_five(-4, 500.0)
    return one_two_five(0, float(max_model_len) if histogram.unit == "tokens" else 20.0)


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
