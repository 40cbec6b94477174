"""The contact with the compiler: how a line of PTX, and the little else that Numba lacks, becomes what kernels call.

A successor of numba-cuda needs this file alone again: ``tests/kernels/cuda/mlir_intrinsics.py`` is it for one, which is
tried with all kernels. ``primitives.py`` has the instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import Parameter, Signature
from typing import Any, Final

from llvmlite import ir
from numba import cuda as cuda
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

u16, u32, u64, i32, f32 = types.uint16, types.uint32, types.uint64, types.int32, types.float32

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_OPERANDS: Final[dict[Any, tuple[Any, str]]] = {
    u16: (_I16, "h"), u32: (_I32, "r"), i32: (_I32, "r"), u64: (_I64, "l"), f32: (_F32, "f"),
}


def instruction(name: str, text: str, outs: Sequence[Any], ins: Sequence[Any], *, ordered: bool = False) -> Any:
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


def bitcast(name: str, source: Any, target: Any) -> Any:
    """Make an intrinsic that reads the same 32 bits as another type."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return builder.bitcast(values[0], _OPERANDS[target][0])

    def typer(typingctx: Any, bits: Any) -> Any:
        return signature(target, source), generate

    typer.__name__ = typer.__qualname__ = name
    return intrinsic(typer)


@intrinsic
def select(typingctx: Any, condition: Any, first: Any, second: Any) -> Any:
    """The first if the condition is true, else the second, without a branch; both are of the first one's type."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return builder.select(*values)

    return signature(first, types.boolean, first, first), generate


def half(name: str, shift: int) -> Any:
    """Make an intrinsic that takes one half of a 32-bit word."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return builder.trunc(builder.lshr(values[0], ir.Constant(_I32, shift)), _I16)

    def typer(typingctx: Any, word: Any) -> Any:
        return signature(u16, u32), generate

    typer.__name__ = typer.__qualname__ = name
    return intrinsic(typer)


@intrinsic
def shared_address(typingctx: Any, array: Any) -> Any:
    """Where a shared array lies in the shared window, as ldmatrix and cp.async want it."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        pointer = context.make_array(sig.args[0])(context, builder, value=values[0]).data
        shared = builder.addrspacecast(pointer, ir.PointerType(ir.IntType(8), addrspace=3))
        return builder.ptrtoint(shared, _I32)

    return signature(u32, array), generate


@cuda.jit(device=True, inline="always")
def fence():
    """Make what the thread has written visible to all CTAs before what it writes next."""
    cuda.threadfence()
