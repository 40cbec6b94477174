"""Files with weights of 4 bits, and GGUF files with 8, by rows in int8: nearly their own numbers, and another model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedcore.errors import InvalidConfig
from pagedcore_kernels.cpu.matmul.packed_grouped import PackedGroupedMatmul, form_of_byte_groups
from support import gguf_files
from support.gguf_files import write_model
from support.quantized_checkpoints import write_checkpoint
from support.scores import engine_of, scores_of

pytestmark = pytest.mark.skipif(form_of_byte_groups(16) is None, reason="no such vectors")
SMALL = {"hidden_size": 256, "intermediate_size": 256}


def products_with_int8_rows(path: Path, **settings: Any) -> tuple[int, Any]:
    """Return how many products, parts counted, take int8 rows, and the fingerprint of the model."""
    with engine_of(path, **settings) as engine:
        backend: Any = engine._runner.backend
        kinds = [one.multiply for one in backend._decoder.products]
        parts = [part for one in kinds for part in getattr(one, "products", [getattr(one, "product", one)])]
        taken = sum(isinstance(one, PackedGroupedMatmul) and one._quantize is not None for one in parts)
        return taken, backend.fingerprint


@pytest.mark.parametrize(("kind", "family"), [
    ("gptq-order", "llama"), pytest.param("awq", "qwen2", marks=pytest.mark.slow), ("ct-w4a16-zeros", "llama"),
    ("gptq", "mixtral"),
])
def test_checkpoints_of_int4_take_int8_rows(kind: str, family: str, tmp_path: Path) -> None:
    """Zero points, an order of inputs and experts included: log-probabilities are near those of floating rows."""
    write_checkpoint(tmp_path, kind, family)
    exact, given = scores_of(tmp_path), scores_of(tmp_path, quantization="w4a8")
    assert 0 < np.abs(given - exact).mean() < 0.05 * exact.std()
    (none, own), (some, other) = products_with_int8_rows(tmp_path), products_with_int8_rows(
        tmp_path, quantization="w4a8"
    )
    assert none == 0 < some
    assert own != other


@pytest.mark.parametrize("kinds", [
    gguf_files.MIXED, *(pytest.param(kinds, marks=pytest.mark.slow) for kinds in (
        ("q4_0", "q4_1"), ("q8_0", "q5_k", "q6_k"),
    )),
], ids=str)
def test_blocks_take_int8_rows(kinds: tuple[str, ...], tmp_path: Path) -> None:
    """Least weights, scales in float16, groups of 16 inputs; blocks of codebooks beside them keep floating rows."""
    write_model(tmp_path / "model.gguf", "llama", kinds, **SMALL)
    exact, given = scores_of(tmp_path), scores_of(tmp_path, quantization="w4a8")
    assert 0 < np.abs(given - exact).mean() < 0.05 * exact.std()
    assert products_with_int8_rows(tmp_path, quantization="w4a8")[0] > 0


@pytest.mark.parametrize(("kind", "message"), [
    ("bnb-nf4", "without weights that are whole numbers of 4 or 8"), ("ct-w8a8", "got 'w4a8' for a w8a8 checkpoint"),
    ("iq4_nl", "without weights that are whole numbers of 4 or 8"),
])
def test_other_files_are_refused(kind: str, message: str, tmp_path: Path) -> None:
    """Numbers of a codebook have no such products, and scales of outputs those of w8a8."""
    if kind == "iq4_nl":
        write_model(tmp_path / "model.gguf", "llama", (kind,), **SMALL)
    else:
        write_checkpoint(tmp_path, kind)
    with pytest.raises(InvalidConfig, match=message):
        engine_of(tmp_path, quantization="w4a8")
