"""Comparison and selection: setp, set, selp, slct. Source: PTX ISA, Comparison and Selection Instructions."""

from __future__ import annotations

import numpy as np

from pagedcore_ptxsim.binder import Binder
from pagedcore_ptxsim.formats import bf16_to_f32, flush, has_denormal
from pagedcore_ptxsim.ops.registry import Function, assign, operation
from pagedcore_ptxsim.scalar_types import Array, numpy_type
from pagedcore_ptxsim.scheduler import Step
from pagedcore_ptxsim.syntax import Instruction

_BOOL = np.dtype(np.bool_)


def _unordered(function: Function) -> Function:
    """True also where one side is NaN."""
    return lambda x, y: function(x, y) | np.isnan(x) | np.isnan(y)


def _ordered_ne(x: Array, y: Array) -> Array:
    return np.less(x, y) | np.greater(x, y)


_INTEGER: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}
_FLOAT: dict[str, Function] = {
    **_INTEGER, "ne": _ordered_ne,
    "equ": _unordered(np.equal), "neu": np.not_equal, "ltu": _unordered(np.less), "leu": _unordered(np.less_equal),
    "gtu": _unordered(np.greater), "geu": _unordered(np.greater_equal),
    "num": lambda x, y: ~(np.isnan(x) | np.isnan(y)), "nan": lambda x, y: np.isnan(x) | np.isnan(y),
}
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _comparison(bind: Binder, instruction: Instruction, kind: str) -> Function:
    table = _FLOAT if "f" in kind else _INTEGER
    compare = next(table[part] for part in instruction.parts[1:] if part in table)
    if kind == "bf16":
        return lambda x, y: compare(bf16_to_f32(x), bf16_to_f32(y))
    if kind == "f32" and instruction.has("ftz") and any(map(bind.may_be_denormal, instruction.operands[1:3])):
        return lambda x, y: compare(*(flush(value) if has_denormal(value) else value for value in (x, y)))
    return compare


def _predicate(bind: Binder, operand: str) -> Function:
    """Reads a predicate operand, which may be negated: ``!%p1``."""
    array = bind.source(operand.lstrip("!"), _BOOL)
    return (lambda: np.logical_not(array)) if operand[0] == "!" else (lambda: array)


@operation("setp")
def _setp(bind: Binder, instruction: Instruction, position: int) -> Step:
    """d (and its complement after ``|``) of a comparison, optionally combined with a predicate."""
    kind = instruction.types[-1]
    compare = _comparison(bind, instruction, kind)
    dtype = numpy_type(kind)
    targets = [target.strip() for target in instruction.operands[0].split("|")]
    sources = [bind.source(operand, dtype) for operand in instruction.operands[1:3]]
    if len(targets) == 1 and len(instruction.operands) == 3:
        return assign(bind, targets[0], _BOOL, compare, sources)
    write = bind.writer(targets[0], _BOOL)
    write_complement = bind.writer(targets[1], _BOOL) if len(targets) > 1 else None
    merge = _merging(bind, instruction)

    def step() -> None:
        true = compare(*sources)
        complement = merge(np.logical_not(true))
        write(merge(true))
        if write_complement:
            write_complement(complement)
    return step


def _merging(bind: Binder, instruction: Instruction) -> Function:
    """What the fourth operand does to a comparison: ``.and``, ``.or``, ``.xor`` with a predicate, or nothing."""
    combine = next((_COMBINE[part] for part in instruction.parts[1:] if part in _COMBINE), None)
    if combine is None:
        return lambda true: true
    other = _predicate(bind, instruction.operands[3])
    return lambda true: combine(true, other())


@operation("set")
def _set(bind: Binder, instruction: Instruction, position: int) -> Step:
    """A comparison as a number: all ones or 1.0."""
    result, kind = instruction.types[-2:]
    compare = _comparison(bind, instruction, kind)
    dtype = numpy_type(result)
    yes = dtype.type(1) if dtype.kind == "f" else np.array(-1).astype(dtype)[()]
    merge = _merging(bind, instruction)

    def apply(x: Array, y: Array) -> Array:
        return np.where(merge(compare(x, y)), yes, dtype.type(0))
    sources = [bind.source(operand, numpy_type(kind)) for operand in instruction.operands[1:3]]
    return assign(bind, instruction.operands[0], dtype, apply, sources)


@operation("selp")
def _selp(bind: Binder, instruction: Instruction, position: int) -> Step:
    dtype = numpy_type(instruction.types[-1])
    yes, no = (bind.source(operand, dtype) for operand in instruction.operands[1:3])
    chosen = _predicate(bind, instruction.operands[3])

    def apply(x: Array, y: Array) -> Array:
        return np.where(chosen(), x, y)
    return assign(bind, instruction.operands[0], dtype, apply, [yes, no])


@operation("slct")
def _slct(bind: Binder, instruction: Instruction, position: int) -> Step:
    """a where c is not negative, b elsewhere (also where c is NaN)."""
    result, kind = instruction.types[-2:]
    dtype = numpy_type(result)
    sources = [bind.source(operand, dtype) for operand in instruction.operands[1:3]]
    sources.append(bind.source(instruction.operands[3], numpy_type(kind)))

    def apply(x: Array, y: Array, sign: Array) -> Array:
        return np.where((flush(sign) if instruction.has("ftz") else sign) >= 0, x, y)
    return assign(bind, instruction.operands[0], dtype, apply, sources)
