"""The matrices of mixtures of experts under the names that files have for each expert's layers.

Owns these names, and the place where transformers has a parameter [experts, out, in] of all experts: a layer
``experts.0.gate_proj`` is the first half of the outputs that ``experts.gate_up_proj[0]`` has. A parameter is quantised
for all experts of a layer or for none; the two parameters of a layer may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import torch
from torch import nn

from pagedcore.models.checkpoints.tensor_files import FLOATS, TensorFiles
from pagedcore.models.linears.packed_experts import matrices_of_experts
from pagedcore.models.linears.stored_weight import StoredMatrices, StoredWeight, joined, refusal

Shape = tuple[int, int]
Parts = Mapping[str, tuple[str, ...]]
"""What files hold of each of the two parameters of an experts module."""
GATED: Final[Parts] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The parts of experts with a gate."""
_PLAIN: Final[Parts] = {"up_proj": ("up_proj",), "down_proj": ("down_proj",)}


def expert_parts(experts: Any) -> Parts:
    """Return the parts of a module's experts, which may have no gate; of any other module as if there were one."""
    return GATED if vars(experts).get("has_gate", True) else _PLAIN


class NamedTensors(Protocol):
    """What files hold, by transformers' names of tensors."""

    def __contains__(self, name: str) -> bool:
        """Return whether there is such a tensor."""

    def expect(self, name: str, shape: tuple[int, ...], *formats: str) -> torch.Tensor:
        """Return a tensor of this shape and of one of these formats."""


def replace_experts(
    model: nn.Module, files: NamedTensors, weight_of: Callable[[str, Shape], StoredWeight | None]
) -> int:
    """Put what the files hold of each expert in the place of the parameters of all; return how many were quantised.

    Args:
        model: a tree without memory.
        files: its tensors.
        weight_of: returns a layer's weight by its name and shape, or ``None`` if the files hold it as numbers.

    Raises:
        ModelNotSupported: some experts of a layer are quantised, or parts of one matrix in different ways.
    """
    num_replaced = 0
    for name, module in model.named_modules():
        if not (shapes := shapes_of_expert(module)):
            continue
        num_experts = len(module.down_proj)
        for kind, parts in expert_parts(module).items():
            # Safety: a configuration may name more experts than files have; the first that is missing ends this.
            experts = (f"{name}.{number}" for number in range(num_experts))
            some = {part: shapes[part] for part in parts}
            if weight_of(f"{name}.0.{parts[0]}", shapes[parts[0]]) is not None:
                put_experts(module, kind, StoredMatrices(_stored(one, some, weight_of) for one in experts))
                num_replaced += 1
            elif f"{name}.0.{parts[0]}.weight" in files:
                matrices = torch.stack([_numbers(one, some, files) for one in experts])
                put_experts(module, kind, nn.Parameter(matrices.to(module.down_proj.dtype), requires_grad=False))
    return num_replaced


def shapes_of_expert(module: Any) -> dict[str, Shape]:
    """Return the layers [out, in] that files have for each of a module's experts; none for any other module."""
    matrices = matrices_of_experts(module)
    if not matrices or module.is_transposed or module.has_bias or not module.is_concatenated:
        return {}
    return {
        part: (matrix.shape[1] // len(parts), matrix.shape[2])
        for matrix, parts in zip(matrices, expert_parts(module).values(), strict=True) for part in parts
    }


def layers_of_experts(model: nn.Module) -> dict[str, Shape]:
    """Return the layers [out, in] of all experts of a model, by the names of files in the way of its modules."""
    return {
        f"{name}.{number}.{part}": shape
        for name, module in model.named_modules() if (shapes := shapes_of_expert(module))
        for number in range(len(module.get_parameter("down_proj"))) for part, shape in shapes.items()
    }


def require_last_experts(model: nn.Module, files: TensorFiles) -> None:
    """Refuse files without the last of the experts that a model has; ``ModelNotSupported``.

    Safety: a configuration may name more experts than there is memory for their names.
    """
    for name, module in model.named_modules():
        if shapes := shapes_of_expert(module):
            last = len(module.get_parameter("down_proj")) - 1
            files.expect(f"{name}.{last}.down_proj.weight", shapes["down_proj"], *FLOATS)


def weight_of_layer(model: nn.Module, layer: str) -> torch.Tensor:
    """Return the weight [out, in] of a linear layer, or of one of an expert's by its name, of a model with weights."""
    expert, _, part = layer.rpartition(".")
    name, _, number = expert.rpartition(".")
    if number.isdigit() and shapes_of_expert(experts := model.get_submodule(name)):
        kind, parts = next((kind, parts) for kind, parts in expert_parts(experts).items() if part in parts)
        matrix = experts.get_parameter(kind)[int(number)]
        return matrix.detach().chunk(len(parts))[parts.index(part)]
    return model.get_submodule(layer).get_parameter("weight").detach()


def put_experts(module: Any, kind: str, weight: StoredMatrices | nn.Parameter) -> None:
    """Replace one parameter of an experts module, which computes expert by expert from now on."""
    delattr(module, kind)
    setattr(module, kind, weight)
    if (config := vars(module).get("config")) is not None:
        config._experts_implementation = "eager"


def _stored(
    name: str, shapes: dict[str, Shape], weight_of: Callable[[str, Shape], StoredWeight | None]
) -> StoredWeight:
    parts = []
    for part, shape in shapes.items():
        if (weight := weight_of(f"{name}.{part}", shape)) is None:
            raise refusal(f"{name}.{part} is not quantised, and others of its layer are")
        parts.append(weight)
    is_ordered = any(weight.order is not None for weight in parts)
    if is_ordered and parts[0].layout != parts[-1].layout:
        raise refusal(f"{name}.gate_proj and {name}.up_proj have inputs in different orders")
    return parts[0] if len(parts) == 1 else joined(parts)


def _numbers(name: str, shapes: dict[str, Shape], files: NamedTensors) -> torch.Tensor:
    return torch.cat([files.expect(f"{name}.{part}.weight", shape, *FLOATS) for part, shape in shapes.items()])
