"""A faster decoder for models of the Llama type: fewer, larger matrix products and fused kernels between them.

Owns the fused weights and the order of operations of one forward. It computes what transformers' modules compute, with
the same rounding after every operation; only the order of additions inside a product may differ. Which models it is
for, ``fused_match.py`` says; ``decoder.py`` has the general implementation.

Invariant: every kernel works row by row and every product has two rows or more, so a row's bits do not depend on the
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from pagedcore.errors import ModelNotSupported
from pagedcore.models.attention_interface import PagedStep
from pagedcore.models.attention_layers import AttentionLayer
from pagedcore.models.cpu.fused_match import recognised_activation
from pagedcore.models.cpu.packed_linear import FASTEST, OnUnused, PackedLinear
from pagedcore.models.decoder import Decoder, ModuleDecoder
from pagedcore.models.quantization.stored_weight import tensors_of
from pagedcore.protocols import LinearFactory, ShowsKVPool
from pagedcore_kernels.cpu.layers.elementwise import GatedActivation, KVDestination, RmsNorm, RotaryEmbedding
from pagedcore_kernels.layout import KVLayout


def best_decoder(
    model: Any, layers: Mapping[int, AttentionLayer], on_unused: OnUnused, linears: LinearFactory = FASTEST
) -> Decoder:
    """Return the fused decoder where the model is of a kind it knows, else the general one; see ``DecoderFactory``.

    ``linears`` makes the products, where it supports them.
    """
    activation = recognised_activation(model, layers, linears)
    if activation is None:
        return ModuleDecoder(model, layers, on_unused, linears)
    return FusedDecoder(model, layers, activation, on_unused, linears)


class FusedPart(nn.Module):
    """Some outputs of a fused product, in the place of the linear layer that computed them."""

    def __init__(self, whole: PackedLinear, begin: int, end: int) -> None:
        super().__init__()
        self.whole, self._outputs = whole, slice(begin, end)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply ``rows`` [..., in] and return [..., end - begin]."""
        product: torch.Tensor = self.whole(rows)
        return product[..., self._outputs]


@dataclass(slots=True)
class Rows:
    """What the layers of one step work on."""

    residual: torch.Tensor
    """[T, hidden]; every half of a layer adds to it."""
    normed: torch.Tensor
    """[T, hidden]: room for norms."""
    gated: torch.Tensor
    """[T, intermediate]: room for activations."""
    angles: torch.Tensor
    """By position; see ``RotaryAngles``."""
    destination: KVDestination | None
    """Where K and V go; ``None`` if the attention backend writes them itself."""

    def keep(self, chosen: torch.Tensor) -> None:
        """Drop all rows but the chosen ones."""
        self.residual = self.residual[chosen]
        self.normed, self.gated = self.normed[: len(chosen)], self.gated[: len(chosen)]


class FusedLayer:
    """The weights of one decoder layer and its two halves."""

    def __init__(
        self, layer: Any, place: AttentionLayer, activation: GatedActivation, fuse: Callable[..., PackedLinear]
    ) -> None:
        """Fuse the projections of ``layer``; its linear layers become parts of the fused ones."""
        attention, mlp = layer.self_attn, layer.mlp
        self.place = place
        self.input_norm = _norm(layer.input_layernorm)
        self.qkv = fuse(attention, ("q_proj", "k_proj", "v_proj"))
        self.rotary = _rotary(attention, place, layer.input_layernorm.weight.dtype)
        self.output = fuse(attention, ("o_proj",))
        self.inner_norm = _norm(layer.post_attention_layernorm)
        self.gate_up = fuse(mlp, ("gate_proj", "up_proj"))
        self.activation = activation
        self.down = fuse(mlp, ("down_proj",))
        self.products = self.qkv, self.output, self.gate_up, self.down

    def attend(self, step: PagedStep, rows: Rows, addend: torch.Tensor | None) -> torch.Tensor:
        """Add ``addend`` to the residual and return the attention over it, [T, H * D]."""
        place = self.place
        self.input_norm(rows.residual, addend, rows.normed)
        qkv = self.qkv.multiply(rows.normed)
        self.rotary(qkv, step.positions, rows.angles, rows.destination, place.index)
        heads = qkv.view(len(qkv), -1, place.key_head_size)
        if rows.destination is None:
            keys, values = heads[:, place.num_heads :].chunk(2, dim=1)
            step.attention.write_kv(place.index, keys, values)
        attended = step.attention.attend(
            place.index, heads[:, : place.num_heads], scale=place.scale, window=place.window, chunk=place.chunk,
            softcap=place.softcap,
        )
        return attended.view(len(qkv), -1)

    def feed_forward(self, rows: Rows, attended: torch.Tensor) -> torch.Tensor:
        """Add the attention's output to the residual and return what the rest of the layer adds to it."""
        self.inner_norm(rows.residual, self.output.multiply(attended), rows.normed)
        self.activation(self.gate_up.multiply(rows.normed), rows.gated)
        return self.down.multiply(rows.gated)


class RotaryAngles:
    """Cosines and sines by position, as ``RotaryEmbedding`` reads them, up to the longest context seen.

    Every variant whose angles depend on the position alone works, because the model's own module computes them.

    Invariant: a row never changes once it is in the table.
    """

    def __init__(self, rotary: Any, head_size: int, dtype: torch.dtype) -> None:
        """Make the first rows.

        Args:
            rotary: called with a tensor of the model's dtype and positions [1, n]; returns cosines and sines [1, n, D].
            head_size: D.
            dtype: number format of the model, which the angles are rounded to.

        Raises:
            ModelNotSupported: the module does not rotate the two halves of a whole head alike.
        """
        self._rotary, self._head_size, self._dtype = rotary, head_size, dtype
        self._table = torch.empty(0, head_size)
        self.upto(1024)

    def upto(self, num_positions: int) -> torch.Tensor:
        """Return float32 [n, D] with n at least ``num_positions``: D / 2 cosines, then D / 2 sines."""
        known = len(self._table)
        if num_positions > known:
            self._table = torch.cat([self._table, self._rows(known, max(num_positions, 2 * known))])
        return self._table

    def _rows(self, begin: int, end: int) -> torch.Tensor:
        cosines, sines = self._rotary(torch.empty(0, dtype=self._dtype), torch.arange(begin, end)[None])
        half = self._head_size // 2
        for angles in (cosines, sines):
            if angles.shape != (1, end - begin, 2 * half) or not torch.equal(angles[..., :half], angles[..., half:]):
                raise ModelNotSupported("model: its rotary embedding does not turn both halves of a head alike.")
        return torch.cat([cosines[0, :, :half], sines[0, :, :half]], dim=-1).float().contiguous()


class FusedDecoder(Decoder):
    """Computes batches of a recognised model; see ``Decoder``.

    The model's own tree stays usable: its linear layers become parts of the fused ones.
    """

    def __init__(
        self, model: Any, layers: Mapping[int, AttentionLayer], activation: str, on_unused: OnUnused,
        linears: LinearFactory,
    ) -> None:
        """Fuse the weights, one layer at a time; arguments as for ``best_decoder``, ``activation`` as recognised."""
        fuse, body, dtype = partial(_fuse, linears, on_unused), model.model, model.dtype
        gate = GatedActivation(activation, dtype)
        self._general = partial(ModuleDecoder, model, layers, on_unused, linears)
        self._embedding = body.embed_tokens
        self._angles = RotaryAngles(body.rotary_emb, layers[0].key_head_size, dtype)
        self._layers = [FusedLayer(layer, layers[number], gate, fuse) for number, layer in enumerate(body.layers)]
        self._norm = _norm(body.norm)
        # Why: the embedding still has a weight that is tied.
        is_tied = model.lm_head.weight is body.embed_tokens.weight
        self._head = _fuse(linears, (lambda weight: None) if is_tied else on_unused, model, ("lm_head",))
        self.products = (*(product for layer in self._layers for product in layer.products), self._head)

    def fallback(self) -> Decoder:
        """Return the general decoder on the same products: the model's modules, with parts of them as linear layers."""
        general = self._general()
        general.products = self.products
        return general

    def __call__(
        self, step: PagedStep, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Compute a batch; see ``Decoder``."""
        work, addend = self._begin(step, token_ids, positions), None
        for layer in self._layers:
            attended = layer.attend(step, work, addend)
            if layer is self._layers[-1]:
                if not len(rows):
                    return work.residual.new_empty(0, self._head.out_features)
                # Why: no later operation reads the other rows.
                work.keep(rows)
                attended = attended[rows]
            addend = layer.feed_forward(work, attended)
        self._norm(work.residual, addend, work.normed)
        return self._head.multiply(work.normed)

    def _begin(self, step: PagedStep, token_ids: torch.Tensor, positions: torch.Tensor) -> Rows:
        residual = nn.functional.embedding(token_ids, self._embedding.weight)
        attention, destination = step.attention, None
        if isinstance(attention, ShowsKVPool) and isinstance(attention.layout, KVLayout):
            destination = KVDestination(attention.layout, attention.pool, step.slots)
        return Rows(
            residual, torch.empty_like(residual), residual.new_empty(len(residual), self._layers[0].down.in_features),
            self._angles.upto(int(positions.max()) + 1), destination,
        )


def _fuse(factory: LinearFactory, on_unused: OnUnused, parent: nn.Module, names: tuple[str, ...]) -> PackedLinear:
    """Pack linear layers of one parent as one product and put its parts in their places."""
    linears = [getattr(parent, name) for name in names]
    weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    whole = PackedLinear(weight, None if biases[0] is None else torch.cat(biases), factory)
    end = 0
    for name, linear in zip(names, linears, strict=True):
        begin, end = end, end + linear.out_features
        setattr(parent, name, FusedPart(whole, begin, end))
        for tensor in tensors_of(linear.weight):
            on_unused(tensor)
    return whole


def _norm(module: Any) -> RmsNorm:
    return RmsNorm(module.weight, module.variance_epsilon)


def _rotary(attention: Any, place: AttentionLayer, dtype: torch.dtype) -> RotaryEmbedding:
    shape = place.num_heads, place.num_kv_heads, place.key_head_size, dtype
    if "q_norm" not in dict(attention.named_children()):
        return RotaryEmbedding(*shape)
    norms = attention.q_norm, attention.k_norm
    weights = norms[0].weight.detach().clone(), norms[1].weight.detach().clone()
    return RotaryEmbedding(*shape, norms=weights, epsilon=norms[0].variance_epsilon)
