"""Mixtures of experts in a quantised checkpoint, which holds each expert's layers under names of their own.

Owns these names, and the place where transformers has a parameter [experts, out, in] of all of them: a layer
``experts.0.gate_proj`` is the first half of the outputs that ``experts.gate_up_proj[0]`` has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pagedcore.models.cpu.packed_experts import matrices_of_experts
from pagedcore.models.quantization.stored_weight import StoredMatrices, StoredWeight, joined, refusal
from pagedcore.models.quantization.tensor_files import FLOATS, TensorFiles

Shape = tuple[int, int]


def replace_experts(
    model: nn.Module, files: TensorFiles, weight_of: Callable[[str, Shape], StoredWeight | None]
) -> int:
    """Put what the files hold of each expert in the place of the parameters of all; return how many were replaced.

    Args:
        model: a tree without memory.
        files: its tensors.
        weight_of: returns a layer's weight by its name and shape, or ``None`` if the files hold it as numbers.

    Raises:
        ModelNotSupported: some experts of a layer are quantised, or parts of one expert in different ways.
    """
    num_replaced = 0
    for name, module in model.named_modules():
        if not (shapes := shapes_of_expert(module)):
            continue
        num_experts = len(module.gate_up_proj)
        if weight_of(f"{name}.0.gate_proj", shapes["gate_proj"]) is not None:
            experts = [_stored(f"{name}.{number}", shapes, weight_of) for number in range(num_experts)]
            _put(module, *(StoredMatrices(kind) for kind in zip(*experts, strict=True)))
            num_replaced += 1
        elif f"{name}.0.gate_proj.weight" in files:
            numbers = [_numbers(f"{name}.{number}", shapes, files) for number in range(num_experts)]
            _put(module, *(nn.Parameter(torch.stack(kind).to(module.gate_up_proj.dtype), requires_grad=False)
                           for kind in zip(*numbers, strict=True)))  # fmt: skip
    return num_replaced


def shapes_of_expert(module: Any) -> dict[str, Shape]:
    """Return the layers [out, in] that files have for each of a module's experts; none for any other module."""
    matrices = matrices_of_experts(module)
    if not matrices or module.is_transposed or module.has_bias or not module.is_concatenated:
        return {}
    (_, num_outputs, num_inputs), (_, *of_down) = matrices[0].shape, matrices[1].shape
    gate_shape = num_outputs // 2, num_inputs
    return {"gate_proj": gate_shape, "up_proj": gate_shape, "down_proj": (of_down[0], of_down[1])}


def layers_of_experts(model: nn.Module) -> dict[str, Shape]:
    """Return the layers [out, in] of all experts of a model, by the names of files in the way of its modules."""
    return {
        f"{name}.{number}.{part}": shape
        for name, module in model.named_modules() if (shapes := shapes_of_expert(module))
        for number in range(len(module.get_parameter("gate_up_proj"))) for part, shape in shapes.items()
    }


def _stored(
    name: str, shapes: dict[str, Shape], weight_of: Callable[[str, Shape], StoredWeight | None]
) -> tuple[StoredWeight, StoredWeight]:
    parts = []
    for part, shape in shapes.items():
        if (weight := weight_of(f"{name}.{part}", shape)) is None:
            raise refusal(f"{name}.{part} is not quantised, and others of its layer are")
        parts.append(weight)
    if parts[0].layout != parts[1].layout:
        raise refusal(f"{name}.gate_proj and {name}.up_proj have inputs in different orders")
    return joined(parts[:2]), parts[2]


def _numbers(name: str, shapes: dict[str, Shape], files: TensorFiles) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up, down = (files.expect(f"{name}.{part}.weight", shape, *FLOATS) for part, shape in shapes.items())
    return torch.cat([gate, up]), down


def _put(module: Any, gate_up: Any, down: Any) -> None:
    """Replace the parameters of an experts module, which computes expert by expert from now on."""
    del module.gate_up_proj, module.down_proj
    module.gate_up_proj, module.down_proj = gate_up, down
    module.config._experts_implementation = "eager"
