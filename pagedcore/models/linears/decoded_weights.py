"""Quantised weights of files as numbers again, for devices that have no product of them.

Owns the way back from a ``StoredWeight`` to a parameter, one weight at a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from pagedcore.models.linears.stored_weight import StoredMatrices, StoredWeight

_AT_ONCE: Final = 2**22
"""Numbers that are float32 on the way, at a time."""


@torch.no_grad()
def decode_weights(model: Any) -> None:
    """Put parameters in the place of a model's stored weights, each number rounded once to their format.

    Weights that modules share stay shared.
    """
    known, has_experts = dict[int, nn.Parameter](), False
    for module in model.modules():
        for kind, weight in list(vars(module).items()):
            if not isinstance(weight, StoredWeight | StoredMatrices):
                continue
            if id(weight) not in known:
                numbers = _of_experts(module, weight) if isinstance(weight, StoredMatrices) else decoded(weight)
                known[id(weight)] = nn.Parameter(numbers, requires_grad=False)
            has_experts |= isinstance(weight, StoredMatrices)
            delattr(module, kind)
            setattr(module, kind, known[id(weight)])
    if has_experts:
        # Why: with stored matrices they are computed one by one.
        model.set_experts_implementation(model.get_correct_experts_implementation(None))


def decoded(weight: StoredWeight) -> torch.Tensor:
    """Return the numbers [out, in] of a weight that is not packed, in its number format."""
    if weight.decode is not None:
        return weight.decode()
    if weight.parts:
        parts = [decoded(part) for part in weight.parts]
        return torch.stack(parts, 1).flatten(0, 1) if weight.alternates else torch.cat(parts)
    (num_outputs, num_inputs), numbers = weight.shape, torch.empty(weight.shape, dtype=weight.dtype)
    read = None if weight.look_up is not None else weight.read()
    at_once = max(1, _AT_ONCE // max(1, num_inputs))
    for begin in range(0, num_outputs, at_once):
        some = slice(begin, min(begin + at_once, num_outputs))
        if read is None:
            assert weight.look_up is not None  # Invariant: as above
            numbers[some] = weight.look_up(torch.arange(some.start, some.stop))
            continue
        zeros = None if read.zeros is None else read.zeros[some]
        part = replace(read, values=read.values[some], scales=read.scales[some], zeros=zeros).numbers()
        numbers[some] = part if weight.order is None else torch.empty_like(part).index_copy_(1, weight.order, part)
    return numbers


def _of_experts(module: Any, matrices: StoredMatrices) -> torch.Tensor:
    """Return the numbers of all experts as their module has them, [experts, out, in] or [experts, in, out]."""
    num_experts, num_outputs, num_inputs = matrices.shape
    shape = (num_experts, num_inputs, num_outputs) if module.is_transposed else matrices.shape
    numbers = torch.empty(shape, dtype=matrices.dtype)
    for number, weight in enumerate(matrices):
        numbers[number] = decoded(weight).T if module.is_transposed else decoded(weight)
    return numbers
