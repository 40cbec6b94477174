"""Spans for OpenTelemetry: a request, and within it its queue, prefill, decode and preemptions.

    engine = AsyncEngine.from_pretrained("demo", plugins=[Tracing()])

Needs the extra ``pagedcore[otel]``, and an SDK with an exporter that the program configures. A span is a child of the
one that is current where the request is submitted. It has numbers and the names of model and error: no prompt, no
completion, no label.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pagedcore import RequestOutput
from pagedcore.errors import MissingDependency
from pagedcore.plugins.hookspecs import EngineInfo, hookimpl

try:
    from opentelemetry import context as contexts
    from opentelemetry import trace
except ImportError as error:
    raise MissingDependency(f"pagedcore_otel needs {error.name}. Install pagedcore[otel].") from error

__all__ = ["Tracing"]

_OPERATION = "text_completion"


class Tracing:
    """A plugin that makes spans of finished requests; attributes follow the GenAI semantic conventions.

    Args:
        tracer_provider: where the spans go; ``None``: the program's global one.
    """

    def __init__(self, tracer_provider: trace.TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("pagedcore", tracer_provider=tracer_provider)
        self._model = ""

    @hookimpl
    def pagedcore_engine_start(self, engine: EngineInfo) -> None:
        """Note the model's name."""
        self._model = engine.model

    @hookimpl
    def pagedcore_request_context(self) -> object:
        """Return the context of the span that submits a request."""
        return contexts.get_current()

    @hookimpl
    def pagedcore_request_finished(self, request: RequestOutput, context: object) -> None:
        """Make the spans of a request, at the times at which its parts were."""
        metrics = request.metrics
        if metrics.finished_s is None:
            return
        end_ns, finished_s = time.time_ns(), metrics.finished_s

        def at(seconds: float) -> int:
            return end_ns - round((finished_s - seconds) * 1e9)

        parent = context if isinstance(context, contexts.Context) else contexts.Context()
        span = self._tracer.start_span(
            f"{_OPERATION} {self._model}".rstrip(), parent, start_time=at(metrics.arrival_s),
            attributes=_attributes(request, self._model),
        )
        if (failure := next((one.error for one in request.outputs if one.error is not None), None)) is not None:
            span.set_attribute("error.type", type(failure).__name__)
            span.set_status(trace.StatusCode.ERROR)
        within = trace.set_span_in_context(span, parent)
        for name, start_s, until_s in _parts(request):
            part = self._tracer.start_span(f"pagedcore.{name}", within, start_time=at(start_s))
            part.end(at(until_s))
        span.end(end_ns)


def _attributes(request: RequestOutput, model: str) -> Mapping[str, Any]:
    usage, metrics = request.usage, request.metrics
    found: dict[str, Any] = {
        "gen_ai.operation.name": _OPERATION, "gen_ai.provider.name": "pagedcore", "gen_ai.request.model": model,
        "gen_ai.response.id": request.request_id, "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
        "gen_ai.usage.output_tokens": usage.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.num_cached_tokens,
        "gen_ai.response.finish_reasons": tuple(str(one.finish_reason) for one in request.outputs),
        "pagedcore.num_preemptions": metrics.num_preemptions,
    }
    if len(request.outputs) > 1:
        found["gen_ai.request.choice.count"] = len(request.outputs)
    if metrics.ttft_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = metrics.ttft_s
    return found


def _parts(request: RequestOutput) -> list[tuple[str, float, float]]:
    """Return (name, start, end) of the parts of a request; one that did not end before the request ends with it."""
    metrics = request.metrics
    end_s = metrics.finished_s or 0.0
    started_s, first_s = metrics.first_scheduled_s, metrics.first_token_s
    parts = [("queue", metrics.arrival_s, end_s if started_s is None else started_s)]
    if started_s is not None:
        parts.append(("prefill", started_s, end_s if first_s is None else first_s))
    if first_s is not None:
        parts.append(("decode", first_s, end_s))
    return parts + [("preemption", start_s, until_s or end_s) for start_s, until_s in metrics.pauses_s]
