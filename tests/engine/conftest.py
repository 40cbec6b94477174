"""Fixtures of the engine tests."""

from __future__ import annotations

import pytest

from engine_builders import make_engine
from pagedcore.engine import Engine


@pytest.fixture
def engine() -> Engine:
    """A small engine over the toy backend."""
    return make_engine()
