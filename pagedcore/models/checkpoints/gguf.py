"""Models in GGUF files: the configuration that their metadata describe, and their tensors by the names of transformers.

Owns what the architectures of ``gguf_architectures.py`` have in common. A metadata entry of the architecture, or a
tensor, that is not known to be harmless is refused. Rows of query and key that alternate between the halves of a head
are put in transformers' order again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from pagedcore.config.schemes import scheme_of
from pagedcore.execution.memory_pages import FileMappings
from pagedcore.models.checkpoints.gguf_angles import ENTRIES, FACTORS, LONG, SHORT, factors_of, rope_of
from pagedcore.models.checkpoints.gguf_architectures import ARCHITECTURES
from pagedcore.models.checkpoints.gguf_blocks import BlockType
from pagedcore.models.checkpoints.gguf_file import GGUFFile
from pagedcore.models.checkpoints.gguf_metadata import Metadata
from pagedcore.models.checkpoints.stored_experts import GATED, expert_parts, put_experts
from pagedcore.models.linears.packed_experts import matrices_of_experts
from pagedcore.models.linears.stored_weight import (
    QuantizedWeight,
    StoredMatrices,
    StoredWeight,
    alternating,
    refusal,
)

_SIZES: Final = {
    "embedding_length": "hidden_size", "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "context_length": "max_position_embeddings",
}
_EPSILON: Final = "attention.layer_norm_rms_epsilon"
_OTHERS: Final = frozenset({
    _EPSILON, "attention.head_count_kv", "attention.key_length", "attention.value_length", "tensor_data_layout",
    "vocab_size",
})
"""What is read besides, or says nothing that the rest does not."""
_OFF: Final = frozenset({"attention.sliding_window", "expert_count", "expert_used_count"})
"""What must be 0 where an architecture does not know it."""
_NAMES: Final = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd", "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT: Final = re.compile(r"(mlp\.experts)\.(\d+)(\..+)")
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_ENDS: Final = ("eos", "eot", "eom")
_SUPPRESSED: Final = "tokenizer.ggml.suppress_tokens"
_AT_ONCE: Final = 1 << 20
"""Numbers that are decoded at once."""


class GGUF:
    """The model of one file, a ``StoredFormat`` that has tensors as ``TensorFiles`` does, by transformers' names.

    Raises:
        InvalidConfig: the file is damaged.
        ModelNotSupported: its architecture or a type of its tensors cannot be computed here.
    """

    def __init__(self, path: str) -> None:
        self._file = GGUFFile(path)
        self.metadata: Mapping[str, Any] = self._file.metadata
        self._name = self.metadata.get("general.architecture")
        if not isinstance(self._name, str) or self._name not in ARCHITECTURES:
            raise refusal(f"its architecture is {str(self._name)[:80]!r}")
        self._architecture = ARCHITECTURES[self._name]
        self._given = Metadata(self.metadata, self._name, self._file.tensors.keys())
        self.fields = self._fields()
        """Of the configuration, by transformers' names."""

    @property
    def scheme(self) -> str:
        """"gguf", or "none" for a file without quantised tensors."""
        return "none" if all(entry.kind.decode is None for entry in self._file.tensors.values()) else "gguf"

    @property
    def described(self) -> str:
        """How many matrices are of which type."""
        counts = Counter(one.kind.name for one in self._file.tensors.values() if len(one.shape) > 1)
        return ", ".join(f"{count} matrices in {name}" for name, count in counts.most_common())

    def config(self) -> Any:
        """Return the configuration as transformers has it."""
        from transformers import AutoConfig

        return AutoConfig.for_model(**self.fields)

    @property
    def suppressed(self) -> list[int]:
        """Tokens that the model must not say, as the file's metadata have them.

        Raises:
            ModelNotSupported: they are no tokens.
        """
        given = self.metadata.get(_SUPPRESSED, [])
        if not isinstance(given, list) or not all(type(one) is int and one >= 0 for one in given):
            raise refusal(f"its {_SUPPRESSED} are {str(given)[:80]}, needed are ids of tokens")
        return given

    def __contains__(self, name: str) -> bool:
        return self._names_of(name)[0] in self._file.tensors

    def expect(self, name: str, shape: tuple[int, ...], *formats: str) -> torch.Tensor:
        """Return a tensor of numbers of this shape, mapped; they may be of any format of ``FLOATS``.

        Raises:
            ModelNotSupported: there is none.
        """
        if len(own := self._names_of(name)) > 1:
            parts = [self._numbers_of(one, (*shape[:-1], shape[-1] // len(own))) for one in own]
            return torch.stack(parts, dim=-1).flatten(-2)
        kind, rows = self._rows(name, shape)
        if kind.dtype is None:
            raise refusal(f"{own[0]} is of the type {kind.name}, and no matrix of a linear layer")
        order, columns = self._orders(name, shape[0])
        numbers = rows.view(kind.dtype).view(shape)
        numbers = numbers if order is None else numbers[order]
        return self._architecture.numbers(name, numbers if columns is None else numbers[..., columns])

    def weight(self, files: Any, name: str, shape: tuple[int, int], dtype: torch.dtype) -> StoredWeight | None:
        """Return the weight of a layer by its name, or ``None`` if the file holds it as numbers.

        Raises:
            ModelNotSupported: its tensor is missing, or of another shape.
        """
        kind, rows = self._rows(f"{name}.weight", shape)
        if kind.decode is None:
            return None
        order, columns = self._orders(f"{name}.weight", shape[0])
        groups = None if columns is None else _groups(columns, kind, name)

        def read() -> QuantizedWeight:
            weight = kind.weight(rows if order is None else rows[order], name)
            return weight if groups is None or columns is None else _with_columns(weight, columns, groups)

        return _stored(kind, [rows], shape, dtype, read)

    def numbers(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor's numbers: mapped, as ``expect``, or decoded from blocks to float32 and rounded to ``dtype``,
        some rows at a time; the pages of the file are given back.

        Raises:
            ModelNotSupported: there is none of this shape, or a scale is not finite.
        """
        kind, rows = self._rows(name, shape)
        if kind.decode is None:
            return self.expect(name, shape)
        (order, columns), numbers = self._orders(name, shape[0]), torch.empty(shape, dtype=dtype)
        at_once = max(1, _AT_ONCE // shape[-1])
        for start in range(0, len(rows), at_once):
            some = slice(start, start + at_once)
            numbers[some] = kind.weight(rows[some] if order is None else rows[order[some]], name).numbers()
        FileMappings().free_pages(rows)
        return numbers if columns is None else numbers[:, columns]

    def replace_embedding(
        self, name: str, module: nn.Embedding, dtype: torch.dtype, own_rows: torch.Tensor | None = None
    ) -> None:
        """Keep an embedding's rows as the file has them, in memory; they are decoded when they are looked up.

        With ``own_rows``, which somebody keeps already, those.

        Raises:
            ModelNotSupported: they have another size, or the tensor is none of blocks.
        """
        shape = module.num_embeddings, module.embedding_dim
        if (weight := self.weight(self, name, shape, dtype)) is None:
            if own_rows is not None:
                raise refusal(f"{name} is of numbers, and its packed rows are blocks")
            return
        kind, rows = self._rows(f"{name}.weight", shape)
        if own_rows is not None and (own_rows.shape, own_rows.dtype) != (rows.shape, rows.dtype):
            raise refusal(f"{name} has rows {list(rows.shape)}, and packed are {list(own_rows.shape)}")
        rows = rows.clone() if own_rows is None else own_rows

        def look_up(token_ids: torch.Tensor) -> torch.Tensor:
            numbers = kind.weight(rows[token_ids.flatten()], name).numbers()
            return numbers.to(dtype).view(*token_ids.shape, shape[1])

        del module.weight
        module.weight = replace(weight, tensors=[rows], look_up=look_up)  # type: ignore[assignment]

    @property
    def alternates_experts(self) -> bool:
        """Whether experts are put in their places by ``replace_experts`` here."""
        return self._architecture.alternates_experts

    def replace_experts(self, model: nn.Module, dtype: torch.dtype) -> int:
        """Put stored matrices, whose outputs alternate between two of the file, in the place of all parameters of
        experts; return how many.

        Raises:
            ModelNotSupported: tensors have other shapes than the model, or are numbers.
        """
        count = 0
        for name, module in model.named_modules():
            for part, matrices in zip(expert_parts(module), matrices_of_experts(module), strict=False):
                put_experts(module, part, StoredMatrices(self._experts(f"{name}.{part}", tuple(matrices.shape), dtype)))
                count += 1
        return count

    def _experts(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[StoredWeight]:
        num_experts, num_outputs, num_inputs = shape
        own = self._names_of(name)
        each = num_outputs // len(own)
        found = [self._rows_of(one, (num_experts, each, num_inputs)) for one in own]
        for one, (kind, _) in zip(own, found, strict=True):
            if kind.decode is None:
                raise refusal(f"{one} is of the type {kind.name}, needed is one of blocks")
        kind, is_uniform = found[0][0], len({kind.name for kind, _ in found}) == 1
        for number in range(num_experts):
            parts = [(other, rows[number * each :][:each]) for other, rows in found]
            if is_uniform:
                some = [rows for _, rows in parts]
                yield _stored(kind, some, (num_outputs, num_inputs), dtype, partial(_alternating, kind, some, name))
                continue
            yield alternating([
                _stored(other, [rows], (each, num_inputs), dtype, partial(other.weight, rows, name))
                for other, rows in parts
            ])

    def require_names(self, names: Iterable[str]) -> None:
        """Refuse a file with other tensors than a model that has these.

        Raises:
            ModelNotSupported: it has.
        """
        known = {own for name in names for own in self._names_of(name)} | self._tensors_of_angles()
        if others := sorted(self._file.tensors.keys() - known - self._unused()):
            raise refusal(f"{others[0][:80]} is no tensor of the architecture {self._name}")

    def scale_angles(self, model: Any) -> None:
        """Divide the frequencies of a model's rotary embedding by the file's factors, if it has any."""
        if (factors := self.fields.get("rope_frequency_factors")) is not None:
            model.model.rotary_emb.inv_freq /= torch.tensor(factors)

    def _name_of(self, name: str) -> str:
        """Return the file's name of a tensor; all experts of a layer have one for each kind of matrix."""
        module, _, last = name.rpartition(".")
        if found := _LAYER.fullmatch(module):
            inner = _EXPERT.sub(r"\1\3", found[2])
            return f"blk.{found[1]}.{self._architecture.names.get(inner, inner)}.{last}"
        own = f"{self._architecture.others.get(module) or _NAMES.get(module, module)}.{last}"
        return _EMBEDDING if own == _HEAD and _HEAD not in self._file.tensors else own

    def _names_of(self, name: str) -> list[str]:
        """Return the file's names of what a model has as one tensor."""
        if (found := _LAYER.fullmatch(name)) and found[2] in self._architecture.tensors:
            return [f"blk.{found[1]}.{own}" for own in self._architecture.tensors[found[2]]]
        module, _, last = name.rpartition(".")
        if last not in GATED:
            return [self._name_of(name)]
        return [self._name_of(f"{module}.{part}.weight") for part in GATED[last]]

    def _tensors_of_angles(self) -> set[str]:
        is_long = self.fields["rope_parameters"].get("rope_type") == "longrope"
        has_factors = self._architecture.turns_by_factors or self.fields["rope_frequency_factors"] is not None
        return {LONG, SHORT} if is_long else {FACTORS} if has_factors else set()

    def _unused(self) -> set[str]:
        """Return the tensors of layers that read the keys and values of another one, and of layers that only guess;
        files may have them.
        """
        count = self.fields["num_hidden_layers"]
        layers = range(count - self.fields.get("num_kv_shared_layers", 0), count)
        guessing = tuple(f"blk.{layer}." for layer in range(count, self._given.size("block_count")))
        unused = {f"blk.{layer}.{name}.weight" for layer in layers for name in ("attn_k", "attn_v", "attn_k_norm")}
        return unused | {name for name in self._file.tensors if name.startswith(guessing)}

    def _rows(self, name: str, shape: tuple[int, ...]) -> tuple[BlockType, torch.Tensor]:
        """Return a tensor's type and bytes [rows, bytes of a row]."""
        expert = _EXPERT.search(name) if self._architecture.has_experts else None
        if expert is None:
            return self._rows_of(self._names_of(name)[0], shape)
        kind, rows = self._rows_of(self._name_of(name), (self.fields["num_experts"], *shape))
        return kind, rows[int(expert[2]) * shape[0] :][: shape[0]]

    def _rows_of(self, own: str, shape: tuple[int, ...]) -> tuple[BlockType, torch.Tensor]:
        if (entry := self._file.tensors.get(own)) is None:
            raise refusal(f"{own} is missing in its file")
        # Shape: of a convolution, whose channels do not mix, files leave the middle dimension out.
        if entry.shape != shape and entry.shape != tuple(one for one in shape if one != 1):
            raise refusal(f"{own} is of shape {list(entry.shape)}, needed is {list(shape)}")
        return entry.kind, self._file.rows(own)

    def _numbers_of(self, own: str, shape: tuple[int, ...]) -> torch.Tensor:
        kind, rows = self._rows_of(own, shape)
        if kind.dtype is None:
            raise refusal(f"{own} is of the type {kind.name}, needed are numbers")
        return rows.view(kind.dtype).view(shape)

    def _orders(self, name: str, num_outputs: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the file's rows and columns of a tensor in transformers' order; ``None``: they are."""
        architecture = self._architecture
        return architecture.rows(self.fields, name, num_outputs), architecture.columns(self.fields, name)

    def _fields(self) -> dict[str, Any]:
        given, architecture, tensors = self._given, self._architecture, self._file.tensors
        known = _SIZES.keys() | _OTHERS | ENTRIES | architecture.metadata
        if unknown := sorted(given.given.keys() - known - _OFF):
            raise refusal(f"{self._name}.{unknown[0][:80]} in its metadata is not known to be harmless")
        if on := sorted(name for name in _OFF - known if given.get(name)):
            raise refusal(f"its {on[0]} is {given.get(on[0])!r}")
        # Safety: a number of layers that the file does not have is found before anything of that size is made.
        if (count := given.size("block_count")) > len(tensors):
            raise refusal(f"its block_count is {count}, with {len(tensors)} tensors")
        # Why: of a model whose layers are all mixtures, files may say no other width.
        inner = given.get("expert_feed_forward_length")
        fields: dict[str, Any] = {
            own: self._first(name, count, inner if name == "feed_forward_length" else None)
            for name, own in _SIZES.items()
        }
        heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
        fields["num_key_value_heads"] = kv_heads = self._first("attention.head_count_kv", count, heads)
        fields["head_dim"] = head = given.size("attention.key_length", hidden // heads)
        if (length := given.size("attention.value_length", head)) != head:
            raise refusal(f"its attention.value_length is {length}, and its heads are of {head}")
        if head % 2 or heads % kv_heads:
            raise refusal(f"its {heads} heads of {head} are in {kv_heads} groups")
        if (embedding := tensors.get(_EMBEDDING)) is None:
            raise refusal(f"{_EMBEDDING} is missing in its file")
        turned = self._num_turned(head)
        fields |= {
            "model_type": architecture.model_type, "vocab_size": embedding.shape[0], "hidden_act": "silu",
            "pad_token_id": None,
            "rms_norm_eps": given.number(_EPSILON), "tie_word_embeddings": _HEAD not in tensors,
            "rope_parameters": rope_of(given, self._file, turned, fields["max_position_embeddings"]),
            "rope_frequency_factors": factors_of(self._file, FACTORS, turned), **self._tokens(embedding.shape[0]),
        }
        if architecture.may_turn_parts:
            fields["rope_parameters"]["partial_rotary_factor"] = turned / head
        if architecture.has_bias_field:
            fields["attention_bias"] = "blk.0.attn_q.bias" in tensors
        return {**fields, **architecture.fields(given, fields)}

    def _first(self, name: str, count: int, default: int | None = None) -> int:
        """Return a size, of the first layer that has any where each may have one of its own."""
        if name in self._architecture.by_layer:
            sizes = self._given.sizes(name, count, default, least=0 if self._architecture.skips_attention else 1)
            return next(filter(None, sizes))
        return self._given.size(name, default)

    def _num_turned(self, head: int) -> int:
        """Return how many numbers of a head angles turn."""
        count = self._given.size("rope.dimension_count", head)
        is_part = self._architecture.may_turn_parts and count % 2 == 0 and int(head * (count / head)) == count <= head
        if count != head and not is_part:
            raise refusal(f"its rope.dimension_count is {count}, and its heads are of {head}")
        return count

    def _tokens(self, vocab_size: int) -> dict[str, Any]:
        ids = {name: self.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", *_ENDS)}
        known = {name: value for name, value in ids.items() if value is not None}
        for name, value in known.items():
            if type(value) is not int or not 0 <= value < vocab_size:
                raise refusal(f"its {name}_token_id is {str(value)[:80]}, with a vocabulary of {vocab_size}")
        return {"bos_token_id": known.get("bos"),
                "eos_token_id": sorted({known[name] for name in _ENDS if name in known}) or None}


def _stored(
    kind: BlockType, tensors: Sequence[torch.Tensor], shape: tuple[int, int], dtype: torch.dtype,
    read: Callable[[], QuantizedWeight],
) -> StoredWeight:
    return StoredWeight(
        scheme_of(kind.bits), shape, dtype, shape[1] // kind.size * kind.num_groups, tensors, read,
        has_least=kind.has_least, has_halves=kind.has_halves, codebook=kind.codebook,
    )


def _groups(columns: torch.Tensor, kind: BlockType, name: str) -> torch.Tensor:
    """Return the file's group of each group of a matrix whose columns are the file's ``columns``.

    Raises:
        ModelNotSupported: columns of one group are in several of the file.
    """
    size = kind.size // kind.num_groups
    groups = columns.view(-1, size) if len(columns) % size == 0 else columns[:0].view(0, size)
    if not len(groups) or not torch.equal(groups[:, :1] // size * size + torch.arange(size), groups):
        raise refusal(f"{name} is of the type {kind.name}, and its heads are no whole groups of {size} numbers")
    return groups[:, 0] // size


def _with_columns(weight: QuantizedWeight, columns: torch.Tensor, groups: torch.Tensor) -> QuantizedWeight:
    """Return a weight with its columns, and the groups of them, in another order."""
    zeros = None if weight.zeros is None else weight.zeros[:, groups]
    return replace(weight, values=weight.values[:, columns], scales=weight.scales[:, groups], zeros=zeros)


def _alternating(kind: BlockType, parts: Sequence[torch.Tensor], name: str) -> QuantizedWeight:
    """Return what matrices hold whose outputs take turns."""
    return kind.weight(torch.stack(tuple(parts), dim=1).flatten(0, 1), name)
