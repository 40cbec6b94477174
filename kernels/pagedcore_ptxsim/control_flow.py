"""The ways through a kernel, without running it: where they part and meet, and what each register may hold.

Sets of blocks and of positions are integers with one bit for each member. Read next: ``uniformity``.
"""

from __future__ import annotations

import re
from collections import defaultdict

from pagedcore_ptxsim.errors import UnsupportedPtx
from pagedcore_ptxsim.syntax import Instruction, Kernel

_NAME = re.compile(r"%?[A-Za-z_$][\w$]*(?:\.[xyzw])?(?:@\d+)?")
_NO_RESULT = ("bra", "ret", "exit", "trap", "brkpt", "membar", "fence", "nanosleep", "pmevent", "griddepcontrol",
              "setmaxnreg")
_ENDS = ("ret", "exit")


class ControlFlow:
    """Blocks are runs of instructions without a jump, numbered in the order of the text; the last one is the end.

    ``reads``: for each position the names that the instruction reads, its guard last, each with the positions whose
    result it may be; special registers have none. Raises ``UnsupportedPtx`` for calls and jumps by a table.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self._code = kernel, kernel.code
        jumps = [i for i, each in enumerate(self._code) if each.name in ("bra", *_ENDS)]
        starts = {0, *(i + 1 for i in jumps), *kernel.labels.values()} - {len(self._code)}
        self._starts = [*sorted(starts), len(self._code)]
        self._block_at = {start: block for block, start in enumerate(self._starts)}
        self._end = len(self._starts) - 1
        self._next = [*(self._successors(self._code[after - 1], after) for after in self._starts[1:]), []]
        self._passed = self._post_dominators()
        names = [self._names(each) for each in self._code]
        self.reads = self._resolve([read for _, read in names], [written for written, _ in names])

    def until_all_meet(self, branch: int) -> list[int]:
        """The positions between the branch at a position and the first that every way from there passes."""
        block = next(b for b, after in enumerate(self._starts[1:]) if after > branch)
        meeting = self._passed[block] & ~(1 << block)
        seen: set[int] = set()
        pending = list(self._next[block])
        while pending:
            each = pending.pop()
            if each not in seen and not meeting >> each & 1:
                seen.add(each)
                pending += self._next[each]
        return [position for each in seen for position in range(self._starts[each], self._starts[each + 1])]

    def _successors(self, last: Instruction, after: int) -> list[int]:
        found = []
        if last.name not in ("bra", *_ENDS) or last.guard:
            found.append(self._block_at[after])
        if last.name == "bra":
            found.append(self._block_at[self._kernel.labels[last.operands[0]]])
        elif last.name in _ENDS:
            found.append(self._end)
        return found

    def _post_dominators(self) -> list[int]:
        """For each block the blocks that every way from it to the end passes, itself among them."""
        everything = (1 << len(self._starts)) - 1
        passed: list[int] = [everything] * len(self._starts)
        before: list[int] = []
        while passed != before:
            before = passed.copy()
            for block in reversed(range(len(passed))):
                common = everything if self._next[block] else 0
                for following in self._next[block]:
                    common &= passed[following]
                passed[block] = common | 1 << block
        return passed

    def _names(self, instruction: Instruction) -> tuple[list[str], list[str]]:
        """The registers that an instruction writes, and what it reads, its guard last."""
        if instruction.name in ("call", "brx"):
            raise UnsupportedPtx(f"line {instruction.line}: where {instruction.text} leads is not analysed")
        found = [[name for name in _NAME.findall(operand) if name in self._kernel.registers or name.startswith("%")]
                 for operand in instruction.operands]
        has_result = bool(found) and instruction.operands[0][0] != "[" and instruction.name not in _NO_RESULT
        written = found.pop(0) if has_result else []
        return written, [*(name for names in found for name in names), instruction.guard]

    def _resolve(self, reads: list[list[str]], writes: list[list[str]]) -> list[list[tuple[str, list[int]]]]:
        """Which results each instruction may read: reaching definitions, by iteration."""
        written_at: dict[str, int] = defaultdict(int)
        for position, names in enumerate(writes):
            for name in names:
                written_at[name] |= 1 << position
        arriving = [0] * len(self._starts)
        pending = list(range(self._end))
        while pending:
            block = pending.pop(0)
            leaving = arriving[block]
            for position in range(self._starts[block], self._starts[block + 1]):
                leaving = self._after(leaving, position, writes, written_at)
            for following in self._next[block]:
                if leaving & ~arriving[following]:
                    arriving[following] |= leaving
                    if following != self._end:
                        pending.append(following)
        resolved: list[list[tuple[str, list[int]]]] = []
        for block in range(self._end):
            here = arriving[block]
            for position in range(self._starts[block], self._starts[block + 1]):
                resolved.append([(name, _members(here & written_at[name])) for name in reads[position]])
                here = self._after(here, position, writes, written_at)
        return resolved

    def _after(self, here: int, position: int, writes: list[list[str]], written_at: dict[str, int]) -> int:
        for name in writes[position]:
            here = (here if self._code[position].guard else here & ~written_at[name]) | 1 << position
        return here


def _members(bits: int) -> list[int]:
    found = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found
