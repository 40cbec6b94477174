"""Mixtures of experts with packed weights: a row's result does not depend on which rows choose the same experts.

Owns ``PackedExperts``, which takes the place of an experts module of transformers, and ``RouterWeight``, which takes
the place of a router's matrix. Both rely on conventions of transformers: ``use_experts_implementation`` notes on a
module how its weights are laid out, and a class whose name ends in "Router" multiplies by ``F.linear`` alone; so do
those of ``expert_modules.py``. Modules that follow neither are left alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from pagedcore.execution.failures import is_out_of_memory
from pagedcore.models.linears.block_diagonal import has_blocks, pack_blocks
from pagedcore.models.linears.expert_modules import TopKRouter
from pagedcore.models.linears.packed_linear import (
    FASTEST,
    VECTOR,
    OnUnused,
    PackedLinear,
    holders_of_matrices,
    packable_weight,
)
from pagedcore.models.linears.stored_weight import StoredMatrices, tensors_of
from pagedcore.models.lora.slots import RowAdapters, adapters_now, new_room, present_adapters
from pagedcore.protocols import LinearFactory

_WEIGHTS: Final = {True: ("gate_up_proj", "down_proj"), False: ("up_proj", "down_proj")}
"""Names of the weights of experts that have a gate, and of those that have none."""


class PackedExperts(nn.Module):
    """The experts of one layer: each multiplies the rows that chose it, in products of two rows or more.

    Invariant: the outputs of a row's experts are added in the order in which the row's router names them.
    """

    def __init__(self, experts: Any, factory: LinearFactory, on_unused: OnUnused) -> None:
        """Pack the weights of ``experts``; it keeps its activation only."""
        super().__init__()
        self.experts, self.names = experts, _WEIGHTS[experts.has_gate]
        """``names`` are those of the parameters whose products are ``gate_up`` and ``down``."""
        self.gate_up, self.down = (_pack_each(experts, name, factory, on_unused) for name in self.names)
        self.takes_adapters = False
        """Whether its products may update rows: all of them, or none."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sums of the rows' experts [T, hidden]; arguments are called as transformers calls them.

        Args:
            hidden_states: [T, hidden].
            top_k_index: int64 [T, k]: the experts of each row.
            top_k_weights: [T, k], of any float format.
        """
        num_rows, top_k = top_k_index.shape
        chosen = top_k_index.flatten()
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=len(self.gate_up)).tolist()
        adapters = _adapters_of(order // top_k, counts) if self.takes_adapters else [None] * len(counts)
        gate_up = _multiply(self.gate_up, hidden_states[order // top_k], counts, adapters)
        # Why: with rows to spare at the end, torch's activation computes all others with vectors.
        spare = -(-VECTOR // gate_up.shape[1])
        gated = apply_gate(self.experts, nn.functional.pad(gate_up, (0, 0, 0, spare)))[: len(order)]
        outputs = _multiply(self.down, gated, counts, adapters)[order.argsort()].view(num_rows, top_k, -1)
        weighted = outputs * top_k_weights.unsqueeze(-1)
        # Why not sum(): torch promises no order of its additions.
        total = weighted[:, 0].float()
        for number in range(1, top_k):
            total = total + weighted[:, number]
        return total.to(hidden_states.dtype)


class RouterWeight:
    """What a router has in the place of its matrix: ``F.linear`` with it is a packed product, in float32.

    Conversions have no effect, and every other function of torch raises ``TypeError``.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, factory: LinearFactory) -> None:
        """Pack a weight [experts, hidden], and a bias [experts] that goes with it; neither is kept."""
        self.dtype, self.device = weight.dtype, weight.device
        self.product = PackedLinear(weight.float(), None if bias is None else bias.float(), factory)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Multiply; torch calls this in the place of its own functions."""
        if function is not nn.functional.linear:
            return NotImplemented
        rows, weight = args[:2]
        return weight.product(rows.float()).to(rows.dtype)

    def to(self, *_: Any) -> RouterWeight:
        """Return itself."""
        return self

    type = float = to


def pack_experts(
    model: nn.Module, *, linears: LinearFactory, routers: LinearFactory, on_unused: OnUnused
) -> tuple[PackedLinear, ...]:
    """Replace the experts, and the matrices of routers and of other gates, inside ``model``; return their products.

    Args:
        model: changed in place, one tensor of weights at a time.
        linears: makes the products of experts; modules of formats that it does not support are left alone.
        routers: makes those of gates.
        on_unused: as for ``pack_linears``.
    """
    packed: list[PackedLinear] = []
    for parent in list(model.modules()):
        if _is_router(parent, routers) and (product := _pack_router(parent, routers, on_unused)) is not None:
            packed.append(product)
        if has_blocks(parent, routers):
            packed += pack_blocks(parent, routers, on_unused)
        for name, child in list(parent.named_children()):
            if _has_experts(child, linears):
                experts = PackedExperts(child, linears, on_unused).train(child.training)
                packed += *experts.gate_up, *experts.down
                setattr(parent, name, experts)
    return tuple(packed)


def left_alone(model: nn.Module, linears: LinearFactory = FASTEST) -> tuple[str, ...]:
    """Return the types of modules with matrices that neither ``pack_experts`` nor ``pack_linears`` would replace."""
    return tuple(sorted({
        type(module).__name__ for module in holders_of_matrices(model)
        if packable_weight(module, linears) is None and not has_blocks(module, linears)
        and not _has_experts(module, linears) and not _is_router(module, linears)
    }))


def _multiply(
    products: Sequence[PackedLinear], rows: torch.Tensor, counts: list[int], adapters: Sequence[RowAdapters | None]
) -> torch.Tensor:
    """Multiply ``rows``, which lie expert by expert, so many for each, and have these adapters."""
    outputs = []
    for product, share, own in zip(products, torch.split(rows, counts), adapters, strict=True):
        if len(share):
            with present_adapters(own):
                outputs.append(product(share))
    return torch.cat(outputs)


def _adapters_of(rows: torch.Tensor, counts: list[int]) -> list[RowAdapters | None]:
    """Return the adapters of the rows of each expert; ``rows`` are numbers of the step's, expert by expert."""
    if (present := adapters_now()) is None:
        return [None] * len(counts)
    return [present.chosen(share, new_room) if len(share) else None for share in torch.split(rows, counts)]


def apply_gate(experts: Any, gate_up: torch.Tensor) -> torch.Tensor:
    """Return [T, inner] of what a module of experts makes of its first products [T, 2 * inner], in its own way; of
    [T, inner] where it has no gate.
    """
    # Why a private name: transformers has no other one for it, and a family may have a gate of its own.
    gated: torch.Tensor = experts._apply_gate(gate_up) if experts.has_gate else experts.act_fn(gate_up)
    return gated


def matrices_of_experts(module: Any) -> tuple[torch.Tensor, ...]:
    """Return the weights [experts, out, in] of a module that ``use_experts_implementation`` decorates, of a known kind,
    or ``StoredMatrices`` in their place; none of any other.
    """
    if not hasattr(module, "has_gate") or not hasattr(module, "_apply_gate") or module.has_post_expert_norm:
        return ()
    names = _WEIGHTS[module.has_gate]
    weights: Any = [vars(module).get(name, _own_parameters(module).get(name)) for name in names]
    if not all(one is not None and one.ndim == 3 for one in weights):
        return ()
    return tuple(one.transpose(1, 2) if module.is_transposed and not isinstance(one, StoredMatrices) else one
                 for one in weights)


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def _has_experts(module: Any, factory: LinearFactory) -> bool:
    matrices = matrices_of_experts(module)
    return bool(matrices) and all(factory.supports(one.dtype, one.shape[2]) for one in matrices)


def _pack_each(experts: Any, name: str, factory: LinearFactory, on_unused: OnUnused) -> Any:
    """Pack a weight [experts, out, in], or transposed, expert by expert, and free it."""
    stored = vars(experts).get(name)
    weight = experts.get_parameter(name) if stored is None else stored
    biases = experts.get_parameter(f"{name}_bias") if experts.has_bias else [None] * len(weight)
    matrices = weight.transpose(1, 2) if experts.is_transposed and stored is None else weight
    packed = [PackedLinear(matrix, bias, factory) for matrix, bias in zip(matrices, biases, strict=True)]
    names = (name, f"{name}_bias") if experts.has_bias else (name,)
    for tensor in (*tensors_of(weight), *[experts.get_parameter(used) for used in names[1:]]):
        on_unused(tensor)
    for used in names:
        delattr(experts, used)
        experts.register_parameter(used, None)
    return nn.ModuleList(packed)


def _is_router(module: nn.Module, factory: LinearFactory) -> bool:
    kind, weight = type(module), _own_parameters(module).get("weight")
    is_theirs = kind.__name__.endswith("Router") and kind.__module__.startswith("transformers.models.")
    is_known = is_theirs or kind is TopKRouter
    return is_known and weight is not None and weight.ndim == 2 and factory.supports(torch.float32, weight.shape[1])


def _pack_router(router: Any, factory: LinearFactory, on_unused: OnUnused) -> PackedLinear | None:
    """Replace the matrix of a router; ``None``: it cannot work without it, and has it still."""
    weight = router.weight
    del router.weight
    router.weight = packed = RouterWeight(weight, _own_parameters(router).get("bias"), factory)
    # Shape: a router takes rows, and some take a number for each expert beside them.
    num_experts, hidden_size = weight.shape
    others = [weight.new_zeros(num_experts)] * (len(inspect.signature(router.forward).parameters) - 1)
    try:
        router(weight.new_zeros(2, hidden_size), *others)
    except Exception as error:  # Why any: other versions of the class may do anything with their matrix.
        if is_out_of_memory(error):
            raise
        del router.weight
        router.weight = weight
        return None
    on_unused(weight)
    return packed.product
