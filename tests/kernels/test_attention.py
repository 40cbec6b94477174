"""The CPU attention kernel against float64, over shapes, options, dtypes and block sizes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention_cases import (
    LAYER,
    Rows,
    Shape,
    Tokens,
    assert_close,
    expected,
    nan_pool,
    random_tables,
    rounded_to_int8,
    run,
)
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention

F32, BF16 = torch.float32, torch.bfloat16
SHAPES = [
    Shape(7, 2, 64, 64, 32, F32),
    Shape(7, 2, 64, 64, 32, BF16),
    Shape(40, 1, 24, 12, 8, F32),
    Shape(3, 1, 12, 8, 4, BF16),
    Shape(7, 2, 64, 64, 32, BF16, is_int8=True),
    Shape(3, 1, 12, 8, 4, F32, is_int8=True),
    Shape(2, 3, 80, 96, 1, BF16, is_int8=True),
]
"""Each takes seconds to compile, so other tests take theirs from these."""
SLOW_SHAPES = [
    Shape(1, 3, 64, 64, 16, F32),
    Shape(4, 2, 128, 128, 16, BF16),
    Shape(2, 3, 80, 96, 1, F32),
    Shape(5, 2, 8, 24, 2, BF16),
    Shape(8, 1, 192, 128, 32, BF16),
    Shape(2, 1, 512, 256, 16, F32),
    Shape(8, 1, 192, 128, 64, F32, is_int8=True),
]
MANY = [
    {},
    {"window": 1},
    {"window": 100},
    {"chunk": 64},
    {"chunk": 300, "window": 70},
    {"softcap": 5.0},
    {"sinks": True},
    {"window": 40, "chunk": 50, "softcap": 2.0, "sinks": True},
]


def with_sinks(options: dict[str, Any], heads: int) -> dict[str, Any]:
    """Replace ``True`` by one sink logit per head, from negligible to dominant."""
    return {k: torch.linspace(-4, 12, heads) if k == "sinks" else v for k, v in options.items()}


def random_lengths(seed: int) -> list[tuple[int, int]]:
    """A mixed batch: decode rows, chunks and whole prompts, around block and tile borders."""
    random = np.random.default_rng(seed)
    lengths = [(1, 1), (1, 256), (1, 257), (3, 258), (17, 17)]
    for _ in range(5):
        length = int(random.integers(1, 600))
        lengths.append((int(random.integers(1, min(length, 40) + 1)), length))
    return [lengths[i] for i in random.permutation(len(lengths))]


@pytest.mark.parametrize(
    "shape", [*SHAPES, *(pytest.param(shape, marks=pytest.mark.slow) for shape in SLOW_SHAPES)], ids=str
)
def test_kernel_agrees_with_float64(shape: Shape) -> None:
    """A ragged batch of mixed rows over scattered blocks gives what float64 gives, under every option."""
    lengths = random_lengths(seed=shape.block_size + shape.group)
    sequences = [Tokens.random(shape, length, seed=i) for i, (_, length) in enumerate(lengths)]
    num_blocks = sum(-(-length // shape.block_size) for _, length in lengths) + 3
    tables = random_tables(lengths, shape.block_size, num_blocks, seed=5)
    backend = NumbaCpuAttention(shape.layout, nan_pool(shape.layout, num_blocks))
    run(backend, Rows([(n, n) for _, n in lengths], tables, shape.block_size), sequences, shape)
    rows = Rows(lengths, tables, shape.block_size, padding=3)
    for options in (with_sinks(option, shape.heads) for option in MANY):
        assert_close(run(backend, rows, sequences, shape, **options), expected(rows, sequences, shape, **options))


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[tuple[int, int]], dict[str, Any], int]:
    """Lengths of up to five rows, options, and a seed."""
    lengths = []
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 560))
        lengths.append((draw(st.integers(0, min(length, 50))), length))
    options = {
        "window": draw(st.sampled_from([0, 0, 1, 7, 255, 256, 257, 1000])),
        "chunk": draw(st.sampled_from([0, 0, 1, 13, 256, 300])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])),
        "sinks": draw(st.sampled_from([None, True])),
    }
    return lengths, options, draw(st.integers(0, 1000))


@settings(max_examples=40)
@given(batches())
def test_any_batch_agrees_with_float64(case: tuple[list[tuple[int, int]], dict[str, Any], int]) -> None:
    """Any mix of rows, empty ones included, under any combination of options is right."""
    lengths, options, seed = case
    shape = SHAPES[3]
    sequences = [Tokens.random(shape, length, seed + i) for i, (_, length) in enumerate(lengths)]
    num_blocks = sum(-(-length // shape.block_size) for _, length in lengths)
    tables = random_tables(lengths, shape.block_size, num_blocks, seed)
    backend = NumbaCpuAttention(shape.layout, nan_pool(shape.layout, num_blocks))
    run(backend, Rows([(n, n) for _, n in lengths], tables, shape.block_size), sequences, shape)
    rows = Rows(lengths, tables, shape.block_size, padding=seed % 3)
    if options["sinks"]:
        options |= with_sinks(options, shape.heads)
    assert_close(run(backend, rows, sequences, shape, **options), expected(rows, sequences, shape, **options))


def test_two_backends_run_at_the_same_time() -> None:
    """Backends in two Python threads do not disturb each other."""
    shape = SHAPES[3]
    rows = Rows([(500, 500)], random_tables([(500, 500)], 4, 125, seed=1), 4)

    def compute(seed: int) -> torch.Tensor:
        with torch.inference_mode():
            backend = NumbaCpuAttention(shape.layout, nan_pool(shape.layout, 125))
            return run(backend, rows, [Tokens.random(shape, 500, seed)], shape)

    alone = [compute(seed) for seed in range(8)]
    with ThreadPoolExecutor(2) as pool:
        for output, same in zip(pool.map(compute, range(8)), alone, strict=True):
            assert torch.equal(output, same)


def test_long_context_stays_exact() -> None:
    """Many tiles, with the largest scores early or late, leave no more error than one tile."""
    shape = Shape(7, 2, 64, 64, 32, F32)
    tokens = Tokens.random(shape, 3000, seed=1)
    tokens.key[:10] *= 3
    tokens.key[2000:2010] *= 4
    tables = random_tables([(3000, 3000)], 32, 94, seed=6)
    backend = NumbaCpuAttention(shape.layout, nan_pool(shape.layout, 94))
    run(backend, Rows([(3000, 3000)], tables, 32), [tokens], shape)
    rows = Rows([(20, 3000)], tables, 32)
    assert_close(run(backend, rows, [tokens], shape), expected(rows, [tokens], shape))


def test_strides_of_the_query_are_free() -> None:
    """A query that is a transposed view gives the bits of its contiguous copy."""
    shape = Shape(3, 1, 12, 8, 4, BF16)
    tokens = Tokens.random(shape, 50, seed=1)
    rows = Rows([(50, 50)], random_tables([(50, 50)], 4, 13, seed=2), 4)
    backend = NumbaCpuAttention(shape.layout, nan_pool(shape.layout, 13))
    contiguous = run(backend, rows, [tokens], shape)
    transposed = tokens.query.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.cat([tokens.query, tokens.query], dim=-1)[..., : shape.key_size]
    for query in (transposed, wide):
        assert not query.is_contiguous()
        assert torch.equal(backend.attend(LAYER, query, scale=shape.scale), contiguous)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_int8_pools_hide_no_number_that_is_none(dtype: torch.dtype, name: str, number: float) -> None:
    """One NaN or infinity in a K or V makes all rows NaN that see its token, and no other row, in the same tile or not.

    Without scales of its own an int8 pool could not say so.
    """
    shape = Shape(3, 2, 24, 20, 16, dtype, is_int8=True)
    tokens = Tokens.random(shape, 400, seed=1)
    rows = Rows([(400, 400)], random_tables([(400, 400)], 16, 25, seed=2), 16)
    for bad in (13, 131, 292):
        broken = Tokens(tokens.query, tokens.key.clone(), tokens.value.clone())
        getattr(broken, name)[bad, 1, 3] = number
        backend = NumbaCpuAttention(shape.layout, nan_pool(shape.layout, 25))
        output = run(backend, rows, [broken], shape)
        is_nan = output.isnan().all(-1)
        assert not output[:bad].isnan().any()
        assert is_nan[bad:, 3:].all()
        assert not output[:, :3].isnan().any()


def test_rows_of_nothing_are_zeros_in_int8() -> None:
    """K of zeros has scores of zero, and V of zeros or below 2**-100 adds nothing: scales of zero divide nothing."""
    shape = SHAPES[5]
    tokens = Tokens.random(shape, 40, seed=1)
    tokens.key[:20] = 0
    tokens.value[5] = 0
    tokens.value[6] = 2.0**-101
    rows = Rows([(40, 40)], random_tables([(40, 40)], 4, 10, seed=2), 4)
    output = run(NumbaCpuAttention(shape.layout, nan_pool(shape.layout, 10)), rows, [tokens], shape)
    assert_close(output, expected(rows, [tokens], shape))
    mean = torch.from_numpy(rounded_to_int8(tokens.value[:20])).mean(0).float()
    torch.testing.assert_close(output[19], mean.expand(3, -1))


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([1e-28, 1e-6, 1.0, 1e4, 1e36]), st.sampled_from(SHAPES[5:7]))
def test_int8_pools_hold_the_nearest_multiple_of_a_127th(seed: int, size: float, shape: Shape) -> None:
    """What is stored of a row is at most half a scale away, the largest is kept to its last bits, and so are signs."""
    tokens = Tokens.random(shape, 9, seed)
    block_size, num_blocks = shape.block_size, -(-9 // shape.block_size)
    rows = Rows([(9, 9)], random_tables([(9, 9)], block_size, num_blocks, seed), block_size)
    tokens.key.mul_(size)
    pool = nan_pool(shape.layout, num_blocks)
    run(NumbaCpuAttention(shape.layout, pool), rows, [tokens], shape)
    for position in range(9):
        block, offset = rows.block_tables[0][position // block_size], position % block_size
        scale = shape.layout.key_scales(pool, LAYER)[block, :, offset].double()
        held = shape.layout.key_view(pool, LAYER)[block, :, :, offset].double() * scale[:, None]
        exact = tokens.key[position].double()
        assert ((held - exact).abs() <= scale[:, None] * 0.50002).all()
        torch.testing.assert_close(held.abs().amax(-1), exact.abs().amax(-1), rtol=2e-7, atol=0)
        assert (held * exact >= 0).all()


def test_a_nan_is_not_hidden() -> None:
    """A NaN in a visible key reaches every row that sees it, in whichever tile it lies, and no other row."""
    shape = SHAPES[0]
    for bad in (slice(10, 11), slice(290, 291), slice(0, 256)):
        tokens = Tokens.random(shape, 600, seed=1)
        tokens.key[bad] = float("nan")
        rows = Rows([(600, 600)], random_tables([(600, 600)], 32, 19, seed=2), 32)
        backend = NumbaCpuAttention(shape.layout, nan_pool(shape.layout, 19))
        is_nan = run(backend, rows, [tokens], shape).isnan()
        assert not is_nan[: bad.start].any()
        assert is_nan[bad.start :].all()
