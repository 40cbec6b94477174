"""Embeddings that read their rows from the output layer's product: the bits of a matrix of their own, and no matrix."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from models.decoders.test_fused import SCHEDULE, run, take_over
from pagedcore import Engine, SamplingParams
from pagedcore.errors import InvalidToken
from pagedcore.models.decoders.fused import best_decoder
from pagedcore.models.linears.packed_linear import OneDnnMatmul, PackedLinear
from pagedcore.models.linears.shared_embedding import RowsOfProduct, share_rows
from pagedcore_kernels.cpu.matmul.packed import PackedMatmul, can_multiply
from support.families import VOCAB, tiny_model
from support.interrupts import Lost, interrupted_at

pytestmark = pytest.mark.skipif(not can_multiply(torch.float32, 64), reason="no packed products here")
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
#: Plain, with biases in layers, with embeddings that are multiplied by the module, and by the model.
FAMILIES = ["llama", "qwen2", "gemma2", "gemma3_text", "granite", "olmo2"]


@each_dtype
@pytest.mark.parametrize("shape", [(1, 2), (64, 64), (199, 96), (130, 2048)], ids=str)
def test_rows_are_those_of_the_weight(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Bit by bit, NaN too, in any order and more than once."""
    bits = torch.randint(-(2**31), 2**31 - 1, (shape[0], shape[1] * dtype.itemsize // 4), dtype=torch.int32)
    weight = bits.view(dtype)
    outputs = torch.randint(0, shape[0], (300,))
    rows = PackedMatmul(weight, None).weight_rows(outputs)
    assert rows.dtype == dtype
    assert torch.equal(rows.view(torch.int32), bits[outputs])


@each_dtype
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_two_matrices(family: str, dtype: torch.dtype) -> None:
    """A model with the same numbers in a matrix for each gives the same bits, by fused kernels and by its modules."""
    tied = tiny_model(family, tie_word_embeddings=True).to(dtype)
    apart = copy.deepcopy(tied)
    apart.lm_head.weight = torch.nn.Parameter(tied.lm_head.weight.detach().clone())
    results = []
    for model in (tied, apart):
        backend = take_over(model)
        assert isinstance(model.get_input_embeddings().weight, RowsOfProduct) == (model is tied)
        fused = run(backend, SCHEDULE)
        backend._decoder = backend._decoder.fallback()
        results.append([*fused, *run(backend, SCHEDULE)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_the_matrix_leaves_memory() -> None:
    """Nothing of the model or the engine keeps it."""
    model = tiny_model("llama", tie_word_embeddings=True)
    matrix = weakref.ref(model.lm_head.weight)
    backend = take_over(model)
    gc.collect()
    assert matrix() is None
    assert run(backend, SCHEDULE)


class OneDnn:
    """Products that do not show their rows."""

    def supports(self, dtype: torch.dtype, num_inputs: int) -> bool:
        return True

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        return OneDnnMatmul(weight, bias)


@pytest.mark.parametrize("reason", ["max_norm", "other bits", "no product of ours"])
def test_others_keep_a_matrix(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where more than looking rows up is asked of it, or the product does not show what the matrix has."""
    model, plain = (tiny_model("llama", tie_word_embeddings=True) for _ in range(2))
    expected = run(take_over(plain), SCHEDULE)
    factory = best_decoder
    if reason == "max_norm":
        model.model.embed_tokens.max_norm = 1e6
    elif reason == "other bits":
        right = PackedMatmul.weight_rows
        monkeypatch.setattr(PackedMatmul, "weight_rows", lambda self, outputs: right(self, outputs.flip(0)))
    else:
        factory = partial(best_decoder, linears=OneDnn())
    matrix = model.model.embed_tokens.weight.detach().clone()
    logits = run(take_over(model, decoder_factory=factory), SCHEDULE)
    assert torch.equal(model.model.embed_tokens.weight, matrix)
    for one, other in zip(logits, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("token", [VOCAB, VOCAB + 1, 255, 256, -1, 2**63])
def test_a_panel_may_have_more_rows_than_the_vocabulary(token: int, tmp_path: Path) -> None:
    """A request that names one of them is refused, and its neighbour is answered."""
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    with Engine.from_pretrained(tmp_path, dtype="float32") as engine:
        one = SamplingParams(max_tokens=2, ignore_eos=True)
        with pytest.raises(InvalidToken):
            engine.generate([[1, token]], one)
        assert len(engine.generate([[1, VOCAB - 1]], one)[0].outputs[0].token_ids) == 2


def test_an_interrupt_while_an_engine_is_made_leaves_the_next_one_right() -> None:
    """At lines spread over all that a start executes, and at each of those that have one matrix read for two."""
    questions, params = ["What is 2 + 3?", "What is 9 - 5?"], SamplingParams(max_tokens=8)

    def answers() -> list[list[int]]:
        with Engine.from_pretrained("demo") as engine:
            return [list(output.outputs[0].token_ids) for output in engine.generate(questions, params)]

    expected = answers()
    with interrupted_at(0) as num_lines, Engine.from_pretrained("demo"):
        pass
    for line in range(1, num_lines[0], num_lines[0] // 12):
        with suppress(Lost), interrupted_at(line), Engine.from_pretrained("demo"):
            pass
        assert answers() == expected, line
    for line in range(1, 16):
        model = tiny_model("llama", tie_word_embeddings=True)
        head = PackedLinear(model.lm_head.weight, None)
        given_up: list[torch.Tensor] = []
        with suppress(Lost), interrupted_at(line):
            share_rows(model.model.embed_tokens, head, given_up.append)
        # A matrix that was given up may have lost its pages, and is read by nobody then.
        assert not given_up or isinstance(model.model.embed_tokens.weight, RowsOfProduct), line


def test_an_engine_of_the_demo_model_has_none() -> None:
    """And what it answers is right; a converted one keeps int8 rows, which have a test of their own."""
    with Engine.from_pretrained("demo") as engine:
        model = engine._runner.backend._decoder._general.args[0]  # type: ignore[attr-defined]
        assert isinstance(model.get_input_embeddings().weight, RowsOfProduct)
        outputs = engine.generate(["What is 2 + 3?", "What is 9 - 5?"], SamplingParams(max_tokens=16))
    assert ["5" in outputs[0].outputs[0].text, "4" in outputs[1].outputs[0].text] == [True, True]
