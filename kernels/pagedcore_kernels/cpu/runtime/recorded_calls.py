"""Kernel calls that were made once and can be made again, as they were, with no Python between them.

Owns the table of such calls. A step of a few rows makes hundreds of calls, and preparing one in Python takes as long
as some of them do; besides, every call gives the interpreter's lock away and has to get it back, which takes long in a
program with other busy threads. A recording holds addresses and numbers only: its owner makes sure that they are still
right when the calls are made again. Read ``kernel.py`` for what adds calls.
"""

from __future__ import annotations

import threading
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedcore_kernels.cpu.runtime.threads import launch_all

#: 64-bit words of a cache line.
_LINE: Final = 8
#: Threads of a call that may have all.
_ALL: Final = 2**31

Words = npt.NDArray[np.int64]


class _Present(threading.local):
    """What the calling thread records."""

    calls: RecordedCalls | None = None


_present = _Present()


def present_recording() -> RecordedCalls | None:
    """Return what the kernels that the calling thread runs are added to, if anything."""
    return _present.calls


class RecordedCalls:
    """The kernels that run while this is entered, in order; they run then as ever.

    Invariant: a recording is complete or empty: an exception on the way leaves nothing in it.
    """

    def __init__(self) -> None:
        self._added: list[tuple[int, Words, int]] = []
        self._calls = np.empty((0, 3), np.int64)
        self._memory = self._counters = np.empty(0, np.int64)

    def add(self, entry: int, words: Words, most_threads: int | None) -> None:
        """Add the kernel at ``entry`` with the words of its parameter block, which are copied."""
        self._added.append((entry, words.copy(), _ALL if most_threads is None else most_threads))

    def __enter__(self) -> RecordedCalls:
        _present.calls = self
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        _present.calls = None
        if kind is None:
            self._arrange()
        self._added = []

    def run(self) -> None:
        """Make all calls again, each when the one before is done; the interpreter's lock is not held meanwhile."""
        self._counters[:] = 0
        launch_all(self._calls)

    def _arrange(self) -> None:
        """Put each call's parameters on cache lines of their own, after one with its counter."""
        if not self._added:
            return
        longest = max(len(words) for _, words, _ in self._added)
        stride = _LINE * (1 + -(-longest // _LINE))
        memory = np.zeros(len(self._added) * stride + _LINE, np.int64)
        start = -memory.ctypes.data // 8 % _LINE
        blocks = memory[start : start + len(self._added) * stride].reshape(-1, stride)
        begin = blocks.ctypes.data
        for number, (_, words, _) in enumerate(self._added):
            blocks[number, _LINE : _LINE + len(words)] = words
        counters = begin + 8 * stride * np.arange(len(blocks))
        blocks[:, _LINE] = counters
        self._memory, self._counters = memory, blocks[:, 0]
        self._calls = np.empty((len(blocks), 3), np.int64)
        self._calls[:, 0] = [entry for entry, *_ in self._added]
        self._calls[:, 1] = counters + 8 * _LINE
        self._calls[:, 2] = [most for *_, most in self._added]
