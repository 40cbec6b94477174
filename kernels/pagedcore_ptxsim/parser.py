"""PTX text to ``Program``. Owns the grammar that compilers emit; never gives an instruction a meaning.

Understood: modules with entries, parameters, registers (also those of inline-assembly scopes in braces), labels,
shared, global, const and local variables with initial values, line comments and block comments. Device functions
(``.func``) and debug sections are skipped; a ``call`` to one is refused when it is run.
Source: PTX ISA, chapters Syntax and State Spaces. Read next: ``syntax`` for the records, ``ops`` for the meaning.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache

from pagedcore_ptxsim.body import Body
from pagedcore_ptxsim.errors import PtxSyntaxError
from pagedcore_ptxsim.scalar_types import numpy_type
from pagedcore_ptxsim.syntax import Kernel, Parameter, Program, Variable, integer

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_LINE_DIRECTIVE = re.compile(r"\s*\.(version|target|address_size|file|loc)\b([^\n]*)")
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr\b[^,]*?\s)?([\w$%]+)\s*(?:\[(\d+)\])?\s*(?:,|$)")
_VARIABLE = re.compile(
    r"\.(shared|global|const|local)\s+(?:\.attribute\([^)]*\)\s*)?(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$%]+)"
    r"\s*(?:\[(\d*)\])?\s*(?:=\s*(.*))?$", re.S)
_BLOCK_LIMIT = re.compile(r"\.(maxntid|reqntid)\s+([\d,\s]+)")
_SPACE = re.compile(r"\s*")


@lru_cache(maxsize=64)
def parse(ptx: str) -> Program:
    """Parse a PTX module. Raises ``PtxSyntaxError`` naming the line. The result of a text is remembered."""
    return _ModuleParser(ptx).parse()


class _ModuleParser:
    """One pass over the module. Invariant: ``text`` has the caller's line breaks, so offsets give its lines."""

    def __init__(self, ptx: str) -> None:
        self.text = _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), ptx)
        self.line_starts = [0, *(match.end() for match in re.finditer("\n", self.text))]
        self.kernels: dict[str, Kernel] = {}
        self.variables: list[Variable] = []
        self.target = ""

    def line_at(self, offset: int) -> int:
        return bisect_right(self.line_starts, offset)

    def parse(self) -> Program:
        offset = self._skip_space(0)
        while offset < len(self.text):
            try:
                end = self._declaration(offset)
            except (ValueError, IndexError, OverflowError, struct.error) as error:
                where = f"line {self.line_at(offset)}"
                raise PtxSyntaxError(f"{where}: a declaration that cannot be read: {error}") from error
            offset = self._skip_space(end)
        if not self.kernels:
            raise PtxSyntaxError("the text holds no .entry: pass the PTX of a kernel, not of a device function")
        return Program(self.target, self.kernels, tuple(self.variables))

    def _skip_space(self, offset: int) -> int:
        match = _SPACE.match(self.text, offset)
        return match.end() if match else offset

    def _declaration(self, offset: int) -> int:
        """Parse what begins at ``offset``; where it ends."""
        if line := _LINE_DIRECTIVE.match(self.text, offset):
            if line.group(1) == "target":
                self.target = line.group(2).split(",")[0].strip()
            return line.end()
        stop = re.compile(r"[;{]").search(self.text, offset)
        if not stop:
            raise PtxSyntaxError(f"line {self.line_at(offset)}: a declaration without an end")
        header = self.text[offset:stop.start()]
        if re.search(r"\.(entry|func|section)\b", header):
            return self._function(header, offset, stop.start())
        end = self.text.find(";", offset)
        if variable := parse_variable(self.text[offset:end]):
            self.variables.append(variable)
        return end + 1

    def _function(self, header: str, offset: int, brace: int) -> int:
        if self.text[brace] == ";":
            return brace + 1
        end = self._matching_brace(brace)
        if entry := re.search(r"\.entry\s+([\w$%]+)", header):
            self.kernels[entry.group(1)] = self._kernel(entry.group(1), header, offset, brace, end)
        return end + 1

    def _matching_brace(self, offset: int) -> int:
        depth = 0
        for match in re.compile(r"[{}]").finditer(self.text, offset):
            depth += 1 if match.group() == "{" else -1
            if not depth:
                return match.start()
        raise PtxSyntaxError(f"line {self.line_at(offset)}: a brace that is never closed")

    def _kernel(self, name: str, header: str, offset: int, brace: int, end: int) -> Kernel:
        limits = {kind: _product(counts) for kind, counts in _BLOCK_LIMIT.findall(header)}
        listed = header[header.find("(") + 1:header.rfind(")")] if "(" in header else ""
        body = Body(self.text[brace + 1:end], self._inner_line(brace + 1), parse_variable)
        return Kernel(
            name, self.line_at(offset), tuple(_parameters(listed)), body.registers, tuple(body.code),
            body.labels, tuple(body.variables), limits.get("maxntid", 0), limits.get("reqntid", 0))

    def _inner_line(self, base: int) -> Callable[[int], int]:
        return lambda offset: self.line_at(base + offset)


def _product(counts: str) -> int:
    product = 1
    for count in counts.split(","):
        product *= int(count)
    return product


def _parameters(listed: str) -> list[Parameter]:
    return [Parameter(name, kind, int(count or 1)) for kind, name, count in _PARAMETER.findall(listed.strip())]


def parse_variable(declaration: str) -> Variable | None:
    """The variable that a ``.shared``/``.global``/``.const``/``.local`` declaration makes, None for anything else."""
    match = _VARIABLE.search(declaration.strip())
    if not match:
        return None
    space, align, kind, name, count, initial = match.groups()
    width = numpy_type(kind).itemsize
    size = width * (int(count or 0) if count is not None else 1)
    return Variable(name, space, int(align or width), size, _initial_bytes(initial, kind, width))


def _initial_bytes(initial: str | None, kind: str, width: int) -> bytes:
    if not initial:
        return b""
    numbers = [number.strip() for number in initial.strip().strip("{}").split(",")]
    return b"".join(_number_bytes(number, kind, width) for number in numbers)


def _number_bytes(number: str, kind: str, width: int) -> bytes:
    if number[:2].lower() in ("0f", "0d") and kind.startswith("f"):
        return int(number[2:], 16).to_bytes(width, "little")
    if kind in ("f32", "f64"):
        return struct.pack("<f" if kind == "f32" else "<d", float(number))
    return (integer(number) & ((1 << 8 * width) - 1)).to_bytes(width, "little")
