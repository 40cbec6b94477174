from __future__ import annotations

import dataclasses
import random
from typing import NamedTuple

import numpy as np
import pytest
import torch

from pagedcore.models.transformers_model import TransformersModel
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from support.families import VOCAB, tiny_model
from support.ragged_schedules import (
    Rows,
    batch_of,
    random_schedule,
    random_sequences,
    random_tables,
    run_schedule,
    states_of,
)

LENGTHS = (45, 17, 1, 70)
NUM_BLOCKS = 64
BLOCK_SIZE = 16
#: Dense ones, and mixtures of experts: with a shared expert behind a gate, with a router of sigmoids, with biases.
CASES = [
    ("qwen2", torch.float32), ("llama", torch.bfloat16),
    *(pytest.param(one, marks=pytest.mark.slow) for one in (("qwen2", torch.bfloat16), ("llama", torch.float32))),
    ("qwen2_moe", torch.float32), ("deepseek_v3", torch.float32), ("gpt_oss", torch.bfloat16),
    # Fused, with norms around each half, soft caps and windows.
    ("gemma2", torch.bfloat16),
    # With short convolutions.
    ("lfm2_moe", torch.bfloat16),
    # With states: of the gated delta rule. `test_recurrent_models` asks engines of Mamba 2 and of short convolutions.
    ("qwen3_5_text", torch.bfloat16),
    *(pytest.param(one, marks=pytest.mark.slow) for one in (
        ("granitemoehybrid", torch.float32), ("mamba", torch.bfloat16),
        ("qwen3_5_text", torch.float32), ("qwen3_next", torch.bfloat16), ("bamba", torch.bfloat16),
        ("falcon_h1", torch.bfloat16), ("jamba", torch.bfloat16), ("mamba2", torch.float32), ("zamba2", torch.bfloat16),
        ("nemotron_h", torch.bfloat16), ("kimi_linear", torch.bfloat16), ("minimax", torch.bfloat16),
    )),
]


def computed(model: TransformersModel, steps: list[Rows], seed: int = 0) -> list[torch.Tensor]:
    """Logits of all sequences under a schedule, in blocks scattered anew."""
    sequences = random_sequences(LENGTHS, VOCAB)
    tables = random_tables(random.Random(seed), LENGTHS, BLOCK_SIZE, NUM_BLOCKS)
    return run_schedule(model, sequences, steps, tables, BLOCK_SIZE)


class Case(NamedTuple):
    """A model with room for its KV, and every sequence's logits computed alone in one piece."""

    model: TransformersModel
    alone: list[torch.Tensor]


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    family, dtype = request.param
    model = TransformersModel(tiny_model(family, dtype=dtype), NumbaCpuAttention, block_size=BLOCK_SIZE)
    model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    return Case(model, computed(model, [[(i, 0, length)] for i, length in enumerate(LENGTHS)]))


def together() -> Rows:
    return [(i, 0, length) for i, length in enumerate(LENGTHS)]


def assert_same_bits(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_a_model_of_packed_products_declares_itself_invariant(case: Case) -> None:
    """Packed linears, packed experts and the compiled attention pass every probe on this machine."""
    assert case.model.is_schedule_invariant


def test_company_changes_no_bit(case: Case) -> None:
    """A prompt computed next to five others has the logits it has alone."""
    assert_same_bits(computed(case.model, [together()], seed=1), case.alone)


def test_order_in_the_batch_changes_no_bit(case: Case) -> None:
    """A row's place in the batch does not matter."""
    assert_same_bits(computed(case.model, [together()[::-1]], seed=2), case.alone)


def test_threads_and_company_change_no_bit(case: Case) -> None:
    """With two threads, too, a prompt in company has the logits it has alone."""
    torch.set_num_threads(2)
    alone = computed(case.model, [[row] for row in together()])
    assert_same_bits(computed(case.model, [together()], seed=3), alone)


def test_decoding_instead_of_prefilling_changes_no_bit(case: Case) -> None:
    """Tokens computed one at a time, alone, have the logits of a prefill."""
    one_by_one = [[(i, at, at + 1)] for i, length in enumerate(LENGTHS[:3]) for at in range(length)]
    assert_same_bits(computed(case.model, [*one_by_one, [(3, 0, LENGTHS[3])]], seed=4), case.alone)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_chunks_change_no_bit(case: Case, seed: int) -> None:
    """Any mixture of chunks, decode rows and company gives the same logits."""
    steps = random_schedule(random.Random(seed), LENGTHS)
    assert_same_bits(computed(case.model, steps, seed), case.alone)


@pytest.mark.parametrize("rows", [[44], [3], [], [7, 44, 7]], ids=str)
def test_wanting_few_rows_of_logits_changes_no_bit(case: Case, rows: list[int]) -> None:
    """Exactly the wanted rows come back, one or none included, with the bits they have among all rows."""
    sequences = random_sequences(LENGTHS, VOCAB)
    tables = random_tables(random.Random(0), LENGTHS, BLOCK_SIZE, NUM_BLOCKS)
    batch = batch_of(sequences, [(0, 0, 45)], tables, BLOCK_SIZE, states_of(case.model, 1))
    wanted = case.model.forward(dataclasses.replace(batch, logits_rows=np.array(rows, dtype=np.int64)))
    assert (wanted.shape, wanted.dtype) == ((len(rows), VOCAB), case.alone[0].dtype)
    assert_same_bits([wanted], [case.alone[0][rows]])
