"""What a digest of KV stands for."""

from __future__ import annotations

import pytest

from pagedcore import _version
from pagedcore.models.fingerprint import kv_format
from pagedcore_kernels.cpu.matmul import packed
from support.doubles import ToyBackend


def test_kv_of_another_version_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version may compute in another order of additions: its KV is in another format, and is computed again."""
    backend = ToyBackend()
    before = kv_format(backend, 4)
    assert kv_format(backend, 4) == before
    monkeypatch.setattr(_version, "__version__", "0.0.1")
    assert kv_format(backend, 4) != before


@pytest.mark.parametrize("is_permitted", [True, False])
def test_kv_of_other_products_is_not_trusted(monkeypatch: pytest.MonkeyPatch, is_permitted: bool) -> None:
    """Of two processes on one machine one may have been refused its matrix units: their bits differ."""
    monkeypatch.setattr(packed, "has_fused_vectors", lambda: True)
    monkeypatch.setattr(packed, "may_use_tiles", lambda form: not is_permitted)
    before = kv_format(ToyBackend(), 4)
    monkeypatch.setattr(packed, "may_use_tiles", lambda form: is_permitted)
    assert kv_format(ToyBackend(), 4) != before


def test_kv_of_widened_pairs_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba may be configured to do without the instructions for bfloat16: products then have other bits."""
    monkeypatch.setattr(packed, "has_fused_vectors", lambda: True)
    monkeypatch.setattr(packed, "may_use_tiles", lambda form: False)
    formats = set()
    for has_pairs in (True, False):
        monkeypatch.setattr(packed, "has_instructions", lambda name, has_pairs=has_pairs: has_pairs)
        formats.add(kv_format(ToyBackend(), 4))
    assert len(formats) == 2
