"""Functions that refuse a keyword which they do not have with an error of pagedcore's, and say which one was meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

from pagedcore.errors import UnknownParameter

_P = ParamSpec("_P")
_R = TypeVar("_R")


def refuses_unknown(
    what: str, advice_of: Callable[[str], str] = lambda name: "", hidden: Iterable[str] = ()
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a decorator of functions: a keyword that is no parameter by name raises ``UnknownParameter``.

    Args:
        what: what the error calls a keyword.
        advice_of: returns advice on a name that has a place elsewhere; empty: the nearest name is the advice.
        hidden: keywords that are taken and not shown to callers.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        known = [name for name in inspect.signature(function).parameters if name != "self"]
        names = frozenset((*known, *hidden))

        @wraps(function)
        def call(*arguments: _P.args, **keywords: _P.kwargs) -> _R:
            if not names.issuperset(keywords):
                name = next(name for name in keywords if name not in names)
                raise UnknownParameter.named(what, name, known, advice_of(name))
            return function(*arguments, **keywords)

        return call

    return decorate
