"""One layer of the fused decoder: what mixes the tokens of a sequence, and what follows it.

Owns the fused weights of a layer and the order of its operations. A layer mixes by attention, by a short convolution or
by a gated delta rule; all take normed rows and return what the layer's output product is given. ``fused.py`` runs the
layers.

Invariant: every kernel works row by row and every product has two rows or more, so a row's bits do not depend on the
batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from pagedcore.models.attention.interface import PagedStep
from pagedcore.models.attention.layers import AttentionLayer
from pagedcore.models.attention.recurrences import filter_of
from pagedcore.models.decoders.fused_match import has_experts
from pagedcore.models.decoders.rotary_angles import RotaryAngles
from pagedcore.models.decoders.step_rows import StepRows
from pagedcore.models.families.table import Family
from pagedcore.models.linears.packed_linear import OnUnused, PackedLinear
from pagedcore.models.linears.stored_weight import tensors_of
from pagedcore.models.lora.slots import present_adapters
from pagedcore.protocols import LinearFactory, RecordableMatmul
from pagedcore_kernels.cpu.layers.elementwise import GatedActivation, RmsNorm, RotaryEmbedding
from pagedcore_kernels.cpu.layers.gates import DeltaGates, GatedNorm, HeadGate

Fuse = Callable[[nn.Module, tuple[str, ...]], PackedLinear]
"""``fuse`` for one model: of a parent and names of its linear layers."""


class FusedPart(nn.Module):
    """Some outputs of a fused product, in the place of the linear layer that computed them."""

    def __init__(self, whole: PackedLinear, begin: int, end: int) -> None:
        super().__init__()
        self.whole, self.begin, self.end = whole, begin, end

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply ``rows`` [..., in] and return [..., end - begin]."""
        product: torch.Tensor = self.whole(rows)
        return product[..., self.begin : self.end]


def fuse(factory: LinearFactory, on_unused: OnUnused, parent: nn.Module, names: tuple[str, ...]) -> PackedLinear:
    """Pack linear layers of one parent as one product and put its parts in their places."""
    linears = [getattr(parent, name) for name in names]
    weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
    whole = PackedLinear(weights, None if biases[0] is None else torch.cat(biases), factory)
    end = 0
    for name, linear in zip(names, linears, strict=True):
        begin, end = end, end + linear.out_features
        setattr(parent, name, FusedPart(whole, begin, end))
        for tensor in tensors_of(linear.weight):
            on_unused(tensor)
    return whole


class Mixer(Protocol):
    """The first half of a layer, between its norm and its output product."""

    products: tuple[PackedLinear, ...]
    only_runs_kernels: bool = True
    """Whether torch computes nothing between them."""
    output: PackedLinear
    """The product that follows, which is among ``products``."""

    def __call__(self, step: PagedStep, rows: StepRows, normed: torch.Tensor) -> torch.Tensor:
        """Mix ``normed`` rows [T, hidden]; return what ``output`` is given."""
        ...


class FusedAttention(Mixer):
    """Causal attention with rotary positions."""

    def __init__(self, attention: Any, place: AttentionLayer, family: Family, angles: RotaryAngles, fuse: Fuse) -> None:
        """Fuse the projections of a module ``attention``, whose positions turn by ``angles``."""
        output = family.name_of("o_proj")
        self.place, self.angles = place, angles
        dtype = attention.get_submodule(output).weight.dtype
        self.rotary = _rotary(attention, place, family, angles, dtype)
        self.gate = HeadGate(dtype) if family.has_gates or family.head_gate else None
        self.qkv, self.output = fuse(attention, family.qkv), fuse(attention, (output,))
        self.gates = fuse(attention, (family.head_gate,)) if family.head_gate else None
        """One for each head; ``None``: there are none, or each head of the queries is followed by one."""
        self.products = self.qkv, self.output, *(() if self.gates is None else (self.gates,))

    def __call__(self, step: PagedStep, rows: StepRows, normed: torch.Tensor) -> torch.Tensor:
        """Attend; see ``Mixer``. Returns [T, H * D]."""
        place = self.place
        qkv = rows.multiply("qkv", self.qkv, normed)
        self.rotary(qkv, rows.positions, self.angles.table, *rows.place_of(place.index))
        heads, num_others = qkv.view(len(qkv), -1, place.key_head_size), 2 * place.num_kv_heads
        queries, others = heads[:, :-num_others], heads[:, -num_others:]
        if rows.destination is None:
            step.attention.write_kv(place.index, *others.chunk(2, dim=1))
        if self.gate is None:
            return rows.attend(step, place, queries)
        if self.gates is not None:
            gates = rows.multiply("head gates", self.gates, normed)[:, :, None]
        else:
            queries, gates = queries[:, ::2], queries[:, 1::2]
        attended = rows.attend(step, place, queries)
        self.gate(attended.view(len(qkv), place.num_heads, -1), gates)
        return attended


class FusedConvolution(Mixer):
    """A short convolution between two gates, whose last inputs are the states of the step."""

    def __init__(self, module: Any, number: int, family: Family, fuse: Fuse) -> None:
        """Fuse the projections of a module, whose states are those of the recurrent layer ``number``."""
        self._number, self._filter = number, filter_of(module.conv.weight.squeeze(1), module.conv.bias)
        self.gates, self.output = fuse(module, ("in_proj",)), fuse(module, ("out_proj",))
        self.products = self.gates, self.output

    def __call__(self, step: PagedStep, rows: StepRows, normed: torch.Tensor) -> torch.Tensor:
        """Convolve; see ``Mixer``. Returns [T, C]."""
        states: Any = step.states
        given, out = rows.multiply("gates", self.gates, normed), rows.mixed(self.output.in_features)
        states.convolve(self._number, 0, given, *self._filter, "gates", out=out)
        return out


class FusedDeltaRule(Mixer):
    """A gated delta rule over the convolved projections of a row; states are those of the step."""

    def __init__(self, module: Any, number: int, family: Family, fuse: Fuse) -> None:
        """Fuse the projections of a module, whose states are those of the recurrent layer ``number``."""
        dtype, self._number = module.out_proj.weight.dtype, number
        self._num_heads, self._num_key_heads = module.num_v_heads, module.num_k_heads
        self._scale = module.head_k_dim**-0.5
        self._sizes = module.conv_dim, module.value_dim
        self._mixed_sizes = module.key_dim, module.key_dim, module.value_dim
        self._filter = filter_of(module.conv1d.weight.squeeze(1), module.conv1d.bias)
        self._gates = DeltaGates(module.A_log, module.dt_bias, dtype)
        self._norm = GatedNorm(module.norm.weight, norm_epsilon(module.norm), dtype)
        # Why two: an adapter updates three parts of a product at most.
        self.inputs, self.rates = (fuse(module, names) for names in family.delta_inputs)
        self._in_order = module.fix_query_key_value_ordering if len(family.delta_inputs[0]) == 1 else None
        """Sorts what the projections give head by head; ``None``: they give it in order."""
        self.only_runs_kernels = self._in_order is None
        self.output = fuse(module, ("out_proj",))
        self.products = self.inputs, self.rates, self.output

    def __call__(self, step: PagedStep, rows: StepRows, normed: torch.Tensor) -> torch.Tensor:
        """Advance the states; see ``Mixer``. Returns [T, H * Dv]."""
        states: Any = step.states
        num_heads = self._num_heads
        product: Any = rows.multiply("inputs", self.inputs, normed)
        rates: Any = rows.multiply("rates", self.rates, normed)
        if self._in_order is None:
            (given, gate), (b, a) = product.split(self._sizes, dim=1), rates.chunk(2, dim=1)
        else:
            *mixed, gate, b, a = (one[0].flatten(1) for one in self._in_order(product[None], rates[None]))
            given = torch.cat(mixed, dim=1)
        convolved: Any = rows.room("convolved", self._sizes[0])
        states.convolve(self._number, 0, given, *self._filter, "silu", out=convolved)
        log_decay, beta = (rows.room(name, num_heads, torch.float32) for name in ("log decay", "beta"))
        self._gates(a, b, log_decay, beta)
        query, key, value = convolved.split(self._mixed_sizes, dim=1)
        query, key = (one.unflatten(1, (self._num_key_heads, -1)) for one in (query, key))
        out = rows.mixed(self.output.in_features)
        heads, value, gate = (one.unflatten(1, (num_heads, -1)) for one in (out, value, gate))
        states.delta_rule(
            self._number, 1, query, key, value, log_decay, beta, scale=self._scale, normalizes=True, out=heads
        )
        self._norm(heads, gate, heads)
        return out


class FusedLayer:
    """The weights of one decoder layer and its two halves."""

    def __init__(
        self, layer: Any, mixer: Mixer, family: Family, activation: GatedActivation, multiplier: float, fuse: Fuse,
        pack: Callable[..., tuple[PackedLinear, ...]],
    ) -> None:
        """Fuse the projections of ``layer``; its linear layers become parts of the fused ones.

        Args:
            layer: the module.
            mixer: its first half.
            family: what kind of layer it is.
            activation: of its gate.
            multiplier: of all that it adds to the residual.
            fuse: as ``Fuse``.
            pack: as ``pack_experts``, of a module.
        """
        mlp = layer.get_submodule(family.name_of("mlp"))
        norms = [norm_of(getattr(layer, name), family) if name else None for name in family.norms]
        self.mixer, self._multiplier = mixer, multiplier
        self.norm_in, self.norm_attended, self.norm_between, self.norm_out = norms
        self._finishes = multiplier != 1.0 or any(family.norms[1::2])
        self.experts = mlp if has_experts(layer, family) else None
        if self.experts is not None:
            self.dense_products: tuple[PackedLinear, ...] = mixer.products
            self.products: tuple[PackedLinear, ...] = (*self.dense_products, *pack(mlp))
            return
        self.gate_up, self.down = fuse(mlp, family.gate_up), fuse(mlp, (family.name_of("down_proj"),))
        self.activation = activation
        self.products = self.dense_products = *mixer.products, self.gate_up, self.down

    @property
    def only_runs_kernels(self) -> bool:
        """Whether torch computes nothing between the kernels, so that they can be recorded."""
        can_record = (isinstance(one.multiply, RecordableMatmul) and one.multiply.only_runs_kernels
                      for one in self.products)  # fmt: skip
        is_dense = self.experts is None and self.norm_in is not None and self.norm_between is not None
        return is_dense and self._multiplier == 1.0 and self.mixer.only_runs_kernels and all(can_record)

    def mix(self, step: PagedStep, rows: StepRows, addend: torch.Tensor | None) -> torch.Tensor:
        """Add ``addend`` to the residual and return what the mixer makes of it, [T, out]."""
        if self.norm_in is None:
            normed = rows.add(addend)
        else:
            self.norm_in(rows.residual, addend, normed := rows.normed)
        return self.mixer(step, rows, normed)

    def feed_forward(self, rows: StepRows, mixed: torch.Tensor) -> torch.Tensor:
        """Add the mixer's output to the residual and return what the rest of the layer adds to it."""
        addend = rows.multiply("output", self.mixer.output, mixed)
        if self._finishes:
            self._finish(self.norm_attended, addend)
        if self.norm_between is None:
            normed = rows.add(addend)
        else:
            self.norm_between(rows.residual, addend, normed := rows.normed)
        if self.experts is not None:
            with present_adapters(rows.adapters):
                product: torch.Tensor = self.experts(normed[None])[0]
        else:
            self.activation(rows.multiply("gate and up", self.gate_up, normed), rows.gated)
            product = rows.multiply("down", self.down, rows.gated)
        if self._finishes:
            self._finish(self.norm_out, product)
        return product

    def _finish(self, norm: RmsNorm | None, product: torch.Tensor) -> None:
        """Turn the last product of half a layer into what it adds to the residual, in place."""
        if norm is not None:
            norm(product, None, product)
        if self._multiplier != 1.0:
            product *= self._multiplier


def norm_of(module: Any, family: Family) -> RmsNorm:
    """Return the kernel that computes a norm."""
    return RmsNorm(norm_weight(module, family), norm_epsilon(module), module.weight.dtype)


def norm_weight(norm: Any, family: Family) -> torch.Tensor:
    """Return a norm's weight as ``RmsNorm`` reads it: in float32 where the product alone is rounded."""
    weight: torch.Tensor = norm.weight.detach()
    return weight.clone() if family.norm_offset is None else weight.float() + family.norm_offset


def norm_epsilon(norm: Any) -> float:
    """Return what a norm adds to the mean of squares."""
    return float(vars(norm).get("variance_epsilon") or norm.eps)


def _rotary(
    attention: Any, place: AttentionLayer, family: Family, angles: RotaryAngles, dtype: torch.dtype
) -> RotaryEmbedding:
    norms, epsilon = None, 0.0
    if family.has_head_norms:
        modules = [attention.get_submodule(family.name_of(name)) for name in ("q_norm", "k_norm")]
        norms, epsilon = (norm_weight(modules[0], family), norm_weight(modules[1], family)), norm_epsilon(modules[0])
    return RotaryEmbedding(
        place.num_heads, place.num_kv_heads, place.key_head_size, dtype, norms=norms, epsilon=epsilon,
        rotary_size=angles.size, rounds=angles.is_rounded, has_gates=family.has_gates,
    )
