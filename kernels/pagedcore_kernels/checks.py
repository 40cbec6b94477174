"""Checks that every attention backend makes of the tensors it is given, before it trusts their addresses."""

from __future__ import annotations

import torch

from pagedcore_kernels.errors import InternalError, InvalidConfig
from pagedcore_kernels.layout import BlockLayout
from pagedcore_kernels.step_plan import StepPlan


def check_pool(layout: BlockLayout, pool: torch.Tensor) -> None:
    """Refuse a pool that ``layout.allocate`` could not have returned."""
    if pool.dtype != torch.uint8 or pool.dim() != 2 or pool.shape[1] != layout.block_bytes:
        raise InternalError(
            f"KV pool: got {pool.dtype} of shape {tuple(pool.shape)}, expected uint8 [blocks, {layout.block_bytes}]."
        )
    if not pool.is_contiguous():
        raise InternalError(f"KV pool: strides are {pool.stride()}, expected one block right after another.")


def check_key_value(layout: BlockLayout, layer: int, key: torch.Tensor, value: torch.Tensor, plan: StepPlan) -> None:
    """Refuse K or V that do not fit the layer and the planned batch."""
    shape = layout.layers[layer]
    _check("key", key, (plan.num_tokens, shape.num_kv_heads, shape.key_head_size), layout.model_dtype)
    _check("value", value, (plan.num_tokens, shape.num_kv_heads, shape.value_head_size), layout.model_dtype)


def check_query(
    layout: BlockLayout, layer: int, query: torch.Tensor, plan: StepPlan, sinks: torch.Tensor | None
) -> None:
    """Refuse a query or sinks that do not fit the layer and the planned batch."""
    shape = layout.layers[layer]
    heads = query.shape[1] if query.dim() == 3 else 0
    if heads == 0 or heads % shape.num_kv_heads:
        raise InternalError(
            f"query: {heads} heads in shape {tuple(query.shape)}, expected [T, H, D] with H a multiple of "
            f"{shape.num_kv_heads}."
        )
    _check("query", query, (plan.num_tokens, heads, shape.key_head_size), layout.model_dtype)
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise InternalError(f"sinks: shape {tuple(sinks.shape)}, expected [{heads}].")


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape:
        raise InternalError(f"{name}: shape {tuple(tensor.shape)}, expected {shape}.")
    if tensor.dtype != dtype:
        raise InvalidConfig(f"{name}: {tensor.dtype}, but the KV pool is for {dtype}; give both the same dtype.")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise InternalError(f"{name}: stride {tensor.stride(-1)} in the last dimension, expected 1.")
