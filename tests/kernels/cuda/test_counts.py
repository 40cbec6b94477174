"""What a tile of K and V costs the attention kernels, as the interpreter counts it: a gate, like that of registers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from kernels.cuda.simulated_driver import compiled
from pagedcore_kernels.cuda.build.toolchain import missing_compiler_parts
from pagedcore_kernels.cuda.build.variants import attention_name
from pagedcore_kernels.cuda.shapes import AttentionShape, Format

pytestmark = pytest.mark.skipif(bool(missing_compiler_parts()), reason="needs pagedcore[cuda] to compile kernels")

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
WARPS = 4


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script that counts, as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("cuda_counts")


@pytest.mark.parametrize(("family", "size", "pool", "conflicts"), [
    ("prefill", 32, Format.BF16, 64), ("decode", 32, Format.INT8, 16),
    *(pytest.param(family, 64, *each, marks=pytest.mark.kernels)
      for each in ((Format.BF16, 0), (Format.INT8, 32)) for family in ("decode", "prefill"))])
def test_a_tile_costs_no_more_than_it_has_to(
    counts: Any, family: str, size: int, pool: Format, conflicts: int
) -> None:
    """The fewest products; each byte of K and V once; a block's number a warp for K and one for V; no bank conflicts
    but those of copies to rows of 64 bytes, of which eight lanes write two.
    """
    shape = AttentionShape(size, size, Format.BF16, pool)
    tile = counts.count_tile(compiled(attention_name(family, shape), "sm_90")[1], family, shape, 7, 2)
    products, kv_bytes = counts.floor(family, shape)
    numbers = 2 * WARPS
    assert tile.instructions["mma"] == products
    assert tile.instructions["global loads"] <= numbers
    assert kv_bytes <= tile.sectors * 32 <= kv_bytes + 32 * numbers
    assert tile.conflicts == conflicts
