"""A faster decoder for the architectures of ``models/families/table.py``: fewer, larger matrix products, fused kernels
between them.

Owns the order of operations of one forward, whose layers are in ``fused_layers.py``. It computes what transformers'
modules compute, with the same rounding after every operation; only the order of additions inside a product may differ.
Which models it is for, ``fused_match.py`` says; ``plain.py`` has the general implementation.

Invariant: every kernel works row by row and every product has two rows or more, so a row's bits do not depend on the
batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from pagedcore.models.attention.interface import PagedStep
from pagedcore.models.attention.layers import AttentionLayer
from pagedcore.models.attention.recurrences import known_recurrences
from pagedcore.models.attention.windows import AttentionWithWindows
from pagedcore.models.decoders.fused_layers import (
    FusedAttention,
    FusedConvolution,
    FusedDeltaRule,
    FusedLayer,
    FusedPart,
    Mixer,
    fuse,
    norm_of,
)
from pagedcore.models.decoders.fused_match import NotFused, Recognised, recognise
from pagedcore.models.decoders.output_layer import OutputLayer
from pagedcore.models.decoders.plain import Decoder, ModuleDecoder, router_products
from pagedcore.models.decoders.recorded_steps import MOST_LOGITS, MOST_ROWS, RecordedSteps
from pagedcore.models.decoders.rotary_angles import angles_by_layer
from pagedcore.models.decoders.step_rows import StepRows
from pagedcore.models.families.llama_modules import embedding_scale
from pagedcore.models.linears.packed_experts import pack_experts
from pagedcore.models.linears.packed_linear import FASTEST, OnUnused, PackedLinear, pack_linears
from pagedcore.models.linears.shared_embedding import share_rows
from pagedcore.models.lora.slots import AdapterSlots, new_room
from pagedcore.protocols import Int64Array, LinearFactory, RecordableAttention, ShowsKVPool
from pagedcore_kernels.cpu.layers.elementwise import (
    GatedActivation,
    KVDestination,
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


class FusedDecoder(Decoder):
    """Computes batches of a recognised model; see ``Decoder``.

    The model's own tree stays usable: its linear layers become parts of the fused ones.
    """

    def __init__(
        self, model: Any, layers: Mapping[int, AttentionLayer], known: Recognised, on_unused: OnUnused,
        linears: LinearFactory,
    ) -> None:
        """Fuse the weights, one layer at a time; arguments as for ``best_decoder``, ``known`` as recognised."""
        fused, body, config, family = partial(fuse, linears, on_unused), model.model, model.config, known.family
        multiplier = float(config.residual_multiplier) if family.has_multipliers else 1.0
        self._general = partial(ModuleDecoder, model, layers, on_unused, linears)
        self._embedding, self._scale = body.embed_tokens, embedding_scale(config, model.dtype)
        angles = angles_by_layer(model, layers, family, torch.device("cpu"))
        gate = GatedActivation(known.activation, model.dtype)
        self._angles = tuple(set(angles.values()))

        def pack(mixture: Any) -> tuple[PackedLinear, ...]:
            routed = pack_experts(mixture, linears=linears, routers=router_products(linears), on_unused=on_unused)
            return *routed, *pack_linears(mixture, linears=linears, on_unused=on_unused).packed

        recurrent = {id(module): number for number, module in enumerate(known_recurrences(model))}

        def mixer(number: int, layer: Any) -> Mixer:
            if number in layers:
                return FusedAttention(layer.self_attn, layers[number], family, angles[number], fused)
            module = layer.get_submodule(family.recurrence)
            kind = FusedConvolution if family.convolution else FusedDeltaRule
            return kind(module, recurrent[id(module)], family, fused)

        self._layers = [
            FusedLayer(layer, mixer(number, layer), family, gate, multiplier, fused, pack)
            for number, layer in enumerate(body.layers)
        ]
        # Why: an embedding that does not read the product's rows keeps a weight that is tied.
        is_tied = model.lm_head.weight is self._embedding.weight
        head = fuse(linears, (lambda weight: None) if is_tied else on_unused, model, ("lm_head",))
        if is_tied:
            share_rows(self._embedding, head, on_unused)
        cap = vars(config).get("final_logit_softcapping") if family.is_gemma else None
        divisor = float(config.logits_scaling) if family.has_multipliers else 1.0
        norm = norm_of(body.get_submodule(family.name_of("norm")), family)
        self._output = OutputLayer(norm, head, cap, divisor, model.dtype)
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
        """Return layers as ``AdaptedDecoder`` says: all parts of products between which there are rows alone, experts,
        and layers of experts for all rows.
        """
        own = {id(product) for layer in self._layers for product in layer.dense_products}
        return [name for name, part in layers.items()
                if not isinstance(part, FusedPart) or id(part.whole) in own]

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
            work, attended = work.apart(wanted, last.mixer.output.in_features)
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
            mixed = layer.mix(step, work, addend)
            if layer is self._layers[-1]:
                if not len(rows):
                    return None
                # Why: no later operation reads the other rows.
                work.keep(rows)
                mixed = mixed[rows]
            addend = layer.feed_forward(work, mixed)
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
                addend = layer.feed_forward(work, layer.mix(step, work, addend))
            last.mix(step, work, addend)

        are_apart = work.destination is not None and work.destination.are_apart
        shape = StepShape(len(work.residual), are_apart)
        part = "all rows" if work.adapters is None else "all rows, with adapters"
        steps.run(part, step.attention, self._relied_on(step), shape, compute_all)

    def _relied_on(self, step: PagedStep) -> tuple[int, ...]:
        """Return where the angles are, and which states the step has."""
        # Why by its identity: a recording keeps what its calls ask, so that no other one has it meanwhile.
        return *(angles.table.data_ptr() for angles in self._angles), id(step.states)

    def _repeat(
        self, steps: RecordedSteps, step: PagedStep, work: StepRows, rows: torch.Tensor, barred: Int64Array | None
    ) -> torch.Tensor:
        """Compute a step as ``steps`` has it recorded: to the attention of the last layer, and the wanted rows on."""
        last = self._layers[-1]
        self._repeat_all_rows(steps, step, work)
        if not len(rows):
            return self._output.no_logits(work)
        kept, attended = work.wanted(rows, last.mixer.output.in_features)
        if len(rows) > MOST_LOGITS:
            kept.workspace = None
        not_these = None if barred is None else self._output.bar(kept, barred)

        def compute_wanted() -> torch.Tensor:
            return self._output.compute(kept, last.feed_forward(kept, attended), not_these)

        if kept.workspace is None:
            return compute_wanted()
        part = "logits of wanted rows" if barred is None else "candidates of wanted rows"
        part = part if kept.adapters is None else f"{part}, with adapters"
        steps.run(part, step.attention, self._relied_on(step), StepShape(len(rows)), compute_wanted)
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
        window_slots, windows = step.window_slots, None
        if workspace is None:
            normed, gated = torch.empty_like(residual), residual.new_empty(num_rows, self._gated_size)
        else:
            residual = workspace.take("residual", num_rows, hidden, dtype).copy_(residual)
            normed = workspace.take("normed", num_rows, hidden, dtype)
            gated = workspace.take("gated", num_rows, self._gated_size, dtype)
            positions = workspace.take("positions", num_rows, 1, torch.int64)[:, 0].copy_(positions)
            slots = workspace.take("slots", num_rows, 1, torch.int64)[:, 0].copy_(slots)
            if window_slots is not None:
                room = workspace.take("window slots", num_rows, 1, torch.int64)
                window_slots = room[:, 0].copy_(window_slots)
        attention, destination = step.attention, None
        if isinstance(attention, ShowsKVPool) and isinstance(attention.layout, KVLayout):
            are_apart = len(set((slots // attention.layout.block_size).tolist())) == num_rows
            destination = KVDestination(attention.layout, attention.pool, slots, are_apart)
            if isinstance(attention, AttentionWithWindows) and window_slots is not None:
                layout = attention.windows.layout
                assert isinstance(layout, KVLayout)  # Invariant: both are of one kind
                there = KVDestination(layout, attention.windows.pool, window_slots, are_apart)
                windows = attention.split, there
        adapters, take = None, new_room if workspace is None else workspace.take
        if step.adapter_slots is not None and self.adapters is not None:
            adapters = self.adapters.of_rows(step.adapter_slots, take)
        return StepRows(residual, normed, gated, positions, destination, workspace, adapters, windows)
