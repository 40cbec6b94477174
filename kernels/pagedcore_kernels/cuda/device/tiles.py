"""Tiles of K and V on their way from the pool through shared memory into tensor cores, for every format of the pool.

Owns addresses and fragments: which thread copies which 16 bytes, which element of K, V or the result a register
holds. It decides no order of additions; ``numerics.py`` does. Read ``decode.py`` next for a use of all of it.

Shared rows are padded by 16 bytes, which makes ldmatrix free of bank conflicts for every head size.

Pools of 8 bits: ldmatrix moves pairs of bytes, so a thread receives four neighbouring elements of a K row where the
multiplication wants two and two. The contraction index may be permuted freely if the query is permuted the same way,
which ``stage_query`` does. V is transposed in pairs of columns; one byte permutation separates even and odd columns,
and the columns of the result are permuted instead (``pair_column``).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pagedcore_kernels.cuda.device import primitives as ptx
from pagedcore_kernels.cuda.device.intrinsics import cuda
from pagedcore_kernels.cuda.device.primitives import f32, i32, u32, u64
from pagedcore_kernels.cuda.shapes import ROW_PADDING, THREADS, AttentionShape, Format


def _unpackers(pool: Format) -> tuple[Any, Any]:
    """Functions from a word of four 8-bit elements to its low and high two as a pair of f16."""

    @cuda.jit(device=True, inline="always")
    def e4m3_low(word):
        return ptx.unpack_e4m3(ptx.low_half(word))

    @cuda.jit(device=True, inline="always")
    def e4m3_high(word):
        return ptx.unpack_e4m3(ptx.high_half(word))

    # Why: 0x64XX is 1024 + XX in f16; with the sign bit flipped XX is the element + 128, so 1152 too much.
    @cuda.jit(device=True, inline="always")
    def int8_low(word):
        return ptx.sub_f16x2(ptx.prmt(word ^ u32(0x80808080), u32(0x64646464), u32(0x4140)), u32(0x64806480))

    @cuda.jit(device=True, inline="always")
    def int8_high(word):
        return ptx.sub_f16x2(ptx.prmt(word ^ u32(0x80808080), u32(0x64646464), u32(0x4342)), u32(0x64806480))

    return (e4m3_low, e4m3_high) if pool is Format.E4M3 else (int8_low, int8_high)


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


def _row_loader(row_bytes: int, tile: int, threads: int) -> Any:
    """The function that starts the copy of one tile of K or V rows into shared memory."""
    CHUNKS = row_bytes // 16
    STRIDE = row_bytes + ROW_PADDING
    TOTAL = tile * CHUNKS
    THREADS = threads
    ROUNDS = (TOTAL + THREADS - 1) // THREADS
    EXACT = TOTAL % THREADS == 0
    ROW = row_bytes

    @cuda.jit(device=True, inline="always")
    def load_rows(target, pool, table, block_shift, block_stride, start, end, thread):
        """Copy rows start.. of one head; rows from ``end`` on become zeros and their table entries are not read."""
        for i in range(ROUNDS):
            chunk = i32(thread + i * THREADS)
            if EXACT or chunk < TOTAL:
                row = i32(u32(chunk) // u32(CHUNKS))
                column = u32(u32(u32(chunk) % u32(CHUNKS)) * u32(16))
                token = i32(start + row)
                inside = token < end
                known = u32(token if inside else start)
                page = ptx.ldg32_nc(table + u64(u32(known >> u32(block_shift))) * u64(4))
                within = u32(known & u32((u32(1) << u32(block_shift)) - u32(1)))
                source = pool + u64(page) * block_stride + u64(u32(within * u32(ROW) + column))
                ptx.cp_async16(target + u32(u32(row * STRIDE) + column), source, u32(16) if inside else u32(0))

    return load_rows


def _query_stager(shape: AttentionShape, threads: int) -> Any:
    """The function that puts packed query rows into shared memory, in the order and format the pool wants."""
    CHUNKS = shape.key_size // 8
    THREADS = threads
    ROW = shape.query_row
    NARROW = shape.pool.itemsize == 1
    CONVERT = NARROW and shape.query is Format.BF16
    low, high = pair_unpackers(shape.query)

    @cuda.jit(device=True, inline="always")
    def to_f16(pair):
        if CONVERT:
            # Safety: bf16 reaches further than f16; what is beyond saturates instead of becoming infinite.
            return ptx.pack_f16(min(max(low(pair), f32(-65504)), f32(65504)),
                                min(max(high(pair), f32(-65504)), f32(65504)))
        return pair

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
                w0, w1, w2, w3 = to_f16(words[0]), to_f16(words[1]), to_f16(words[2]), to_f16(words[3])
            if NARROW:
                # Words 0, 1, 2, 3 of a half row of 16 elements go to places 0, 4, 1, 5, those of the other half after.
                place = target + u32(u32(row * ROW) + u32(part >> u32(1)) * u32(32) + u32(part & u32(1)) * u32(8))
                ptx.sts32(place, w0)
                ptx.sts32(place + u32(16), w1)
                ptx.sts32(place + u32(4), w2)
                ptx.sts32(place + u32(20), w3)
            else:
                ptx.sts128(target + u32(u32(row * ROW) + part * u32(16)), w0, w1, w2, w3)
            chunk = i32(chunk + THREADS)

    return stage_query


def tile_functions(shape: AttentionShape, threads: int = THREADS) -> SimpleNamespace:
    """Make the device functions of one variant, for CTAs of so many threads; a kernel closes over them.

    ``score_step(address, q, qi, s, si)`` adds one step of 16 keys to s[si : si + 8];
    ``value_step(address, p0, p1, p2, p3, o, oi)`` adds 16 keys times one group of columns to o;
    ``pack(a, b)`` makes a pair of weights, ``pack_result(a, b)`` a pair of the result. The thread's value of pair
    p of a group is o[x] and o[x + pair_step] with x = ``pair_index(p)``, two registers further for its other row.
    """
    NARROW = shape.pool.itemsize == 1
    weights = Format.F16 if NARROW else shape.pool
    mma = ptx.mma_f16 if weights is Format.F16 else ptx.mma_bf16
    low, high = _unpackers(shape.pool)
    low_weight, high_weight = pair_unpackers(weights)

    @cuda.jit(device=True, inline="always")
    def multiply(a0, a1, a2, a3, b0, b1, c, ci):
        d = mma(a0, a1, a2, a3, b0, b1, c[ci], c[ci + 1], c[ci + 2], c[ci + 3])
        c[ci], c[ci + 1], c[ci + 2], c[ci + 3] = d[0], d[1], d[2], d[3]

    @cuda.jit(device=True, inline="always")
    def score_step(address, q, qi, s, si):
        b = ptx.ldmatrix_x4(address)
        if NARROW:
            multiply(q[qi], q[qi + 1], q[qi + 2], q[qi + 3], low(b[0]), high(b[0]), s, si)
            multiply(q[qi + 4], q[qi + 5], q[qi + 6], q[qi + 7], low(b[1]), high(b[1]), s, si)
            multiply(q[qi], q[qi + 1], q[qi + 2], q[qi + 3], low(b[2]), high(b[2]), s, si + 4)
            multiply(q[qi + 4], q[qi + 5], q[qi + 6], q[qi + 7], low(b[3]), high(b[3]), s, si + 4)
        else:
            multiply(q[qi], q[qi + 1], q[qi + 2], q[qi + 3], b[0], b[1], s, si)
            multiply(q[qi], q[qi + 1], q[qi + 2], q[qi + 3], b[2], b[3], s, si + 4)

    @cuda.jit(device=True, inline="always")
    def value_step(address, p0, p1, p2, p3, o, oi):
        b = ptx.ldmatrix_x4_trans(address)
        if NARROW:
            # prmt: the even columns of both tokens of a pair into the low half, the odd ones into the high half.
            w0, w1 = ptx.prmt(b[0], u32(0), u32(0x3120)), ptx.prmt(b[1], u32(0), u32(0x3120))
            multiply(p0, p1, p2, p3, low(w0), low(w1), o, oi)
            multiply(p0, p1, p2, p3, high(w0), high(w1), o, oi + 4)
            w2, w3 = ptx.prmt(b[2], u32(0), u32(0x3120)), ptx.prmt(b[3], u32(0), u32(0x3120))
            multiply(p0, p1, p2, p3, low(w2), low(w3), o, oi + 8)
            multiply(p0, p1, p2, p3, high(w2), high(w3), o, oi + 12)
        else:
            multiply(p0, p1, p2, p3, b[0], b[1], o, oi)
            multiply(p0, p1, p2, p3, b[2], b[3], o, oi + 4)

    @cuda.jit(device=True, inline="always")
    def load_query(address, q, qi):
        """Load the query fragments of one step of K rows."""
        a = ptx.ldmatrix_x4(address)
        q[qi], q[qi + 1], q[qi + 2], q[qi + 3] = a[0], a[1], a[2], a[3]
        if NARROW:
            b = ptx.ldmatrix_x4(address + u32(32))
            q[qi + 4], q[qi + 5], q[qi + 6], q[qi + 7] = b[0], b[1], b[2], b[3]

    @cuda.jit(device=True, inline="always")
    def pair_index(pair):
        """Where in a group's registers the first of two neighbouring columns is, of the thread's first row."""
        return (pair >> 1) * 8 + (pair & 1) if NARROW else pair * 4

    @cuda.jit(device=True, inline="always")
    def pair_column(pair, lane):
        """Which column of the group that is."""
        quad = i32(lane & 3)
        return u32((pair >> 1) * 16 + (pair & 1) * 2 + quad * 4) if NARROW else u32(pair * 8 + quad * 2)

    return SimpleNamespace(
        pair_index=pair_index, pair_column=pair_column, pair_step=4 if NARROW else 1,
        pairs_per_group=shape.floats_per_group // 4,
        load_keys=_row_loader(shape.key_size * shape.pool.itemsize, shape.tile, threads),
        load_values=_row_loader(shape.value_size * shape.pool.itemsize, shape.tile, threads),
        stage_query=_query_stager(shape, threads), load_query=load_query, score_step=score_step, value_step=value_step,
        pack=packer(weights), pack_result=packer(shape.query), low_weight=low_weight, high_weight=high_weight,
    )
