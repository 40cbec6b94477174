"""Engines on the demo model, whose tokenizer is byte-level and which has an end token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagedcore import Engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The demo model, with every law checked after every step."""
    with Engine.from_pretrained("demo", check_invariants=True, max_num_seqs=8) as one:
        yield one
