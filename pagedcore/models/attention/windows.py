"""Layers with a window in memory of their own: which layers these are, and attention over both kinds of memory.

Owns the split of one layout into that of layers that read all positions, and that of those that read a window alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pagedcore.errors import InternalError
from pagedcore.execution.kv_pool import KVPool
from pagedcore.models.attention.layers import AttentionLayer
from pagedcore.protocols import (
    AttentionBackend,
    AttentionFactory,
    RaggedRows,
    ReadsWindowsAlone,
    RecordableAttention,
    ShowsKVPool,
)
from pagedcore_kernels.layout import BlockLayout


@dataclass(frozen=True, slots=True)
class WindowSplit:
    """Which of a layout's layers have a window."""

    window: int
    """Positions that these layers read at most, the own one included."""
    places: tuple[tuple[bool, int], ...]
    """Of each layer of the layout: whether it has a window, and its number among those of its kind."""

    @classmethod
    def of(cls, layers: Mapping[int, AttentionLayer], factory: AttentionFactory) -> WindowSplit | None:
        """Return the split of a model's layers; ``None``: none has a window, or attention backends that the factory
        makes cannot do with them.
        """
        if not isinstance(factory, ReadsWindowsAlone):
            return None
        windows = dict[int, int]()
        for layer in layers.values():
            # Why: what lies in the same chunk of positions is nearer than a chunk is long.
            bounds = [bound for bound in (layer.window, layer.chunk) if bound > 0]
            window, known = min(bounds, default=0), windows.get(layer.index)
            # Why: K and V that a layer without a window reads too are read to the beginning.
            windows[layer.index] = window if known is None else max(window, known) if window and known else 0
        if not any(windows.values()):
            return None
        places, counts = [], [0, 0]
        for index in range(len(windows)):
            has_window = windows[index] > 0
            places.append((has_window, counts[has_window]))
            counts[has_window] += 1
        return cls(max(windows.values()), tuple(places))

    def layouts(self, whole: BlockLayout) -> tuple[BlockLayout, BlockLayout]:
        """Return the layouts of blocks and of window blocks that take the place of ``whole``."""
        kinds = [tuple(layer for layer, (has_window, _) in zip(whole.layers, self.places, strict=True)
                       if has_window is wanted) for wanted in (False, True)]
        return replace(whole, layers=kinds[0]), replace(whole, layers=kinds[1], window=self.window)

    def bytes_in(self, whole: BlockLayout) -> int:
        """Return what the layers with a window take of a block of ``whole``."""
        return self.layouts(whole)[1].block_bytes

    def divide(self, whole: BlockLayout, blocks: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint8], ...]:
        """Divide bytes [N, block_bytes] of blocks of ``whole`` into those of blocks and of window blocks."""
        layouts, ends = self.layouts(whole), [*map(whole.key_offset, range(1, len(whole.layers))), whole.block_bytes]
        parts = tuple(np.zeros((len(blocks), one.block_bytes), np.uint8) for one in layouts)
        for layer, ((has_window, number), end) in enumerate(zip(self.places, ends, strict=True)):
            start, target = whole.key_offset(layer), layouts[has_window].key_offset(number)
            parts[has_window][:, target : target + end - start] = blocks[:, start:end]
        return parts


class WindowPool(KVPool):
    """The window blocks of one model, on the CPU; a ``WindowStore``."""

    def __init__(self, split: WindowSplit, whole: BlockLayout, num_windows: int) -> None:
        """Allocate the window blocks of a layout. Raises as ``KVPool``."""
        super().__init__(split.layouts(whole)[1], num_windows)
        self.divide = partial(split.divide, whole)
        """As ``WindowStore.divide``."""


class WindowLayers:
    """The layers of a model that can have window blocks, and these if they have some.

    Args:
        layers: of the model.
        factory: makes its attention backends.
        whole: makes the layout of all layers in blocks of so many tokens.
    """

    def __init__(
        self, layers: Mapping[int, AttentionLayer], factory: AttentionFactory, whole: Callable[[int], BlockLayout]
    ) -> None:
        self._factory, self._whole, self._num_windows = factory, whole, 0
        self._split = WindowSplit.of(layers, factory)
        self.window = 0 if self._split is None else self._split.window
        """Positions that they read at most, the own one included; 0: there are none."""
        self.store: WindowPool | None = None
        """The window blocks, once they are allocated."""

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of a window block of so many tokens, padding included."""
        return 0 if self._split is None else self._split.bytes_in(self._whole(block_size))

    def use(self, num_windows: int) -> None:
        """Let the next pool have so many, until it is released."""
        self._num_windows = num_windows

    def allocate(self, whole: BlockLayout) -> BlockLayout:
        """Allocate what was asked for; return the layout of the blocks beside. Raises ``InvalidConfig``."""
        if self._split is None or not self._num_windows:
            return whole
        self.store = WindowPool(self._split, whole, self._num_windows)
        return self._split.layouts(whole)[0]

    def attention(self, storage: KVPool) -> AttentionBackend:
        """Return what attends over blocks, and over window blocks if there are some. Raises ``InvalidConfig``."""
        everything = self._factory(storage.layout, storage.pool)
        if self._split is None or self.store is None:
            return everything
        if not len(self.store.pool):
            self.store.open_again()
        return AttentionWithWindows(self._split, everything, self._factory(self.store.layout, self.store.pool))

    def close(self) -> None:
        """Free the memory of the window blocks until there is another backend that attends."""
        if self.store is not None:
            self.store.close()

    def release(self) -> None:
        """Free the window blocks; the next pool has none."""
        self.close()
        self.store, self._num_windows = None, 0


class _Kind(AttentionBackend, RecordableAttention, ShowsKVPool, Protocol):
    """What a factory makes that is ``ReadsWindowsAlone``."""


class AttentionWithWindows:
    """An ``AttentionBackend`` of two others: one for layers that read all positions, one for those with a window.

    Like these it is ``RecordableAttention``; as ``ShowsKVPool`` it is the first one.
    """

    def __init__(self, split: WindowSplit, everything: Any, windows: Any) -> None:
        self.name, self.split, self._kinds = str(everything.name), split, (everything, windows)

    @property
    def layout(self) -> BlockLayout:
        """Of the blocks of layers that read all positions."""
        return self._kind(False).layout

    @property
    def pool(self) -> torch.Tensor:
        """Of the same."""
        return self._kind(False).pool

    @property
    def windows(self) -> ShowsKVPool:
        """What has the window blocks."""
        return self._kind(True)

    @property
    def only_runs_kernels(self) -> bool:
        """Whether calls can be recorded."""
        return all(one.only_runs_kernels for one in self._kinds)

    def plan(self, batch: RaggedRows) -> None:
        """Plan both kinds; see ``AttentionBackend``. Raises ``InternalError`` if the batch has no window blocks."""
        if batch.window_tables is None or batch.window_slots is None:
            raise InternalError("forward: layers with a window have memory of their own, and the batch has none")
        of_windows: Any = batch
        self._kind(False).plan(batch)
        self._kind(True).plan(replace(of_windows, block_tables=batch.window_tables, slot_mapping=batch.window_slots))

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store K and V; see ``AttentionBackend``."""
        has_window, number = self.split.places[layer]
        self._kind(has_window).write_kv(number, key, value)

    def attend(self, layer: int, query: torch.Tensor, **how: Any) -> torch.Tensor:
        """Attend; see ``AttentionBackend``."""
        has_window, number = self.split.places[layer]
        return self._kind(has_window).attend(number, query, **how)

    def attend_to(self, output: torch.Tensor, layer: int, query: torch.Tensor, **how: Any) -> None:
        """Do the same into ``output``; see ``RecordableAttention``."""
        has_window, number = self.split.places[layer]
        self._kind(has_window).attend_to(output, number, query, **how)

    def _kind(self, has_window: bool) -> _Kind:
        kind: _Kind = self._kinds[has_window]
        return kind
