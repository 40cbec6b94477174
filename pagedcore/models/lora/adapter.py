"""One LoRA adapter of PEFT, read and arranged for the products of one model.

Owns the comparison of an adapter's tensors with its settings and with the model's layers: every tensor belongs to a
layer that takes one, every layer that the settings name has both matrices, and all have the shapes that they should.
That is decided by the heads of the files alone, before memory is taken.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from pagedcore.models.lora.adapter_config import AdapterConfig, refused, shown
from pagedcore.models.lora.adapter_file import WEIGHTS, AdapterFile, StoredTensor, adapter_file, config_bytes
from pagedcore_kernels.cpu.matmul.low_rank import LowRankPair, UpdatePart, pair_bytes
from pagedcore_kernels.cpu.runtime.huge_pages import use_huge_pages
from pagedcore_kernels.cpu.simd import LINE

_TENSOR: Final = re.compile(r"base_model\.model\.(.{1,400})\.lora_([AB])\.weight")


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A layer of the model that takes adapters: some outputs of one of its products."""

    product: int
    """Number of the product."""
    num_inputs: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class AdaptedModel:
    """What of a model takes adapters."""

    layers: Mapping[str, AdaptedLayer]
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

    @property
    def rank(self) -> int:
        """Rank of its matrices."""
        return self.first.shape[0]

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
        layers = _layers(config, file, model, most_rank)
        sizes = _bytes_of_pairs(layers)
        memory, end = _aligned(sum(sizes.values())), 0
        for number, size in sizes.items():
            begin, end = end, end + size
            pairs[number] = LowRankPair(
                [_read(file, one, digest.update) for one in layers[number]], memory[begin:end])
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


def _read(file: AdapterFile, layer: _Layer, note: Callable[[bytes], object]) -> UpdatePart:
    """Read both matrices of a layer, and ``note`` all that the layer computes by."""
    note(f"{layer.name}|{layer.scale.hex()}|{layer.first.dtype}{layer.first.shape}"
         f"|{layer.second.dtype}{layer.second.shape}|".encode())  # fmt: skip
    first, second = (file.read(_tensor_name(layer.name, kind)) for kind in "AB")
    for one in (first, second):
        note(memoryview(one.view(torch.uint8).numpy()))  # type: ignore[arg-type]  # Shape: bytes, by the buffer
    # Why not as they are: no kernel reads float16, whose numbers float32 has all.
    first, second = (one.float() if one.dtype == torch.float16 else one for one in (first, second))
    return UpdatePart(layer.place.begin, layer.place.end, first, second, layer.scale)


def _tensor_name(layer: str, kind: str) -> str:
    return f"base_model.model.{layer}.lora_{kind}.weight"


def _layers(
    config: AdapterConfig, file: AdapterFile, model: AdaptedModel, most_rank: int
) -> Mapping[int, list[_Layer]]:
    """Return the layers of an adapter by their products, in the order of their outputs."""
    names = _names_of_layers(file)
    by_product = defaultdict[int, list[_Layer]](list)
    known = dict[str, str]()
    for name in sorted(names):
        own = model.own_name(name)
        if own in known:
            raise refused(shown(name), f"another name of {shown(known[own])}", "each layer once")
        known[own] = name
        if (place := model.layers.get(own)) is None:
            raise refused(shown(name), "matrices of an adapter", "none there", model.why_not(own))
        if config.targets(name, is_linear=True) is False:
            raise refused(shown(name), "matrices of an adapter", "those of layers that its settings name")
        by_product[place.product].append(_layer(config, file, name, place, most_rank))
    if not names:
        raise refused(WEIGHTS, "no matrices of an adapter", "lora_A and lora_B of one layer or more")
    for own in model.layers:
        if own not in known and config.targets(own, is_linear=True):
            raise refused(shown(own), "no matrices", "both of each layer that the adapter's settings name")
    return {number: sorted(parts, key=lambda one: one.place.begin) for number, parts in by_product.items()}


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


def _layer(config: AdapterConfig, file: AdapterFile, name: str, place: AdaptedLayer, most_rank: int) -> _Layer:
    first, second = (file.tensors[_tensor_name(name, kind)] for kind in "AB")
    rank = config.rank_of(name)
    if rank > most_rank:
        raise refused(shown(name), f"a rank of {rank}", f"a rank of at most {most_rank}")
    expected = (rank, place.num_inputs), (place.end - place.begin, rank)
    if (first.shape, second.shape) != expected:
        raise refused(shown(name), f"matrices of shapes {list(first.shape)} and {list(second.shape)}",
                      f"{list(expected[0])} and {list(expected[1])}",
                      "The adapter's settings or its base model are others than its numbers were made with.")
    return _Layer(place, name, config.scale_of(name), first, second)
