"""The body of a kernel: statements to instructions, registers, labels and local declarations.

Braces open scopes: inline assembly declares registers and labels in them, and the same names come back in the next
scope. Each scope's names get a number (``p@3``), so that later stages see flat, unique names.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from pagedcore_ptxsim.errors import PtxSyntaxError
from pagedcore_ptxsim.syntax import Instruction, Variable

_LABEL = re.compile(r"([$%\w]+)\s*:(?!:)")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.+)$", re.S)
_LINE_DIRECTIVE = re.compile(r"\.(?:loc|file)\b[^\n]*")
_GUARD = re.compile(r"@(!?)\s*([$%\w]+)\s+")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_NAME = re.compile(r"(?<![\w$%.])[%$A-Za-z_][\w$]*(?:\.[xyzw])?")
_BRANCHES = ("bra", "call", "brx")


class Body:
    """Parses on construction. Invariant: ``labels`` point into ``code`` or at its end."""

    def __init__(self, text: str, line_at: Callable[[int], int], variable: Callable[[str], Variable | None]) -> None:
        self._text, self._line_at, self._variable = text, line_at, variable
        self.registers: dict[str, str] = {}
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.variables: list[Variable] = []
        self._scopes: list[tuple[int, dict[str, str]]] = [(0, {})]
        self._scope_count = 0
        self._jumps: list[tuple[int, list[int]]] = []
        self._parse()
        self._resolve_jumps()

    def _parse(self) -> None:
        offset, text = 0, self._text
        while True:
            while offset < len(text) and text[offset].isspace():
                offset += 1
            if offset >= len(text):
                return
            offset = self._scope(offset) if text[offset] in "{}" else self._labelled(offset)

    def _scope(self, offset: int) -> int:
        if self._text[offset] == "{":
            self._scope_count += 1
            self._scopes.append((self._scope_count, {}))
        else:
            self._scopes.pop()
        return offset + 1

    def _labelled(self, offset: int) -> int:
        if label := _LABEL.match(self._text, offset):
            self.labels[self._scoped(label.group(1))] = len(self.code)
            return label.end()
        if line := _LINE_DIRECTIVE.match(self._text, offset):
            return line.end()
        end = self._text.find(";", offset)
        if end < 0:
            raise PtxSyntaxError(f"line {self._line_at(offset)}: a statement without ';'")
        self._statement(self._text[offset:end].strip(), offset)
        return end + 1

    def _scoped(self, name: str) -> str:
        number = self._scopes[-1][0]
        return f"{name}@{number}" if number else name

    def _statement(self, text: str, offset: int) -> None:
        if declared := _REGISTERS.match(text):
            self._declare(declared.group(1), declared.group(2))
        elif text.startswith("."):
            if variable := self._variable(text):
                self.variables.append(variable)
        elif text:
            self._instruction(text, self._line_at(offset))

    def _declare(self, kind: str, names: str) -> None:
        for name in (part.strip() for part in names.split(",")):
            if numbered := re.fullmatch(r"([%$\w]+)<(\d+)>", name):
                wanted = [f"{numbered.group(1)}{i}" for i in range(int(numbered.group(2)))]
            else:
                wanted = [name]
            for each in wanted:
                unique = self._scoped(each)
                self.registers[unique] = kind
                if unique != each:
                    self._scopes[-1][1][each] = unique

    def _instruction(self, text: str, line: int) -> None:
        guard = _GUARD.match(text)
        rest = text[guard.end():] if guard else text
        opcode, _, listed = rest.replace("\t", " ").replace("\n", " ").partition(" ")
        operands = tuple(part.strip() for part in _OPERAND.findall(listed))
        if opcode.partition(".")[0] in _BRANCHES:
            self._jumps.append((len(self.code), [number for number, _ in self._scopes]))
        elif len(self._scopes) > 1:
            operands = tuple(_NAME.sub(lambda match: self._lookup(match.group()), part) for part in operands)
        name = self._lookup(guard.group(2)) if guard else ""
        shown = re.sub(r"\s+", " ", text) + ";"
        self.code.append(Instruction(line, shown, opcode, operands, name, bool(guard and guard.group(1))))

    def _lookup(self, name: str) -> str:
        for _, names in reversed(self._scopes):
            if name in names:
                return names[name]
        return name

    def _resolve_jumps(self) -> None:
        for position, scopes in self._jumps:
            jump = self.code[position]
            for number in reversed(scopes):
                label = f"{jump.operands[0]}@{number}" if number else jump.operands[0]
                if label in self.labels:
                    self.code[position] = Instruction(jump.line, jump.text, jump.opcode, (label, *jump.operands[1:]),
                                                      jump.guard, jump.guard_negated)
                    break
            else:
                if jump.name == "bra":
                    raise PtxSyntaxError(f"line {jump.line}: no label for {jump.text}")
