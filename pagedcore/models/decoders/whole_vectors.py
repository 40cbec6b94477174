"""Functions of torch that compute the last elements of a tensor in other bits, called so that there are no last ones.

Torch computes sigmoid, silu, softplus and some others with vectors, and what fills no vector at the end of a tensor, or
of a thread's share of it, one by one in another way. Where a row has a number of elements that vectors do not divide,
such as one for each chosen expert, whether a row meets that end depends on the rows beside it.

Owns the list of these functions, the search for modules that call one on such rows, and what these modules do instead.
Rows of whole vectors need nothing, and modules that have only those are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from pagedcore.models.linears.packed_experts import PackedExperts
from pagedcore.models.linears.packed_linear import VECTOR

_FUNCTIONS: Final = frozenset({
    torch.sigmoid, torch.Tensor.sigmoid, torch.special.expit, nn.functional.silu, nn.functional.softplus,
    nn.functional.gelu, nn.functional.mish, nn.functional.elu, nn.functional.celu, nn.functional.selu, torch.celu,
    torch.selu, torch.exp2, torch.Tensor.exp2, torch.special.exp2,
})
"""Measured on x86 processors with AVX2 and AVX-512; exp, tanh, softmax, cos and the like have no such ends."""
_FUNCTIONS_IN_HALVES: Final = frozenset({torch.rsqrt, torch.Tensor.rsqrt})
"""The same in bfloat16 and float16 alone."""
_SHARE: Final = 32768
"""Torch gives no thread a smaller part of a tensor."""


@contextmanager
def calls_seen(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Note which modules inside ``model`` call such a function on rows of broken vectors, in the ``with`` block."""
    active, found = list[nn.Module](), dict[int, nn.Module]()
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda module, _: active.append(module), prepend=True))
        handles.append(module.register_forward_hook(lambda *_: _drop_last(active), always_call=True))
    seen = list[nn.Module]()
    try:
        with _Watch(lambda: found.setdefault(id(active[-1]), active[-1])):
            yield seen
        # Why without experts: they have rows to spare already.
        seen += [module for module in found.values() if not isinstance(module, PackedExperts)]
    finally:
        for handle in handles:
            handle.remove()


def complete_vectors(module: Any) -> None:
    """Let a module's forward, and what it calls, give a row the same bits whatever rows are beside it."""
    forward = module.forward

    @wraps(forward)
    def forward_in_whole_vectors(*args: Any, **kwargs: Any) -> Any:
        with _WholeVectors():
            return forward(*args, **kwargs)

    module.forward = forward_in_whole_vectors


def in_whole_vectors(function: Callable[..., torch.Tensor], rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return what ``function`` makes of each element of ``rows``, with vectors alone, or with single elements alone."""
    if _has_gaps(rows):
        # Why: then torch goes row by row, and all rows have the same end, unless a thread's share begins within one.
        return _in_shares(lambda part: function(part, *args, **kwargs), rows)
    flat = nn.functional.pad(rows.reshape(-1), (0, -rows.numel() % VECTOR))
    parts = [function(part, *args, **kwargs) for part in torch.split(flat, _SHARE)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[: rows.numel()].view(rows.shape)


def _in_shares(function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Call ``function`` with whole rows, as many at a time as one thread computes."""
    dimension = next((one for one, size in enumerate(rows.shape[:-1]) if size > 1), None)
    if rows.numel() <= _SHARE or dimension is None:
        return function(rows)
    count = max(1, rows.shape[dimension] * _SHARE // rows.numel())
    parts = torch.split(rows, count, dimension)
    return torch.cat([_in_shares(function, part) for part in parts], dimension)


class _WholeVectors(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = in_whole_vectors if args and _has_ends(function, args[0]) else _call
        return called(function, *args, **(kwargs or {}))


class _Watch(TorchFunctionMode):
    """Calls ``note`` for each call whose result may depend on the number of rows."""

    def __init__(self, note: Callable[[], Any]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and _has_ends(function, args[0]) and args[0].ndim and args[0].shape[-1] % VECTOR:
            self._note()
        return function(*args, **(kwargs or {}))


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _has_ends(function: Any, rows: Any) -> bool:
    if function in _FUNCTIONS:
        return True
    return function in _FUNCTIONS_IN_HALVES and rows.dtype != torch.float32


def _has_gaps(rows: torch.Tensor) -> bool:
    """Whether something lies between one row and the next, so that torch cannot take them for one."""
    return rows.ndim > 1 and rows.stride(-1) == 1 and rows.stride(-2) > rows.shape[-1]


def _drop_last(active: list[nn.Module]) -> None:
    active.pop()
