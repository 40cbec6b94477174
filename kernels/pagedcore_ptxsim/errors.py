"""What can go wrong when PTX is run: every error of the interpreter, drawn as a tree.

- ``PtxError``: anything this package raises
  - ``PtxSyntaxError``: the text is not PTX that the parser understands
  - ``UnsupportedPtx``: valid PTX, but an instruction or form the interpreter does not have
  - ``LaunchError``: the launch itself is wrong: arguments, grid, kernel name
  - ``PtxFault``: the kernel did something that is a bug on a GPU too
    - ``MemoryFault``: out of bounds, misaligned, or a store to a read-only buffer
    - ``UninitializedRead``: shared or local bytes read before any write
    - ``RaceFault``: two threads touch a byte, one of them writes, and nothing orders them
    - ``AsyncCopyFault``: data of a ``cp.async`` touched before its wait, or never waited for
    - ``DivergenceFault``: an operation of a whole warp reached by part of it
    - ``BarrierFault``: threads wait at different barriers, or for threads that never come
    - ``Runaway``: the step limit was reached; usually a loop that waits for something that cannot happen

A fault is raised deep inside an access, where only lane numbers are known; ``locate`` adds the PTX line and
the thread coordinates on the way out. Read next: ``launch``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsInt


class PtxError(Exception):
    """Anything this package raises."""


class PtxSyntaxError(PtxError):
    """The text is not PTX that the parser understands."""


class UnsupportedPtx(PtxError):
    """Valid PTX that the interpreter has no implementation for."""


class LaunchError(PtxError, ValueError):
    """The kernel name, the grid or the arguments do not fit the kernel."""


class PtxFault(PtxError):
    """The kernel did something wrong. ``line`` and ``instruction`` say where, ``threads`` who.

    lanes: numbers of the threads within the running batch, or none if no thread in particular is at fault.
    """

    def __init__(self, what: str, lanes: Iterable[SupportsInt] = ()) -> None:
        super().__init__(what)
        self.what = what
        self.lanes = [int(lane) for lane in lanes]
        self.line = 0
        self.instruction = ""
        self.threads = ""

    def locate(self, line: int, instruction: str, threads: str) -> None:
        """Add the PTX line, its text and the thread coordinates, unless they are known already."""
        if not self.line:
            self.line, self.instruction, self.threads = line, instruction, threads

    def __str__(self) -> str:
        where = f"\n  line {self.line}: {self.instruction}" if self.line else ""
        return f"{self.what}{where}" + (f"\n  {self.threads}" if self.threads else "")


class MemoryFault(PtxFault):
    """An access outside every buffer, not aligned to its size, or a store to a read-only buffer."""


class UninitializedRead(PtxFault):
    """Bytes of shared or local memory were read before any thread wrote them."""


class RaceFault(PtxFault):
    """Two threads touch the same byte, at least one writes, and no barrier lies between."""


class AsyncCopyFault(PtxFault):
    """The destination of a ``cp.async`` was touched before its wait, or the kernel ended without one."""


class DivergenceFault(PtxFault):
    """A warp-wide operation was reached by part of the threads that it names."""


class BarrierFault(PtxFault):
    """Threads of a block wait at different barriers, or at one that others never reach."""


class Runaway(PtxFault):
    """The step limit of the launch was reached."""
