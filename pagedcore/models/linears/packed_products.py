"""Products of linear layers as a file describes them, and made again of packed weights without a look at numbers.

Owns the three kinds of entries: a packed weight of the kernels, one whose inputs are in another order, and several side
by side or in turn. An entry is plain data; its tensors have names of their own. Read ``stored_weight.py`` for the
products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from pagedcore.errors import ModelNotSupported
from pagedcore.models.linears.stored_weight import JoinedMatmul, ReorderedMatmul, shares_of
from pagedcore.protocols import Matmul
from pagedcore_kernels.cpu.matmul import packed, packed_grouped, packed_int8
from pagedcore_kernels.cpu.matmul.packed_weight import PackedWeight
from pagedcore_kernels.cpu.matmul.product import PackedProduct
from pagedcore_kernels.errors import InternalError as KernelError

_PRODUCTS: Final[Mapping[str, type[PackedProduct]]] = {
    packed.LAYOUT: packed.PackedMatmul, packed_int8.LAYOUT: packed_int8.PackedInt8Matmul,
    packed_grouped.LAYOUT: packed_grouped.PackedGroupedMatmul,
}
LAYOUT_VERSIONS: Final[Mapping[str, int]] = {
    module.LAYOUT: module.LAYOUT_VERSION for module in (packed, packed_int8, packed_grouped)
}
"""Of each arrangement of a packed weight."""
_TENSORS: Final = {packed.LAYOUT: ("panels",), packed_int8.LAYOUT: ("panels", "scales", "corrections"),
                   packed_grouped.LAYOUT: ("panels",)}  # fmt: skip
_MOST_PARTS: Final = 16
"""Products side by side: of queries, keys and values, or of a gate and an up."""

Entry = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def describe_product(product: Any, name: str) -> tuple[Entry, Tensors]:
    """Return what a file says of a product, and the tensors that it holds, whose names begin with ``name``.

    Raises:
        ModelNotSupported: the product is none of those of this package.
    """
    if isinstance(product, JoinedMatmul):
        described = [describe_product(part, f"{name}#{number}") for number, part in enumerate(product.products)]
        turns = {"alternates": True} if product.alternates else {}
        return ({"parts": [entry for entry, _ in described], **turns},
                {key: tensor for _, tensors in described for key, tensor in tensors.items()})  # fmt: skip
    if isinstance(product, ReorderedMatmul):
        entry, tensors = describe_product(product.product, name)
        return {**entry, "is_reordered": True}, {**tensors, f"{name}:order": product.order}
    if not isinstance(product, PackedProduct):
        raise ModelNotSupported(f"model: its products ({type(product).__name__}) are none that a file can hold.")
    weight = product.packed
    entry = {"layout": weight.layout, "outputs": weight.num_outputs, "inputs": weight.num_inputs,
             "rows": str(product.weight.dtype).removeprefix("torch."), "facts": dict(weight.facts)}  # fmt: skip
    return entry, {f"{name}:{own}": tensor for own, tensor in weight.tensors.items()}


def shows_rows(entry: Any) -> bool:
    """Whether the product of an entry shows the rows of its weight, as ``stored_weight.rows_of`` needs it."""
    if not isinstance(entry, dict) or "parts" in entry or entry.get("is_reordered"):
        return False
    facts = entry.get("facts")
    is_by_output = isinstance(facts, dict) and (facts.get("bits"), facts.get("groups")) == (8, 1)
    return entry.get("layout") != packed_grouped.LAYOUT or is_by_output


def product_of(
    entry: Any, name: str, shape: tuple[int, int], bias: torch.Tensor | None, tensor: Callable[[str], torch.Tensor]
) -> Matmul:
    """Return the product of an entry whose tensors ``tensor`` returns by name, mapped; see ``describe_product``.

    Raises:
        ModelNotSupported: the entry is none, or not of this shape [out, in].
    """
    if isinstance(entry, dict) and "parts" in entry and entry.keys() <= {"parts", "alternates"}:
        return _joined(entry["parts"], name, shape, bias, tensor, alternates=entry.get("alternates") is True)
    entry = dict(entry) if isinstance(entry, dict) else {}
    is_reordered, layout, facts = entry.pop("is_reordered", False), entry.get("layout"), entry.get("facts")
    is_known = entry.keys() == {"layout", "outputs", "inputs", "rows", "facts"} and isinstance(layout, str)
    is_known = is_known and layout in _TENSORS and entry["rows"] in ("float32", "bfloat16")
    if not is_known or (entry["outputs"], entry["inputs"]) != shape or not isinstance(facts, dict):
        raise ModelNotSupported(f"model: its packed weight {name[:80]!r} is {str(entry)[:200]}, needed is {shape}.")
    tensors = {own: tensor(f"{name}:{own}") for own in _TENSORS[layout]}
    try:
        weight = PackedWeight(layout, *shape, tensors, facts, is_mapped=True)
        product: Matmul = _PRODUCTS[layout].of_packed(weight, bias, getattr(torch, entry["rows"]))
    except KernelError as error:
        raise ModelNotSupported(f"model: its packed weight {name[:80]!r} cannot be used: {error}") from error
    if not is_reordered:
        return product
    order = tensor(f"{name}:order")
    # Safety: rows are read by it.
    if order.dtype != torch.int64 or order.shape != shape[1:] or not 0 <= order.min() <= order.max() < shape[1]:
        raise ModelNotSupported(f"model: its packed weight {name[:80]!r} has an order that is none of its inputs.")
    return ReorderedMatmul(product, order)


def _joined(
    entries: Any, name: str, shape: tuple[int, int], bias: torch.Tensor | None, tensor: Callable[[str], torch.Tensor],
    *, alternates: bool,
) -> Matmul:
    is_list = isinstance(entries, list) and 1 < len(entries) <= _MOST_PARTS
    sizes: list[Any] = [one.get("outputs") if isinstance(one, dict) else None for one in entries] if is_list else []
    is_known = bool(sizes) and all(type(size) is int and size > 0 for size in sizes) and sum(sizes) == shape[0]
    if not is_known or (alternates and len(set(sizes)) > 1):
        raise ModelNotSupported(f"model: its packed weight {name[:80]!r} is of parts that are not {shape} together.")
    biases = shares_of(bias, sizes, alternates=alternates)
    return JoinedMatmul([
        product_of(one, f"{name}#{number}", (size, shape[1]), share, tensor)
        for number, (one, size, share) in enumerate(zip(entries, sizes, biases, strict=True))
    ], alternates=alternates)
