"""Adapters that are awaited outside of asyncio, as under trio, which drives coroutines itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("langchain_core")

from pagedcore.errors import NoEventLoop
from pagedcore_asyncgen import AsyncTextGenerator
from pagedcore_langchain import ChatPagedCore, PagedCoreLLM
from support.scripted_model import scripted_engine

AWAITED: dict[str, Callable[[Any], Any]] = {
    "asyncgen": lambda engine: AsyncTextGenerator(engine, owns_engine=False).complete("x"),
    "asyncgen stream": lambda engine: anext(AsyncTextGenerator(engine, owns_engine=False)("x")),
    **{f"{kind.__name__} {name}": (lambda engine, kind=kind, of=of: of(kind.from_engine(engine)))
       for kind in (ChatPagedCore, PagedCoreLLM)
       for name, of in {
           "ainvoke": lambda model: model.ainvoke("x"),
           "abatch": lambda model: model.abatch(["x", "y"]), "aclose": lambda model: model.aclose(),
           "astream": lambda model: anext(model.astream("x")),
       }.items()},
}


@pytest.mark.parametrize("door", AWAITED)
def test_what_awaits_an_adapter_says_that_it_takes_asyncio(door: str) -> None:
    """The error of the engine, which names the way out, and not one of asyncio's own; no request is left."""
    with scripted_engine("An answer.") as engine:
        step: Any = AWAITED[door](engine).__await__()
        with pytest.raises(NoEventLoop, match="asyncio"):
            next(step)
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
