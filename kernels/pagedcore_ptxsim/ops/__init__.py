"""What every instruction does, one module per family. ``MAKERS`` maps an operation to what builds its steps.

A maker takes the binder, the instruction and its position, binds operands once, and returns a step: a function of no
arguments that acts on the active threads. A new instruction is one function with ``@operation`` in its family.
"""

from __future__ import annotations

from pagedcore_ptxsim.ops import (
    async_copy,
    atomics,
    bits,
    compare,
    control,
    convert,
    floating,
    integer,
    matrix,
    memory,
    moves,
    warp,
)
from pagedcore_ptxsim.ops.registry import MAKERS

__all__ = ["MAKERS", "async_copy", "atomics", "bits", "compare", "control", "convert", "floating", "integer", "matrix",
           "memory", "moves", "warp"]
