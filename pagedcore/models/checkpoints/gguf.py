"""Models in GGUF files: the configuration that their metadata describe, and their tensors by the names of transformers.

Owns what llama.cpp's architectures "llama", "qwen2" and "qwen3" are here. A metadata entry of the architecture, or a
tensor, that is not known to be harmless is refused. Of "llama" files the rows of query and key are put in transformers'
order again: they alternate between the halves of a head.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from pagedcore.config.schemes import scheme_of
from pagedcore.execution.memory_pages import FileMappings
from pagedcore.models.checkpoints.gguf_blocks import BlockType
from pagedcore.models.checkpoints.gguf_file import GGUFFile
from pagedcore.models.linears.stored_weight import StoredWeight, refusal

_ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
_SIZES: Final = {
    "embedding_length": "hidden_size", "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "context_length": "max_position_embeddings",
}
_EPSILON: Final = "attention.layer_norm_rms_epsilon"
_OTHERS: Final = frozenset({
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count",
    "rope.freq_base", "rope.scaling.factor", "rope.scaling.finetuned", "rope.scaling.type", "tensor_data_layout",
    "vocab_size",
})
"""What is read besides, or says nothing that the rest does not."""
_OFF: Final = frozenset({"attention.sliding_window", "expert_count", "expert_used_count"})
"""What must be 0."""
_NAMES: Final = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER_NAMES: Final = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")
_IS_ROTATED: Final = re.compile(r"\.[qk]_proj\.")
_FACTORS: Final = "rope_freqs.weight"
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_ENDS: Final = ("eos", "eot", "eom")
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
        self._architecture = self.metadata.get("general.architecture")
        if self._architecture not in _ARCHITECTURES:
            raise refusal(f"its architecture is {self._architecture!r}")
        self._given = {name.removeprefix(f"{self._architecture}."): value for name, value in self.metadata.items()
                       if name.startswith(f"{self._architecture}.")}
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

    def __contains__(self, name: str) -> bool:
        return self._name_of(name) in self._file.tensors

    def expect(self, name: str, shape: tuple[int, ...], *formats: str) -> torch.Tensor:
        """Return a tensor of numbers of this shape, mapped; they may be of any format of ``FLOATS``.

        Raises:
            ModelNotSupported: there is none.
        """
        kind, rows = self._rows(name, shape)
        if kind.dtype is None:
            raise refusal(f"{self._name_of(name)} is of the type {kind.name}, and no matrix of a linear layer")
        order = self._order(name, shape[0])
        numbers = rows.view(kind.dtype).view(shape)
        return numbers if order is None else numbers[order]

    def weight(self, files: Any, name: str, shape: tuple[int, int], dtype: torch.dtype) -> StoredWeight | None:
        """Return the weight of a layer by its name, or ``None`` if the file holds it as numbers.

        Raises:
            ModelNotSupported: its tensor is missing, or of another shape.
        """
        kind, rows = self._rows(f"{name}.weight", shape)
        if kind.decode is None:
            return None
        order = self._order(f"{name}.weight", shape[0])
        return StoredWeight(
            scheme_of(kind.bits), shape, dtype, shape[1] // kind.size * kind.num_groups, [rows],
            lambda: kind.weight(rows if order is None else rows[order], name), has_least=kind.has_least,
            has_halves=kind.has_halves, codebook=kind.codebook,
        )

    def numbers(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor's numbers: mapped, as ``expect``, or decoded from blocks to float32 and rounded to ``dtype``,
        some rows at a time; the pages of the file are given back.

        Raises:
            ModelNotSupported: there is none of this shape, or a scale is not finite.
        """
        kind, rows = self._rows(name, shape)
        if kind.decode is None:
            return self.expect(name, shape)
        order, numbers = self._order(name, shape[0]), torch.empty(shape, dtype=dtype)
        at_once = max(1, _AT_ONCE // shape[-1])
        for start in range(0, len(rows), at_once):
            some = slice(start, start + at_once)
            numbers[some] = kind.weight(rows[some] if order is None else rows[order[some]], name).numbers()
        FileMappings().free_pages(rows)
        return numbers

    def replace_embedding(self, name: str, module: nn.Embedding, dtype: torch.dtype) -> None:
        """Keep an embedding's rows as the file has them, in memory; they are decoded when they are looked up."""
        shape = module.num_embeddings, module.embedding_dim
        if (weight := self.weight(self, name, shape, dtype)) is None:
            return
        kind, rows = self._rows(f"{name}.weight", shape)
        rows = rows.clone()

        def look_up(token_ids: torch.Tensor) -> torch.Tensor:
            numbers = kind.weight(rows[token_ids.flatten()], name).numbers()
            return numbers.to(dtype).view(*token_ids.shape, shape[1])

        del module.weight
        module.weight = replace(weight, tensors=[rows], look_up=look_up)  # type: ignore[assignment]

    def require_names(self, names: Iterable[str]) -> None:
        """Refuse a file with other tensors than a model that has these.

        Raises:
            ModelNotSupported: it has.
        """
        if others := sorted(self._file.tensors.keys() - {self._name_of(name) for name in names} - {_FACTORS}):
            raise refusal(f"{others[0][:80]} is no tensor of the architecture {self._architecture}")

    def scale_angles(self, model: Any) -> None:
        """Divide the frequencies of a model's rotary embedding by the file's factors, if it has any."""
        if (factors := self.fields.get("rope_frequency_factors")) is not None:
            model.model.rotary_emb.inv_freq /= torch.tensor(factors)

    def _name_of(self, name: str) -> str:
        """Return the file's name of a tensor."""
        module, _, last = name.rpartition(".")
        if found := _LAYER.fullmatch(module):
            return f"blk.{found[1]}.{_LAYER_NAMES.get(found[2], found[2])}.{last}"
        own = f"{_NAMES.get(module, module)}.{last}"
        return _EMBEDDING if own == _HEAD and _HEAD not in self._file.tensors else own

    def _rows(self, name: str, shape: tuple[int, ...]) -> tuple[BlockType, torch.Tensor]:
        """Return a tensor's type and bytes [rows, bytes of a row]."""
        own = self._name_of(name)
        if (entry := self._file.tensors.get(own)) is None:
            raise refusal(f"{own} is missing in its file")
        if entry.shape != shape:
            raise refusal(f"{own} is of shape {list(entry.shape)}, needed is {list(shape)}")
        return entry.kind, self._file.rows(own)

    def _order(self, name: str, num_outputs: int) -> torch.Tensor | None:
        """Return the rows of a tensor in transformers' order; ``None``: they are."""
        if self._architecture != "llama" or not _IS_ROTATED.search(name):
            return None
        pairs = torch.arange(num_outputs).view(-1, self.fields["head_dim"] // 2, 2)
        return pairs.transpose(1, 2).flatten()

    def _fields(self) -> dict[str, Any]:
        given = self._given
        if unknown := sorted(given.keys() - _SIZES.keys() - _OTHERS - _OFF - {_EPSILON}):
            raise refusal(f"{self._architecture}.{unknown[0][:80]} in its metadata is not known to be harmless")
        if on := sorted(name for name in _OFF if given.get(name)):
            raise refusal(f"its {on[0]} is {given[on[0]]!r}")
        fields = {own: self._size(name) for name, own in _SIZES.items()}
        heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
        fields["num_key_value_heads"] = kv_heads = self._size("attention.head_count_kv", heads)
        fields["head_dim"] = head = self._size("attention.key_length", hidden // heads)
        for name in ("attention.value_length", "rope.dimension_count"):
            if self._size(name, head) != head:
                raise refusal(f"its {name} is {given[name]}, and its heads are of {head}")
        if head % 2 or heads % kv_heads:
            raise refusal(f"its {heads} heads of {head} are in {kv_heads} groups")
        # Safety: a number of layers that the file does not have is found before anything of that size is made.
        if fields["num_hidden_layers"] > len(self._file.tensors):
            raise refusal(f"its block_count is {fields['num_hidden_layers']}, with {len(self._file.tensors)} tensors")
        if (embedding := self._file.tensors.get(_EMBEDDING)) is None:
            raise refusal(f"{_EMBEDDING} is missing in its file")
        return {
            "model_type": self._architecture, **fields, "vocab_size": embedding.shape[0], "hidden_act": "silu",
            "rms_norm_eps": self._number(_EPSILON), "tie_word_embeddings": _HEAD not in self._file.tensors,
            "rope_parameters": self._rope(), "rope_frequency_factors": self._factors(head),
            **self._tokens(embedding.shape[0]),
            **({} if self._architecture == "qwen2" else {"attention_bias": "blk.0.attn_q.bias" in self._file.tensors}),
        }

    def _rope(self) -> dict[str, Any]:
        kind, base = self._given.get("rope.scaling.type", "none"), self._number("rope.freq_base", 10000.0)
        if kind == "none":
            return {"rope_type": "default", "rope_theta": base}
        if kind != "linear":
            raise refusal(f"its rope.scaling.type is {kind!r}")
        return {"rope_type": "linear", "rope_theta": base, "factor": self._number("rope.scaling.factor")}

    def _factors(self, head: int) -> list[float] | None:
        """Return what frequencies are divided by, which files of Llama 3 have in the place of its parameters."""
        if (entry := self._file.tensors.get(_FACTORS)) is None:
            return None
        if entry.shape != (head // 2,) or entry.kind.dtype != torch.float32:
            raise refusal(f"{_FACTORS} is {entry.kind.name} of shape {list(entry.shape)}, needed is f32 [{head // 2}]")
        factors = self._file.rows(_FACTORS).view(torch.float32)[0]
        if not (factors.isfinite() & (factors > 0)).all():
            raise refusal(f"{_FACTORS} has values that are not finite and above 0")
        return [float(factor) for factor in factors]

    def _tokens(self, vocab_size: int) -> dict[str, Any]:
        ids = {name: self.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", *_ENDS)}
        known = {name: value for name, value in ids.items() if value is not None}
        for name, value in known.items():
            if type(value) is not int or not 0 <= value < vocab_size:
                raise refusal(f"its {name}_token_id is {str(value)[:80]}, with a vocabulary of {vocab_size}")
        return {"bos_token_id": known.get("bos"),
                "eos_token_id": sorted({known[name] for name in _ENDS if name in known}) or None}

    def _size(self, name: str, default: int | None = None) -> int:
        value = self._given.get(name, default)
        if type(value) is not int or not 0 < value < 2**31:
            raise refusal(f"its {name} is {str(value)[:80]}, needed is a size")
        return value

    def _number(self, name: str, default: float | None = None) -> float:
        value = self._given.get(name, default)
        if type(value) not in (int, float) or not 0 < float(value or 0) < math.inf:
            raise refusal(f"its {name} is {str(value)[:80]}, needed is a number above 0")
        # Why: in float32 this is the number that a configuration writes, as 1e-06.
        return float(str(torch.tensor(value, dtype=torch.float32).numpy()))
