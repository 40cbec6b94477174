"""Run compiled GPU kernels without a GPU: an interpreter for PTX that finds what a GPU would hide.

>>> from pagedcore_ptxsim import launch
>>> report = launch(ptx_text, None, grid, block, [array, 3, 0.5], dynamic_shared_bytes=0)

``launch`` executes the text that the compiler produced on NumPy arrays, in place, and raises where the kernel reads or
writes outside its buffers, misaligned, or before anything was written; where threads race on shared memory, where a
warp-wide operation meets a divided warp, where a barrier cannot open, and where a ``cp.async`` is used before it was
waited for. Every error quotes the PTX line and the thread. It needs NumPy and nothing else.

``launch(..., count=True)`` counts what a launch asks of a GPU: instructions by class, sectors of global memory,
wavefronts and bank conflicts of shared memory (``counters``).
``divided_operations`` reads a text without running it: no arguments may bring only part of a warp to a vote.
``mutants`` breaks a text on purpose, one barrier, wait or predicate at a time, to prove that tests would notice.
Modules, in the order to read them: ``launch``, ``parser`` (``syntax``, ``body``), ``scheduler`` (``batch``), ``ops``
(one module per family of instructions, on ``binder``), ``global_memory``, ``shared_memory``, ``races``, ``mutants``,
``control_flow`` and ``uniformity``.
What it does not model: timing, the last bits of approximate functions and of sums inside ``mma``, the payload of a
NaN, the order of global memory between blocks, ``wgmma``, ``mbarrier`` and bulk copies.
"""

from __future__ import annotations

from typing import Final

from pagedcore_ptxsim.counters import CLASSES, Work
from pagedcore_ptxsim.errors import (
    AsyncCopyFault,
    BarrierFault,
    DivergenceFault,
    LaunchError,
    MemoryFault,
    PtxError,
    PtxFault,
    PtxSyntaxError,
    RaceFault,
    Runaway,
    UninitializedRead,
    UnsupportedPtx,
)
from pagedcore_ptxsim.launch import Report, launch, unsupported
from pagedcore_ptxsim.mutants import Mutant, mutants
from pagedcore_ptxsim.parser import parse
from pagedcore_ptxsim.uniformity import Divided, divided_operations

__version__: Final = "0.1.0"
__all__ = [
    "CLASSES",
    "AsyncCopyFault",
    "BarrierFault",
    "DivergenceFault",
    "Divided",
    "LaunchError",
    "MemoryFault",
    "Mutant",
    "PtxError",
    "PtxFault",
    "PtxSyntaxError",
    "RaceFault",
    "Report",
    "Runaway",
    "UninitializedRead",
    "UnsupportedPtx",
    "Work",
    "divided_operations",
    "launch",
    "mutants",
    "parse",
    "unsupported",
]
