"""Fixtures of the engine tests."""

from __future__ import annotations

import pytest

from pagedcore.engine.engine import Engine
from support.engine_builders import make_engine


@pytest.fixture
def engine() -> Engine:
    """A small engine over the toy backend."""
    return make_engine()
