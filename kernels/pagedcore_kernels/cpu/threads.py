"""Running one compiled kernel on all threads: torch's own OpenMP team, or Numba's where torch has none.

Owns how kernels are compiled to plain C entries, how their parameters are passed and on which threads they
run. A kernel is a function of one address; every thread runs all of it and claims work from an atomic counter
until none is left, so nothing here knows what is computed. Read ``simd.py`` for what a kernel is made of.

Why torch's threads: a second OpenMP runtime in the process would keep a second team spinning on the same
cores while torch's matrix multiplications run.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, njit, prange, set_num_threads, types
from numba.core.config import NUMBA_NUM_THREADS
from numba.extending import intrinsic

from pagedcore.errors import InternalError
from pagedcore_kernels.cpu.simd import INT64

_Team = Callable[[int, int, int, int], None]
_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
#: ``omp_pause_soft`` of OpenMP 5.0, section 3.2.44.
_OMP_PAUSE_SOFT = 1


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
        self._words = np.zeros(self.FIRST + num_arguments, np.int64)
        self._floats = self._words.view(np.float32)
        # Why: two cache lines; wherever they start, the middle word shares its line with nothing.
        self._counter = np.zeros(16, np.int64)
        self._words[self.COUNTER] = self._counter[8:].ctypes.data
        self.address = int(self._words.ctypes.data)

    def fill(self, *arguments: int) -> None:
        """Set the first arguments and start the counter at 0."""
        self._words[self.FIRST : self.FIRST + len(arguments)] = arguments
        self._counter[8] = 0

    def set_float(self, argument: int, value: float) -> None:
        """Set argument number ``argument`` to a float32."""
        self._floats[2 * (self.FIRST + argument)] = value


class Kernel:
    """A compiled kernel; keeps the machine code alive as long as its ``address`` is in use."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self.address = int(compiled.address)

    @property
    def was_cached(self) -> bool:
        """Whether the machine code came from Numba's cache on disk."""
        return bool(self._compiled.cache_hits)

    def run(self, parameters: ParameterBlock, num_threads: int | None = None) -> None:
        """Run on ``num_threads`` threads (default: as many as torch uses); returns when all have ended."""
        run_on_threads(self.address, parameters.address, num_threads or torch.get_num_threads())


def compile_kernel(function: Callable[[Any], None]) -> Kernel:
    """Compile ``function(parameters: voidptr) -> None``, or take it from Numba's cache.

    The GIL is not held while it runs.

    Raises:
        InternalError: ``function`` closes over something else than integers; Numba's cache would never hit.
    """
    constants = [cell.cell_contents for cell in function.__closure__ or ()]
    if not all(isinstance(constant, int) for constant in constants):
        raise InternalError(f"{function.__name__}: closes over {constants}, a kernel may close over integers only.")
    # Why: Numba keys its cache on the function's own file; the intrinsics it inlines live in other files. And a
    # name of its own for each variant keeps two processes from overwriting each other's entry in one index.
    variant = zlib.crc32(repr(constants).encode(), _source_fingerprint(function.__module__))
    function.__qualname__ += f"_{variant:08x}"
    signature: Any = types.void(types.voidptr)
    try:
        return Kernel(cfunc(signature, cache=True, error_model="numpy")(function))
    except RuntimeError:  # Numba found no writable place for a cache
        return Kernel(cfunc(signature, error_model="numpy")(function))


@cache
def _source_fingerprint(module: str) -> int:
    """Checksum of a module and of the modules of this package that it takes names from, directly or not."""
    package = __name__.rpartition(".")[0]
    found, unread = set(), [module]
    while unread:
        name = unread.pop()
        if name not in found:
            found.add(name)
            origins = {getattr(value, "__module__", None) or "" for value in vars(sys.modules[name]).values()}
            unread += [origin for origin in origins if origin.startswith(package)]
    sources = [Path(sys.modules[name].__file__ or "").read_bytes() for name in sorted(found)]
    return zlib.crc32(b"".join(sources))


def run_on_threads(entry: int, parameters: int, num_threads: int) -> None:
    """Call the C function at address ``entry`` with ``parameters`` once on each of ``num_threads`` threads.

    The calling thread is one of them. The GIL is released until all have returned.
    """
    if num_threads <= 1:
        _ENTRY(entry)(parameters)
        return
    team = _torch_team()
    if team is not None:
        team(entry, parameters, num_threads, 0)
    else:
        _run_on_numba_threads(entry, parameters, num_threads)


@cache
def _torch_team() -> _Team | None:
    """``GOMP_parallel`` of the libgomp that torch has loaded, or None where it uses something else."""
    if (library := _libgomp()) is None:
        return None
    parallel = library.GOMP_parallel
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return cast(_Team, parallel)


@cache
def _libgomp() -> ctypes.CDLL | None:
    paths = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return ctypes.CDLL(str(paths[0])) if paths else None


def release_threads() -> None:
    """End the threads that help the calling thread compute; they come anew if it computes again.

    Whoever hands its work to another thread calls this. Every thread that computes gets helpers of its own, which wait
    for its next kernel, and libgomp lets helpers watch for it only while the process has no more of them than
    processors. With the helpers of a second thread, idle or not, all of them sleep after every kernel, and waking them
    took a third of a step of the demo model.
    """
    if (library := _libgomp()) is not None:
        # Why "soft": the helpers of the calling thread end, settings stay.
        library.omp_pause_resource_all(_OMP_PAUSE_SOFT)


@intrinsic
def _call_entry(typing: Any, entry: Any, parameters: Any) -> Any:
    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [INT64])
        b.call(b.inttoptr(args[0], kind.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@njit(parallel=True, nogil=True, cache=True)
def _fan_out(entry: int, parameters: int, num_threads: int) -> None:
    for _ in prange(num_threads):
        _call_entry(entry, parameters)


#: Numba's fallback threading layer allows one parallel region at a time in a process.
_NUMBA_REGION = threading.Lock()


def _run_on_numba_threads(entry: int, parameters: int, num_threads: int) -> None:
    with _NUMBA_REGION:
        set_num_threads(min(num_threads, NUMBA_NUM_THREADS))
        _fan_out(entry, parameters, num_threads)
