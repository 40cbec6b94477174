"""What a model refuses to do for LangChain, with what to do instead."""

from __future__ import annotations

from pagedcore.errors import PagedcoreError


class NotPicklable(PagedcoreError, TypeError):
    """A model has an engine of this process, which another one cannot have."""
