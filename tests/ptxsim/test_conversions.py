"""Conversions between all types, against exact integers, NumPy and torch."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from pagedcore_ptxsim import formats
from ptxsim.exact_floats import rounded
from ptxsim.number_tables import Array, floats, integers, same, wrap
from ptxsim.ptx_texts import apply
from ptxsim.test_float_opcodes import flushed, from_bf16, to_bf16

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the references overflow on purpose
WIDTHS = ["i2", "u2", "i4", "u4", "i8", "u8"]
INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def ptx(kind: str) -> str:
    """``s32`` of ``i4``."""
    return f"{ {'i': 's', 'u': 'u', 'f': 'f'}[kind[0]]}{8 * int(kind[1])}"


def clamped(value: float, kind: str, source: str) -> int:
    """A float as an integer, saturated; NaN as the conversion table of the PTX manual has it."""
    info = np.iinfo(kind)
    if np.isnan(value):
        return 1 << (8 * int(kind[1]) - 1) if kind[1] == "8" or source == "f8" else 0
    return info.max if value > info.max else info.min if value < info.min else int(value)


@pytest.mark.parametrize("source", WIDTHS)
@pytest.mark.parametrize("target", WIDTHS)
def test_integers_extend_and_narrow(source: str, target: str) -> None:
    """A wider result is extended as the source's sign says, a narrower one keeps low bits, .sat clamps."""
    x = integers(source)
    numbers = [int(v) for v in x]
    assert same(apply(f"cvt.{ptx(target)}.{ptx(source)} {{d}}, {{0}};", np.dtype(target), x), wrap(numbers, target))
    info = np.iinfo(target)
    want = np.array([min(max(n, info.min), info.max) for n in numbers], target)
    assert same(apply(f"cvt.sat.{ptx(target)}.{ptx(source)} {{d}}, {{0}};", np.dtype(target), x), want)


@pytest.mark.parametrize("kind", ["s8", "u8"])
def test_bytes_of_wider_registers(kind: str) -> None:
    """A byte type reads and writes the low byte of a register, and extends into the rest."""
    x = integers("u4")
    low = x.astype(np.uint8).view(np.int8 if kind == "s8" else np.uint8)
    assert same(apply(f"cvt.s32.{kind} {{d}}, {{0}};", np.int32, x), low.astype(np.int32))
    assert same(apply(f"cvt.{kind}.u32 {{d}}, {{0}};", np.int32, x), low.astype(np.int32))


@pytest.mark.parametrize("mode", INTEGRAL)
@pytest.mark.parametrize("source", ["f2", "f4", "f8"])
@pytest.mark.parametrize("target", WIDTHS)
def test_floats_to_integers(source: str, target: str, mode: str) -> None:
    """A float is rounded to an integral value, then saturated."""
    x = np.concatenate([floats(source), integers("i4").astype(source), (integers("u8") / 3).astype(source)])
    with np.errstate(all="ignore"):
        integral = INTEGRAL[mode](x.astype(np.longdouble))
    want = [clamped(v, target, source) for v in integral]
    got = apply(f"cvt.{mode}.{ptx(target)}.{ptx(source)} {{d}}, {{0}};", np.dtype(target), x)
    assert same(got, wrap(want, target))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("target", ["f4", "f8"])
@pytest.mark.parametrize("source", WIDTHS)
def test_integers_to_floats(source: str, target: str, mode: str) -> None:
    """An integer is rounded once, as the mode says."""
    x = integers(source)
    want = np.array([rounded(Fraction(int(v)), target, mode) if v else 0 for v in x], target)
    assert same(apply(f"cvt.{mode}.{ptx(target)}.{ptx(source)} {{d}}, {{0}};", np.dtype(target), x), want)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize(("target", "source"), [("f2", "f4"), ("f4", "f8"), ("f2", "f8")])
def test_floats_narrow_with_every_rounding(target: str, source: str, mode: str) -> None:
    """A narrower float is the exact value rounded as the mode says; infinities and NaN stay."""
    x = np.concatenate([floats(source), floats("f2").astype(source) * 1.0001])
    want = np.array([rounded(Fraction(float(v)), target, mode) if np.isfinite(v) and v else v for v in x], target)
    assert same(apply(f"cvt.{mode}.{ptx(target)}.{ptx(source)} {{d}}, {{0}};", np.dtype(target), x), want)


def test_floats_widen_exactly() -> None:
    """f16 to f32 to f64 loses nothing; .ftz flushes denormal float32; .sat clamps; .rni rounds to integral values."""
    half, single = floats("f2"), floats("f4")
    assert same(apply("cvt.f32.f16 {d}, {0};", np.float32, half), half.astype(np.float32))
    assert same(apply("cvt.f64.f32 {d}, {0};", np.float64, single), single.astype(np.float64))
    assert same(apply("cvt.ftz.f64.f32 {d}, {0};", np.float64, single), flushed(single).astype(np.float64))
    with np.errstate(all="ignore"):
        assert same(apply("cvt.rni.f32.f32 {d}, {0};", np.float32, single), np.rint(single))
        want = np.where(single > 0, np.minimum(single, 1), 0).astype(np.float32)
    assert same(apply("cvt.sat.f32.f32 {d}, {0};", np.float32, single), want)


def test_bf16() -> None:
    """bf16 to and from float32, one at a time and packed, to nearest and toward zero."""
    x = floats("f4", 300)
    y = np.roll(x, 1)
    got = apply("cvt.rn.bf16.f32 {d}, {0};", np.uint16, x)
    assert same(from_bf16(got), from_bf16(to_bf16(x)))
    packed = apply("cvt.rn.bf16x2.f32 {d}, {0}, {1};", np.uint32, x, y)
    assert same(from_bf16(packed >> 16), from_bf16(to_bf16(x)))
    assert same(from_bf16(packed & 0xFFFF), from_bf16(to_bf16(y)))
    known = ~np.isnan(x)
    got = apply("cvt.rz.bf16.f32 {d}, {0};", np.uint16, x)
    assert (got[known] == (x.view(np.uint32) >> 16)[known]).all()
    bits = np.arange(65536, dtype=np.uint16)[::37]
    assert same(apply("cvt.f32.bf16 {d}, {0};", np.float32, bits), from_bf16(bits))
    relu = apply("cvt.rn.relu.bf16x2.f32 {d}, {0}, {1};", np.uint32, x, y)
    assert same(from_bf16(relu >> 16), from_bf16(to_bf16(np.where(np.isnan(x), x, np.maximum(x, 0)))))


def test_packed_halves() -> None:
    """f16x2 holds its first source in the high half."""
    x = floats("f4", 300)
    y = np.roll(x, 1)
    packed = apply("cvt.rn.f16x2.f32 {d}, {0}, {1};", np.uint32, x, y).view(np.float16).reshape(-1, 2)
    with np.errstate(all="ignore"):
        assert same(packed[:, 1].copy(), x.astype(np.float16))
        assert same(packed[:, 0].copy(), y.astype(np.float16))


EIGHT_BIT = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}


def reference_fp8(x: Array, kind: str) -> Array:
    """Saturating conversion by torch."""
    dtype, largest = EIGHT_BIT[kind]
    clipped = torch.from_numpy(np.clip(x, -largest, largest))
    return clipped.to(dtype).view(torch.uint8).numpy()


@pytest.mark.parametrize("kind", EIGHT_BIT)
def test_eight_bit_floats(kind: str) -> None:
    """Every code decodes to torch's value, and every float32 encodes to torch's code, saturated."""
    codes = np.arange(256, dtype=np.uint8)
    values = torch.from_numpy(codes).view(EIGHT_BIT[kind][0]).to(torch.float32).numpy()
    assert same(formats.fp8_to_f32(codes, kind), values)
    ties = (values[:-1] + values[1:]) / 2
    around = [ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(9e9))]
    x = np.concatenate([floats("f4", 300), *around])
    want = reference_fp8(x, kind)
    known = ~np.isnan(x)
    assert (formats.f32_to_fp8(x, kind)[known] == want[known]).all()
    assert (formats.f32_to_fp8(x, kind)[~known] == 127).all()
    y = np.roll(x, 1)
    packed = apply(f"cvt.rn.satfinite.{kind}x2.f32 {{d}}, {{0}}, {{1}};", np.uint16, x, y)
    assert (packed == (formats.f32_to_fp8(x, kind).astype(np.uint16) << 8 | formats.f32_to_fp8(y, kind))).all()


@pytest.mark.parametrize("kind", EIGHT_BIT)
def test_eight_bit_floats_and_halves(kind: str) -> None:
    """A pair of 8-bit codes becomes a pair of halves and back, low with low."""
    pair = np.random.default_rng(0).integers(0, 65536, 600, np.uint16)
    got = apply(f"cvt.rn.f16x2.{kind}x2 {{d}}, {{0}};", np.uint32, pair).view(np.float16).reshape(-1, 2)
    with np.errstate(all="ignore"):
        for i in range(2):
            want = formats.fp8_to_f32(pair >> 8 * i & 255, kind).astype(np.float16)
            assert same(got[:, i].copy(), want)
    words = floats("f2", 301)[:-1 if len(floats("f2", 301)) % 2 else None].view(np.uint32)
    halves = words.view(np.float16).astype(np.float32).reshape(-1, 2)
    back = apply(f"cvt.rn.satfinite.{kind}x2.f16x2 {{d}}, {{0}};", np.uint16, words)
    assert (back == (formats.f32_to_fp8(halves[:, 0], kind) |
                     formats.f32_to_fp8(halves[:, 1], kind).astype(np.uint16) << 8)).all()


def test_tf32() -> None:
    """tf32 keeps ten bits of mantissa, ties away from zero."""
    x = floats("f4", 300)
    finite = np.isfinite(x)
    got = apply("cvt.rna.tf32.f32 {d}, {0};", np.float32, x)
    step = np.spacing(np.minimum(np.abs(x[finite]), np.float32(3e38))).astype(np.float64) * 2**13
    with np.errstate(all="ignore"):
        want = np.trunc(np.abs(x[finite].astype(np.float64)) / step + 0.5) * step
        assert same(np.abs(got[finite]), want.astype(np.float32))
    assert (np.signbit(got[finite]) == np.signbit(x[finite])).all()
    assert same(got[~finite], x[~finite])
