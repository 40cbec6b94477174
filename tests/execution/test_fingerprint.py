"""What a digest of KV stands for."""

from __future__ import annotations

import pytest

import pagedcore
from doubles import ToyBackend
from pagedcore.execution.fingerprint import kv_format


def test_kv_of_another_version_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version may compute in another order of additions: its KV is in another format, and is computed again."""
    backend = ToyBackend()
    before = kv_format(backend, 4)
    assert kv_format(backend, 4) == before
    monkeypatch.setattr(pagedcore, "__version__", "0.0.1")
    assert kv_format(backend, 4) != before
