"""Which operations of a whole warp a text lets part of a warp reach, whatever its arguments are. Nothing is run.

A result is as uniform as what it is computed from. ``%tid.x`` differs between the lanes of a warp in its five low
bits, so the bits that may differ are kept for each result, and ``%tid.x >> 5`` is uniform. Votes, reductions, kernel
parameters and loads from one address are uniform too. A branch on a predicate that may differ divides the warp until
the first place that every way from it passes; what is computed in between may differ as well.

The sets only grow: what is not reported is uniform in every launch of blocks of one dimension; what is reported may
be uniform for a reason that is not in the text.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from dataclasses import dataclass

from pagedcore_ptxsim.control_flow import ControlFlow
from pagedcore_ptxsim.parser import parse
from pagedcore_ptxsim.scalar_types import numpy_type
from pagedcore_ptxsim.syntax import Instruction, Kernel, integer

_ANY = (1 << 64) - 1
_BITS_OF_A_LANE = 31
_SAME_FOR_A_WARP = ("%ctaid", "%nctaid", "%ntid", "%nwarpid", "%gridid")
_DIFFERENT = ("atom", "activemask", "addc", "subc")
"""Their results differ though their operands are the same: by the order of the lanes, or by a flag that is not seen."""
_BELOW, _UP_TO = ("lt", "ge"), ("le", "gt")
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?")


@dataclass(frozen=True)
class Divided:
    """An operation of a whole warp, and the branch behind which only some of the lanes may come to it."""

    operation: Instruction
    branch: Instruction

    def __str__(self) -> str:
        return (f"line {self.operation.line}: {self.operation.text} is behind "
                f"line {self.branch.line}: {self.branch.text}")


def divided_operations(ptx: str) -> list[Divided]:
    """Every operation of a whole warp that part of a warp may reach. From the first of them the others may follow.

    Member masks are not looked at: an operation of half a warp counts as one of the whole.

    Raises:
        UnsupportedPtx: a kernel calls a function or jumps by a table.
    """
    return [Divided(kernel.code[position], branch)
            for kernel in parse(ptx).kernels.values()
            for position, branch in _Analysis(kernel).divided.items()
            if kernel.code[position].has("sync") or kernel.code[position].name in ("bar", "barrier")]


class _Analysis:
    """Goes through what may differ until nothing is new.

    ``divided``: the positions that part of a warp may reach, each with the first branch found to keep lanes from it.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.divided: dict[int, Instruction] = {}
        self._code = kernel.code
        self._flow = ControlFlow(kernel)
        self._varying = [0] * len(self._code)
        self._readers: dict[int, list[int]] = defaultdict(list)
        for position, names in enumerate(self._flow.reads):
            for _, origins in names:
                for origin in origins:
                    self._readers[origin].append(position)
        self._pending = deque(range(len(self._code)))
        while self._pending:
            self._visit(self._pending.popleft())

    def _visit(self, position: int) -> None:
        instruction = self._code[position]
        *sources, guard = [self._bits(name, origins) for name, origins in self._flow.reads[position]]
        if guard:
            jumps = instruction.name in ("bra", "ret", "exit")
            for each in self._flow.until_all_meet(position) if jumps else [position]:
                self.divided.setdefault(each, instruction)
                self._widen(each, _ANY)
        self._widen(position, _result(instruction, sources))

    def _bits(self, name: str, origins: list[int]) -> int:
        """The bits of a register that may differ."""
        if name.startswith("%") and not origins:
            return _BITS_OF_A_LANE if name == "%tid.x" else 0 if name.split(".")[0] in _SAME_FOR_A_WARP else _ANY
        bits = 0
        for origin in origins:
            bits |= self._varying[origin]
        return bits

    def _widen(self, position: int, bits: int) -> None:
        if bits & ~self._varying[position]:
            self._varying[position] |= bits
            self._pending += self._readers[position]


def _result(instruction: Instruction, sources: list[int]) -> int:
    """The bits of a result that may differ where those of the sources do."""
    if instruction.has("sync"):
        return 0 if instruction.name in ("vote", "redux") else _ANY
    if instruction.name in _DIFFERENT or (instruction.name == "ld" and not _is_plain(instruction)):
        return _ANY
    bits = 0
    for each in sources:
        bits |= each
    return _where_bits_go(instruction, bits) if bits else 0


def _is_plain(load: Instruction) -> bool:
    """Whether lanes that load from one address get one value: not from memory of their own, nor each at its time."""
    return load.has("param", "const", "global", "shared") and not load.has("volatile", "acquire", "relaxed")


def _where_bits_go(instruction: Instruction, bits: int) -> int:
    """The bits of a result that may differ where ``bits``, not 0, do in the sources; exactly for common integers."""
    name, last, types = instruction.name, instruction.operands[-1], instruction.types
    is_integer = bool(types) and all(re.fullmatch(r"[usb]\d+", each) for each in types)
    if not is_integer or instruction.has("sat", "hi") or "{" in instruction.text:
        return _ANY
    width = 8 * numpy_type(types[-1]).itemsize
    repeats_sign = types[-1][0] == "s" and bits >> (width - 1) != 0
    if name in ("mov", "or", "xor") or (name == "cvt" and not repeats_sign):
        return bits
    if name in ("add", "sub", "mul", "mad"):
        return _ANY & -(bits & -bits)                 # a carry goes upwards only
    if not _INTEGER.fullmatch(last):
        return _ANY
    if name == "and":
        return bits & integer(last)
    if name == "shl":
        return bits << integer(last) & _ANY
    if name == "setp" and instruction.has(*_BELOW, *_UP_TO):
        # Why: on which side of a multiple of 32 a thread's number lies is a matter of its warp.
        border = integer(last) + instruction.has(*_UP_TO)
        return 0 if bits >> (width - 1) == 0 and border % (1 << bits.bit_length()) == 0 else _ANY
    return (bits & ((1 << width) - 1)) >> integer(last) if name == "shr" and not repeats_sign else _ANY
