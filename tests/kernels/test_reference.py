"""The oracles: float64 attention against torch's own, and the plain torch backend against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention_cases import Rows, Shape, Tokens, assert_close, expected, nan_pool, random_tables, run
from pagedcore_kernels.reference import ReferenceAttention, attention_float64

OPTIONS: list[dict[str, Any]] = [{}, {"window": 9}, {"chunk": 8}, {"window": 5, "chunk": 12}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_float64_oracle_agrees_with_torch(options: dict[str, Any]) -> None:
    """The NumPy oracle is torch's scaled_dot_product_attention under the mask that the options describe."""
    tokens = Tokens.random(Shape(3, 2, 8, 12, 4, torch.float32), 40, seed=1)
    own, seen = np.arange(30, 40)[:, None], np.arange(40)[None]
    mask = seen <= own
    if "window" in options:
        mask &= seen > own - options["window"]
    if "chunk" in options:
        mask &= seen // options["chunk"] == own // options["chunk"]
    query, key, value = (t.double().transpose(0, 1)[None] for t in (tokens.query[30:], tokens.key, tokens.value))
    theirs = scaled_dot_product_attention(
        query, key, value, attn_mask=torch.from_numpy(mask), scale=0.3, enable_gqa=True
    )
    ours = attention_float64(tokens.query[30:], tokens.key, tokens.value, scale=0.3, **options)
    np.testing.assert_allclose(ours, theirs[0].transpose(0, 1).numpy(), rtol=1e-12, atol=1e-14)


def test_float64_oracle_caps_scores_and_counts_sinks() -> None:
    """With one visible key of score s, softcap c and sink k the output is v * e^x / (e^x + e^k), x = c tanh(s/c)."""
    query, key, value = np.array([[[2.0]]]), np.array([[[3.0]]]), np.array([[[5.0]]])
    output = attention_float64(query, key, value, scale=1.0, softcap=4.0, sinks=[0.5])
    score = np.exp(4 * np.tanh(6 / 4))
    assert output.item() == pytest.approx(5 * score / (score + np.exp(0.5)), rel=1e-14)


def test_float64_oracle_takes_positions() -> None:
    """Queries may be any positions, not only the last ones."""
    tokens = Tokens.random(Shape(1, 1, 4, 4, 4, torch.float32), 10, seed=2)
    whole = attention_float64(tokens.query, tokens.key, tokens.value, scale=1.0)
    some = attention_float64(tokens.query[[3, 7]], tokens.key, tokens.value, scale=1.0, positions=[3, 7])
    assert (some == whole[[3, 7]]).all()


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_reference_backend_agrees_with_float64(block_size: int, dtype: torch.dtype, is_int8: bool) -> None:
    """Paging, masks, softcap and sinks of the torch backend give what float64 over contiguous K and V gives."""
    shape = Shape(3, 2, 12, 20, block_size, dtype, is_int8)
    lengths = [(1, 30), (7, 7), (5, 33), (1, 1)]
    sequences = [Tokens.random(shape, length, seed=i) for i, (_, length) in enumerate(lengths)]
    tables = random_tables(lengths, block_size, 90, seed=3)
    backend = ReferenceAttention(shape.layout, nan_pool(shape.layout, 90))
    run(backend, Rows([(n, n) for _, n in lengths], tables, block_size), sequences, shape)
    rows = Rows(lengths, tables, block_size, padding=2)
    everything = {"window": 6, "chunk": 9, "softcap": 3.0, "sinks": torch.linspace(-1, 2, shape.heads)}
    for options in ({}, *({name: value} for name, value in everything.items()), everything):
        assert_close(run(backend, rows, sequences, shape, **options), expected(rows, sequences, shape, **options))
