"""Chooses for each product of a model whether its rows become int8 like its weight, from the weights alone.

Owns the rule of ``quantization="auto-int8"``: rows are made up that have, as far as weights show, the magnitudes of
what a layer sees; the product of a layer is computed in float32 and quantised, and the errors decide. Channels much
larger than others are what int8 rows cannot hold well (Dettmers et al. 2022, "LLM.int8()"). Weights of norms, and of
the layers before, make such channels; SmoothQuant (Xiao et al. 2022) removes them there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from pagedcore.errors import ModelNotSupported
from pagedcore.models.cpu.packed_experts import matrices_of_experts
from pagedcore.models.cpu.packed_linear import matrix_of
from pagedcore.models.families import FAMILIES, Family
from pagedcore.models.quantization.embedding import quantize_embedding
from pagedcore.models.quantization.schemes import SCHEMES, quantize_per_output
from pagedcore.models.quantization.stored_weight import QuantizedWeight, StoredWeight

NAME: Final = "auto-int8"
#: Largest error of a product, relative to its float32 result: the demo model's are 0.95 to 2.1 %.
_MOST_ERROR: Final = 0.03
_NUM_ROWS: Final = 32
#: Weights that are compared at a time, so that choosing takes 48 MiB besides a matrix.
_AT_ONCE: Final = 2**22

Read = Callable[[str], torch.Tensor]
"""``name -> tensor``: a parameter of the model."""


@dataclass(frozen=True, slots=True)
class _Product:
    """Linear layers that multiply the same rows."""

    layers: Sequence[str]
    make_rows: Callable[[], torch.Tensor]


@torch.no_grad()
def choose(model: Any, read: Read) -> dict[str, str]:
    """Return "w8a8" or "w8a16" for each linear layer, by name; layers that are not named keep their number format.

    A product's weight stays as it is where int8 weights alone make an error of more than 3 %; its rows do where int8 of
    both does. Layers that share their rows are one product and follow the largest of their errors.

    Args:
        model: of a causal language model; memory is not looked at.
        read: returns its parameters.

    Raises:
        ModelNotSupported: it has matrices that are no linear layers.
    """
    for name, module in model.named_modules():
        is_other = matrix_of(module) is not None and type(module) is not nn.Linear
        if is_other or matrices_of_experts(module):
            raise ModelNotSupported(
                f"model: {name} ({type(module).__name__}) is no linear layer, and {NAME!r} chooses for these only. "
                "Take 'w8a8' or 'w8a16'."
            )
    chosen: dict[str, str] = {}
    for product in _products(model, read):
        rows = product.make_rows()
        errors = [_errors(read(f"{layer}.weight"), rows) for layer in product.layers]
        of_weights, of_both = (max(kind) for kind in zip(*errors, strict=True))
        if of_weights <= _MOST_ERROR and SCHEMES["w8a16"].can_quantize(rows.shape[1]):
            is_int8 = of_both <= _MOST_ERROR and SCHEMES["w8a8"].can_quantize(rows.shape[1])
            chosen |= dict.fromkeys(product.layers, "w8a8" if is_int8 else "w8a16")
    return chosen


@torch.no_grad()
def apply(model: Any) -> None:
    """Put stored weights in the place of the linear layers of a model on the CPU, and int8 in that of its embedding.

    Raises:
        ModelNotSupported: as ``choose``.
    """
    chosen, head = choose(model, model.get_parameter), name_of_head(model)
    if head in chosen:
        quantize_embedding(model, SCHEMES[chosen[head]], chosen[head])
    for name, scheme in chosen.items():
        module = model.get_submodule(name)
        if isinstance(module.weight, nn.Parameter):
            stored = _stored(module.weight.detach(), scheme)
            del module.weight
            module.weight = stored


def name_of_head(model: Any) -> str:
    """Return the name of a model's output layer."""
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), "")


def _stored(weight: torch.Tensor, scheme: str) -> StoredWeight:
    shape = weight.shape[0], weight.shape[1]
    return StoredWeight(scheme, shape, weight.dtype, 1, [weight],
                        lambda: QuantizedWeight(*quantize_per_output(weight), None))


def _errors(weight: torch.Tensor, rows: torch.Tensor) -> tuple[float, float]:
    """Return the relative errors of a product with int8 weights, and with int8 rows too.

    Numbers that are not finite are an error without bound.
    """
    scales = rows.abs().amax(1, keepdim=True) / 127
    in_int8 = (rows / scales.clamp_min(1e-30)).round() * scales
    sums, at_once = torch.zeros(3, dtype=torch.float64), max(1, _AT_ONCE // weight.shape[1])
    for part in torch.split(weight, at_once):
        values, by_output = quantize_per_output(part)
        exact, quantised = rows @ part.float().T, values.float() * by_output
        for number, result in enumerate((torch.zeros(()), rows @ quantised.T, in_int8 @ quantised.T)):
            sums[number] += (exact - result).double().square().sum()
    exact_sum, *errors = sums.nan_to_num(torch.inf).tolist()
    of_weights, of_both = ((error / max(exact_sum, 1e-300)) ** 0.5 for error in errors)
    return of_weights, of_both


def _products(model: Any, read: Read) -> Iterator[_Product]:
    """Yield the products of a model; of an architecture that is not known every layer is one, with plain rows."""
    sizes = {name: module.in_features for name, module in model.named_modules() if type(module) is nn.Linear}
    family = FAMILIES.get(str(model.config.model_type))
    if family is not None and all(name.startswith("model.layers.") or name == "lm_head" for name in sizes):
        for number in range(model.config.num_hidden_layers):
            yield from _products_of_layer(f"model.layers.{number}", model.config, family, read)
        yield _Product(["lm_head"], lambda: _gaussian(sizes["lm_head"], 0) * _gain("model.norm", family, read))
        return
    for name, size in sizes.items():
        yield _Product([name], lambda size=size: _gaussian(size, 0))  # type: ignore[misc]


def _products_of_layer(layer: str, config: Any, family: Family, read: Read) -> Iterator[_Product]:
    before, _, between, _ = (f"{layer}.{name}" if name else "" for name in family.norms)
    qkv = [f"{layer}.self_attn.{name}" for name in family.qkv]
    gate_up = [f"{layer}.mlp.{name}" for name in family.gate_up]

    def normed(norm: str) -> torch.Tensor:
        return _gain(norm, family, read) if norm else torch.ones(config.hidden_size)

    def attended() -> torch.Tensor:
        """Rows of single tokens, whose attention is their own value."""
        num_inputs = read(f"{layer}.self_attn.o_proj.weight").shape[1]
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        size = num_inputs // num_heads
        value = read(f"{qkv[-1]}.weight")[-num_kv_heads * size :]
        spread = _spread(value, normed(before)).view(num_kv_heads, size)
        return _gaussian(num_inputs, 0) * spread.repeat_interleave(num_heads // num_kv_heads, 0).flatten()

    def gated() -> torch.Tensor:
        gain = normed(between)
        gate, up = torch.cat([_spread(read(f"{name}.weight"), gain) for name in gate_up]).chunk(2)
        rows = nn.functional.silu(_gaussian(len(gate), 0) * gate) * (_gaussian(len(up), 1) * up)
        return rows

    yield _Product(qkv, lambda: _gaussian(config.hidden_size, 0) * normed(before))
    yield _Product([f"{layer}.self_attn.o_proj"], attended)
    yield _Product(gate_up, lambda: _gaussian(config.hidden_size, 0) * normed(between))
    yield _Product([f"{layer}.mlp.down_proj"], gated)


def _gain(norm: str, family: Family, read: Read) -> torch.Tensor:
    """Return what a norm multiplies its channels by, float32."""
    return read(f"{norm}.weight").float() + (family.norm_offset or 0.0)


def _spread(weight: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Return the standard deviation of each output for independent inputs of these, float32 [out]."""
    parts = torch.split(weight, max(1, _AT_ONCE // weight.shape[1]))
    return torch.cat([(part.float() * gain).norm(dim=1) for part in parts])


def _gaussian(size: int, seed: int) -> torch.Tensor:
    """Return float32 [rows, size] of nearly normal numbers, the same on every machine: sums of twelve integers."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(_NUM_ROWS, size, dtype=torch.int64)
    for _ in range(12):
        total += torch.randint(0, 2**16, total.shape, generator=generator)
    return (total - 6 * (2**16 - 1)).float() / 2**16
