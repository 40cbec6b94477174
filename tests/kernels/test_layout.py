"""Where K and V lie in a block: every element its own bytes, every block one contiguous run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcore.errors import InvalidConfig
from pagedcore_kernels.layout import ALIGNMENT, BlockLayout, KVLayout, LayerShape, ScaledKVLayout

SHAPES = st.builds(LayerShape, st.integers(1, 5), st.integers(1, 70), st.integers(1, 70))
LAYOUTS = st.builds(
    KVLayout,
    st.sampled_from([1, 2, 3, 4, 8, 16, 32]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.lists(SHAPES, min_size=1, max_size=4).map(tuple),
)
INT8_LAYOUTS = st.builds(
    ScaledKVLayout, st.sampled_from([1, 2, 3, 4, 8, 16, 32]), st.just(torch.int8),
    st.lists(SHAPES, min_size=1, max_size=4).map(tuple), st.sampled_from([torch.float32, torch.bfloat16]),
)


@settings(max_examples=50)
@given(LAYOUTS | INT8_LAYOUTS)
def test_ranges_are_disjoint_ordered_and_inside_the_block(layout: BlockLayout) -> None:
    """K and V of all layers follow each other on cache lines without overlap and end inside the block."""
    end = 0
    for layer in range(len(layout.layers)):
        for offset, size in (
            (layout.key_offset(layer), layout.key_bytes(layer)),
            (layout.value_offset(layer), layout.value_bytes(layer)),
        ):
            assert offset >= end
            assert offset - end < ALIGNMENT
            assert offset % ALIGNMENT == 0
            end = offset + size
    assert 0 <= layout.block_bytes - end < ALIGNMENT


@settings(max_examples=50)
@given(LAYOUTS)
def test_views_reach_every_element_once(layout: KVLayout) -> None:
    """Counting up through the views of all layers and blocks marks as many different bytes as there are elements."""
    pool = layout.allocate(3).zero_()
    elements = 0
    for layer, shape in enumerate(layout.layers):
        for view, sizes in (
            (layout.key_view(pool, layer), (shape.key_head_size, layout.block_size)),
            (layout.value_view(pool, layer), (layout.block_size, shape.value_head_size)),
        ):
            assert view.shape == (3, shape.num_kv_heads, *sizes)
            view.add_(1)
            elements += view.numel()
    ones = pool.flatten().view(layout.dtype)
    assert int((ones == 1).sum()) == elements
    assert int((ones == 0).sum()) == ones.numel() - elements


@settings(max_examples=50)
@given(INT8_LAYOUTS)
def test_int8_views_and_scales_reach_every_byte_once(layout: ScaledKVLayout) -> None:
    """Filling elements and scales of all layers and blocks sets as many different bytes as they have."""
    pool = layout.allocate(3).zero_()
    num_bytes = 0
    for layer, shape in enumerate(layout.layers):
        for view, scales, sizes in (
            (layout.key_view, layout.key_scales, (shape.key_head_size, layout.block_size)),
            (layout.value_view, layout.value_scales, (layout.block_size, shape.value_head_size)),
        ):
            assert view(pool, layer).shape == (3, shape.num_kv_heads, *sizes)
            assert scales(pool, layer).shape == (3, shape.num_kv_heads, layout.block_size)
            view(pool, layer).add_(1)
            scales(pool, layer).view(torch.int32).add_(0x01010101)
            num_bytes += view(pool, layer).numel() + 4 * scales(pool, layer).numel()
    assert int((pool == 1).sum()) == num_bytes
    assert int((pool == 0).sum()) == pool.numel() - num_bytes


def test_a_token_in_int8_takes_little_more_than_half_of_bfloat16() -> None:
    """A head of 64 takes 64 bytes and a scale of 4: 1.88 times the blocks of bfloat16 fit, 3.76 those of float32."""
    layers = (LayerShape(2, 64, 64),) * 24
    layout = ScaledKVLayout(32, torch.int8, layers, torch.bfloat16)
    assert layout.bytes_per_token == 2 * 24 * 2 * (64 + 4)
    assert layout.block_bytes == 32 * layout.bytes_per_token
    assert KVLayout(32, torch.bfloat16, layers).block_bytes / layout.block_bytes == pytest.approx(128 / 68)


def test_one_block_is_one_contiguous_run_of_all_layers() -> None:
    """Copying the bytes of a block moves its K and V of every layer, and nothing of its neighbours."""
    layout = KVLayout(4, torch.float32, (LayerShape(2, 6, 10), LayerShape(1, 16, 16)))
    pool = layout.allocate(3).zero_()
    for layer in range(2):
        layout.key_view(pool, layer)[1] = 1 + layer
        layout.value_view(pool, layer)[1] = 11 + layer
    pool[2].copy_(pool[1])
    for layer in range(2):
        assert layout.key_view(pool, layer)[:, 0, 0, 0].tolist() == [0, 1 + layer, 1 + layer]
        assert layout.value_view(pool, layer)[:, 0, 0, 0].tolist() == [0, 11 + layer, 11 + layer]


def test_bytes_per_token_follow_the_formula() -> None:
    """Without padding a token costs 2 * layers * KV heads * head size * item size."""
    layout = KVLayout(32, torch.bfloat16, (LayerShape(2, 64, 64),) * 24)
    assert layout.bytes_per_token == 2 * 24 * 2 * 64 * 2
    assert layout.block_bytes == 32 * layout.bytes_per_token


@pytest.mark.parametrize("num_blocks", [1, 7])
def test_blocks_start_on_cache_lines(num_blocks: int) -> None:
    """Each row of a pool is aligned, and the pool is contiguous."""
    pool = KVLayout(1, torch.bfloat16, (LayerShape(1, 3, 5),)).allocate(num_blocks)
    assert pool.data_ptr() % ALIGNMENT == 0
    assert pool.stride(0) % ALIGNMENT == 0
    assert pool.is_contiguous()


def test_a_model_without_attention_has_blocks_without_bytes() -> None:
    """They are names for positions, in a pool of as many rows as any other."""
    layout = KVLayout(16, torch.float32, ())
    assert (layout.block_bytes, layout.bytes_per_token, layout.allocate(5).shape) == (0, 0, (5, 0))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: KVLayout(0, torch.float32, (LayerShape(1, 8, 8),)), "block_size"),
        (lambda: KVLayout(16, torch.int8, (LayerShape(1, 8, 8),)), "dtype"),
        (lambda: ScaledKVLayout(16, torch.bfloat16, (LayerShape(1, 8, 8),), torch.bfloat16), "dtype"),
        (lambda: ScaledKVLayout(16, torch.int8, (LayerShape(1, 8, 8),)), "query_dtype"),
        (lambda: LayerShape(0, 8, 8), "num_kv_heads"),
        (lambda: LayerShape(1, 8, -1), "value_head_size"),
        (lambda: KVLayout(16, torch.float32, (LayerShape(1, 8, 8),)).allocate(0), "num_blocks"),
    ],
)
def test_impossible_layouts_are_refused(make: Any, name: str) -> None:
    """A size that is no positive number is refused by name."""
    with pytest.raises(InvalidConfig, match=name):
        make()
