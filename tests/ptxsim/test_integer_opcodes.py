"""Integer arithmetic and bit operations against Python's unbounded integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ptxsim.number_tables import integers, pairs, same, wrap
from ptxsim.ptx_texts import apply

WIDTHS = ["i2", "u2", "i4", "u4", "i8", "u8"]
NAMES = {"i": "s", "u": "u"}


def ptx(kind: str) -> str:
    """``s32`` of ``i4``."""
    return f"{NAMES[kind[0]]}{8 * int(kind[1])}"


def towards_zero(x: int, y: int) -> int:
    """Quotient as C divides."""
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def high(x: int, y: int, bits: int) -> int:
    """Upper half of a product."""
    return (x * y) >> bits


BINARY: dict[str, Callable[[int, int, int], int]] = {
    "add": lambda x, y, bits: x + y,
    "sub": lambda x, y, bits: x - y,
    "mul.lo": lambda x, y, bits: x * y,
    "mul.hi": high,
    "min": lambda x, y, bits: min(x, y),
    "max": lambda x, y, bits: max(x, y),
    "div": lambda x, y, bits: towards_zero(x, y) if y else -1,
    "rem": lambda x, y, bits: x - y * towards_zero(x, y) if y else x,
}


@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("name", BINARY)
def test_binary_arithmetic_wraps(name: str, kind: str) -> None:
    """Arithmetic of two operands is exact modulo the width; a division by zero gives ones and the dividend."""
    x, y = pairs(integers(kind))
    want = wrap([BINARY[name](int(a), int(b), 8 * int(kind[1])) for a, b in zip(x, y, strict=True)], kind)
    assert same(apply(f"{name}.{ptx(kind)} {{d}}, {{0}}, {{1}};", np.dtype(kind), x, y), want)


@pytest.mark.parametrize("kind", WIDTHS[:4])
def test_wide_products(kind: str) -> None:
    """A widening product and multiply-add keep every bit."""
    x, y = pairs(integers(kind))
    wide = f"{kind[0]}{2 * int(kind[1])}"
    z = np.random.default_rng(3).permutation(np.resize(integers(wide), len(x)))
    exact = [int(a) * int(b) for a, b in zip(x, y, strict=True)]
    assert same(apply(f"mul.wide.{ptx(kind)} {{d}}, {{0}}, {{1}};", np.dtype(wide), x, y), wrap(exact, wide))
    sums = [p + int(c) for p, c in zip(exact, z, strict=True)]
    assert same(apply(f"mad.wide.{ptx(kind)} {{d}}, {{0}}, {{1}}, {{2}};", np.dtype(wide), x, y, z), wrap(sums, wide))


@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("half", ["lo", "hi"])
def test_multiply_add(kind: str, half: str) -> None:
    """mad adds to the chosen half of the product."""
    x, y = pairs(integers(kind))
    z = np.random.default_rng(3).permutation(x)
    bits = 8 * int(kind[1])
    exact = [int(a) * int(b) + int(c) if half == "lo" else high(int(a), int(b), bits) + int(c)
             for a, b, c in zip(x, y, z, strict=True)]
    got = apply(f"mad.{half}.{ptx(kind)} {{d}}, {{0}}, {{1}}, {{2}};", np.dtype(kind), x, y, z)
    assert same(got, wrap(exact, kind))


@pytest.mark.parametrize("name", ["neg", "abs", "not"])
@pytest.mark.parametrize("kind", ["i2", "i4", "i8"])
def test_unary(name: str, kind: str) -> None:
    """Negation, absolute value and complement wrap at the smallest number."""
    x = integers(kind)
    function = {"neg": lambda v: -v, "abs": abs, "not": lambda v: ~v}[name]
    kind_name = ptx(kind) if name != "not" else f"b{8 * int(kind[1])}"
    want = wrap([function(int(v)) for v in x], kind)
    assert same(apply(f"{name}.{kind_name} {{d}}, {{0}};", np.dtype(kind), x), want)


def test_saturating_arithmetic_clamps() -> None:
    """add.sat and sub.sat of s32 stop at the ends of the range."""
    x, y = pairs(integers("i4"))
    for name, sign in (("add", 1), ("sub", -1)):
        want = np.clip(x.astype(np.int64) + sign * y.astype(np.int64), -2**31, 2**31 - 1).astype(np.int32)
        assert same(apply(f"{name}.sat.s32 {{d}}, {{0}}, {{1}};", np.int32, x, y), want)


@pytest.mark.parametrize("bits", [32, 64])
def test_carries_chain(bits: int) -> None:
    """add.cc with addc, and sub.cc with subc, are one operation of twice the width."""
    kind = f"u{bits // 8}"
    x, y = pairs(integers(kind))
    z, w = np.roll(x, 3), np.roll(y, 5)
    r = "%r" if bits == 32 else "%rd"
    for name, carried, sign in (("add", "addc", 1), ("sub", "subc", -1)):
        text = (f"{name}.cc.u{bits} {r}1, {{0}}, {{1}}; {carried}.u{bits} {{d}}, {{2}}, {{3}};")
        exact = [((int(b) << bits) + int(a) + sign * ((int(d) << bits) + int(c))) >> bits
                 for a, c, b, d in zip(x, y, z, w, strict=True)]
        assert same(apply(text, np.dtype(kind), x, y, z, w), wrap(exact, kind))


@pytest.mark.parametrize("kind", ["u2", "u4", "u8", "i2", "i4", "i8"])
def test_shifts_clamp(kind: str) -> None:
    """Shifting by the width or more leaves zeros, or signs in an arithmetic shift to the right."""
    x = integers(kind)
    amount = np.resize(np.array([0, 1, 7, 15, 16, 31, 32, 33, 63, 64, 65, 255, 2**31, 2**32 - 1], np.uint32), len(x))
    left = wrap([int(v) << min(int(n), 200) for v, n in zip(x, amount, strict=True)], kind)
    right = wrap([int(v) >> min(int(n), 200) for v, n in zip(x, amount, strict=True)], kind)
    assert same(apply(f"shl.b{8 * int(kind[1])} {{d}}, {{0}}, {{1}};", np.dtype(kind), x, amount), left)
    assert same(apply(f"shr.{ptx(kind)} {{d}}, {{0}}, {{1}};", np.dtype(kind), x, amount), right)
    assert same(apply(f"shr.{ptx(kind)} {{d}}, {{0}}, 99;", np.dtype(kind), x), wrap([int(v) >> 99 for v in x], kind))


@pytest.mark.parametrize("direction", ["l", "r"])
@pytest.mark.parametrize("mode", ["wrap", "clamp"])
def test_funnel_shifts(direction: str, mode: str) -> None:
    """shf shifts a pair of words and keeps the high or the low one."""
    low, high_word = pairs(integers("u4"))
    amount = np.resize(np.arange(70, dtype=np.uint32), len(low))
    want = []
    for a, b, n in zip(low, high_word, amount, strict=True):
        by = min(int(n), 32) if mode == "clamp" else int(n) & 31
        pair = int(a) | int(b) << 32
        want.append((pair << by) >> 32 if direction == "l" else pair >> by)
    text = f"shf.{direction}.{mode}.b32 {{d}}, {{0}}, {{1}}, {{2}};"
    assert same(apply(text, np.uint32, low, high_word, amount), wrap(want, "u4"))


@pytest.mark.parametrize("name", ["and", "or", "xor"])
@pytest.mark.parametrize("kind", ["u2", "u4", "u8"])
def test_logic(name: str, kind: str) -> None:
    """Bitwise operations."""
    x, y = pairs(integers(kind))
    want = {"and": x & y, "or": x | y, "xor": x ^ y}[name]
    assert same(apply(f"{name}.b{8 * int(kind[1])} {{d}}, {{0}}, {{1}};", np.dtype(kind), x, y), want)


def test_three_input_logic() -> None:
    """lop3 is any function of three bits, given as its truth table."""
    x, y = pairs(integers("u4"))
    z = np.roll(x, 7)
    assert same(apply("lop3.b32 {d}, {0}, {1}, {2}, 0xE8;", np.uint32, x, y, z), (x & y) | (x & z) | (y & z))
    assert same(apply("lop3.b32 {d}, {0}, {1}, {2}, 0x96;", np.uint32, x, y, z), x ^ y ^ z)


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_fields(bits: int) -> None:
    """bfi inserts and bfe extracts a field of any place and length, also where it reaches past the top."""
    kind = f"u{bits // 8}"
    x, y = pairs(integers(kind))
    rng = np.random.default_rng(0)
    start, length = (rng.integers(0, 2 * bits, len(x)).astype(np.uint32) for _ in range(2))
    full = (1 << bits) - 1
    inserted, extracted, signed = [], [], []
    for a, b, pos, size in zip(x, y, start, length, strict=True):
        a, b, pos, size = int(a), int(b), int(pos), int(size)
        mask = ((1 << size) - 1) << pos & full
        inserted.append((a << pos & mask) | (b & ~mask))
        extracted.append(a >> pos & ((1 << size) - 1))
        top = min(pos + size - 1, bits - 1)
        sign = a >> top & 1 if size else 0
        field = a >> pos & ((1 << size) - 1)
        kept = max(min(size, bits - pos), 0)
        signed.append(field | (full << kept & full if sign else 0) if size else 0)
    assert same(apply(f"bfi.b{bits} {{d}}, {{0}}, {{1}}, {{2}}, {{3}};", np.dtype(kind), x, y, start, length),
                wrap(inserted, kind))
    assert same(apply(f"bfe.u{bits} {{d}}, {{0}}, {{1}}, {{2}};", np.dtype(kind), x, start, length),
                wrap(extracted, kind))
    assert same(apply(f"bfe.s{bits} {{d}}, {{0}}, {{1}}, {{2}};", np.dtype(kind), x, start, length),
                wrap(signed, kind))


@pytest.mark.parametrize("bits", [32, 64])
def test_counting(bits: int) -> None:
    """popc, clz, bfind and brev count, find and mirror bits."""
    kind = f"u{bits // 8}"
    x = integers(kind)
    numbers = [int(v) for v in x]
    assert same(apply(f"popc.b{bits} {{d}}, {{0}};", np.uint32, x), wrap([n.bit_count() for n in numbers], "u4"))
    assert same(apply(f"clz.b{bits} {{d}}, {{0}};", np.uint32, x), wrap([bits - n.bit_length() for n in numbers], "u4"))
    assert same(apply(f"bfind.u{bits} {{d}}, {{0}};", np.uint32, x), wrap([n.bit_length() - 1 for n in numbers], "u4"))
    signed = [int(v) for v in x.view(f"i{bits // 8}")]
    found = [(~n if n < 0 else n).bit_length() - 1 for n in signed]
    assert same(apply(f"bfind.s{bits} {{d}}, {{0}};", np.uint32, x), wrap(found, "u4"))
    mirrored = [int(f"{n:0{bits}b}"[::-1], 2) for n in numbers]
    assert same(apply(f"brev.b{bits} {{d}}, {{0}};", np.dtype(kind), x), wrap(mirrored, kind))


def permuted(low: int, high_word: int, selector: int) -> int:
    """prmt, byte by byte."""
    eight = [(low | high_word << 32) >> 8 * i & 255 for i in range(8)]
    result = 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = eight[nibble & 7]
        result |= ((255 if byte & 128 else 0) if nibble & 8 else byte) << 8 * i
    return result


def test_byte_permutation() -> None:
    """prmt picks bytes of two words and can copy their signs."""
    x, y = pairs(integers("u4"))
    selector = np.random.default_rng(0).integers(0, 2**16, len(x), np.uint32)
    want = [permuted(int(a), int(b), int(s)) for a, b, s in zip(x, y, selector, strict=True)]
    assert same(apply("prmt.b32 {d}, {0}, {1}, {2};", np.uint32, x, y, selector), wrap(want, "u4"))
    want = [permuted(int(a), 0, 0x3120) for a in x]
    assert same(apply("prmt.b32 {d}, {0}, 0, 0x3120;", np.uint32, x), wrap(want, "u4"))


@pytest.mark.parametrize(("mode", "selectors"), [
    ("f4e", [0x3210, 0x4321, 0x5432, 0x6543]), ("b4e", [0x5670, 0x6701, 0x7012, 0x0123]),
    ("rc8", [0x0000, 0x1111, 0x2222, 0x3333]), ("ecl", [0x3210, 0x3211, 0x3222, 0x3333]),
    ("ecr", [0x0000, 0x1110, 0x2210, 0x3210]), ("rc16", [0x1010, 0x3232, 0x1010, 0x3232]),
])
def test_named_byte_permutations(mode: str, selectors: list[int]) -> None:
    """The modes of prmt are selectors chosen by the low two bits."""
    x, y = pairs(integers("u4"))
    choice = np.resize(np.arange(9, dtype=np.uint32), len(x))
    want = [permuted(int(a), int(b), selectors[int(c) & 3]) for a, b, c in zip(x, y, choice, strict=True)]
    assert same(apply(f"prmt.b32.{mode} {{d}}, {{0}}, {{1}}, {{2}};", np.uint32, x, y, choice), wrap(want, "u4"))


@pytest.mark.parametrize("kinds", ["u32.u32", "s32.s32", "u32.s32", "s32.u32"])
def test_dot_products(kinds: str) -> None:
    """dp4a sums four products of bytes, dp2a two of a half word and a byte, with the signs of their types."""
    first, second = (f"{'i' if kind[0] == 's' else 'u'}" for kind in kinds.split("."))
    result = "i4" if "i" in (first, second) else "u4"
    x, y = pairs(integers("u4"))
    z = np.roll(x, 3)
    products = x.view(f"{first}1").reshape(-1, 4).astype(np.int64) * y.view(f"{second}1").reshape(-1, 4)
    assert same(apply(f"dp4a.{kinds} {{d}}, {{0}}, {{1}}, {{2}};", np.dtype(result), x, y, z),
                wrap([int(p) + int(c) for p, c in zip(products.sum(1), z, strict=True)], result))
    for half, part in (("lo", slice(0, 2)), ("hi", slice(2, 4))):
        products = x.view(f"{first}2").reshape(-1, 2).astype(np.int64) * y.view(f"{second}1").reshape(-1, 4)[:, part]
        assert same(apply(f"dp2a.{half}.{kinds} {{d}}, {{0}}, {{1}}, {{2}};", np.dtype(result), x, y, z),
                    wrap([int(p) + int(c) for p, c in zip(products.sum(1), z, strict=True)], result))


def test_packed_halves() -> None:
    """add, min and max of .u16x2 and .s16x2 work on the halves of a word alone."""
    x, y = pairs(integers("u4"))
    for kind, dtype in (("u16x2", np.uint16), ("s16x2", np.int16)):
        a, b = x.view(dtype), y.view(dtype)
        for name, want in (("add", a + b), ("min", np.minimum(a, b)), ("max", np.maximum(a, b))):
            assert same(apply(f"{name}.{kind} {{d}}, {{0}}, {{1}};", np.uint32, x, y), want.view(np.uint32))


def test_other_integer_operations() -> None:
    """sad, mul24, mad24, cnot and bmsk."""
    x, y = pairs(integers("i4"))
    z = np.roll(x, 3)
    triples = [(int(a), int(b), int(c)) for a, b, c in zip(x, y, z, strict=True)]
    assert same(apply("sad.s32 {d}, {0}, {1}, {2};", np.int32, x, y, z),
                wrap([abs(a - b) + c for a, b, c in triples], "i4"))

    def low24(v: int) -> int:
        return (v & 0xFFFFFF) - ((v & 0x800000) << 1)
    assert same(apply("mul24.lo.s32 {d}, {0}, {1};", np.int32, x, y),
                wrap([low24(a) * low24(b) for a, b, _ in triples], "i4"))
    assert same(apply("mul24.hi.s32 {d}, {0}, {1};", np.int32, x, y),
                wrap([low24(a) * low24(b) >> 16 for a, b, _ in triples], "i4"))
    assert same(apply("mad24.lo.s32 {d}, {0}, {1}, {2};", np.int32, x, y, z),
                wrap([low24(a) * low24(b) + c for a, b, c in triples], "i4"))
    assert same(apply("cnot.b32 {d}, {0};", np.uint32, x), (x == 0).astype(np.uint32))
    start, size = (np.resize(np.arange(k, dtype=np.uint32), 400) for k in (40, 37))
    masks = [(((1 << min(int(n), 32)) - 1) << min(int(s), 32)) & 0xFFFFFFFF for s, n in zip(start, size, strict=True)]
    assert same(apply("bmsk.clamp.b32 {d}, {0}, {1};", np.uint32, start, size), wrap(masks, "u4"))
    masks = [(((1 << (int(n) & 31)) - 1) << (int(s) & 31)) & 0xFFFFFFFF for s, n in zip(start, size, strict=True)]
    assert same(apply("bmsk.wrap.b32 {d}, {0}, {1};", np.uint32, start, size), wrap(masks, "u4"))
