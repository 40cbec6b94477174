"""Floating point against rational arithmetic and NumPy: rounding, special values, flushing, clamping."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ptxsim.exact_floats import evaluate, rounded_to_odd
from ptxsim.number_tables import Array, floats, pairs, same
from ptxsim.ptx_texts import apply

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the references overflow on purpose
OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
}


def flushed(values: Array) -> Array:
    """Denormals as zeros of their sign."""
    tiny = np.abs(values) < np.finfo(values.dtype).tiny
    return np.where(tiny, np.copysign(values.dtype.type(0), values), values)


def to_bf16(values: Array) -> Array:
    """uint16 bits of bf16, by torch."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16).view(torch.uint16).numpy()


def from_bf16(bits: Array) -> Array:
    """float32 of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("kind", ["f4", "f8"])
def test_arithmetic_is_correctly_rounded(name: str, kind: str) -> None:
    """add, sub, mul and div round to nearest even, over special values too."""
    x, y = pairs(floats(kind, 90))
    ptx = f"{name}{'.rn' if name == 'div' else ''}.f{8 * int(kind[1])}"
    want = evaluate(OPERATIONS[name], kind, "rn", x, y)
    assert same(apply(f"{ptx} {{d}}, {{0}}, {{1}};", np.dtype(kind), x, y), want)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_directed_rounding(name: str, mode: str) -> None:
    """The directed modes give the neighbour on their side, and never round to infinity the wrong way."""
    x, y = pairs(floats("f4", 90))
    got = apply(f"{name}.{mode}.f32 {{d}}, {{0}}, {{1}};", np.float32, x, y)
    want = evaluate(OPERATIONS[name], "f4", mode, x, y)
    cancelled = (want == 0) & np.isin(name, ["add", "sub"])      # the sign of a cancelled sum is another test
    assert same(got[~cancelled], want[~cancelled])
    assert (got[cancelled] == 0).all()


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_fused_multiply_add_rounds_once(mode: str) -> None:
    """fma.f32 rounds the exact value of a * b + c, also where two roundings would differ."""
    x, y = pairs(floats("f4", 90))
    z = np.random.default_rng(5).permutation(x)
    z[:200] = -(x * y)[:200]
    hard = np.array([[1 + 2.0**-23, 1 + 2.0**-12, 2.0**-60], [1 + 2.0**-12, 1 + 2.0**-12, 2.0**-70],
                     [1 + 2.0**-12, 1 + 2.0**-12, -(2.0**-70)], [2.0**-100, 2.0**-49, 2.0**-149]], np.float32)
    x, y, z = (np.concatenate([column, hard[:, i]]) for i, column in enumerate((x, y, z)))
    want = evaluate(lambda a, b, c: a * b + c, "f4", mode, x, y, z)
    wide = x.astype(np.float64) * y + z
    want = np.where(np.isfinite(x) & np.isfinite(y) & np.isfinite(z), want, wide.astype(np.float32))
    got = apply(f"fma.{mode}.f32 {{d}}, {{0}}, {{1}}, {{2}};", np.float32, x, y, z)
    cancelled = want == 0
    assert same(got[~cancelled], want[~cancelled])
    assert (got[cancelled] == 0).all()


def test_fused_multiply_add_of_doubles() -> None:
    """fma.f64 rounds once too."""
    x, y = pairs(floats("f8", 40))
    z = np.random.default_rng(5).permutation(x)
    z[:100] = -(x * y)[:100]
    want = evaluate(lambda a, b, c: a * b + c, "f8", "rn", x, y, z)
    got = apply("fma.rn.f64 {d}, {0}, {1}, {2};", np.float64, x, y, z)
    cancelled = want == 0
    assert same(got[~cancelled], want[~cancelled])
    assert (got[cancelled] == 0).all()


@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_flushing_and_saturation(name: str) -> None:
    """.ftz flushes denormal inputs and results; .sat clamps to [0, 1] and turns NaN into 0."""
    x, y = pairs(floats("f4", 90))
    with np.errstate(all="ignore"):
        plain = OPERATIONS[name](x, y)
        exact = flushed(OPERATIONS[name](flushed(x), flushed(y)))
    assert same(apply(f"{name}.ftz.f32 {{d}}, {{0}}, {{1}};", np.float32, x, y), exact)
    clamped = np.where(plain > 0, np.minimum(plain, 1), 0).astype(np.float32)
    assert same(apply(f"{name}.sat.f32 {{d}}, {{0}}, {{1}};", np.float32, x, y), clamped)


@pytest.mark.parametrize("text", [
    "mov.b32 %f1, {0}; add.ftz.f32 {d}, %f1, 0f00000000;",
    "add.ftz.f32 %f2, 0f3F800000, 0f3F800000; mov.b32 %f1, {0}; mov.f32 %f2, %f1; add.ftz.f32 {d}, %f2, 0f00000000;",
    "setp.eq.f32 %p1, 0f3F800000, 0f3F800000; mov.b32 %f1, {0}; mov.f32 %f2, 0f3F800000;"
    "selp.f32 %f3, %f1, %f2, %p1; add.ftz.f32 {d}, %f3, 0f00000000;",
    "add.ftz.f32 %f1, 0f3F800000, 0f3F800000; setp.eq.f32 %p1, %f1, 0f40000000; @%p1 mov.b32 %f1, {0};"
    "mul.ftz.f32 {d}, %f1, 0f3F800000;",
    "mul.f32 %f1, {0}, 0f3F800000; mov.b32 {{%rs1, %rs2}}, {0}; max.ftz.f32 {d}, %f1, %f1;",
])
def test_denormals_are_flushed_wherever_they_come_from(text: str) -> None:
    """A denormal that reaches an .ftz operation through moves, selections or one of several writers is a zero."""
    x = floats("f4", 90)
    got = apply(text, np.float32, x)
    want = flushed(x) + np.float32(0) if "add.ftz.f32 {d}" in text else flushed(x)
    assert same(got, want)


@pytest.mark.parametrize("kind", ["f4", "f8"])
def test_minimum_and_maximum(kind: str) -> None:
    """NaN loses, -0 is below +0; .NaN makes it win."""
    x, y = pairs(floats(kind, 90))
    bits, suffix = f"u{kind[1]}", f"f{8 * int(kind[1])}"
    smaller, larger = np.fmin(x, y), np.fmax(x, y)
    zeros = (x == 0) & (y == 0)
    smaller = np.where(zeros, (x.view(bits) | y.view(bits)).view(kind), smaller)
    larger = np.where(zeros, (x.view(bits) & y.view(bits)).view(kind), larger)
    assert same(apply(f"min.{suffix} {{d}}, {{0}}, {{1}};", np.dtype(kind), x, y), smaller)
    assert same(apply(f"max.{suffix} {{d}}, {{0}}, {{1}};", np.dtype(kind), x, y), larger)
    if kind == "f4":
        either = np.isnan(x) | np.isnan(y)
        got = apply("max.NaN.f32 {d}, {0}, {1};", np.float32, x, y)
        assert same(got, np.where(either, np.float32(np.nan), larger))


@pytest.mark.parametrize("kind", ["f4", "f8"])
def test_signs(kind: str) -> None:
    """neg, abs and copysign touch the sign alone."""
    x, y = pairs(floats(kind, 90))
    suffix = f"f{8 * int(kind[1])}"
    finite = ~np.isnan(x)
    assert same(apply(f"neg.{suffix} {{d}}, {{0}};", np.dtype(kind), x)[finite], -x[finite])
    assert same(apply(f"abs.{suffix} {{d}}, {{0}};", np.dtype(kind), x)[finite], np.abs(x)[finite])
    got = apply(f"copysign.{suffix} {{d}}, {{0}}, {{1}};", np.dtype(kind), x, y)
    assert same(got, np.copysign(y, x))


@pytest.mark.parametrize("name", ["ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh", "sin", "cos"])
def test_functions_are_exact_to_the_last_place(name: str) -> None:
    """The approximate functions are within one unit in the last place of the float64 value, special values included."""
    function: Callable[[Array], Array] = {
        "ex2": np.exp2, "lg2": np.log2, "rcp": lambda v: 1 / v, "rsqrt": lambda v: 1 / np.sqrt(v), "sqrt": np.sqrt,
        "tanh": np.tanh, "sin": np.sin, "cos": np.cos}[name]
    x = floats("f4", 300)
    got = apply(f"{name}.approx.f32 {{d}}, {{0}};", np.float32, x)
    with np.errstate(all="ignore"):
        want = function(x.astype(np.float64)).astype(np.float32)
    assert (np.isnan(got) == np.isnan(want)).all()
    known = ~np.isnan(want)
    np.testing.assert_array_max_ulp(got[known], want[known], 1)
    got = apply(f"{name}.approx.ftz.f32 {{d}}, {{0}};", np.float32, x)
    with np.errstate(all="ignore"):
        want = flushed(function(flushed(x).astype(np.float64)).astype(np.float32))
    assert same(got, want)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_rounded_functions(mode: str) -> None:
    """rcp and sqrt with a rounding mode are correctly rounded."""
    x = floats("f4", 200)
    want = evaluate(lambda v: 1 / v, "f4", mode, x)
    assert same(apply(f"rcp.{mode}.f32 {{d}}, {{0}};", np.float32, x), want)
    got = apply(f"sqrt.{mode}.f32 {{d}}, {{0}};", np.float32, x)
    sure = (x > 0) & np.isfinite(x)
    root, exact = got[sure].astype(np.longdouble), x[sure].astype(np.longdouble)
    below, above = np.nextafter(got[sure], np.float32(0)), np.nextafter(got[sure], np.float32(np.inf))
    if mode == "rn":
        assert same(got, np.sqrt(x))
    elif mode == "rp":
        assert ((root**2 >= exact) & (below.astype(np.longdouble)**2 < exact)).all()
    else:
        assert ((root**2 <= exact) & (above.astype(np.longdouble)**2 > exact)).all()


@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma", "min", "max"])
def test_halves_are_correctly_rounded(name: str) -> None:
    """f16 and f16x2 round the exact result once."""
    x, y = pairs(floats("f2", 90))
    z = np.random.default_rng(5).permutation(x)
    values = (x, y, z) if name == "fma" else (x, y)
    if name == "fma":
        want = evaluate(lambda a, b, c: a * b + c, "f2", "rn", x, y, z)
        wide = x.astype(np.float64) * y + z
        want = np.where(np.isfinite(wide) & (wide != 0), want, wide.astype(np.float16))
    elif name in ("min", "max"):
        want = (np.fmin if name == "min" else np.fmax)(x, y)
    else:
        want = evaluate(OPERATIONS[name], "f2", "rn", x, y)
    operands = ", ".join(f"{{{i}}}" for i in range(len(values)))
    rounding = ".rn" if name == "fma" else ""
    got = apply(f"{name}{rounding}.f16 {{d}}, {operands};", np.float16, *values)
    signed_zero = want == 0 if name in ("min", "max", "fma") else np.zeros(len(want), bool)
    assert same(got[~signed_zero], want[~signed_zero])
    even = len(x) // 2 * 2
    words = [value[:even].view(np.uint32) for value in values]
    packed = apply(f"{name}{rounding}.f16x2 {{d}}, {operands};", np.uint32, *words)
    assert same(packed.view(np.float16), got[:even])


@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma", "max"])
def test_brain_floats_are_correctly_rounded(name: str) -> None:
    """bf16 and bf16x2 round the exact result once."""
    table = to_bf16(floats("f4", 150))
    x, y = pairs(table)
    z = np.random.default_rng(5).permutation(x)
    values = (x, y, z) if name == "fma" else (x, y)
    wide = [from_bf16(v) for v in values]
    if name == "max":
        want = to_bf16(np.fmax(*wide))
    else:
        function = OPERATIONS.get(name, lambda a, b, c: a * b + c)
        want = to_bf16(rounded_to_odd(function, *wide))
    operands = ", ".join(f"{{{i}}}" for i in range(len(values)))
    got = apply(f"{name}.rn.bf16 {{d}}, {operands};" if name != "max" else f"max.bf16 {{d}}, {operands};",
                np.uint16, *values)
    keep = (want & 0x7FFF) != 0
    assert same(from_bf16(got)[keep], from_bf16(want)[keep])
    even = len(x) // 2 * 2
    words = [value[:even].copy().view(np.uint32) for value in values]
    suffix = "" if name == "max" else ".rn"
    packed = apply(f"{name}{suffix}.bf16x2 {{d}}, {operands};", np.uint32, *words)
    assert (packed.view(np.uint16) == got[:even]).all()


def test_classification() -> None:
    """testp tells numbers, infinities, denormals and NaN apart."""
    x = floats("f4", 200)
    tiny = np.finfo(np.float32).tiny
    tests = {"finite": np.isfinite(x), "infinite": np.isinf(x), "number": ~np.isnan(x), "notanumber": np.isnan(x),
             "normal": np.isfinite(x) & (np.abs(x) >= tiny), "subnormal": (x != 0) & (np.abs(x) < tiny)}
    for name, want in tests.items():
        assert (apply(f"testp.{name}.f32 {{d}}, {{0}};", np.uint32, x, target="%p1") == want).all(), name


def test_relu_and_three_operands() -> None:
    """fma.relu clamps below at zero; max takes three operands."""
    x, y = pairs(floats("f2", 60))
    z = np.roll(x, 5)
    plain = apply("fma.rn.f16 {d}, {0}, {1}, {2};", np.float16, x, y, z)
    got = apply("fma.rn.relu.f16 {d}, {0}, {1}, {2};", np.float16, x, y, z)
    assert same(got, np.where(np.isnan(plain) | (plain > 0), plain, np.float16(0)))
    a, b, c = (v.astype(np.float32) for v in (x, y, z))
    want = np.fmax(np.fmax(a, b), c)
    got = apply("max.f32 {d}, {0}, {1}, {2};", np.float32, a, b, c)
    assert same(got[want != 0], want[want != 0])
