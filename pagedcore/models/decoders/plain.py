"""The replaceable middle of a model: token ids and positions in, logits of chosen rows out, attention elsewhere.

Owns the protocol and its general implementation, which calls the unmodified module tree with packed linear layers. A
faster decoder for some architectures takes its place by having the same members.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from pagedcore.errors import WeightsIncomplete
from pagedcore.models.attention.interface import PagedStep, attention_step
from pagedcore.models.attention.layers import AttentionLayer, RecordingStep
from pagedcore.models.decoders.long_angles import turn_by_place
from pagedcore.models.decoders.whole_vectors import calls_seen, complete_vectors
from pagedcore.models.families.model_facts import format_and_device, num_short_tokens
from pagedcore.models.linears.float8_linear import Float8Linear, launch_quantizers
from pagedcore.models.linears.packed_experts import pack_experts
from pagedcore.models.linears.packed_linear import FASTEST, OnUnused, PackedLinear, pack_linears
from pagedcore.models.linears.schemes import QuantizedLinears
from pagedcore.models.linears.stored_weight import StoredLinears
from pagedcore.models.linears.torch_products import TorchProduct
from pagedcore.models.lora.slots import AdapterSlots, new_room, present_adapters
from pagedcore.protocols import AttentionBackend, Int64Array, LinearFactory
from pagedcore_kernels.interface import LaunchesKernels


class Decoder(Protocol):
    """Computes one flat batch with one model's weights."""

    products: Sequence[PackedLinear] = ()
    """The matrix products, for the check that their rows are independent."""
    other_matrices: Sequence[str] = ()
    """Types of modules that multiply in their own way, so that nothing can be promised about their rows."""

    adapters: AdapterSlots | None = None
    """The adapters that rows of a step may have; ``None``: no row has one."""

    @property
    def torch_products(self) -> Sequence[TorchProduct]:
        """Matrix products that torch computes, for what can be said of their rows."""
        return ()

    def fallback(self) -> Decoder | None:
        """Return a decoder of the same weights that relies on less, for when this one fails the self-test."""
        return None

    def __call__(
        self, step: PagedStep, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Compute a batch.

        Args:
            step: takes the attention calls.
            token_ids: int64 [T], T at least 2; this and the others on a GPU in int32, where T and S may be 1.
            positions: int64 [T], or places; see ``long_angles.py``.
            rows: int64 [S], S not 1: those of the T tokens whose logits are wanted.

        Returns:
            Logits [S, vocabulary] in any float type.
        """
        ...


@runtime_checkable
class PreparesSteps(Protocol):
    """A decoder that makes something for the steps that one attention backend plans."""

    def prepare(self, attention: AttentionBackend) -> None:
        """Make it, before the first of these steps."""
        ...


@runtime_checkable
class AdaptedDecoder(Protocol):
    """A decoder whose products may update rows that have an adapter."""

    def adapted(self, layers: Mapping[str, Any]) -> Iterable[str]:
        """Return the names of those of a model's linear layers whose outputs can be updated.

        Args:
            layers: by name, the modules in their places.
        """
        ...

    def use_adapters(self, adapters: AdapterSlots | None) -> None:
        """Update rows that have an adapter of these from now on; their products are told by the caller."""
        ...


@runtime_checkable
class GreedyDecoder(Protocol):
    """A decoder that may also choose tokens, without the logits of a whole vocabulary."""

    @property
    def can_pick(self) -> bool:
        """Whether it does for this model."""
        ...

    def pick(
        self, step: PagedStep, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, barred: Int64Array
    ) -> Int64Array:
        """Compute a batch, arguments as for ``Decoder`` with S at least 2, and ``barred`` and the result as
        ``DecodesGreedily`` says.
        """
        ...


@runtime_checkable
class HiddenDecoder(Protocol):
    """A decoder that may also return what it hands to the output layer."""

    def with_hidden(
        self, step: PagedStep, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor,
        hidden_rows: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Compute a batch; return its logits as ``Decoder``, and [H, hidden size] of the tokens ``hidden_rows``, int64
        [H], H at least 2.
        """
        ...


DecoderFactory = Callable[[Any, Mapping[int, AttentionLayer], OnUnused], Decoder]
"""Takes a model whose attention was redirected, its layers by number, and what to call with weights no longer needed.
"""


class PlainDecoder(Decoder):
    """Any architecture, on a device whose matrix products torch's libraries choose: transformers' own modules as is.

    Which kernel they choose depends on the number of rows, so nothing is promised about a row's bits.
    """

    def __init__(self, model: Any, layers: Mapping[int, AttentionLayer], on_unused: OnUnused) -> None:
        self._model = model
        turn_by_place(model, num_short_tokens(model.config))

    @property
    def torch_products(self) -> Sequence[TorchProduct]:
        """The model's linear layers; see ``Decoder``."""
        return [one for one in self._model.modules() if type(one) in (nn.Linear, Float8Linear)]

    def prepare(self, attention: AttentionBackend) -> None:
        """Load the kernel for weights in e4m3, where the backend launches kernels; see ``PreparesSteps``."""
        if isinstance(attention, LaunchesKernels):
            launch_quantizers(self._model.modules(), format_and_device(self._model)[0], attention.driver)

    def __call__(
        self, step: PagedStep, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Compute a batch; see ``Decoder``."""
        with attention_step(step):
            return call_model(self._model, token_ids, positions, rows)

    def with_hidden(
        self, step: PagedStep, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor,
        hidden_rows: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Compute a batch; see ``HiddenDecoder``."""
        with attention_step(step), outputs_of(self._model.base_model) as outputs:
            logits = call_model(self._model, token_ids, positions, rows)
        return logits, outputs[-1][hidden_rows]


class ModuleDecoder(PlainDecoder):
    """Any architecture on the CPU: transformers' own modules, with packed linear layers, whose rows are independent."""

    def __init__(
        self, model: Any, layers: Mapping[int, AttentionLayer], on_unused: OnUnused, linears: LinearFactory = FASTEST
    ) -> None:
        super().__init__(model, layers, on_unused)
        of_experts = pack_experts(model, linears=linears, routers=router_products(linears), on_unused=on_unused)
        report = pack_linears(model, linears=linears, on_unused=on_unused)
        self.products, self.other_matrices = (*of_experts, *report.packed), report.unpacked
        self._complete_vectors()

    def __call__(
        self, step: PagedStep, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Compute a batch; see ``Decoder``."""
        with self._updates(step):
            return super().__call__(step, token_ids, positions, rows)

    def with_hidden(
        self, step: PagedStep, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor,
        hidden_rows: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Compute a batch; see ``HiddenDecoder``."""
        with self._updates(step):
            return super().with_hidden(step, token_ids, positions, rows, hidden_rows)

    def adapted(self, layers: Mapping[str, Any]) -> Iterable[str]:
        """Return layers as ``AdaptedDecoder`` says: those that are called once, with all rows of a step."""
        tokens, seen = torch.arange(3, device=format_and_device(self._model)[1]), defaultdict[str, list[int]](list)

        def note(name: str) -> Any:
            return lambda _, rows: seen[name].append(rows[0].numel() // rows[0].shape[-1])

        hooks = [module.register_forward_pre_hook(note(name)) for name, module in layers.items()]
        try:
            with attention_step(RecordingStep()):
                call_model(self._model, tokens, tokens, tokens)
        finally:
            for hook in hooks:
                hook.remove()
        return [name for name, counts in seen.items() if counts == [len(tokens)]]

    def use_adapters(self, adapters: AdapterSlots | None) -> None:
        """Update rows; see ``AdaptedDecoder``."""
        self.adapters = adapters

    @contextmanager
    def _updates(self, step: PagedStep) -> Iterator[None]:
        if self.adapters is None or step.adapter_slots is None:
            yield
            return
        with present_adapters(self.adapters.of_rows(step.adapter_slots, new_room)):
            yield

    def _complete_vectors(self) -> None:
        """Find out with two tokens which modules give a row other bits in other company, and mend them."""
        tokens = torch.arange(2, device=format_and_device(self._model)[1])
        with attention_step(RecordingStep()), calls_seen(self._model) as found:
            call_model(self._model, tokens, tokens, tokens)
        for module in found:
            complete_vectors(module)


class Incomplete(Decoder):
    """In the place of a decoder whose products are gone."""

    def __call__(
        self, step: PagedStep, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Raise ``WeightsIncomplete``."""
        raise WeightsIncomplete


@contextmanager
def outputs_of(body: Any) -> Iterator[list[torch.Tensor]]:
    """Note the last hidden states [T, hidden size] of every call of a model without its output layer."""
    seen: list[torch.Tensor] = []

    def note(_: Any, __: Any, output: Any) -> None:
        states = output if isinstance(output, torch.Tensor) else output.last_hidden_state
        seen.append(states.reshape(-1, states.shape[-1]))

    hook = body.register_forward_hook(note)
    try:
        yield seen
    finally:
        hook.remove()


def router_products(linears: LinearFactory) -> LinearFactory:
    """Return what makes the products of routers where ``linears`` makes the others."""
    # Why: which experts a row goes to is decided by small differences of few products.
    return FASTEST if isinstance(linears, QuantizedLinears | StoredLinears) else linears


def call_model(model: Any, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Call a causal language model of transformers on one flat row; return logits [S, vocabulary]."""
    # Why: on a GPU a step's numbers have half the size of those that modules take.
    token_ids, positions, rows = token_ids.long(), positions.long(), rows.long()
    output = model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows)
    logits: torch.Tensor = output.logits[0]
    return logits
