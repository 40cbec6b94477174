"""Checks that every backend of states makes of the tensors it is given, before it trusts their addresses."""

from __future__ import annotations

import torch

from pagedcore_kernels.errors import InternalError, InvalidConfig
from pagedcore_kernels.state_layout import StateLayout, StatePart
from pagedcore_kernels.state_plan import StatePlan

ACTIVATIONS = ("none", "silu", "gates")
"""What a convolution may end with, or lie between."""


def check_state_pool(layout: StateLayout, pool: torch.Tensor) -> None:
    """Refuse a pool that ``layout.allocate`` could not have returned."""
    if pool.dtype != torch.uint8 or pool.dim() != 2 or pool.shape[1] != layout.state_bytes:
        raise InternalError(
            f"state pool: got {pool.dtype} of shape {tuple(pool.shape)}, expected uint8 [states, {layout.state_bytes}]."
        )
    if not pool.is_contiguous():
        raise InternalError(f"state pool: strides are {pool.stride()}, expected one state right after another.")


def check_convolution(
    part: StatePart, plan: StatePlan, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str
) -> None:
    """Refuse what ``StateBackend.convolve`` cannot be given."""
    if activation not in ACTIVATIONS:
        raise InternalError(f"activation: got {activation!r}, expected one of {', '.join(ACTIVATIONS)}.")
    if rows.dim() != 2 or weight.dim() != 2:
        raise InternalError(f"rows and weight: {rows.dim()} and {weight.dim()} dimensions, expected [T, C], [taps, C].")
    parts = 3 if activation == "gates" else 1
    channels, taps = rows.shape[1] // parts, len(weight)
    _check_rows("rows", rows, (plan.num_tokens, parts * channels), rows.dtype)
    _check_weight("weight", weight, (taps, channels))
    _check_weight("bias", bias, (channels,))
    _check_state(part, (taps - 1, channels), rows.dtype)


def check_delta_rule(
    part: StatePart,
    plan: StatePlan,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
) -> None:
    """Refuse what ``StateBackend.delta_rule`` cannot be given."""
    _check_heads(part, plan, query, key, value)
    heads = plan.num_tokens, value.shape[1]
    _check_weight("log_decay", log_decay, (*heads, query.shape[2]) if log_decay.dim() == 3 else heads)
    _check_weight("beta", beta, heads)


def check_decaying_attention(
    part: StatePart, plan: StatePlan, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor
) -> None:
    """Refuse what ``StateBackend.decaying_attention`` cannot be given."""
    _check_heads(part, plan, query, key, value)
    _check_weight("decay", decay, (value.shape[1],))


def check_mamba2(
    part: StatePart,
    plan: StatePlan,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
) -> None:
    """Refuse what ``StateBackend.mamba2`` cannot be given."""
    _check_heads(part, plan, c, b, x)
    heads = x.shape[1]
    _check_weight("dt", dt, (plan.num_tokens, heads))
    _check_weight("a", a, (heads,))
    _check_weight("d", d, (heads,))


def check_mamba1(
    part: StatePart,
    plan: StatePlan,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
) -> None:
    """Refuse what ``StateBackend.mamba1`` cannot be given."""
    if x.dim() != 2 or b.dim() != 2:
        raise InternalError(f"x and b: {x.dim()} and {b.dim()} dimensions, expected [T, C] and [T, N].")
    channels, size = x.shape[1], b.shape[1]
    _check_rows("x", x, (plan.num_tokens, channels), x.dtype)
    for name, rows in (("b", b), ("c", c)):
        _check_rows(name, rows, (plan.num_tokens, size), x.dtype)
    _check_weight("dt", dt, (plan.num_tokens, channels))
    _check_weight("a", a, (size, channels))
    _check_weight("d", d, (channels,))
    _check_state(part, (size, channels), torch.float32)


def check_linear_recurrence(part: StatePart, plan: StatePlan, x: torch.Tensor, decay: torch.Tensor) -> None:
    """Refuse what ``StateBackend.linear_recurrence`` cannot be given."""
    shape = plan.num_tokens, x.shape[-1]
    _check_rows("x", x, shape, x.dtype)
    _check_weight("decay", decay, shape)
    _check_state(part, (1, shape[1]), torch.float32)


def check_output(output: torch.Tensor, like: torch.Tensor) -> None:
    """Refuse an output that is not of the shape and format of ``like``, in one piece."""
    # Safety: kernels write raw memory.
    if output.shape != like.shape or output.dtype != like.dtype or not output.is_contiguous():
        raise InternalError(
            f"output: {output.dtype} of shape {tuple(output.shape)}, expected {like.dtype} {tuple(like.shape)} in one "
            "piece."
        )


def _check_heads(
    part: StatePart, plan: StatePlan, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Refuse queries and keys [T, Hk, Dk] and values [T, H, Dv] that do not fit each other, the step or the state."""
    if query.dim() != 3 or value.dim() != 3 or not query.shape[1] or value.shape[1] % query.shape[1]:
        raise InternalError(
            f"queries of shape {tuple(query.shape)} and values of shape {tuple(value.shape)}, expected [T, Hk, Dk] and "
            "[T, H, Dv] with H a multiple of Hk."
        )
    for name, rows in (("query", query), ("key", key)):
        _check_rows(name, rows, (plan.num_tokens, *query.shape[1:]), value.dtype)
    _check_rows("value", value, (plan.num_tokens, *value.shape[1:]), value.dtype)
    _check_state(part, (value.shape[1], query.shape[2], value.shape[2]), torch.float32)


def _check_state(part: StatePart, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if part != StatePart(shape, dtype):
        raise InternalError(f"state: the layout has {part.dtype} {part.shape}, expected {dtype} {shape}.")


def _check_rows(name: str, rows: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(rows.shape) != shape:
        raise InternalError(f"{name}: shape {tuple(rows.shape)}, expected {shape}.")
    if rows.dtype != dtype or dtype not in (torch.float32, torch.bfloat16):
        raise InvalidConfig(f"{name}: {rows.dtype}, allowed are float32 and bfloat16, the same for all of a layer.")
    if rows.stride(-1) != 1 and rows.shape[-1] > 1:
        raise InternalError(f"{name}: stride {rows.stride(-1)} in the last dimension, expected 1.")


def _check_weight(name: str, weight: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(weight.shape) != shape or weight.dtype != torch.float32 or not weight.is_contiguous():
        raise InternalError(
            f"{name}: {weight.dtype} {tuple(weight.shape)}, expected float32 {shape} in one piece."
        )
