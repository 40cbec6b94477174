"""The inner part of a matrix product on the matrix units of Intel's processors (AMX): rows by one panel of weights.

The units multiply tiles: eight registers of up to sixteen rows of 64 bytes. An instruction multiplies 32 inputs in
bfloat16, or 64 in int8, of up to sixteen rows by sixteen outputs. A panel as ``tiles.py`` describes it is such tiles
already: sixteen steps of sixteen outputs. ``packed.py`` makes a product of it.

Where there is no such processor, tests execute the tile instructions of int8 one by one in Python
(``tests/support/emulated_tiles.py``) and read the machine code that LLVM makes for one. ``packed_int8.py`` compares
products of int8 with vectors before it uses them.

Invariant: an output in bfloat16 is the sum over 32 inputs at a time, in order, and of those over the even and the odd
ones apart, in order. The processor does so for every row of a tile, however many it has. Sums of int8 are exact.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from pagedcore_kernels.cpu.features import has_instructions
from pagedcore_kernels.cpu.matmul.tiles import (
    BYTE_MATRIX_UNITS,
    BYTES,
    GROUP_MATRIX_UNITS,
    HALF_MATRIX_UNITS,
    MATRIX_UNITS,
    STEP_BYTES,
    SUM_BYTES,
    multiply_tiles,
)
from pagedcore_kernels.cpu.simd import Builder, Typing, Value, int64, pointer, prefetch_line, store_int64

BLOCK_ROWS = 32
"""Most rows of a block: two tiles of them, so that each tile of weights that is loaded meets two."""
TILE_STEPS, HALF_TILE_STEPS = 16, 8
"""Steps that one instruction takes; that of ``HALF_MATRIX_UNITS``."""
CONFIGURATION_WORDS = 8
"""Words of memory that a configuration takes."""

_TILE_ROWS = 16
_LINE = 64
"""Bytes of a row of every tile, be it inputs, weights or sums: a cache line."""
_REGISTERS, _SUMS = 8, 4
"""Registers; the first ones hold sums, the next ones tiles of rows, and those that are left tiles of weights."""
_BYTE = ir.IntType(8)
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILES = 158, 0x1023, 18
"""The system call of Linux by which a process asks for a part of the processor's state, and the tiles among its parts.
"""
_INSTRUCTIONS = {
    MATRIX_UNITS: ("amx-bf16", "tdpbf16ps"), BYTE_MATRIX_UNITS: ("amx-int8", "tdpbusd"),
    GROUP_MATRIX_UNITS: ("amx-int8", "tdpbssd"), HALF_MATRIX_UNITS: ("amx-int8", "tdpbssd"),
}  # fmt: skip
"""By form: the instruction set, and its instruction, which takes the tiles of sums, of rows and of weights."""


def may_use_tiles(form: int) -> bool:
    """Whether the processor has matrix units for a form and the system lets this process use them, now that it asks."""
    has_units = sys.platform == "linux" and has_instructions("amx-tile", _INSTRUCTIONS[form][0])
    return has_units and _is_permitted()


@cache
def _is_permitted() -> bool:
    """Ask Linux for the registers.

    Why it has to be asked: tiles are large, and it keeps room for them only where they are used.
    """
    request = [ctypes.c_long(number) for number in (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILES)]
    return bool(ctypes.CDLL(None).syscall(*request) == 0)


@njit(inline="always")
def configure_tiles(memory: int, num_rows: int, num_steps: int = TILE_STEPS) -> None:
    """Prepare this thread's registers for blocks of ``num_rows``, 1 to ``BLOCK_ROWS``; what was in them is lost.

    Not for every block: it takes as long as hundreds of steps. ``memory`` has room for ``CONFIGURATION_WORDS``, and
    ``num_steps`` is how many an instruction takes.
    """
    for word in range(CONFIGURATION_WORDS):
        store_int64(memory, word, 0)
    store_int64(memory, 0, 1)
    # The bytes of a row, four registers in a word.
    store_int64(memory, 2, 0x0040_0040_0040_0040)
    # The rows, a byte for each register, the lowest first: as ``multiply_block`` takes them, weights have one a step.
    second = num_rows - _TILE_ROWS
    if second > 0:
        store_int64(memory, 3, 0x0040_0040_0000_0000 + num_steps * 0x0004_0004)
        store_int64(memory, 6, num_steps * 0x0101_0000_0000_0000 + 0x0010_0010_0010 + second * 0x0100_0100_0100)
    else:
        store_int64(memory, 3, 0x0040_0040_0040_0000 + num_steps * 0x0004)
        store_int64(memory, 6, num_steps * 0x0101_0100_0000_0000 + num_rows * 0x01_0101_0101)
    _load_configuration(memory)


@intrinsic
def _load_configuration(typing: Typing, memory: Any) -> Any:
    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        _emit(b, "ldtilecfg", pointer(b, args[0], 0, _BYTE))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def release_tiles(typing: Typing) -> Any:
    """``release_tiles()``: this thread's registers need not be kept any longer."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        _emit(b, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


@register_jitable
def steps_of_tile(form: int) -> int:
    """How many steps one instruction takes."""
    return HALF_TILE_STEPS if form == HALF_MATRIX_UNITS else TILE_STEPS


@njit(inline="always")
def rows_of_blocks(num_rows: int) -> int:
    """Into how large blocks to cut rows: all of one size, which the registers are configured for once."""
    num_blocks = (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    return (num_rows + num_blocks - 1) // num_blocks


@njit(inline="always")
def multiply_blocks(
    form: int, rows: int, row_bytes: int, num_rows: int, block_rows: int, weights: int, num_steps: int, sums: int,
    is_first: int, ahead: int, ahead_bytes: int,
) -> None:  # fmt: skip
    """sums[blocks, block_rows, PANEL] = (nothing if ``is_first``, else sums) + rows[num_rows, num_steps] @ weights.

    ``num_steps`` is a multiple of ``steps_of_tile``. The last block ends with the last row, and may begin before that
    one ends. Meanwhile ``ahead_bytes`` of memory from ``ahead`` are asked for, each block asking for its share.
    """
    row_tiles = 2 if block_rows > _TILE_ROWS else 1
    num_blocks, num_tiles = (num_rows + block_rows - 1) // block_rows, num_steps // steps_of_tile(form)
    num_turns = row_tiles * num_tiles
    lines = (ahead_bytes + num_blocks * num_turns * _LINE - 1) // (num_blocks * num_turns * _LINE)
    for block in range(num_blocks):
        source = rows + min(block * block_rows, num_rows - block_rows) * row_bytes
        target, share = sums + block * block_rows * SUM_BYTES, ahead + block * num_turns * lines * _LINE
        if row_tiles == 2:
            multiply_block(form, 2, source, row_bytes, weights, num_tiles, target, is_first, share, lines)
        else:
            multiply_block(form, 1, source, row_bytes, weights, num_tiles, target, is_first, share, lines)


@njit(inline="always")
def sum_inputs_of_blocks(
    rows: int, row_bytes: int, num_rows: int, block_rows: int, ones: int, num_steps: int, sums: int
) -> None:
    """sums[blocks, block_rows, 16] = the sum of the row's bfloat16 inputs, in the order of ``multiply_blocks``.

    ``ones`` is a tile of weights that are 1.
    """
    for block in range((num_rows + block_rows - 1) // block_rows):
        source = rows + min(block * block_rows, num_rows - block_rows) * row_bytes
        target = sums + block * block_rows * _LINE
        if block_rows > _TILE_ROWS:
            sum_inputs_of_block(2, source, row_bytes, ones, num_steps // TILE_STEPS, target)
        else:
            sum_inputs_of_block(1, source, row_bytes, ones, num_steps // TILE_STEPS, target)


@intrinsic(prefer_literal=True)
def sum_inputs_of_block(
    typing: Typing, row_tiles: Any, rows: Any, row_bytes: Any, ones: Any, num_tiles: Any, sums: Any
) -> Any:
    """``sum_inputs_of_blocks`` for one block and ``num_tiles`` * ``TILE_STEPS`` steps. Literal: row_tiles."""
    count = row_tiles.literal_value

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        _, x, stride, weights, steps, target = args
        ones_tile, row_tile_bytes = _REGISTERS - 1, b.mul(stride, int64(_TILE_ROWS))
        _move(b, "tileloadd64", ones_tile, weights, int64(_LINE))
        for i in range(count):
            _emit(b, "tilezero", i)
        with cgutils.for_range(b, steps) as loop:
            inputs = b.add(x, b.mul(loop.index, int64(_LINE)))
            for i in range(count):
                _move(b, "tileloadd64", _SUMS + i, b.add(inputs, b.mul(row_tile_bytes, int64(i))), stride)
                _emit(b, _INSTRUCTIONS[MATRIX_UNITS][1], i, _SUMS + i, ones_tile)
        for i in range(count):
            _move(b, "tilestored64", i, b.add(target, int64(i * _TILE_ROWS * _LINE)), int64(_LINE))
        return context.get_dummy_value()

    return types.void(row_tiles, *[types.int64] * 5), codegen


@njit(inline="always")
def multiply_last_steps(
    most_sums: int, rows: int, row_bytes: int, num_rows: int, block_rows: int, weights: int, num_steps: int, sums: int,
    is_first: int, ahead: int,
) -> None:  # fmt: skip
    """``multiply_blocks`` of int8 for fewer than ``TILE_STEPS`` steps, by vectors.

    Why not by smaller tiles: the registers would have to be configured again for every panel.
    """
    for block in range((num_rows + block_rows - 1) // block_rows):
        source = rows + min(block * block_rows, num_rows - block_rows) * row_bytes
        target = sums + block * block_rows * SUM_BYTES
        multiply_tiles(
            BYTES, most_sums, source, row_bytes, block_rows, weights, num_steps, target, is_first, 0, 0, 1, ahead, 0
        )  # fmt: skip


@intrinsic(prefer_literal=True)
def multiply_block(
    typing: Typing,
    form: Any,
    row_tiles: Any,
    rows: Any,
    row_bytes: Any,
    weights: Any,
    num_tiles: Any,
    sums: Any,
    is_first: Any,
    ahead: Any,
    lines: Any,
) -> Any:
    """``multiply_blocks`` for one block and ``num_tiles`` * ``steps_of_tile`` steps.

    Literal: form, row_tiles (of the block, 1 or 2).

    Why so many outputs at once: four tiles of sums fill the registers, and two by two of them need the fewest loads.
    With every tile that is taken from a tile of rows, the next ``lines`` cache lines from ``ahead`` are asked for.
    """
    literals = (form, row_tiles)
    kind, count = (literal.literal_value for literal in literals)
    width, tile_steps = _SUMS // count, steps_of_tile(kind)

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        x, stride, w, steps, target, first, next_memory, num_lines = args[len(literals) :]
        row_tile_bytes = b.mul(stride, int64(_TILE_ROWS))
        starts_anew = b.icmp_signed("!=", first, int64(0))
        for turn in range(count):
            left = turn * width * _LINE
            places = [
                b.add(target, int64(left + j * _LINE + i * _TILE_ROWS * SUM_BYTES))
                for j in range(width) for i in range(count)
            ]  # fmt: skip
            _begin_sums(b, starts_anew, places)
            with cgutils.for_range(b, steps) as loop:
                weight = b.add(w, b.add(int64(left), b.mul(loop.index, int64(tile_steps * STEP_BYTES))))
                inputs = b.add(x, b.mul(loop.index, int64(4 * tile_steps)))
                _add_products(b, kind, count, width, inputs, stride, row_tile_bytes, weight)
                number = b.add(loop.index, b.mul(steps, int64(turn)))
                _ask_for(b, b.add(next_memory, b.mul(number, b.mul(num_lines, int64(_LINE)))), num_lines)
            for register, place in enumerate(places):
                _move(b, "tilestored64", register, place, int64(SUM_BYTES))
        return context.get_dummy_value()

    return types.void(*literals, *[types.int64] * 8), codegen


def _begin_sums(b: Builder, starts_anew: Value, places: Sequence[Value]) -> None:
    with b.if_else(starts_anew) as (anew, on):
        with anew:
            for register in range(_SUMS):
                _emit(b, "tilezero", register)
        with on:
            for register, place in enumerate(places):
                _move(b, "tileloadd64", register, place, int64(SUM_BYTES))


def _add_products(
    b: Builder, form: int, count: int, width: int, rows: Value, row_bytes: Value, row_tile_bytes: Value, weights: Value
) -> None:
    """Add to ``count`` * ``width`` sums, column by column."""
    num_free = _REGISTERS - _SUMS - count
    for j in range(width):
        # Why in turns: the next tile of weights can be loaded before the products with this one are done.
        weight = _SUMS + count + j % num_free
        _move(b, "tileloadd64", weight, b.add(weights, int64(j * _LINE)), int64(STEP_BYTES))
        for i in range(count):
            row = _SUMS + i
            if j == 0:
                _move(b, "tileloadd64", row, b.add(rows, b.mul(row_tile_bytes, int64(i))), row_bytes)
            _emit(b, _INSTRUCTIONS[form][1], j * count + i, row, weight)


def _ask_for(b: Builder, address: Value, num_lines: Value) -> None:
    with cgutils.for_range(b, num_lines) as loop:
        prefetch_line(b, address, b.mul(loop.index, int64(_LINE)))


def _move(b: Builder, instruction: str, register: int, address: Value, row_bytes: Value) -> None:
    _emit(b, instruction, register, pointer(b, address, 0, _BYTE), row_bytes)


def _emit(b: Builder, instruction: str, *operands: Value | int) -> None:
    """Emit an instruction; operands that are Python's integers are numbers of registers."""
    values = [ir.Constant(_BYTE, operand) if isinstance(operand, int) else operand for operand in operands]
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.{instruction}"), values)
