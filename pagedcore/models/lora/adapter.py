"""One LoRA adapter of PEFT, read and arranged for the products of one model.

Owns the comparison of an adapter's tensors with its settings and with the model's layers: every tensor belongs to a
layer that takes one, every layer that the settings name has both matrices, and all have the shapes that they should.
That is decided by the heads of the files alone, before memory is taken.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch

from pagedcore.models.lora.adapter_config import AdapterConfig, refused, shown
from pagedcore.models.lora.adapter_file import WEIGHTS, AdapterFile, StoredTensor, adapter_file, config_bytes
from pagedcore_kernels.cpu.matmul.low_rank import LowRankPair, UpdatePart, pair_bytes
from pagedcore_kernels.cpu.runtime.huge_pages import use_huge_pages
from pagedcore_kernels.cpu.simd import LINE

_TENSOR: Final = re.compile(r"base_model\.model\.(.{1,400})\.lora_([AB])\.weight")
_INNER: Final = ".base_layer"
"""Behind the name of experts: the matrices of the parameter that PEFT wraps first."""
_OF_EXPERT: Final = re.compile(r"(.*\.experts)\.\d+\.\w+")


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A layer of the model that takes adapters: some outputs of one of its products."""

    product: int
    """Number of the product."""
    num_inputs: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class AdaptedExperts:
    """The experts of a layer, whose weights are parameters of all of them together."""

    count: int
    parameters: Mapping[str, AdaptedLayer]
    """By name, in the order in which PEFT wraps them: that of the first expert, whose product those of the others
    follow."""


@dataclass(frozen=True, slots=True)
class AdaptedModel:
    """What of a model takes adapters."""

    layers: Mapping[str, AdaptedLayer]
    """By name, also those of single experts as files had them when they were layers."""
    experts: Mapping[str, AdaptedExperts]
    """By name."""
    why_not: Callable[[str], str]
    """Says in a sentence why a layer of any other name takes no adapter."""
    own_name: Callable[[str], str]
    """Returns the model's name of a layer that an adapter calls otherwise."""


@dataclass(frozen=True, slots=True, eq=False)
class LoraAdapter:
    """A checked adapter in memory of its own, of no engine yet."""

    digest: bytes
    """32 bytes over its layers, their scales and all numbers: the same adapter has the same wherever it lies."""
    max_rank: int
    pairs: Mapping[int, LowRankPair]
    """By the number of the product."""
    memory: torch.Tensor
    """Of all pairs, in one piece, which goes back to the system when nobody has it any more."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its memory."""
        return self.memory.nbytes


@dataclass(frozen=True, slots=True)
class _Layer:
    """What the head of a file has for one layer."""

    place: AdaptedLayer
    name: str
    """As the adapter has it."""
    scale: float
    first: StoredTensor
    second: StoredTensor
    expert: int = 0
    num_experts: int = 1
    """Whose matrices are in the same tensors."""

    @property
    def rank(self) -> int:
        """Rank of its matrices."""
        return self.first.shape[0] // self.num_experts

    @property
    def is_bf16(self) -> bool:
        """Whether both are bfloat16."""
        return self.first.dtype == self.second.dtype == torch.bfloat16


def adapter_bytes(directory: Path, model: AdaptedModel, most_rank: int) -> int:
    """Return ``num_bytes`` of the adapter in a directory, by its configuration and the head of its file.

    Raises:
        InvalidAdapter: it is none, or not for this model, or has matrices of a higher rank.
        OSError: a file cannot be read.
    """
    config = AdapterConfig(config_bytes(directory))
    with adapter_file(directory) as file:
        return sum(_bytes_of_pairs(_layers(config, file, model, most_rank)).values())


def read_adapter(directory: Path, model: AdaptedModel, most_rank: int) -> LoraAdapter:
    """Read the adapter in a directory. Raises as ``adapter_bytes``."""
    config = AdapterConfig(config_bytes(directory))
    digest, pairs = hashlib.sha256(), dict[int, LowRankPair]()
    with adapter_file(directory) as file:
        layers, read = _layers(config, file, model, most_rank), _Reader(file, digest.update)
        sizes = _bytes_of_pairs(layers)
        memory, end = _aligned(sum(sizes.values())), 0
        for number, size in sizes.items():
            begin, end = end, end + size
            pairs[number] = LowRankPair(
                [read.part(one) for one in layers[number]], memory[begin:end])
    most = max(one.rank for parts in layers.values() for one in parts)
    return LoraAdapter(digest.digest(), most, pairs, memory)


def _bytes_of_pairs(layers: Mapping[int, list[_Layer]]) -> dict[int, int]:
    """Return the bytes of each product's pair, in the order of the products."""
    return {
        number: pair_bytes(parts[0].place.num_inputs, [(one.rank, one.second.shape[0]) for one in parts],
                           2 if all(one.is_bf16 for one in parts) else 4)
        for number, parts in sorted(layers.items())
    }  # fmt: skip


def _aligned(num_bytes: int) -> torch.Tensor:
    """Return new memory that begins at a cache line, uint8."""
    memory = torch.empty(num_bytes + LINE, dtype=torch.uint8)
    begin = -memory.data_ptr() % LINE
    use_huge_pages(memory)
    return memory[begin : begin + num_bytes]


class _Reader:
    """Reads the matrices of layers, once where several experts have them, and notes all that the layers compute by."""

    def __init__(self, file: AdapterFile, note: Callable[[bytes], object]) -> None:
        self._file, self._note = file, note
        self._name, self._pair = "", (torch.empty(0), torch.empty(0))

    def part(self, layer: _Layer) -> UpdatePart:
        """Return what a layer is updated by."""
        if layer.name != self._name:
            self._name, self._pair = layer.name, self._both(layer)
        first, second = self._pair
        if (count := layer.num_experts) > 1:
            # Shape: ranks of an expert are side by side in the first, and experts of a rank in the second.
            first = first.view(count, layer.rank, -1)[layer.expert]
            second = second.view(len(second), layer.rank, count)[:, :, layer.expert].contiguous()
        return UpdatePart(layer.place.begin, layer.place.end, first, second, layer.scale)

    def _both(self, layer: _Layer) -> tuple[torch.Tensor, torch.Tensor]:
        self._note(f"{layer.name}|{layer.scale.hex()}|{layer.first.dtype}{layer.first.shape}"
                   f"|{layer.second.dtype}{layer.second.shape}|".encode())  # fmt: skip
        first, second = (self._file.read(_tensor_name(layer.name, kind)) for kind in "AB")
        for one in (first, second):
            self._note(memoryview(one.view(torch.uint8).numpy()))  # type: ignore[arg-type]  # Shape: bytes
        # Why not as they are: no kernel reads float16, whose numbers float32 has all.
        first, second = (one.float() if one.dtype == torch.float16 else one for one in (first, second))
        return first, second


def _tensor_name(layer: str, kind: str) -> str:
    return f"base_model.model.{layer}.lora_{kind}.weight"


def _layers(
    config: AdapterConfig, file: AdapterFile, model: AdaptedModel, most_rank: int
) -> Mapping[int, list[_Layer]]:
    """Return the layers of an adapter by their products, in the order of their outputs."""
    names = _names_of_layers(file)
    config.require_few_patterns(len(names))
    by_product = defaultdict[int, list[_Layer]](list)
    known = dict[str, str]()
    for name in sorted(names):
        own = model.own_name(name)
        if (group := model.experts.get(own.removesuffix(_INNER))) is not None:
            own, parameter = _parameter(config, name, own, group)
        if own in known:
            raise refused(shown(name), f"another name of {shown(known[own])}", "each layer once")
        known[own] = name
        if group is not None:
            for one in _experts(config, file, name, parameter, group, most_rank):
                by_product[one.place.product].append(one)
            continue
        if (place := model.layers.get(own)) is None:
            raise refused(shown(name), "matrices of an adapter", "none there", model.why_not(own))
        if config.targets(name, is_linear=True) is False:
            raise refused(shown(name), "matrices of an adapter", "those of layers that its settings name")
        by_product[place.product].append(_layer(config, file, name, place, most_rank))
    if not names:
        raise refused(WEIGHTS, "no matrices of an adapter", "lora_A and lora_B of one layer or more")
    _require_all(config, model, known)
    found = {number: sorted(parts, key=lambda one: one.place.begin) for number, parts in by_product.items()}
    for parts in found.values():
        for one, other in pairwise(parts):
            if other.place.begin < one.place.end:
                raise refused(shown(other.name), "matrices of outputs that others are of too", "each output once")
    return found


def _require_all(config: AdapterConfig, model: AdaptedModel, known: Mapping[str, str]) -> None:
    """Refuse an adapter that lacks matrices of what its settings name; ``known`` are those that it has."""
    begun = {experts for name in known if (experts := _experts_of(name)) is not None}
    for own in model.layers:
        # Why: where a model keeps its experts together, names of layers do not mean them.
        is_left = _experts_of(own) not in (None, *begun)
        if own not in known and not is_left and config.targets(own, is_linear=True):
            raise refused(shown(own), "no matrices", "both of each layer that the adapter's settings name")
    parameters = [f"{name}.{one}" for name, group in model.experts.items() for one in group.parameters]
    for own in parameters:
        if own not in known and config.targets_parameter(own):
            raise refused(shown(own), "no matrices", "both of each parameter that the adapter's settings name")
    for end in config.parameters:
        if not any(own == end or own.endswith(f".{end}") for own in parameters):
            raise refused("target_parameters", shown(end), "parameters of experts that this model has")


def _experts_of(layer: str) -> str | None:
    """Return the experts that a single one's layer is of; ``None``: it is of none."""
    found = _OF_EXPERT.fullmatch(layer)
    return None if found is None else found[1]


def _parameter(config: AdapterConfig, name: str, own: str, group: AdaptedExperts) -> tuple[str, str]:
    """Return the full and the short name of the parameter of experts that an adapter's tensors are for."""
    experts = own.removesuffix(_INNER)
    meant = [one for one in group.parameters if config.targets_parameter(f"{experts}.{one}")]
    # Why: PEFT wraps the second one around the first.
    place = 0 if len(meant) == 1 or own != experts else 1
    if not meant or len(meant) > 2 or (own != experts and len(meant) != 2):
        raise refused(shown(name), "matrices of an adapter", "those of parameters that its settings name")
    return f"{experts}.{meant[place]}", meant[place]


def _experts(
    config: AdapterConfig, file: AdapterFile, name: str, parameter: str, group: AdaptedExperts, most_rank: int
) -> Iterator[_Layer]:
    """Yield what one parameter's matrices are for each expert."""
    place, key = group.parameters[parameter], f"{name.removesuffix(_INNER)}.{parameter}"
    whole = _layer(config, file, name, place, most_rank, key, group.count)
    for number in range(group.count):
        yield replace(whole, place=replace(place, product=place.product + number), expert=number)


def _names_of_layers(file: AdapterFile) -> set[str]:
    found = defaultdict[str, set[str]](set)
    for name in file.tensors:
        if (match := _TENSOR.fullmatch(name)) is None:
            raise refused(shown(name), "a tensor of another kind", "lora_A and lora_B of linear layers",
                          "Embeddings, magnitudes of DoRA, biases and whole modules of an adapter are not computed.")
        found[match[1]].add(match[2])
    if halves := sorted(name for name, kinds in found.items() if len(kinds) < 2):
        raise refused(shown(halves[0]), "one matrix", "both lora_A and lora_B")
    return set(found)


def _layer(
    config: AdapterConfig, file: AdapterFile, name: str, place: AdaptedLayer, most_rank: int, key: str = "",
    num_experts: int = 1,
) -> _Layer:
    """Return a layer of a file; ``key`` is what its settings call it, where that is another name."""
    first, second = (file.tensors[_tensor_name(name, kind)] for kind in "AB")
    rank = config.rank_of(key or name)
    if rank > most_rank:
        raise refused(shown(name), f"a rank of {rank}", f"a rank of at most {most_rank}")
    expected = (rank * num_experts, place.num_inputs), (place.end - place.begin, rank * num_experts)
    if (first.shape, second.shape) != expected:
        raise refused(shown(name), f"matrices of shapes {list(first.shape)} and {list(second.shape)}",
                      f"{list(expected[0])} and {list(expected[1])}",
                      "The adapter's settings or its base model are others than its numbers were made with.")
    return _Layer(place, name, config.scale_of(key or name), first, second, 0, num_experts)
