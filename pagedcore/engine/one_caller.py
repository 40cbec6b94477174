"""The check that one thread at a time is in the calls of an engine, which has no locks of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from pagedcore.errors import EngineInUse


class OneCaller:
    """Who is in a call of an engine: one thread, which may call it again from there; between calls it is any thread.

    Invariant: a thread that is refused has changed nothing.
    """

    def __init__(self) -> None:
        # Why a lock that is never waited for: taking it and finding it taken are one operation.
        self._lock = threading.RLock()
        self._name = ""

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise EngineInUse(self._name, threading.current_thread().name)
        self._name = threading.current_thread().name

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class HasOneCaller(Protocol):
    """An object whose calls are for one thread at a time."""

    one_caller: OneCaller


_Self = TypeVar("_Self", bound=HasOneCaller)
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def for_one_caller(
    method: Callable[Concatenate[_Self, _Args], _Result],
) -> Callable[Concatenate[_Self, _Args], _Result]:
    """Let a method raise ``EngineInUse`` while another thread is in one that is also decorated so."""

    @wraps(method)
    def checked(self: _Self, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        with self.one_caller:
            return method(self, *args, **kwargs)

    return checked
