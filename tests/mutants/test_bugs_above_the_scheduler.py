"""The tests above the scheduler on trial: each of these bugs, put in by hand, is found by the test named for it."""

from __future__ import annotations

import pytest

from mutants.catalogue import MUTANTS
from mutants.killing import Mutant, run_tests

_ANY_TEST = "requests/test_validation.py::test_a_context_without_room_refuses_every_prompt[1]"


_EACH_TIME = 6
"""`make test` tries every sixth bug, of all rooms; `make slow` and `make mutants` try all."""


def tried(place: int, mutant: Mutant) -> object:
    marks = [pytest.mark.slow] if place % _EACH_TIME else []
    return pytest.param(mutant, marks=marks, id=mutant.bug.removesuffix("."))


@pytest.mark.parametrize("mutant", [tried(place, mutant) for place, mutant in enumerate(MUTANTS)])
def test_every_bug_is_found_by_its_test(mutant: Mutant) -> None:
    """Law: the named test fails because of the bug, rather than hanging or not running."""
    outcome = run_tests(mutant, [mutant.killer])
    assert outcome.verdict == "killed", outcome


def test_every_bug_can_be_put_in() -> None:
    """Law: the text that each bug replaces is in its file once; `make test` runs a sixth of them only."""
    assert all(mutant.source() for mutant in MUTANTS)


def test_a_change_that_is_no_bug_survives() -> None:
    """Law: a test fails for the bug and for nothing else that its process brings with it."""
    path = "pagedcore/tokenizer/chat.py"
    harmless = Mutant("None.", path, "checked}, MAX_CHAT_BYTES - room", "checked}, int(MAX_CHAT_BYTES) - room")
    outcome = run_tests(harmless, [_ANY_TEST])
    assert (outcome.verdict, outcome.num_passed) == ("survived", 1)


def test_a_bug_that_no_test_imports_proves_nothing() -> None:
    """Law: a mutant that is not loaded, or cannot be, is not taken for one that was found or survived."""
    unused = Mutant("None.", "pagedcore/serving/stream.py", "last = deltas[-1]", "last = deltas[0]")
    assert run_tests(unused, [_ANY_TEST]).verdict == "broken"
    syntax = Mutant("None.", "pagedcore/tokenizer/chat.py", "checked}, MAX_CHAT_BYTES - room", "checked}, = 1")
    assert run_tests(syntax, [_ANY_TEST]).verdict == "broken"
