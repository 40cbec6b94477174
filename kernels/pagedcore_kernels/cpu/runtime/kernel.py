"""One compiled kernel: its entry, its parameters, and how it is run.

A kernel is a function of one address; every thread that takes part runs all of it and claims work from an atomic
counter until none is left, so nothing here knows what is computed. Read ``simd.py`` for what a kernel is made of and
``threads.py`` for the threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from pagedcore_kernels.cpu.runtime.compiled import CompiledEntry, compile_entry
from pagedcore_kernels.cpu.runtime.recorded_calls import Resize, present_recording
from pagedcore_kernels.cpu.runtime.threads import launch


class ParameterBlock:
    """The arguments of one kernel call: 64-bit words, and a work counter on a cache line of its own.

    Word ``COUNTER`` holds the counter's address, the arguments are words ``FIRST`` and up. A kernel claims
    work by ``claim(load_int64(p, COUNTER))`` and reads argument ``i`` by ``load_int64(p, FIRST + i)`` or, if
    it is a float, ``load_float32(p, 2 * (FIRST + i))``. A block is reused from call to call.

    Invariant: a block serves one call at a time.
    """

    COUNTER = 0
    FIRST = 1

    def __init__(self, num_arguments: int) -> None:
        self.words = np.zeros(self.FIRST + num_arguments, np.int64)
        """The block itself."""
        self._floats = self.words.view(np.float32)
        # Why: two cache lines; wherever they start, the middle word shares its line with nothing.
        self._counter = np.zeros(16, np.int64)
        self.words[self.COUNTER] = self._counter[8:].ctypes.data
        self.address = int(self.words.ctypes.data)

    def fill(self, *arguments: int) -> None:
        """Set the first arguments and start the counter at 0."""
        self.words[self.FIRST : self.FIRST + len(arguments)] = arguments
        self._counter[8] = 0

    def set_float(self, argument: int, value: float) -> None:
        """Set argument number ``argument`` to a float32."""
        self._floats[2 * (self.FIRST + argument)] = value


class Kernel:
    """A compiled kernel."""

    def __init__(self, entry: CompiledEntry) -> None:
        self.entry = entry
        self.address = entry.address

    def run(
        self, parameters: ParameterBlock, most_threads: int | None = None, resize: Resize | None = None
    ) -> None:
        """Run on the present threads, ``most_threads`` at most; return when the work is done.

        The interpreter's lock is not held meanwhile. ``resize``: what depends on the number of rows, in a recording.
        """
        if (recording := present_recording()) is not None:
            recording.add(self.address, parameters.words, resize)
        launch(self.address, parameters.address, most_threads)


def compile_kernel(function: Callable[[Any], None]) -> Kernel:
    """Compile ``function(parameters: voidptr) -> None``, or take it from Numba's cache. Raises as ``compile_entry``."""
    return Kernel(compile_entry(function, types.void(types.voidptr)))
