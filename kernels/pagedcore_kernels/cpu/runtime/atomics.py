"""Intrinsics for memory that several threads share, and for calls of C functions by address.

Addresses are int64 and name 64-bit words. The addresses of C functions are arguments, never constants: a constant would
be wrong in the next process that takes the compiled code from Numba's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedcore_kernels.cpu.simd import INT32, INT64, Builder, Typing, Value, int64, pointer

_WORD_BYTES = 8


@intrinsic
def load_shared(typing: Typing, address: Any) -> Any:
    """``load_shared(address) -> int64``, sequentially consistent."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        return b.load_atomic(pointer(b, args[0], 0, INT64), "seq_cst", _WORD_BYTES)

    return types.int64(types.int64), codegen


@intrinsic
def store_shared(typing: Typing, address: Any, value: Any) -> Any:
    """``store_shared(address, value)``, sequentially consistent."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        b.store_atomic(args[1], pointer(b, args[0], 0, INT64), "seq_cst", _WORD_BYTES)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _read_modify_write(operation: str) -> Callable[..., Any]:
    def read_modify_write(typing: Typing, address: Any, value: Any) -> Any:
        def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
            return b.atomic_rmw(operation, pointer(b, args[0], 0, INT64), args[1], "seq_cst")

        return types.int64(types.int64, types.int64), codegen

    return read_modify_write


add_shared = intrinsic(_read_modify_write("add"))
"""``add_shared(address, value) -> int64``: add; returns what was there before."""
and_shared = intrinsic(_read_modify_write("and"))
"""``and_shared(address, mask) -> int64``: keep the bits of the mask; returns what was there before."""


@intrinsic
def exchange_if(typing: Typing, address: Any, expected: Any, value: Any) -> Any:
    """``exchange_if(address, expected, value) -> int64``: store if the word is as expected; returns 1 if it was."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        found = b.cmpxchg(pointer(b, args[0], 0, INT64), args[1], args[2], "seq_cst", "seq_cst")
        return b.zext(b.extract_value(found, 1), INT64)

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def pause(typing: Typing) -> Any:
    """``pause()``: tell the processor that this is a loop that waits; nothing where it has no such instruction."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        if (instruction := _pause_instruction()) is not None:
            name, operands = instruction
            kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
            b.call(cgutils.get_or_insert_function(b.module, kind, name), operands)
        return context.get_dummy_value()

    return types.void(), codegen


def _pause_instruction() -> tuple[str, list[Value]] | None:
    import platform

    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64", "i686"):
        return "llvm.x86.sse2.pause", []
    if machine in ("aarch64", "arm64"):
        # Why isb and not yield: ``yield`` does nothing on processors with one thread a core. 15 is the whole system.
        return "llvm.aarch64.isb", [ir.Constant(INT32, 15)]
    return None


@intrinsic
def call_function(typing: Typing, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
    """``call_function(function, a, b, c, d, e) -> int64``: call the C function at an address with int64 arguments.

    It may take fewer of them. A result that is not 64 bits wide, or none at all, leaves bits that mean nothing.
    """

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        kind = ir.FunctionType(INT64, [INT64] * (len(args) - 1))
        return b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.int64(*[types.int64] * 6), codegen


@intrinsic
def read_clock(typing: Typing, clock_gettime: Any, clock_number: Any) -> Any:
    """``read_clock(clock_gettime, clock_number) -> int64``: nanoseconds of a POSIX clock, by its function's address."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        with b.goto_entry_block():
            time = b.alloca(ir.ArrayType(INT64, 2))
        kind = ir.FunctionType(INT32, [INT32, time.type])
        b.call(b.inttoptr(args[0], kind.as_pointer()), [b.trunc(args[1], INT32), time])
        address = b.ptrtoint(time, INT64)
        seconds, nanoseconds = (b.load(pointer(b, address, offset, INT64)) for offset in (0, _WORD_BYTES))
        return b.add(b.mul(seconds, int64(1_000_000_000)), nanoseconds)

    return types.int64(types.int64, types.int64), codegen
