"""The floating-point state of the threads that compute: the default, whatever the program around has set.

How a thread rounds, whether it flushes denormals and whether an operation may raise SIGFPE is a state of that thread:
MXCSR and the control word of the x87 on x86, FPCR on ARM. A new thread begins with the state of the one that makes it.
Owns the exchange with the host's state, for the calling thread and for those of torch that help it. The helpers of
``team.py`` take the default when they begin, and keep it, since no code of the host runs on them.

With another C library or processor nothing is exchanged, and the host's state is what kernels compute with.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

from numba import types

from pagedcore_kernels.cpu.runtime.atomics import call_function
from pagedcore_kernels.cpu.runtime.compiled import CompiledEntry, compile_entry
from pagedcore_kernels.cpu.runtime.openmp import is_forked, openmp_threads
from pagedcore_kernels.cpu.simd import address_of, load_int64, store_int64

DEFAULT: Final = -1
"""``FE_DFL_ENV`` of glibc on the processors below."""
_PROCESSORS: Final = "x86_64", "aarch64"
# 64-bit words of a block: C functions by address, and where the states are. ``_SAVE`` is 0 on the way back.
_SAVE, _SET, _THREAD_NUMBER, _STATES = range(4)
_BLOCK_WORDS: Final = 4
_STATE_WORDS: Final = 8
"""Words of a thread's state: a ``fenv_t``, which takes 32 bytes on x86 and 8 on ARM, and how deep the thread is inside.
"""
_DEPTH: Final = _STATE_WORDS - 1


class _Ignored:
    """An argument that a C function is given and does not look at."""

    # Why: anything that takes one object and returns a number does; converting to ``py_object`` takes far longer.
    from_param = staticmethod(callable)


_OF_ONE: Final = (ctypes.c_void_p,)
"""What a function takes that exchanges the state of the calling thread, or of torch's by libgomp."""
_OF_ALL: Final = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
_ENDING: Final = (_Ignored,) * 3
"""What a context is told at its end, besides."""


def _find_libm() -> Any:
    if sys.platform != "linux" or platform.machine() not in _PROCESSORS:
        return None
    try:
        # Why of this kind: giving the interpreter's lock away would take longer than the calls.
        library = ctypes.PyDLL("libm.so.6")
    except OSError:  # it is not glibc
        return None
    library.fesetenv.argtypes = [ctypes.c_void_p]
    return library


def _do_nothing(*_: object) -> None:
    """Be the exchange where there is none."""


_libm: Final = _find_libm()
use_default_floats: Final[Callable[[], object]] = _do_nothing if _libm is None else partial(_libm.fesetenv, DEFAULT)
"""Set the default for the calling thread: inside of a ``DefaultFloatState``, after code of the host has run."""


def fesetenv_address() -> int:
    """Return the address of the C function that takes ``DEFAULT``; 0 where there is none."""
    return 0 if _libm is None else _address(_libm.fesetenv)


class DefaultFloatState:
    """A context in which the calling thread rounds to nearest, keeps denormals and raises no SIGFPE. At its end the
    thread has the state from before, sticky flags included. Used by one thread at a time.

    Invariant: no interrupt comes between the change and the block, or between the block and the way back.
    """

    # Why slots: they let the ``with`` statement call C functions, and Python raises interrupts in functions of its own.
    __slots__ = ("__enter__", "__exit__")

    def __init__(self, num_torch_threads: int = 1) -> None:
        """Prepare the context for the calling thread and, if torch computes on more, for those that help it.

        No effect on these where torch does not use libgomp, and in a forked child, which has none.
        """
        self.__enter__: Callable[[], None] = _do_nothing
        self.__exit__: Callable[..., None] = _do_nothing
        if _libm is None:
            return
        openmp = openmp_threads() if num_torch_threads > 1 and not is_forked() else None
        memory = (ctypes.c_int64 * (2 * _BLOCK_WORDS + num_torch_threads * _STATE_WORDS))()
        states, number = ctypes.addressof(memory) + 16 * _BLOCK_WORDS, openmp.number_of_thread if openmp else 0
        others = fesetenv_address(), number, states
        memory[: 2 * _BLOCK_WORDS] = [_address(_libm.fegetenv), *others, 0, *others]
        # Why references: a ``with`` statement keeps what it will call, and not this object.
        way_in, way_out = ctypes.byref(memory), ctypes.byref(memory, 8 * _BLOCK_WORDS)
        entry = _exchange().address
        if openmp is None:
            self.__enter__ = partial(_function(entry, *_OF_ONE), way_in)
            self.__exit__ = partial(_function(entry, *_OF_ONE, *_ENDING), way_out)
        else:
            all_threads = num_torch_threads, 0
            self.__enter__ = partial(_function(openmp.parallel, *_OF_ALL), entry, way_in, *all_threads)
            self.__exit__ = partial(_function(openmp.parallel, *_OF_ALL, *_ENDING), entry, way_out, *all_threads)


@cache
def _function(address: int, *kinds: Any) -> Callable[..., None]:
    """Return the C function at an address; it is called with the interpreter's lock, for the same reason as above."""
    return ctypes.PYFUNCTYPE(None, *kinds)(address)


def _address(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


@cache
def _exchange() -> CompiledEntry:
    """Compile what a thread does on the way in and on the way out: ``void exchange(block)``."""

    def exchange(parameters: Any) -> None:
        block = address_of(parameters)
        save, number_of_thread = load_int64(block, _SAVE), load_int64(block, _THREAD_NUMBER)
        state = load_int64(block, _STATES)
        if number_of_thread != 0:
            state += 8 * _STATE_WORDS * (call_function(number_of_thread, 0, 0, 0, 0, 0) & 0xFFFFFFFF)
        depth = load_int64(state, _DEPTH)
        if save != 0:
            if depth == 0:
                call_function(save, state, 0, 0, 0, 0)
            call_function(load_int64(block, _SET), DEFAULT, 0, 0, 0, 0)
            store_int64(state, _DEPTH, depth + 1)
        elif depth > 0:
            if depth == 1:
                call_function(load_int64(block, _SET), state, 0, 0, 0, 0)
            store_int64(state, _DEPTH, depth - 1)

    return compile_entry(exchange, types.void(types.voidptr))
