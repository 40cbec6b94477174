"""The law that makes results independent of scheduling: one token, one result, to the last bit.

Every test computes the same tokens twice, arranged differently, and compares bits. Sequences are longer than one
tile of the kernel, and each arrangement writes K and V step by step into a pool full of NaN, as an engine would.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kernels.attention_cases import (
    LAYER,
    Rows,
    Shape,
    Tokens,
    assert_close,
    expected,
    nan_pool,
    random_tables,
    run,
)
from pagedcore_kernels.cpu.attention.attend import attention_kernel
from pagedcore_kernels.cpu.attention.attend_pairs import PairVariant, pair_attention_kernel
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from pagedcore_kernels.cpu.attention.variants import Variant
from pagedcore_kernels.cpu.features import has_instructions
from pagedcore_kernels.cpu.matmul.amx import may_use_tiles
from pagedcore_kernels.cpu.matmul.tiles import MATRIX_UNITS, PAIRS
from pagedcore_kernels.cpu.runtime.threads import Computing

SHAPES = [
    Shape(7, 2, 64, 64, 32, torch.float32),
    Shape(7, 2, 64, 64, 32, torch.bfloat16),
    Shape(40, 1, 24, 12, 8, torch.float32),
    Shape(3, 1, 12, 8, 4, torch.bfloat16),
    Shape(7, 2, 64, 64, 32, torch.bfloat16, is_int8=True),
    Shape(3, 1, 12, 8, 4, torch.float32, is_int8=True),
    Shape(2, 3, 80, 96, 1, torch.bfloat16, is_int8=True),
]
"""Of those in ``test_attention``, because each takes seconds to compile."""
SLOW_SHAPES = [Shape(1, 3, 64, 64, 16, torch.float32)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 100},
    {"chunk": 150},
    {"window": 300, "softcap": 4.0, "sinks": True},
]
LENGTH = 560
"""Two whole tiles and a part of a third."""


def with_sinks(options: dict[str, Any], heads: int) -> dict[str, Any]:
    return {k: torch.linspace(-4, 12, heads) if k == "sinks" else v for k, v in options.items()}


def sharp(shape: Shape, length: int, seed: int) -> Tokens:
    """A sequence whose softmax runs from flat to nearly one-hot, so that maxima move and weights vanish."""
    tokens = Tokens.random(shape, length, seed)
    tokens.query.mul_(torch.linspace(0.1, 12, length)[torch.randperm(length)][:, None, None])
    return tokens


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equality that tells 0 from -0."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def new_backend(shape: Shape, num_blocks: int) -> NumbaCpuAttention:
    return NumbaCpuAttention(shape.layout, nan_pool(shape.layout, num_blocks))


def in_steps(
    shape: Shape, tokens: Tokens, chunks: Sequence[int], seed: int, variant: PairVariant | None = None, **options: Any
) -> torch.Tensor:
    """Compute a whole sequence in chunks of the given sizes, by the backend's own kernel or a variant; [L, H, Dv]."""
    length = len(tokens.query)
    num_blocks = -(-length // shape.block_size) + 2
    tables = random_tables([(length, length)], shape.block_size, num_blocks, seed)
    backend = new_backend(shape, num_blocks)
    if variant is not None:
        backend._kernels[LAYER, shape.group, backend._form] = variant.queries, pair_attention_kernel(variant)
    outputs, end = [], 0
    for size in chunks:
        end += size
        outputs.append(run(backend, Rows([(size, end)], tables, shape.block_size), [tokens], shape, **options))
    assert end == length
    return torch.cat(outputs)


def random_chunks(length: int, seed: int) -> Iterator[int]:
    """Sizes from 1 to 90 that add up to ``length``, many of them 1."""
    random = np.random.default_rng(seed)
    while length:
        size = min(length, int(random.choice([1, 1, 2, 3, random.integers(1, 91)])))
        yield size
        length -= size


@pytest.mark.parametrize(("shape", "options"), [
    # Why not all of each shape: one kernel does them all. So every shape and every number format meets several.
    pytest.param(shape, options, id=f"{shape}-{options}",
                 marks=() if shape in SHAPES and (i - place) % len(OPTIONS) in (0, 1) else pytest.mark.slow)
    for place, shape in enumerate([*SHAPES, *SLOW_SHAPES]) for i, options in enumerate(OPTIONS)
])  # fmt: skip
def test_chunking_changes_no_bit(shape: Shape, options: dict[str, Any]) -> None:
    """A prompt computed whole, token by token, or in random chunks gives the same bits at every position."""
    tokens = sharp(shape, LENGTH, seed=1)
    options = with_sinks(options, shape.heads)
    whole = in_steps(shape, tokens, [LENGTH], seed=2, **options)
    assert torch.isfinite(whole).all()
    assert same_bits(in_steps(shape, tokens, [1] * LENGTH, seed=3, **options), whole)
    for seed in (4, 5):
        assert same_bits(in_steps(shape, tokens, [*random_chunks(LENGTH, seed)], seed, **options), whole)


def test_the_sign_of_nothing_changes_no_bit() -> None:
    """Outputs so small that they vanish are +0, however many masked values, times zero, were added to them."""
    shape = SHAPES[0]
    tokens = Tokens.random(shape, 64, seed=1)
    # The first token outweighs all and has no value; products of even tokens vanish below zero; odd ones, of
    # positive value, have no weight at all.
    tokens.query.fill_(1.0)
    for span, key, value in (
        (slice(0, None, 2), 0.5, -1.4e-45),
        (slice(1, None, 2), -100.0, 1.0),
        (slice(1), 1.0, 0.0),
    ):
        tokens.key[span] = key
        tokens.value[span] = value
    whole = in_steps(shape, tokens, [64], seed=2)
    assert same_bits(in_steps(shape, tokens, [1] * 64, seed=3), whole)
    assert not whole[whole == 0].signbit().any()


@pytest.mark.parametrize("shape", [
    *SHAPES, *(pytest.param(shape, marks=pytest.mark.slow) for shape in SLOW_SHAPES)
], ids=str)
def test_batch_mates_and_their_order_change_no_bit(shape: Shape) -> None:
    """Each row alone gives the bits it gives in a mixed batch, in any order and next to any padding."""
    lengths = [(1, 300), (40, 300), (1, 17), (17, 17), (5, 513), (1, 256)]
    sequences = [sharp(shape, length, seed=i) for i, (_, length) in enumerate(lengths)]
    alone = [
        in_steps(shape, tokens, [c for c in (length - n, n) if c], seed=9)[length - n :]
        for tokens, (n, length) in zip(sequences, lengths, strict=True)
    ]
    num_blocks = sum(-(-length // shape.block_size) for _, length in lengths)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(lengths))
        rows = [lengths[i] for i in order]
        mates = [sequences[i] for i in order]
        tables = random_tables(rows, shape.block_size, num_blocks, seed)
        backend = new_backend(shape, num_blocks)
        run(backend, Rows([(length, length) for _, length in rows], tables, shape.block_size), mates, shape)
        together = run(backend, Rows(rows, tables, shape.block_size, padding=seed), mates, shape)
        for i, part in zip(order, together.split([n for n, _ in rows] + [seed] * (seed > 0)), strict=False):
            assert same_bits(part, alone[i])


def pools_of(dtype: torch.dtype, is_int8: bool, *sizes: int, marks: Any = ()) -> Any:
    """Pools that differ in nothing but the size of their blocks. Each size takes seconds to compile."""
    name = f"{dtype}{'-int8' * is_int8}-{sizes}"
    return pytest.param([Shape(3, 2, 24, 20, size, dtype, is_int8) for size in sizes], id=name, marks=marks)


@pytest.mark.parametrize("shapes", [
    pools_of(torch.bfloat16, True, 4, 16),
    *(pools_of(dtype, is_int8, 1, 4, 16, 32, marks=pytest.mark.slow)
      for dtype in (torch.float32, torch.bfloat16) for is_int8 in (False, True)),
])  # fmt: skip
def test_block_size_changes_no_bit(shapes: list[Shape]) -> None:
    """Pools of other block sizes give the same bits."""
    tokens = sharp(shapes[0], LENGTH, seed=1)
    outputs = [in_steps(shape, tokens, [LENGTH - 3, 1, 2], seed=2, window=200) for shape in shapes]
    for output in outputs[1:]:
        assert same_bits(output, outputs[0])


@pytest.mark.parametrize(("budget", "shape"), [
    (6, SHAPES[5]),
    *(pytest.param(budget, shape, marks=pytest.mark.slow)
      for budget, shape in ((3, SHAPES[2]), (6, SHAPES[2]), (16, SHAPES[2]), (3, SHAPES[5]), (16, SHAPES[5]))),
], ids=str)  # fmt: skip
def test_number_of_registers_changes_no_bit(budget: int, shape: Shape) -> None:
    """A kernel cut for a machine with fewer vector registers gives the same bits."""
    tokens = sharp(shape, LENGTH, seed=1)
    num_blocks = -(-LENGTH // shape.block_size) + 2
    tables = random_tables([(LENGTH, LENGTH)], shape.block_size, num_blocks, seed=2)
    rows = Rows([(LENGTH, LENGTH)], tables, shape.block_size)
    backend = new_backend(shape, num_blocks)
    usual = run(backend, rows, [tokens], shape)
    own = Variant.choose(
        shape.group, shape.key_size, shape.value_size, shape.block_size, shape.dtype == torch.bfloat16, budget,
        is_int8=shape.is_int8,
    )
    own = dataclasses.replace(own, queries=3)
    backend._kernels[LAYER, shape.group, None] = own.queries, attention_kernel(own)
    assert same_bits(backend.attend(LAYER, tokens.query, scale=shape.scale), usual)


FORMS = [
    pytest.param(PAIRS, marks=pytest.mark.skipif(not has_instructions("avx512bf16"), reason="no such instructions")),
    pytest.param(MATRIX_UNITS, marks=pytest.mark.skipif(not may_use_tiles(MATRIX_UNITS), reason="no matrix units")),
]
"""Ways to compute in bfloat16, the one of this processor and another one that it has."""


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_is_right_and_the_same_by_vectors_and_on_matrix_units(form: int) -> None:
    """Either way agrees with float64 under every option, and neither chunks nor other work items change a bit.

    Heads of 80 and 40 elements fill neither a tile nor a panel; the item of 32 rows holds ten queries of three heads.
    """
    shape = Shape(3, 2, 80, 40, 16, torch.bfloat16)
    tokens = sharp(shape, LENGTH, seed=1)
    rows = Rows([(LENGTH, LENGTH)], np.zeros((1, LENGTH), np.int32), shape.block_size)
    chosen = PairVariant.choose(form, shape.group, shape.key_size, shape.value_size, shape.block_size)
    small = dataclasses.replace(chosen, rows=32, queries=10)
    for options in [with_sinks(option, shape.heads) for option in OPTIONS]:
        output = in_steps(shape, tokens, [LENGTH], 2, chosen, **options)
        assert_close(output, expected(rows, [tokens], shape, **options))
        for chunks, variant in (([LENGTH - 101, 1, 40, 1, 59], chosen), ([LENGTH], small), ([1] * LENGTH, small)):
            assert same_bits(in_steps(shape, tokens, chunks, 3, variant, **options), output)


@pytest.mark.parametrize(("form", "heads", "key_size", "value_size", "block_size"), [
    pytest.param(*form.values, *sizes, marks=form.marks)
    for form, sizes in zip(FORMS, [(1, 64, 32, 64), (4, 32, 96, 32)], strict=True)
])  # fmt: skip
def test_few_rows_have_the_same_bits_straight_from_the_pool(
    form: int, heads: int, key_size: int, value_size: int, block_size: int
) -> None:
    """A decode step that reads keys and values where they lie computes what their panels give, denormal numbers too."""
    shape = Shape(heads, 2, key_size, value_size, block_size, torch.bfloat16)
    chosen = PairVariant.choose(form, shape.group, shape.key_size, shape.value_size, shape.block_size)
    assert chosen.few == heads
    by_panels = dataclasses.replace(chosen, few=0)
    for scale in (1.0, 1e-19, 1e-38):
        tokens = sharp(shape, 200, seed=1)
        for tensor in (tokens.query, tokens.key, tokens.value):
            tensor.mul_(scale)
        options = with_sinks(OPTIONS[3], shape.heads) if scale == 1.0 else {}
        outputs = [in_steps(shape, tokens, [120, *[1] * 80], 2, variant, **options) for variant in (chosen, by_panels)]
        assert same_bits(*outputs)
        assert scale < 1e-30 or outputs[0].any()


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[4]], ids=str)
@pytest.mark.parametrize("uses_openmp", [True, False])
@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_change_no_bit(num_threads: int, uses_openmp: bool, shape: Shape) -> None:
    """One thread or several, the team's or torch's: the same bits in the output and in the pool."""
    lengths = [(1, 300), (40, 300), (1, 17), (90, 90)]
    sequences = [sharp(shape, length, seed=i) for i, (_, length) in enumerate(lengths)]
    tables = random_tables(lengths, shape.block_size, 40, seed=3)

    def compute() -> tuple[torch.Tensor, torch.Tensor]:
        pool = nan_pool(shape.layout, 40)
        backend = NumbaCpuAttention(shape.layout, pool)
        run(backend, Rows([(n, n) for _, n in lengths], tables, shape.block_size), sequences, shape)
        return run(backend, Rows(lengths, tables, shape.block_size), sequences, shape), pool

    output, pool = compute()
    for _ in range(3):
        with Computing(num_threads, uses_openmp=uses_openmp):
            other_output, other_pool = compute()
        assert same_bits(other_output, output)
        assert same_bits(other_pool, pool)


def digest_of_steps(*, is_int8: bool) -> str:
    """A checksum over the output bits of a computation with every option."""
    shape = Shape(3, 2, 24, 20, 4, torch.bfloat16 if is_int8 else torch.float32, is_int8)
    options = {"window": 200, "softcap": 5.0, "sinks": torch.linspace(-4, 4, shape.heads)}
    output = in_steps(shape, Tokens.random(shape, LENGTH, seed=1), [LENGTH - 40, 1, 39], seed=2, **options)
    return hashlib.sha256(output.view(torch.int16).numpy().tobytes()).hexdigest()
