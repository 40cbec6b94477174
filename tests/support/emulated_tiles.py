"""Intel's tile instructions (AMX) in Python, one call for each, so that kernels made of them run on any processor.

What an instruction does and refuses follows Intel's Software Developer's Manual (the instructions' pages in volume 2),
not the kernels. The processor raises #UD or #GP where this records an error.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from llvmlite import ir
from numba import cfunc, types

from pagedcore_kernels.cpu.matmul import amx, packed, packed_grouped, packed_int8
from pagedcore_kernels.cpu.matmul.tiles import BYTE_MATRIX_UNITS
from pagedcore_kernels.cpu.runtime.compiled import CompiledEntry
from pagedcore_kernels.cpu.runtime.kernel import Kernel
from pagedcore_kernels.cpu.simd import int64

Bytes = npt.NDArray[np.uint8]

_PALETTE_ROWS, _PALETTE_BYTES, _REGISTERS = 16, 64, 8


class Fault(Exception):
    """What the processor would raise."""


class _Registers:
    """The tile registers of one thread."""

    def __init__(self, configuration: bytes) -> None:
        palette, start_row, *rest = configuration
        self.colsb = np.frombuffer(configuration, np.uint16, 16, 16)
        self.rows = np.frombuffer(configuration, np.uint8, 16, 48)
        reserved = [*rest[:14], *self.colsb[_REGISTERS:], *self.rows[_REGISTERS:]]
        if palette != 1 or start_row or any(reserved):
            raise Fault(f"ldtilecfg: palette {palette}, start row {start_row}, reserved {reserved}")
        if (self.colsb > _PALETTE_BYTES).any() or (self.rows > _PALETTE_ROWS).any():
            raise Fault(f"ldtilecfg: rows {self.rows}, bytes {self.colsb}")
        if ((self.colsb == 0) != (self.rows == 0)).any():
            raise Fault("ldtilecfg: a tile with rows and no columns, or the other way round")
        self.tiles = np.zeros((_REGISTERS, _PALETTE_ROWS, _PALETTE_BYTES), np.uint8)

    def shape(self, register: int) -> tuple[int, int]:
        """Return rows and bytes of a register that is configured."""
        if register >= _REGISTERS or not self.rows[register]:
            raise Fault(f"register {register} is not configured")
        return int(self.rows[register]), int(self.colsb[register])


class EmulatedTiles:
    """The tile instructions, for any number of threads; ``executed`` counts them by name."""

    def __init__(self) -> None:
        self.executed: dict[str, int] = {}
        self.faults: list[Exception] = []
        self._of_thread: dict[int, _Registers] = {}
        self._lock = threading.Lock()
        self._callbacks: dict[str, Any] = {}

    @property
    def num_threads_in_use(self) -> int:
        """Threads that have configured registers and not released them."""
        return len(self._of_thread)

    def emit(self, b: Any, instruction: str, *operands: Any) -> None:
        """Emit a call of the instruction here, in the place of ``amx._emit``."""
        values = [int64(one) if isinstance(one, int) else one for one in operands]
        values = [b.ptrtoint(one, ir.IntType(64)) if one.type.is_pointer else one for one in values]
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        address = ctypes.cast(self._callback(instruction, len(values)), ctypes.c_void_p).value
        b.call(b.inttoptr(int64(address or 0), kind.as_pointer()), values)

    def _callback(self, instruction: str, num_operands: int) -> Any:
        if instruction not in self._callbacks:

            def run(*operands: int) -> None:
                with self._lock:
                    self.executed[instruction] = self.executed.get(instruction, 0) + 1
                    try:
                        getattr(self, "_" + instruction)(*operands)
                    except Exception as error:  # Why: an exception cannot pass through machine code
                        self.faults.append(error)

            self._callbacks[instruction] = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * num_operands)(run)
        return self._callbacks[instruction]

    @property
    def _registers(self) -> _Registers:
        registers = self._of_thread.get(threading.get_native_id())
        if registers is None:
            raise Fault("no configuration is loaded")
        return registers

    def _ldtilecfg(self, address: int) -> None:
        self._of_thread[threading.get_native_id()] = _Registers(ctypes.string_at(address, 64))

    def _tilerelease(self) -> None:
        self._of_thread.pop(threading.get_native_id(), None)

    def _tilezero(self, register: int) -> None:
        self._registers.shape(register)
        self._registers.tiles[register] = 0

    def _tileloadd64(self, register: int, address: int, stride: int) -> None:
        rows, colsb = self._registers.shape(register)
        tile = self._registers.tiles[register]
        tile[:] = 0
        for row in range(rows):
            tile[row, :colsb] = np.frombuffer(ctypes.string_at(address + row * stride, colsb), np.uint8)

    def _tilestored64(self, register: int, address: int, stride: int) -> None:
        rows, colsb = self._registers.shape(register)
        for row in range(rows):
            ctypes.memmove(address + row * stride, self._registers.tiles[register, row, :colsb].tobytes(), colsb)

    def _tdpbusd(self, sums: int, first: int, second: int) -> None:
        """Add to each int32 of ``sums`` [M, N] the products of uint8 ``first`` [M, 4K] and int8 ``second`` [K, 4N]."""
        self._multiply(sums, first, second, np.uint8)

    def _tdpbssd(self, sums: int, first: int, second: int) -> None:
        """The same, of int8 both."""
        self._multiply(sums, first, second, np.int8)

    def _multiply(self, sums: int, first: int, second: int, of_first: npt.DTypeLike) -> None:
        registers = self._registers
        (rows, width), (first_rows, depth), (second_rows, second_width) = map(registers.shape, (sums, first, second))
        if len({sums, first, second}) < 3 or rows != first_rows or width != second_width or depth != 4 * second_rows:
            raise Fault(f"{rows}x{width} += {first_rows}x{depth} * {second_rows}x{second_width}")
        # Shape: [M, K, 1, 4] and [1, K, N, 4]
        a = registers.tiles[first, :rows, :depth].view(of_first).reshape(rows, 1, -1, 4).swapaxes(1, 2).astype(np.int64)
        b = registers.tiles[second, :second_rows, :width].view(np.int8).reshape(1, second_rows, -1, 4).astype(np.int64)
        target = registers.tiles[sums, :rows, :width].copy().view(np.int32)
        total = target + (a * b).sum(axis=(1, 3))
        if total.min() < -(2**31) or total.max() >= 2**31:
            raise Fault("a sum of int32 overflows")
        registers.tiles[sums, :rows, :width] = total.astype(np.int32).view(np.uint8)


def use(tiles: EmulatedTiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let int8 products use ``tiles`` as if this processor had AMX; kernels made of them never reach Numba's cache."""
    _use(tiles, monkeypatch, packed_int8, packed, "matmul_kernel", (BYTE_MATRIX_UNITS,))


def use_for_groups(tiles: EmulatedTiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for products of groups of int8 rows with weights of 4 bits."""
    _use(tiles, monkeypatch, packed_grouped, packed_grouped, "_kernel", tuple(packed_grouped.FEWEST_TILE_ROWS))


def _use(
    tiles: EmulatedTiles, monkeypatch: pytest.MonkeyPatch, products: Any, kernels: Any, name: str, forms: Sequence[int]
) -> None:
    """Make the kernels of some forms of the instructions here: module ``kernels`` makes them, ``products`` calls them.
    """
    monkeypatch.setattr(products, "may_use_tiles", lambda form: form in forms)
    made: dict[Any, Kernel] = {}
    as_before = getattr(kernels, name)

    def kernel(form: int, *others: Any) -> Kernel:
        if form not in forms:
            return as_before(form, *others)
        if (form, *others) not in made:
            with monkeypatch.context() as patch:
                patch.setattr(amx, "_emit", tiles.emit)
                patch.setattr(kernels, "compile_kernel", _compile_here)
                made[form, *others] = as_before.__wrapped__(form, *others)
        return made[form, *others]

    monkeypatch.setattr(products, name, kernel)


def _compile_here(function: Callable[[Any], None]) -> Kernel:
    compiled = cfunc(types.void(types.voidptr), error_model="numpy")(function)
    return Kernel(CompiledEntry(compiled))
