"""What the hardware has and Numba lacks: each name here is one PTX instruction, as a Numba intrinsic.

``intrinsics.py`` makes them, and is the only contact with the compiler. Addresses are plain integers: a global address
is a uint64, a shared address the 32-bit offset in the shared window. Nothing here knows of attention; read
``numerics.py`` next.

Rules that the kernels rely on: every ``.sync`` instruction is marked convergent, so that LLVM never moves it into
divergent code; memory accesses that must stay in order have a side effect and clobber memory; ``add.rn`` and
``mul.rn`` name their rounding, so that no compiler fuses or reorders them. A choice in the argument of a ``.sync``
instruction is a ``select``: of ``return vote(x if c else y)`` CPython compiles two votes, one behind each of x and y.
"""

from __future__ import annotations

from pagedcore_kernels.cuda.device.intrinsics import bitcast, half, instruction, u16
from pagedcore_kernels.cuda.device.intrinsics import f32 as f32
from pagedcore_kernels.cuda.device.intrinsics import fence as fence
from pagedcore_kernels.cuda.device.intrinsics import i32 as i32
from pagedcore_kernels.cuda.device.intrinsics import select as select
from pagedcore_kernels.cuda.device.intrinsics import shared_address as shared_address
from pagedcore_kernels.cuda.device.intrinsics import u32 as u32
from pagedcore_kernels.cuda.device.intrinsics import u64 as u64

# Global memory.
ldg128 = instruction("ldg128", "ld.global.v4.u32 {$0,$1,$2,$3}, [$4];", [u32] * 4, [u64], ordered=True)
ldg128_nc = instruction("ldg128_nc", "ld.global.nc.v4.u32 {$0,$1,$2,$3}, [$4];", [u32] * 4, [u64])
ldg64 = instruction("ldg64", "ld.global.v2.u32 {$0,$1}, [$2];", [u32] * 2, [u64], ordered=True)
ldg32_nc = instruction("ldg32_nc", "ld.global.nc.u32 $0, [$1];", [u32], [u64])
ldgf32_nc = instruction("ldgf32_nc", "ld.global.nc.f32 $0, [$1];", [f32], [u64])
ldgf32 = instruction("ldgf32", "ld.global.f32 $0, [$1];", [f32], [u64], ordered=True)
stg128 = instruction("stg128", "st.global.v4.u32 [$0], {$1,$2,$3,$4};", [], [u64] + [u32] * 4, ordered=True)
stg64 = instruction("stg64", "st.global.v2.u32 [$0], {$1,$2};", [], [u64] + [u32] * 2, ordered=True)
stg32 = instruction("stg32", "st.global.u32 [$0], $1;", [], [u64, u32], ordered=True)
stg8 = instruction("stg8", "st.global.u8 [$0], $1;", [], [u64, u32], ordered=True)
stgf32 = instruction("stgf32", "st.global.f32 [$0], $1;", [], [u64, f32], ordered=True)
# Wraps to 0 past the bound: a counter is ready for the next launch without being cleared (replayed graphs).
atom_inc = instruction(
    "atom_inc", "atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;", [u32], [u64, u32], ordered=True
)

# Shared memory.
lds128 = instruction("lds128", "ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];", [u32] * 4, [u32], ordered=True)
lds32 = instruction("lds32", "ld.shared.u32 $0, [$1];", [u32], [u32], ordered=True)
ldsf32 = instruction("ldsf32", "ld.shared.f32 $0, [$1];", [f32], [u32], ordered=True)
sts128 = instruction("sts128", "st.shared.v4.u32 [$0], {$1,$2,$3,$4};", [], [u32] + [u32] * 4, ordered=True)
sts32 = instruction("sts32", "st.shared.u32 [$0], $1;", [], [u32, u32], ordered=True)
stsf32 = instruction("stsf32", "st.shared.f32 [$0], $1;", [], [u32, f32], ordered=True)
ldmatrix_x4 = instruction(
    "ldmatrix_x4", "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", [u32] * 4, [u32], ordered=True
)
ldmatrix_x4_trans = instruction(
    "ldmatrix_x4_trans", "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];", [u32] * 4, [u32],
    ordered=True,
)

# Copies that run beside the arithmetic. 0 source bytes fill the 16 with zeros: a ragged tail needs no branch.
cp_async16 = instruction(
    "cp_async16", "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;", [], [u32, u64, u32], ordered=True
)
cp_async_commit = instruction("cp_async_commit", "cp.async.commit_group;", [], [], ordered=True)
cp_async_wait0 = instruction("cp_async_wait0", "cp.async.wait_group 0;", [], [], ordered=True)
cp_async_wait1 = instruction("cp_async_wait1", "cp.async.wait_group 1;", [], [], ordered=True)

# Tensor cores: D[16, 8] = A[16, 16] B[16, 8] + C, fragments as in the PTX manual, section mma.m16n8k16.
_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 "
    "{{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, {{$10,$11,$12,$13}};"
)
mma_bf16 = instruction("mma_bf16", _MMA.format("bf16"), [f32] * 4, [u32] * 6 + [f32] * 4)
mma_f16 = instruction("mma_f16", _MMA.format("f16"), [f32] * 4, [u32] * 6 + [f32] * 4)

# Float arithmetic whose rounding is part of the result.
fadd = instruction("fadd", "add.rn.f32 $0, $1, $2;", [f32], [f32] * 2)
fmul = instruction("fmul", "mul.rn.f32 $0, $1, $2;", [f32], [f32] * 2)
ffma = instruction("ffma", "fma.rn.f32 $0, $1, $2, $3;", [f32], [f32] * 3)
fmax = instruction("fmax", "max.f32 $0, $1, $2;", [f32], [f32] * 2)
fmin = instruction("fmin", "min.f32 $0, $1, $2;", [f32], [f32] * 2)
fdiv = instruction("fdiv", "div.rn.f32 $0, $1, $2;", [f32], [f32] * 2)
fsqrt = instruction("fsqrt", "sqrt.rn.f32 $0, $1;", [f32], [f32])
ex2 = instruction("ex2", "ex2.approx.ftz.f32 $0, $1;", [f32], [f32])
rcp = instruction("rcp", "rcp.approx.ftz.f32 $0, $1;", [f32], [f32])
tanh = instruction("tanh", "tanh.approx.f32 $0, $1;", [f32], [f32])

# Conversions. The low half of a pair is the first operand.
pack_bf16 = instruction("pack_bf16", "cvt.rn.bf16x2.f32 $0, $2, $1;", [u32], [f32] * 2)
pack_f16 = instruction("pack_f16", "cvt.rn.f16x2.f32 $0, $2, $1;", [u32], [f32] * 2)
pack_e4m3 = instruction("pack_e4m3", "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", [u16], [f32] * 2)
unpack_e4m3 = instruction("unpack_e4m3", "cvt.rn.f16x2.e4m3x2 $0, $1;", [u32], [u16])
prmt = instruction("prmt", "prmt.b32 $0, $1, $2, $3;", [u32], [u32] * 3)
sub_f16x2 = instruction("sub_f16x2", "sub.rn.f16x2 $0, $1, $2;", [u32], [u32] * 2)
# Why fused: sm_80 has no other arithmetic of bf16 pairs.
ffma_bf16x2 = instruction("ffma_bf16x2", "fma.rn.bf16x2 $0, $1, $2, $3;", [u32], [u32] * 3)
round_to_int = instruction("round_to_int", "cvt.rni.s32.f32 $0, $1;", [i32], [f32])
round_to_u64 = instruction("round_to_u64", "cvt.rni.u64.f32 $0, $1;", [u64], [f32])
mul_high = instruction("mul_high", "mul.hi.u64 $0, $1, $2;", [u64], [u64] * 2)
f16_to_f32 = instruction("f16_to_f32", "cvt.f32.f16 $0, $1;", [f32], [u16])

# Between the threads of a warp.
shfl_xor = instruction("shfl_xor", "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", [f32], [f32, u32], ordered=True)

shfl_up = instruction("shfl_up", "shfl.sync.up.b32 $0, $1, $2, 0x0, 0xffffffff;", [u32], [u32, u32], ordered=True)
redux_add = instruction("redux_add", "redux.sync.add.u32 $0, $1, 0xffffffff;", [u32], [u32], ordered=True)
redux_min = instruction("redux_min", "redux.sync.min.u32 $0, $1, 0xffffffff;", [u32], [u32], ordered=True)
redux_max = instruction("redux_max", "redux.sync.max.u32 $0, $1, 0xffffffff;", [u32], [u32], ordered=True)

as_f32 = bitcast("as_f32", u32, f32)
as_u32 = bitcast("as_u32", f32, u32)
low_half = half("low_half", 0)
high_half = half("high_half", 16)
