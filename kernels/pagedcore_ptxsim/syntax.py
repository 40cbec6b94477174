"""What a PTX text is made of once it is parsed: instructions, variables, parameters, kernels.

Plain frozen records; ``parser`` builds them, ``ops`` turns instructions into steps. Line numbers count from 1 in
the text as the caller gave it, so that an error can quote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from pagedcore_ptxsim.scalar_types import is_type


def integer(literal: str) -> int:
    """The value of an integer literal: decimal, ``0x``, ``0b``, octal after a plain 0, with a sign or a ``U``."""
    digits = literal.rstrip("U").lstrip("-")
    octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
    value = int(digits, 8 if octal else 0)
    return -value if literal.startswith("-") else value


@dataclass(frozen=True)
class Instruction:
    """One instruction. ``opcode`` keeps its modifiers: ``add.ftz.f32``; ``guard`` is the predicate register."""

    line: int
    text: str
    opcode: str
    operands: tuple[str, ...]
    guard: str = ""
    guard_negated: bool = False

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The opcode split at its dots: ``("add", "ftz", "f32")``."""
        return tuple(self.opcode.replace("::", "__").split("."))

    @property
    def name(self) -> str:
        """The bare operation: ``add``."""
        return self.parts[0]

    @cached_property
    def types(self) -> tuple[str, ...]:
        """The scalar types among the modifiers, in order: destination first where there are two."""
        return tuple(part for part in self.parts[1:] if is_type(part))

    def has(self, *modifiers: str) -> bool:
        """Whether one of ``modifiers`` is among the opcode's parts."""
        return any(modifier in self.parts for modifier in modifiers)


@dataclass(frozen=True)
class Variable:
    """A module or kernel variable. ``space`` is shared, global, const or local; ``size`` 0 means dynamic shared."""

    name: str
    space: str
    align: int
    size: int
    data: bytes = b""


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter; ``type`` is a scalar type, and ``count`` more than 1 for a byte array."""

    name: str
    type: str
    count: int = 1


@dataclass(frozen=True)
class Kernel:
    """One ``.entry``: its parameters, its registers (name to type), its code, and where labels point.

    ``required_block`` is the ``.reqntid`` and ``max_block`` the ``.maxntid`` thread count, 0 if not given.
    """

    name: str
    line: int
    parameters: tuple[Parameter, ...]
    registers: Mapping[str, str]
    code: tuple[Instruction, ...]
    labels: Mapping[str, int]
    variables: tuple[Variable, ...]
    max_block: int = 0
    required_block: int = 0

    @cached_property
    def names(self) -> frozenset[str]:
        """Every name that an operand is or begins with."""
        return frozenset(name.strip() for instruction in self.code for operand in instruction.operands
                         for name in operand.strip("[] ").split("+"))


@dataclass(frozen=True)
class Program:
    """A parsed PTX module."""

    target: str
    kernels: Mapping[str, Kernel]
    variables: tuple[Variable, ...]
