"""What a kernel with raw addresses must never do, and what the host refuses before it starts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kernels import edge_of_memory
from kernels.attention_cases import LAYER, Rows, Shape, Tokens, nan_pool, random_tables, run
from pagedcore.errors import InternalError, InvalidConfig
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from pagedcore_kernels.layout import KVLayout, LayerShape, ScaledKVLayout
from pagedcore_kernels.reference import ReferenceAttention
from support.apart import Apart

SHAPE = Shape(3, 1, 12, 8, 4, torch.bfloat16)
SHAPES = [
    SHAPE, Shape(7, 2, 64, 64, 32, torch.float32), Shape(3, 2, 11, 20, 4, torch.bfloat16, is_int8=True),
    Shape(2, 3, 80, 96, 1, torch.bfloat16, is_int8=True),
]
BACKENDS = [NumbaCpuAttention, ReferenceAttention]


def filled(shape: Shape, length: int, num_blocks: int = 40) -> tuple[NumbaCpuAttention, torch.Tensor, Rows, Tokens]:
    """A backend over a NaN pool and a batch of one whole sequence, not yet run."""
    pool = nan_pool(shape.layout, num_blocks)
    rows = Rows(
        [(length, length)], random_tables([(length, length)], shape.block_size, num_blocks, seed=1), shape.block_size
    )
    return NumbaCpuAttention(shape.layout, pool), pool, rows, Tokens.random(shape, length, seed=2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("length", [1, 5, 31, 37])
def test_kernel_writes_the_bytes_of_the_reference(shape: Shape, length: int) -> None:
    """After writing chunks of any length and stride both backends' pools are equal in every byte.

    So the kernel writes every element of its slots and nothing else: no other slot, layer, block or padding.
    """
    pools = [nan_pool(shape.layout, 120) for _ in BACKENDS]
    lengths = [(length, length + 13), (3, 40), (1, 2)]
    rows = Rows(lengths, random_tables(lengths, shape.block_size, 120, seed=3), shape.block_size, padding=2)
    total = len(rows.positions)
    packed = torch.randn(total, shape.kv_heads, shape.key_size + shape.value_size).to(shape.dtype)
    key, value = packed.split([shape.key_size, shape.value_size], dim=-1)
    for make, pool in zip(BACKENDS, pools, strict=True):
        backend: Any = make(shape.layout, pool)
        backend.plan(rows)
        backend.write_kv(LAYER, key, value.transpose(0, 1).contiguous().transpose(0, 1))
    assert torch.equal(pools[0], pools[1])
    assert (pools[0] != 0xFF).any()


def test_slot_minus_one_writes_nothing() -> None:
    """Tokens without a slot, at any place in the batch, leave the pool as it was."""
    backend, pool, rows, tokens = filled(SHAPE, 30)
    rows.slot_mapping[:] = -1
    run(backend, rows, [tokens], SHAPE)
    assert (pool == 0xFF).all()
    rows.slot_mapping[7] = 4 * rows.block_tables[0, 1] + 3
    run(backend, rows, [tokens], SHAPE)
    written = SHAPE.layout.key_view(pool, LAYER)[rows.block_tables[0, 1], :, :, 3]
    assert torch.equal(written, tokens.key[7])
    assert int((~SHAPE.layout.key_view(pool, LAYER).isnan()).sum()) == tokens.key[7].numel()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unwritten_and_foreign_memory_never_reaches_a_result(shape: Shape) -> None:
    """Changing every byte of the pool that the row may not see changes no bit of its output."""
    backend, pool, rows, tokens = filled(shape, 37)
    output = run(backend, rows, [tokens], shape, window=20)
    assert torch.isfinite(output).all()
    clean = nan_pool(shape.layout, 40).zero_()
    other = NumbaCpuAttention(shape.layout, clean)
    assert torch.equal(run(other, rows, [tokens], shape, window=20), output)
    assert not torch.equal(pool, clean)


def test_attend_reads_the_pool_only() -> None:
    """Attending writes no byte of the pool, and every element of the output is written."""
    backend, pool, rows, tokens = filled(SHAPE, 30)
    run(backend, rows, [tokens], SHAPE)
    before = pool.clone()
    for _ in range(5):
        torch.full((30 * SHAPE.heads * SHAPE.value_size,), float("nan"), dtype=SHAPE.dtype)
        assert torch.isfinite(backend.attend(LAYER, tokens.query, scale=1.0)).all()
    assert torch.equal(pool, before)


def test_a_batch_without_rows_is_computed() -> None:
    """Padding alone is a legal batch: nothing is written and the result is zeros."""
    backend, pool, rows, _ = filled(SHAPE, 4)
    rows.query_start = np.zeros(1, np.int64)
    rows.kv_lens = np.zeros(0, np.int64)
    rows.block_tables = np.zeros((0, 3), np.int32)
    rows.slot_mapping = np.full(2, -1, np.int64)
    backend.plan(rows)
    backend.write_kv(LAYER, torch.ones(2, 1, 12, dtype=SHAPE.dtype), torch.ones(2, 1, 8, dtype=SHAPE.dtype))
    output = backend.attend(LAYER, torch.ones(2, 3, 12, dtype=SHAPE.dtype), scale=1.0)
    assert output.shape == (2, 3, 8)
    assert not output.any()
    assert (pool == 0xFF).all()


def broken(field: str, index: Any, value: int) -> Rows:
    """A legal batch of rows of 5, 1 and 9 tokens in 40 blocks of 4, with one number changed."""
    lengths = [(5, 21), (1, 8), (9, 9)]
    rows = Rows(lengths, random_tables(lengths, 4, 40, seed=1), 4)
    getattr(rows, field)[index] = value
    return rows


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize(
    ("field", "index", "value"),
    [
        ("block_tables", (1, 1), 40),
        ("block_tables", (1, 1), -1),
        ("block_tables", (0, 5), 2**31 - 1),
        ("slot_mapping", 3, 160),
        ("slot_mapping", 3, -2),
        ("kv_lens", 2, 8),
        ("kv_lens", 0, 25),
        ("kv_lens", 0, -1),
        ("query_start", 0, 1),
        ("query_start", 3, 16),
        ("query_start", 1, 7),
    ],
)
def test_a_number_out_of_range_is_refused_before_anything_runs(make: Any, field: str, index: Any, value: int) -> None:
    """One wrong block id, slot, length or start is an InternalError that names its field."""
    backend = make(SHAPE.layout, nan_pool(SHAPE.layout, 40))
    with pytest.raises(InternalError, match=field):
        backend.plan(broken(field, index, value))


@pytest.mark.parametrize("field", ["query_start", "kv_lens", "block_tables"])
def test_arrays_of_different_lengths_are_refused(field: str) -> None:
    """R rows need R lengths, R tables and R + 1 starts."""
    rows = broken("kv_lens", 0, 21)
    setattr(rows, field, getattr(rows, field)[:-1])
    backend = NumbaCpuAttention(SHAPE.layout, nan_pool(SHAPE.layout, 40))
    with pytest.raises(InternalError, match="ragged batch"):
        backend.plan(rows)
    rows.block_tables = rows.block_tables.reshape(-1)
    with pytest.raises(InternalError, match="ragged batch"):
        backend.plan(rows)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_block_ids_past_the_end_of_a_row_are_not_looked_at(shape: Shape) -> None:
    """What follows a row's last block in its table may be anything: no kernel makes an address of it."""
    for length in (1, 37, 70):
        backend, _, rows, tokens = filled(shape, length, num_blocks=70)
        prompt = run(backend, rows, [tokens], shape)
        rest = np.full((1, 40), 2**30, np.int32)
        tables = np.concatenate([rows.block_tables, rest], axis=1)
        last = run(backend, Rows([(1, length)], tables, shape.block_size), [tokens], shape)
        assert torch.equal(last, prompt[-1:])


@pytest.mark.parametrize("make", BACKENDS)
def test_tensors_that_do_not_fit_the_plan_are_refused(make: Any) -> None:
    """Shape, dtype or stride of query, key, value and sinks are checked before an address is taken."""
    rows = Rows([(5, 5)], random_tables([(5, 5)], 4, 40, seed=1), 4)
    backend = make(SHAPE.layout, nan_pool(SHAPE.layout, 40))
    query, key, value = (torch.ones(5, heads, size, dtype=SHAPE.dtype) for heads, size in ((3, 12), (1, 12), (1, 8)))
    with pytest.raises(InternalError, match="plan"):
        backend.attend(LAYER, query, scale=1.0)
    backend.plan(rows)
    for bad in (query[:4], query[..., :8], query[:, :0], query[0]):
        with pytest.raises(InternalError, match="query"):
            backend.attend(LAYER, bad, scale=1.0)
    with pytest.raises(InvalidConfig, match="float32"):
        backend.attend(LAYER, query.float(), scale=1.0)
    with pytest.raises(InternalError, match="stride"):
        backend.attend(LAYER, query.repeat_interleave(2, -1)[..., ::2], scale=1.0)
    with pytest.raises(InternalError, match="sinks"):
        backend.attend(LAYER, query, scale=1.0, sinks=torch.ones(2))
    with pytest.raises(InternalError, match="key"):
        backend.write_kv(LAYER, key[:3], value)
    with pytest.raises(InternalError, match="value"):
        backend.write_kv(LAYER, key, key)
    with pytest.raises(InvalidConfig, match="value"):
        backend.write_kv(LAYER, key, value.half())


def test_more_than_a_group_of_heads_is_refused() -> None:
    """The number of query heads has to be a multiple of the KV heads."""
    shape = SHAPES[1]
    backend, _, rows, _ = filled(shape, 3)
    backend.plan(rows)
    with pytest.raises(InternalError, match="multiple of 2"):
        backend.attend(LAYER, torch.ones(3, 7, 64), scale=1.0)


@pytest.mark.parametrize(
    ("block_size", "dtype", "word"),
    [(16, torch.float16, "float16"), (3, torch.float32, "block_size"), (512, torch.float32, "block_size")],
)
def test_pools_the_kernels_cannot_use_are_refused(block_size: int, dtype: torch.dtype, word: str) -> None:
    """float16 and odd block sizes are an InvalidConfig when the backend is made; the reference takes them."""
    layout = KVLayout(block_size, dtype, (LayerShape(1, 8, 8),))
    with pytest.raises(InvalidConfig, match=word):
        NumbaCpuAttention(layout, layout.allocate(2))
    ReferenceAttention(layout, layout.allocate(2))


def test_models_whose_rows_the_kernels_cannot_read_are_refused_with_int8_too() -> None:
    """An int8 pool of a float16 model, or one of e4m3, is an InvalidConfig before anything runs."""
    for layout in (
        ScaledKVLayout(16, torch.int8, (LayerShape(1, 8, 8),), torch.float16),
        ScaledKVLayout(16, torch.float8_e4m3fn, (LayerShape(1, 8, 8),), torch.bfloat16),
    ):
        with pytest.raises(InvalidConfig, match="KV dtype"):
            NumbaCpuAttention(layout, layout.allocate(2))


@pytest.mark.parametrize("make", BACKENDS)
def test_a_pool_of_another_layout_is_refused(make: Any) -> None:
    """A tensor that the layout's allocate could not have returned is refused."""
    layout = SHAPE.layout
    pool = layout.allocate(4)
    for bad in (pool[:, :-1], pool.view(torch.int8), pool[::2], pool.flatten()):
        with pytest.raises(InternalError, match="pool"):
            make(layout, bad)


def test_nothing_is_read_beyond_its_end(apart: Apart) -> None:
    """Block tables, rows, tiles and the pool may end where memory ends, also while memory is asked for ahead."""
    out = apart.run("from kernels import edge_of_memory; edge_of_memory.main('attention')")
    assert out.count("torch.Size([47, ") == 2 * len(edge_of_memory.SHAPES)
