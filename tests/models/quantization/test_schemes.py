"""Quantised models: weights against NumPy, logits against the model before, and sessions against other engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedcore import Engine, SamplingParams
from pagedcore.errors import InvalidConfig, InvalidSessionFile, ModelMismatch
from pagedcore.models.cpu.packed_linear import PackedLinear
from pagedcore.models.quantization.schemes import W8A8Linears, quantize_per_output
from pagedcore_kernels.cpu.matmul.packed import PackedMatmul
from pagedcore_kernels.cpu.matmul.packed_int8 import PackedInt8Matmul, form_of_int8_product
from support.families import VOCAB, tiny_model

pytestmark = pytest.mark.skipif(form_of_int8_product(16) is None, reason="no such vectors")
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2)


def engine_of(model: Any, **settings: Any) -> Engine:
    return Engine.from_pretrained(model, **{"num_kv_blocks": 64, "max_num_seqs": 4, "num_threads": 1, **settings})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_quantised_output_by_output(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and scales are those of NumPy, also where a matrix is converted in several parts."""
    monkeypatch.setattr("pagedcore.models.quantization.schemes._AT_ONCE", 200)
    weight = torch.from_numpy(np.random.default_rng(0).normal(size=(37, 64))).to(dtype)
    weight[5] = 0
    values, scales = quantize_per_output(weight)
    numbers = weight.float().numpy()
    wanted = np.abs(numbers).max(axis=1) / np.float32(127)
    assert np.array_equal(scales.numpy(), wanted)
    divisor = np.where(wanted > 0, wanted, 1)[:, None]
    assert np.array_equal(values.numpy(), np.rint(numbers / divisor))
    assert values.abs().max() == 127


def test_a_damaged_weight_makes_its_output_nan() -> None:
    """NaN and infinity are neither hidden nor spread to other outputs."""
    weight = torch.ones(3, 16)
    weight[0, 3], weight[2, 1] = torch.nan, -torch.inf
    values, scales = quantize_per_output(weight)
    assert scales.isnan().tolist() == [True, False, True]
    product = PackedInt8Matmul(values, scales, None, torch.float32)(torch.ones(2, 16))
    assert product.isnan().tolist() == [[True, False, True]] * 2


def test_what_cannot_be_int8_keeps_its_format() -> None:
    """A layer whose inputs are no multiple of 16, and its bias, compute as without quantisation."""
    weight, bias, rows = torch.randn(8, 24), torch.randn(8), torch.randn(3, 24)
    product = W8A8Linears()(weight, bias)
    assert isinstance(product, PackedMatmul)
    assert torch.equal(product(rows), PackedMatmul(weight, bias)(rows))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2_moe", "gemma3_text", "phi3"])
def test_a_quantised_model_computes_nearly_the_same(family: str, dtype: str) -> None:
    """Fused decoder, general decoder and experts: log-probabilities are near those of the model before, not equal."""
    prompts = [[(7 * i + n) % VOCAB for i in range(n)] for n in (5, 19, 33)]
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
    scores, products = [], []
    for quantization in ("none", "w8a8"):
        with engine_of(tiny_model(family), dtype=dtype, quantization=quantization) as engine:
            outputs = engine.generate(prompts, params, show_progress=False)
            scores.append([one.logprob for output in outputs for one in (output.prompt_logprobs or ())[1:]])
            decoder = engine._runner.backend._decoder  # type: ignore[attr-defined]
            products.append([type(one.multiply) for one in decoder.products if isinstance(one, PackedLinear)])
            assert engine.stats().is_schedule_invariant
    exact, quantised = (np.array(one) for one in scores)
    assert PackedInt8Matmul in products[1]
    assert PackedInt8Matmul not in products[0]
    assert not np.array_equal(exact, quantised)
    assert np.abs(exact - quantised).mean() < 0.12 * exact.std() + 0.05


def test_routers_keep_their_format() -> None:
    """Which experts compute a row is decided in float32."""
    with engine_of(tiny_model("qwen2_moe"), quantization="w8a8") as engine:
        backend = engine._runner.backend
        gates = [module.weight for _, module in backend._decoder._model.named_modules()  # type: ignore[attr-defined]
                 if type(module).__name__.endswith("Router")]
        assert gates
        assert all(isinstance(gate.product.multiply, PackedMatmul) for gate in gates)


@pytest.mark.parametrize("settings", [
    {"linear_backend": "packed"}, {"quantization": "w4a16"}, {"quantization": "w8a8", "linear_backend": "onednn"},
])
def test_other_settings_are_refused_before_a_model_is_loaded(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thing makes the products, and a scheme that is not known is named with those that are."""
    monkeypatch.setattr("pagedcore.models.pretrained.load_pretrained", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(InvalidConfig, match=r"linear_backend: got .* allowed with|quantization: .* one of none, w8a8"):
        Engine.from_pretrained("demo", **{"quantization": "w8a8", **settings})


def test_a_processor_without_vectors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what is needed."""
    monkeypatch.setattr("pagedcore_kernels.cpu.features.has_fused_vectors", lambda: False)
    with pytest.raises(InvalidConfig, match="needs an x86 processor with AVX2"):
        Engine.from_pretrained("demo", quantization="w8a8")


def test_a_session_belongs_to_one_quantisation(tmp_path: Path) -> None:
    """An export continues in an engine with the same scheme, bit for bit, and is refused by one without."""
    path = tmp_path / "talk.json"
    settings = {"dtype": "float32", "session_key": "a secret of 16 bytes"}
    with engine_of(tiny_model("llama"), quantization="w8a8", **settings) as engine, engine.session() as session:
        session.ask(list(range(3, 40)), GREEDY)
        session.export(path)
        wanted = session.ask([5, 6], GREEDY).outputs[0]
    with engine_of(tiny_model("llama"), quantization="w8a8", **settings) as engine:
        with engine.import_session(path) as session:
            again = session.ask([5, 6], GREEDY)
        assert (again.outputs[0].token_ids, again.outputs[0].logprobs) == (wanted.token_ids, wanted.logprobs)
        assert again.num_cached_tokens > 0
    with engine_of(tiny_model("llama"), **settings) as engine, pytest.raises((ModelMismatch, InvalidSessionFile)):
        engine.import_session(path)


def test_weights_take_half_of_the_memory() -> None:
    """The packed weight has a byte for each number, filled up to whole panels."""
    weight = torch.randn(130, 256).bfloat16()
    quantised, plain = W8A8Linears()(weight, None), PackedMatmul(weight, None)
    assert quantised.memory[1] == 192 * 256
    assert 2 * quantised.memory[1] == plain.memory[1]
    assert (quantised.weight.numel(), quantised.weight.dtype) == (0, torch.bfloat16)
