"""A faster decoder for the architectures of ``models/families/table.py``: fewer, larger matrix products, fused kernels
between them.

Owns the fused weights and the order of operations of one forward. It computes what transformers' modules compute, with
the same rounding after every operation; only the order of additions inside a product may differ. Which models it is
for, ``fused_match.py`` says; ``decoder.py`` has the general implementation.

Invariant: every kernel works row by row and every product has two rows or more, so a row's bits do not depend on the
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from pagedcore.errors import ModelNotSupported
from pagedcore.models.attention.interface import PagedStep
from pagedcore.models.attention.layers import AttentionLayer
from pagedcore.models.decoders.fused_match import NotFused, Recognised, has_experts, recognise
from pagedcore.models.decoders.long_angles import by_place
from pagedcore.models.decoders.output_layer import OutputLayer
from pagedcore.models.decoders.plain import Decoder, ModuleDecoder, router_products
from pagedcore.models.decoders.recorded_steps import MOST_LOGITS, MOST_ROWS, RecordedSteps
from pagedcore.models.decoders.step_rows import StepRows
from pagedcore.models.families.llama_modules import embedding_scale
from pagedcore.models.families.model_facts import max_model_len, num_short_tokens
from pagedcore.models.families.table import Family
from pagedcore.models.linears.packed_experts import pack_experts
from pagedcore.models.linears.packed_linear import FASTEST, OnUnused, PackedLinear
from pagedcore.models.linears.shared_embedding import share_rows
from pagedcore.models.linears.stored_weight import tensors_of
from pagedcore.models.lora.slots import AdapterSlots, new_room
from pagedcore.protocols import Int64Array, LinearFactory, RecordableAttention, RecordableMatmul, ShowsKVPool
from pagedcore_kernels.cpu.layers.elementwise import (
    GatedActivation,
    KVDestination,
    RmsNorm,
    RotaryEmbedding,
)
from pagedcore_kernels.cpu.runtime.recorded_calls import StepShape
from pagedcore_kernels.cpu.runtime.workspace import Workspace
from pagedcore_kernels.layout import KVLayout


def best_decoder(
    model: Any, layers: Mapping[int, AttentionLayer], on_unused: OnUnused, linears: LinearFactory = FASTEST
) -> Decoder:
    """Return the fused decoder where the model is of a kind it knows, else the general one; see ``DecoderFactory``.

    ``linears`` makes the products, where it supports them.
    """
    try:
        known = recognise(model, layers, linears)
    except NotFused:
        return ModuleDecoder(model, layers, on_unused, linears)
    return FusedDecoder(model, layers, known, on_unused, linears)


class FusedPart(nn.Module):
    """Some outputs of a fused product, in the place of the linear layer that computed them."""

    def __init__(self, whole: PackedLinear, begin: int, end: int) -> None:
        super().__init__()
        self.whole, self.begin, self.end = whole, begin, end

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply ``rows`` [..., in] and return [..., end - begin]."""
        product: torch.Tensor = self.whole(rows)
        return product[..., self.begin : self.end]


class FusedLayer:
    """The weights of one decoder layer and its two halves."""

    def __init__(
        self, layer: Any, place: AttentionLayer, family: Family, activation: GatedActivation, angles: RotaryAngles,
        multiplier: float, fuse: Callable[..., PackedLinear], pack: Callable[..., tuple[PackedLinear, ...]],
    ) -> None:
        """Fuse the projections of ``layer``; its linear layers become parts of the fused ones.

        Args:
            layer: the module.
            place: what its attention does.
            family: what kind of layer it is.
            activation: of its gate.
            angles: of its positions.
            multiplier: of all that it adds to the residual.
            fuse: as ``_fuse``, of a parent and names of linear layers.
            pack: as ``pack_experts``, of a module.
        """
        attention, mlp = layer.self_attn, layer.mlp
        norms = [_norm(getattr(layer, name), family) if name else None for name in family.norms]
        self.place, self.angles, self._multiplier = place, angles, multiplier
        self.norm_in, self.norm_attended, self.norm_between, self.norm_out = norms
        self._finishes = multiplier != 1.0 or any(family.norms[1::2])
        self.rotary = _rotary(attention, place, family, angles, attention.o_proj.weight.dtype)
        self.qkv, self.output = fuse(attention, family.qkv), fuse(attention, ("o_proj",))
        self.experts = mlp if has_experts(layer) else None
        if self.experts is not None:
            self.dense_products: tuple[PackedLinear, ...] = self.qkv, self.output
            self.products: tuple[PackedLinear, ...] = (*self.dense_products, *pack(mlp))
            return
        self.gate_up, self.down = fuse(mlp, family.gate_up), fuse(mlp, ("down_proj",))
        self.activation = activation
        self.products = self.dense_products = self.qkv, self.output, self.gate_up, self.down

    @property
    def only_runs_kernels(self) -> bool:
        """Whether torch computes nothing between the kernels, so that they can be recorded."""
        can_record = (isinstance(one.multiply, RecordableMatmul) and one.multiply.only_runs_kernels
                      for one in self.products)  # fmt: skip
        is_dense = self.experts is None and self.norm_in is not None and self.norm_between is not None
        return is_dense and self._multiplier == 1.0 and all(can_record)

    def attend(self, step: PagedStep, rows: StepRows, addend: torch.Tensor | None) -> torch.Tensor:
        """Add ``addend`` to the residual and return the attention over it, [T, H * D]."""
        place = self.place
        if self.norm_in is None:
            normed = rows.add(addend)
        else:
            self.norm_in(rows.residual, addend, normed := rows.normed)
        qkv = rows.multiply("qkv", self.qkv, normed)
        self.rotary(qkv, rows.positions, self.angles.table, rows.destination, place.index)
        heads = qkv.view(len(qkv), -1, place.key_head_size)
        if rows.destination is None:
            keys, values = heads[:, place.num_heads :].chunk(2, dim=1)
            step.attention.write_kv(place.index, keys, values)
        return rows.attend(step, place, heads[:, : place.num_heads])

    def feed_forward(self, rows: StepRows, attended: torch.Tensor) -> torch.Tensor:
        """Add the attention's output to the residual and return what the rest of the layer adds to it."""
        addend = rows.multiply("output", self.output, attended)
        if self._finishes:
            self._finish(self.norm_attended, addend)
        if self.norm_between is None:
            normed = rows.add(addend)
        else:
            self.norm_between(rows.residual, addend, normed := rows.normed)
        if self.experts is not None:
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


class RotaryAngles:
    """Cosines and sines by place (see ``long_angles.py``), as ``RotaryEmbedding`` reads them, up to the longest context
    seen.

    Every variant whose angles depend on the place alone works, because the model's own module computes them.

    Invariant: a row never changes once it is in the table.
    """

    def __init__(self, rotary: Any, dtype: torch.dtype, limit: int) -> None:
        """Make the first rows.

        Args:
            rotary: called with a tensor of the model's dtype and positions [1, n]; returns cosines and sines [1, n, R].
            dtype: number format of the model.
            limit: most places; with more, angles may depend on more than the place.

        Raises:
            ModelNotSupported: the module does not rotate two halves alike.
        """
        self._rotary, self._dtype, self._limit = rotary, dtype, limit
        self.table = self._rows(0, min(1024, limit))
        """float32 [n, R]: R / 2 cosines, then R / 2 sines."""

    def grow(self, num_positions: int) -> None:
        """Make the table at least ``num_positions`` long."""
        known = len(self.table)
        if num_positions > known:
            end = max(num_positions, min(2 * known, self._limit))
            self.table = torch.cat([self.table, self._rows(known, end)])

    @property
    def size(self) -> int:
        """R."""
        return self.table.shape[1]

    def _rows(self, begin: int, end: int) -> torch.Tensor:
        cosines, sines = self._rotary(torch.empty(0, dtype=self._dtype), torch.arange(begin, end)[None])
        half = cosines.shape[-1] // 2
        for angles in (cosines, sines):
            if angles.shape != (1, end - begin, 2 * half) or not torch.equal(angles[..., :half], angles[..., half:]):
                raise ModelNotSupported("model: its rotary embedding does not turn both halves of a head alike.")
        self.is_rounded = cosines.dtype == self._dtype
        """Whether angles, and so their products, have the model's number format."""
        return torch.cat([cosines[0, :, :half], sines[0, :, :half]], dim=-1).float().contiguous()


def _angles_by_layer(model: Any, layers: Mapping[int, AttentionLayer]) -> list[RotaryAngles]:
    """Return the angles of each layer, made once for all layers of a kind; layers without positions turn by nothing."""
    config, rotary, short = model.config, model.model.rotary_emb, num_short_tokens(model.config)
    # Rule: modules with several kinds of angles have a dictionary of their types.
    kinds = config.layer_types if isinstance(rotary.rope_type, dict) else [None] * len(layers)
    is_turned = config.to_dict().get("no_rope_layers") or [1] * len(layers)

    def still(like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cosines = like.new_ones(*positions.shape, layers[0].key_head_size)
        return cosines, torch.zeros_like(cosines)

    made: dict[Any, RotaryAngles] = {}
    for key in (keys := list(zip(kinds, map(bool, is_turned), strict=False))):
        kind, turns = key
        if key not in made:
            turned = by_place(rotary if kind is None else partial(rotary, layer_type=kind), short)
            made[key] = RotaryAngles(turned if turns else still, model.dtype, max_model_len(config) + (short or 0))
    return [made[key] for key in keys]


class FusedDecoder(Decoder):
    """Computes batches of a recognised model; see ``Decoder``.

    The model's own tree stays usable: its linear layers become parts of the fused ones.
    """

    def __init__(
        self, model: Any, layers: Mapping[int, AttentionLayer], known: Recognised, on_unused: OnUnused,
        linears: LinearFactory,
    ) -> None:
        """Fuse the weights, one layer at a time; arguments as for ``best_decoder``, ``known`` as recognised."""
        fuse, body, config, family = partial(_fuse, linears, on_unused), model.model, model.config, known.family
        pack = partial(pack_experts, linears=linears, routers=router_products(linears), on_unused=on_unused)
        multiplier = float(config.residual_multiplier) if family.has_multipliers else 1.0
        self._general = partial(ModuleDecoder, model, layers, on_unused, linears)
        self._embedding, self._scale = body.embed_tokens, embedding_scale(config, model.dtype)
        angles, gate = _angles_by_layer(model, layers), GatedActivation(known.activation, model.dtype)
        self._angles = tuple(set(angles))
        self._layers = [
            FusedLayer(layer, layers[number], family, gate, angles[number], multiplier, fuse, pack)
            for number, layer in enumerate(body.layers)
        ]
        # Why: an embedding that does not read the product's rows keeps a weight that is tied.
        is_tied = model.lm_head.weight is self._embedding.weight
        head = _fuse(linears, (lambda weight: None) if is_tied else on_unused, model, ("lm_head",))
        if is_tied:
            share_rows(self._embedding, head, on_unused)
        cap = config.final_logit_softcapping if family.is_gemma else None
        divisor = float(config.logits_scaling) if family.has_multipliers else 1.0
        self._output = OutputLayer(_norm(body.norm, family), head, cap, divisor, model.dtype)
        self._gated_size = next((layer.down.in_features for layer in self._layers if layer.experts is None), 0)
        self.products = (*(product for layer in self._layers for product in layer.products), head)
        can_record = all(one.only_runs_kernels for one in self._layers) and self._output.only_runs_kernels
        self._steps = RecordedSteps() if can_record else None

    def fallback(self) -> Decoder:
        """Return the general decoder on the same products: the model's modules, with parts of them as linear layers."""
        general = self._general()
        general.products = self.products
        return general

    def adapted(self, layers: Mapping[str, Any]) -> Iterable[str]:
        """Return layers as ``AdaptedDecoder`` says: all parts of products between which there are rows alone."""
        own = {id(product) for layer in self._layers for product in layer.dense_products}
        return [name for name, part in layers.items() if isinstance(part, FusedPart) and id(part.whole) in own]

    def use_adapters(self, adapters: AdapterSlots | None) -> None:
        """Update rows; see ``AdaptedDecoder``."""
        self.adapters = adapters
        # Why: recorded calls have the addresses of the slots that were.
        self._steps = None if self._steps is None else RecordedSteps()

    @property
    def can_pick(self) -> bool:
        """Whether ``pick`` may be called; see ``GreedyDecoder``."""
        return self._output.can_pick

    def __call__(
        self, step: PagedStep, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Compute a batch; see ``Decoder``. The next step may overwrite the logits."""
        return self._output.logits(self._compute(step, token_ids, positions, rows, None))

    def pick(
        self, step: PagedStep, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, barred: Int64Array
    ) -> Int64Array:
        """Compute a batch without logits; see ``GreedyDecoder``."""
        return self._output.token_ids(self._compute(step, token_ids, positions, rows, barred))

    def with_hidden(
        self, step: PagedStep, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor,
        hidden_rows: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Compute a batch; see ``HiddenDecoder``. The rows that are wanted are not recorded, as there may be as many of
        them as there are tokens.
        """
        wanted, steps = torch.cat((rows, hidden_rows)), self._steps_for(step, len(token_ids))
        if steps is None:
            work = self._begin(step, token_ids, positions)
            addend = self._run_layers(step, work, wanted)
        else:
            work = self._begin(step, token_ids, positions, steps.workspace)
            self._repeat_all_rows(steps, step, work)
            last = self._layers[-1]
            work, attended = work.apart(wanted, last.place)
            addend = last.feed_forward(work, attended)
        logits, hidden = self._output.with_hidden(work, addend, len(rows))
        return self._output.logits(logits), hidden

    def _steps_for(self, step: PagedStep, num_rows: int) -> RecordedSteps | None:
        """Return the recordings that a step of so many rows uses, if it can use any."""
        attention = step.attention
        can_record = isinstance(attention, RecordableAttention) and attention.only_runs_kernels
        return self._steps if can_record and num_rows <= MOST_ROWS else None

    def _run_layers(self, step: PagedStep, work: StepRows, rows: torch.Tensor) -> torch.Tensor | None:
        """Run all layers, the end of the last one for ``rows`` alone; return what it adds to the residual, if there are
        any.
        """
        addend = None
        for layer in self._layers:
            attended = layer.attend(step, work, addend)
            if layer is self._layers[-1]:
                if not len(rows):
                    return None
                # Why: no later operation reads the other rows.
                work.keep(rows)
                attended = attended[rows]
            addend = layer.feed_forward(work, attended)
        return addend

    def _compute(
        self, step: PagedStep, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor,
        barred: Int64Array | None,
    ) -> torch.Tensor:  # fmt: skip
        """Return logits of ``rows`` as the output layer computes them, or candidates if something is ``barred``."""
        if (steps := self._steps_for(step, len(token_ids))) is not None:
            work = self._begin(step, token_ids, positions, steps.workspace)
            return self._repeat(steps, step, work, rows, barred)
        work = self._begin(step, token_ids, positions)
        addend = self._run_layers(step, work, rows)
        if not len(rows):
            return self._output.no_logits(work)
        return self._output.compute(work, addend, None if barred is None else self._output.bar(work, barred))

    def _repeat_all_rows(self, steps: RecordedSteps, step: PagedStep, work: StepRows) -> None:
        """Compute all rows up to the attention of the last layer, as ``steps`` has it recorded."""
        *layers, last = self._layers

        def compute_all() -> None:
            addend = None
            for layer in layers:
                addend = layer.feed_forward(work, layer.attend(step, work, addend))
            last.attend(step, work, addend)

        are_apart = work.destination is not None and work.destination.are_apart
        shape = StepShape(len(work.residual), are_apart)
        part = "all rows" if work.adapters is None else "all rows, with adapters"
        steps.run(part, step.attention, self._tables, shape, compute_all)

    @property
    def _tables(self) -> tuple[int, ...]:
        """Where the angles are."""
        return tuple(angles.table.data_ptr() for angles in self._angles)

    def _repeat(
        self, steps: RecordedSteps, step: PagedStep, work: StepRows, rows: torch.Tensor, barred: Int64Array | None
    ) -> torch.Tensor:
        """Compute a step as ``steps`` has it recorded: to the attention of the last layer, and the wanted rows on."""
        last = self._layers[-1]
        self._repeat_all_rows(steps, step, work)
        if not len(rows):
            return self._output.no_logits(work)
        kept, attended = work.wanted(rows, last.place)
        if len(rows) > MOST_LOGITS:
            kept.workspace = None
        not_these = None if barred is None else self._output.bar(kept, barred)

        def compute_wanted() -> torch.Tensor:
            return self._output.compute(kept, last.feed_forward(kept, attended), not_these)

        if kept.workspace is None:
            return compute_wanted()
        part = "logits of wanted rows" if barred is None else "candidates of wanted rows"
        part = part if kept.adapters is None else f"{part}, with adapters"
        steps.run(part, step.attention, self._tables, StepShape(len(rows)), compute_wanted)
        return self._output.computed(kept, not_these)

    def _begin(
        self, step: PagedStep, token_ids: torch.Tensor, positions: torch.Tensor, workspace: Workspace | None = None
    ) -> StepRows:
        """Look the tokens up and return what the layers work on, in the workspace if there is one."""
        residual = nn.functional.embedding(token_ids, self._embedding.weight)
        if self._scale != 1.0:
            residual *= self._scale
        num_positions = int(positions.max()) + 1
        for angles in self._angles:
            angles.grow(num_positions)
        slots, (num_rows, hidden), dtype = step.slots, residual.shape, residual.dtype
        if workspace is None:
            normed, gated = torch.empty_like(residual), residual.new_empty(num_rows, self._gated_size)
        else:
            residual = workspace.take("residual", num_rows, hidden, dtype).copy_(residual)
            normed = workspace.take("normed", num_rows, hidden, dtype)
            gated = workspace.take("gated", num_rows, self._gated_size, dtype)
            positions = workspace.take("positions", num_rows, 1, torch.int64)[:, 0].copy_(positions)
            slots = workspace.take("slots", num_rows, 1, torch.int64)[:, 0].copy_(slots)
        attention, destination = step.attention, None
        if isinstance(attention, ShowsKVPool) and isinstance(attention.layout, KVLayout):
            are_apart = len(set((slots // attention.layout.block_size).tolist())) == num_rows
            destination = KVDestination(attention.layout, attention.pool, slots, are_apart)
        adapters, take = None, new_room if workspace is None else workspace.take
        if step.adapter_slots is not None and self.adapters is not None:
            adapters = self.adapters.of_rows(step.adapter_slots, take)
        return StepRows(residual, normed, gated, positions, destination, workspace, adapters)


def _fuse(factory: LinearFactory, on_unused: OnUnused, parent: nn.Module, names: tuple[str, ...]) -> PackedLinear:
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


def _weight_of(norm: Any, family: Family) -> torch.Tensor:
    """Return a norm's weight as ``RmsNorm`` reads it: in float32 where the product alone is rounded."""
    weight: torch.Tensor = norm.weight.detach()
    return weight.clone() if family.norm_offset is None else weight.float() + family.norm_offset


def _epsilon_of(norm: Any) -> float:
    return float(vars(norm).get("variance_epsilon") or norm.eps)


def _norm(module: Any, family: Family) -> RmsNorm:
    return RmsNorm(_weight_of(module, family), _epsilon_of(module), module.weight.dtype)


def _rotary(
    attention: Any, place: AttentionLayer, family: Family, angles: RotaryAngles, dtype: torch.dtype
) -> RotaryEmbedding:
    shape, turn = (place.num_heads, place.num_kv_heads, place.key_head_size, dtype), (angles.size, angles.is_rounded)
    if not family.has_head_norms:
        return RotaryEmbedding(*shape, rotary_size=turn[0], rounds=turn[1])
    weights = _weight_of(attention.q_norm, family), _weight_of(attention.k_norm, family)
    return RotaryEmbedding(
        *shape, norms=weights, epsilon=_epsilon_of(attention.q_norm), rotary_size=turn[0], rounds=turn[1]
    )
