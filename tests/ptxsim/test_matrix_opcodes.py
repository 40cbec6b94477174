"""Matrix fragments and products against float64, with fragments laid out one element at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedcore_ptxsim import DivergenceFault, UnsupportedPtx, formats
from ptxsim.ptx_texts import run
from ptxsim.test_float_opcodes import from_bf16, to_bf16

Array = np.ndarray
WIDTH = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}


def random_elements(kind: str, shape: tuple[int, int], rng: np.random.Generator) -> tuple[Array, Array]:
    """Stored bits and exact float64 values of random elements of a type."""
    values = rng.standard_normal(shape).astype(np.float32)
    if kind == "f16":
        bits = values.astype(np.float16)
        return bits.view(np.uint16), bits.astype(np.float64)
    if kind == "bf16":
        return to_bf16(values), from_bf16(to_bf16(values)).astype(np.float64)
    if kind == "tf32":
        bits = formats.f32_to_tf32(values)
        return bits, bits.view(np.float32).astype(np.float64)
    if kind in ("s8", "u8"):
        whole = rng.integers(-128 if kind == "s8" else 0, 128 if kind == "s8" else 256, shape)
        return whole.astype(np.int8 if kind == "s8" else np.uint8).view(np.uint8), whole.astype(np.float64)
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[kind]
    eighth = torch.from_numpy(values).to(dtype)
    return eighth.view(torch.uint8).numpy(), eighth.to(torch.float64).numpy()


def fragment_a(bits: Array, width: int) -> Array:
    """uint32[32, registers] of A[16, K], element by element as the manual draws it."""
    per, depth = 4 // width, bits.shape[1]
    out = np.zeros((32, depth * 16 // 32 // per), np.uint32)
    for lane in range(32):
        group, place = divmod(lane, 4)
        for register in range(out.shape[1]):
            for i in range(per):
                row = group + 8 * (register & 1)
                column = place * per + i + 4 * per * (register >> 1)
                out[lane, register] |= np.uint32(int(bits[row, column]) << 8 * width * i)
    return out


def fragment_b(bits: Array, width: int) -> Array:
    """uint32[32, registers] of B[K, 8]."""
    per = 4 // width
    out = np.zeros((32, bits.shape[0] * 8 // 32 // per), np.uint32)
    for lane in range(32):
        group, place = divmod(lane, 4)
        for register in range(out.shape[1]):
            for i in range(per):
                row = place * per + i + 4 * per * register
                out[lane, register] |= np.uint32(int(bits[row, group]) << 8 * width * i)
    return out


def fragment_c(values: Array) -> Array:
    """[32, 4] of C[16, 8]."""
    return np.array([[values[lane // 4 + 8 * (i >> 1), lane % 4 * 2 + (i & 1)] for i in range(4)]
                     for lane in range(32)])


def multiply(opcode: str, *fragments: Array, results: int = 4) -> Array:
    """Run one mma with fragments for one warp; uint32[32, results]."""
    out = np.zeros((32, results), np.uint32)
    loads, names, register = [], [], 2
    for i, fragment in enumerate(fragments):
        count = fragment.shape[1]
        mine = [f"%r{register + k}" for k in range(count)]
        register += count
        loads.append(f"mad.wide.u32 %rd20, %r1, {4 * count}, %rd{i + 1};")
        loads += [f"ld.global.u32 {name}, [%rd20+{4 * k}];" for k, name in enumerate(mine)]
        names.append("{" + ", ".join(mine) + "}")
    targets = [f"%r{40 + k}" for k in range(results)]
    stores = [f"st.global.u32 [%rd20+{4 * k}], {name};" for k, name in enumerate(targets)]
    run("\n".join([*loads, f"{opcode} {{{', '.join(targets)}}}, {', '.join(names)};",
                   f"mad.wide.u32 %rd20, %r1, {4 * results}, %rd{len(fragments) + 1};", *stores]),
        *(np.ascontiguousarray(fragment) for fragment in fragments), out)
    return out


SHAPES = [("f16", 16), ("f16", 8), ("bf16", 16), ("bf16", 8), ("tf32", 8), ("tf32", 4), ("e4m3", 32), ("e5m2", 32),
          ("e4m3", 16)]


@pytest.mark.parametrize(("kind", "depth"), SHAPES)
def test_float_products(kind: str, depth: int) -> None:
    """D = A B + C with float32 sums of exact products, for every type and depth."""
    rng = np.random.default_rng(depth)
    (a_bits, a), (b_bits, b) = random_elements(kind, (16, depth), rng), random_elements(kind, (depth, 8), rng)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    got = multiply(f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32",
                   fragment_a(a_bits, WIDTH[kind]), fragment_b(b_bits, WIDTH[kind]),
                   fragment_c(c).astype(np.float32).view(np.uint32))
    want = fragment_c(a @ b + c)
    bound = fragment_c(np.abs(a) @ np.abs(b) + np.abs(c)) * (depth + 1) * 2.0**-24
    assert (np.abs(got.view(np.float32) - want) <= bound).all()


@pytest.mark.parametrize("kinds", ["s8.s8", "u8.u8", "s8.u8", "u8.s8"])
@pytest.mark.parametrize("depth", [16, 32])
def test_integer_products(kinds: str, depth: int) -> None:
    """Integer products are exact; .satfinite clamps the sums."""
    rng = np.random.default_rng(depth)
    first, second = kinds.split(".")
    (a_bits, a), (b_bits, b) = random_elements(first, (16, depth), rng), random_elements(second, (depth, 8), rng)
    c = rng.integers(-2**31, 2**31, (16, 8), np.int64)
    fragments = fragment_a(a_bits, 1), fragment_b(b_bits, 1), fragment_c(c).astype(np.int32).view(np.uint32)
    exact = fragment_c(a @ b + c).astype(np.int64)
    got = multiply(f"mma.sync.aligned.m16n8k{depth}.row.col.s32.{kinds}.s32", *fragments)
    assert (got == (exact & 0xFFFFFFFF).astype(np.uint32)).all()
    got = multiply(f"mma.sync.aligned.m16n8k{depth}.row.col.satfinite.s32.{kinds}.s32", *fragments)
    assert (got.view(np.int32) == np.clip(exact, -2**31, 2**31 - 1)).all()


def test_half_accumulators() -> None:
    """C and D of f16 are two pairs of halves."""
    rng = np.random.default_rng(0)
    (a_bits, a), (b_bits, b) = random_elements("f16", (16, 16), rng), random_elements("f16", (16, 8), rng)
    c = rng.standard_normal((16, 8)).astype(np.float16)
    got = multiply("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16", fragment_a(a_bits, 2), fragment_b(b_bits, 2),
                   fragment_c(c).astype(np.float16).view(np.uint32), results=2)
    want = fragment_c(a @ b + c)
    assert np.abs(got.view(np.float16).reshape(32, 4) - want).max() < 0.02


def test_nan_and_infinity_pass_through_products() -> None:
    """A NaN or an infinity spoils its own row alone."""
    a, b, c = np.ones((16, 16), np.float16), np.ones((16, 8), np.float16), np.zeros((16, 8), np.float32)
    a[3, 5], a[9, 0] = np.nan, np.inf
    got = multiply("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", fragment_a(a.view(np.uint16), 2),
                   fragment_b(b.view(np.uint16), 2), fragment_c(c).astype(np.float32).view(np.uint32)).view(np.float32)
    rows = np.array([[lane // 4 + 8 * (i >> 1) for i in range(4)] for lane in range(32)])
    assert np.isnan(got[rows == 3]).all()
    assert np.isposinf(got[rows == 9]).all()
    assert (got[(rows != 3) & (rows != 9)] == 16).all()


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix(count: int, trans: str) -> None:
    """Lane 4 r + p gets elements 2 p and 2 p + 1 of row r (or of column r) of every matrix, rows anywhere."""
    tile = np.random.default_rng(count).integers(0, 2**16, (32, 8), np.uint16)
    place = np.random.default_rng(9).permutation(32).astype(np.uint32)
    out = np.zeros((32, count), np.uint32)
    targets = ", ".join(f"%r{8 + i}" for i in range(count))
    run(f"""
    mad.wide.u32 %rd12, %r1, 16, %rd1; add.s64 %rd13, %rd2, %rd10;
    ld.global.v4.u32 {{%r2, %r3, %r4, %r5}}, [%rd12];
    ld.global.u32 %r6, [%rd13]; shl.b32 %r6, %r6, 4; mov.u32 %r7, tile; add.u32 %r7, %r7, %r6;
    st.shared.v4.u32 [%r7], {{%r2, %r3, %r4, %r5}};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{targets}}}, [%r7];
    mad.wide.u32 %rd14, %r1, {4 * count}, %rd3;
    {" ".join(f"st.global.u32 [%rd14+{4 * i}], %r{8 + i};" for i in range(count))}
    """, tile, place, out, module=".shared .align 16 .b8 tile[512];")
    for matrix in range(count):
        rows = tile[8 * matrix:8 * matrix + 8]
        rows = rows.T if trans else rows
        want = [int(rows[lane // 4, lane % 4 * 2]) | int(rows[lane // 4, lane % 4 * 2 + 1]) << 16 for lane in range(32)]
        assert out[:, matrix].tolist() == want


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix_undoes_ldmatrix(trans: str) -> None:
    """stmatrix writes what ldmatrix of the same form reads."""
    tile, out = np.random.default_rng(0).integers(0, 2**32, 128, np.uint32), np.zeros(128, np.uint32)
    run(f"""
    mad.wide.u32 %rd12, %r1, 16, %rd1; mad.wide.u32 %rd13, %r1, 16, %rd2;
    ld.global.v4.u32 {{%r2, %r3, %r4, %r5}}, [%rd12]; shl.b32 %r6, %r1, 4; mov.u32 %r7, tile; add.u32 %r7, %r7, %r6;
    st.shared.v4.u32 [%r7], {{%r2, %r3, %r4, %r5}};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r2, %r3, %r4, %r5}}, [%r7];
    bar.warp.sync -1;
    stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r7+512], {{%r2, %r3, %r4, %r5}};
    bar.warp.sync -1;
    ld.shared.v4.u32 {{%r2, %r3, %r4, %r5}}, [%r7+512];
    st.global.v4.u32 [%rd13], {{%r2, %r3, %r4, %r5}};
    """, tile, out, module=".shared .align 16 .b8 tile[1024];")
    assert (out == tile).all()


def test_movmatrix_transposes() -> None:
    """movmatrix transposes 8x8 halves across the lanes."""
    words, out = np.random.default_rng(0).integers(0, 2**32, 32, np.uint32), np.zeros(32, np.uint32)
    run("add.s64 %rd12, %rd1, %rd10; add.s64 %rd13, %rd2, %rd10; ld.global.u32 %r2, [%rd12];"
        "movmatrix.sync.aligned.m8n8.trans.b16 %r3, %r2; st.global.u32 [%rd13], %r3;", words, out)
    assert (out.view(np.uint16).reshape(8, 8) == words.view(np.uint16).reshape(8, 8).T).all()


def test_part_of_a_warp_cannot_multiply() -> None:
    """mma and ldmatrix want every thread of the warp, none of them ended."""
    mma = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r2,%r3,%r4,%r5}, {%r6,%r7}, {%r8}, {%r9,%r10,%r11,%r12};"
    with pytest.raises(DivergenceFault, match="never comes"):
        run(f"setp.lt.u32 %p1, %r1, 31; @%p1 bra L; bra M; L: {mma} M: bar.sync 0;", np.zeros(1))
    with pytest.raises(DivergenceFault, match="have ended"):
        run(f"setp.eq.u32 %p1, %r1, 31; @%p1 ret; {mma}", np.zeros(1))


def test_unknown_shapes_are_refused() -> None:
    """A shape or a form that is not implemented is refused, not computed wrongly."""
    for opcode in ("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64",
                   "mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
                   "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"):
        with pytest.raises(UnsupportedPtx):
            run(f"{opcode} {{%r2,%r3,%r4,%r5}}, {{%r6,%r7}}, {{%r8}}, {{%r9,%r10,%r11,%r12}};", np.zeros(1))
