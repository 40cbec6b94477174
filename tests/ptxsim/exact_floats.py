"""Correct rounding by rational arithmetic: the reference for every rounded float operation."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def rounded(value: Fraction, kind: Any, mode: str = "rn") -> Any:
    """A rational number in a float type, rounded ``rn``, ``rz``, ``rm`` or ``rp``."""
    dtype = np.dtype(kind)
    if mode == "rz":
        mode = "rm" if value > 0 else "rp"
    near = _overflowed(value, dtype, mode)
    if near is not None:
        return near
    middle = dtype.type(float(value))
    middle = np.clip(middle, np.finfo(dtype).min, np.finfo(dtype).max)
    around = [np.nextafter(middle, dtype.type(-np.inf)), middle, np.nextafter(middle, dtype.type(np.inf))]
    around = [x for x in around if np.isfinite(x)]
    if mode == "rm":
        return max(x for x in around if Fraction(float(x)) <= value)
    if mode == "rp":
        return min((x for x in around if Fraction(float(x)) >= value), key=float)
    bits = f"u{dtype.itemsize}"
    return min(around, key=lambda x: (abs(Fraction(float(x)) - value), int(x.view(bits)) & 1))


def rounded_to_odd(function: Callable[..., Any], *values: Array) -> Array:
    """``function`` of rationals as float32 rounded to odd: rounding that to a narrower type rounds only once."""
    result = evaluate(function, "f4", "rz", *values)
    for i, row in enumerate(zip(*values, strict=True)):
        if all(np.isfinite(x) for x in row) and np.isfinite(result[i]):
            exact = function(*(Fraction(float(x)) for x in row))
            if exact != Fraction(float(result[i])):
                result[i:i + 1] = (result[i:i + 1].view(np.uint32) | 1).view(np.float32)
    return result


def _overflowed(value: Fraction, dtype: np.dtype[Any], mode: str) -> Any:
    info = np.finfo(dtype)
    largest = Fraction(float(info.max))
    step = largest - Fraction(float(np.nextafter(info.max, dtype.type(0))))
    inf = dtype.type(np.inf)
    if value > largest:
        return info.max if mode == "rm" or (mode == "rn" and value < largest + step / 2) else inf
    if value < -largest:
        return -info.max if mode == "rp" or (mode == "rn" and value > -largest - step / 2) else -inf
    return None


def evaluate(function: Callable[..., Any], kind: Any, mode: str, *values: Array) -> Array:
    """``function`` of rationals, rounded; where it is not finite or gives zero, of floats as IEEE 754 has it."""
    dtype = np.dtype(kind)
    result = np.empty(len(values[0]), dtype)
    with np.errstate(all="ignore"):
        for i, row in enumerate(zip(*values, strict=True)):
            plain = dtype.type(function(*(np.float64(x) for x in row)))
            exact = None
            if all(np.isfinite(x) for x in row):
                try:
                    exact = function(*(Fraction(float(x)) for x in row))
                except ZeroDivisionError:
                    exact = None
            result[i] = rounded(exact, kind, mode) if exact else plain
    return result

