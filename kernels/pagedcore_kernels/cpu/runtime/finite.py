"""Whether all numbers of much memory are finite, on all threads, as fast as it can be read.

A number is none, or infinite, exactly if all bits of its exponent are set, and in e4m3 those of its fraction too. With
one more added, they carry into the place of the sign, which was masked out, and no further: so the numbers of a 64-bit
word are looked at together.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pagedcore_kernels.cpu.runtime.kernel import Kernel, ParameterBlock, compile_kernel
from pagedcore_kernels.cpu.simd import (
    INT64,
    Builder,
    Typing,
    address_of,
    claim,
    load,
    load_int64,
    reduce_lanes,
    splat,
    store_int64,
)

_CHUNK_BYTES: Final = 2**21
"""Bytes that a thread reads at a time."""
_WORD_BYTES: Final = 8
_LANES: Final = 32
"""Words that are looked at together."""
_EXPONENTS: Final = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00,
                     torch.float8_e4m3fn: 0x7F}


def all_finite(numbers: torch.Tensor) -> bool:
    """Return whether a tensor has neither infinities nor NaN; it is of floating numbers, on the CPU, of any strides."""
    if (exponent := _EXPONENTS.get(numbers.dtype)) is None or not numbers.is_contiguous():
        return bool(numbers.isfinite().all())
    in_word, block_bytes = _WORD_BYTES // numbers.itemsize, _LANES * _WORD_BYTES
    num_blocks = numbers.nbytes // block_bytes
    rest = numbers.detach().reshape(-1)[num_blocks * _LANES * in_word :]
    found = np.zeros(max(1, -(-num_blocks * block_bytes // _CHUNK_BYTES)), np.int64)
    parameters = ParameterBlock(5)
    parameters.fill(numbers.data_ptr(), num_blocks, found.ctypes.data, _in_each(exponent, in_word),
                    _in_each(exponent & -exponent, in_word))
    _kernel().run(parameters)
    signs = np.int64(_in_each(1 << (8 * numbers.itemsize - 1), in_word))
    return not (found & signs).any() and bool(rest.float().isfinite().all())


def _in_each(part: int, count: int) -> int:
    """Return a signed 64-bit number that has the same bits in each of its parts."""
    whole = int.from_bytes(part.to_bytes(_WORD_BYTES // count, "little") * count, "little")
    return whole - (whole >> 63 << 64)


@intrinsic
def _carried(typing: Typing, address: Any, exponents: Any, lowest: Any) -> Any:
    """``_carried(address, exponents, lowest) -> int64``: what a block of words carries, all in one word."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Any:
        words = load(b, args[0], 0, ir.VectorType(INT64, _LANES), 1)
        sums = b.add(b.and_(words, splat(b, args[1], _LANES)), splat(b, args[2], _LANES))
        return reduce_lanes(b, sums, b.or_)

    return types.int64(types.int64, types.int64, types.int64), codegen


@cache
def _kernel() -> Kernel:
    block_bytes = _LANES * _WORD_BYTES
    blocks_at_once = _CHUNK_BYTES // block_bytes

    def look(parameters: Any) -> None:
        p = address_of(parameters)
        counter, words, num_blocks, found = load_int64(p, 0), load_int64(p, 1), load_int64(p, 2), load_int64(p, 3)
        exponents, lowest = load_int64(p, 4), load_int64(p, 5)
        chunk = claim(counter)
        while chunk * blocks_at_once < num_blocks:
            first, carried = chunk * blocks_at_once, 0
            for block in range(first, min(first + blocks_at_once, num_blocks)):
                carried |= _carried(words + block * block_bytes, exponents, lowest)
            store_int64(found, chunk, carried)
            chunk = claim(counter)

    return compile_kernel(look)
