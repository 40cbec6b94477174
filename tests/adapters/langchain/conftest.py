"""Fixtures of the LangChain tests: one engine over the demo model, handed back empty by every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagedcore import AsyncEngine


@pytest.fixture(scope="module")
def demo_engine() -> Iterator[AsyncEngine]:
    """An engine over the demo model, shared by a module's tests."""
    # Why without guesses: tests ask for the same completions again, and count steps.
    with AsyncEngine.from_pretrained(
        "demo", num_kv_blocks=512, max_num_seqs=16, stream_interval_s=0.0, speculation="off"
    ) as engine:
        yield engine


@pytest.fixture
def engine(demo_engine: AsyncEngine) -> Iterator[AsyncEngine]:
    """The shared engine; afterwards nothing of the test may be in it."""
    yield demo_engine
    stats = demo_engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)
