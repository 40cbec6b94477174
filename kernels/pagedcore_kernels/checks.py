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


def check_convolution(
    layout: BlockLayout, layer: int, output: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor,
    plan: StepPlan,
) -> None:  # fmt: skip
    """Refuse rows of a convolution, its output, weight or bias that do not fit the layer and the planned batch."""
    channels = layout.layers[layer].value_head_size
    _check("rows", rows, (plan.num_tokens, 3 * channels), layout.model_dtype)
    _check("output", output, (plan.num_tokens, channels), layout.model_dtype)
    if not output.is_contiguous():
        raise InternalError("convolution: the output is expected in one piece.")
    of_channels = weight.dim() == 2 and weight.shape[1] == channels and tuple(bias.shape) == (channels,)
    if not of_channels or weight.dtype != torch.float32 or bias.dtype != torch.float32:
        raise InternalError(
            f"convolution: weight {weight.dtype} {tuple(weight.shape)} and bias {bias.dtype} {tuple(bias.shape)}, "
            f"expected float32 [taps, {channels}] and [{channels}]."
        )
    if not weight.is_contiguous() or not bias.is_contiguous():
        raise InternalError("convolution: weight and bias are expected in one piece each.")


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape:
        raise InternalError(f"{name}: shape {tuple(tensor.shape)}, expected {shape}.")
    if tensor.dtype != dtype:
        raise InvalidConfig(f"{name}: {tensor.dtype}, but the KV pool is for {dtype}; give both the same dtype.")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise InternalError(f"{name}: stride {tensor.stride(-1)} in the last dimension, expected 1.")
