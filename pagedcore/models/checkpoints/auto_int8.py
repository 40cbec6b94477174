"""Chooses for each product of a model whether its rows become int8 like its weight, by the errors that this makes.

Owns the rule of the scheme that chooses: the product of a layer is computed in float32 and quantised, over rows
that ``product_rows.py`` makes up or that were seen, and the errors decide. Channels much larger than others are what
int8 rows cannot hold well (Dettmers et al. 2022, "LLM.int8()"). Weights of norms, and of the layers before, make such
channels; SmoothQuant (Xiao et al. 2022) removes them there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from pagedcore.config.schemes import scheme_of
from pagedcore.models.checkpoints.product_rows import AT_ONCE, Product, Read, find_products, weights_of
from pagedcore.models.checkpoints.stored_experts import expert_parts, put_experts
from pagedcore.models.linears.int8_embedding import quantize_embedding
from pagedcore.models.linears.packed_experts import matrices_of_experts
from pagedcore.models.linears.packed_linear import matrix_of
from pagedcore.models.linears.schemes import QUANTIZERS, quantize_per_output
from pagedcore.models.linears.stored_weight import (
    QuantizedWeight,
    StoredMatrices,
    StoredWeight,
    numbers_of,
    tensors_of,
)

_OF_BOTH: Final = scheme_of(8, quantizes_rows=True)
_OF_WEIGHTS: Final = scheme_of(8)
_MOST_ERROR: Final = 0.03
"""Largest error of a product, relative to its float32 result: the demo model's are 0.95 to 2.1 %."""


@torch.no_grad()
def choose(
    model: Any, read: Read | None = None, seen: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> dict[str, str]:
    """Return a scheme for each linear layer, by name; layers that are not named keep their number format.

    A product's weight stays as it is where int8 weights alone make an error of more than 3 %; its rows do where int8 of
    both does. Layers that share their rows are one product and follow the largest of their errors, and so do the gates
    and ups of all experts of a layer, and their downs. Layers of experts are named as ``stored_experts.py`` says.

    Args:
        model: of a causal language model; memory is not looked at if there is ``read``.
        read: returns its weights; ``None``: those in its memory.
        seen: rows [n, in] that modules were given, by ``Product.reads``; where there are none they are made up.
    """
    read = weights_of(model) if read is None else read
    chosen: dict[str, str] = {}
    for product in find_products(model, read, seen):
        if scheme := _scheme_of(product, read):
            chosen |= dict.fromkeys(product.layers, scheme)
    return chosen


@torch.no_grad()
def apply(model: Any) -> None:
    """Put stored weights in the place of the matrices of a model on the CPU, and int8 in that of its embedding."""
    chosen, head = choose(model), name_of_head(model)
    if head in chosen:
        quantize_embedding(model, QUANTIZERS[chosen[head]], chosen[head])
    for name, module in list(model.named_modules()):
        if name in chosen and (isinstance(module.weight, nn.Parameter) or module.weight.decode is not None):
            _replace_linear(model, name, chosen[name])
        for (kind, parts), matrices in zip(expert_parts(module).items(), matrices_of_experts(module), strict=False):
            if scheme := chosen.get(f"{name}.0.{parts[0]}"):
                put_experts(module, kind, StoredMatrices(_stored(one.detach(), scheme) for one in matrices))


def modules_read(model: Any) -> set[str]:
    """Return the names of the modules whose inputs decide, for ``seen`` of ``choose``; no weight is looked at."""
    return {product.reads for product in find_products(model, weights_of(model), {})}


def name_of_head(model: Any) -> str:
    """Return the name of a model's output layer."""
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), "")


def _replace_linear(model: Any, name: str, scheme: str) -> None:
    """Put a stored weight in the place of a layer's; a layer with a transposed matrix becomes a linear layer."""
    module: Any = model.get_submodule(name)
    matrix: Any = matrix_of(module)
    if type(module) is not nn.Linear:
        parent, _, last = name.rpartition(".")
        linear: Any = nn.Linear(matrix.shape[1], matrix.shape[0], device="meta").train(module.training)
        linear.bias, module = module.bias, linear
        setattr(model.get_submodule(parent), last, linear)
    del module.weight
    module.weight = _stored(matrix.detach(), scheme)


def _scheme_of(product: Product, read: Read) -> str:
    """Return the scheme of a product's layers; "" for none."""
    errors, num_inputs = list[tuple[float, float]](), 0
    for weights, make_rows in product.inputs:
        rows = make_rows()
        num_inputs = rows.shape[1]
        errors += [_errors(read(weight), rows) for weight in weights]
    of_weights, of_both = (max(kind) for kind in zip(*errors, strict=True))
    if of_weights > _MOST_ERROR or not QUANTIZERS[_OF_WEIGHTS].can_quantize(num_inputs):
        return ""
    takes_rows = of_both <= _MOST_ERROR and QUANTIZERS[_OF_BOTH].can_quantize(num_inputs)
    return _OF_BOTH if takes_rows else _OF_WEIGHTS


def _stored(weight: Any, scheme: str) -> StoredWeight:
    shape = weight.shape[0], weight.shape[1]
    return StoredWeight(scheme, shape, weight.dtype, 1, tensors_of(weight),
                        lambda: QuantizedWeight(*quantize_per_output(numbers_of(weight)), None))


def _errors(weight: torch.Tensor, rows: torch.Tensor) -> tuple[float, float]:
    """Return the relative errors of a product with int8 weights, and with int8 rows too.

    Numbers that are not finite are an error without bound.
    """
    scales = rows.abs().amax(1, keepdim=True) / 127
    in_int8 = (rows / scales.clamp_min(1e-30)).round() * scales
    sums, at_once = torch.zeros(3, dtype=torch.float64), max(1, AT_ONCE // weight.shape[1])
    for part in torch.split(weight, at_once):
        values, by_output = quantize_per_output(part)
        exact, quantised = rows @ part.float().T, values.float() * by_output
        for number, result in enumerate((torch.zeros(()), rows @ quantised.T, in_int8 @ quantised.T)):
            sums[number] += (exact - result).double().square().sum()
    if not sums.isfinite().all():
        return torch.inf, torch.inf
    exact_sum, *errors = sums.tolist()
    of_weights, of_both = ((error / max(exact_sum, 1e-300)) ** 0.5 for error in errors)
    return of_weights, of_both
