"""Operands to arrays: what an instruction's steps are built from, once per launch and instruction.

Because registers are written in place, a source operand is a view that stays valid for the whole run; a literal is
a NumPy scalar. Owns the rules for width: a wider register gives its low part; a wider destination is extended.
Source: PTX ISA, sections Operands and Operand Size Exceeding Instruction-Type Size.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from pagedcore_ptxsim.batch import Batch
from pagedcore_ptxsim.denormals import never_denormal
from pagedcore_ptxsim.errors import UnsupportedPtx
from pagedcore_ptxsim.formats import has_denormal
from pagedcore_ptxsim.scalar_types import SIGNED, UNSIGNED, Array
from pagedcore_ptxsim.syntax import integer

_ADDRESS = re.compile(r"\[\s*([$%\w@.]+)\s*(?:\+\s*(-?\w+))?\s*\]")
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?")
_HEX_FLOAT = re.compile(r"0([fFdD])([0-9a-fA-F]+)")
Write = Callable[[Array], None]
Read = Callable[[], Array]
SHARED_WINDOW = 0x7E0000000000
"""Generic address of shared byte 0."""
LOCAL_WINDOW = 0x7D0000000000


def split_vector(operand: str) -> list[str]:
    """``{%r1, %r2}`` or a single operand as a list."""
    return [part.strip() for part in operand.strip("{} ").split(",")] if operand.startswith("{") else [operand]


class Binder:
    """Binds operands to the arrays of one batch."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._never_denormal = never_denormal(batch.kernel)

    def may_be_denormal(self, operand: str) -> bool:
        """Whether a float32 operand may hold a denormal."""
        if operand in self.batch.registers:
            return operand not in self._never_denormal
        return has_denormal(self.constant(operand, np.dtype(np.float32)))

    def source(self, operand: str, dtype: np.dtype[Any]) -> Array:
        """A read-only view of a register, or a scalar, as ``dtype``."""
        array = self.register(operand)
        return self.constant(operand, dtype) if array is None else narrow(array, dtype)

    def register(self, operand: str) -> Array | None:
        """The storage of a (special) register, None if the operand is none."""
        found = self.batch.registers.get(operand)
        return self.batch.special_register(operand) if found is None and operand[0] == "%" else found

    def constant(self, operand: str, dtype: np.dtype[Any]) -> Array:
        """A literal or the address of a variable, as a 0-d array of ``dtype``."""
        bits = self._constant_bits(operand, dtype) & ((1 << 8 * dtype.itemsize) - 1)
        if dtype == np.bool_:
            return np.array(bool(bits))
        return np.array(bits, UNSIGNED[dtype.itemsize]).view(dtype)

    def _constant_bits(self, operand: str, dtype: np.dtype[Any]) -> int:
        symbols = self.batch.symbols
        if operand in symbols.shared:
            return symbols.shared[operand]
        if operand in symbols.memory:
            return symbols.memory[operand]
        if operand in symbols.local:
            return symbols.local[operand]
        if literal := _HEX_FLOAT.fullmatch(operand):
            return self._float_bits(int(literal.group(2), 16), literal.group(1).lower() == "f", dtype)
        if _INTEGER.fullmatch(operand):
            return integer(operand)
        if operand == "WARP_SZ":
            return 32
        try:
            value = np.array(float(operand), np.float64)
        except ValueError:
            raise UnsupportedPtx(f"operand {operand} is no register, variable or literal") from None
        return int(value.astype(dtype).view(UNSIGNED[dtype.itemsize]))

    @staticmethod
    def _float_bits(bits: int, single: bool, dtype: np.dtype[Any]) -> int:
        if dtype.itemsize == (4 if single else 8):
            return bits
        value = np.array(bits, np.uint32 if single else np.uint64).view(np.float32 if single else np.float64)
        return int(value.astype(dtype).view(UNSIGNED[dtype.itemsize]))

    def target(self, operand: str, dtype: np.dtype[Any]) -> Array:
        """A writable view of a destination register of exactly the width of ``dtype``."""
        array = self.batch.registers.get(operand)
        if array is None:
            raise UnsupportedPtx(f"{operand} is no register that can be written")
        if array.dtype == dtype:
            return array
        if array.dtype.itemsize != dtype.itemsize or np.bool_ in (array.dtype, dtype):
            raise UnsupportedPtx(f"{operand} has {array.dtype.itemsize * 8} bits; the instruction writes {dtype}")
        return array.view(dtype)

    def writer(self, operand: str, dtype: np.dtype[Any]) -> Write:
        """A function that stores values of ``dtype`` for the active threads; wider registers are extended."""
        if operand == "_":
            return lambda values: None
        array = self.batch.registers.get(operand)
        if array is not None and dtype != np.bool_ and array.dtype.itemsize > dtype.itemsize:
            width = array.dtype.itemsize
            view = array.view(SIGNED[width] if dtype.kind == "i" else UNSIGNED[width])
            bits = dtype if dtype.kind in "iu" else UNSIGNED[dtype.itemsize]
            return self._masked(view, lambda values: values.view(bits))
        return self._masked(self.target(operand, dtype), None)

    def _masked(self, view: Array, recast: Callable[[Array], Array] | None) -> Write:
        batch = self.batch

        def write(values: Array) -> None:
            if recast is not None:
                values = recast(np.asarray(values))
            if batch.full:
                view[...] = values
            else:
                np.copyto(view, values, where=batch.mask)
        return write

    def lane_writer(self, operand: str, dtype: np.dtype[Any]) -> Write:
        """Like ``writer``, for values of the active threads only: one per entry of ``batch.lanes``."""
        if operand == "_":
            return lambda values: None
        array = self.batch.registers.get(operand)
        batch = self.batch
        if array is None or array.dtype.itemsize <= dtype.itemsize:
            view, bits = self.target(operand, dtype), dtype
        else:
            width = array.dtype.itemsize
            view = array.view(SIGNED[width] if dtype.kind == "i" else UNSIGNED[width])
            bits = dtype if dtype.kind in "iu" else UNSIGNED[dtype.itemsize]

        def write(values: Array) -> None:
            if bits is not dtype:
                values = values.view(bits)
            if batch.full:
                view[...] = values
            else:
                view[batch.lanes] = values
        return write

    def address(self, operand: str) -> tuple[str, int]:
        """Base and offset of ``[base+offset]``."""
        match = _ADDRESS.fullmatch(operand)
        if not match:
            raise UnsupportedPtx(f"address operand {operand} has a form that is not known")
        return match.group(1), integer(match.group(2) or "0")

    def addresses(self, operand: str) -> Read:
        """A function giving the int64 address of every active thread."""
        base, offset = self.address(operand)
        batch, array = self.batch, self.register(base)
        if array is None:
            fixed = np.full(batch.count, int(self.constant(base, np.dtype(np.int64))) + offset, np.int64)
            return lambda: fixed[batch.lanes]

        def read() -> Array:
            chosen = array if batch.full else array[batch.lanes]
            return chosen.astype(np.int64) + offset
        return read


def narrow(array: Array, dtype: np.dtype[Any]) -> Array:
    """A view of the low part of ``array`` as ``dtype`` (little endian), without copying."""
    if array.dtype == dtype:
        return array
    width = dtype.itemsize
    if array.dtype == np.bool_ or dtype == np.bool_ or array.dtype.itemsize < width:
        raise UnsupportedPtx(f"a register of {array.dtype} cannot be read as {dtype}")
    return array.view(dtype)[:: array.dtype.itemsize // width]
