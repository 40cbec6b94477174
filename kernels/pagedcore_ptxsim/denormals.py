"""Which registers can never hold a denormal float32, so that ``.ftz`` need not look. A matter of speed alone.

A register is clean if every instruction that writes it flushes its result, or moves a clean value. Compilers that
flush at all flush nearly everything, so most operands are clean.
"""

from __future__ import annotations

import re

import numpy as np

from pagedcore_ptxsim.formats import has_denormal
from pagedcore_ptxsim.syntax import Instruction, Kernel

_FLUSHING = {"add", "sub", "mul", "fma", "mad", "div", "min", "max", "neg", "abs", "ex2", "lg2", "rcp", "rsqrt", "sqrt",
             "sin", "cos"}
_COPYING = {"mov": slice(1, 2), "selp": slice(1, 3)}
_CONSTANT = re.compile("0[fF]([0-9a-fA-F]{8})")


def never_denormal(kernel: Kernel) -> frozenset[str]:
    """Names of the registers that hold no denormal at any time; garbage before the first write is none either."""
    copies: list[tuple[str, list[str]]] = []
    written: set[str] = set()
    dirty: set[str] = set()
    for instruction in kernel.code:
        for target in _targets(instruction):
            written.add(target)
            if instruction.name in _COPYING and instruction.types[-1:] == ("f32",):
                copies.append((target, [*instruction.operands[_COPYING[instruction.name]]]))
            elif not _flushes(instruction):
                dirty.add(target)
    found = len(dirty) - 1
    while found != len(dirty):
        found = len(dirty)
        dirty |= {target for target, sources in copies if any(_is_dirty(source, dirty) for source in sources)}
    return frozenset(written - dirty)


def _flushes(instruction: Instruction) -> bool:
    return instruction.name in _FLUSHING and instruction.has("ftz") and instruction.types[-1] == "f32"


def _targets(instruction: Instruction) -> list[str]:
    if not instruction.operands or instruction.operands[0].startswith("["):
        return []
    return [name.strip() for name in instruction.operands[0].strip("{}").replace("|", ",").split(",")]


def _is_dirty(source: str, dirty: set[str]) -> bool:
    if constant := _CONSTANT.fullmatch(source):
        return has_denormal(np.array([int(constant.group(1), 16)], np.uint32))
    return not source.startswith("%") or source in dirty
