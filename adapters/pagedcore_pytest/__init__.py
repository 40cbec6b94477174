"""A pytest plugin: a real model in tests, deterministic and without a network.

    def test_sum(llm):
        assert llm.chat("What is 2 + 3?") == "2 + 3 = 5."

Pytest finds it by its entry point. Nothing of pagedcore, torch or a web framework is imported until a test uses one of
the fixtures. Read ``plugin.py`` for options and fixtures, ``llm.py`` for what ``llm`` is, and ``goldens.py`` for golden
answers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pagedcore_pytest.errors import GoldenChanged, GoldenFileInvalid, GoldenMissing
    from pagedcore_pytest.llm import LLM, Call

__all__ = ["LLM", "Call", "GoldenChanged", "GoldenFileInvalid", "GoldenMissing"]

_HOMES: Final = {
    "Call": "pagedcore_pytest.llm",
    "GoldenChanged": "pagedcore_pytest.errors",
    "GoldenFileInvalid": "pagedcore_pytest.errors",
    "GoldenMissing": "pagedcore_pytest.errors",
    "LLM": "pagedcore_pytest.llm",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use; not by pagedcore's own helper, as nothing of pagedcore is imported before."""
    if name not in _HOMES:
        raise AttributeError(f"module 'pagedcore_pytest' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
