"""Hostile numbers: the edges of every type, NaN, infinities, denormals, negative zero, ties, and random bits."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def integers(kind: str, count: int = 160, seed: int = 0) -> Array:
    """The edges of an integer type, its powers of two and their neighbours, then random values."""
    dtype = np.dtype(kind)
    info, bits = np.iinfo(dtype), 8 * dtype.itemsize
    edges = {0, 1, 2, 3, 5, info.max, info.max - 1, info.min, info.min + 1}
    edges |= {(1 << k) + d for k in range(0, bits, 7) for d in (-1, 0, 1)}
    if dtype.kind == "i":
        edges |= {-edge for edge in edges}
    known = np.array(sorted(edge for edge in edges if info.min <= edge <= info.max), dtype)
    rng = np.random.default_rng(seed)
    return np.concatenate([known, rng.integers(info.min, info.max, count, dtype, endpoint=True)])


def floats(kind: str, count: int = 160, seed: int = 0) -> Array:
    """The special values of a float type and their neighbours, random bit patterns, and ordinary numbers."""
    dtype = np.dtype(kind)
    info = np.finfo(dtype)
    special = [0.0, 1.0, 0.5, 1.5, 2.5, 3.5, np.inf, float(info.max), float(info.tiny), float(info.smallest_subnormal),
               float(info.tiny) / 2, 2.0**-9, 2.0**-10, 448.0, 1 / 3, 65504.0, 65520.0, 0.1]
    with np.errstate(all="ignore"):
        known = np.array([*special, *(-x for x in special), np.nan], np.float64).astype(dtype)
        known = np.concatenate([known, np.nextafter(known, dtype.type(0)), np.nextafter(known, dtype.type(np.inf))])
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)
    return np.concatenate([known, noise, rng.standard_normal(count).astype(dtype)])


def pairs(values: Array, seed: int = 1) -> tuple[Array, Array]:
    """Every value with itself, with its neighbours in the table, and with random partners."""
    rng = np.random.default_rng(seed)
    left = np.concatenate([values, values, values])
    right = np.concatenate([values, np.roll(values, 1), rng.permutation(values)])
    return left, right


def wrap(exact: list[int], kind: Any) -> Array:
    """Python integers modulo the width of a type."""
    dtype = np.dtype(kind)
    bits = 8 * dtype.itemsize
    return np.array([value & ((1 << bits) - 1) for value in exact], f"u{dtype.itemsize}").view(dtype)


def same(left: Array, right: Array) -> bool:
    """Equal bit for bit, except that any NaN equals any other."""
    if left.dtype.kind != "f":
        return bool(np.array_equal(left, right))
    bits = f"u{left.dtype.itemsize}"
    return bool(((left.view(bits) == right.view(bits)) | (np.isnan(left) & np.isnan(right))).all())

