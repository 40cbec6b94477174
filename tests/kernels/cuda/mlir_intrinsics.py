"""``device/intrinsics.py`` for numba-cuda-mlir, numba-cuda's successor: all that a change of compiler would replace.

Owns what is private of that package and used here. Run ``pytest -p kernels.cuda.mlir_intrinsics`` and the kernels are
compiled by it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any

from numba_cuda_mlir import cuda as cuda
from numba_cuda_mlir import tools, types
from numba_cuda_mlir._mlir import ir
from numba_cuda_mlir._mlir.dialects import arith, llvm, memref
from numba_cuda_mlir.extending import intrinsic

from pagedcore_kernels.cuda.build import compiler

u16, u32, u64, i32, f32 = types.uint16, types.uint32, types.uint64, types.int32, types.float32
_LETTERS = {u16: "h", u32: "r", i32: "r", u64: "l", f32: "f"}
_BITS = {u16: 16, u32: 32, i32: 32, u64: 64}


def _lowered(kind: Any) -> Any:
    """A type of Numba as MLIR has it."""
    return ir.F32Type.get() if kind is f32 else ir.IntegerType.get_signless(_BITS[kind])


def _intrinsic(name: str, count: int, typer: Callable[..., Any]) -> Any:
    names = ["typingctx", *(f"operand{i}" for i in range(count))]
    parameters = [Parameter(one, Parameter.POSITIONAL_OR_KEYWORD) for one in names]
    typer.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    typer.__name__ = typer.__qualname__ = name
    return intrinsic(typer)


def _made(name: str, result: Any, kinds: Sequence[Any], make: Callable[..., Any]) -> Any:
    """An intrinsic of operands of these types; ``make`` returns its value in MLIR."""

    def lower(builder: Any, target: Any, args: Any, kwargs: Any) -> None:
        values = [builder.mlir_convert(builder.load_var(one), _lowered(kind))
                  for one, kind in zip(args, kinds, strict=True)]
        builder.store_var(target, make(*values))

    return _intrinsic(name, len(kinds), lambda typingctx, *given: (result(*kinds), lower))


def instruction(name: str, text: str, outs: Sequence[Any], ins: Sequence[Any], *, ordered: bool = False) -> Any:
    """As there."""
    constraints = ["=" + _LETTERS[one] for one in outs] + [_LETTERS[one] for one in ins]
    constraints += ["~{memory}"] if ordered else []

    def make(*values: Any) -> Any:
        kinds = [_lowered(one) for one in outs]
        kind = None if not outs else kinds[0] if len(outs) == 1 else llvm.StructType.get_literal(kinds)
        made = llvm.inline_asm(
            kind, list(values), text, ",".join(constraints), has_side_effects=ordered or ".sync" in text)
        if len(outs) < 2:
            return made if outs else None
        return tuple(llvm.extractvalue(one, made, [place]) for place, one in enumerate(kinds))

    result = types.void if not outs else outs[0] if len(outs) == 1 else types.UniTuple(outs[0], len(outs))
    return _made(name, result, ins, make)


def bitcast(name: str, source: Any, target: Any) -> Any:
    """As there."""
    return _made(name, target, [source], lambda value: arith.bitcast(_lowered(target), value))


def half(name: str, shift: int) -> Any:
    """As there."""
    return _made(name, u16, [u32], lambda word: arith.trunci(
        _lowered(u16), arith.shrui(word, arith.constant(_lowered(u32), shift))))


def _select(typingctx: Any, condition: Any, first: Any, second: Any) -> Any:
    def lower(builder: Any, target: Any, args: Any, kwargs: Any) -> None:
        flag = builder.mlir_convert(builder.load_var(args[0]), ir.IntegerType.get_signless(1))
        values = [builder.mlir_convert(builder.load_var(one), _lowered(first)) for one in args[1:]]
        builder.store_var(target, arith.select(flag, *values))

    return first(types.boolean, first, first), lower


select = intrinsic(_select)


def _shared_address(typingctx: Any, array: Any) -> Any:
    def lower(builder: Any, target: Any, args: Any, kwargs: Any) -> None:
        address = arith.index_cast(_lowered(u64), memref.extract_aligned_pointer_as_index(builder.load_var(args[0])))
        generic = llvm.inttoptr(ir.Type.parse("!llvm.ptr"), address)
        shared = llvm.addrspacecast(ir.Type.parse("!llvm.ptr<3>"), generic)
        builder.store_var(target, llvm.ptrtoint(_lowered(u32), shared))

    return u32(array), lower


shared_address = intrinsic(_shared_address)
fence = instruction("fence", "membar.gl;", [], [], ordered=True)


def compile_ptx(source: Any, arch: str) -> str:
    """``build.compiler.compile_ptx`` by this compiler."""
    letters = {"Q": u64, "I": u32, "i": i32, "f": f32}
    # Why: it asks for the GPU of this machine, which need not have one, also where it is told for which to compile.
    tools._cached_cc = cc = compiler.parse_arch(arch)
    made = cuda.compile(
        source.function, tuple(letters[one] for one in source.parameters), device=False, abi="numba", cc=cc,
        fastmath=compiler.FAST_MATH, launch_bounds=(source.threads, source.ctas_per_sm))
    ptx = made[0] if isinstance(made, tuple) else made
    return ptx.decode() if isinstance(ptx, bytes) else str(ptx)


# Take the place of the compiler; pytest imports plugins before it imports what imports a kernel.
compiler.compile_ptx = compile_ptx
sys.modules["pagedcore_kernels.cuda.device.intrinsics"] = sys.modules[__name__]
