"""How a golden answer fails a test, with what to do."""

from __future__ import annotations

from pagedcore.errors import PagedcoreError


class GoldenChanged(PagedcoreError, AssertionError):
    """An answer, or what was asked, is not what the golden file has."""


class GoldenMissing(PagedcoreError, AssertionError):
    """The golden file has no answer of this name."""


class GoldenFileInvalid(PagedcoreError, ValueError):
    """A golden file is damaged, or of a later version."""


class NothingToCompare(PagedcoreError, ValueError):
    """``llm.golden`` is called outside a test, with no completion, or with a name that another prompt has."""
