"""Quantised models: weights against NumPy, logits against the model before, and sessions against other engines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedcore import Engine, SamplingParams
from pagedcore.errors import InvalidConfig, InvalidSessionFile, ModelMismatch, ModelNotSupported
from pagedcore.models.attention.interface import PagedStep
from pagedcore.models.linears import schemes
from pagedcore.models.linears.schemes import QUANTIZERS, group_size, quantize_by_group, quantize_per_output
from pagedcore_kernels.cpu.matmul import packed_grouped
from pagedcore_kernels.cpu.matmul.packed import PackedMatmul
from pagedcore_kernels.cpu.matmul.packed_grouped import PackedGroupedMatmul
from pagedcore_kernels.cpu.matmul.packed_int8 import MOST_INPUTS, PackedInt8Matmul, form_of_int8_product
from support.families import VOCAB, tiny_model

pytestmark = pytest.mark.skipif(form_of_int8_product(16) is None, reason="no such vectors")
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2)


def engine_of(model: Any, **settings: Any) -> Engine:
    return Engine.from_pretrained(model, **{"num_kv_blocks": 64, "max_num_seqs": 4, "num_threads": 1, **settings})


each_scheme = pytest.mark.parametrize("scheme", QUANTIZERS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
each_format = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
OURS = (PackedInt8Matmul, PackedGroupedMatmul)


@each_format
def test_weights_are_quantised_output_by_output(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and scales are those of NumPy, also where a matrix is converted in several parts."""
    monkeypatch.setattr(schemes, "_AT_ONCE", 200)
    weight = torch.from_numpy(np.random.default_rng(0).normal(size=(37, 64))).to(dtype)
    weight[5] = 0
    values, scales = quantize_per_output(weight)
    numbers = weight.float().numpy()
    wanted = np.abs(numbers).max(axis=1, keepdims=True) / np.float32(127)
    assert np.array_equal(scales.numpy(), wanted)
    assert np.array_equal(values.numpy(), np.rint(numbers / np.where(wanted > 0, wanted, 1)))
    assert values.abs().max() == 127


@each_format
def test_weights_are_quantised_group_by_group(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and scales are those of NumPy, group by group: the largest magnitude is -8, whatever its sign."""
    monkeypatch.setattr(schemes, "_AT_ONCE", 2000)
    weight = torch.from_numpy(np.random.default_rng(0).normal(size=(37, 384))).to(dtype)
    weight[5, :200], weight[6, 128:256] = 0, -weight[6, 128:256]
    values, scales = quantize_by_group(weight)
    assert scales.shape == (37, 3)
    for output, group in np.ndindex(37, 3):
        numbers = weight[output, 128 * group : 128 * group + 128].float().numpy()
        scale = numbers[np.abs(numbers).argmax()] / np.float32(-8)
        given = values[output, 128 * group : 128 * group + 128].numpy()
        assert scales[output, group] == scale
        assert np.array_equal(given, np.minimum(np.rint(numbers / (scale or 1)), 7))
        assert given.min() == (-8 if scale else 0)


@pytest.mark.parametrize(("num_inputs", "size"), [
    (896, 128), (192, 64), (160, 32), (80, 80), (200, 40), (48, 48), (24, 24), (7, 7), (1016, 1016),
])
def test_the_size_of_groups(num_inputs: int, size: int) -> None:
    """128, 64 or 32 where one of them divides a layer's inputs, else the next of 120 to 16, else all inputs."""
    assert group_size(num_inputs) == size
    product = QUANTIZERS["w4a16"](torch.randn(3, num_inputs), None)
    assert product.memory[1] == packed_grouped.packed_bytes(3, num_inputs, num_inputs // size, 4)


@each_scheme
def test_a_damaged_weight_makes_its_output_nan(scheme: str) -> None:
    """NaN and infinity are neither hidden nor spread to other outputs."""
    weight = torch.ones(3, 16)
    weight[0, 3], weight[2, 1] = torch.nan, -torch.inf
    product = QUANTIZERS[scheme](weight, None)
    assert product(torch.ones(2, 16)).isnan().tolist() == [[True, False, True]] * 2


@each_scheme
def test_the_smallest_numbers_are_quantised(scheme: str) -> None:
    """Of denormals, whose scale is rounded much, none leaves the range of values."""
    weight = torch.tensor([[11.0, -11.0, 12.0, 1.0] * 4]) * 2.0**-149
    assert QUANTIZERS[scheme](weight, None)(torch.ones(2, 16)).abs().max() < 1e-43


@each_scheme
@each_dtype
def test_any_number_of_inputs(scheme: str, dtype: torch.dtype) -> None:
    """Layers of odd sizes are quantised too: filled up with zeros, which change nothing."""
    for num_inputs in (1, 24, 50, 333):
        weight, bias, rows = (torch.randn(*shape).to(dtype) for shape in ((70, num_inputs), (70,), (6, num_inputs)))
        product = QUANTIZERS[scheme](weight, bias)
        assert isinstance(product, OURS)
        expected = rows.double() @ weight.double().T + bias.double()
        bound = 0.2 if scheme.startswith("w4") else 0.03
        assert (product(rows).double() - expected).norm() < bound * expected.norm()


def test_what_cannot_be_int8_keeps_its_format() -> None:
    """A layer with too many inputs for exact sums computes as without quantisation."""
    weight, bias, rows = torch.randn(8, MOST_INPUTS + 1), torch.randn(8), torch.randn(3, MOST_INPUTS + 1)
    product = QUANTIZERS["w8a8"](weight, bias)
    assert isinstance(product, PackedMatmul)
    assert torch.equal(product(rows), PackedMatmul(weight, bias)(rows))


#: What may be wrong with a product: nothing that is far from the weight is taken.
WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "noise": torch.randn_like, "zeros": torch.zeros_like, "another order": lambda out: out.roll(1, 1),
    "one output": lambda out: torch.cat([out[:, :7], 2 * out[:, 7:8], out[:, 8:]], 1),
    "NaN": lambda out: out.masked_fill(out == out[0, 3], torch.nan),
}


@pytest.mark.parametrize("wrong", WRONG)
@each_scheme
def test_a_wrong_product_is_refused(scheme: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose products are not what its quantised weights say is not loaded, whichever outputs are wrong."""
    kind = PackedInt8Matmul if scheme == "w8a8" else PackedGroupedMatmul
    right = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda product, rows: WRONG[wrong](right(product, rows)))
    with pytest.raises(ModelNotSupported, match=r"self-test failed\. A product of \d+ inputs"):
        engine_of(tiny_model("llama"), quantization=scheme)


@each_scheme
def test_a_model_that_pages_wrongly_is_refused_when_quantised_too(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of the paged path are compared with those of the model's own modules and the same products."""
    forward = PagedStep.attend
    monkeypatch.setattr(PagedStep, "attend", lambda *arguments, **options: 0.7 * forward(*arguments, **options))
    with pytest.raises(ModelNotSupported, match=r"self-test failed\. Logits of"):
        engine_of(tiny_model("gpt2"), quantization=scheme)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2_moe", "gemma3_text", "phi3"])
def test_a_quantised_model_computes_nearly_the_same(family: str, dtype: str) -> None:
    """Fused decoder, general decoder and experts: log-probabilities are near those of the model before, not equal."""
    prompts = [[(7 * i + n) % VOCAB for i in range(n)] for n in (5, 19, 33)]
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
    scores, products = {}, {}
    for quantization in ("none", *QUANTIZERS):
        with engine_of(tiny_model(family), dtype=dtype, quantization=quantization) as engine:
            outputs = engine.generate(prompts, params, show_progress=False)
            logprobs = [one.logprob for output in outputs for one in (output.prompt_logprobs or ())[1:]]
            scores[quantization] = np.array(logprobs)
            backend = engine._runner.backend
            decoder = backend._decoder  # type: ignore[attr-defined]
            products[quantization] = {type(one.multiply) for one in decoder.products}
            assert engine.stats().is_schedule_invariant
            assert not backend.computes_in_torch  # type: ignore[attr-defined]
    exact = scores["none"]
    for scheme, bound in (("w8a8", 0.12), ("w8a16", 0.12), ("w4a16", 0.7), ("w4a8", 0.7)):
        assert products[scheme] & {*OURS}
        assert not np.array_equal(exact, scores[scheme])
        assert np.abs(exact - scores[scheme]).mean() < bound * exact.std() + 0.05
    assert not products["none"] & {*OURS}


@pytest.mark.parametrize(("family", "scheme", "bound"), [
    ("mixtral", "w8a16", 0.12), ("qwen3_moe", "w4a16", 0.7), ("olmoe", "w8a8", 0.15),
])
def test_experts_are_quantised(family: str, scheme: str, bound: float) -> None:
    """Each expert's two products are of the scheme, and results do not depend on the schedule."""
    prompt, params = [(7 * i + 3) % VOCAB for i in range(60)], SamplingParams(max_tokens=1, prompt_logprobs=1)
    scores = {}
    for quantization in ("none", scheme):
        with engine_of(tiny_model(family), dtype="float32", quantization=quantization) as engine:
            output = engine.generate([prompt], params, show_progress=False)[0]
            scores[quantization] = np.array([one.logprob for one in (output.prompt_logprobs or ())[1:]])
            model = engine._runner.backend._decoder  # type: ignore[attr-defined]
            assert engine.stats().is_schedule_invariant
            # Why: routers, of 4 experts, keep their format.
            kinds = {type(one.multiply) for one in model.products if one.out_features != 4}
            assert (kinds <= {*OURS}) == (quantization != "none")
            # Shape: attention has two products or four, each of 4 experts two, of 3 layers, and one is the head.
            assert len(model.products) >= 3 * (2 + 8) + 1
    assert np.abs(scores["none"] - scores[scheme]).mean() < bound * scores["none"].std() + 0.05


@each_scheme
def test_routers_keep_their_format(scheme: str) -> None:
    """Which experts compute a row is decided in float32."""
    with engine_of(tiny_model("qwen2_moe"), quantization=scheme) as engine:
        backend = engine._runner.backend
        gates = [module.weight for _, module in backend._decoder._model.named_modules()  # type: ignore[attr-defined]
                 if type(module).__name__.endswith("Router")]
        assert gates
        assert all(isinstance(gate.product.multiply, PackedMatmul) for gate in gates)


@pytest.mark.parametrize("settings", [
    {"linear_backend": "packed"}, {"quantization": "w4a4"}, {"quantization": "w8a8", "linear_backend": "onednn"},
])
def test_other_settings_are_refused_before_a_model_is_loaded(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thing makes the products, and a scheme that is not known is named with those that are."""
    monkeypatch.setattr("pagedcore.models.checkpoints.pretrained.load_pretrained",
                        lambda *_, **__: pytest.fail("was loaded"))
    message = r"linear_backend: got .* allowed with|quantization: .* one of none, w8a8, w8a16, w4a16, w4a8, auto-int8"
    with pytest.raises(InvalidConfig, match=message):
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


@each_scheme
@each_dtype
def test_weights_take_what_is_said(scheme: str, dtype: torch.dtype) -> None:
    """The bytes that a report says are those of the packed weight, filled up to whole panels, with its scales."""
    for num_outputs, num_inputs in ((130, 256), (7, 50), (64, 1016)):
        product = QUANTIZERS[scheme](torch.randn(num_outputs, num_inputs).to(dtype), None)
        others = 0 if scheme != "w8a8" else 3 * product._scales.nbytes  # type: ignore[attr-defined]
        said = QUANTIZERS[scheme].weight_bytes(num_outputs, num_inputs, dtype)
        assert product.memory[1] + others == said
        assert (product.weight.numel(), product.weight.dtype) == (0, dtype)
    plain = PackedMatmul(torch.randn(128, 1024).bfloat16(), None).memory[1]
    assert QUANTIZERS["w4a16"].weight_bytes(128, 1024, dtype) == plain * (1 / 4 + 1 / 64)


def test_too_many_inputs_take_what_they_did() -> None:
    """A layer that keeps its format is counted so."""
    assert QUANTIZERS["w8a8"].weight_bytes(3, MOST_INPUTS + 1, torch.bfloat16) == 6 * (MOST_INPUTS + 1)


A_SCHEME = """
import sys
from pagedcore.config.schemes import SCHEMES, Scheme

SCHEMES["w8-groups"] = Scheme(bits=8, has_groups=True, summary="int8 weights with a scale for each group of inputs")

from pagedcore import Engine
from pagedcore.convert.conversion import convert

convert("demo", sys.argv[1], quantization="w8-groups")
for model, quantization in (("demo", "w8-groups"), (sys.argv[1], "none")):
    with Engine.from_pretrained(model, quantization=quantization, num_kv_blocks=64) as engine:
        print(engine.generate(["What is 2 + 3?"])[0].outputs[0].text)
"""


def test_a_scheme_is_one_entry(tmp_path: Path) -> None:
    """A name that is added to the table can be set, converted to and loaded; nothing else knows it."""
    command = [sys.executable, "-c", A_SCHEME, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2", "+", "3", "=", "5."] * 2, done.stderr
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    weights = [group["weights"] for group in config["quantization_config"]["config_groups"].values()]
    assert {(one["num_bits"], one["strategy"]) for one in weights} == {(8, "group")}
