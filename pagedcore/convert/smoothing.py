"""Moves outliers of activations into weights, so that int8 rows lose less: SmoothQuant (Xiao et al. 2022).

Owns which products of a fused family can be smoothed, the scales, and where they are folded. A product's input channel
``j`` is divided by ``s_j = max|X_j| ** 0.5 / max|W_j| ** 0.5`` (the paper's alpha is 0.5) and the weight's column
multiplied by it. The division costs nothing when the model runs: it is in the weight of the norm before the product,
in the rows of ``v_proj`` before ``o_proj``, and in those of ``up_proj`` before ``down_proj``, which are linear in what
they give. Products that read anything else, as of a residual without a norm, stay as they are.

All experts of a layer read one norm: their gates and ups have one scale for each channel, by which the columns of the
router are multiplied too, so that it chooses the same experts. The rows of an expert's up are divided for its own down.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from pagedcore.convert.activations import (
    OnProgress,
    Prompts,
    compute,
    format_of_weights,
    load_model,
    removed_after,
    require_finite,
)
from pagedcore.errors import ModelNotSupported
from pagedcore.models.attention.layers import AttentionLayer
from pagedcore.models.blueprint import tree_of
from pagedcore.models.checkpoints.pretrained import load_config
from pagedcore.models.checkpoints.stored_experts import weight_of_layer
from pagedcore.models.decoders.fused_match import NotFused, has_experts, recognise
from pagedcore.models.families.table import Family
from pagedcore.models.layouts import redirect_attention
from pagedcore.models.linears.packed_experts import apply_gate
from pagedcore.models.linears.schemes import QuantizedLinears

_ALPHA: Final = 0.5
_AT_ONCE: Final = 2**24
"""Numbers of a weight that are multiplied in float32 at a time: 64 MiB."""

Maxima = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Product:
    """Linear layers that read the same rows, and what makes these rows."""

    linears: tuple[str, ...]
    norm: str = ""
    """The norm whose result the rows are; "": none."""
    producer: str = ""
    """The linear layer whose last outputs the rows are linear in; "": none."""
    heads: tuple[int, int] = (1, -1)
    """How many groups of inputs read the same outputs of the producer, and how many outputs those are."""
    others: tuple[str, ...] = ()
    """Layers that read the rows too and are not quantised: routers."""
    experts: str = ""
    """The module that computes the layers, if they are an expert's."""


@dataclass(frozen=True, slots=True)
class Smoothing:
    """The factors of a model, by names of modules; without any it changes nothing."""

    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    """float64 [in], by linear layer: what its columns are multiplied by."""
    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    """float64 [out], by linear layer: what its rows and its bias are divided by."""
    norms: dict[str, torch.Tensor] = field(default_factory=dict)
    """The weight of each norm that products were folded into."""
    unsmoothed: tuple[str, ...] = ()
    """Names of the quantised linear layers that stay as they are; of experts, those of which no row was seen."""

    def scaled(self, name: str, tensor: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Return the parameter ``name`` of the smoothed model, in float32 or wider where it is another one.

        Args:
            name: of the parameter, as in a state dict.
            tensor: the parameter, or its rows from ``first`` on.
            first: the first of its rows.
        """
        module, _, last = name.rpartition(".")
        if module in self.norms:
            return self.norms[module].to(tensor)
        rows, columns = self.rows.get(module), self.columns.get(module)
        if rows is not None:
            divisor = rows[first : first + len(tensor)].to(torch.promote_types(tensor.dtype, torch.float32))
            tensor = tensor / (divisor[:, None] if last == "weight" else divisor)
        if columns is not None and last == "weight":
            tensor = tensor * columns.to(torch.promote_types(tensor.dtype, torch.float32))
        return tensor

    def quantize(
        self, linears: QuantizedLinears, layer: str, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantise the smoothed weight [out, in] of a layer, as ``linears`` does, without rounding it before."""
        if layer not in self.columns and layer not in self.rows:
            return linears.quantize(weight)
        size = max(1, _AT_ONCE // weight.shape[1])
        parts = [
            linears.quantize(self.scaled(f"{layer}.weight", weight[first : first + size], first))
            for first in range(0, len(weight), size)
        ]
        values, scales = (torch.cat(part) for part in zip(*parts, strict=True))
        return values, scales


def find_smoothing(
    source: str, prompts: Prompts, quantized: Collection[str], dtype: torch.dtype,
    on_progress: OnProgress = lambda done, total: None,
) -> Smoothing:
    """Run a model over prompts, one at a time, and return what smooths its quantised layers.

    Weights are mapped from the files and not copied, unless the files are of float16 or of another format than their
    configuration says; besides there are the activations of one prompt.

    Args:
        source: a directory.
        prompts: token ids, each in the vocabulary.
        quantized: names of linear layers.
        dtype: number format that the norms will have.
        on_progress: called with the number of prompts that are done, and of all.

    Raises:
        ModelNotSupported: it is no model of the fused decoder, or some of its layers do not attend.
        InvalidConfig: its weights cannot be loaded, or its activations or weights are not finite.
    """
    config = load_config(source)
    tree = tree_of(config, format_of_weights(config), trust_remote_code=False)
    family, place = _family_of(tree)
    products = list(_products(tree, family, place))
    model = load_model(source)
    inputs = input_maxima(model, products, prompts, on_progress)
    return smoothing_of(model, products, inputs, quantized, family.norm_offset or 0.0, dtype)


def _family_of(tree: Any) -> tuple[Family, AttentionLayer]:
    with torch.device("meta"), torch.inference_mode():
        layers, *_ = redirect_attention(tree)
    try:
        family = recognise(tree, layers).family
        if family.recurrence:
            raise NotFused("some of its layers do not attend")
    except NotFused as why:
        raise ModelNotSupported(
            f"calibration: only models of the fused decoder that attend in every layer are smoothed, and this is none: "
            f"{why}. Convert it without."
        ) from None
    return family, layers[0]


def _products(tree: Any, family: Family, place: AttentionLayer) -> Iterator[Product]:
    """Yield all products of a model of a family."""
    for number, block in enumerate(tree.model.layers):
        layer = f"model.layers.{number}."
        attention, mlp = (f"{layer}{name}." for name in ("self_attn", "mlp"))
        norm_in, _, norm_between, _ = (name and f"{layer}{name}" for name in family.norms)
        qkv, gate_up = [attention + name for name in family.qkv], [mlp + name for name in family.gate_up]
        yield Product(tuple(qkv), norm=norm_in)
        yield Product((f"{attention}o_proj",), producer=qkv[-1], heads=(place.num_kv_heads, place.value_head_size))
        if has_experts(block, family):
            yield from _products_of_experts(mlp, len(block.mlp.experts.down_proj), norm_between)
            continue
        yield Product(tuple(gate_up), norm=norm_between)
        yield Product((f"{mlp}down_proj",), producer=gate_up[-1])
    yield Product(("lm_head",), norm="model.norm")


def _products_of_experts(mlp: str, num_experts: int, norm: str) -> Iterator[Product]:
    experts = f"{mlp}experts"
    each = [f"{experts}.{number}." for number in range(num_experts)]
    yield Product(tuple(f"{one}{name}" for one in each for name in ("gate_proj", "up_proj")), norm=norm,
                  others=(f"{mlp}gate",))
    for one in each:
        yield Product((f"{one}down_proj",), producer=f"{one}up_proj", experts=experts)


@torch.inference_mode()
def input_maxima(
    model: Any, products: Sequence[Product], prompts: Prompts, on_progress: OnProgress
) -> dict[str, torch.Tensor]:
    """Return the largest magnitude of each input over all prompts, float64 [in], by the first layer of each product; an
    expert that no row chose has none.

    Raises:
        InvalidConfig: one is not finite.
    """
    found: dict[str, torch.Tensor] = {}

    def look(name: str, rows: torch.Tensor) -> None:
        largest = rows.detach().flatten(0, -2).abs().amax(0).double()
        found[name] = torch.maximum(found[name], largest) if name in found else largest

    def after(name: str, module: nn.Module, given: Any, output: torch.Tensor) -> None:
        look(name, output)

    def before(name: str, module: nn.Module, given: tuple[torch.Tensor]) -> None:
        look(name, given[0])

    def before_experts(name: str, experts: Any, given: tuple[torch.Tensor, ...]) -> None:
        rows, chosen = given[:2]
        for number in {*chosen.flatten().tolist()}:
            gate_up = nn.functional.linear(rows[(chosen == number).any(1)], experts.gate_up_proj[number])
            look(f"{name}.{number}.down_proj", apply_gate(experts, gate_up))

    hooks = [
        # Why at the norm: the output layer is asked for no logits.
        model.get_submodule(one.norm).register_forward_hook(partial(after, one.linears[0])) if one.norm
        else model.get_submodule(one.linears[0]).register_forward_pre_hook(partial(before, one.linears[0]))
        for one in products if not one.experts
    ]
    for name in {one.experts for one in products if one.experts}:
        hooks.append(model.get_submodule(name).register_forward_pre_hook(partial(before_experts, name)))
    with removed_after(hooks):
        for number, prompt in enumerate(prompts, 1):
            compute(model, prompt, torch.arange(0))
            on_progress(number, len(prompts))
    for name, largest in found.items():
        require_finite(largest, f"the activations before {name}")
    return found


def smoothing_of(
    model: Any, products: Sequence[Product], inputs: Maxima, quantized: Collection[str], norm_offset: float,
    dtype: torch.dtype,
) -> Smoothing:
    """Return the factors of a model's products, of whose layers all are quantised and that something can be folded in.

    Args:
        model: with its weights; they are read and not changed.
        products: of the model.
        inputs: as ``input_maxima`` returns them.
        quantized: names of linear layers.
        norm_offset: what norms add to their weight.
        dtype: number format that norms will have.

    Raises:
        InvalidConfig: a weight is not finite.
    """
    columns, rows, norms = dict[str, torch.Tensor](), dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    unsmoothed: list[str] = []
    for product in products:
        names, largest = product.linears, inputs.get(product.linears[0])
        can_fold = bool(product.norm or product.producer)
        if largest is None or not can_fold or not all(name in quantized for name in names):
            unsmoothed += [name for name in names if name in quantized]
            continue
        weight = torch.stack([_column_maxima(weight_of_layer(model, name), name) for name in names]).amax(0)
        if product.norm:
            scales = smooth_scales(largest, weight)
            old = model.get_submodule(product.norm).weight.detach().to(dtype)
            norms[product.norm], scales = _fold_into_norm(old, scales, norm_offset)
        else:
            num_groups, size = product.heads
            shape = (num_groups, -1, len(largest) if size == -1 else size)
            scales = smooth_scales(largest.view(shape).amax(1), weight.view(shape).amax(1))
            num_outputs = len(weight_of_layer(model, product.producer))
            rows[product.producer] = torch.ones(num_outputs, dtype=torch.float64)
            rows[product.producer][-scales.numel() :] = scales.flatten()
            scales = scales[:, None].expand(shape[0], len(largest) // scales.numel(), shape[2]).flatten()
        columns |= dict.fromkeys((*names, *product.others), scales)
    return Smoothing(columns, rows, norms, tuple(unsmoothed))


def smooth_scales(inputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return ``inputs ** alpha / weights ** (1 - alpha)``, divided by their geometric mean, of maxima of one shape.

    Rows and outputs have scales of their own, so that a common factor changes nothing but the size of what it is folded
    into. A channel without any activation or weight has the scale 1.
    """
    scales = inputs**_ALPHA / weights ** (1 - _ALPHA)
    is_used = (inputs > 0) & (weights > 0)
    if not is_used.any():
        return torch.ones_like(scales)
    return torch.where(is_used, scales / scales[is_used].log().mean().exp(), 1.0)


def _fold_into_norm(
    old: torch.Tensor, scales: torch.Tensor, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a norm's new weight, and the scales that its rounding leaves: the fold is as exact as the norm itself."""
    factors = old.double() + offset
    new = (factors / scales - offset).to(old.dtype)
    left = factors / (new.double() + offset)
    # Why: near -1 an offset of 1 leaves nothing of a weight.
    is_exact = left.isfinite() & (left > 0)
    return torch.where(is_exact, new, old), torch.where(is_exact, left, 1.0)


def _column_maxima(weight: torch.Tensor, name: str) -> torch.Tensor:
    least, largest = weight.aminmax(dim=0)
    maxima = torch.maximum(-least, largest).double()
    require_finite(maxima, f"the weights of {name}")
    return maxima
