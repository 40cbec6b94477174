"""Which linear layers of a taken-over model take adapters, under which names, and as which outputs of which products.

Owns the walk over the module tree after its weights were packed. A layer takes an adapter if all rows of a step pass it
once, in their order: not the output layer, whose product may return no outputs. Experts see some rows, of which
``PackedExperts`` knows the adapters; a module of experts takes adapters if all rows of a step come to it once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from pagedcore.models.decoders.fused_layers import FusedPart
from pagedcore.models.decoders.plain import AdaptedDecoder, Decoder
from pagedcore.models.families.wrappers import WHOLE, leaves_layers_out, text_name
from pagedcore.models.linears.packed_experts import PackedExperts
from pagedcore.models.linears.packed_linear import PackedLinear
from pagedcore.models.lora.adapter import (
    AdaptedExperts,
    AdaptedLayer,
    AdaptedModel,
    LoraAdapter,
    adapter_bytes,
    read_adapter,
)
from pagedcore.models.lora.slots import AdapterSlots
from pagedcore_kernels.cpu.runtime.threads import torch_beside_kernels

_FORMATS: Final = torch.float32, torch.bfloat16
_PARTS: Final = {"gate_up_proj": ("gate_proj", "up_proj")}
"""Layers of an expert that are one parameter of all experts."""
_OLDER: Final = re.compile(r"(.+)\.(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(w[123])")
_OLDER_PARTS: Final = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""As the layers of Mixtral's experts were called."""


class AdaptedProducts:
    """The products of one decoder that take adapters, and the slots that they read.

    The decoder updates rows by these slots from here on, until ``leave``.
    """

    def __init__(self, model: Any, decoder: AdaptedDecoder, max_adapters: int, max_rank: int) -> None:
        """Look at the model that ``decoder`` computes, which may be run with three tokens; see ``AdapterSlots``."""
        linear = dict(_linear_layers(model))
        head = model.get_output_embeddings()
        inside = {name: one for name, one in linear.items()
                  if one is not head and "experts" not in name.split(".") and _format(one) in _FORMATS}
        of_experts = {name: one for name, one in model.named_modules()
                      if isinstance(one, PackedExperts) and _format(one.gate_up[0]) in _FORMATS}
        self._decoder: AdaptedDecoder | None = decoder
        self._max_adapters, self._max_rank = max_adapters, max_rank
        self._products: list[PackedLinear] = []
        numbers, layers = dict[int, int](), dict[str, AdaptedLayer]()
        taken = sorted(decoder.adapted({**inside, **of_experts}))
        for name in [one for one in taken if one in inside]:
            whole, begin, end = _place(inside[name])
            if id(whole) not in numbers:
                numbers[id(whole)] = len(self._products)
                self._products.append(whole)
            layers[name] = AdaptedLayer(numbers[id(whole)], whole.in_features, begin, end)
        self._experts = {name: of_experts[name] for name in taken if name in of_experts}
        experts = {name: self._add_experts(name, one, layers) for name, one in self._experts.items()}
        self._model = AdaptedModel(
            layers, experts, lambda name: _why_not(name, linear, head), _own_name(model, {*layers, *experts}))
        self.slots = AdapterSlots(self._products, max_adapters, max_rank)
        """All empty."""
        for product, update in zip(self._products, self.slots.updates, strict=True):
            product.update = update
        for one in self._experts.values():
            one.takes_adapters = True
        decoder.use_adapters(self.slots)

    def num_bytes(self, directory: str) -> int:
        """Return ``adapter_bytes`` of a directory."""
        return adapter_bytes(Path(directory), self._model, self._max_rank)

    def read(self, directory: str) -> LoraAdapter:
        """Return ``read_adapter`` of a directory."""
        return read_adapter(Path(directory), self._model, self._max_rank)

    def moved(self, model: Any, decoder: Decoder) -> AdaptedProducts:
        """Return the same slots, with the adapters in them, of another model of the same form and its decoder."""
        assert isinstance(decoder, AdaptedDecoder)  # Invariant: it is the decoder of the same form
        with torch_beside_kernels():
            other = AdaptedProducts(model, decoder, self._max_adapters, self._max_rank)
        self.slots.fill(other.slots)
        return other

    def leave(self) -> None:
        """Let go of the products and the decoder, which computes as it did before; slots keep their adapters, for
        ``moved``.
        """
        for product in self._products:
            product.update = None
        for one in self._experts.values():
            one.takes_adapters = False
        if self._decoder is not None:
            self._decoder.use_adapters(None)
        self._products, self._experts, self._decoder = [], {}, None

    def _add_experts(self, name: str, experts: PackedExperts, layers: dict[str, AdaptedLayer]) -> AdaptedExperts:
        """Add the products of experts, and the layers that each of them was."""
        parameters = dict[str, AdaptedLayer]()
        for parameter, products in zip(experts.names, (experts.gate_up, experts.down), strict=True):
            begin, (inputs, outputs) = len(self._products), (products[0].in_features, products[0].out_features)
            parameters[parameter] = AdaptedLayer(begin, inputs, 0, outputs)
            self._products += products
            parts = _PARTS.get(parameter, (parameter,))
            if len(parts) > 1 and not experts.experts.is_concatenated:
                continue
            size = outputs // len(parts)
            for number in range(len(products)):
                for place, part in enumerate(parts):
                    layers[f"{name}.{number}.{part}"] = AdaptedLayer(
                        begin + number, inputs, place * size, (place + 1) * size)
        return AdaptedExperts(len(experts.gate_up), parameters)


def why_no_adapters(model: Any, decoder: Decoder, device: str) -> str:
    """Say why a model takes no adapters at all; "" if it does."""
    if device != "cpu":
        return "adapters are computed on the CPU alone"
    if not isinstance(decoder, AdaptedDecoder):
        return "its decoder computes none"
    if leaves_layers_out(str(vars(model.config).get(WHOLE))):
        return "its layers have other numbers than those of the model that it is a part of"
    return ""


def _linear_layers(model: Any) -> list[tuple[str, Any]]:
    """Return the linear layers of a packed model by name, without the products that fused parts share."""
    found = [(name, one) for name, one in model.named_modules() if isinstance(one, FusedPart | PackedLinear)]
    shared = {id(one.whole) for _, one in found if isinstance(one, FusedPart)}
    return [(name, one) for name, one in found if id(one) not in shared]


def _place(layer: FusedPart | PackedLinear) -> tuple[PackedLinear, int, int]:
    if isinstance(layer, FusedPart):
        return layer.whole, layer.begin, layer.end
    return layer, 0, layer.out_features


def _format(layer: FusedPart | PackedLinear) -> torch.dtype:
    return _place(layer)[0].weight.dtype


def _why_not(name: str, linear: Mapping[str, Any], head: Any) -> str:
    if "experts" in name.split("."):
        return "Experts take no adapters here."
    if linear.get(name, head) is head and name.split(".")[-1] == "lm_head":
        return "The output layer takes none here."
    return "This layer's product takes none here." if name in linear else "The model has no linear layer of this name."


def _own_name(model: Any, known: Collection[str]) -> Callable[[str], str]:
    """Return what turns an adapter's name of a layer into the model's, which may be a part of a wrapper, or have had
    other names for experts.
    """
    is_part = vars(model.config).get(WHOLE) is not None

    def own(name: str) -> str:
        found = name if name in known or not is_part else text_name(name) or name
        if found in known or (older := _OLDER.fullmatch(found)) is None:
            return found
        return f"{older[1]}.mlp.experts.{older[2]}.{_OLDER_PARTS[older[3]]}"

    return own
