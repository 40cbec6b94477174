"""What a host program may do to the floating-point state of a thread, and what that state is."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import torch

from pagedcore_kernels.cpu.runtime.atomics import add_shared, call_function, load_shared, pause
from pagedcore_kernels.cpu.runtime.kernel import Kernel, ParameterBlock, compile_kernel
from pagedcore_kernels.cpu.simd import address_of, claim, load_int64

x86_glibc_only = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc",
    reason="reads the registers of x86 by glibc",
)


class FloatState(NamedTuple):
    """The two registers of x86, sticky flags included."""

    mxcsr: int
    x87_control: int

    @property
    def modes(self) -> int:
        """MXCSR without its sticky flags, which whatever is computed may set."""
        return self.mxcsr & ~0x3F


DEFAULT: Final = FloatState(0x1F80, 0x037F)
ROUNDING: Final = {"down": 0x400, "up": 0x800, "towards zero": 0xC00}
_INVALID, _DIVISION_BY_ZERO = 1, 4
MODES: Final = (*ROUNDING, "flushing denormals")


def state_of_this_thread() -> FloatState:
    """Read the registers."""
    words = (ctypes.c_uint32 * 8)()
    _libm().fegetenv(words)
    return FloatState(words[7], words[0] & 0xFFFF)


def set_mode(mode: str) -> None:
    """Set one of ``MODES``, "trapping", where some operations raise SIGFPE, or else the default, for this thread."""
    _libm().fesetenv(ctypes.c_void_p(-1))
    if mode == "flushing denormals":
        assert torch.set_flush_denormal(True)
    elif mode == "trapping":
        _libm().feenableexcept(_INVALID | _DIVISION_BY_ZERO)
    elif mode in ROUNDING:
        _libm().fesetround(ROUNDING[mode])


@contextmanager
def host_floats(mode: str) -> Iterator[FloatState]:
    """Be a host that has set a mode, or "default", for this thread; yield the state, and demand that it is kept."""
    try:
        set_mode(mode)
        before = state_of_this_thread()
        yield before
        assert (after := state_of_this_thread()).modes == before.modes
        assert after.x87_control == before.x87_control
    finally:
        set_mode("default")


def states_of(launch: Callable[[int, int, int], None]) -> set[int]:
    """Return the modes of the calling thread and of one that helps it."""
    states, num_here, block = np.zeros((2, 8), np.uint32), np.zeros(1, np.int64), ParameterBlock(3)
    fegetenv = ctypes.cast(_libm().fegetenv, ctypes.c_void_p).value or 0
    block.fill(fegetenv, states.ctypes.data, num_here.ctypes.data)
    launch(_state_kernel().address, block.address, 1)
    return {FloatState(int(mxcsr), 0).modes for mxcsr in states[:, 7]}


@cache
def _state_kernel() -> Kernel:
    """Each of two threads writes its floating-point state to a place of its own, and returns when both have come."""

    def write_state(parameters: Any) -> None:
        p = address_of(parameters)
        state = load_int64(p, 2) + 32 * claim(load_int64(p, 0))
        call_function(load_int64(p, 1), state, 0, 0, 0, 0)
        add_shared(load_int64(p, 3), 1)
        while load_shared(load_int64(p, 3)) < 2:
            pause()

    return compile_kernel(write_state)


def _libm() -> ctypes.CDLL:
    return ctypes.CDLL("libm.so.6")
