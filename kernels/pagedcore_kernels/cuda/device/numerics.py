"""The order of additions of attention, written once: every kernel that attends is built from these functions.

Owns the promise that a token's result is the same bits in whatever launch it is computed. The keys of a sequence are
cut at fixed absolute positions into *tiles* and, coarser, into *segments*. Within a segment the online softmax takes
one tile after the other; segments are computed from nothing and folded, in ascending order, into a total. A kernel
may compute any run of segments anywhere, as long as it folds them in this order. Read ``tiles.py`` for how a tile
gets into registers, ``decode.py`` and ``prefill.py`` for the two kernels.

A score s stands for the exponent ``s * unit`` of 2. A masked score is ``MASKED``; a row whose keys were all masked so
far has the maximum ``MASKED`` and weights of exactly 0, so tiles that a row cannot see change no bit of it.
"""

from __future__ import annotations

from pagedcore_kernels.cuda.device import primitives as ptx
from pagedcore_kernels.cuda.device.intrinsics import cuda
from pagedcore_kernels.cuda.device.primitives import f32, i32, u32
from pagedcore_kernels.cuda.shapes import LOG2_E

MASKED = -1.0e30
NO_SCORE = -5.0e29
"""Maxima below this belong to rows that have seen no key."""


@cuda.jit(device=True, inline="always")
def first_visible(position, window, chunk):
    """The first key that a query at ``position`` sees."""
    first = i32(0)
    if window > 0:
        first = i32(max(i32(position - window + 1), first))
    if chunk > 0:
        first = i32(max(i32(position - i32(u32(position) % u32(chunk))), first))
    return first


@cuda.jit(device=True, inline="always")
def completes_segment(position, end, segment_shift):
    """Whether the tile before ``position`` was the last of its segment or of all; the same for a whole CTA."""
    # Why: of a reduction's result the assembler knows that no warp divides by it. It would otherwise expect a warp in
    # parts at the shuffles of the fold, for which it calls a subroutine and on sm_80 spills what a call may overwrite.
    is_complete = position >= end or u32(position) & u32((u32(1) << u32(segment_shift)) - u32(1)) == u32(0)
    return ptx.redux_max(u32(is_complete)) != u32(0)


@cuda.jit(device=True, inline="always")
def capped(score, cap_input):
    """tanh of the score, for models that bound their scores; the bound itself is in the unit."""
    return ptx.tanh(ptx.fmul(score, cap_input))


@cuda.jit(device=True, inline="always")
def biased(score, slope, key, position):
    """ALiBi: the score with a penalty per token of distance, ``slope`` in units of scores."""
    return ptx.ffma(slope, f32(i32(key - position)), score)


@cuda.jit(device=True, inline="always")
def masked(score, key, position, first):
    """The score, unless the query at ``position`` does not see the key."""
    return score if key <= position and key >= first else f32(MASKED)


@cuda.jit(device=True, inline="always")
def max_of_quad(x):
    """The largest x of the four threads that share a row of a tensor-core fragment."""
    x = ptx.fmax(x, ptx.shfl_xor(x, u32(1)))
    return ptx.fmax(x, ptx.shfl_xor(x, u32(2)))


@cuda.jit(device=True, inline="always")
def sum_of_quad(x):
    """The sum of the four threads' x, the same bits in each of them."""
    x = ptx.fadd(x, ptx.shfl_xor(x, u32(1)))
    return ptx.fadd(x, ptx.shfl_xor(x, u32(2)))


@cuda.jit(device=True, inline="always")
def sum_of_four(a, b, c, d):
    """The sum of a thread's four weights of 16 keys, of which a tile's sum is made."""
    return ptx.fadd(ptx.fadd(a, b), ptx.fadd(c, d))


@cuda.jit(device=True, inline="always")
def rescale(old_max, new_max, unit):
    """What earlier weights are multiplied with when the maximum rises from ``old_max`` to ``new_max``."""
    return ptx.ex2(ptx.fmul(ptx.fadd(old_max, f32(-new_max)), unit))


@cuda.jit(device=True, inline="always")
def exponent_shift(maximum, unit):
    """The term that makes the largest weight 1; 0 for a row that has seen nothing, so that its weights are 0."""
    shift = f32(-ptx.fmul(maximum, unit))             # computed in any case: a choice is no branch
    return shift if maximum > f32(NO_SCORE) else f32(0)


@cuda.jit(device=True, inline="always")
def weight(score, unit, shift):
    """The unnormalised softmax weight of a score."""
    return ptx.ex2(ptx.ffma(score, unit, shift))


@cuda.jit(device=True, inline="always")
def fold(total, total_factor, part, part_factor):
    """Fold one number of a segment, a sum of weights or of weighted values, into the total before it."""
    return ptx.ffma(total, total_factor, ptx.fmul(part, part_factor))


@cuda.jit(device=True, inline="always")
def normaliser(maximum, weights, unit, has_sink, sink):
    """One over the sum of weights; a sink is one more weight, of logit ``sink`` in natural units, without a value."""
    factor = f32(1)
    if has_sink:
        above = ptx.ffma(sink, f32(LOG2_E), f32(-ptx.fmul(maximum, unit)))
        if above > f32(0):
            factor = ptx.ex2(f32(-above))
            weights = ptx.ffma(weights, factor, f32(1))
        else:
            weights = ptx.fadd(weights, ptx.ex2(above))
    return ptx.fmul(ptx.rcp(weights), factor)
