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


def _scale_loader(size: int, tile: int, at: int) -> Any:
    """The function that starts the copy of a tile's scales, which come after a block's ``size`` rows, to ``at``."""
    SIZE, QUADS, AT = size, tile // 4, at

    @cuda.jit(device=True, inline="always")
    def load_scales(target, pool, table, block_shift, block_stride, start, end, thread):
        """Copy the scales of tokens start..; those from ``end`` on become zeros."""
        if thread < QUADS:
            token = i32(start + thread * 4)
            count = i32(max(min(i32(end - token), i32(4)), i32(0)))
            known = u32(token if count > 0 else start)
            page = ptx.ldg32_nc(table + u64(u32(known >> u32(block_shift))) * u64(4))
            within = u32(known & u32((u32(1) << u32(block_shift)) - u32(1)))
            source = pool + u64(page) * block_stride + u64(u32((u32(SIZE) << u32(block_shift)) + u32(within * u32(4))))
            ptx.cp_async16(target + u32(AT) + u32(thread * 16), source, u32(count * 4))

    return load_scales


def _element_loader(shape: AttentionShape, threads: int) -> Any:
    """The function that starts the copy of one tile of K of 8 bits, a row of tokens for each element."""
    SIZE, STRIDE, THREADS = shape.key_size, shape.key_row, threads
    TILE_SHIFT = shape.tile.bit_length() - 1
    TOTAL = shape.key_size * shape.tile // 16
    ROUNDS = (TOTAL + THREADS - 1) // THREADS
    EXACT = TOTAL % THREADS == 0

    @cuda.jit(device=True, inline="always")
    def load_elements(target, pool, table, block_shift, block_stride, start, end, thread):
        """Copy 16 tokens of an element at a time; of 16 from ``end`` on the table entry is not read."""
        # Why: neighbouring threads take what is together in the pool: first the tokens of an element in one block.
        shift = u32(min(i32(block_shift), i32(TILE_SHIFT)) - 4)
        for i in range(ROUNDS):
            chunk = u32(thread + i * THREADS)
            if EXACT or chunk < u32(TOTAL):
                rest = u32(chunk >> shift)
                row = u32(rest % u32(SIZE))
                part = u32(chunk & u32((u32(1) << shift) - u32(1)))
                group = u32(u32(u32(rest // u32(SIZE)) << shift) + part)
                token = i32(start + i32(group * u32(16)))
                inside = token < end
                known = u32(token if inside else start)
                page = ptx.ldg32_nc(table + u64(u32(known >> u32(block_shift))) * u64(4))
                within = u32(known & u32((u32(1) << u32(block_shift)) - u32(1)))
                source = pool + u64(page) * block_stride + u64(u32(u32(row << u32(block_shift)) + within))
                ptx.cp_async16(target + u32(u32(row * u32(STRIDE)) + u32(group * u32(16))), source,
                               u32(16) if inside else u32(0))

    return load_elements


def _both(first: Any, second: Any) -> Any:
    """The function that starts two copies of one tile."""

    @cuda.jit(device=True, inline="always")
    def load(target, pool, table, block_shift, block_stride, start, end, thread):
        first(target, pool, table, block_shift, block_stride, start, end, thread)
        second(target, pool, table, block_shift, block_stride, start, end, thread)

    return load


def _loaders(shape: AttentionShape, threads: int) -> tuple[Any, Any]:
    """The functions that start the copies of one tile of K and of V, with their scales."""
    values = _row_loader(shape.value_size * shape.pool.itemsize, shape.tile, threads)
    if not shape.is_scaled:
        return _row_loader(shape.key_size * 2, shape.tile, threads), values
    key_scales = _scale_loader(shape.key_size, shape.tile, shape.key_size * shape.key_row)
    value_scales = _scale_loader(shape.value_size, shape.tile, shape.tile * shape.value_row)
    return _both(_element_loader(shape, threads), key_scales), _both(values, value_scales)


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
