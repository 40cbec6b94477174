"""What the hardware has and Numba lacks: each name here is one PTX instruction, as a Numba intrinsic.

Owns the only contact with inline assembly. Addresses are plain integers: a global address is a uint64, a shared
address the 32-bit offset in the shared window. It knows nothing of attention; read ``numerics.py`` next.

Rules that the kernels rely on: every ``.sync`` instruction is marked convergent, so that LLVM never moves it into
divergent code; memory accesses that must stay in order have a side effect and clobber memory; ``add.rn`` and
``mul.rn`` name their rounding, so that no compiler fuses or reorders them. A choice in the argument of a ``.sync``
instruction is a ``select``: of ``return vote(x if c else y)`` CPython compiles two votes, one behind each of x and y.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import Parameter, Signature
from typing import Any, Final

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

u16, u32, u64, i32, f32 = types.uint16, types.uint32, types.uint64, types.int32, types.float32

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_OPERANDS: Final[dict[Any, tuple[Any, str]]] = {
    u16: (_I16, "h"), u32: (_I32, "r"), i32: (_I32, "r"), u64: (_I64, "l"), f32: (_F32, "f"),
}


def _instruction(name: str, text: str, outs: Sequence[Any], ins: Sequence[Any], *, ordered: bool = False) -> Any:
    """Make an intrinsic of one line of PTX whose operands ``$0``... are ``outs`` and then ``ins``.

    Args:
        ordered: whether it reads or writes memory that others write, and so keeps its place.
    """
    result = types.void if not outs else outs[0] if len(outs) == 1 else types.UniTuple(outs[0], len(outs))
    constraints = ["=" + _OPERANDS[t][1] for t in outs] + [_OPERANDS[t][1] for t in ins]
    if ordered:
        constraints.append("~{memory}")

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        returned = [_OPERANDS[t][0] for t in outs]
        ll_result = ir.VoidType() if not outs else returned[0] if len(outs) == 1 else ir.LiteralStructType(returned)
        function = ir.FunctionType(ll_result, [_OPERANDS[t][0] for t in ins])
        assembly = ir.InlineAsm(function, text, ",".join(constraints), side_effect=ordered)
        value = builder.call(assembly, list(values), attrs=("convergent",) if ".sync" in text else ())
        if len(outs) <= 1:
            return value if outs else context.get_dummy_value()
        parts = [builder.extract_value(value, i) for i in range(len(outs))]
        return context.make_tuple(builder, sig.return_type, parts)

    def typer(typingctx: Any, *arguments: Any) -> Any:
        return signature(result, *ins), generate

    # Why: Numba reads the number of arguments from the signature, and each instruction has its own.
    names = ["typingctx", *(f"operand{i}" for i in range(len(ins)))]
    parameters = [Parameter(n, Parameter.POSITIONAL_OR_KEYWORD) for n in names]
    typer.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    typer.__name__ = typer.__qualname__ = name
    typer.__doc__ = text
    return intrinsic(typer)


# Global memory.
ldg128 = _instruction("ldg128", "ld.global.v4.u32 {$0,$1,$2,$3}, [$4];", [u32] * 4, [u64], ordered=True)
ldg128_nc = _instruction("ldg128_nc", "ld.global.nc.v4.u32 {$0,$1,$2,$3}, [$4];", [u32] * 4, [u64])
ldg64 = _instruction("ldg64", "ld.global.v2.u32 {$0,$1}, [$2];", [u32] * 2, [u64], ordered=True)
ldg32_nc = _instruction("ldg32_nc", "ld.global.nc.u32 $0, [$1];", [u32], [u64])
ldgf32_nc = _instruction("ldgf32_nc", "ld.global.nc.f32 $0, [$1];", [f32], [u64])
ldgf32 = _instruction("ldgf32", "ld.global.f32 $0, [$1];", [f32], [u64], ordered=True)
stg128 = _instruction("stg128", "st.global.v4.u32 [$0], {$1,$2,$3,$4};", [], [u64] + [u32] * 4, ordered=True)
stg64 = _instruction("stg64", "st.global.v2.u32 [$0], {$1,$2};", [], [u64] + [u32] * 2, ordered=True)
stg32 = _instruction("stg32", "st.global.u32 [$0], $1;", [], [u64, u32], ordered=True)
stgf32 = _instruction("stgf32", "st.global.f32 [$0], $1;", [], [u64, f32], ordered=True)
# Wraps to 0 past the bound: a counter is ready for the next launch without being cleared (replayed graphs).
atom_inc = _instruction(
    "atom_inc", "atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;", [u32], [u64, u32], ordered=True
)

# Shared memory.
lds128 = _instruction("lds128", "ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];", [u32] * 4, [u32], ordered=True)
lds32 = _instruction("lds32", "ld.shared.u32 $0, [$1];", [u32], [u32], ordered=True)
ldsf32 = _instruction("ldsf32", "ld.shared.f32 $0, [$1];", [f32], [u32], ordered=True)
sts128 = _instruction("sts128", "st.shared.v4.u32 [$0], {$1,$2,$3,$4};", [], [u32] + [u32] * 4, ordered=True)
sts32 = _instruction("sts32", "st.shared.u32 [$0], $1;", [], [u32, u32], ordered=True)
stsf32 = _instruction("stsf32", "st.shared.f32 [$0], $1;", [], [u32, f32], ordered=True)
ldmatrix_x4 = _instruction(
    "ldmatrix_x4", "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", [u32] * 4, [u32], ordered=True
)
ldmatrix_x4_trans = _instruction(
    "ldmatrix_x4_trans", "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];", [u32] * 4, [u32],
    ordered=True,
)

# Copies that run beside the arithmetic. 0 source bytes fill the 16 with zeros: a ragged tail needs no branch.
cp_async16 = _instruction(
    "cp_async16", "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;", [], [u32, u64, u32], ordered=True
)
cp_async_commit = _instruction("cp_async_commit", "cp.async.commit_group;", [], [], ordered=True)
cp_async_wait0 = _instruction("cp_async_wait0", "cp.async.wait_group 0;", [], [], ordered=True)
cp_async_wait1 = _instruction("cp_async_wait1", "cp.async.wait_group 1;", [], [], ordered=True)

# Tensor cores: D[16, 8] = A[16, 16] B[16, 8] + C, fragments as in the PTX manual, section mma.m16n8k16.
_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 "
    "{{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, {{$10,$11,$12,$13}};"
)
mma_bf16 = _instruction("mma_bf16", _MMA.format("bf16"), [f32] * 4, [u32] * 6 + [f32] * 4)
mma_f16 = _instruction("mma_f16", _MMA.format("f16"), [f32] * 4, [u32] * 6 + [f32] * 4)

# Float arithmetic whose rounding is part of the result.
fadd = _instruction("fadd", "add.rn.f32 $0, $1, $2;", [f32], [f32] * 2)
fmul = _instruction("fmul", "mul.rn.f32 $0, $1, $2;", [f32], [f32] * 2)
ffma = _instruction("ffma", "fma.rn.f32 $0, $1, $2, $3;", [f32], [f32] * 3)
fmax = _instruction("fmax", "max.f32 $0, $1, $2;", [f32], [f32] * 2)
fmin = _instruction("fmin", "min.f32 $0, $1, $2;", [f32], [f32] * 2)
fdiv = _instruction("fdiv", "div.rn.f32 $0, $1, $2;", [f32], [f32] * 2)
fsqrt = _instruction("fsqrt", "sqrt.rn.f32 $0, $1;", [f32], [f32])
ex2 = _instruction("ex2", "ex2.approx.ftz.f32 $0, $1;", [f32], [f32])
rcp = _instruction("rcp", "rcp.approx.ftz.f32 $0, $1;", [f32], [f32])
tanh = _instruction("tanh", "tanh.approx.f32 $0, $1;", [f32], [f32])

# Conversions. The low half of a pair is the first operand.
pack_bf16 = _instruction("pack_bf16", "cvt.rn.bf16x2.f32 $0, $2, $1;", [u32], [f32] * 2)
pack_f16 = _instruction("pack_f16", "cvt.rn.f16x2.f32 $0, $2, $1;", [u32], [f32] * 2)
pack_e4m3 = _instruction("pack_e4m3", "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", [u16], [f32] * 2)
unpack_e4m3 = _instruction("unpack_e4m3", "cvt.rn.f16x2.e4m3x2 $0, $1;", [u32], [u16])
prmt = _instruction("prmt", "prmt.b32 $0, $1, $2, $3;", [u32], [u32] * 3)
sub_f16x2 = _instruction("sub_f16x2", "sub.rn.f16x2 $0, $1, $2;", [u32], [u32] * 2)
round_to_int = _instruction("round_to_int", "cvt.rni.s32.f32 $0, $1;", [i32], [f32])
round_to_u64 = _instruction("round_to_u64", "cvt.rni.u64.f32 $0, $1;", [u64], [f32])
mul_high = _instruction("mul_high", "mul.hi.u64 $0, $1, $2;", [u64], [u64] * 2)
f16_to_f32 = _instruction("f16_to_f32", "cvt.f32.f16 $0, $1;", [f32], [u16])

# Between the threads of a warp.
shfl_xor = _instruction("shfl_xor", "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", [f32], [f32, u32], ordered=True)

shfl_up = _instruction("shfl_up", "shfl.sync.up.b32 $0, $1, $2, 0x0, 0xffffffff;", [u32], [u32, u32], ordered=True)
redux_add = _instruction("redux_add", "redux.sync.add.u32 $0, $1, 0xffffffff;", [u32], [u32], ordered=True)
redux_min = _instruction("redux_min", "redux.sync.min.u32 $0, $1, 0xffffffff;", [u32], [u32], ordered=True)
redux_max = _instruction("redux_max", "redux.sync.max.u32 $0, $1, 0xffffffff;", [u32], [u32], ordered=True)


def _bitcast(name: str, source: Any, target: Any) -> Any:
    """Make an intrinsic that reads the same 32 bits as another type."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return builder.bitcast(values[0], _OPERANDS[target][0])

    def typer(typingctx: Any, bits: Any) -> Any:
        return signature(target, source), generate

    typer.__name__ = typer.__qualname__ = name
    return intrinsic(typer)


as_f32 = _bitcast("as_f32", u32, f32)
as_u32 = _bitcast("as_u32", f32, u32)


@intrinsic
def select(typingctx: Any, condition: Any, first: Any, second: Any) -> Any:
    """The first if the condition is true, else the second, without a branch; both are of the first one's type."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return builder.select(*values)

    return signature(first, types.boolean, first, first), generate


def _half(name: str, shift: int) -> Any:
    """Make an intrinsic that takes one half of a 32-bit word."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return builder.trunc(builder.lshr(values[0], ir.Constant(_I32, shift)), _I16)

    def typer(typingctx: Any, word: Any) -> Any:
        return signature(u16, u32), generate

    typer.__name__ = typer.__qualname__ = name
    return intrinsic(typer)


low_half = _half("low_half", 0)
high_half = _half("high_half", 16)


@intrinsic
def shared_address(typingctx: Any, array: Any) -> Any:
    """Where a shared array lies in the shared window, as ldmatrix and cp.async want it."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        pointer = context.make_array(sig.args[0])(context, builder, value=values[0]).data
        shared = builder.addrspacecast(pointer, ir.PointerType(ir.IntType(8), addrspace=3))
        return builder.ptrtoint(shared, _I32)

    return signature(u32, array), generate
