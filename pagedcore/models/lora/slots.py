"""The slots of one model: which adapter each has, and how the rows of a step find theirs.

Owns the tables that the kernels read and the adapters' memory as long as the tables name it. Slot 0 means none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch

from pagedcore.errors import InternalError
from pagedcore.models.lora.adapter import LoraAdapter
from pagedcore.protocols import Int32Array
from pagedcore_kernels.cpu.matmul.low_rank import PLACE_WORDS, LowRankUpdate, StepUpdates, shrunk_width

Take = Callable[[str, int, int, torch.dtype], torch.Tensor]
"""``(purpose, rows, size, format) -> tensor``, as ``Workspace.take``."""


class Product(Protocol):
    """What of a product the slots need."""

    in_features: int
    out_features: int

    @property
    def weight(self) -> torch.Tensor:
        """In the number format of rows and outputs."""


class AdapterSlots:
    """Slots 1 to ``max_adapters`` for adapters of the products of one model."""

    def __init__(self, products: Sequence[Product], max_adapters: int, max_rank: int) -> None:
        """Make the slots, all empty; matrices have a rank of ``max_rank`` at most."""
        self._sizes = [(one.in_features, one.out_features) for one in products]
        self._places = np.zeros((len(products), max_adapters + 1, PLACE_WORDS), np.int64)
        self._held: dict[int, LoraAdapter] = {}
        self._width, self._max_rank = shrunk_width(max_rank), max_rank
        self.updates = [
            LowRankUpdate(one.in_features, one.out_features, one.weight.dtype, self._places[number])
            for number, one in enumerate(products)
        ]
        """What computes, by the number of the product."""

    def put(self, slot: int, adapter: LoraAdapter) -> None:
        """Use an adapter in an empty slot from now on; not during a step.

        Raises:
            InternalError: there is no such slot, it is not empty, or the adapter is for other products.
        """
        self._require_slot(slot)
        if slot in self._held or adapter.max_rank > self._max_rank or not adapter.pairs.keys() <= set(
            range(len(self._sizes))
        ):
            raise InternalError(f"adapter slot {slot}: not empty, or its adapter is for another model")
        words = {number: pair.words(*self._sizes[number]) for number, pair in adapter.pairs.items()}
        # Safety: kept before it is named, and named until it is dropped.
        self._held[slot] = adapter
        for number, one in words.items():
            self._places[number, slot] = one

    def fill(self, others: AdapterSlots) -> None:
        """Put what these slots have into the same ones of ``others``, of a model of the same form; see ``put``."""
        for slot, adapter in self._held.items():
            others.put(slot, adapter)

    def drop(self, slot: int) -> None:
        """Empty a slot; not during a step, and nothing happens if it is empty."""
        self._require_slot(slot)
        self._places[:, slot] = 0
        self._held.pop(slot, None)

    def of_rows(self, slots: Int32Array, take: Take, purpose: str = "") -> RowAdapters | None:
        """Return what updates rows with these slots [T], 0 for none, in room that is taken for a purpose; ``None``: all
        are 0.

        Raises:
            InternalError: a slot is empty, or there is none of its number.
        """
        named = set(slots.tolist()) - {0}
        if unknown := named - self._held.keys():
            raise InternalError(f"adapter slot {min(unknown)}: a row has it and it is empty")
        if not named:
            return None
        num_rows = len(slots)
        table = take(f"{purpose}adapters", StepUpdates.table_words(num_rows), 1, torch.int64).view(-1)
        updates = StepUpdates(num_rows, table, take(f"{purpose}shrunk", num_rows, self._width, torch.float32))
        updates.fill(slots)
        return RowAdapters(self, slots, updates)

    def _require_slot(self, slot: int) -> None:
        if not 1 <= slot < self._places.shape[1]:
            raise InternalError(f"adapter slot {slot}: there are 1 to {self._places.shape[1] - 1}")


@dataclass(frozen=True, slots=True)
class RowAdapters:
    """The adapters of the rows of one step, one of them at least."""

    slots: AdapterSlots
    of_rows: Int32Array
    """[T] the slot of each row."""
    updates: StepUpdates

    def chosen(self, rows: torch.Tensor, take: Take, purpose: str = "") -> RowAdapters | None:
        """Return those of some rows, int64 [S]; see ``AdapterSlots.of_rows``."""
        return self.slots.of_rows(self.of_rows[rows.numpy()], take, purpose)


def new_room(_: str, num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return new memory; see ``Take``."""
    return torch.empty(num_rows, size, dtype=dtype)


_present: Final[ContextVar[RowAdapters | None]] = ContextVar("pagedcore_adapters", default=None)


@contextmanager
def present_adapters(adapters: RowAdapters | None) -> Iterator[None]:
    """Let products that modules call update their rows inside of the ``with`` block, on this thread."""
    token = _present.set(adapters)
    try:
        yield
    finally:
        _present.reset(token)


def adapters_now() -> RowAdapters | None:
    """Return the adapters of the rows that the calling thread computes; ``None``: no row has one."""
    return _present.get()
