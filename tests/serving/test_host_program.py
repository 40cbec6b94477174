"""Programs that an engine lives in: one without asyncio, and one that gevent has patched."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from pagedcore import AsyncEngine, SamplingParams
from pagedcore.errors import NoEventLoop
from pagedcore.serving import host_program
from support.engine_builders import make_engine


def test_what_awaits_an_engine_says_that_it_takes_asyncio() -> None:
    """As under trio, which drives coroutines itself: a typed error that names the way out, and no request is left."""
    with AsyncEngine(make_engine()) as engine:
        for awaited in (anext(engine.generate([1], SamplingParams(max_tokens=4))), engine.call(lambda one: one.stats()),
                        engine.explain("x"), engine.quote([1]), engine.session().open(), engine.aclose(),
                        engine.complete([1]), engine.abort("x")):
            step: Any = awaited.__await__()
            with pytest.raises(NoEventLoop, match="generate_sync"):
                next(step)
        assert engine.submit([1], SamplingParams(max_tokens=1)).result().is_finished
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)


@pytest.mark.parametrize("is_patched", [True, False])
def test_threads_that_are_greenlets_are_warned_of_once(
    is_patched: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where gevent has patched threading, and nowhere else."""
    host_program._warn.cache_clear()
    gevent = SimpleNamespace(is_module_patched=lambda name: is_patched and name == "threading")
    monkeypatch.setitem(sys.modules, "gevent.monkey", gevent)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            AsyncEngine(make_engine()).close()
    assert len([one for one in caplog.records if "gevent" in one.message]) == is_patched
