"""The vector helpers: exponential, rounding to bfloat16, NaN."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from pagedcore_kernels.cpu.runtime.kernel import Kernel, ParameterBlock, compile_kernel
from pagedcore_kernels.cpu.simd import (
    address_of,
    claim,
    exp2,
    int64,
    load_floats,
    load_int64,
    maximum,
    minimum,
    reduce_lanes,
    store,
    store_floats,
)


@intrinsic(prefer_literal=True)
def _apply(typing: Any, operation: Any, source: Any, target: Any) -> Any:
    """Apply one operation to a vector: 0 exp2, 1 to bfloat16, 2 max with the next vector, 3 min, 4 sum of lanes."""
    which = operation.literal_value

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        value = load_floats(b, args[1], 0, 0)
        if which == 0:
            store_floats(b, exp2(b, value), args[2], 0, 0)
        elif which == 1:
            store_floats(b, value, args[2], 0, 1)
        elif which in (2, 3):
            other = load_floats(b, b.add(args[1], int64(64)), 0, 0)
            store_floats(b, (maximum if which == 2 else minimum)(b, value, other), args[2], 0, 0)
        else:
            store(b, reduce_lanes(b, value, b.fadd), args[2], 0, 4)
        return context.get_dummy_value()

    return types.void(operation, types.int64, types.int64), codegen


@cache
def kernel(operation: int) -> Kernel:
    def apply(parameters: Any) -> None:
        p = address_of(parameters)
        while True:
            i = claim(load_int64(p, 0))
            if i >= load_int64(p, 3):
                break
            _apply(operation, load_int64(p, 1) + i * 64, load_int64(p, 2) + i * 64)

    return compile_kernel(apply)


def apply(operation: int, numbers: Any) -> np.ndarray[Any, Any]:
    """Run an operation over float32 numbers, sixteen at a time; returns the raw 64 bytes of each vector."""
    vectors = np.asarray(numbers, np.float32).reshape(-1, 16)
    source = np.concatenate([vectors, np.zeros((1, 16), np.float32)])  # the last one has a next one, too
    target = np.zeros_like(vectors)
    block = ParameterBlock(3)
    block.fill(source.ctypes.data, target.ctypes.data, len(vectors))
    kernel(operation).run(block, 1)
    return target


def test_exp2_is_accurate() -> None:
    """From -125 to 127 the relative error stays below 3e-7, and powers of two are exact."""
    x = np.linspace(-125, 127, 160_000, dtype=np.float32)
    assert np.abs(apply(0, x).ravel() / np.exp2(x.astype(np.float64)) - 1).max() < 3e-7
    whole = np.arange(-125, 128).repeat(16)
    assert (apply(0, whole).ravel() == np.exp2(whole.astype(np.float64))).all()


def test_exp2_flushes_and_keeps_nan() -> None:
    """Below -125 the result is exactly zero, minus infinity included; NaN stays NaN."""
    tiny = np.array([-125.00001, -126, -150, -1e4, -1e30, -np.inf, *[-200.0] * 10], np.float32)
    assert not apply(0, tiny).any()
    assert not np.signbit(apply(0, tiny)).any()
    assert np.isnan(apply(0, np.full(16, np.nan, np.float32))).all()


def test_bfloat16_rounds_like_torch() -> None:
    """Ties go to even, infinities stay, and no NaN becomes a number."""
    random = np.random.default_rng(1).integers(0, 2**32, 16_000, dtype=np.uint32)
    ties = (random & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    special = np.array([0x7F800000, 0xFF800000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0, 0x80000000, 1] * 2, np.uint32)
    numbers = np.concatenate([random, ties, special]).view(np.float32)
    ours = torch.from_numpy(apply(1, numbers).view(np.int16)[:, :16].copy().ravel()).view(torch.bfloat16)
    theirs = torch.from_numpy(numbers).to(torch.bfloat16)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[~ours.isnan()], theirs[~theirs.isnan()])


def test_a_nan_survives_on_the_right_and_is_dropped_on_the_left() -> None:
    """maximum and minimum keep a NaN of their second operand, as documented."""
    left, right = np.zeros(16), np.zeros(16)
    left[0], right[1], left[2], right[3] = np.nan, np.nan, 5, 7
    pair = np.concatenate([left, right])
    largest, smallest = apply(2, pair)[0], apply(3, pair)[0]
    assert largest[[0, 2, 3]].tolist() == [0, 5, 7]
    assert smallest[[0, 2, 3]].tolist() == [0, 0, 0]
    assert np.isnan(largest[1])
    assert np.isnan(smallest[1])


def test_lanes_are_added_in_one_order() -> None:
    """The sum of a vector adds halves to halves: the order that keeps a row's sum the same everywhere."""
    numbers = np.random.default_rng(2).standard_normal((50, 16)).astype(np.float32)
    expected = numbers.copy()
    for half in (8, 4, 2, 1):
        expected = expected[:, :half] + expected[:, half : 2 * half]
    assert (apply(4, numbers)[:, 0] == expected[:, 0]).all()
