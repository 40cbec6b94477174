"""Fixtures of the BentoML tests: an application in this process, and one real server that the tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import adapters.bentoml.home  # noqa: F401  # Why first: BentoML reads its home when it is imported.

pytest.importorskip("bentoml")

from adapters.bentoml.asgi_caller import App, serving
from adapters.bentoml.processes import Served, bentoml_serve
from pagedcore.serving.async_engine import AsyncEngine
from support.async_helpers import SlowBackend
from support.engine_builders import make_engine

HERE = Path(__file__).parent


@pytest.fixture
async def app(request: pytest.FixtureRequest) -> AsyncIterator[App]:
    """The service over a slow toy engine, started and in the end stopped as BentoML does it."""
    settings: dict[str, Any] = {"num_kv_blocks": 1200, **getattr(request, "param", {})}
    with AsyncEngine(make_engine(SlowBackend(), **settings), stream_interval_s=0.0) as engine:
        async with serving(engine) as app:
            yield app


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """``bentoml serve`` with the demo model, in processes of its own on a port of the system's choice."""
    with bentoml_serve("served:LLM", HERE) as served:
        yield served


@pytest.fixture(scope="session")
def front() -> Iterator[Served]:
    """``bentoml serve`` of a second service that names the first in ``bentoml.depends``."""
    with bentoml_serve("served:Front", HERE) as served:
        yield served
