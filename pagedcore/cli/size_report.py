"""What a model will take before it is loaded: the KV sum, the weights, and what fits into the memory there is.

Owns arithmetic on a blueprint; it loads no weights and prints nothing. ``cli/size.py`` shows it.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagedcore.config.engine_config import EngineConfig
from pagedcore.config.memory_budget import format_memory, parse_memory
from pagedcore.engine.kv_memory import context_length
from pagedcore.execution.machine import free_memory_bytes
from pagedcore.models.loading import model_name, plan_backend
from pagedcore.plugins.manager import create_plugin_manager

if TYPE_CHECKING:
    from pagedcore.models.blueprint import Blueprint
    from pagedcore_kernels.layout import LayerShape


@dataclass(frozen=True, slots=True)
class SizeReport:
    """The sum for so many sequences of so many tokens; sizes in bytes unless said otherwise."""

    model: str
    blueprint: Blueprint
    context: int
    """Tokens of each sequence, prompt and answer."""
    concurrency: int
    """Sequences at once."""
    memory: int
    """For weights and KV together."""

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return self.blueprint.layout.dtype.itemsize

    @property
    def dtype(self) -> str:
        """Number format of weights and KV."""
        return str(self.blueprint.layout.dtype).removeprefix("torch.")

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.blueprint.layout.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, padding included."""
        return self.blueprint.layout.block_bytes

    @property
    def layers(self) -> dict[LayerShape, int]:
        """How many layers have each shape of K and V, in the order of their first layer."""
        return dict(Counter(self.blueprint.layout.layers))

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token without padding: 2 x layers x KV heads x head size x bytes, summed where layers differ.

        The formula is that of the KV cache with the number of KV heads, not of query heads (Ainslie et al. 2023).
        """
        numbers = sum(
            n * layer.num_kv_heads * (layer.key_head_size + layer.value_head_size) for layer, n in self.layers.items()
        )
        return numbers * self.itemsize

    @property
    def padding_bytes(self) -> int:
        """Bytes of a block that hold no K or V."""
        return self.block_bytes - self.block_size * self.bytes_per_token

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks of one sequence at full length."""
        return -(-self.context // self.block_size)

    @property
    def num_blocks(self) -> int:
        """Blocks of all sequences at full length."""
        return self.concurrency * self.blocks_per_sequence

    @property
    def kv_bytes(self) -> int:
        """What an engine allocates for them: whole blocks, padding included."""
        return self.num_blocks * self.block_bytes

    @property
    def num_blocks_that_fit(self) -> int:
        """Blocks that the memory has room for beside the weights."""
        return max(0, self.memory - self.blueprint.weight_bytes) // self.block_bytes

    @property
    def num_sequences_that_fit(self) -> int:
        """Sequences of full length that the memory has room for at once."""
        return self.num_blocks_that_fit // self.blocks_per_sequence

    @property
    def context_that_fits(self) -> int:
        """Tokens that each of so many sequences has room for at once, in whole blocks; not more than ``context``."""
        return min(self.context, self.num_blocks_that_fit // self.concurrency * self.block_size)

    @property
    def total_bytes(self) -> int:
        """Weights and KV together."""
        return self.blueprint.weight_bytes + self.kv_bytes

    @property
    def fits(self) -> bool:
        """Whether weights and all sequences at full length have room."""
        return self.num_blocks <= self.num_blocks_that_fit

    @property
    def settings(self) -> dict[str, int | str]:
        """Keywords of ``Engine.from_pretrained`` that make an engine of this size, or with the blocks that fit."""
        return {
            "dtype": self.dtype, "max_model_len": self.context, "max_num_seqs": self.concurrency,
            "max_num_batched_tokens": _step_tokens(self.concurrency),
            "num_kv_blocks": max(1, min(self.num_blocks, self.num_blocks_that_fit)),
        }

    @property
    def advice(self) -> str:
        """One sentence on what is left, or on what to change."""
        if self.fits:
            return f"It fits: {format_memory(self.memory - self.total_bytes)} are left."
        missing = format_memory(self.total_bytes - self.memory)
        return f"It does not fit: {missing} are missing. Either {', or '.join(self._changes())}."

    def _changes(self) -> list[str]:
        """Return what would help, the smallest loss first."""
        changes = [f"give it {format_memory(self.total_bytes)} of memory"]
        if self.num_sequences_that_fit:
            changes.append(f"keep both with num_kv_blocks={self.num_blocks_that_fit}: what has no room waits and is "
                           "answered the same")
            changes.append(f"lower the concurrency to {self.num_sequences_that_fit}")
        if self.context_that_fits:
            changes.append(f"lower the context to {self.context_that_fits} tokens")
        if self.itemsize > 2 and self.total_bytes // 2 <= self.memory:
            changes.append("take dtype bfloat16, which halves weights and KV")
        if not self.num_blocks_that_fit:
            changes.append("take a smaller model: beside the weights there is no room for a block")
        return changes

    def as_json(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        names = ("model", "dtype", "context", "concurrency", "block_size", "block_bytes", "bytes_per_token",
                 "padding_bytes", "blocks_per_sequence", "num_blocks", "kv_bytes", "memory", "num_blocks_that_fit",
                 "num_sequences_that_fit", "context_that_fits", "fits", "settings", "advice")
        plan = self.blueprint
        return {
            **{name: getattr(self, name) for name in names},
            "max_model_len": plan.max_model_len,
            "num_parameters": plan.num_parameters,
            "weight_bytes": plan.weight_bytes,
            "layers": [
                {"num_layers": n, "num_kv_heads": layer.num_kv_heads, "key_head_size": layer.key_head_size,
                 "value_head_size": layer.value_head_size} for layer, n in self.layers.items()
            ],
        }


def size_model(
    model: str | os.PathLike[str], *, context: int | None = None, concurrency: int | None = None, dtype: str = "auto",
    memory: int | float | str | None = None,
) -> SizeReport:
    """Say what ``model`` takes; its configuration is read, its weights are not.

    Args:
        model: "demo", a directory, or a hub name.
        context: tokens of each sequence; ``None``: what the model was made for.
        concurrency: sequences at once; ``None``: the default of ``max_num_seqs``.
        dtype: number format of weights and KV.
        memory: bytes, text or a share of free memory, for weights and KV; ``None``: what is free now.

    Raises:
        InvalidConfig: an argument is out of range, there is no such model, or it cannot run here.
    """
    sequences = concurrency if concurrency is not None else EngineConfig().max_num_seqs
    config = EngineConfig(dtype=dtype, max_model_len=context, max_num_seqs=sequences,
                          max_num_batched_tokens=_step_tokens(sequences))
    free_bytes = free_memory_bytes()
    given = parse_memory(memory, free_bytes=free_bytes, what="memory")
    plan = plan_backend(model, config, create_plugin_manager().registry.attention.load)
    length = context_length(plan.max_model_len, config)
    return SizeReport(model_name(model), plan, length, sequences, free_bytes if given is None else given)


def _step_tokens(concurrency: int) -> int:
    """Return a token budget of a step in which every sequence can advance: the default, or more if that is less."""
    return max(concurrency, EngineConfig().max_num_batched_tokens)
