"""Tiles of K and V on their way from the pool through shared memory into tensor cores, for every format of the pool.

Owns addresses and fragments: which thread copies which 16 bytes, which element of K, V or the result a register
holds. It decides no order of additions; ``numerics.py`` does. Read ``decode.py`` next for a use of all of it.

Shared rows are padded by 16 bytes, which makes ldmatrix free of bank conflicts for every head size.

Pools of 8 bits are ``ScaledKVLayout``: K has a row of tokens for each element, V a row of elements for each token.
ldmatrix transposes both in pairs of bytes, so a thread receives two neighbouring tokens of K, two columns of V, where a
product wants one: even ones go into one product, odd ones into another. So a thread has the scores of four neighbouring
tokens, whose weights it hands on as those of two and two; V is read in that order of tokens (``value_row``), and the
columns of the result are permuted (``pair_column``).

Their elements are exact in the formats of the products: K in the query's, V in bf16. A score is multiplied with the
scale of its key. A weight is multiplied with the scale of its value and rounded once, to bf16, whose range is that of
float32: whatever the scales, none overflows or vanishes. The sum of weights is that of the float32 numbers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pagedcore_kernels.cuda.device import primitives as ptx
from pagedcore_kernels.cuda.device.intrinsics import cuda
from pagedcore_kernels.cuda.device.primitives import f32, i32, u32, u64
from pagedcore_kernels.cuda.shapes import ROW_PADDING, THREADS, AttentionShape, Format


def _unpackers(pool: Format, target: Format) -> tuple[Any, Any]:
    """Functions from a word of four 8-bit elements to its even and its odd two, as a pair of a 16-bit format."""

    @cuda.jit(device=True, inline="always")
    def e4m3_even(word):
        return ptx.unpack_e4m3(ptx.low_half(ptx.prmt(word, u32(0), u32(0x3120))))

    @cuda.jit(device=True, inline="always")
    def e4m3_odd(word):
        return ptx.unpack_e4m3(ptx.high_half(ptx.prmt(word, u32(0), u32(0x3120))))

    @cuda.jit(device=True, inline="always")
    def as_bf16(pair):
        return ptx.pack_bf16(ptx.f16_to_f32(ptx.low_half(pair)), ptx.f16_to_f32(ptx.high_half(pair)))

    @cuda.jit(device=True, inline="always")
    def e4m3_even_bf16(word):
        return as_bf16(e4m3_even(word))

    @cuda.jit(device=True, inline="always")
    def e4m3_odd_bf16(word):
        return as_bf16(e4m3_odd(word))

    # Why: 0x64XX is 1024 + XX in f16; with the sign bit flipped XX is the element + 128, so 1152 too much.
    @cuda.jit(device=True, inline="always")
    def int8_even(word):
        return ptx.sub_f16x2(ptx.prmt(word ^ u32(0x80808080), u32(0x64646464), u32(0x4240)), u32(0x64806480))

    @cuda.jit(device=True, inline="always")
    def int8_odd(word):
        return ptx.sub_f16x2(ptx.prmt(word ^ u32(0x80808080), u32(0x64646464), u32(0x4341)), u32(0x64806480))

    # Why: in bf16 0x43XX is 128 + XX without its sign bit, and 128 is too much, or 256 with that bit: as bf16 the rest.
    @cuda.jit(device=True, inline="always")
    def without_offset(pair):
        return ptx.ffma_bf16x2(pair & u32(0xFF80FF80), u32(0xBF80BF80), pair & u32(0xFF7FFF7F))

    @cuda.jit(device=True, inline="always")
    def int8_even_bf16(word):
        return without_offset(ptx.prmt(word, u32(0x43434343), u32(0x4240)))

    @cuda.jit(device=True, inline="always")
    def int8_odd_bf16(word):
        return without_offset(ptx.prmt(word, u32(0x43434343), u32(0x4341)))

    functions = {
        (Format.E4M3, Format.F16): (e4m3_even, e4m3_odd), (Format.E4M3, Format.BF16): (e4m3_even_bf16, e4m3_odd_bf16),
        (Format.INT8, Format.F16): (int8_even, int8_odd), (Format.INT8, Format.BF16): (int8_even_bf16, int8_odd_bf16),
    }
    return functions.get((pool, target), (as_bf16, as_bf16))


def pair_unpackers(source: Format) -> tuple[Any, Any]:
    """Functions from a word of two 16-bit elements to its low and its high one as floats."""

    @cuda.jit(device=True, inline="always")
    def bf16_low(pair):
        return ptx.as_f32(pair << u32(16))

    @cuda.jit(device=True, inline="always")
    def bf16_high(pair):
        return ptx.as_f32(pair & u32(0xFFFF0000))

    @cuda.jit(device=True, inline="always")
    def f16_low(pair):
        return ptx.f16_to_f32(ptx.low_half(pair))

    @cuda.jit(device=True, inline="always")
    def f16_high(pair):
        return ptx.f16_to_f32(ptx.high_half(pair))

    return (bf16_low, bf16_high) if source is Format.BF16 else (f16_low, f16_high)


def packer(target: Format) -> Any:
    """The function that rounds two floats to a pair of a 16-bit format."""
    return ptx.pack_bf16 if target is Format.BF16 else ptx.pack_f16


def _rows_of_a_warp(tile: int, threads: int) -> tuple[int, int]:
    """Rows of a tile that a warp copies at a time, at most 16 so that they are of one block, and how often it does."""
    warps = max(threads // 32, tile // 16)
    return tile // warps, warps * 32 // threads


@cuda.jit(device=True, inline="always")
def _find_block(pool, table, block_shift, block_stride, start, token, end):
    """The address of the block of ``token``, or of ``start`` if the token is not before ``end``, and which of the
    block's tokens that is.
    """
    known = u32(token if token < end else start)
    block = ptx.ldg32_nc(table + u64(u32(known >> u32(block_shift))) * u64(4))
    return pool + u64(block) * block_stride, u32(known & u32((u32(1) << u32(block_shift)) - u32(1)))


def _scale_copier(size: int, rows: int, at: int) -> Any:
    """The function that starts the copy of a warp's scales, which come after a block's ``size`` rows, to ``at``."""
    SIZE, QUADS, AT = size, rows // 4, at

    @cuda.jit(device=True, inline="always")
    def copy_scales(target, block, block_shift, within, first, left, lane):
        """Copy the scales of the tokens from number ``first`` of the tile on, of which ``left`` are before the end."""
        if lane < QUADS:
            count = i32(max(min(i32(left - lane * 4), i32(4)), i32(0)))
            source = block + u64(u32((u32(SIZE) << u32(block_shift)) + u32(within * u32(4)) + u32(lane * 16)))
            ptx.cp_async16(target + u32(AT) + u32(u32(first * 4) + u32(lane * 16)), source, u32(count * 4))

    return copy_scales


def _row_loader(row_bytes: int, tile: int, threads: int, scales: tuple[int, int] | None = None) -> Any:
    """The function that starts the copy of one tile of K or V rows into shared memory, and of scales: the rows of a
    block before them, and where they go.
    """
    CHUNKS = row_bytes // 16
    STRIDE = row_bytes + ROW_PADDING
    ROWS, PASSES = _rows_of_a_warp(tile, threads)
    ROWS_SHIFT = ROWS.bit_length() - 1
    TOTAL = ROWS * CHUNKS
    ROUNDS = (TOTAL + 31) // 32
    EXACT = TOTAL % 32 == 0
    EVEN = 32 % CHUNKS == 0
    ROUND_BYTES = 32 // CHUNKS * STRIDE if EVEN else 0
    ROW, WARPS = row_bytes, threads // 32
    SCALED = scales is not None
    rows_before, scales_at = scales or (0, 0)
    copy_scales = _scale_copier(rows_before, ROWS, scales_at)

    @cuda.jit(device=True, inline="always")
    def load_rows(target, pool, table, block_shift, block_stride, start, end, thread):
        """Copy rows start.. of one head; rows from ``end`` on become zeros and their table entries are not read."""
        lane = i32(thread & 31)
        for turn in range(PASSES):
            first = i32(i32(thread >> 5) * ROWS + turn * WARPS * ROWS)
            token = i32(start + first)
            if SCALED or block_shift >= ROWS_SHIFT:   # the warp's rows are one piece of one block
                block, within = _find_block(pool, table, block_shift, block_stride, start, token, end)
                source = block + u64(u32(within * u32(ROW) + u32(lane * 16)))
                to = target + u32(u32(first * STRIDE) + u32(u32(lane) // u32(CHUNKS) * u32(ROW_PADDING))
                                  + u32(lane * 16))
                left = i32(i32(i32(end - token) * CHUNKS) - lane)
                for i in range(ROUNDS):
                    if EXACT or lane + i * 32 < TOTAL:
                        size = u32(16) if left > i * 32 else u32(0)
                        if EVEN:
                            ptx.cp_async16(to + u32(i * ROUND_BYTES), source + u64(i * 512), size)
                        else:
                            row = u32(u32(lane + i * 32) // u32(CHUNKS))
                            at = u32(u32(u32(first) + row) * u32(ROW_PADDING) + u32(first * ROW + lane * 16 + i * 512))
                            ptx.cp_async16(target + at, source + u64(i * 512), size)
                if SCALED:
                    copy_scales(target, block, block_shift, within, first, i32(end - token), lane)
            else:
                chunk = lane
                while chunk < TOTAL:
                    row = i32(u32(chunk) // u32(CHUNKS))
                    column = u32(u32(u32(chunk) % u32(CHUNKS)) * u32(16))
                    inside = i32(token + row) < end
                    block, within = _find_block(pool, table, block_shift, block_stride, start, i32(token + row), end)
                    ptx.cp_async16(target + u32(u32(i32(first + row) * STRIDE) + column),
                                   block + u64(u32(within * u32(ROW) + column)), u32(16) if inside else u32(0))
                    chunk = i32(chunk + 32)

    return load_rows


def _element_loader(shape: AttentionShape, threads: int) -> Any:
    """The function that starts the copy of one tile of K of 8 bits, a row for each element, and of its scales."""
    SIZE, STRIDE, WARPS = shape.key_size, shape.key_row, threads // 32
    TILE_SHIFT = shape.tile.bit_length() - 1
    ROWS, PASSES = _rows_of_a_warp(shape.tile, threads)
    SHARE_SHIFT = (16 // ROWS).bit_length() - 1       # warps that share 16 tokens
    AT_ONCE = 32 << SHARE_SHIFT
    ROUNDS = (shape.key_size + AT_ONCE - 1) // AT_ONCE
    EXACT = shape.key_size % AT_ONCE == 0
    copy_scales = _scale_copier(shape.key_size, ROWS, shape.key_scales_at)

    @cuda.jit(device=True, inline="always")
    def load_elements(target, pool, table, block_shift, block_stride, start, end, thread):
        """Copy 16 tokens of an element at a time; of 16 from ``end`` on nothing is read."""
        # Why: neighbouring lanes take what is together in the pool: first the tokens of an element in one block. Warps
        # share the elements of a block's tokens in the tile, so that each needs one entry of the table.
        shift = i32(min(i32(block_shift), i32(TILE_SHIFT)) - 4)
        lane = i32(thread & 31)
        part = i32(lane & i32((i32(1) << shift) - 1))
        for turn in range(PASSES):
            warp = i32(i32(thread >> 5) + turn * WARPS)
            span = i32(shift + SHARE_SHIFT)           # of the number of warps that share
            sharer = i32(warp & i32((i32(1) << span) - 1))
            run = i32(i32(warp >> span) << i32(shift + 4))
            block, within = _find_block(pool, table, block_shift, block_stride, start, i32(start + run), end)
            row = i32(i32(lane >> shift) + i32(i32(32 * sharer) >> shift))
            source = block + u64(u32(u32(u32(row) << u32(block_shift)) + within + u32(part * 16)))
            to = target + u32(u32(row * STRIDE) + u32(run + part * 16))
            size = u32(16) if i32(start + run + part * 16) < end else u32(0)
            step = u64(u32(u32(AT_ONCE) << u32(block_shift)))
            for i in range(ROUNDS):
                if EXACT or row + i * AT_ONCE < SIZE:
                    ptx.cp_async16(to + u32(i * AT_ONCE * STRIDE), source, size)
                source += step
            mine = i32(warp * ROWS)
            copy_scales(target, block, block_shift, u32(within + u32(mine - run)), mine, i32(end - i32(start + mine)),
                        lane)

    return load_elements


def _loaders(shape: AttentionShape, threads: int) -> tuple[Any, Any]:
    """The functions that start the copies of one tile of K and of V, with their scales."""
    value_bytes = shape.value_size * shape.pool.itemsize
    if not shape.is_scaled:
        return _row_loader(shape.key_size * 2, shape.tile, threads), _row_loader(value_bytes, shape.tile, threads)
    scales = shape.value_size, shape.value_scales_at
    return _element_loader(shape, threads), _row_loader(value_bytes, shape.tile, threads, scales)


def _query_stager(shape: AttentionShape, threads: int) -> Any:
    """The function that puts packed query rows into shared memory."""
    CHUNKS = shape.key_size // 8
    THREADS = threads
    ROW = shape.query_row

    @cuda.jit(device=True, inline="always")
    def stage_query(target, query, token_stride, head_stride, first_row, num_rows, all_rows, group, thread):
        """Copy packed rows first_row.. (token, query head of the group); rows past ``all_rows`` become zeros."""
        chunk = i32(thread)
        while chunk < i32(num_rows * CHUNKS):
            row = i32(u32(chunk) // u32(CHUNKS))
            part = u32(u32(chunk) % u32(CHUNKS))
            packed = i32(first_row + row)
            w0, w1, w2, w3 = u32(0), u32(0), u32(0), u32(0)
            if packed < all_rows:
                token = u32(u32(packed) // u32(group))
                head = u32(u32(packed) % u32(group))
                words = ptx.ldg128_nc(
                    query + u64(token) * u64(token_stride) + u64(head) * u64(head_stride) + u64(part * u32(16))
                )
                w0, w1, w2, w3 = words[0], words[1], words[2], words[3]
            ptx.sts128(target + u32(u32(row * ROW) + part * u32(16)), w0, w1, w2, w3)
            chunk = i32(chunk + THREADS)

    return stage_query


def _scaled_weights(shape: AttentionShape) -> tuple[Any, Any]:
    """The functions of scales: ``scale_scores`` and ``weigh_values``, of four neighbouring tokens of a row."""

    @cuda.jit(device=True, inline="always")
    def scale_scores(address, s, si):
        """Multiply s[si : si + 8], of two rows, with the scales of their keys."""
        k = ptx.lds128(address)
        k0, k1, k2, k3 = ptx.as_f32(k[0]), ptx.as_f32(k[1]), ptx.as_f32(k[2]), ptx.as_f32(k[3])
        s[si], s[si + 2] = ptx.fmul(s[si], k0), ptx.fmul(s[si + 2], k0)
        s[si + 1], s[si + 3] = ptx.fmul(s[si + 1], k2), ptx.fmul(s[si + 3], k2)
        s[si + 4], s[si + 6] = ptx.fmul(s[si + 4], k1), ptx.fmul(s[si + 6], k1)
        s[si + 5], s[si + 7] = ptx.fmul(s[si + 5], k3), ptx.fmul(s[si + 7], k3)

    @cuda.jit(device=True, inline="always")
    def scaled(weight, scale):
        # Safety: the scale of a token that the row does not see may be NaN.
        product = ptx.fmul(weight, ptx.as_f32(scale))     # computed in any case: a choice is no branch
        return product if weight > f32(0) else f32(0)

    @cuda.jit(device=True, inline="always")
    def weigh_values(v, w0, w1, w2, w3, is_late):
        """The weights of four tokens times the scales of their values, as pairs for the two halves of a product."""
        first = ptx.pack_bf16(scaled(w0, v[0]), scaled(w1, v[1]))
        second = ptx.pack_bf16(scaled(w2, v[2]), scaled(w3, v[3]))
        return ptx.select(is_late, second, first), ptx.select(is_late, first, second)

    return scale_scores, weigh_values


def tile_functions(shape: AttentionShape, threads: int = THREADS) -> SimpleNamespace:
    """Make the device functions of one variant, for CTAs of so many threads; a kernel closes over them.

    ``score_step(address, q, qi, s, si)`` adds one step of 16 keys to s[si : si + 8], of which s[si + i] is that of key
    ``quad_keys * quad + key_of(i)``;
    ``value_step(address, p0, p1, p2, p3, o, oi)`` adds 16 keys times one group of columns to o;
    ``pack(a, b)`` makes a pair of weights, ``pack_result(a, b)`` a pair of the result. The thread's value of pair
    p of a group is o[x] and o[x + pair_step] with x = ``pair_index(p)``, two registers further for its other row.
    """
    SCALED = shape.is_scaled
    KROW = shape.key_row
    weights = Format.BF16 if SCALED else shape.pool
    mma_keys = ptx.mma_f16 if shape.query is Format.F16 else ptx.mma_bf16
    mma_values = ptx.mma_f16 if weights is Format.F16 else ptx.mma_bf16
    key_even, key_odd = _unpackers(shape.pool, shape.query)
    value_even, value_odd = _unpackers(shape.pool, weights)
    low_weight, high_weight = pair_unpackers(weights)
    scale_scores, weigh_values = _scaled_weights(shape)

    @cuda.jit(device=True, inline="always")
    def multiply_keys(a0, a1, a2, a3, b0, b1, c, ci):
        d = mma_keys(a0, a1, a2, a3, b0, b1, c[ci], c[ci + 1], c[ci + 2], c[ci + 3])
        c[ci], c[ci + 1], c[ci + 2], c[ci + 3] = d[0], d[1], d[2], d[3]

    @cuda.jit(device=True, inline="always")
    def multiply(a0, a1, a2, a3, b0, b1, c, ci):
        d = mma_values(a0, a1, a2, a3, b0, b1, c[ci], c[ci + 1], c[ci + 2], c[ci + 3])
        c[ci], c[ci + 1], c[ci + 2], c[ci + 3] = d[0], d[1], d[2], d[3]

    @cuda.jit(device=True, inline="always")
    def score_step(address, q, qi, s, si):
        if SCALED:
            b = ptx.ldmatrix_x4_trans(address)
            multiply_keys(q[qi], q[qi + 1], q[qi + 2], q[qi + 3], key_even(b[0]), key_even(b[1]), s, si)
            multiply_keys(q[qi], q[qi + 1], q[qi + 2], q[qi + 3], key_odd(b[0]), key_odd(b[1]), s, si + 4)
            multiply_keys(q[qi + 4], q[qi + 5], q[qi + 6], q[qi + 7], key_even(b[2]), key_even(b[3]), s, si)
            multiply_keys(q[qi + 4], q[qi + 5], q[qi + 6], q[qi + 7], key_odd(b[2]), key_odd(b[3]), s, si + 4)
        else:
            b = ptx.ldmatrix_x4(address)
            multiply_keys(q[qi], q[qi + 1], q[qi + 2], q[qi + 3], b[0], b[1], s, si)
            multiply_keys(q[qi], q[qi + 1], q[qi + 2], q[qi + 3], b[2], b[3], s, si + 4)

    @cuda.jit(device=True, inline="always")
    def value_step(address, p0, p1, p2, p3, o, oi):
        b = ptx.ldmatrix_x4_trans(address)
        if SCALED:
            multiply(p0, p1, p2, p3, value_even(b[0]), value_even(b[1]), o, oi)
            multiply(p0, p1, p2, p3, value_odd(b[0]), value_odd(b[1]), o, oi + 4)
            multiply(p0, p1, p2, p3, value_even(b[2]), value_even(b[3]), o, oi + 8)
            multiply(p0, p1, p2, p3, value_odd(b[2]), value_odd(b[3]), o, oi + 12)
        else:
            multiply(p0, p1, p2, p3, b[0], b[1], o, oi)
            multiply(p0, p1, p2, p3, b[2], b[3], o, oi + 4)

    @cuda.jit(device=True, inline="always")
    def load_query(address, q, qi):
        """Load the query fragments of one step of K."""
        a = ptx.ldmatrix_x4(address)
        q[qi], q[qi + 1], q[qi + 2], q[qi + 3] = a[0], a[1], a[2], a[3]
        if SCALED:
            b = ptx.ldmatrix_x4(address + u32(32))
            q[qi + 4], q[qi + 5], q[qi + 6], q[qi + 7] = b[0], b[1], b[2], b[3]

    @cuda.jit(device=True, inline="always")
    def key_lane(lane):
        """Bytes from a tile of K to what a lane names for ``score_step``, of the first step and keys."""
        return lane * KROW if SCALED else ((lane & 7) + ((lane >> 4) << 3)) * KROW + ((lane >> 3) & 1) * 16

    @cuda.jit(device=True, inline="always")
    def value_row(lane):
        """The row of 16 of V that a lane names for ``value_step``."""
        row = lane & 15
        # Why not the order of the weights alone: so eight rows of one matrix are in different banks.
        late = ((row >> 3) ^ (row >> 2)) & 1
        return ((row & 6) << 1) + (row & 1) + (late << 1) if SCALED else row

    @cuda.jit(device=True, inline="always")
    def key_of(i):
        """Which key of a quad's the score in register i is of, and of which block of 16."""
        return (i >> 3) * 16 + (i & 1) * 2 + ((i >> 2) & 1) if SCALED else (i >> 2) * 8 + (i & 1)

    @cuda.jit(device=True, inline="always")
    def pair_index(pair):
        """Where in a group's registers the first of two neighbouring columns is, of the thread's first row."""
        return (pair >> 1) * 8 + (pair & 1) if SCALED else pair * 4

    @cuda.jit(device=True, inline="always")
    def pair_column(pair, lane):
        """Which column of the group that is."""
        quad = i32(lane & 3)
        return u32((pair >> 1) * 16 + (pair & 1) * 2 + quad * 4) if SCALED else u32(pair * 8 + quad * 2)

    load_keys, load_values = _loaders(shape, threads)
    return SimpleNamespace(
        pair_index=pair_index, pair_column=pair_column, pair_step=4 if SCALED else 1,
        pairs_per_group=shape.floats_per_group // 4, key_lane=key_lane, value_row=value_row, key_of=key_of,
        quad_keys=4 if SCALED else 2, key_step=32 * KROW if SCALED else 32, key_block=16 if SCALED else 16 * KROW,
        load_keys=load_keys, load_values=load_values, scale_scores=scale_scores, weigh_values=weigh_values,
        stage_query=_query_stager(shape, threads), load_query=load_query, score_step=score_step, value_step=value_step,
        pack=packer(weights), pack_result=packer(shape.query), low_weight=low_weight, high_weight=high_weight,
    )
