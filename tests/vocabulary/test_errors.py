"""The errors as objects: they cross between processes whole."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

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


@pytest.mark.parametrize("error", [errors.ForkedProcess(1), errors.EngineHung(1.0), errors.TooManySessions(1),
                                   errors.QueueTimeout(1.0), errors.DeadlineMissed(1.0), errors.RequestTimeout(1.0)],
                         ids=lambda error: type(error).__name__)
def test_an_error_that_is_built_again_from_its_text_never_says_it_twice(error: PagedcoreError) -> None:
    """As task queues do that send errors as JSON: where the constructor takes a number, they are left with the text."""
    with pytest.raises(ValueError, match="format code"):
        type(error)(*error.args)
