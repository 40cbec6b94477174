"""16-lane vectors inside Numba functions: LLVM IR helpers, and intrinsics made of them.

Numba has no vector type, so kernels pass raw addresses (int64) and these intrinsics emit ``<16 x float>``
code; LLVM legalises it to whatever the host has (AVX-512, AVX2, NEON), so one source serves all. Two layers:
``emit``-style helpers take an IR builder and are used to write more intrinsics; the ``@intrinsic`` functions
are called from kernels.

Invariant: no fast-math flag and no contraction is ever set: every fused operation is an explicit ``fma``, so
the bits of a result depend on the operations written here alone, not on which kernel they were inlined into.

Read ``microkernels.py`` next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
"""Lanes of a vector."""
LINE = 64
"""Bytes of a cache line."""
LOG2_E = 1.4426950408889634
"""log2(e): scores are scaled by it once so that every exponential is a power of two."""

FLOAT = ir.FloatType()
INT8, INT16, INT32, INT64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
AS_FLOAT32, AS_BFLOAT16, AS_INT8 = range(3)
"""Number formats of stored elements, as kernels take them; int8 are whole numbers, whose scales lie elsewhere."""
ELEMENTS = INT32, INT16, INT8
"""By number format: what an element is copied as."""

Builder = Any
"""IR objects (builders, values, types) and Numba's typing context: both libraries are untyped."""
Value = Any
Typing = Any


# ------------------------------------------------------------------------------------------------------------
# Helpers that emit IR. ``address`` is an int64 value, ``offset`` a number of bytes (int64 value or Python
# int).


def floats(lanes: int = LANES) -> Any:
    """Type of a vector of float32."""
    return ir.VectorType(FLOAT, lanes)


def int64(number: int) -> Value:
    """Constant int64."""
    return ir.Constant(INT64, int(number))


def constant(number: float, like: Any = None) -> Value:
    """Float constant, as a scalar or in all lanes of the vector type ``like`` (default: 16 lanes)."""
    kind = floats() if like is None else like
    if not isinstance(kind, ir.VectorType):
        return ir.Constant(kind, float(number))
    return ir.Constant(kind, [ir.Constant(FLOAT, float(number))] * kind.count)


def integer_constant(number: int, like: Any) -> Value:
    """Integer constant, as a scalar or in all lanes of the vector type ``like``."""
    if not isinstance(like, ir.VectorType):
        return ir.Constant(like, int(number))
    return ir.Constant(like, [ir.Constant(like.element, int(number))] * like.count)


def splat(b: Builder, scalar: Value, lanes: int = LANES) -> Value:
    """Put a scalar in all lanes."""
    undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    first = b.insert_element(undefined, scalar, ir.Constant(INT32, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes))


def call_llvm(b: Builder, name: str, *operands: Value) -> Value:
    """Call ``llvm.<name>`` for float operands of one type."""
    kind = operands[0].type
    suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
    signature = ir.FunctionType(kind, [kind] * len(operands))
    return b.call(cgutils.get_or_insert_function(b.module, signature, f"llvm.{name}.{suffix}"), operands)


def fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """``x * y + z``, rounded once, on every machine."""
    return call_llvm(b, "fma", x, y, z)


def maximum(b: Builder, bound: Value, x: Value) -> Value:
    """``max(bound, x)``; a NaN in ``x`` stays, a NaN in ``bound`` is dropped (one instruction on x86)."""
    return b.select(b.fcmp_ordered(">", bound, x), bound, x)


def minimum(b: Builder, bound: Value, x: Value) -> Value:
    """``min(bound, x)``; a NaN in ``x`` stays, a NaN in ``bound`` is dropped."""
    return b.select(b.fcmp_ordered("<", bound, x), bound, x)


def larger(b: Builder, x: Value, y: Value) -> Value:
    """The larger one of two signed integers, lane by lane."""
    return b.select(b.icmp_signed(">", x, y), x, y)


def pointer(b: Builder, address: Value, offset: Value | int, kind: Any) -> Value:
    """Typed pointer to ``address + offset``."""
    distance = int64(offset) if isinstance(offset, int) else offset
    return b.inttoptr(b.add(address, distance), kind.as_pointer())


def load(b: Builder, address: Value, offset: Value | int, kind: Any, align: int) -> Value:
    """Load a value of type ``kind``."""
    loaded = b.load(pointer(b, address, offset, kind))
    loaded.align = align
    return loaded


def store(b: Builder, value: Value, address: Value, offset: Value | int, align: int) -> None:
    """Store a value."""
    stored = b.store(value, pointer(b, address, offset, value.type))
    stored.align = align


def stream(b: Builder, value: Value, address: Value, offset: Value | int) -> None:
    """Store whole cache lines past the caches; the address is a multiple of ``LINE``. See ``drain_streams``."""
    stored = b.store(value, pointer(b, address, offset, value.type), align=LINE)
    stored.set_metadata("nontemporal", b.module.add_metadata([ir.Constant(INT32, 1)]))


@intrinsic
def drain_streams(typing: Typing) -> Any:
    """``drain_streams()``: what this thread has streamed is in memory before anything that it stores from now on.

    Why: other stores are seen in order, and a thread that sees this one's work as done reads what was streamed.
    """

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        kind = ir.FunctionType(ir.VoidType(), [])
        b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse.sfence"), [])
        return context.get_dummy_value()

    return types.void(), codegen


def prefetch_line(b: Builder, address: Value, offset: Value, *, to_write: bool = False) -> None:
    """Ask for a cache line ahead of its use; the second level is near enough, the first is full of what is in use.

    A line that will be written is taken from other processors at once, where there is an instruction for that.
    """
    byte = ir.IntType(8)
    kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), INT32, INT32, INT32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    how, near, data = (ir.Constant(INT32, number) for number in (int(to_write), 2, 1))
    b.call(function, [pointer(b, address, offset, byte), how, near, data])


def item_bytes(number_format: int) -> int:
    """Bytes of a stored element."""
    return int(ELEMENTS[number_format].width) // 8


def load_floats(b: Builder, address: Value, offset: Value | int, number_format: int, lanes: int = LANES) -> Value:
    """Load ``lanes`` elements as a float32 vector (a scalar if ``lanes`` is 0)."""
    kind = floats(lanes) if lanes else FLOAT
    if number_format == AS_FLOAT32:
        return load(b, address, offset, kind, 4)
    if number_format == AS_INT8:
        return b.sitofp(load(b, address, offset, ir.VectorType(INT8, lanes) if lanes else INT8, 1), kind)
    # Why: a bfloat16 is the upper half of a float32, so no hardware support is needed to read one exactly.
    half, whole = (ir.VectorType(INT16, lanes), ir.VectorType(INT32, lanes)) if lanes else (INT16, INT32)
    wide = b.zext(load(b, address, offset, half, 2), whole)
    return b.bitcast(b.shl(wide, integer_constant(16, whole)), kind)


def to_bfloat16(b: Builder, value: Value) -> Value:
    """Round float32 (vector or scalar) to bfloat16 bits, ties to even; a NaN stays a NaN."""
    is_vector = isinstance(value.type, ir.VectorType)
    whole = ir.VectorType(INT32, value.type.count) if is_vector else INT32
    half = ir.VectorType(INT16, value.type.count) if is_vector else INT16
    bits = b.bitcast(value, whole)
    odd = b.and_(b.lshr(bits, integer_constant(16, whole)), integer_constant(1, whole))
    rounded = b.add(bits, b.add(odd, integer_constant(0x7FFF, whole)))
    # Why: rounding may carry a NaN's payload into its sign and leave a zero.
    upper = b.select(b.fcmp_unordered("uno", value, value), integer_constant(0x7FC00000, whole), rounded)
    return b.trunc(b.lshr(upper, integer_constant(16, whole)), half)


def store_floats(b: Builder, value: Value, address: Value, offset: Value | int, is_bf16: int) -> None:
    """Store a float32 vector or scalar as float32 or bfloat16 elements."""
    if is_bf16:
        store(b, to_bfloat16(b, value), address, offset, 2)
    else:
        store(b, value, address, offset, 4)


_EXP2 = (0.00015403530393381608, 0.0013333558146428443, 0.009618129107628477, 0.0555041086648216,
         0.2402265069591007, 0.6931471805599453, 1.0)  # fmt: skip
"""Taylor coefficients of 2**f around 0, from the sixth power down to the constant."""
ROUNDING = 12582912.0
"""1.5 * 2**23: adding it rounds a small float to the nearest integer, ties to even, and leaves that in the low bits."""


def exp2(b: Builder, x: Value) -> Value:
    """2**x for x <= 127, float32 vector or scalar: error below 3e-7, exactly 0 below -125, NaN for NaN.

    Why 0 below -125: masked scores become exactly nothing, and no result is denormal, so a thread that
    flushes denormals computes the same bits as one that does not.
    """
    kind = x.type
    whole = ir.VectorType(INT32, kind.count) if isinstance(kind, ir.VectorType) else INT32
    shifted = b.fadd(x, constant(ROUNDING, kind))
    fraction = b.fsub(x, b.fsub(shifted, constant(ROUNDING, kind)))
    power = constant(_EXP2[0], kind)
    for coefficient in _EXP2[1:]:
        power = fma(b, power, fraction, constant(coefficient, kind))
    # The low bits of ``shifted`` are the integer part; the shift drops the rest of its pattern.
    biased = b.add(b.bitcast(shifted, whole), integer_constant(127, whole))
    exponent = b.shl(biased, integer_constant(23, whole))
    value = b.fmul(power, b.bitcast(exponent, kind))
    # Far below the bound everything above is garbage, and dropped.
    return b.select(b.fcmp_ordered("<", x, constant(-125.0, kind)), constant(0.0, kind), value)


def combine_pairwise(values: list[Value], combine: Callable[[Value, Value], Value]) -> Value:
    """Combine values, a power of two of them, neighbours first: the order is fixed."""
    while len(values) > 1:
        values = [combine(values[i], values[i + 1]) for i in range(0, len(values), 2)]
    return values[0]


def reduce_lanes(b: Builder, vector: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """Combine all lanes pairwise, halves first: the order is fixed."""
    width = vector.type.count
    half = width // 2
    while half:
        mask = ir.Constant(ir.VectorType(INT32, width), [i + half if i < half else 0 for i in range(width)])
        vector = combine(vector, b.shuffle_vector(vector, vector, mask))
        half //= 2
    return b.extract_element(vector, ir.Constant(INT32, 0))


# ------------------------------------------------------------------------------------------------------------
# Intrinsics for kernels. Addresses are int64; ``index`` counts elements of the type named.


def _load_intrinsic(kind: Any, size: int, result: Any, convert: Callable[[Builder, Value], Value]) -> Any:
    def load_element(typing: Typing, address: Any, index: Any) -> Any:
        def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
            return convert(b, load(b, args[0], b.mul(args[1], int64(size)), kind, size))

        return result(types.int64, types.int64), codegen

    return intrinsic(load_element)


load_int64 = _load_intrinsic(INT64, 8, types.int64, lambda b, value: value)
"""``load_int64(address, index) -> int64``"""
load_int32 = _load_intrinsic(INT32, 4, types.int64, lambda b, value: b.sext(value, INT64))
"""``load_int32(address, index) -> int64``, sign-extended."""
load_int8 = _load_intrinsic(INT8, 1, types.int64, lambda b, value: b.sext(value, INT64))
"""``load_int8(address, index) -> int64``, sign-extended."""
load_float32 = _load_intrinsic(FLOAT, 4, types.float32, lambda b, value: value)
"""``load_float32(address, index) -> float32``"""
load_bfloat16 = _load_intrinsic(
    INT16, 2, types.float32, lambda b, value: b.bitcast(b.shl(b.zext(value, INT32), integer_constant(16, INT32)), FLOAT)
)
"""``load_bfloat16(address, index) -> float32``"""


def _store_intrinsic(size: int, kind: Any, convert: Callable[[Builder, Value], Value] = lambda b, value: value) -> Any:
    def store_element(typing: Typing, address: Any, index: Any, value: Any) -> Any:
        def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
            store(b, convert(b, args[2]), args[0], b.mul(args[1], int64(size)), size)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, kind), codegen

    return intrinsic(store_element)


store_int64 = _store_intrinsic(8, types.int64)
"""``store_int64(address, index, value)``"""
store_int32 = _store_intrinsic(4, types.int64, lambda b, value: b.trunc(value, INT32))
"""``store_int32(address, index, int64)``: the lower half."""
store_int8 = _store_intrinsic(1, types.int64, lambda b, value: b.trunc(value, INT8))
"""``store_int8(address, index, int64)``: the lowest byte."""
store_float32 = _store_intrinsic(4, types.float32)
"""``store_float32(address, index, value)``"""


@intrinsic
def claim(typing: Typing, counter: Any) -> Any:
    """``claim(address) -> int64``: take the next number from a shared counter; each is given out once."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        return b.atomic_rmw("add", pointer(b, args[0], 0, INT64), int64(1), "monotonic")

    return types.int64(types.int64), codegen


@intrinsic
def address_of(typing: Typing, parameters: Any) -> Any:
    """``address_of(voidptr) -> int64``: what a kernel entry does with its argument first."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        return b.ptrtoint(args[0], INT64)

    return types.int64(types.voidptr), codegen


def _stack_space(kind: Any, number: int) -> Callable[..., Value]:
    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        with b.goto_entry_block():
            space = b.alloca(ir.ArrayType(kind, number))
            space.align = 64
        return b.ptrtoint(space, INT64)

    return codegen


@intrinsic(prefer_literal=True)
def stack_floats(typing: Typing, count: Any) -> Any:
    """``stack_floats(literal) -> int64``: address of undefined float32 on the stack, 64-byte aligned."""
    return types.int64(count), _stack_space(FLOAT, count.literal_value)


@intrinsic(prefer_literal=True)
def stack_int64(typing: Typing, count: Any) -> Any:
    """``stack_int64(literal) -> int64``: address of undefined int64 on the stack, 64-byte aligned."""
    return types.int64(count), _stack_space(INT64, count.literal_value)


@intrinsic
def exp2_float32(typing: Typing, x: Any) -> Any:
    """``exp2_float32(x) -> float32``: ``exp2`` of one number, the same bits as a lane of a vector."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        return exp2(b, args[0])

    return types.float32(types.float32), codegen
