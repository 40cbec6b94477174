"""The table of operations, and the shape most of them have: arrays in, one array out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pagedcore_ptxsim.batch import Batch
from pagedcore_ptxsim.binder import Binder
from pagedcore_ptxsim.scalar_types import Array
from pagedcore_ptxsim.scheduler import Maker, Step
from pagedcore_ptxsim.syntax import Instruction

MAKERS: dict[str, Maker] = {}
Function = Callable[..., Array]


def operation(*names: str) -> Callable[[Maker], Maker]:
    """Register a maker for the operations ``names``."""
    def register(maker: Maker) -> Maker:
        for name in names:
            MAKERS[name] = maker
        return maker
    return register


def elementwise(bind: Binder, instruction: Instruction, function: Function, dtype: np.dtype[Any]) -> Step:
    """A step ``d = function(a, b, ...)`` where all operands have one type."""
    sources = [bind.source(operand, dtype) for operand in instruction.operands[1:]]
    return assign(bind, instruction.operands[0], dtype, function, sources)


def assign(bind: Binder, target: str, dtype: np.dtype[Any], function: Function, sources: list[Array]) -> Step:
    """A step that stores ``function(*sources)``; a ufunc writes straight into the register when all threads run."""
    batch = bind.batch
    if isinstance(function, np.ufunc) and _fits(bind, target, dtype):
        return _ufunc_step(batch, function, bind.target(target, dtype), sources)
    write = bind.writer(target, dtype)

    def step() -> None:
        write(function(*sources))
    return step


def _fits(bind: Binder, target: str, dtype: np.dtype[Any]) -> bool:
    array = bind.batch.registers.get(target)
    return array is not None and array.dtype.itemsize == dtype.itemsize


def _ufunc_step(batch: Batch, function: np.ufunc, out: Array, sources: list[Array]) -> Step:
    if len(sources) == 2:
        first, second = sources

        def binary() -> None:
            if batch.full:
                function(first, second, out=out)
            else:
                np.copyto(out, function(first, second), where=batch.mask)
        return binary

    def step() -> None:
        if batch.full:
            function(*sources, out=out)
        else:
            np.copyto(out, function(*sources), where=batch.mask)
    return step
