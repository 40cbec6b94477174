"""Whole models of transformers whose attention is the compiled kernels, executed by the PTX interpreter."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from kernels.cuda.simulated_driver import SimulatedAttention
from pagedcore.models.transformers_model import TransformersModel
from pagedcore_kernels.cuda.build.toolchain import missing_compiler_parts
from pagedcore_kernels.reference import ReferenceAttention
from support.families import VOCAB, tiny_model
from support.ragged_schedules import random_schedule, random_sequences, random_tables, run_schedule

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(bool(missing_compiler_parts()), reason="needs pagedcore[cuda] to compile kernels"),
]
LENGTHS = (20, 7, 33)
BLOCK, NUM_BLOCKS = 4, 40


# Why: no mixture of experts; in bfloat16 another rounding sends some token to another expert, with any backend.
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text"])
def test_a_model_of_transformers_runs_on_the_compiled_kernels(family: str) -> None:
    """Chunks and decode rows in random company give transformers' own logits, and its tokens where those are clear."""
    model = tiny_model(family).to(torch.bfloat16)
    sequences = random_sequences(LENGTHS, VOCAB)
    with torch.inference_mode():
        expected = [model(tokens[None], use_cache=False).logits[0].float() for tokens in sequences]
    rng = random.Random(3)
    tables = random_tables(rng, LENGTHS, BLOCK, NUM_BLOCKS)
    steps = random_schedule(rng, LENGTHS)
    for factory in (ReferenceAttention, SimulatedAttention):
        # Why a copy: an engine takes a model over for good.
        own = copy.deepcopy(model)
        backend = TransformersModel(own, factory, block_size=BLOCK, runs_self_test=False, is_private=False)
        backend.allocate_kv(NUM_BLOCKS, BLOCK)
        for found, wanted in zip(run_schedule(backend, sequences, steps, tables, BLOCK), expected, strict=True):
            assert (found - wanted).norm() < 0.03 * wanted.norm()
            top = wanted.topk(2).values
            clear = top[:, 0] - top[:, 1] > 0.25 * wanted.std()
            assert clear.any()
            assert torch.equal(found.argmax(-1)[clear], wanted.argmax(-1)[clear])
