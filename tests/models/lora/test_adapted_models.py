"""Models whose rows have adapters, against transformers with the same adapter merged in float64, and their bits."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedcore.errors import InternalError, InvalidAdapter, ModelNotSupported
from pagedcore.models.decoders.fused import FusedDecoder
from pagedcore.models.decoders.plain import PlainDecoder
from pagedcore.models.linears.schemes import QUANTIZERS
from pagedcore.models.transformers_model import TransformersModel
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from support.families import VOCAB, tiny_model
from support.gguf_files import write_model
from support.lora_directories import linear_sizes, merged, random_matrices, write_adapter
from support.ragged_schedules import (
    batch_of,
    random_schedule,
    random_sequences,
    random_tables,
    run_schedule,
    states_of,
)
from support.scores import engine_of

BLOCK_SIZE, NUM_BLOCKS, MAX_RANK = 4, 200, 12
LENGTHS, SLOTS = [19, 13, 22, 9, 11, 15], [0, 1, 2, 3, 1, 0]
#: Fused and recorded, with norms of heads, fused names, multipliers; with experts; by transformers' own modules, whose
#: layers may be convolutions, or recurrent.
QUICK = ["qwen2", "gpt2", "qwen3_moe", "lfm2", "qwen3_5_text"]
SLOW = ["qwen3_5_moe_text", "qwen3_next", "mamba", "granitemoehybrid", "kimi_linear", "minimax",
        "llama", "phi3", "gemma3_text", "granite", "gpt_neox", "deepseek_v3", "lfm2_moe", "lfm3"]
FAMILIES = [*QUICK, *[pytest.param(one, marks=pytest.mark.slow) for one in SLOW]]


class Adapted:
    """A backend with three adapters of ranks 4, 8 and 12, and the model that it was made of."""

    def __init__(self, family: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.model = tiny_model(family, dtype=dtype)
        self.dtype, self.options = dtype, options
        sizes = {name: size for name, size in linear_sizes(self.model).items() if "experts" not in name.split(".")}
        self.backend = self.without()
        self.backend.use_adapters(3, MAX_RANK)
        self.matrices, self.configs = {}, {}
        for slot in (1, 2, 3):
            # Shape: the second is in bfloat16, and one kind of layer has another rank and scale.
            own = random_matrices(
                sizes, 4 * slot, slot, torch.bfloat16 if slot == 2 else torch.float32, {"o_proj": 3, "c_fc": 3})
            where = write_adapter(folder / str(slot), own, 4 * slot, target_modules=sorted(sizes),
                                  rank_pattern={"o_proj": 3, "c_fc": 3}, alpha_pattern={"o_proj": 2},
                                  use_rslora=slot == 3)  # fmt: skip
            self.matrices[slot] = own
            self.configs[slot] = json.loads((where / "adapter_config.json").read_text())
            self.backend.put_adapter(slot, self.backend.read_adapter(str(where)))
        self.begin()

    def begin(self) -> None:
        """Make the sequences, and say which adapters they have."""
        self.slots = SLOTS
        self.sequences = random_sequences(LENGTHS, VOCAB)
        self.tables = random_tables(random.Random(5), LENGTHS, BLOCK_SIZE, NUM_BLOCKS)

    def without(self) -> TransformersModel:
        """Return a backend of the same model that has no adapters."""
        backend = TransformersModel(
            copy.deepcopy(self.model), NumbaCpuAttention, block_size=BLOCK_SIZE, **self.options)
        backend.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
        return backend

    def forward(self, batch: Any) -> torch.Tensor:
        """Compute a batch whose sequences have these slots."""
        slots = np.array([self.slots[number] for number in batch.seq_ids], np.int32)
        return self.backend.forward(dataclasses.replace(batch, adapter_slots=slots if slots.any() else None))

    def whole(self, number: int) -> torch.Tensor:
        """Return the logits of one sequence, alone and at once."""
        rows = [(number, 0, LENGTHS[number])]
        states = states_of(self.backend, len(LENGTHS))
        return self.forward(batch_of(self.sequences, rows, self.tables, BLOCK_SIZE, states))

    def in_company(self, seed: int = 3) -> list[torch.Tensor]:
        """Return the logits of all sequences, computed in chunks and in company."""
        steps = random_schedule(random.Random(seed), LENGTHS)
        states = states_of(self.backend, len(LENGTHS))
        return run_schedule(self, self.sequences, steps, self.tables, BLOCK_SIZE, states)

    @torch.inference_mode()
    def expected(self, number: int) -> torch.Tensor:
        """Return what transformers computes with the adapter in the weights."""
        model, slot = copy.deepcopy(self.model).float(), self.slots[number]
        if slot:
            merged(model, self.matrices[slot], self.configs[slot])
        logits: torch.Tensor = model(self.sequences[number][None]).logits[0]
        return logits


def error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest distance of a token's logits, relative to their spread, as ``self_test.py`` measures it."""
    whole, other = torch.cat(list(found)).float(), torch.cat(list(expected))
    spread = (other - other.mean(-1, keepdim=True)).norm(dim=-1)
    return ((whole - other).norm(dim=-1) / spread).max().item()


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_computed_with_their_own_adapters(family: str, tmp_path: Path) -> None:
    """Every row is what the model with its adapter merged computes, has the same bits alone, at once, in chunks and in
    company, and without an adapter those of a backend that has none."""
    adapted = Adapted(family, tmp_path)
    found = adapted.in_company()
    assert error(found, [adapted.expected(number) for number in range(len(LENGTHS))]) < 1e-4
    adapted.slots, own = [0] * len(LENGTHS), adapted.slots
    assert error(found[1:2], [adapted.expected(1)]) > 0.1, "its adapter changes nothing"
    adapted.slots = own
    for number, one in enumerate(found):
        assert torch.equal(adapted.whole(number), one)
    adapted.backend.release_kv()
    bare = adapted.without()
    for number in (0, 5):
        rows = [(number, 0, LENGTHS[number])]
        batch = batch_of(adapted.sequences, rows, adapted.tables, BLOCK_SIZE, states_of(bare, len(LENGTHS)))
        assert torch.equal(bare.forward(batch), found[number])


def with_weights_of(adapted: Adapted) -> None:
    """Give the model the weights that the backend's products and its embedding compute with."""
    modules = dict(adapted.backend._model.named_modules())
    for name, module in adapted.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            # Rule: the products of the rows of an identity are the columns of the weight, and those of zeros the bias.
            rows = torch.cat([torch.eye(module.in_features), torch.zeros(1, module.in_features)])
            outputs = modules[name](rows.to(adapted.dtype)).float()
            module.weight = torch.nn.Parameter((outputs[:-1] - outputs[-1:]).T)
        elif isinstance(module, torch.nn.Embedding):
            module.weight = torch.nn.Parameter(modules[name](torch.arange(module.num_embeddings)).float())


@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one == "w8a8" else pytest.mark.slow)
                                  for one in QUANTIZERS])
def test_quantised_bases(name: str, tmp_path: Path) -> None:
    """An adapter is added to what the quantised product computes, in its own precision; whole rows of int8 aside, that
    is what its weights and the adapter's matrices make."""
    adapted = Adapted("qwen2", tmp_path, quantization=name, linears=QUANTIZERS[name])
    found = [one.clone() for one in adapted.in_company()]
    with_weights_of(adapted)
    bound = 0.1 if QUANTIZERS[name].scheme.quantizes_rows else 1e-4
    assert error(found, [adapted.expected(number) for number in range(len(LENGTHS))]) < bound
    for number in range(len(LENGTHS)):
        assert torch.equal(adapted.whole(number), found[number])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_base_from_gguf(family: str, tmp_path: Path) -> None:
    """Whose products are of several types side by side, and whose rows of queries and keys lie in another order."""
    model = write_model(tmp_path / "model.gguf", family, tie_word_embeddings=False)
    sizes, tokens = linear_sizes(model), torch.arange(3, 22)
    matrices = random_matrices(sizes, 4, 1)
    directory = write_adapter(tmp_path / "adapter", matrices, 4, target_modules="all-linear")
    with engine_of(tmp_path / "model.gguf") as engine:
        backend: Any = engine._runner.backend
        backend.use_adapters(1, 4)
        backend.put_adapter(1, backend.read_adapter(str(directory)))
        batch = batch_of([tokens], [(0, 0, len(tokens))], [np.arange(8, dtype=np.int32)], backend.block_size)
        found = backend.forward(dataclasses.replace(batch, adapter_slots=np.array([1], np.int32)))
        with torch.inference_mode():
            expected = merged(model, matrices, {"lora_alpha": 8})(tokens[None]).logits[0]
        assert error([found], [expected]) < 1e-4


def test_a_base_in_bfloat16(tmp_path: Path) -> None:
    """The same bits in any company, and most tokens as near to the merged model as the self-test allows."""
    adapted = Adapted("qwen2", tmp_path, torch.bfloat16)
    found = adapted.in_company()
    assert error(found, [adapted.expected(number) for number in range(len(LENGTHS))]) < 0.2
    for number in range(len(LENGTHS)):
        assert torch.equal(adapted.whole(number), found[number])


def test_a_recorded_step_holds_for_any_slots(tmp_path: Path) -> None:
    """Steps of one token each, whose rows change their adapters; others empty and fill slots between."""
    adapted = Adapted("qwen2", tmp_path)
    expected = {slots: [] for slots in ((0, 1, 2), (3, 3, 3), (2, 0, 1))}
    for slots, found in expected.items():
        adapted.slots = [*slots, 0, 0, 0]
        found += [adapted.whole(number)[-1].clone() for number in range(3)]
    for slots, found in [*expected.items(), *expected.items()]:
        adapted.slots = [*slots, 0, 0, 0]
        for number in range(3):
            adapted.whole(number)
        rows = [(number, LENGTHS[number] - 1, LENGTHS[number]) for number in range(3)]
        steps = adapted.forward(batch_of(adapted.sequences, rows, adapted.tables, BLOCK_SIZE))
        assert all(torch.equal(one, other) for one, other in zip(steps, found, strict=True))
    decoder = adapted.backend._decoder
    assert isinstance(decoder, FusedDecoder)
    assert decoder._steps is not None
    assert {"all rows, with adapters", "logits of wanted rows, with adapters"} <= decoder._steps._parts.keys()


def test_a_step_without_adapters_makes_the_calls_that_it_made_before(tmp_path: Path) -> None:
    """Kernel for kernel; one with an adapter makes two more for each of four products of a layer, but for the end of
    the last one."""
    adapted, counts = Adapted("qwen2", tmp_path), list[dict[str, int]]()
    for backend in (adapted.backend, adapted.without()):
        rows = [(number, 0, LENGTHS[number]) for number in (0, 5)]
        backend.forward(batch_of(adapted.sequences, rows, adapted.tables, BLOCK_SIZE))
        decoder: Any = backend._decoder
        counts.append({name: len(part.calls._calls) for name, part in decoder._steps._parts.items()})
    assert counts[0] == counts[1]
    adapted.whole(1)
    parts: Any = adapted.backend._decoder._steps._parts  # type: ignore[attr-defined]
    assert len(parts["all rows, with adapters"].calls._calls) == counts[0]["all rows"] + 2 * (4 * 3 - 3)


def test_greedy_tokens_and_hidden_states_have_adapters_too(tmp_path: Path) -> None:
    """By either way that a decoder has besides logits."""
    adapted = Adapted("qwen2", tmp_path)
    batch = batch_of(adapted.sequences, [(1, 0, LENGTHS[1]), (2, 0, LENGTHS[2])], adapted.tables, BLOCK_SIZE)
    logits = adapted.forward(batch)
    batch = dataclasses.replace(batch, adapter_slots=np.array(SLOTS[1:3], np.int32))
    tokens = adapted.backend.forward_greedily(batch, np.empty((0, 2), np.int64))
    assert tokens.tolist() == logits.argmax(1).tolist()
    few = dataclasses.replace(batch, logits_rows=np.array([3, 20]))
    again, hidden = adapted.backend.forward_hidden(few, np.array([3, 20]))
    bare = adapted.backend.forward_hidden(dataclasses.replace(few, adapter_slots=None), np.array([3, 20]))[1]
    assert torch.equal(torch.as_tensor(again), logits[[3, 20]])
    assert np.abs(hidden - bare).min(1).max() > 0


def test_slots_are_filled_and_emptied(tmp_path: Path) -> None:
    """A row of an empty slot is a defect of the caller; ``release_kv`` empties all."""
    adapted = Adapted("qwen2", tmp_path)
    backend, adapter = adapted.backend, adapted.backend.read_adapter(str(tmp_path / "1"))
    for slot in (0, 4, -1):
        with pytest.raises(InternalError, match="there are 1 to 3"):
            backend.put_adapter(slot, adapter)
    with pytest.raises(InternalError, match="not empty"):
        backend.put_adapter(1, adapter)
    backend.drop_adapter(1)
    with pytest.raises(InternalError, match="it is empty"):
        adapted.whole(1)
    backend.put_adapter(1, adapter)
    assert torch.isfinite(adapted.whole(1)).all()
    with pytest.raises(InvalidAdapter, match="a rank of at most"):
        backend.read_adapter(str(write_adapter(tmp_path / "high", random_matrices(
            linear_sizes(adapted.model), 13, 1), 13)))
    backend.release_kv()
    with pytest.raises(InternalError, match="use_adapters"):
        backend.put_adapter(1, adapter)


def test_layers_that_take_none_are_refused_by_name(tmp_path: Path) -> None:
    """Routers, the output layer, and what is no layer; experts in a way of their own, whose products torch computes."""
    backend = TransformersModel(tiny_model("qwen3_moe"), NumbaCpuAttention, block_size=BLOCK_SIZE)
    backend.use_adapters(1, 8)
    others = TransformersModel(tiny_model("llama4_text"), NumbaCpuAttention, block_size=BLOCK_SIZE)
    others.use_adapters(1, 8)
    for one, name, message in (
        (others, "model.layers.1.feed_forward.experts", "Experts"), (backend, "lm_head", "output layer"),
        (backend, "model.layers.0.mlp.gate", "no linear"), (backend, "model.layers.0.mlp.up", "no linear layer"),
    ):
        directory = write_adapter(tmp_path / name, random_matrices({name: (64, 32)}, 8, 1))
        with pytest.raises(InvalidAdapter, match=f"{name}.*{message}"):
            one.adapter_bytes(str(directory))


def test_a_decoder_of_a_plugin_takes_none(tmp_path: Path) -> None:
    """Nothing is known of its products."""
    backend = TransformersModel(
        tiny_model("llama"), NumbaCpuAttention, block_size=BLOCK_SIZE, decoder_factory=PlainDecoder)
    assert backend.why_no_adapters
    with pytest.raises(ModelNotSupported, match="adapters"):
        backend.use_adapters(1, 8)
