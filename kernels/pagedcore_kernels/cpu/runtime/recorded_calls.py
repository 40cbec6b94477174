"""Kernel calls that were made once and can be made again for other numbers of rows, with no Python between them.

Owns the table of such calls. A step of a few rows makes hundreds of calls, and preparing one in Python takes as long
as some of them do; besides, every call gives the interpreter's lock away and has to get it back, which takes long in a
program with other busy threads. A recording holds addresses and numbers only: its owner makes sure that the addresses
are still right when the calls are made again. Read ``kernel.py`` for what adds calls.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedcore_kernels.cpu.runtime.threads import launch_all

_LINE: Final = 8
"""64-bit words of a cache line."""
_ALL: Final = 2**31
"""Threads of a call that may have all."""

Words = npt.NDArray[np.int64]


class _Present(threading.local):
    """What the calling thread records."""

    calls: RecordedCalls | None = None


_present = _Present()


def present_recording() -> RecordedCalls | None:
    """Return what the kernels that the calling thread runs are added to, if anything."""
    return _present.calls


class StepShape(NamedTuple):
    """What the numbers in a call depend on."""

    num_rows: int
    are_apart: bool = False
    """Whether the K and V of each row go to a block of their own."""


class Sizes(NamedTuple):
    """What changes in a call with the shape of a step."""

    words: Sequence[tuple[int, int]]
    """Words of its parameter block, by number, and their values."""
    most_threads: int | None = None
    entry: int | None = None
    """Another kernel; ``None``: the one that was recorded."""


Resize = tuple[Any, ...]
"""A function of a shape and more, and these other arguments: ``function(shape, *arguments)`` returns ``Sizes``."""


class RecordedCalls:
    """The kernels that run while this is entered, in order; they run then as ever.

    Invariant: a recording is complete or empty: it is empty after an exception on the way, or if a kernel ran that does
    not say what depends on the number of rows.
    """

    def __init__(self) -> None:
        self._added: list[tuple[int, Words, Resize]] = []
        self._calls = np.empty((0, 3), np.int64)
        self._blocks = self._memory = np.empty((0, 1), np.int64)
        self._groups: list[tuple[Resize, Words]] = []
        self._is_complete = True

    def add(self, entry: int, words: Words, resize: Resize | None) -> None:
        """Add the kernel at ``entry`` with the words of its parameter block, which are copied.

        One that cannot be resized ends the recording.
        """
        if resize is None:
            # Why ended here too: an interrupt may have left this thread recording.
            _present.calls, self._added, self._is_complete = None, [], False
        else:
            self._added.append((entry, words.copy(), resize))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to make again."""
        return not len(self._calls)

    def __enter__(self) -> RecordedCalls:
        _present.calls = self
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        _present.calls = None
        if kind is None and self._is_complete and self._added:
            self._arrange()
        self._added = []

    def run(self, shape: StepShape) -> None:
        """Make all calls again, for so many rows, each when the one before is done.

        The interpreter's lock is not held meanwhile.
        """
        self._blocks[:, 0] = 0
        for (resize, *arguments), places in self._groups:
            sizes: Sizes = resize(shape, *arguments)
            for word, value in sizes.words:
                self._blocks[places, _LINE + word] = value
            self._calls[places, 2] = _ALL if sizes.most_threads is None else sizes.most_threads
            if sizes.entry is not None:
                self._calls[places, 0] = sizes.entry
        launch_all(self._calls)

    def _arrange(self) -> None:
        """Put each call's parameters on cache lines of their own, after one with its counter."""
        longest = max(len(words) for _, words, _ in self._added)
        stride = _LINE * (1 + -(-longest // _LINE))
        memory = np.zeros(len(self._added) * stride + _LINE, np.int64)
        start = -memory.ctypes.data // 8 % _LINE
        blocks = memory[start : start + len(self._added) * stride].reshape(-1, stride)
        counters = blocks.ctypes.data + 8 * stride * np.arange(len(blocks))
        places = defaultdict[Resize, list[int]](list)
        for number, (_, words, resize) in enumerate(self._added):
            blocks[number, _LINE : _LINE + len(words)] = words
            places[resize].append(number)
        blocks[:, _LINE] = counters
        self._memory, self._blocks = memory.reshape(1, -1), blocks
        self._groups = [(resize, np.array(numbers)) for resize, numbers in places.items()]
        self._calls = np.empty((len(blocks), 3), np.int64)
        self._calls[:, 0] = [entry for entry, *_ in self._added]
        self._calls[:, 1] = counters + 8 * _LINE
