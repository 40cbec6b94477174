"""The errors that kernels raise; ``pagedcore.errors`` has the whole tree and these among it."""

from __future__ import annotations


class PagedcoreError(Exception):
    """Base of every error raised on purpose by pagedcore."""


class InvalidConfig(PagedcoreError, ValueError):
    """An engine cannot be built from these settings."""


class MissingDependency(InvalidConfig, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


class InternalError(PagedcoreError):
    """A stated law of the engine does not hold: please report it with the message."""
