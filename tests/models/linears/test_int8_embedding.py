"""Embeddings in int8: what is looked up, that one table serves the output layer too, and what files say of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedcore import Engine
from pagedcore.config.schemes import SCHEMES
from pagedcore.convert.conversion import convert
from pagedcore.errors import ModelNotSupported
from pagedcore.models.linears.schemes import QUANTIZERS, quantize_per_output
from pagedcore_kernels.cpu.matmul.packed_grouped import PackedGroupedMatmul
from pagedcore_kernels.cpu.matmul.packed_int8 import PackedInt8Matmul, form_of_int8_product
from pagedcore_kernels.errors import InternalError
from support.families import VOCAB, tiny_model
from support.quantized_checkpoints import change_config

pytestmark = pytest.mark.skipif(form_of_int8_product(16) is None, reason="no such vectors")


def int8_rows(weight: torch.Tensor) -> np.ndarray[Any, Any]:
    """What a matrix [tokens, size] is in int8 with a scale for each token, by NumPy, in float32."""
    numbers = weight.detach().float().numpy()
    scales = np.abs(numbers).max(axis=1, keepdims=True) / np.float32(127)
    return (np.rint(numbers / scales) * scales).astype(np.float32)


def backend_of(engine: Engine) -> Any:
    return engine._runner.backend


def embedding_of(engine: Engine) -> Any:
    decoder = backend_of(engine)._decoder
    model = decoder._general.args[0] if hasattr(decoder, "_general") else decoder._model
    return model.get_input_embeddings()


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (70, 36), (129, 64), (200, 1030)])
def test_products_show_their_rows(num_outputs: int, num_inputs: int) -> None:
    """Both products of int8 give back the rows that they were made of, bit by bit."""
    weight = torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(3))
    values, scales = quantize_per_output(weight)
    outputs = torch.tensor([0, num_outputs - 1, num_outputs // 2, 0])
    for product in (PackedInt8Matmul(values, scales[:, 0], None, torch.float32),
                    PackedGroupedMatmul(values, scales, None, 8, None, torch.float32)):
        assert np.array_equal(product.weight_rows(outputs).numpy(), int8_rows(weight)[outputs])
        assert product.weight_rows(outputs[:0]).shape == (0, num_inputs)


def test_rows_of_other_weights_are_not_shown() -> None:
    """A product of four bits, of groups or with zero points has no such rows."""
    values, scales = torch.ones(4, 16, dtype=torch.int8), torch.ones(4, 1)
    for product in (PackedGroupedMatmul(values, scales, None, 4, None, torch.float32),
                    PackedGroupedMatmul(values, scales.expand(4, 2), None, 8, None, torch.float32),
                    PackedGroupedMatmul(values, scales, torch.ones_like(scales, dtype=torch.int8), 8, None,
                                        torch.float32)):
        with pytest.raises(InternalError):
            product.weight_rows(torch.tensor([0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(("family", "scheme"), [
    *(("llama", scheme) for scheme in QUANTIZERS), ("gemma3_text", "w8a8"), ("gpt2", "w8a16"),
])
def test_tokens_are_looked_up_in_int8(family: str, scheme: str, is_tied: bool, dtype: torch.dtype) -> None:
    """Rows are those of the embedding in int8, rounded once; no copy in floating numbers is left, and none of the
    table where the output layer has it."""
    if family in ("gemma3_text", "gpt2") and not is_tied:
        pytest.skip("their output layers always share the embedding here")
    model: Any = tiny_model(family, tie_word_embeddings=is_tied).to(dtype)
    weight = model.get_input_embeddings().weight
    expected = torch.from_numpy(int8_rows(weight)).to(dtype)
    with Engine.from_pretrained(model, quantization=scheme, num_kv_blocks=16) as engine:
        embedding, ids = embedding_of(engine), torch.arange(VOCAB)[None]
        rows = torch.nn.functional.embedding(ids, embedding.weight)
        assert torch.equal(rows.view(VOCAB, -1), expected)
        assert rows.shape[:2] == (1, VOCAB)
        held = embedding.weight.tensors
        is_shared = is_tied and SCHEMES[scheme].bits == 8
        assert [one.dtype for one in held] == ([] if is_shared else [torch.int8, torch.float32])
        assert all(one.shape != weight.shape for one in embedding.parameters())


@pytest.mark.parametrize("scheme", QUANTIZERS)
def test_what_a_file_says_must_fit(scheme: str, tmp_path: Path) -> None:
    """A value of ours that the file's matrices are not like is refused; without it, the embedding is the file's."""
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    convert(str(tmp_path / "model"), tmp_path / "out", quantization=scheme, dtype="float32")
    kind = json.loads((tmp_path / "out" / "config.json").read_text())["embedding_quantization"]
    assert kind == ("lm_head" if SCHEMES[scheme].bits == 8 else "int8")
    settings: dict[str, Any] = {"num_kv_blocks": 16, "dtype": "float32"}
    for wrong in ("int4", 8, ["lm_head"], *(["lm_head"] if SCHEMES[scheme].bits == 4 else [])):
        change_config(tmp_path / "out", embedding_quantization=wrong)
        with pytest.raises(ModelNotSupported, match="embedding_quantization"):
            Engine.from_pretrained(tmp_path / "out", **settings)
    change_config(tmp_path / "out", embedding_quantization=None)
    before = tiny_model("llama", tie_word_embeddings=True).get_input_embeddings().weight
    with Engine.from_pretrained(tmp_path / "out", **settings) as engine:
        assert torch.equal(embedding_of(engine).weight, before)
