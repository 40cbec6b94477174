"""Spans of requests, as OpenTelemetry's own in-memory exporter receives them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as names
from opentelemetry.trace import StatusCode

from pagedcore import AsyncEngine, Engine, SamplingParams
from pagedcore_otel import Tracing
from support.doubles import FlakyBackend, ToyBackend
from support.engine_builders import make_engine, run
from support.recordings import toy_engine


class Collected:
    """A provider, and the spans that have ended under it."""

    def __init__(self) -> None:
        self.provider, self._exporter = TracerProvider(), InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("a program")

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name.startswith(name)]


def params(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)


def traced(collected: Collected, backend: Any = None, **settings: Any) -> Engine:
    return make_engine(backend, plugins=[Tracing(collected.provider)], **settings)


def test_a_request_and_its_parts() -> None:
    """A request is one span with the attributes of the GenAI conventions; its queue, prefill and decode are children
    that follow each other without a gap and fill it.
    """
    collected = Collected()
    with traced(collected) as engine:
        request = engine.add_request([1, 2, 3], params(4), request_id="a label")
        run(engine)
    (whole,) = collected.named("text_completion")
    queue, prefill, decode = (collected.named(f"pagedcore.{name}")[0] for name in ("queue", "prefill", "decode"))
    assert whole.attributes is not None
    assert whole.attributes[names.GEN_AI_OPERATION_NAME] == "text_completion"
    assert whole.attributes[names.GEN_AI_PROVIDER_NAME] == "pagedcore"
    assert whole.attributes[names.GEN_AI_REQUEST_MODEL] == "ToyBackend"
    assert whole.attributes[names.GEN_AI_RESPONSE_ID] == request.request_id
    assert whole.attributes[names.GEN_AI_USAGE_INPUT_TOKENS] == 3
    assert whole.attributes[names.GEN_AI_USAGE_OUTPUT_TOKENS] == 4
    assert whole.attributes[names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS] == 0
    assert whole.attributes[names.GEN_AI_RESPONSE_FINISH_REASONS] == ("length",)
    assert "a label" not in whole.to_json()
    for part in (queue, prefill, decode):
        assert part.parent is not None
        assert part.parent.span_id == whole.context.span_id
    assert (queue.start_time, decode.end_time) == (whole.start_time, whole.end_time)
    assert (queue.end_time, prefill.end_time) == (prefill.start_time, decode.start_time)


def test_preemptions_are_spans() -> None:
    """Every preemption is a span from the moment that the sequence lost its blocks to the one that it ran again."""
    collected = Collected()
    with traced(collected, num_kv_blocks=6, preemption="recompute") as engine:
        for one in range(3):
            engine.add_request([one, 2, 3], params(16))
        run(engine)
        num_preemptions = engine.stats().num_preemptions
    pauses = collected.named("pagedcore.preemption")
    assert len(pauses) == num_preemptions > 0
    counted = [(span.attributes or {})["pagedcore.num_preemptions"] for span in collected.named("text_completion")]
    assert sum(map(int, counted)) == num_preemptions  # type: ignore[call-overload]


def test_the_callers_span_is_the_parent() -> None:
    """A request belongs to the span that is current where it is submitted, and to its trace; without one it is a root.
    """
    collected = Collected()
    with traced(collected) as engine:
        with collected.tracer.start_as_current_span("the caller") as caller:
            engine.add_request([1, 2, 3], params(2))
        engine.add_request([4, 5], params(2))
        run(engine)
    parents = [None if one.parent is None else one.parent.span_id for one in collected.named("text_completion")]
    assert sorted(parents, key=str) == sorted([caller.get_span_context().span_id, None], key=str)


@pytest.mark.parametrize("length", [3, 20_000])
async def test_the_parent_is_found_on_other_threads(length: int) -> None:
    """Under ``AsyncEngine`` too, and for a prompt that is long enough to be prepared on a thread of its own."""
    collected = Collected()
    settings = {"num_kv_blocks": 64, "block_size": 512, "plugins": [Tracing(collected.provider)]}
    backend = ToyBackend()
    backend.max_model_len = 32_768
    async with AsyncEngine(toy_engine("off", backend=backend, max_num_batched_tokens=32_768, **settings)) as engine:
        with collected.tracer.start_as_current_span("the caller") as caller:
            future = engine.submit([1] * length, params(2))
        future.result(60)
    (whole,) = collected.named("text_completion")
    assert whole.parent is not None
    assert whole.parent.span_id == caller.get_span_context().span_id


def test_what_failed_or_never_started() -> None:
    """A failed request has the status of an error with its type; one that was aborted while it waited has a queue only.
    """
    collected = Collected()
    with traced(collected, FlakyBackend(raise_on_step=2)) as engine:
        engine.add_request([1, 2, 3], params(9))
        run(engine)
        waiting = engine.add_request([1, 2, 3], params(9))
        waiting.abort()
    failed, aborted = collected.named("text_completion")
    assert failed.status.status_code is StatusCode.ERROR
    assert (failed.attributes or {})["error.type"] == "StepFailed"
    assert (aborted.attributes or {})[names.GEN_AI_RESPONSE_FINISH_REASONS] == ("abort",)
    found = Counter(span.name for span in collected.spans)
    assert (found["pagedcore.queue"], found["pagedcore.prefill"]) == (2, 1)
