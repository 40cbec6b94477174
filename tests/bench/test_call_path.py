"""How often a request and a step change file, counted as ``benchmarks/call_path.py`` counts."""

from __future__ import annotations

from support.scripts import script

call_path = script("call_path")


def test_a_request_takes_few_detours() -> None:
    """An accepted request and decode steps of one row and of eight change file at most as often as they do today."""
    most = {"accepted request": 25, "decode step": 39, "decode step of 8 rows": 88}
    found = {what: len(stays) - 1 for what, stays in call_path.measure().items()}
    assert found.keys() == most.keys()
    for what, count in found.items():
        assert 5 < count <= most[what], what


def test_calls_within_a_file_are_no_changes() -> None:
    """Only calls from one file into another count, and a file that is entered again counts again."""
    assert call_path.changes(["a", "a", "b", "b", "a"]) == ["a", "b", "a"]
