"""The scalar types of PTX and the NumPy types that hold them. Owns the table; never any arithmetic.

Packed and sub-32-bit floats that NumPy lacks (``bf16``, ``e4m3x2`` ...) are held as bits; ``formats`` converts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedcore_ptxsim.errors import UnsupportedPtx

Array = NDArray[Any]
Mask = NDArray[np.bool_]
Index = NDArray[np.intp]

_TYPES: dict[str, type[np.generic]] = {
    "b8": np.uint8, "u8": np.uint8, "s8": np.int8,
    "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "f16": np.float16, "bf16": np.uint16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32, "tf32": np.uint32,
    "f16x2": np.uint32, "bf16x2": np.uint32, "u16x2": np.uint32, "s16x2": np.uint32,
    "e4m3x2": np.uint16, "e5m2x2": np.uint16,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64,
    "pred": np.bool_,
}
UNSIGNED: dict[int, np.dtype[Any]] = {n: np.dtype(f"u{n}") for n in (1, 2, 4, 8)}
"""The unsigned integer of so many bytes."""
SIGNED: dict[int, np.dtype[Any]] = {n: np.dtype(f"i{n}") for n in (1, 2, 4, 8)}


def is_type(name: str) -> bool:
    """Whether ``name`` (without the dot) is a PTX scalar type."""
    return name in _TYPES


def numpy_type(name: str) -> np.dtype[Any]:
    """The NumPy type that holds a PTX type, ``"s32"`` for example."""
    if name not in _TYPES:
        raise UnsupportedPtx(f"type .{name} is not known; the types are {', '.join(_TYPES)}")
    return np.dtype(_TYPES[name])
