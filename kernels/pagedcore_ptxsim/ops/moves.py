"""Moves: mov with packing and unpacking, address conversion, address space tests."""

from __future__ import annotations

import numpy as np

from pagedcore_ptxsim.binder import LOCAL_WINDOW, SHARED_WINDOW, Binder, split_vector
from pagedcore_ptxsim.ops.registry import assign, operation
from pagedcore_ptxsim.scalar_types import UNSIGNED, Array, numpy_type
from pagedcore_ptxsim.scheduler import Step
from pagedcore_ptxsim.syntax import Instruction

_U64, _BOOL = np.dtype(np.uint64), np.dtype(np.bool_)
_WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}


@operation("mov")
def _mov(bind: Binder, instruction: Instruction, position: int) -> Step:
    target, source = instruction.operands[:2]
    dtype = numpy_type(instruction.types[-1])
    if source.startswith("{"):
        return _pack(bind, target, split_vector(source), dtype.itemsize)
    if target.startswith("{"):
        return _unpack(bind, split_vector(target), source, dtype.itemsize)
    batch, out, value = bind.batch, bind.target(target, dtype), bind.source(source, dtype)
    if dtype != _BOOL:
        # Why: a float copied as bits keeps its NaN payload.
        out, value = (array.view(UNSIGNED[dtype.itemsize]) for array in (out, value))

    def step() -> None:
        if batch.full:
            out[...] = value
        else:
            np.copyto(out, value, where=batch.mask)
    return step


def _pack(bind: Binder, target: str, parts: list[str], width: int) -> Step:
    narrow, wide = UNSIGNED[width // len(parts)], UNSIGNED[width]
    sources = [bind.source(part, narrow) for part in parts]
    shifts = [wide.type(8 * narrow.itemsize * i) for i in range(len(parts))]

    def apply(*values: Array) -> Array:
        word = values[0].astype(wide)
        for value, shift in zip(values[1:], shifts[1:], strict=True):
            word = word | (value.astype(wide) << shift)
        return word
    return assign(bind, target, wide, apply, sources)


def _unpack(bind: Binder, targets: list[str], source: str, width: int) -> Step:
    narrow, wide = UNSIGNED[width // len(targets)], UNSIGNED[width]
    word = bind.source(source, wide)
    writers = [bind.writer(target, narrow) for target in targets]

    def step() -> None:
        parts = np.array(np.broadcast_to(word, bind.batch.count)).view(narrow).reshape(-1, len(targets))
        for i, write in enumerate(writers):
            write(parts[:, i])
    return step


@operation("cvta")
def _cvta(bind: Binder, instruction: Instruction, position: int) -> Step:
    """Between addresses of a space and generic addresses; global addresses are the same in both."""
    dtype = numpy_type(instruction.types[-1])
    space = next((part.partition("__")[0] for part in instruction.parts if part.partition("__")[0] in _WINDOWS), "")
    shift = dtype.type(_WINDOWS.get(space, 0))
    function = np.subtract if instruction.has("to") else np.add
    source = bind.source(instruction.operands[1].strip("[]"), dtype)
    return assign(bind, instruction.operands[0], dtype, function, [source, np.asarray(shift)])


@operation("isspacep")
def _isspacep(bind: Binder, instruction: Instruction, position: int) -> Step:
    space = instruction.parts[1].partition("__")[0]
    source = bind.source(instruction.operands[1], _U64)

    def apply(address: Array) -> Array:
        windows = {name: (address >= np.uint64(low)) & (address < np.uint64(low + (1 << 32)))
                   for name, low in _WINDOWS.items()}
        return windows[space] if space in windows else ~(windows["shared"] | windows["local"])
    return assign(bind, instruction.operands[0], _BOOL, apply, [source])
