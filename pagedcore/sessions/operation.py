"""Operations without I/O: a generator yields blocking work, is sent what the work returned, and returns a result.

``run`` drives one on the caller's thread. ``AsyncSession`` runs its steps on the engine thread, its work on others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")

Work = Callable[[], Any]
"""Blocking work that uses no engine state; callable from any thread."""
Operation = Generator[Work, Any, _T]
"""An operation with a result of this type. What fails in its work closes it."""


@dataclass(frozen=True, slots=True)
class Done(Generic[_T]):
    """The result of an operation that has returned."""

    result: _T


def advance(operation: Operation[_T], result: Any = None) -> Work | Done[_T]:
    """Send an operation the result of its last work; return its next work, or that it is done."""
    try:
        return operation.send(result)
    except StopIteration as end:
        return Done(end.value)


def run(operation: Operation[_T], result: Any = None) -> _T:
    """Run an operation and its work on this thread, from its beginning or from the result of its last work."""
    with closing(operation):
        while not isinstance(step := advance(operation, result), Done):
            result = step()
        return step.result
