"""The compiled kernels, executed by the PTX interpreter, against float64 and against themselves cut differently."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from kernels.attention_cases import LAYER, Rows, Shape, nan_pool
from kernels.cuda.cuda_cases import Case, relative_error
from kernels.cuda.simulated_driver import SimulatedDriver
from pagedcore.errors import InvalidConfig
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from pagedcore_kernels.cuda.attention.backend import NumbaCudaAttention
from pagedcore_kernels.cuda.build.toolchain import missing_compiler_parts
from pagedcore_kernels.layout import BlockLayout, KVLayout, LayerShape, ScaledKVLayout, TokenMajorLayout
from pagedcore_kernels.reference import ReferenceAttention

pytestmark = pytest.mark.skipif(bool(missing_compiler_parts()), reason="needs pagedcore[cuda] to compile kernels")

BF16, F16 = torch.bfloat16, torch.float16
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
COMMON = Shape(4, 2, 32, 32, 16, BF16)
"""The demo model's head size, whose kernels other tests compile too."""
MAX_ERROR = {BF16: 4e-3, F16: 8e-4}
"""Weights and result are rounded to the model's format: a few of its last places; over 8 bits weights to bfloat16."""
OPTIONS: list[dict[str, Any]] = [
    {}, {"window": 100}, {"chunk": 64}, {"window": 600, "chunk": 300, "softcap": 5.0, "sinks": True},
]
FAST = [(COMMON, None, "sm_90")]
ALL = [
    (Shape(1, 2, 128, 128, 16, BF16), None, "sm_80"), (Shape(4, 2, 128, 128, 16, BF16), None, "sm_90"),
    (Shape(8, 1, 128, 128, 32, BF16), None, "sm_100"), (Shape(5, 2, 80, 80, 16, BF16), None, "sm_90"),
    (Shape(3, 2, 96, 96, 16, F16), None, "sm_90"), (Shape(2, 2, 256, 256, 16, BF16), None, "sm_90"),
    (Shape(17, 1, 16, 48, 1, F16), None, "sm_80"), (Shape(4, 1, 192, 128, 64, BF16), None, "sm_90"),
    (Shape(4, 2, 128, 128, 16, BF16), E4M3, "sm_90"), (Shape(4, 2, 64, 64, 16, F16), E4M3, "sm_100"),
    (Shape(4, 2, 128, 128, 16, F16), INT8, "sm_80"), (Shape(4, 2, 96, 96, 16, BF16), INT8, "sm_90"),
    (Shape(4, 2, 256, 256, 16, BF16), E4M3, "sm_90"), (Shape(4, 1, 64, 96, 128, BF16), INT8, "sm_90"),
    (Shape(8, 1, 128, 64, 32, F16), E4M3, "sm_90"), (Shape(4, 2, 64, 64, 16, BF16), None, "sm_90"),
]
CASES = [pytest.param(*case, id=f"{case[0]}-{case[1]}-{case[2]}") for case in FAST] + [
    pytest.param(*case, id=f"{case[0]}-{case[1]}-{case[2]}", marks=pytest.mark.kernels) for case in ALL
]


def with_sinks(options: dict[str, Any], heads: int) -> dict[str, Any]:
    """Replace ``True`` by one sink logit per head, from negligible to dominant."""
    return {k: torch.linspace(-4, 12, heads) if k == "sinks" else v for k, v in options.items()}


@pytest.mark.parametrize(("shape", "pool_dtype", "arch"), CASES)
def test_kernels_agree_with_float64(shape: Shape, pool_dtype: torch.dtype | None, arch: str) -> None:
    """A mixed batch over scattered pages full of NaN beyond their ends gives what float64 gives, under every option.

    Padding comes out as zeros, every split counter is left at zero, and no check of the interpreter objects.
    """
    case = Case(shape, pool_dtype)
    backend = case.backend(arch=arch)
    rows = case.rows(padding=2)
    for options in (with_sinks(option, shape.heads) for option in OPTIONS):
        output = case.attend(backend, rows, **options)
        most = MAX_ERROR[shape.dtype if pool_dtype is None else BF16]
        assert relative_error(output, case.expected(rows, **options)) < most, options
        assert not output[-2:].any()
        assert not backend._plans.counters.any()


@pytest.mark.parametrize(("shape", "pool_dtype", "arch"), CASES)
def test_a_token_has_the_same_bits_however_the_work_is_cut(
    shape: Shape, pool_dtype: torch.dtype | None, arch: str
) -> None:
    """Prefill or decode kernel, one CTA per context or one per segment, any order of CTAs: the same bits."""
    case = Case(shape, pool_dtype)
    options = with_sinks({"sinks": True, "window": 650}, shape.heads)
    whole = case.attend(case.backend(arch=arch, num_sms=1), case.rows(), **options)
    for num_sms, seed in ((1, 1), (64, 2)):
        backend = case.backend(arch=arch, num_sms=num_sms, seed=seed)
        assert torch.equal(case.attend(backend, case.rows(), **options), whole)
    last = whole[case.rows().logits_rows]
    alone = case.attend(case.backend(arch=arch, num_sms=64), case.rows([(1, n) for _, n in case.lengths]), **options)
    assert torch.equal(alone, last)


@pytest.mark.parametrize(("shape", "pool_dtype", "most_shared_bytes"), [
    (Shape(4, 1, 32, 32, 16, BF16), None, 22_000),
    *(pytest.param(Shape(4, 1, 256, 256, 16, BF16), dtype, 99 * 1024, marks=pytest.mark.kernels)
      for dtype in (None, torch.int8)),
])
def test_small_shared_memory_changes_no_bits(
    shape: Shape, pool_dtype: torch.dtype | None, most_shared_bytes: int
) -> None:
    """Where an item does not fit, two CTAs share it, or one does it and the other finds nothing to do."""
    case = Case(shape, pool_dtype, lengths=[(20, 300), (9, 9)])
    small, options = case.backend(most_shared_bytes=most_shared_bytes), {"window": 650}
    output = case.attend(small, case.rows(), **options)
    launched = small._driver.launched  # type: ignore[attr-defined]
    assert [(name.partition("-")[0], num_ctas) for name, num_ctas in launched] == [("prefill32", 6)]
    assert relative_error(output, case.expected(case.rows(), **options)) < MAX_ERROR[BF16]
    assert torch.equal(output, case.attend(case.backend(), case.rows(), **options))


LONG_CHUNKS = [(Shape(4, 1, 32, 32, 16, BF16), 9, 2100), (Shape(2, 8, 64, 64, 16, BF16), 8, 1100)]


@pytest.mark.parametrize(("shape", "tokens", "context"), [
    LONG_CHUNKS[0], pytest.param(*LONG_CHUNKS[1], marks=pytest.mark.kernels)])
def test_a_chunk_of_a_long_context_is_split_without_changing_bits(shape: Shape, tokens: int, context: int) -> None:
    """A few tokens over a long context, too many for one decode item even, become several items with the same result.

    Segments are short in layers of few KV heads, and more partial results than a merge reads at a time.
    """
    case = Case(shape, lengths=[(tokens, context)])
    cut = case.backend(num_sms=64)
    output = case.attend(cut, case.rows())
    assert [name.partition("-")[0] for name, _ in cut._driver.launched] == ["decode"]  # type: ignore[attr-defined]
    assert relative_error(output, case.expected(case.rows())) < MAX_ERROR[BF16]
    many = case.attend(case.backend(num_sms=1), case.rows([(30, context)]))
    assert torch.equal(many[-tokens:], output)


def test_the_first_layer_of_a_kind_and_later_steps_agree() -> None:
    """Work that a step prepared because an earlier one needed it is the work that a first use prepares."""
    case = Case(COMMON)
    backend = case.backend()
    first = [case.attend(backend, case.rows(), window=window) for window in (0, 100)]
    backend.plan(case.rows())
    again = [case.attend(backend, case.rows(), window=window) for window in (0, 100)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_alibi() -> None:
    """With slopes a score falls linearly with the distance, in both kernels."""
    case = Case(COMMON)
    slopes = torch.linspace(0.02, 0.5, COMMON.heads)
    rows = case.rows()
    output = case.attend(case.backend(), rows, slopes=slopes)
    start = 0
    for tokens, (n, length) in zip(case.sequences, rows.lengths, strict=True):
        q, k, v = (t[:length].double().repeat_interleave(g, 1) for t, g in (
            (tokens.query, 1), (tokens.key, COMMON.group), (tokens.value, COMMON.group)))
        distance = torch.arange(length)[None] - torch.arange(length - n, length)[:, None]
        scores = torch.einsum("nhd,lhd->hnl", q[length - n :], k) * COMMON.scale + slopes[:, None, None] * distance
        weights = scores.masked_fill(distance > 0, float("-inf")).softmax(-1)
        exact = torch.einsum("hnl,lhd->nhd", weights, v).numpy()
        assert relative_error(output[start : start + n], exact) < MAX_ERROR[BF16]
        start += n


def test_no_thread_races_another() -> None:
    """With the race detector on, both kernels run clean over splits and merges."""
    case = Case(COMMON, lengths=[(20, 600), (1, 1100)])
    rows = case.rows()
    output = case.attend(case.backend(num_sms=64, check_races=True), rows)
    assert relative_error(output, case.expected(rows)) < MAX_ERROR[BF16]


@pytest.mark.parametrize(("shape", "pool_dtype"), [
    (COMMON, None), (Shape(1, 2, 64, 32, 16, BF16), INT8), *(
        pytest.param(*each, marks=pytest.mark.kernels) for each in (
            (Shape(1, 2, 80, 96, 32, F16), None), (Shape(1, 2, 64, 32, 16, BF16), E4M3),
            (Shape(1, 2, 32, 96, 64, F16), INT8))),
])
def test_written_k_and_v_are_where_and_what_they_should_be(shape: Shape, pool_dtype: torch.dtype | None) -> None:
    """Tokens land in their slots in the pool's format, with their scales; padding goes nowhere, and all else keeps its
    bytes."""
    case = Case(shape, pool_dtype, lengths=[(5, 5), (7, 40), (1, 17)])
    wanted = nan_pool(case.layout, case.num_blocks)
    case.fill_pool(wanted, new_only=True)
    case.pool.fill_(0xFF)
    rows, backend = case.rows(padding=2), case.backend()
    backend.plan(rows)
    spans = [(t, slice(length - n, length)) for t, (n, length) in zip(case.sequences, rows.lengths, strict=True)]
    parts = [[getattr(t, name)[span] for t, span in spans] for name in ("key", "value")]
    key, value = (torch.cat([*part, part[0][:2]]) for part in parts)
    backend.write_kv(LAYER, key.transpose(0, 1).contiguous().transpose(0, 1), value)
    assert torch.equal(case.pool, wanted)


HOSTILE = [(BF16, INT8), *(pytest.param(*formats, marks=pytest.mark.kernels)
                           for formats in ((BF16, E4M3), (F16, INT8), (F16, E4M3)))]


@pytest.mark.parametrize(("dtype", "pool_dtype"), HOSTILE)
def test_scales_of_any_size_keep_the_bounds_of_a_cpu(dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    """Where V of neighbouring tokens differ by all orders of magnitude that their format has, so that the least of
    weights decide, every element is as close to float64 as a CPU's: a weight is rounded once. No bit depends on how
    the work is cut.
    """
    shape = dataclasses.replace(COMMON, dtype=dtype)
    case, rng = Case(shape, pool_dtype, lengths=[(3, 700), (20, 90), (1, 530)]), np.random.default_rng(11)
    low, high = (-30, 30) if dtype == BF16 else (-4, 4)
    for i, one in enumerate(case.sequences):
        factors = torch.from_numpy(10.0 ** rng.uniform(low, high, (*one.value.shape[:2], 1)))
        value = (one.value.double() * factors).clamp(-6e4, 6e4) if dtype == F16 else one.value.double() * factors
        case.sequences[i] = dataclasses.replace(one, query=one.query * 3, value=value.to(dtype))
    case.fill_pool()
    rows = case.rows()
    output = case.attend(case.backend(num_sms=1), rows)
    exact, reach = case.expected(rows), case.expected(rows, of_magnitudes=True)
    own = 2.0**-8 if dtype == BF16 else 2.0**-11
    error = np.abs(output.double().numpy() - exact)
    assert (error <= own * np.abs(exact) + 2 * 2.0**-9 * reach + (2.0**-25 if dtype == F16 else 0)).all()
    assert torch.equal(case.attend(case.backend(num_sms=64), rows), output)


@pytest.mark.parametrize(("dtype", "pool_dtype"), HOSTILE)
def test_a_pool_of_8_bits_is_the_same_bytes_on_a_cpu(dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    """Of rows of any magnitude, of zeros, NaN, infinities and numbers too small for a scale, a GPU leaves the bytes
    that the CPU's kernels leave, or the reference where those have no such format."""
    case = Case(Shape(1, 2, 64, 32, 32, dtype), pool_dtype, lengths=[(33, 33), (7, 40)])
    rows, rng = case.rows(padding=1), torch.Generator().manual_seed(3)
    key, value = (torch.randn(41, 2, size, generator=rng) * 10.0 ** torch.randint(-6, 4, (41, 2, 1), generator=rng)
                  for size in (64, 32))
    for rows_of in (key, value):
        rows_of[0], rows_of[1, 0], rows_of[2, 1, 5] = 0.0, 2.0**-110, torch.nan
        rows_of[3, 0, 31], rows_of[4, :, 0], rows_of[5] = torch.inf, -torch.inf, -3.0
    key, value = key.to(dtype), value.to(dtype)
    is_default = (dtype, pool_dtype) == (BF16, INT8)
    pools = [nan_pool(case.layout, case.num_blocks) for _ in range(2)]
    case.pool = pools[0]
    others = NumbaCpuAttention if is_default else ReferenceAttention
    for backend in (case.backend(), others(case.layout, pools[1])):
        backend.plan(rows)
        backend.write_kv(LAYER, key, value)
    assert torch.equal(*pools)


def test_written_bytes_are_the_references() -> None:
    """The backend and the reference leave equal pools, so either may read what the other wrote."""
    case = Case(COMMON, lengths=[(5, 5), (7, 40)])
    pools = [nan_pool(case.layout, case.num_blocks) for _ in range(2)]
    rows = case.rows()
    key, value = (torch.randn(12, 2, COMMON.key_size).to(BF16) for _ in range(2))
    case.pool = pools[0]
    for backend in (case.backend(), ReferenceAttention(case.layout, pools[1])):
        backend.plan(rows)
        backend.write_kv(LAYER, key, value)
    assert torch.equal(*pools)


@pytest.mark.parametrize(("layout", "message"), [
    (KVLayout(16, BF16, (LayerShape(1, 64, 64),)), "TokenMajorLayout and ScaledKVLayout"),
    (TokenMajorLayout(16, torch.float32, (LayerShape(1, 64, 64),)), "bfloat16"),
    (TokenMajorLayout(24, BF16, (LayerShape(1, 64, 64),)), "power of two"),
    (TokenMajorLayout(16, BF16, (LayerShape(1, 72, 64),)), "multiples of 16"),
    (TokenMajorLayout(16, BF16, (LayerShape(1, 64, 512),)), "16 to 256"),
    (ScaledKVLayout(16, INT8, (LayerShape(1, 80, 80),), BF16), "multiples of 32"),
    (ScaledKVLayout(8, INT8, (LayerShape(1, 64, 64),), BF16), "power of two from 16 on, with KV of 8 bits"),
    (ScaledKVLayout(16, INT8, (LayerShape(1, 64, 64),), torch.float32), "models in bfloat16 and float16"),
])
def test_pools_that_the_kernels_cannot_serve_are_refused(layout: BlockLayout, message: str) -> None:
    """What has no kernel is an InvalidConfig that says what has."""
    with pytest.raises(InvalidConfig, match=message):
        NumbaCudaAttention(layout, layout.allocate(2), driver=SimulatedDriver())  # type: ignore[arg-type]


def test_gpus_without_the_format_and_machines_without_a_gpu_are_refused() -> None:
    """e4m3 needs compute capability 8.9; without a driver of one's own the pool has to be on a CUDA device."""
    layout = ScaledKVLayout(16, E4M3, (LayerShape(1, 64, 64),), BF16)
    with pytest.raises(InvalidConfig, match=r"8\.0.*8\.9"):
        NumbaCudaAttention(layout, layout.allocate(2), driver=SimulatedDriver(arch="sm_80"))
    with pytest.raises(InvalidConfig, match="numba-cpu"):
        NumbaCudaAttention(layout, layout.allocate(2))


def test_padding_alone_is_a_batch() -> None:
    """A batch without rows writes nothing, launches no attention and returns zeros."""
    case = Case(COMMON)
    backend = case.backend()
    before = case.pool.clone()
    rows = Rows([(1, 1)], np.zeros((1, 1), np.int32), 16)
    rows.query_start, rows.kv_lens = np.zeros(1, np.int64), np.zeros(0, np.int64)
    rows.block_tables, rows.slot_mapping = np.zeros((0, 3), np.int32), np.full(2, -1, np.int64)
    backend.plan(rows)
    size = COMMON.key_size
    backend.write_kv(LAYER, *(torch.ones(2, 2, size, dtype=BF16) for _ in range(2)))
    assert not backend.attend(LAYER, torch.ones(2, 8, size, dtype=BF16), scale=1.0).any()
    assert torch.equal(case.pool, before)


def test_backend_has_the_contract() -> None:
    """The class has every member of the attention contract under its registered name."""
    assert NumbaCudaAttention.name == "numba-cuda"
    assert NumbaCudaAttention.preferred_block_size(BF16) == 32
