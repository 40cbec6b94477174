"""The products of a model, and rows for each that have the magnitudes of what it sees, as far as weights show them.

Owns which layers multiply the same rows, and how rows are made up: for the families of ``families.py`` from the norm,
the values, or the gate and up before; for the experts of any architecture from their own gate and up; for layers that
read GPT-2's norms from these. For all others channels are alike. Rows that a model was seen to compute replace them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from pagedcore.models.attention.recurrences import kept_layers
from pagedcore.models.checkpoints.stored_experts import expert_parts
from pagedcore.models.families.table import FAMILIES, Family
from pagedcore.models.linears.packed_experts import apply_gate, matrices_of_experts
from pagedcore.models.linears.packed_linear import matrix_of
from pagedcore.models.linears.stored_weight import numbers_of

NUM_ROWS: Final = 32
AT_ONCE: Final = 2**22
"""Weights that are looked at together, so that choosing takes 48 MiB besides a matrix."""
_LAYER_NORMS: Final = {"attn.c_attn": "ln_1", "mlp.c_fc": "ln_2", "lm_head": "transformer.ln_f"}
"""Norms of GPT-2 by the ends of the names of layers that read them."""

Read = Callable[[str], torch.Tensor]
"""``name -> tensor``: a parameter, a linear layer's weight as [out, in]; "experts.down_proj.3": one expert's."""
MakeRows = Callable[[], torch.Tensor]
Seen = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Product:
    """Linear layers that are quantised alike: those that multiply the same rows, or one of each expert of a layer."""

    layers: Sequence[str]
    """Names of linear layers; those of experts as ``stored_experts.py`` has them."""
    reads: str
    """The module whose input the rows are, or are made of."""
    inputs: Sequence[tuple[Sequence[str], MakeRows]]
    """Names of weights, and what makes the float32 rows [n, in] of each of them."""


def weights_of(model: Any) -> Read:
    """Return what reads the weights of a model that has them in memory."""

    def read(name: str) -> torch.Tensor:
        parent, _, last = name.rpartition(".")
        if last.isdigit():
            experts, _, kind = parent.rpartition(".")
            module = model.get_submodule(experts)
            matrices = matrices_of_experts(module)
            return numbers_of(matrices[list(expert_parts(module)).index(kind)][int(last)]).detach()
        matrix = matrix_of(model.get_submodule(parent)) if last == "weight" else None
        weight = numbers_of(model.get_parameter(name) if matrix is None else matrix)
        return weight.detach()

    return read


def find_products(model: Any, read: Read, seen: Seen) -> Iterator[Product]:
    """Yield the products of a model; of an architecture that is not known every linear layer is one.

    Args:
        model: of a causal language model; memory is not looked at.
        read: returns its weights, when rows are made.
        seen: rows [n, in] that modules were given, by ``Product.reads``; where there are none they are made up.
    """
    kept = kept_layers(model)
    sizes = {name: int(matrix.shape[1]) for name, module in model.named_modules()
             if module not in kept and (matrix := matrix_of(module)) is not None}
    family = FAMILIES.get(str(model.config.model_type))
    # Why none with other mixers: these rows are made from the modules that Llama has.
    are_known = all(name.startswith("model.layers.") or name == "lm_head" for name in sizes)
    if family is not None and not family.recurrence and are_known:
        for number in range(model.config.num_hidden_layers):
            yield from _products_of_layer(model, f"model.layers.{number}", family, read, seen)
        yield _of_linears(["lm_head"], seen,
                          lambda: _gaussian(sizes["lm_head"], 0) * _gain("model.norm", family, read))
        return
    modules = dict(model.named_modules())
    for name, size in sizes.items():
        yield _of_linears([name], seen, partial(_rows_of_layer, modules, name, size, read))
    for name, module in modules.items():
        if matrices := matrices_of_experts(module):
            yield from _products_of_experts(name, module, partial(torch.ones, matrices[0].shape[2]), read, seen)


def _of_linears(layers: Sequence[str], seen: Seen, make_rows: MakeRows) -> Product:
    """Return the product of layers that multiply the same rows."""
    rows = (lambda: seen[layers[0]].float()) if layers[0] in seen else make_rows
    return Product(layers, layers[0], [([f"{layer}.weight" for layer in layers], rows)])


def _rows_of_layer(modules: Mapping[str, nn.Module], layer: str, size: int, read: Read) -> torch.Tensor:
    """Make rows of a layer of an unknown architecture: a layer norm's where it is known to be before."""
    rows = _gaussian(size, 0)
    for end, last in _LAYER_NORMS.items():
        norm = f"{layer.removesuffix(end)}{last}"
        if layer.endswith(end) and type(modules.get(norm)) is nn.LayerNorm:
            rows = rows * read(f"{norm}.weight").float() + read(f"{norm}.bias").float()
    return rows


def _products_of_experts(name: str, experts: Any, gain: MakeRows, read: Read, seen: Seen) -> Iterator[Product]:
    """Yield gate and up, and down, of all experts of a layer, whose rows have channels of the sizes ``gain``."""
    num_experts, _, num_inputs = matrices_of_experts(experts)[0].shape
    numbers, of_each = range(num_experts), expert_parts(experts)
    gate_up, down = ([f"{name}.{number}.{part}" for number in numbers for part in parts] for parts in of_each.values())
    gate_ups, downs = ([f"{name}.{kind}.{number}" for number in numbers] for kind in of_each)

    def rows() -> torch.Tensor:
        return seen[name].float() if name in seen else _gaussian(num_inputs, 0) * gain()

    def gated(weight: str) -> torch.Tensor:
        matrix = read(weight)
        outputs = rows() @ matrix.float().T if name in seen else _gaussian(len(matrix), 0) * _spread(matrix, gain())
        return apply_gate(experts, outputs)

    yield Product(gate_up, name, [(gate_ups, rows)])
    yield Product(down, name, [([one], partial(gated, before)) for before, one in zip(gate_ups, downs, strict=True)])


def _products_of_layer(model: Any, layer: str, family: Family, read: Read, seen: Seen) -> Iterator[Product]:
    config, modules = model.config, dict(model.get_submodule(layer).named_modules())
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

    yield _of_linears(qkv, seen, lambda: _gaussian(config.hidden_size, 0) * normed(before))
    yield _of_linears([f"{layer}.self_attn.o_proj"], seen, attended)
    if "mlp.experts" in modules:
        yield from _products_of_experts(f"{layer}.mlp.experts", modules["mlp.experts"], partial(normed, between), read,
                                        seen)
        return
    yield _of_linears(gate_up, seen, lambda: _gaussian(config.hidden_size, 0) * normed(between))
    yield _of_linears([f"{layer}.mlp.down_proj"], seen, gated)


def _gain(norm: str, family: Family, read: Read) -> torch.Tensor:
    """Return what a norm multiplies its channels by, float32."""
    return read(f"{norm}.weight").float() + (family.norm_offset or 0.0)


def _spread(weight: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Return the standard deviation of each output for independent inputs of these, float32 [out]."""
    parts = torch.split(weight, max(1, AT_ONCE // weight.shape[1]))
    return torch.cat([(part.float() * gain).norm(dim=1) for part in parts])


def _gaussian(size: int, seed: int) -> torch.Tensor:
    """Return float32 [rows, size] of nearly normal numbers, the same on every machine: sums of twelve integers."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(NUM_ROWS, size, dtype=torch.int64)
    for _ in range(12):
        total += torch.randint(0, 2**16, total.shape, generator=generator)
    return (total - 6 * (2**16 - 1)).float() / 2**16
