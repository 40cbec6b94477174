"""Comparisons, selection and moves."""

from __future__ import annotations

import numpy as np
import pytest

from ptxsim.number_tables import floats, integers, pairs, same
from ptxsim.ptx_texts import apply, run
from ptxsim.test_float_opcodes import flushed, from_bf16

ORDERED = {"eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}


@pytest.mark.parametrize("kind", ["i2", "u2", "i4", "u4", "i8", "u8"])
def test_integer_comparisons(kind: str) -> None:
    """setp compares as its type says; lo, ls, hi and hs are the unsigned names."""
    x, y = pairs(integers(kind))
    suffix = f"{'s' if kind[0] == 'i' else 'u'}{8 * int(kind[1])}"
    names = {**ORDERED, "ne": np.not_equal}
    if kind[0] == "u":
        names |= {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
    for name, function in names.items():
        got = apply(f"setp.{name}.{suffix} {{d}}, {{0}}, {{1}};", np.uint32, x, y, target="%p1")
        assert (got == function(x, y)).all(), name


@pytest.mark.parametrize("kind", ["f2", "f4", "f8"])
def test_float_comparisons(kind: str) -> None:
    """Ordered comparisons are false with NaN, the unordered ones true."""
    x, y = pairs(floats(kind, 80))
    suffix = f"f{8 * int(kind[1])}"
    nan = np.isnan(x) | np.isnan(y)
    wanted = {name: function(x, y) for name, function in ORDERED.items()}
    wanted |= {f"{name}u": function(x, y) | nan for name, function in ORDERED.items()}
    wanted |= {"ne": (x != y) & ~nan, "neu": x != y, "num": ~nan, "nan": nan}
    for name, want in wanted.items():
        assert (apply(f"setp.{name}.{suffix} {{d}}, {{0}}, {{1}};", np.uint32, x, y, target="%p1") == want).all(), name


def test_comparisons_flush_and_widen() -> None:
    """.ftz compares flushed values; bf16 compares values, not bits."""
    x, y = pairs(floats("f4", 80))
    got = apply("setp.lt.ftz.f32 {d}, {0}, {1};", np.uint32, x, y, target="%p1")
    assert (got == (flushed(x) < flushed(y))).all()
    a, b = (v.view(np.uint16)[1::2].copy() for v in (x, y))
    got = apply("setp.lt.bf16 {d}, {0}, {1};", np.uint32, a, b, target="%p1")
    assert (got == (from_bf16(a) < from_bf16(b))).all()


@pytest.mark.parametrize(("name", "function"), [
    ("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)])
def test_comparisons_combine(name: str, function: np.ufunc) -> None:
    """setp.lt.and p|q, a, b, c: p is the comparison with c, q its complement with c; c may be negated."""
    x, y = pairs(integers("i4"))
    z = np.roll(x, 3)
    c = z > 0
    text = f"setp.gt.s32 %p3, {{2}}, 0; setp.lt.{name}.s32 %p1|%p2, {{0}}, {{1}}, %p3;"
    assert (apply(text, np.uint32, x, y, z, target="%p1") == function(x < y, c)).all()
    assert (apply(text, np.uint32, x, y, z, target="%p2") == function(~(x < y), c)).all()
    negated = text.replace(", %p3;", ", !%p3;")
    assert (apply(negated, np.uint32, x, y, z, target="%p1") == function(x < y, ~c)).all()


def test_comparisons_as_numbers() -> None:
    """set gives all ones, or 1.0 for a float result."""
    x, y = pairs(floats("f4", 80))
    ones = np.where(x < y, 2**32 - 1, 0).astype(np.uint32)
    assert same(apply("set.lt.u32.f32 {d}, {0}, {1};", np.uint32, x, y), ones)
    assert same(apply("set.lt.f32.f32 {d}, {0}, {1};", np.float32, x, y), (x < y).astype(np.float32))


def test_selection() -> None:
    """selp chooses by a predicate, slct by a sign."""
    x, y = pairs(floats("f4", 80))
    z = np.roll(x, 1)
    text = "setp.lt.f32 %p1, {0}, {1}; selp.f32 {d}, {0}, {1}, %p1;"
    assert same(apply(text, np.float32, x, y), np.where(x < y, x, y))
    assert same(apply(text.replace(", %p1;", ", !%p1;"), np.float32, x, y), np.where(x < y, y, x))
    assert same(apply("slct.f32.f32 {d}, {0}, {1}, {2};", np.float32, x, y, z), np.where(z >= 0, x, y))


def test_predicate_logic() -> None:
    """Predicates are combined, inverted and moved like one-bit values."""
    x, y = pairs(integers("i4"))
    head = "setp.gt.s32 %p1, {0}, 0; setp.gt.s32 %p2, {1}, 0;"
    for name, want in (("and", (x > 0) & (y > 0)), ("or", (x > 0) | (y > 0)), ("xor", (x > 0) ^ (y > 0))):
        assert (apply(f"{head} {name}.pred {{d}}, %p1, %p2;", np.uint32, x, y, target="%p3") == want).all()
    assert (apply(f"{head} not.pred {{d}}, %p1;", np.uint32, x, y, target="%p3") == ~(x > 0)).all()
    assert (apply(f"{head} mov.pred {{d}}, %p2;", np.uint32, x, y, target="%p3") == (y > 0)).all()


def test_moves_pack_and_unpack() -> None:
    """mov joins registers into a wider one and parts it again, low part first; ``_`` drops a part."""
    x, y = pairs(integers("u4"))
    joined = apply("mov.b64 {d}, {{{0}, {1}}};", np.uint64, x, y)
    assert same(joined, x.astype(np.uint64) | y.astype(np.uint64) << np.uint64(32))
    assert same(apply("mov.b64 {{%r1, {d}}}, {0};", np.uint32, joined), y)
    assert same(apply("mov.b64 {{{d}, _}}, {0};", np.uint32, joined), x)
    half = apply("mov.b32 {{%rs1, %rs2}}, {0}; mov.b32 {d}, {{%rs2, %rs1}};", np.uint32, x)
    assert same(half, x << 16 | x >> 16)


def test_literals() -> None:
    """Integers in every base, negative ones, floats as bits and as decimals are what they say."""
    zero = np.zeros(1, np.uint32)
    for literal, want in (("0x1F", 31), ("017", 15), ("0b101", 5), ("-3", 2**32 - 3), ("7U", 7), ("WARP_SZ", 32)):
        assert apply(f"mov.u32 {{d}}, {literal};", np.uint32, zero)[0] == want, literal
    for literal, number in (("0f3FC00000", 1.5), ("0fFF800000", -np.inf), ("1.25", 1.25)):
        assert apply(f"mov.f32 {{d}}, {literal};", np.float32, zero)[0] == number, literal
    assert apply("mov.f64 {d}, 0d3FF8000000000000;", np.float64, zero)[0] == 1.5


def test_generic_addresses_know_their_space() -> None:
    """cvta moves between a space and generic addresses, and isspacep tells them apart."""
    out = np.zeros(4, np.uint32)
    run("""
    mov.u64 %rd5, 64;
    cvta.shared.u64 %rd6, %rd5;
    cvta.to.shared.u64 %rd7, %rd6;
    isspacep.shared %p1, %rd6;
    isspacep.global %p2, %rd6;
    isspacep.global %p3, %rd1;
    cvt.u32.u64 %r2, %rd7;
    selp.u32 %r3, 1, 0, %p1; selp.u32 %r4, 1, 0, %p2; selp.u32 %r5, 1, 0, %p3;
    st.global.v4.u32 [%rd1], {%r2, %r3, %r4, %r5};
    """, out, block=1)
    assert out.tolist() == [64, 1, 0, 1]
