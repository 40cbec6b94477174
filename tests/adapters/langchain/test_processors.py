"""A logits processor through LangChain: by a call, a binding or a field, streamed or whole, and never from a cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.tracers.base import BaseTracer
from langchain_core.tracers.schemas import Run

from pagedcore import AsyncEngine
from pagedcore.errors import InvalidSampling, ProcessorFailed
from pagedcore.protocols import FloatArray
from pagedcore_langchain import ChatPagedCore, PagedCoreLLM

MODELS = [ChatPagedCore, PagedCoreLLM]
PROMPT = "What is 2 + 3?"


def text_of(answer: Any) -> str:
    return answer if isinstance(answer, str) else answer.content


def only(token_id: int) -> Any:
    def process(output_token_ids: list[int], logits: FloatArray) -> FloatArray:
        row = np.full_like(logits, -np.inf)
        row[token_id] = 0.0
        return row

    return process


class Keeps(BaseTracer):
    """A tracer that keeps what a run shows of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[str] = []

    def _persist_run(self, run: Run) -> None:
        self.shown.append(repr((run.inputs, run.extra)))


@pytest.mark.parametrize("kind", MODELS)
async def test_every_way_to_ask_passes_it_on(engine: AsyncEngine, kind: Any) -> None:
    """Given per call, bound or as a field, it chooses every token of whole completions and of streams."""
    seven, other = engine.encode("7")[-1], engine.encode("8")[-1]
    model = kind.from_engine(engine, max_tokens=3)
    wanted, process = engine.decode([seven] * 3), only(seven)
    assert text_of(model.invoke(PROMPT, logits_processor=process)) == wanted
    assert text_of(await model.bind(logits_processor=process).ainvoke(PROMPT)) == wanted
    field = kind.from_engine(engine, max_tokens=3, sampling={"logits_processor": process})
    assert "".join(text_of(chunk) for chunk in field.stream(PROMPT)) == wanted
    assert "".join([text_of(chunk) async for chunk in field.astream(PROMPT)]) == wanted
    assert text_of(field.invoke(PROMPT, logits_processor=only(other))) == engine.decode([other] * 3)
    with pytest.raises(InvalidSampling, match="logits_processor"):
        model.invoke(PROMPT, logits_processor="only")
    with pytest.raises(ProcessorFailed):
        model.invoke(PROMPT, logits_processor=lambda ids, row: None)


@pytest.mark.parametrize("kind", MODELS)
def test_no_cache_gives_what_code_has_made(engine: AsyncEngine, kind: Any) -> None:
    """Two functions may have one name and, one after the other, one address; each call is computed. Tracers see none.
    """
    numbers, tracer = engine.encode("7")[-1], Keeps()
    model = kind.from_engine(engine, cache=InMemoryCache(), max_tokens=2)
    before = engine.stats().num_finished
    for _ in range(2):
        model.invoke(PROMPT, logits_processor=only(numbers), config={"callbacks": [tracer]})
        kind.from_engine(engine, cache=model.cache, max_tokens=2, sampling={"logits_processor": only(numbers)}).invoke(
            PROMPT, config={"callbacks": [tracer]})
    assert engine.stats().num_finished - before == 4
    assert len(tracer.shown) == 4
    assert not any("<function" in shown for shown in tracer.shown)
