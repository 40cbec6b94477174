"""Toys whose steps an engine launches before it has read those before: logits stay with the model, tokens too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pagedcore.execution.device_sampler import DeviceTokens
from pagedcore.execution.devices import CPU
from pagedcore.protocols import RaggedRows
from pagedcore_kernels.cpu.sampling.samplers import GreedyPicker, TokenSampler
from support.doubles import FlakyBackend, KeepsToyStates, ToyBackend

MOST_ROWS = 64


class ToyChooser:
    """The CPU's sampler as a ``TokenChooser``."""

    def __init__(self, vocab_size: int) -> None:
        self._sample, self._pick = TokenSampler(vocab_size), GreedyPicker(vocab_size)

    def __call__(self, logits: torch.Tensor, rows: Any) -> torch.Tensor:
        # Why copies: the CPU's sampler changes what it draws from.
        array = logits.numpy().copy()
        return torch.from_numpy(self._pick(array) if rows is None else self._sample(array, rows.copy()))


class KeepsToyLogits:
    """What makes a toy one whose steps are launched ahead; a token that the host does not know is looked up."""

    is_ahead = True
    """Whether tokens can be looked up; without, an engine reads each step before it launches the next."""
    device_tokens: DeviceTokens | None = None
    num_launches = num_looked_up = 0

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        super().allocate_kv(num_blocks, block_size)  # type: ignore[misc]
        self.device_tokens = DeviceTokens(CPU, ToyChooser(ToyBackend.vocab_size))
        if self.is_ahead:
            self.device_tokens = self.device_tokens.with_latest(MOST_ROWS)

    def forward_there(self, batch: RaggedRows) -> torch.Tensor:
        self.num_launches += 1
        ids, num_tokens = batch.token_ids, int(batch.query_start[-1])
        if num_unknown := int((ids[:num_tokens] < 0).sum()):
            assert self.device_tokens is not None
            assert self.device_tokens.latest is not None
            self.num_looked_up += num_unknown
            ids = np.where(ids < 0, self.device_tokens.latest.numpy()[np.maximum(~ids, 0)], ids)
        return torch.from_numpy(self.forward(replace(batch, token_ids=ids)))  # type: ignore[attr-defined,type-var]


class ToyAhead(KeepsToyLogits, ToyBackend):
    """A ``ToyBackend`` whose steps are launched ahead."""


class FlakyAhead(KeepsToyLogits, FlakyBackend):
    """A ``FlakyBackend`` whose steps are launched ahead."""


class HybridAhead(KeepsToyLogits, KeepsToyStates, ToyBackend):
    """The same with states."""


def launched_ahead(kind: type[Any]) -> type[Any]:
    """Return a kind of toys whose steps are launched ahead."""
    return type(f"{kind.__name__}Ahead", (KeepsToyLogits, kind), {})
