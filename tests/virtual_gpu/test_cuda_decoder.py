"""The fused decoder of GPUs: its launches, its logits beside those of transformers' modules, and what it leaves those.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pagedcore.execution.devices import find_device
from pagedcore.models.decoders.cuda_decoder import CudaDecoder
from pagedcore.models.decoders.plain import PlainDecoder
from pagedcore.models.transformers_model import TransformersModel
from pagedcore_kernels.cuda.attention.backend import NumbaCudaAttention
from pagedcore_kernels.cuda.build.toolchain import missing_compiler_parts
from support.families import VOCAB, tiny_model
from support.ragged_schedules import batch_of, random_schedule, random_sequences, random_tables, run_schedule
from virtual_gpu.backends import shipped_kernels
from virtual_gpu.machine import Machine

pytestmark = pytest.mark.skipif(bool(missing_compiler_parts()), reason="needs pagedcore[cuda] to compile kernels")

BLOCK, NUM_BLOCKS = 4, 40
LENGTHS = (20, 7, 33)
HEAD: dict[str, Any] = {"head_dim": 32}
"""As the demo model's heads, whose kernels other tests compile too."""
_ROPE: dict[str, Any] = {"rope_theta": 1e4, "partial_rotary_factor": 1.0}

#: Architecture, changes of its configuration, and the products of a layer that add a bias in their launch.
KNOWN: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}, ()),
    "llama with biases": ("llama", {
        **HEAD, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"},
        ("qkv", "output", "gate_up", "down")),
    "llama, rope of yarn": ("llama", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}}, ()),
    "mistral": ("mistral", {"sliding_window": 8}, ()),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}, ("qkv",)),
    "qwen3": ("qwen3", HEAD, ()),
    "phi3": ("phi3", {}, ()),
    "phi3, half of a head turned": ("phi3", {
        "hidden_size": 128, "rope_parameters": {**_ROPE, "rope_type": "default", "partial_rotary_factor": 0.5}}, ()),
    "phi3, longrope": ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": {
        **_ROPE, "rope_type": "longrope", "original_max_position_embeddings": 16, "short_factor": [1.5] * 8,
        "long_factor": [4.0] * 8}}, ()),
    "smollm3": ("smollm3", {}, ()),
    "gemma": ("gemma", {}, ()),
    "gemma2": ("gemma2", {}, ()),
    "gemma3": ("gemma3_text", {**HEAD, "tie_word_embeddings": True}, ()),
    "mixtral": ("mixtral", HEAD, ()),
}
MIXTURES = ("mixtral", "qwen3_moe")
FAST = ("llama with biases", "gemma3")
_HALF: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
OTHERS = {"granite": _HALF, "olmo2": _HALF, "gpt2": {"n_head": 2}}
"""What the kernels do not compute, with heads of the same size."""


@pytest.fixture(autouse=True)
def kernels(gpus: Machine) -> Iterator[None]:
    """The kernels that ship, on virtual GPUs."""
    with shipped_kernels(gpus):
        yield


def on_gpu(model: Any, **more: Any) -> TransformersModel:
    backend = TransformersModel(
        copy.deepcopy(model), NumbaCudaAttention, block_size=BLOCK, device=find_device("cuda"), **more)
    backend.allocate_kv(NUM_BLOCKS, BLOCK)
    return backend


def expected_launches(
    family: str, biased: tuple[str, ...], attention: tuple[str, ...] = ("decode",)
) -> list[str]:
    """The launches of one layer; what a layer of Gemma 2 or 3 adds is normed too."""
    after = ["norm"] * (family in ("gemma2", "gemma3_text"))

    def product(name: str) -> str:
        return "addmm" if name in biased else "mm"

    return ["norm", product("qkv"), "rotate", *attention, product("output"), *after, "norm", product("gate_up"),
            "gated", product("down"), *after]  # fmt: skip


def launches_of(gpus: Machine, backend: TransformersModel, rows: list[tuple[int, int, int]]) -> list[str]:
    """What a step of rows (sequence, start, end) queues."""
    sequences = random_sequences(LENGTHS, VOCAB)
    tables = random_tables(random.Random(3), LENGTHS, BLOCK, NUM_BLOCKS)
    gpus.trace = []
    backend.forward(batch_of(sequences, rows, tables, BLOCK))
    names, gpus.trace = gpus.trace, None
    return [name.removeprefix("aten::").partition("-")[0] for name in names if name.partition(" ")[0] != "copy"]


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in FAST else [pytest.mark.kernels]) for name in KNOWN if name not in MIXTURES])
def test_a_decode_step_is_nine_launches_a_layer(name: str, gpus: Machine) -> None:
    """Besides, the tokens are looked up and the last states multiplied; chunks in company attend in two launches. With
    norms of what a layer adds there are two more.
    """
    family, changes, biased = KNOWN[name]
    model = tiny_model(family, dtype=torch.bfloat16, **changes)
    backend, num_layers = on_gpu(model, runs_self_test=False), model.config.num_hidden_layers
    assert type(backend._decoder) is CudaDecoder
    backend._graphed = None
    begin, end = ["embedding", "new_zeros"], ["norm", "index", "mm"]
    if family.startswith("gemma"):
        begin, end = ["embedding", "mul_", "new_zeros"], [*end, *["div", "tanh", "mul"] * (family == "gemma2")]
    expected = expected_launches(family, biased)
    assert len(expected) == 9 + 2 * (family in ("gemma2", "gemma3_text"))
    assert launches_of(gpus, backend, [(0, 3, 4), (1, 2, 3)]) == begin + expected * num_layers + end
    mixed = expected_launches(family, biased, ("prefill", "decode"))
    assert launches_of(gpus, backend, [(0, 4, 16), (1, 3, 4)]) == begin + mixed * num_layers + end


@pytest.mark.parametrize("name", [
    *FAST, "mixtral", *(pytest.param(name, marks=pytest.mark.kernels)
                        for name in (*KNOWN, "qwen3_moe", *OTHERS) if name not in (*FAST, "mixtral"))])
def test_logits_are_those_of_the_modules(name: str, gpus: Machine) -> None:
    """The self-test passes, and chunks and decode rows in random company give transformers' own logits, by the fused
    decoder or by a model's own modules over the kernels' attention."""
    family, changes, _ = KNOWN.get(name, (name, OTHERS.get(name, {}), ()))
    model = tiny_model(family, dtype=torch.bfloat16, **changes)
    sequences = random_sequences(LENGTHS, VOCAB)
    with torch.inference_mode():
        expected = [model(tokens[None], use_cache=False).logits[0].float() for tokens in sequences]
    rng = random.Random(3)
    tables = random_tables(rng, LENGTHS, BLOCK, NUM_BLOCKS)
    backend = on_gpu(model)
    assert type(backend._decoder) is (PlainDecoder if name in OTHERS else CudaDecoder)
    if backend.num_short_tokens is not None:
        forward, short = backend.forward, backend.num_short_tokens
        is_long = np.array(LENGTHS) > short
        backend.forward = lambda batch: forward(  # type: ignore[method-assign]
            dataclasses.replace(batch, is_long=is_long[batch.seq_ids]))
    steps = random_schedule(rng, LENGTHS)
    for found, wanted in zip(run_schedule(backend, sequences, steps, tables, BLOCK), expected, strict=True):
        errors = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        # Why: a router's near tie can send a token elsewhere.
        assert errors.quantile(0.75 if name in MIXTURES else 1.0) < 0.04


@pytest.mark.parametrize("family", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.kernels)])
def test_half_of_a_layer_of_experts_is_six_launches(family: str, gpus: Machine) -> None:
    """The other half is transformers' own block, between one layer's second norm and the next one's first."""
    model = tiny_model(family, dtype=torch.bfloat16, **HEAD)
    backend = on_gpu(model, runs_self_test=False)
    assert type(backend._decoder) is CudaDecoder
    backend._graphed = None
    launches = launches_of(gpus, backend, [(0, 3, 4), (1, 2, 3)])
    places = [place for place, name in enumerate(launches) if name == "rotate"]
    assert len(places) == model.config.num_hidden_layers
    for place in places:
        assert launches[place - 2 : place + 4] == ["norm", "mm", "rotate", "decode", "mm", "norm"]
    assert launches.count("norm") == 2 * len(places) + 1


@pytest.mark.parametrize("family", OTHERS)
def test_other_models_are_computed_by_their_own_modules(family: str) -> None:
    """What the kernels do not compute keeps the general path."""
    model = tiny_model(family, dtype=torch.bfloat16, **OTHERS[family])
    assert type(on_gpu(model, runs_self_test=False)._decoder) is PlainDecoder


def test_a_decoder_that_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The self-test finds it, the log says so, and the model's own modules compute."""
    right = CudaDecoder.__call__
    monkeypatch.setattr(CudaDecoder, "__call__", lambda self, *step: right(self, *step).flip(-1))
    with caplog.at_level(logging.WARNING, logger="pagedcore"):
        backend = on_gpu(tiny_model("llama", dtype=torch.bfloat16, **HEAD))
    assert type(backend._decoder) is PlainDecoder
    assert "a slower decoder computes it" in caplog.text


def test_hidden_states_are_those_of_the_modules() -> None:
    """What is pooled is the last norm's output, of the rows that are asked for."""
    model = tiny_model("llama", dtype=torch.bfloat16, **HEAD)
    (tokens,) = random_sequences((9,), VOCAB)
    with torch.inference_mode():
        expected = model.model(tokens[None]).last_hidden_state[0].float()
    batch = batch_of([tokens], [(0, 0, 9)], random_tables(random.Random(3), (9,), BLOCK, NUM_BLOCKS), BLOCK)
    logits, hidden = on_gpu(model, runs_self_test=False).forward_hidden(batch, torch.tensor([2, 8]).numpy())
    assert logits.shape == (9, VOCAB)
    assert (torch.from_numpy(hidden) - expected[[2, 8]]).norm() < 0.02 * expected[[2, 8]].norm()


def test_joined_weights_are_in_memory_once(gpus: Machine) -> None:
    """Projections are parts of the joined weight, whatever it is that computes."""
    backend = on_gpu(tiny_model("llama", dtype=torch.bfloat16, **HEAD), runs_self_test=False)
    for layer in backend.model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for first, *others in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            end = first.weight.data_ptr() + first.weight.nbytes
            for one in others:
                assert one.weight.data_ptr() == end
                end += one.weight.nbytes


def test_batches_through_one_graph_are_those_without(gpus: Machine) -> None:
    """Three batches of other lengths, tables, numbers of rows and work replay the recording of four rows: each gives
    the bits that launches one by one give, by one copy, without an allocation or a wait, and in the same place.
    """
    model = tiny_model("mistral", dtype=torch.bfloat16, sliding_window=8, **HEAD)
    backend, eager = on_gpu(model, runs_self_test=False), on_gpu(model, runs_self_test=False)
    eager._graphed = None
    backend.record_steps(4, NUM_BLOCKS * BLOCK)
    assert gpus.counts["graphs recorded"] == 3
    lengths = (70, 7, 33, 21)
    sequences, tables = random_sequences(lengths, VOCAB), random_tables(random.Random(3), lengths, BLOCK, NUM_BLOCKS)
    prompts = [(i, 0, length - 4) for i, length in enumerate(lengths)]
    for one in (backend, eager):
        one.forward(batch_of(sequences, prompts, tables, BLOCK))
    places = set()
    for rows in ([(0, 66), (1, 3), (2, 29), (3, 17)], [(3, 18), (0, 67), (1, 4)], [(2, 30), (1, 5), (0, 68), (3, 19)]):
        batch = batch_of(sequences, [(i, at, at + 1) for i, at in rows], tables, BLOCK)
        wanted = eager.forward(batch)
        before, gpus.trace = gpus.counts.copy(), []
        found = backend.forward_there(batch)
        assert gpus.trace == ["copy to the device", "graph"]
        assert set(gpus.counts - before) == {"copies to the device", "bytes to the device", "graph launches"}
        places.add(found.data_ptr())
        assert torch.equal(found.cpu().float(), wanted.float())
        gpus.trace = None
    assert len(places) == 1
    assert gpus.counts["graphs recorded"] == 3
