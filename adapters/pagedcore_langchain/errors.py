"""Errors of a call as LangChain's as well: it asks their classes what to retry, and when to shorten a conversation."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

from langchain_core.exceptions import (
    ContextOverflowError,
    ModelError,
    ModelInvalidRequestError,
    ModelRateLimitError,
    ModelTimeoutError,
)

from pagedcore.errors import EngineOverloaded, InvalidRequest, PagedcoreError, PromptTooLong, RequestTimeout

_THEIRS: Final[tuple[tuple[type[PagedcoreError], type[ModelError]], ...]] = (
    (PromptTooLong, ContextOverflowError), (InvalidRequest, ModelInvalidRequestError),
    (EngineOverloaded, ModelRateLimitError), (RequestTimeout, ModelTimeoutError),
)
"""The first that an error is one of; all others are pagedcore's alone."""


@contextmanager
def also_langchains() -> Generator[None, None, None]:
    """Raise what pagedcore refuses in the block as an error of the same class and of LangChain's for it."""
    try:
        yield
    except PagedcoreError as error:
        theirs = next((theirs for ours, theirs in _THEIRS if isinstance(error, ours)), None)
        if theirs is None or isinstance(error, ModelError):
            raise
        told = _restored(type(error), theirs, error.args, vars(error))
        raise told.with_traceback(error.__traceback__) from error.__cause__


@cache
def _both(ours: type[PagedcoreError], theirs: type[ModelError]) -> type[PagedcoreError]:
    """Return a class of both that is called as ours."""

    def reduced(error: PagedcoreError) -> tuple[Callable[..., PagedcoreError], tuple[Any, ...]]:
        # Why: a class that is made here is found by no name.
        return _restored, (ours, theirs, error.args, vars(error))

    members = {"__module__": ours.__module__, "__qualname__": ours.__qualname__, "__doc__": ours.__doc__,
               "__reduce__": reduced}
    return type(ours.__name__, (ours, theirs), members)


def _restored(
    ours: type[PagedcoreError], theirs: type[ModelError], args: tuple[Any, ...], attributes: dict[str, Any]
) -> PagedcoreError:
    kind = _both(ours, theirs)  # type: ignore[arg-type]  # Why: a class is hashed by its metaclass.
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(attributes)
    return error
