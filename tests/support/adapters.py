"""A toy model that takes adapters: a step in another slot than a sequence's own shows in its tokens.

An adapter is a directory with one file, ``adapter_config.json``, of a seed and of how many bytes it claims to have. The
tokens that a row writes to its slots are turned by the seed of its adapter, and so are the logits that follow, so that
KV of another adapter, or another adapter's slot, gives another answer. ``adapted_answer`` is the sequential oracle.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedcore.errors import InvalidAdapter
from pagedcore.protocols import FloatArray, RaggedRows
from support.doubles import ToyBackend, toy_logits

_SHIFT = 1000


@dataclass(frozen=True)
class ToyAdapter:
    """What the toy model reads of a directory."""

    seed: int
    num_bytes: int
    max_rank: int = 4

    @property
    def digest(self) -> bytes:
        """Over all that it is."""
        return hashlib.sha256(f"{self.seed} {self.num_bytes}".encode()).digest()


class AdaptedBackend(ToyBackend):
    """A ``ToyBackend`` that is a ``TakesAdapters``."""

    why_no_adapters = ""

    def __init__(self) -> None:
        super().__init__()
        self.slots: dict[int, ToyAdapter] = {}
        self.num_slots = 0
        self.reads: list[str] = []
        self.distinct: list[int] = []
        """How many adapters each forward had."""
        self.may_read = threading.Event()
        self.may_read.set()

    def use_adapters(self, max_adapters: int, max_rank: int) -> None:
        """Note how many slots there are."""
        self.num_slots = max_adapters

    def adapter_bytes(self, directory: str) -> int:
        """Return what the file claims."""
        return _read(directory).num_bytes

    def read_adapter(self, directory: str) -> ToyAdapter:
        """Read the file, once that is allowed."""
        assert self.may_read.wait(60)
        self.reads.append(Path(directory).name)
        return _read(directory)

    def put_adapter(self, slot: int, adapter: ToyAdapter) -> None:
        """Fill an empty slot."""
        assert 1 <= slot <= self.num_slots
        assert slot not in self.slots
        self.slots[slot] = adapter

    def drop_adapter(self, slot: int) -> None:
        """Empty a full slot."""
        del self.slots[slot]

    def forward(self, batch: RaggedRows) -> FloatArray:
        """Compute each row with the adapter of its slot."""
        slots = [0] * len(batch.kv_lens) if batch.adapter_slots is None else batch.adapter_slots.tolist()
        seeds = np.array([self.slots[one].seed if one else 0 for one in slots])
        self.distinct.append(len({one for one in slots if one}))
        counts = batch.query_start[1:] - batch.query_start[:-1]
        turned = batch.token_ids.copy()
        turned[: int(batch.query_start[-1])] += _SHIFT * np.repeat(seeds, counts)
        return super().forward(replace(batch, token_ids=turned))  # type: ignore[type-var]

    def logits_after(self, token_ids: npt.NDArray[np.int64]) -> FloatArray:
        """Return the logits behind tokens that one adapter has turned, all of them by as much."""
        (seed,) = set((token_ids // _SHIFT).tolist())
        return adapted_logits(token_ids % _SHIFT, seed)


def adapted_logits(token_ids: npt.NDArray[np.int64], seed: int) -> FloatArray:
    """Return what the model says behind these tokens under an adapter; seed 0: under none."""
    return toy_logits(token_ids + _SHIFT * seed)


def adapted_answer(prompt: Iterable[int], max_tokens: int, seed: int) -> list[int]:
    """The greedy answer under an adapter, alone; it has no end token."""
    tokens, answer = list(prompt), list[int]()
    for _ in range(max_tokens):
        answer.append(int(np.argmax(adapted_logits(np.array(tokens, dtype=np.int64), seed))))
        tokens.append(answer[-1])
    return answer


def write_adapter(directory: Path, seed: int, num_bytes: int = 100) -> str:
    """Write a directory that the toy model can read; return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"seed": seed, "num_bytes": num_bytes}))
    return str(directory)


def _read(directory: str) -> ToyAdapter:
    try:
        described: dict[str, Any] = json.loads((Path(directory) / "adapter_config.json").read_text())
        return ToyAdapter(described["seed"], described["num_bytes"])
    except (ValueError, KeyError) as error:
        raise InvalidAdapter("adapter_config.json", "no such JSON", "a seed and a number of bytes") from error
