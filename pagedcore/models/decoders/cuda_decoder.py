"""A faster decoder on NVIDIA GPUs for the architectures of ``families/table.py`` that are like Llama or Gemma: nine
launches a layer of a decode step, and one for each norm of what a layer adds, where transformers' own modules make
thirty-nine; one more before each product with weights in e4m3. Experts stay the module that a model has.

Owns the joined weights and the order of launches of one forward: torch's products, and between them the kernels of
``pagedcore_kernels/cuda/elementwise.py`` and attention. They round where the modules do. ``fused.py`` is the same for
the CPU; ``fused_match.py`` recognises the models of both.

Invariant: from the step's numbers on, a forward waits for nothing and copies nothing to or from the host, so that it
can be recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from pagedcore.models.attention.interface import PagedStep
from pagedcore.models.attention.layers import AttentionLayer
from pagedcore.models.decoders.fused_layers import norm_epsilon, norm_weight
from pagedcore.models.decoders.fused_match import (
    NotFused,
    Recognised,
    devices_of,
    has_experts,
    joined_weights,
    recognise_tree,
    require,
)
from pagedcore.models.decoders.plain import Decoder, PlainDecoder
from pagedcore.models.decoders.rotary_angles import angles_by_layer
from pagedcore.models.families.llama_modules import embedding_scale
from pagedcore.models.families.table import Family
from pagedcore.models.linears.float8_linear import Float8Linear, launch_quantizers
from pagedcore.models.linears.packed_linear import OnUnused
from pagedcore.models.linears.torch_products import TorchProduct
from pagedcore.protocols import AttentionBackend
from pagedcore_kernels.cuda.elementwise import GatedActivation, RmsNorm, RotaryEmbedding, can_compute
from pagedcore_kernels.interface import LaunchesKernels


def best_cuda_decoder(model: Any, layers: Mapping[int, AttentionLayer], on_unused: OnUnused) -> Decoder:
    """Return the fused decoder where the model is of a kind it knows, else the general one; see ``DecoderFactory``.

    The attention backend has to be one that ``LaunchesKernels``.
    """
    try:
        known = recognise_tree(model, layers)
        _require_fitting(model, known.family)
    except NotFused:
        return PlainDecoder(model, layers, on_unused)
    return CudaDecoder(model, layers, known, on_unused)


def _require_fitting(model: Any, family: Family) -> None:
    """Refuse what the kernels do not compute. Raises ``NotFused``."""
    config, body = model.config, model.model
    is_like_llama = not (family.has_multipliers or family.norms_whole_rows or family.has_wide_angles)
    require(is_like_llama and all(family.norms[::2]), "its norms or its angles are not those of Llama or Gemma")
    require(not family.recurrence, "some of its layers do not attend")
    require(devices_of(model) == {"cuda"}, "its weights are not on a GPU")
    alike = all(len({weight.dtype for weight in weights}) == 1 for weights in joined_weights(model, family))
    require(alike, "the parts of a product are stored unlike")
    attention = body.layers[0].self_attn
    fits = can_compute(
        hidden_size=config.hidden_size, intermediate_size=config.intermediate_size, head_size=attention.head_dim,
        # Shape: the module keeps a frequency for every two elements.
        rotary_size=2 * len(next(body.rotary_emb.buffers())), dtype=model.dtype,
    )
    require(fits, "the kernels do not take its sizes or its number format")


class _Product(NamedTuple):
    """One matrix product of torch's: weight [out, in], bias [out] or none."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows, self.weight, self.bias)


class _Layer:
    """The products of one decoder layer, and what is between them."""

    def __init__(self, layer: Any, place: AttentionLayer, family: Family) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.place = place
        self.qkv, self.output = _join(attention, family.qkv), _join(attention, ("o_proj",))
        self.experts = mlp if has_experts(layer, family) else None
        if self.experts is None:
            self.gate_up, self.down = _join(mlp, family.gate_up), _join(mlp, ("down_proj",))
        self.norms = [getattr(layer, name) if name else None for name in family.norms]
        heads = (attention.q_norm, attention.k_norm) if family.has_head_norms else ()
        self.head_norms = [norm_weight(one, family) for one in heads]
        self.epsilon = norm_epsilon(heads[0]) if heads else 0.0


class _Launches:
    """The kernels between the products, of one attention backend and its pool."""

    def __init__(self, model: Any, layers: list[_Layer], known: Recognised, attention: LaunchesKernels) -> None:
        layout, driver, device = attention.layout, attention.driver, attention.pool.device
        norm = partial(_norm, known.family, driver, model.dtype)
        self.norms = [[norm(module) for module in layer.norms[::2]] for layer in layers]
        self.norms_of_added = [[norm(module) for module in layer.norms[1::2] if module] for layer in layers]
        self.last_norm = norm(model.model.norm)
        self.gate = GatedActivation(known.activation, model.dtype, driver)
        places = {number: layer.place for number, layer in enumerate(layers)}
        # Invariant: no row is longer than the pool, so that tables never have to grow in a step.
        most_positions = attention.pool.shape[0] * layout.block_size
        # Why in this mode: modules of angles write to buffers that were moved to the GPU in it.
        with torch.inference_mode():
            angles = list(angles_by_layer(model, places, known.family, device, most_positions).values())
            for one in set(angles):
                one.fill()
        self.angles = [one.table for one in angles]
        rotaries = {size: RotaryEmbedding(layout, attention.pool, driver, rotary_size=size)
                    for size in {one.size for one in angles}}
        self.rotaries = [rotaries[one.size] for one in angles]


class CudaDecoder(Decoder):
    """Computes batches of a recognised model on a GPU; see ``Decoder``.

    The model's own tree stays usable: the weights of its linear layers become parts of the joined ones.
    """

    def __init__(
        self, model: Any, layers: Mapping[int, AttentionLayer], known: Recognised, on_unused: OnUnused
    ) -> None:
        """Join the weights, one layer at a time; arguments as for ``best_cuda_decoder``, ``known`` as recognised."""
        body = model.model
        self._general = partial(PlainDecoder, model, layers, on_unused)
        self._layers = [_Layer(layer, layers[number], known.family) for number, layer in enumerate(body.layers)]
        self._embedding, self._scale = body.embed_tokens, embedding_scale(model.config, model.dtype)
        self._head = _Product(model.lm_head.weight.detach(), model.lm_head.bias)
        self._cap = vars(model.config).get("final_logit_softcapping") if known.family.is_gemma else None
        is_dense = any(one.experts is None for one in self._layers)
        self._gated_size = model.config.intermediate_size if is_dense else 0
        self._make: Callable[[LaunchesKernels], _Launches] = partial(_Launches, model, self._layers, known)
        self._launches: _Launches | None = None

    @property
    def torch_products(self) -> Sequence[TorchProduct]:
        """Those of the layers and of the head; see ``Decoder``."""
        dense = (product for one in self._layers if one.experts is None for product in (one.gate_up, one.down))
        return [*(product for one in self._layers for product in (one.qkv, one.output)), *dense, self._head]

    def fallback(self) -> Decoder:
        """Return the general decoder on the same weights."""
        return self._general()

    def prepare(self, attention: AttentionBackend) -> None:
        """Load kernels, and make tables for sequences as long as the backend's pool; see ``PreparesSteps``."""
        assert isinstance(attention, LaunchesKernels)  # Invariant: the factory was asked
        # Why first: two tables are not in memory at once.
        self._launches = None
        self._launches = self._make(attention)
        launch_quantizers(self.torch_products, self._embedding.weight.dtype, attention.driver)

    def __call__(
        self, step: PagedStep, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Compute a batch; see ``Decoder``."""
        return self._logits(self._hidden(step, token_ids, positions)[rows])

    def with_hidden(
        self, step: PagedStep, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor,
        hidden_rows: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Compute a batch; see ``HiddenDecoder``."""
        hidden = self._hidden(step, token_ids, positions)
        return self._logits(hidden[rows]), hidden[hidden_rows]

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        logits = self._head(rows)
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap

    def _hidden(self, step: PagedStep, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the states [T, hidden] that the output layer multiplies."""
        launches = self._launches
        # Invariant: ``prepare`` was called with the step's backend.
        assert launches is not None
        attention: Any = step.attention
        slots = attention.planned_slots()
        residual, addend = nn.functional.embedding(token_ids, self._embedding.weight), None
        if self._scale != 1.0:
            residual *= self._scale
        place, num = self._layers[0].place, len(token_ids)
        normed, gated = torch.empty_like(residual), residual.new_empty(num, self._gated_size)
        # Why zeros: attention leaves rows of padding as they are.
        attended = residual.new_zeros(num, place.num_heads, place.value_head_size)
        counts = [place.num_heads, place.num_kv_heads, place.num_kv_heads]
        for number, layer in enumerate(self._layers):
            place, (before, between), added = layer.place, launches.norms[number], launches.norms_of_added[number]
            before(residual, addend, normed)
            heads = layer.qkv(normed).view(num, -1, place.key_head_size)
            query, key, value = torch.split(heads, counts, 1)
            launches.rotaries[number](
                place.index, query, key, value, positions, launches.angles[number], slots,
                norms=layer.head_norms, epsilon=layer.epsilon,
            )
            attention.attend_to(attended, place.index, query, scale=place.scale, window=place.window,
                                chunk=place.chunk, softcap=place.softcap)
            addend = layer.output(attended.view(num, -1))
            if added:
                added[0](addend, None, addend)
            between(residual, addend, normed)
            if layer.experts is None:
                launches.gate(layer.gate_up(normed), gated)
                addend = layer.down(gated)
            else:
                addend = layer.experts(normed[None])[0]
            if added:
                added[1](addend, None, addend)
        launches.last_norm(residual, addend, normed)
        return normed


def _join(parent: nn.Module, names: tuple[str, ...]) -> _Product | Float8Linear:
    """Join linear layers of one parent as one product, of whose weight theirs become parts."""
    linears = [getattr(parent, name) for name in names]
    if isinstance(linears[0], Float8Linear):
        return Float8Linear.joined(linears)
    biases = [linear.bias for linear in linears]
    bias = None if biases[0] is None else torch.cat([one.detach() for one in biases])
    if len(linears) == 1:
        return _Product(linears[0].weight.detach(), bias)
    weight = torch.cat([linear.weight.detach() for linear in linears])
    end = 0
    for linear in linears:
        begin, end = end, end + linear.out_features
        linear.weight = nn.Parameter(weight[begin:end], requires_grad=False)
    return _Product(weight, bias)


def _norm(family: Family, driver: Any, dtype: torch.dtype, module: Any) -> RmsNorm:
    return RmsNorm(norm_weight(module, family), norm_epsilon(module), driver, dtype)
