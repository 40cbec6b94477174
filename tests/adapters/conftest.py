"""Fixtures of the tests of all adapters."""

from __future__ import annotations

import pytest

from pagedcore_http.present_objects import PresentObjects


@pytest.fixture(autouse=True)
def nothing_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start of a server in this process leaves no objects out of garbage collections.

    To look at all that the tests have imported takes a fifth of a second for each server, and what was left out of one
    collection keeps what a later test has to see collected. The test of it puts it back.
    """
    monkeypatch.setattr(PresentObjects, "keep", lambda self: None)
