"""What a digest of KV stands for."""

from __future__ import annotations

import pytest

import pagedcore
from doubles import ToyBackend
from pagedcore.execution.fingerprint import kv_format
from pagedcore_kernels.cpu import matmul


def test_kv_of_another_version_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version may compute in another order of additions: its KV is in another format, and is computed again."""
    backend = ToyBackend()
    before = kv_format(backend, 4)
    assert kv_format(backend, 4) == before
    monkeypatch.setattr(pagedcore, "__version__", "0.0.1")
    assert kv_format(backend, 4) != before


@pytest.mark.parametrize("is_permitted", [True, False])
def test_kv_of_other_products_is_not_trusted(monkeypatch: pytest.MonkeyPatch, is_permitted: bool) -> None:
    """Of two processes on one machine one may have been refused its matrix units: their bits differ."""
    monkeypatch.setattr(matmul, "can_multiply", lambda dtype, num_inputs: True)
    monkeypatch.setattr(matmul, "may_use_tiles", lambda: not is_permitted)
    before = kv_format(ToyBackend(), 4)
    monkeypatch.setattr(matmul, "may_use_tiles", lambda: is_permitted)
    assert kv_format(ToyBackend(), 4) != before
