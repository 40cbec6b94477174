"""Weights that stay in e4m3 on a GPU: launches, logits beside float64's roundings, recordings, and what is decoded."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.cuda.simulated_driver import SimulatedDriver
from kernels.cuda.test_elementwise import random_rows
from pagedcore import Engine
from pagedcore.cli.size import size_model
from pagedcore.errors import ModelNotSupported
from pagedcore.execution.devices import find_device
from pagedcore.models.checkpoints.fp8 import FP8
from pagedcore.models.checkpoints.quantized import load_stored, stored_format
from pagedcore.models.decoders.cuda_decoder import CudaDecoder
from pagedcore.models.decoders.plain import PlainDecoder
from pagedcore.models.diagnosis import diagnose
from pagedcore.models.linears.decoded_weights import decode_weights
from pagedcore.models.linears.float8_linear import (
    Float8Linear,
    keep_float8,
    launch_quantizers,
    quantize_rows,
    why_no_float8,
)
from pagedcore.models.transformers_model import TransformersModel
from pagedcore.sampling_params import SamplingParams
from pagedcore_kernels.cuda.attention.backend import NumbaCudaAttention
from pagedcore_kernels.cuda.build.library import KernelLibrary
from pagedcore_kernels.cuda.build.toolchain import missing_compiler_parts
from pagedcore_kernels.cuda.driver import CudaDriver
from pagedcore_kernels.cuda.elementwise import RowQuantizer
from support.engine_builders import run
from support.families import VOCAB, tiny_model
from support.generate_oracle import make_prompts
from support.quantized_checkpoints import change_config, change_tensors, ct_config, linear_names
from support.ragged_schedules import batch_of, random_schedule, random_sequences, random_tables, run_schedule
from virtual_gpu.backends import on_gpu, shipped_kernels
from virtual_gpu.machine import Machine
from virtual_gpu.test_cuda_decoder import BLOCK, HEAD, LENGTHS, NUM_BLOCKS, launches_of

KERNELS = pytest.mark.skipif(bool(missing_compiler_parts()), reason="needs pagedcore[cuda] to compile kernels")
_FLOAT8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of products is tried with few rows, whose kernel is interpreted here."""
    monkeypatch.setattr("pagedcore.models.linears.torch_products._SIZES", (1, 2))


def ct(strategy: str, rows: str | None, **more: Any) -> dict[str, Any]:
    given = None if rows is None else {**_FLOAT8, "strategy": rows, "dynamic": rows == "token"}
    return ct_config("float-quantized", {**_FLOAT8, "strategy": strategy, **more}, given)


def fp8(activations: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": activations, "fmt": "e4m3", **more}


#: A configuration, the name of the scales of weights, and of those of rows, if there are any.
KINDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "channel": (ct("channel", "token"), "weight_scale", ""),
    "tensor, static": (ct("tensor", "tensor"), "weight_scale", "input_scale"),
    "fp8, dynamic": (fp8("dynamic"), "weight_scale", ""),
    "fp8, static": (fp8("static"), "weight_scale_inv", "activation_scale"),
    "blocks": (fp8("dynamic", weight_block_size=[128, 128]), "weight_scale_inv", ""),
    "weights alone": (ct("channel", None), "weight_scale", ""),
}
CHANGES: dict[str, dict[str, Any]] = {
    "llama": HEAD, "gemma3_text": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}}
ROW_SCALE = 0.0473
"""Of static rows: 448 times it is more than any number of them, as it is where files are made."""


def write(directory: Path, kind: str, family: str = "llama", **changes: Any) -> Any:
    """Save a tiny model whose linear layers are e4m3, but for the output layer; return it with these numbers."""
    model, (config, scale_name, row_scale) = tiny_model(family, **{"num_hidden_layers": 1, **changes}), KINDS[kind]
    if "attention_bias" in changes:  # which are zeros in a new model
        for number, (name, _) in enumerate(linear_names(model)):
            if (bias := model.get_submodule(name).bias) is not None:
                bias.data = torch.randn(bias.shape, generator=torch.Generator().manual_seed(number))
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for name, _ in linear_names(model):
        weight = tensors[f"{name}.weight"]
        by_output = config.get("config_groups", {}).get("group_0", {}).get("weights", {}).get("strategy") == "channel"
        scale = weight.abs().amax(1, keepdim=True) / 448 if by_output else weight.abs().max() / 448
        tensors[f"{name}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}.{scale_name}"] = scale.view(1, 1) if "weight_block_size" in config else scale.clone()
        if row_scale:
            tensors[f"{name}.{row_scale}"] = torch.tensor(ROW_SCALE)
        model.get_submodule(name).weight.data = tensors[f"{name}.weight"].float() * scale
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    change_config(directory, quantization_config=config, torch_dtype="bfloat16", dtype="bfloat16")
    return model


def loaded(directory: Path) -> Any:
    """A model in bfloat16 as an engine on a GPU has it."""
    stored = stored_format(str(directory))
    assert isinstance(stored, FP8)
    stored = dataclasses.replace(stored, may_stay=True)
    model = load_stored(str(directory), stored, torch.bfloat16, trust_remote_code=False)
    keep_float8(model)
    decode_weights(model)
    return model.eval()


def backend_of(model: Any, **more: Any) -> TransformersModel:
    backend = TransformersModel(
        copy.deepcopy(model), NumbaCudaAttention, block_size=BLOCK, device=find_device("cuda"), **more)
    backend.allocate_kv(NUM_BLOCKS, BLOCK)
    return backend


@KERNELS
@pytest.mark.parametrize("static", [False, True])
def test_a_product_is_that_of_rounded_rows(static: bool, tmp_path: Path, gpus: Machine) -> None:
    """Kernel and product together, joined and with biases, give what float64 makes of the files' numbers and of rows
    that a search of the nearest number has rounded to e4m3; each row the same bits alone.
    """
    model = write(tmp_path, "tensor, static" if static else "channel", attention_bias=True)
    layers, rows = loaded(tmp_path).model.layers[0].self_attn.to("cuda"), random_rows(0, 9, 64, dtype=torch.bfloat16)
    parts = [layers.q_proj, layers.k_proj, layers.v_proj]
    whole = Float8Linear.joined(parts)
    with shipped_kernels(gpus):
        driver = CudaDriver(torch.device("cuda", 0), KernelLibrary())
        driver.begin_step()
        launch_quantizers([whole], torch.bfloat16, driver)
        found = whole(rows.to("cuda")[None])[0]
        alone = torch.cat([whole(row[None].to("cuda")) for row in rows])
        assert torch.equal(found.cpu(), alone.cpu())
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    numbers, exact = numbers[numbers.isfinite()].unique(), rows.double()
    scales = torch.full((9, 1), ROW_SCALE).double() if static else exact.abs().amax(1, keepdim=True) / 448
    scaled = (exact / scales).clamp(-448, 448)
    places = torch.searchsorted(numbers, scaled).clamp(1, len(numbers) - 1)
    low, high = numbers[places - 1], numbers[places]
    rounded = torch.where(scaled - low <= high - scaled, low, high) * scales
    attention = model.model.layers[0].self_attn
    expected = torch.cat([rounded @ one.weight.double().T + one.bias.to(torch.bfloat16).double()
                          for one in (attention.q_proj, attention.k_proj, attention.v_proj)], 1)
    # Why not all rows: of a number halfway between two, float32 decides.
    tied = ((scaled - low - (high - scaled)).abs() < 1e-4 * (high - low)).any(1)
    errors, allowed = (found.cpu().double() - expected).abs(), 2**-8 * expected.abs() + 1e-5 * expected.abs().max()
    assert (errors <= allowed)[~tied].all()
    assert tied.sum() < 3
    assert [one.weight.data_ptr() - whole.weight.data_ptr() for one in parts] == [0, 64 * 64, 96 * 64]


@KERNELS
@pytest.mark.parametrize(("kind", "family"), [
    ("channel", "llama"), *(pytest.param(*one, marks=pytest.mark.kernels) for one in (
        ("tensor, static", "qwen3"), ("fp8, dynamic", "gemma3_text"), ("fp8, static", "mistral"),
        ("channel", "mixtral"), ("channel", "phi3"), ("tensor, static", "granite"), ("channel", "gpt_oss"))),
])
def test_logits_are_as_far_off_as_rows_are_rounded(kind: str, family: str, tmp_path: Path, gpus: Machine) -> None:
    """The self-test passes; chunks and decode rows in random company, by the fused decoder where it knows the model and
    by modules elsewhere, are no farther from transformers' logits of the files' numbers than rounding takes them.

    A number of e4m3 is off by at most 2**-4 of itself, so by 2**-4 / sqrt(3) of it in the mean where its places in a
    step are alike; independent errors of a product's inputs leave its outputs that far off, and those of products add
    up as squares do.
    """
    model = write(tmp_path, kind, family, **CHANGES.get(family, {}))
    sequences = random_sequences(LENGTHS, VOCAB)
    rng = random.Random(3)
    tables = random_tables(rng, LENGTHS, BLOCK, NUM_BLOCKS)
    with shipped_kernels(gpus) as api:
        backend = backend_of(loaded(tmp_path))
        num_products = sum(isinstance(one, Float8Linear) for one in backend.model.modules())
        found = run_schedule(backend, sequences, random_schedule(rng, LENGTHS), tables, BLOCK)
    assert not backend.has_fallen_back
    assert type(backend._decoder) is (PlainDecoder if family in ("granite", "gpt_oss") else CudaDecoder)
    assert num_products == len([*linear_names(model)])
    assert "quantize-bf16" in api.launched
    with torch.inference_mode():
        expected = torch.cat([model(tokens[None], use_cache=False).logits[0] for tokens in sequences])
    distances = (torch.cat(found).float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    # Why the median: a router's near tie can send a token elsewhere.
    distance = distances.median() if family in ("mixtral", "gpt_oss") else distances.square().mean().sqrt()
    assert 0.005 < distance < 2**-4 / math.sqrt(3) * math.sqrt(num_products)


@KERNELS
def test_a_decode_step_is_thirteen_launches_a_layer(tmp_path: Path, gpus: Machine) -> None:
    """Rows are quantised once for query, key and value, and once for gate and up; joined weights are in memory once."""
    write(tmp_path, "channel", **HEAD)
    with shipped_kernels(gpus):
        backend = backend_of(loaded(tmp_path), runs_self_test=False)
        backend._graphed = None
        launches = launches_of(gpus, backend, [(0, 3, 4), (1, 2, 3)])
    product = ["quantize", "_scaled_mm"]
    layer = ["norm", *product, "rotate", "decode", *product, "norm", *product, "gated", *product]
    assert len(layer) == 13
    assert launches == ["embedding", "new_zeros", *layer, "norm", "index", "mm"]
    attention = backend.model.model.layers[0].self_attn
    first, second = attention.q_proj, attention.k_proj
    assert second.weight.data_ptr() == first.weight.data_ptr() + first.weight.nbytes
    assert second.scale.data_ptr() == first.scale.data_ptr() + first.scale.nbytes


@KERNELS
@pytest.mark.kernels
@pytest.mark.parametrize("family", ["llama", "granite"])
def test_batches_through_one_graph_are_those_without(family: str, tmp_path: Path, gpus: Machine) -> None:
    """Batches that replay the recording of four rows give the bits of launches one by one, and of rows alone; nothing
    is allocated or waited for."""
    write(tmp_path, "channel", family, **CHANGES.get(family, {}))
    with shipped_kernels(gpus):
        backend, eager = (backend_of(loaded(tmp_path), runs_self_test=False) for _ in range(2))
        eager._graphed = None
        backend.record_steps(4, NUM_BLOCKS * BLOCK)
        lengths = (70, 7, 33)
        sequences = random_sequences(lengths, VOCAB)
        tables = random_tables(random.Random(3), lengths, BLOCK, NUM_BLOCKS)
        for one in (backend, eager):
            one.forward(batch_of(sequences, [(i, 0, length - 4) for i, length in enumerate(lengths)], tables, BLOCK))
        for rows in ([(0, 66), (1, 3), (2, 29)], [(2, 30), (0, 67)], [(1, 4)]):
            batch = batch_of(sequences, [(i, at, at + 1) for i, at in rows], tables, BLOCK)
            alone = [eager.forward(batch_of(sequences, [(i, at, at + 1)], tables, BLOCK)) for i, at in rows]
            wanted, before = eager.forward(batch), gpus.counts.copy()
            found = backend.forward_there(batch)
            assert set(gpus.counts - before) == {"copies to the device", "bytes to the device", "graph launches"}
            assert torch.equal(found.cpu().float(), wanted.float())
            assert torch.equal(found.cpu().float(), torch.cat(alone).float())


def answers_of(directory: Path, **settings: Any) -> Any:
    """Tokens of an engine on a virtual GPU, twice, and how often it preempted."""
    asked = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with on_gpu(directory, dtype="bfloat16", host_kv_memory="1MiB", **settings) as engine:
        outputs = []
        for _ in range(2):  # the second time with what the first has left in the prefix cache
            requests = [engine.add_request(prompt, asked) for prompt in make_prompts()]
            run(engine)
            outputs.append([list(request.output().outputs[0].token_ids) for request in requests])
        return outputs, engine.stats().num_preemptions


@pytest.mark.parametrize("kind", ["channel", pytest.param("fp8, static", marks=pytest.mark.kernels)])
def test_company_swaps_and_cached_prefixes_change_no_token(kind: str, tmp_path: Path, gpus: Machine) -> None:
    """Preempted, in chunks and in company, answers are those of one request at a time."""
    write(tmp_path, kind)
    alone = answers_of(tmp_path, max_num_seqs=1, max_num_batched_tokens=64, num_kv_blocks=40)
    together = answers_of(tmp_path, num_kv_blocks=12, preemption="swap")
    assert together[1] > 0
    assert alone[0] == together[0]
    assert alone[0][0] == alone[0][1]


@pytest.mark.parametrize(("kind", "number"), [
    ("channel", torch.nan), ("tensor, static", torch.inf),
    *(pytest.param(*one, marks=pytest.mark.kernels) for one in (
        ("channel", torch.inf), ("channel", 3e38), ("tensor, static", torch.nan), ("tensor, static", 3e38),
        ("fp8, dynamic", torch.nan), ("fp8, static", -torch.inf))),
])
def test_a_row_that_is_not_finite_spoils_itself_alone(
    kind: str, number: float, tmp_path: Path, gpus: Machine
) -> None:
    """Beside a request with a token whose embedding is damaged, others have the tokens and log-probabilities, to the
    last bit, that they have alone, in chunks and decode steps, and then in the blocks that the first leaves."""
    write(tmp_path, kind)
    damaged = 6
    assert damaged not in {(7919 * place + 17) % VOCAB for place in range(12)}, "the self-test has this token"
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    embedding[damaged] = number
    change_tensors(tmp_path, {"model.embed_tokens.weight": embedding})
    asked = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=2)
    prompts = [list(range(20, 33)), [40, damaged, 41, 42], [60, 61, 62]]
    with on_gpu(tmp_path, dtype="bfloat16", enable_prefix_caching=False) as engine:
        def answer(*numbers: int) -> list[Any]:
            requests = [engine.add_request(prompts[number], asked) for number in numbers]
            run(engine)
            return [request.output().outputs[0] for request in requests]

        alone = [answer(number)[0] for number in (0, 2)]
        together, after = answer(0, 1, 2), answer(0, 2)
    for found in ((together[0], together[2]), after):
        assert [(one.token_ids, one.logprobs) for one in found] == [(one.token_ids, one.logprobs) for one in alone]
        assert all(one.finish_reason == "length" for one in found)
    assert number == 3e38 or together[1].finish_reason == "error"


@pytest.mark.parametrize(("kind", "capability", "changes", "said", "num_kept"), [
    ("channel", (9, 0), {}, "7 linear layers stay in e4m3", 7),
    ("channel", (8, 6), {}, "only supported on CUDA devices with compute capability >= 9.0 or 8.9", 0),
    ("blocks", (9, 0), {}, "no product here of scales by blocks", 0),
    ("weights alone", (9, 0), {}, "none with rows that are not FP8", 0),
    ("channel", (12, 0), {"intermediate_size": 88}, "multiples of 16, and one has 88 x 64", 4),
])
def test_the_log_says_what_is_decoded(
    kind: str, capability: tuple[int, int], changes: dict[str, Any], said: str, num_kept: int, tmp_path: Path,
    gpus: Machine, caplog: pytest.LogCaptureFixture,
) -> None:
    """Weights stay where a GPU multiplies them, and others are decoded, each by itself, with the reason in the log."""
    write(tmp_path, kind, **changes)
    gpus.capability = capability
    with caplog.at_level(logging.INFO, logger="pagedcore"), on_gpu(tmp_path, dtype="bfloat16") as engine:
        backend: Any = engine._runner.backend
        kept = [one for one in backend.model.modules() if isinstance(one, Float8Linear)]
    assert said in caplog.text
    assert len(kept) == num_kept
    assert ("are decoded to bfloat16" in caplog.text) == (num_kept != 7)
    assert all(one.weight.dtype == torch.float8_e4m3fn and one.weight.itemsize == 1 for one in kept)


@pytest.mark.parametrize("kind", ["channel", "blocks"])
def test_what_weights_take_is_said_beforehand(kind: str, tmp_path: Path, gpus: Machine) -> None:
    """``pagedcore size`` counts the bytes that a model has on a GPU, one of a weight that stays, which ``doctor`` says;
    a model whose weights stay is another than one whose weights are decoded.
    """
    write(tmp_path, kind)
    said = size_model(tmp_path, device="cuda", concurrency=1, context=64)
    with on_gpu(tmp_path, dtype="bfloat16") as engine:
        backend: Any = engine._runner.backend
        model = backend.model
        held = [*model.parameters(), *(tensor for one in model.modules() if isinstance(one, Float8Linear)
                                       for tensor in (one.weight, one.scale))]
    assert said.weight_bytes == sum(one.nbytes for one in held)
    gpus.capability = 8, 6
    with on_gpu(tmp_path, dtype="bfloat16") as engine:
        decoded: Any = engine._runner.backend
    assert (backend.fingerprint == decoded.fingerprint) == (kind == "blocks")
    assert (said.settings["device"], said.memory) == ("cuda", gpus.memory_bytes)
    assert ("a byte a weight" in diagnose(tmp_path)["quantisation"]) == (kind != "blocks")


def in_float64(directory: Path, config: Any, tokens: list[int]) -> tuple[Any, dict[str, float]]:
    """Log-probabilities by NumPy in float64 of a file of one layer, and the largest number that each module gives."""
    tensors = {name.removeprefix("model.layers.0.").removesuffix(".weight"): tensor.double().numpy()
               for name, tensor in load_file(directory / "model.safetensors").items()}
    largest = dict[str, float]()

    def times(rows: Any, name: str) -> Any:
        out = rows @ (tensors[name] * tensors.get(f"{name}.weight_scale", 1.0)).T
        largest[name] = np.abs(out).max()
        return out

    def norm(rows: Any, name: str) -> Any:
        return rows / np.sqrt((rows**2).mean(1, keepdims=True) + config.rms_norm_eps) * tensors[name]

    def turned(rows: Any, num_heads: int) -> Any:
        heads = rows.reshape(len(tokens), num_heads, 2, config.head_dim // 2)
        angles = np.arange(len(tokens))[:, None] / 10000.0 ** (np.arange(config.head_dim // 2) / (config.head_dim // 2))
        cos, sin, low, high = np.cos(angles)[:, None], np.sin(angles)[:, None], heads[:, :, 0], heads[:, :, 1]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], 2).transpose(1, 0, 2)

    residual, groups = tensors["model.embed_tokens"][tokens], config.num_attention_heads // config.num_key_value_heads
    rows = norm(residual, "input_layernorm")
    query, key = (turned(times(rows, f"self_attn.{name}"), count) for name, count in (
        ("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)))
    value = times(rows, "self_attn.v_proj").reshape(len(tokens), -1, config.head_dim).transpose(1, 0, 2)
    scores = query @ key.repeat(groups, 0).transpose(0, 2, 1) / np.sqrt(config.head_dim)
    scores = np.where(np.tri(len(tokens), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(2, keepdims=True))
    attended = weights / weights.sum(2, keepdims=True) @ value.repeat(groups, 0)
    residual = residual + times(attended.transpose(1, 0, 2).reshape(len(tokens), -1), "self_attn.o_proj")
    rows = norm(residual, "post_attention_layernorm")
    gate = times(rows, "mlp.gate_proj")
    gated = gate / (1 + np.exp(np.minimum(-gate, 700.0))) * times(rows, "mlp.up_proj")
    logits = times(norm(residual + times(gated, "mlp.down_proj"), "model.norm"), "lm_head")
    logits -= logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True)), largest


@pytest.mark.parametrize(("kind", "scale", "first"), [
    ("channel", 1e-3, ""), ("channel", 100.0, "mlp.down_proj"), ("channel", 1e4, "self_attn.o_proj"),
    ("fp8, dynamic", 1e30, "self_attn.q_proj"),
])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_weights_beyond_what_float32_can_compute_are_refused(
    kind: str, scale: float, first: str, device: str, tmp_path: Path, gpus: Machine
) -> None:
    """CPU and GPU give the log-probabilities of NumPy's float64, or the first layer and number that are too large."""
    model = write(tmp_path, kind)
    names = [name for name, _ in linear_names(model)]
    tensors = load_file(tmp_path / "model.safetensors")
    change_tensors(tmp_path, {f"{name}.weight_scale": torch.full_like(tensors[f"{name}.weight_scale"], scale)
                              for name in names})
    tokens = [(7919 * i + 17) % VOCAB for i in range(12)]
    expected, largest = in_float64(tmp_path, model.config, tokens)
    make: Any = on_gpu if device == "cuda" else Engine.from_pretrained
    start = partial(make, tmp_path, dtype="bfloat16")
    if first:
        assert next(name for name, number in largest.items() if number > 2.0**40) == first
        with pytest.raises(ModelNotSupported) as caught:
            start()
        number = re.search(rf"model\.layers\.0\.{first} gives numbers of up to (\S+),", str(caught.value))
        assert number is not None
        assert float(number[1]) == pytest.approx(largest[first], rel=0.25)
        return
    with start() as engine:
        outputs = engine.generate([tokens], SamplingParams(max_tokens=1, prompt_logprobs=1), show_progress=False)
    found = np.array([one.logprob for one in (outputs[0].prompt_logprobs or ())[1:]])
    wanted = expected[range(11), tokens[1:]]
    allowed = 0.02 if device == "cpu" else 2**-4 / math.sqrt(3) * math.sqrt(len(names))
    assert np.abs(found - wanted).mean() < allowed * expected.std()


@pytest.mark.parametrize("scale", [torch.tensor(0.0), torch.tensor([1.0, 2.0]), torch.tensor(-1.0)])
def test_a_scale_of_rows_that_is_none_is_refused(scale: torch.Tensor, tmp_path: Path, gpus: Machine) -> None:
    """The message names the tensor."""
    write(tmp_path, "tensor, static")
    name = "model.layers.0.self_attn.q_proj.input_scale"
    change_tensors(tmp_path, {name: scale})
    with pytest.raises(ModelNotSupported, match=f"{name} is "):
        on_gpu(tmp_path, dtype="bfloat16")


@pytest.mark.parametrize(("scales", "expected"), [((0.5, 2.0, 0.25), 2.0), ((0.5, 0.0, 0.25), 0.0)])
def test_parts_of_a_product_share_the_largest_scale_of_rows(scales: tuple[float, ...], expected: float) -> None:
    """Unless a part has none, where each row has its own."""
    weight, scale = torch.zeros(16, 16).to(torch.float8_e4m3fn), torch.ones(1, 16)
    assert Float8Linear.joined([Float8Linear(weight, scale, None, one) for one in scales]).row_scale == expected


@pytest.mark.parametrize("kind", ["channel", "fp8, dynamic"])
def test_a_scale_that_the_configuration_does_not_speak_of_means_nothing(kind: str, tmp_path: Path) -> None:
    """Where it says that rows have scales of their own, one that is in the files is not taken, whatever it is."""
    write(tmp_path, kind)
    change_tensors(tmp_path, {"model.layers.0.self_attn.q_proj.input_scale": torch.tensor(1e-30),
                              "model.layers.0.mlp.up_proj.input_scale": torch.tensor(torch.nan)})
    layers = [one for one in loaded(tmp_path).modules() if isinstance(one, Float8Linear)]
    assert [one.row_scale for one in layers] == [0.0] * 7


@KERNELS
@pytest.mark.parametrize("given", [0.0, 0.013])
def test_rows_by_torch_are_those_of_the_kernel(given: float) -> None:
    """Where no kernel is at hand, rows have the same codes and scales to the bit, zeros and what is not finite too."""
    rows = random_rows(0, 6, 904, dtype=torch.bfloat16) * torch.tensor([[1], [1], [1], [300], [1e-3], [1]]).bfloat16()
    rows[0], rows[1, 3], rows[2, 4] = 0, torch.inf, torch.nan
    codes, scales = quantize_rows(rows, given)
    wanted_codes, wanted_scales = RowQuantizer(torch.bfloat16, SimulatedDriver())(rows, given)
    assert torch.equal(codes.view(torch.uint8), wanted_codes.view(torch.uint8))
    assert torch.equal(scales.nan_to_num(-1.0), wanted_scales.reshape(scales.shape).nan_to_num(-1.0))
    assert scales.isnan().flatten().tolist() == [False, True, True, False, False, False]


def test_a_product_that_is_wrong_is_not_taken(monkeypatch: pytest.MonkeyPatch, gpus: Machine) -> None:
    """Where torch's product gives other numbers, that is the reason why a GPU has none; sums are those of float32."""
    right, fast = torch._scaled_mm, list[bool]()

    def wrong(*arguments: Any, use_fast_accum: bool, **more: Any) -> torch.Tensor:
        fast.append(use_fast_accum)
        return right(*arguments, **more) / 2

    assert why_no_float8(torch.device("cuda", 0)) == ""
    monkeypatch.setattr(torch, "_scaled_mm", wrong)
    assert why_no_float8(torch.device("cuda", 0)) == "torch._scaled_mm is wrong on this GPU"
    assert fast == [False]


def test_an_output_layer_in_e4m3_is_decoded(tmp_path: Path) -> None:
    """It has the numbers of the file in the model's format, and all other layers stay."""
    write(tmp_path, "channel", vocab_size=208)
    head = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    scale = head.abs().amax(1, keepdim=True) / 448
    codes = (head / scale).to(torch.float8_e4m3fn)
    change_tensors(tmp_path, {"lm_head.weight": codes, "lm_head.weight_scale": scale})
    model = loaded(tmp_path)
    assert type(model.lm_head) is torch.nn.Linear
    assert torch.equal(model.lm_head.weight, (codes.float() * scale).to(torch.bfloat16))
    assert sum(isinstance(one, Float8Linear) for one in model.modules()) == 7
