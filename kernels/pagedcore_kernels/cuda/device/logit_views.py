"""A row of logits as the sampler sees it: order-preserving keys, weights as integers, passes over a view.

A *view* is a row in global memory or a list of candidates in shared memory, both in order of token ids and cut into
tiles of 128 elements, four to a lane. A warp has a run of neighbouring tiles. What is behind the end is minus infinity.

A token's *weight* is ``2 ** ((logit - largest) * scale)`` as an integer, in units of 2**-40. Sums of integers have no
order: a row's token does not depend on how many threads added its weights or when. Read ``sample.py`` next.
"""

from __future__ import annotations

from pagedcore_kernels.cuda.device import primitives as ptx
from pagedcore_kernels.cuda.device.intrinsics import cuda
from pagedcore_kernels.cuda.device.primitives import f32, i32, u32, u64
from pagedcore_kernels.cuda.shapes import SAMPLE_CANDIDATES, SAMPLE_WARPS

IDS_AT = SAMPLE_CANDIDATES * 4
SLOTS_AT = SAMPLE_CANDIDATES * 8
"""16 bytes per warp: low and high half of a sum, a count, one more word."""

SMALLEST = -3.4028234663852886e38
MINUS_INFINITY = 0xFF800000
KEY_OF_NOTHING = 0x007FFFFF
"""The key of minus infinity; every finite logit has a larger one."""
UNIT = 1099511627776.0
"""2**40, the integer weight of the largest logit."""


@cuda.jit(device=True, inline="always")
def key_of(bits):
    """A number that is larger for larger logits and equal for equal ones: zero and minus zero are."""
    canonical = ptx.as_u32(ptx.fadd(ptx.as_f32(bits), f32(0)))
    return u32(canonical ^ (u32(0xFFFFFFFF) if canonical >= u32(0x80000000) else u32(0x80000000)))


@cuda.jit(device=True, inline="always")
def logit_of(key):
    """The logit of a key."""
    return ptx.as_f32(u32(key ^ (u32(0x80000000) if key >= u32(0x80000000) else u32(0xFFFFFFFF))))


@cuda.jit(device=True, inline="always")
def lowest_key(largest, hi, lo):
    """The key of ``largest`` plus an offset in two parts, rounded once."""
    low = f32(hi)
    if hi > f32(SMALLEST):
        total = ptx.fadd(largest, hi)
        part = ptx.fadd(total, f32(-largest))
        rest = ptx.fadd(ptx.fadd(largest, f32(-ptx.fadd(total, f32(-part)))), ptx.fadd(hi, f32(-part)))
        low = ptx.fadd(total, ptx.fadd(rest, lo))
    return key_of(ptx.as_u32(low))


@cuda.jit(device=True, inline="always")
def middle_key(low, high, by_value):
    """A key between two, high excluded; not low unless they are neighbours."""
    middle = u32(low + u32(u32(high - low) >> u32(1)))
    if by_value:
        value = ptx.fadd(ptx.fmul(logit_of(low), f32(0.5)), ptx.fmul(logit_of(high), f32(0.5)))
        key = key_of(ptx.as_u32(value))
        if key > low and key < high:
            middle = key
    return middle


@cuda.jit(device=True, inline="always")
def weight_of(logit, largest, scale):
    """The weight of one finite logit."""
    difference = ptx.fmax(ptx.fadd(logit, f32(-largest)), f32(SMALLEST))
    return ptx.round_to_u64(ptx.fmul(ptx.ex2(ptx.fmul(difference, scale)), f32(UNIT)))


@cuda.jit(device=True, inline="always")
def warp_sum(number):
    """The sum over the lanes of numbers below 2**59, the same in all of them."""
    # Why: 32 numbers of 27 bits are the most that one 32-bit reduction can add.
    low = ptx.redux_add(u32(number & u64(0x7FFFFFF)))
    middle = ptx.redux_add(u32(u64(number >> u64(27)) & u64(0x7FFFFFF)))
    high = ptx.redux_add(u32(number >> u64(54)))
    return u64(u64(low) + u64(u64(middle) << u64(27)) + u64(u64(high) << u64(54)))


@cuda.jit(device=True, inline="always")
def of_words(low, high):
    """A 64-bit number of its halves."""
    return u64(u64(low) | u64(u64(high) << u64(32)))


@cuda.jit(device=True, inline="always")
def block_sum(base, lane, warp, number, count):
    """Sums of a 64-bit number and a count that each warp has. The slots keep the warps' own.

    Invariant: the caller puts a barrier between this, or its last look at the slots, and their next use.
    """
    if lane == 0:
        ptx.sts128(base + u32(SLOTS_AT) + u32(u32(warp) * u32(16)), u32(number & u64(0xFFFFFFFF)),
                   u32(number >> u64(32)), count, u32(0))
    cuda.syncthreads()
    words = ptx.lds128(base + u32(SLOTS_AT) + u32(u32(u32(lane) & u32(SAMPLE_WARPS - 1)) * u32(16)))
    is_slot = lane < SAMPLE_WARPS
    mine = ptx.select(is_slot, of_words(words[0], words[1]), u64(0))
    return warp_sum(mine), ptx.redux_add(ptx.select(is_slot, words[2], u32(0)))


@cuda.jit(device=True, inline="always")
def load_tile(base, row, aligned, short, size, first):
    """The bits of elements first to first + 3 of the view; minus infinity behind its end."""
    a, b, c, d = u32(MINUS_INFINITY), u32(MINUS_INFINITY), u32(MINUS_INFINITY), u32(MINUS_INFINITY)
    if short:
        words = ptx.lds128(base + u32(u32(first) * u32(4)))
        a, b, c, d = words[0], words[1], words[2], words[3]
    elif aligned and i32(first + 3) < size:
        words = ptx.ldg128_nc(row + u64(u32(first)) * u64(4))
        a, b, c, d = words[0], words[1], words[2], words[3]
    elif first < size:
        at = row + u64(u32(first)) * u64(4)
        a = ptx.ldg32_nc(at)
        if i32(first + 1) < size:
            b = ptx.ldg32_nc(at + u64(4))
        if i32(first + 2) < size:
            c = ptx.ldg32_nc(at + u64(8))
        if i32(first + 3) < size:
            d = ptx.ldg32_nc(at + u64(12))
    return a, b, c, d


@cuda.jit(device=True, inline="always")
def load_one(base, row, short, size, index):
    """The bits of one element of the view; minus infinity behind its end."""
    bits = u32(MINUS_INFINITY)
    if short:
        bits = ptx.lds32(base + u32(u32(index) * u32(4)))
    elif index < size:
        bits = ptx.ldg32_nc(row + u64(u32(index)) * u64(4))
    return bits


@cuda.jit(device=True, inline="always")
def is_kept(key, index, low, cut, last_tie):
    """Whether an element is at least ``low``, above ``cut``, or one of the ties at it up to an index."""
    return key >= low and (key > cut or (key == cut and index <= last_tie))


@cuda.jit(device=True, inline="always")
def run_of_tiles(size, warp):
    """The first tile of a warp's run and the one behind its last."""
    num_tiles = i32(i32(size + 127) >> 7)
    share = i32(i32(num_tiles + i32(SAMPLE_WARPS - 1)) // i32(SAMPLE_WARPS))
    first = i32(warp * share)
    return first, i32(min(i32(first + share), num_tiles))
