"""What ``pagedcore size`` says of quantised weights is what tensors take once they are loaded, to one per cent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedcore import Engine
from pagedcore.cli.size import size_model
from pagedcore.convert.conversion import convert
from pagedcore.models.linears.stored_weight import stored_tensors
from pagedcore.models.self_test import SelfTest
from pagedcore_kernels.cpu.matmul.packed_int8 import form_of_int8_product
from support.families import tiny_model
from support.quantized_checkpoints import KINDS, write_checkpoint

pytestmark = pytest.mark.skipif(form_of_int8_product(16) is None, reason="no such vectors")
SIZES: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 512, "vocab_size": 1024, "num_hidden_layers": 1,
                         "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 16}
SCHEMES = ("w8a8", "w8a16", "w4a16", "w4a8", "auto-int8")


@pytest.fixture(autouse=True)
def _nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are counted here and asked nothing: no kernel has to be compiled for their layers."""
    monkeypatch.setattr(SelfTest, "check", lambda *_, **__: True)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors that an object of ours refers to; some may come twice."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)
    elif type(value).__module__.startswith("pagedcore") and hasattr(value, "__dict__"):
        yield from tensors_in(list(vars(value).values()))


def resident_bytes(engine: Engine) -> int:
    """Return the bytes of products, of the parameters that are left and of an embedding that is none."""
    decoder: Any = engine._runner.backend._decoder  # type: ignore[attr-defined]
    model = decoder._general.args[0]
    found = [*tensors_in([product.multiply for product in decoder.products]), *model.parameters()]
    found += [one for _, one in stored_tensors(model)]
    return sum({one.data_ptr(): one.nbytes for one in found}.values())


def require_same(path: Path, quantization: str = "none") -> None:
    said = size_model(path, context=32, concurrency=2, dtype="bfloat16", quantization=quantization).weight_bytes
    with Engine.from_pretrained(path, dtype="bfloat16", num_kv_blocks=8, quantization=quantization) as engine:
        held = resident_bytes(engine)
    assert abs(said - held) < 0.01 * held, (said, held)


@pytest.mark.parametrize(("scheme", "is_tied"), [
    pytest.param(scheme, is_tied, marks=[pytest.mark.slow] if is_tied == place % 2 else [])
    for place, scheme in enumerate(SCHEMES) for is_tied in (True, False)
])
def test_schemes_take_what_is_said(scheme: str, is_tied: bool, tmp_path: Path) -> None:
    """Quantised at load and converted alike, with the embedding in int8, or in the output layer's table."""
    tiny_model("llama", tie_word_embeddings=is_tied, **SIZES).save_pretrained(tmp_path / "model")
    require_same(tmp_path / "model", scheme)
    convert(str(tmp_path / "model"), tmp_path / "out", quantization=scheme, dtype="bfloat16")
    require_same(tmp_path / "out")


#: Scales of groups, with zero points, in an order; of outputs; of codebooks whose scales are numbers of one too.
QUICK = ("gptq-order", "ct-w4a16-zeros", "ct-w8a8", "bnb-nf4-nested")


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow]) for kind in KINDS
])
def test_checkpoints_take_what_is_said(kind: str, tmp_path: Path) -> None:
    """Scales of each block, and zero points, are in the sum."""
    write_checkpoint(tmp_path, kind, **SIZES)
    require_same(tmp_path)
