"""The errors as objects: they cross between processes whole."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import suppress

import pytest

from pagedcore import errors
from pagedcore.errors import PagedcoreError


def kinds(of: type[PagedcoreError] = PagedcoreError) -> Iterator[type[PagedcoreError]]:
    """Every error of pagedcore that is imported here."""
    for kind in of.__subclasses__():
        yield kind
        yield from kinds(kind)


@pytest.mark.parametrize("kind", sorted(set(kinds()), key=lambda kind: kind.__name__))
def test_every_error_can_be_pickled(kind: type[PagedcoreError]) -> None:
    """Whatever its constructor takes, type, message and attributes arrive."""
    error = kind.__new__(kind)
    error.args, error.__dict__ = ("the message",), {"what": "n", "limit": 3}
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), vars(back)) == (kind, str(error), {"what": "n", "limit": 3})


def test_a_refusal_arrives_with_its_attributes() -> None:
    """One that was constructed as the engine does, with an advice in its message."""
    error = errors.InvalidSampling("temperature", 99, "0 to 10", "Lower it.")
    back = pickle.loads(pickle.dumps(error))
    assert (str(back), back.what, back.given, back.limit) == (str(error), "temperature", "99", "0 to 10")


MADE: list[PagedcoreError] = [
    errors.InvalidSampling("temperature", 99, "0 to 10", "Lower it."), errors.ModelMismatch("a", "b"),
    errors.RequestStateError("extend", "running", "finished"), errors.MemoryBudgetExceeded(3, 2, 1),
    errors.EngineOverloaded(2, 1), errors.PromiseRefused(1.0, 2.0), errors.PromiseRefused(None, 2.0),
    errors.GrammarsBusy("too many"), errors.TooManySessions(1), errors.QueueTimeout(1.0), errors.DeadlineMissed(1.0),
    errors.RequestAborted(), errors.RequestTimeout(1.0), errors.NotPicklable("an engine"),
    errors.EngineInUse("one", "two"), errors.CalledFromHook("step", "process", "amid a step."),
    errors.NoEventLoop(), errors.ForkedProcess(1), errors.EngineHung(1.0),
    errors.RecordingError("it is damaged"), errors.RecordingMismatch("another model"),
    errors.AdaptersBusy("2 are being read"), errors.AdapterMismatch("aa", "", "fr"), errors.WeightsIncomplete(),
    errors.EngineAsleep(2),
]
"""One of each kind whose constructor makes its text, as the engine makes them."""


def test_the_list_has_every_constructor() -> None:
    """A class with a constructor of its own is in it, or has that of one that is."""
    own = {kind for kind in vars(errors).values() if isinstance(kind, type) and "__init__" in vars(kind)}
    assert own <= {base for error in MADE for base in type(error).__mro__}


@pytest.mark.parametrize("error", MADE, ids=lambda error: type(error).__name__)
def test_an_error_says_the_same_wherever_it_arrives(error: PagedcoreError) -> None:
    """Pickled, copied, and built again from its arguments, as task queues do that send errors as JSON: those whose
    constructor takes something else are left with the text."""
    for back in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))
    with suppress(TypeError, ValueError):
        assert str(type(error)(*error.args)) == str(error)
