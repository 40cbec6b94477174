"""The errors that kernels raise; ``pagedcore.errors`` has the whole tree and these among it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, Final

_PASSING: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)


class PagedcoreError(Exception):
    """Base of every error raised on purpose by pagedcore. All of them can be pickled, to cross between processes."""

    def __reduce__(self) -> tuple[Callable[..., PagedcoreError], tuple[Any, ...]]:
        return _restored, (type(self), self.args, vars(self))


def _restored(kind: type[PagedcoreError], args: tuple[Any, ...], attributes: dict[str, Any]) -> PagedcoreError:
    # Why: what a constructor takes is not what it passes on as ``args``.
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


class InvalidConfig(PagedcoreError, ValueError):
    """An engine cannot be built from these settings."""


class MissingDependency(InvalidConfig, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


class UnsupportedPlatform(PagedcoreError, ImportError):
    """pagedcore does not run on this system; the message names those on which it does."""


class InternalError(PagedcoreError):
    """A stated law of the engine does not hold: please report it with the message."""


def is_passing(error: BaseException) -> bool:
    """Whether an error says that the system lacks memory, file handles or threads now, and nothing of what was asked.

    What failed with it is worth asking again later.
    """
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _PASSING)
