"""Builders of small PTX texts: a kernel around a body, and runners that put values through one instruction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pagedcore_ptxsim import Report, launch

REGISTERS = """
    .reg .pred %p<16>; .reg .b16 %rs<16>; .reg .f16 %h<8>; .reg .b32 %r<64>; .reg .f32 %f<64>;
    .reg .b64 %rd<32>; .reg .f64 %fd<16>;
"""
_REGISTER_OF = {"pred": "%p", 2: "%rs", 4: "%r", 8: "%rd"}


def kernel(body: str, parameters: Sequence[str] = ("u64", "u64"), module: str = "", header: str = "") -> str:
    """A module with one kernel ``k`` whose parameters are ``p0``, ``p1`` ..., around ``body``."""
    listed = ", ".join(f".param .{kind} p{i}" for i, kind in enumerate(parameters))
    return (f".version 8.3\n.target sm_90\n.address_size 64\n{module}\n"
            f".visible .entry k({listed}) {header}\n{{\n{REGISTERS}\n{body}\n    ret;\n}}\n")


def pointers(count: int) -> str:
    """Load the first parameters into %rd1, %rd2 ..., and the thread number into %r1, its 4-byte offset into %rd10."""
    loads = "\n".join(f"    ld.param.u64 %rd{i + 1}, [p{i}];" for i in range(count))
    return loads + "\n    mov.u32 %r1, %tid.x;\n    mul.wide.u32 %rd10, %r1, 4;\n"


def run(body: str, *args: Any, block: int = 32, grid: int = 1, module: str = "", **options: Any) -> Report:
    """Launch a body whose parameters are all addresses, loaded into %rd1 and up."""
    text = kernel(pointers(len(args)) + body, ["u64"] * len(args), module)
    return launch(text, "k", grid, block, list(args), **options)


def apply(instruction: str, result: np.dtype[Any] | type, *values: np.ndarray, target: str = "") -> np.ndarray:
    """Put arrays through one instruction, a thread per element: ``apply("add.s32 {d}, {0}, {1};", np.int32, x, y)``."""
    count = max(len(value) for value in values)
    block = min(-(-count // 32) * 32, 256)
    total = -(-count // block) * block
    padded = [np.concatenate([value, np.repeat(value[-1:], total - len(value))]) for value in values]
    out = np.zeros(total, result)
    body, names = [f"    mov.u32 %r2, %ctaid.x; mad.lo.u32 %r1, %r2, {block}, %r1;"], []
    for i, value in enumerate([*padded, out]):
        size = value.dtype.itemsize
        register = f"{_REGISTER_OF[max(size, 2)]}{i + 8}"
        names.append(register)
        body.append(f"    mad.wide.u32 %rd{20 + i}, %r1, {size}, %rd{i + 1};")
        if i < len(padded):
            body.append(f"    ld.global.b{8 * size} {register}, [%rd{20 + i}];")
    body.append("    " + instruction.format(*names[:-1], d=target or names[-1]))
    if target.startswith("%p"):
        body.append(f"    selp.u32 {names[-1]}, 1, 0, {target};")
    body.append(f"    st.global.b{8 * out.dtype.itemsize} [%rd{20 + len(padded)}], {names[-1]};")
    run("\n".join(body), *padded, out, block=block, grid=total // block)
    return out[:count]
