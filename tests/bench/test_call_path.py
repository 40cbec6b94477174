"""How often a request and a step change file, counted as ``benchmarks/call_path.py`` counts."""

from __future__ import annotations

import pytest
from call_path import changes, measure


@pytest.mark.parametrize(("what", "most"), [("accepted request", 27), ("decode step", 42)])
def test_a_request_takes_few_detours(what: str, most: int) -> None:
    """An accepted request changes file at most 27 times and a decode step 42 times; once it was 38 and 100."""
    assert 5 < len(measure()[what]) - 1 <= most


def test_calls_within_a_file_are_no_changes() -> None:
    """Only calls from one file into another count, and a file that is entered again counts again."""
    assert changes(["a", "a", "b", "b", "a"]) == ["a", "b", "a"]
