"""One token per row of logits without sorting it: greedily, or by temperature, top-k, top-p and min-p.

One CTA has one row. A cut, the k-th largest logit or the end of the nucleus, is found by bisection: each round is a
pass that weighs what is at least the middle. As soon as what is at or above the lower bound fits into shared memory it
moves there, in order of ids, and all further passes read it there. Middles alternate between that of the values, good
for logits as models make them, and that of their keys, which bounds the rounds for any others. A token is drawn by
narrowing down the tile in which the cumulative weight passes the goal, sixteen runs at a time.

The meaning is that of ``cpu/sampling.py``, and so is the random number, SplitMix64's finaliser (Steele, Lea and Flood,
2014) of seed and position. All arithmetic but the exponential is exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedcore_kernels.cuda.device import logit_views as view
from pagedcore_kernels.cuda.device import primitives as ptx
from pagedcore_kernels.cuda.device.intrinsics import cuda
from pagedcore_kernels.cuda.device.logit_views import IDS_AT, KEY_OF_NOTHING, SLOTS_AT
from pagedcore_kernels.cuda.device.primitives import f32, i32, u32, u64
from pagedcore_kernels.cuda.shapes import SAMPLE_CANDIDATES, SAMPLE_ROW_BYTES, SAMPLE_WARPS

_NO_TIE_LIMIT = 0x7FFFFFFF
_INVISIBLE = 42.0
"""Powers of two below the largest weight that are 0 as integers."""


@cuda.jit(device=True, inline="always")
def mix(word):
    """The finaliser of SplitMix64."""
    word = u64(u64(word ^ u64(word >> u64(30))) * u64(0xBF58476D1CE4E5B9))
    word = u64(u64(word ^ u64(word >> u64(27))) * u64(0x94D049BB133111EB))
    return u64(word ^ u64(word >> u64(31)))


@cuda.jit(device=True, inline="always")
def uniform(seed, position):
    """A number of 53 bits from 0 to 1, 1 excluded, in units of 2**-64."""
    salted = u64(u64(seed * u64(0x9E3779B97F4A7C15)) + mix(u64(position + u64(0x632BE59BD9B4E019))))
    return u64(mix(salted) & u64(0xFFFFFFFFFFFFF800))


@cuda.jit(device=True, inline="always")
def measure(bits, index, largest, scale, of_ties, low, cut, last_tie):
    """What one element adds to a sum: its weight if it is kept, or 1 if it is a tie at ``low``, otherwise 0."""
    key = view.key_of(bits)
    amount = u64(0)
    if view.is_kept(key, index, low, cut, last_tie):
        if not of_ties:
            amount = view.weight_of(ptx.as_f32(bits), largest, scale)
        elif key == low:
            amount = u64(1)
    return amount


@cuda.jit(device=True, inline="always")
def gather(base, row, size, lane, warp, low, cut, last_tie):
    """Move what is kept into shared memory, in order. The slots have the warps' counts of it from the last sum."""
    words = ptx.lds128(base + u32(SLOTS_AT) + u32(u32(u32(lane) & u32(SAMPLE_WARPS - 1)) * u32(16)))
    place = ptx.redux_add(ptx.select(lane < warp, words[2], u32(0)))
    total = ptx.redux_add(ptx.select(lane < SAMPLE_WARPS, words[2], u32(0)))
    before = u32(u32(u32(1) << u32(lane)) - u32(1))
    tile, end = view.run_of_tiles(size, warp)
    step, last_step = i32(tile * 4), i32(end * 4)
    while step < last_step:                           # 32 elements, one per lane
        i = i32(i32(step * 32) + lane)
        bits = view.load_one(base, row, False, size, i)
        kept = view.is_kept(view.key_of(bits), i, low, cut, last_tie)
        votes = u32(cuda.ballot_sync(u32(0xFFFFFFFF), kept))
        if kept:
            at = base + u32(u32(place + u32(cuda.popc(u32(votes & before)))) * u32(4))
            ptx.sts32(at, bits)
            ptx.sts32(at + u32(IDS_AT), u32(i))
        place = u32(place + u32(cuda.popc(votes)))
        step = i32(step + 1)
    # The list ends with a whole tile.
    tail = u32(total + u32(u32(u32(warp) * u32(32)) + u32(lane)))
    if tail < u32(u32(total + u32(127)) & u32(0xFFFFFF80)):
        ptx.sts32(base + u32(tail * u32(4)), u32(view.MINUS_INFINITY))
    cuda.syncthreads()
    return i32(total)


@cuda.jit(device=True, inline="always")
def select(base, row, aligned, short, size, lane, warp, of_ties, goal, fraction, largest, scale, low, cut, last_tie):
    """The index of the first element at which a cumulative sum exceeds ``goal``, which is less than the whole sum.

    Of ties it is their number that is added up, otherwise weights, and then the goal is ``fraction`` of the whole.
    """
    first = i32(0)
    num_tiles = i32(i32(size + 127) >> 7)
    is_open = not of_ties
    while is_open or num_tiles > 1:
        share = i32(i32(num_tiles + i32(SAMPLE_WARPS - 1)) // i32(SAMPLE_WARPS))
        tile = i32(warp * share)
        end = i32(min(i32(tile + share), num_tiles))
        mine = u64(0)
        while tile < end:
            i = i32(i32(i32(first + tile) * 128) + i32(lane * 4))
            bits = view.load_tile(base, row, aligned, short, size, i)
            for j in range(4):
                mine = u64(mine + measure(bits[j], i32(i + j), largest, scale, of_ties, low, cut, last_tie))
            tile = i32(tile + 1)
        total, _ = view.block_sum(base, lane, warp, view.warp_sum(mine), u32(0))
        if is_open:
            goal = ptx.mul_high(total, fraction)
        is_open = False
        passed, before = u64(0), u64(0)
        chosen = i32(-1)
        for w in range(SAMPLE_WARPS):
            words = ptx.lds128(base + u32(SLOTS_AT + 16 * w))
            if chosen < 0:
                before = passed
                passed = u64(passed + view.of_words(words[0], words[1]))
                if passed > goal:
                    chosen = i32(w)
        cuda.syncthreads()
        goal = u64(goal - before)
        first = i32(first + i32(chosen * share))
        num_tiles = i32(min(share, i32(num_tiles - i32(chosen * share))))
    # Every warp now looks at the same 128 elements, 32 at a time.
    found = i32(-1)
    step = i32(first * 4)
    while found < 0:
        i = i32(i32(step * 32) + lane)
        bits = view.load_one(base, row, short, size, i)
        passed = measure(bits, i, largest, scale, of_ties, low, cut, last_tie)
        for shift in range(5):
            low_word = ptx.shfl_up(u32(passed & u64(0xFFFFFFFF)), u32(1) << u32(shift))
            high_word = ptx.shfl_up(u32(passed >> u64(32)), u32(1) << u32(shift))
            if lane >= (1 << shift):
                passed = u64(passed + view.of_words(low_word, high_word))
        votes = u32(cuda.ballot_sync(u32(0xFFFFFFFF), passed > goal))
        if votes != u32(0):
            found = i32(i32(step * 32) + i32(i32(cuda.ffs(votes)) - 1))
        else:
            goal = u64(goal - view.warp_sum(ptx.select(lane == 31, passed, u64(0))))
        step = i32(step + 1)
    return found


def sample_kernel() -> Any:
    """Make the kernel; its parameters are ``variants.SAMPLE_PARAMETERS``."""

    def sample(logits, rows, tokens, row_bytes, vocab):
        """CTA b chooses the token, int64, of row b by row b of ``rows`` (``cuda/sampling.py``); -1 if it is invalid.

        ``rows`` at address 0 means that every row is greedy.
        """
        base = ptx.shared_address(cuda.shared.array(0, dtype=np.uint8))
        t = i32(cuda.threadIdx.x)
        lane = i32(t & 31)
        warp = i32(t >> 5)
        row = logits + u64(cuda.blockIdx.x) * row_bytes
        token_at = tokens + u64(cuda.blockIdx.x) * u64(8)
        aligned = u32(u32(row & u64(15))) == u32(0)

        tile, end = view.run_of_tiles(i32(vocab), warp)
        best, best_index, least = u32(0), u32(0), u32(0xFFFFFFFF)
        invalid = u32(0)
        while tile < end:
            i = i32(i32(tile * 128) + i32(lane * 4))
            bits = view.load_tile(base, row, aligned, False, vocab, i)
            for j in range(4):
                key = view.key_of(bits[j])
                if u32(bits[j] & u32(0x7FFFFFFF)) > u32(0x7F800000) or bits[j] == u32(0x7F800000):
                    invalid = u32(1)
                if key > u32(KEY_OF_NOTHING):
                    least = u32(min(least, key))
                if key > best:
                    best = key
                    best_index = u32(i + j)
            tile = i32(tile + 1)
        top = ptx.redux_max(best)
        where = ptx.redux_min(ptx.select(best == top, best_index, u32(0xFFFFFFFF)))
        least = ptx.redux_min(least)
        invalid = ptx.redux_max(invalid)
        if lane == 0:
            ptx.sts128(base + u32(SLOTS_AT) + u32(u32(warp) * u32(16)), top, where, least, invalid)
        cuda.syncthreads()
        words = ptx.lds128(base + u32(SLOTS_AT) + u32(u32(u32(lane) & u32(SAMPLE_WARPS - 1)) * u32(16)))
        top = ptx.redux_max(words[0])
        where = ptx.redux_min(ptx.select(words[0] == top, words[1], u32(0xFFFFFFFF)))
        least = ptx.redux_min(words[2])
        invalid = ptx.redux_max(words[3])
        at = rows + u64(cuda.blockIdx.x) * u64(SAMPLE_ROW_BYTES)
        scale = f32(0)
        if rows != u64(0):
            scale = ptx.ldgf32_nc(at)
        if invalid != u32(0) or top <= u32(KEY_OF_NOTHING):
            if t == 0:
                ptx.stg64(token_at, u32(0xFFFFFFFF), u32(0xFFFFFFFF))
            return
        if scale == f32(0):
            if t == 0:
                ptx.stg64(token_at, where, u32(0))
            return
        cuda.syncthreads()

        first_words = ptx.ldg128_nc(at)
        next_words = ptx.ldg128_nc(at + u64(16))
        last_words = ptx.ldg128_nc(at + u64(32))
        top_k = first_words[3]
        top_p = view.of_words(next_words[0], next_words[1])
        fraction = uniform(view.of_words(next_words[2], next_words[3]), view.of_words(last_words[0], last_words[1]))
        largest = view.logit_of(top)
        short, size = False, i32(vocab)
        cut, last_tie = u32(KEY_OF_NOTHING), i32(-1)
        low, index = u32(0), i32(0)

        stage = i32(0)                                # 0: the top_k largest, 1: the nucleus, 2: the draw
        while stage < 3:
            counting = stage == 0
            searches = top_p != u64(0)
            if counting:
                searches = top_k != u32(0) and top_k < u32(vocab)
            selects = False
            goal = u64(0)
            if stage == 2:
                low = view.lowest_key(largest, ptx.as_f32(first_words[1]), ptx.as_f32(first_words[2]))
                selects = True
            elif searches:
                low, high = u32(max(least, cut)), u32(top + u32(1))
                if not counting:
                    visible = ptx.fadd(largest, f32(-ptx.fmul(ptx.rcp(scale), f32(_INVISIBLE))))
                    low = u32(max(low, view.key_of(ptx.as_u32(visible))))
                # Invariant: what is >= low sums up to the target or more, what is >= high to ``above``, which is less.
                above, at_least, target = u64(0), u64(0), u64(1)
                middle, is_first, by_value = low, True, True
                while is_first or u32(high - low) > u32(1):
                    tile, end = view.run_of_tiles(size, warp)
                    mine, mine_count = u64(0), u32(0)
                    while tile < end:
                        i = i32(i32(tile * 128) + i32(lane * 4))
                        bits = view.load_tile(base, row, aligned, short, size, i)
                        for j in range(4):
                            if view.is_kept(view.key_of(bits[j]), i32(i + j), middle, cut, last_tie):
                                mine_count = u32(mine_count + u32(1))
                                if not counting:
                                    mine = u64(mine + view.weight_of(ptx.as_f32(bits[j]), largest, scale))
                        tile = i32(tile + 1)
                    total, num_found = view.block_sum(
                        base, lane, warp, view.warp_sum(mine), ptx.redux_add(mine_count)
                    )
                    if counting:
                        total = u64(num_found)
                    if is_first:
                        target = u64(min(u64(top_k), total))
                        if not counting:
                            # Why: sums are whole numbers, so the least that is not below top_p of them is one too.
                            target = ptx.mul_high(total, top_p)
                            target = u64(target + (u64(1) if u64(total * top_p) != u64(0) else u64(0)))
                    is_first = False
                    fits = False
                    if total >= target:
                        low, at_least = middle, total
                        fits = not short and num_found <= u32(SAMPLE_CANDIDATES)
                    else:
                        high, above = middle, total
                    if fits:
                        size = gather(base, row, size, lane, warp, low, cut, last_tie)
                        short, cut, last_tie = True, u32(KEY_OF_NOTHING), i32(-1)
                    else:
                        cuda.syncthreads()
                    middle = view.middle_key(low, high, by_value)
                    by_value = not by_value
                weight = u64(1)
                if not counting:
                    # Why: what carried the sum over the target weighs something; 1 is for the division's sake.
                    weight = u64(max(view.weight_of(view.logit_of(low), largest, scale), u64(1)))
                needed = u64(u64(u64(u64(target - above) + weight) - u64(1)) // weight)
                selects = u64(needed * weight) < u64(at_least - above)
                goal = u64(needed - u64(1))
            if selects:
                index = select(base, row, aligned, short, size, lane, warp, stage < 2, goal, fraction, largest, scale,
                               low, cut, last_tie)
            if stage < 2 and searches:
                if selects:
                    last_tie = index
                elif low != cut:                      # at the same cut an earlier limit of ties stays
                    last_tie = i32(_NO_TIE_LIMIT)
                cut = low
            stage = i32(stage + 1)

        if t == 0:
            if short:
                index = i32(ptx.lds32(base + u32(u32(IDS_AT) + u32(u32(index) * u32(4)))))
            ptx.stg64(token_at, u32(index), u32(0))

    return sample
