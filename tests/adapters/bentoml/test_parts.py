"""The parts of the BentoML adapter that need no server: the service factory, lazy imports, the plugin, long lists."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import math
import re
import subprocess
import sys

import bentoml
import pytest

from adapters.bentoml.asgi_caller import serving
from adapters.bentoml.processes import environment
from pagedcore import AsyncEngine, CompletionOutput, RequestOutput, TokenLogprobs, expose
from pagedcore.errors import InvalidConfig
from pagedcore.outputs import RequestMetrics
from pagedcore_bentoml import PagedCoreRunner, create_service
from pagedcore_bentoml.wire import BatchCompletion, completion_of
from pagedcore_http.json_pieces import AT_ONCE
from pagedcore_http.present_objects import PresentObjects
from support.engine_builders import make_engine

KEEP = PresentObjects.keep


async def test_what_is_there_at_the_start_is_not_searched_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the service runs the collector leaves it alone, afterwards no more, unless somebody else wanted it so."""
    monkeypatch.setattr(PresentObjects, "keep", KEEP)
    for was_frozen in (False, True):
        gc.unfreeze()
        if was_frozen:
            gc.freeze()
        with AsyncEngine(make_engine()) as engine:
            async with serving(engine):
                assert gc.get_freeze_count() > 1000
        assert (gc.get_freeze_count() > 1000) == was_frozen


async def test_an_engine_of_somebody_else_stays_open() -> None:
    """A service that was given an engine leaves its end to the owner."""
    with AsyncEngine(make_engine()) as engine:
        async with serving(engine):
            pass
        assert engine.is_alive


@pytest.mark.parametrize("workers", [2, "cpu_count", 0, None])
def test_more_than_one_worker_is_refused(workers: object) -> None:
    """Workers would each load the model and divide the batch."""
    with pytest.raises(InvalidConfig, match="workers"):
        create_service("demo", service={"workers": workers})


def test_the_factory_makes_services_apart_from_each_other() -> None:
    """Two services have their own model and settings, and belong to the module that asked for them."""
    first, second = create_service("demo", name="first"), expose("bentoml", model="other", name="second", seed=3)
    assert isinstance(second, bentoml.Service)
    assert (first.inner.model, first.inner.settings) == ("demo", {})
    assert (second.inner.model, second.inner.settings) == ("other", {"seed": 3})
    assert (first._caller_module, second._caller_module) == (__name__, __name__)
    assert first.config["traffic"] == {"timeout": 300}


def test_streams_are_traced_for_those_who_ask() -> None:
    """Without a word about tracing, streams and nothing else are left out; an explicit configuration gets all of it."""
    (pattern,) = create_service("demo").config["tracing"].values()
    paths = ("stream", "v1/stream", "generate", "streams", "stream/x")
    addresses = [f"http://streams.example/{path}" for path in paths]
    assert [address for address in addresses if re.search(pattern, address)] == addresses[:2]
    asked = {"exporter_type": "in_memory", "sample_rate": 1.0}
    assert create_service("demo", service={"tracing": asked}).config["tracing"] == asked


def test_a_runner_without_a_model_says_so() -> None:
    """The class form needs a model; the message names it."""
    with pytest.raises(InvalidConfig, match="model"):
        _ = PagedCoreRunner().engine


def printed_by(code: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], env=environment(), check=True, capture_output=True,
                          text=True).stdout


def test_the_plugin_is_listed_without_importing_bentoml() -> None:
    """Listing adapters imports none of their frameworks; importing the package does not either."""
    code = ("import sys, pagedcore_bentoml, pagedcore_bentoml.plugin as plugin\n"
            "from pagedcore.plugins.manager import create_plugin_manager\n"
            "manager = create_plugin_manager([plugin], entry_points=False)\n"
            "print('bentoml' in manager.registry.adapters, 'bentoml' in sys.modules, 'starlette' in sys.modules)")
    assert printed_by(code).split() == ["True", "False", "False"]


def test_without_bentoml_the_extra_is_named() -> None:
    """Importing a name where BentoML is missing says what to install."""
    code = ("import sys; sys.modules['bentoml'] = None; sys.modules['starlette'] = None\n"
            "import pagedcore_bentoml\n"
            "try: pagedcore_bentoml.PagedCoreRunner\n"
            "except Exception as error: print(type(error).__name__, error)")
    printed = printed_by(code)
    assert printed.startswith("MissingDependency")
    assert "pagedcore[bentoml]" in printed


@pytest.mark.parametrize("num_entries", [0, 1, AT_ONCE, 2 * AT_ONCE + 1])
async def test_long_lists_are_written_in_pieces_as_a_whole(num_entries: int) -> None:
    """The JSON is pydantic's, whatever the values, and the loop runs between two pieces."""
    entries = [TokenLogprobs(number, -math.inf if number == 3 else -0.1 * number, ((number, -1e-9), (7, -2.5)))
               for number in range(num_entries)]
    answer = CompletionOutput(0, 'a "word"\n\u20ac', (1, 2), "stop", tuple(entries))
    output = RequestOutput("r", (1,), [answer, answer], True, 0, RequestMetrics(0.0), (None, *entries))
    turns = itertools.count()

    async def count() -> None:
        while True:
            next(turns)
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    completion = await completion_of(output)
    batch = BatchCompletion(completions=[completion, completion])
    written = await batch.json_in_pieces()
    counting.cancel()
    assert json.loads(written) == json.loads(batch.model_dump_json())
    assert next(turns) >= 9 * (max(1, math.ceil(num_entries / AT_ONCE)) - 1)
