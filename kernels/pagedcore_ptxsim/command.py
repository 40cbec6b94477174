"""The command: list the kernels of a PTX file, run one and report faults, or test its checks with mutants.

Exit status: 0 if nothing was found, 1 for a fault, an unsupported instruction or an unnoticed mutant, 2 for a file,
a kernel name or arguments that cannot be run.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from pagedcore_ptxsim.errors import LaunchError, PtxError, PtxFault, UnsupportedPtx
from pagedcore_ptxsim.formats import bf16_to_f32, f32_to_bf16
from pagedcore_ptxsim.launch import Argument, Report, launch, unsupported
from pagedcore_ptxsim.mutants import mutants
from pagedcore_ptxsim.parser import parse
from pagedcore_ptxsim.scalar_types import Array, numpy_type
from pagedcore_ptxsim.syntax import Kernel

EPILOG = """\
A kernel argument is a number, or an array TYPE[SHAPE]=CONTENT:
  TYPE     u8 s8 u16 s16 f16 bf16 u32 s32 f32 u64 s64 or f64
  SHAPE    sizes with commas: f32[5,20]
  CONTENT  numbers with commas, repeated to fill the array (default 0); range; random; or @FILE, raw bytes

Examples:
  python -m pagedcore_ptxsim kernels.ptx
  python -m pagedcore_ptxsim kernels.ptx softmax --grid 5 --block 32 f32[5,20]=random f32[5,20] 20
  python -m pagedcore_ptxsim kernels.ptx softmax --grid 5 --block 32 --mutants f32[5,20]=random f32[5,20] 20

Exit status: 0 nothing found; 1 a fault, an unsupported instruction or an unnoticed mutant; 2 wrong input.
"""
MAX_ELEMENTS = 2**27
"""Elements of an array argument, a gigabyte of float64; a typing error does not exhaust the memory."""
_ARRAY = re.compile(r"([usbf]+\d+)\[(\d+(?:,\d+)*)\](?:=(.*))?")
_TYPES = ("u8", "s8", "u16", "s16", "f16", "bf16", "u32", "s32", "f32", "u64", "s64", "f64")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = _parser().parse_intermixed_args(arguments)
    try:
        text = options.file.read_text(encoding="utf-8")
        if options.kernel is None:
            return _list_kernels(text)
        return _run(text, options)
    except PtxFault as fault:
        print(f"{type(fault).__name__}: {fault}")
        return 1
    except UnsupportedPtx as error:
        print(f"UnsupportedPtx: {error}")
        return 1
    except (PtxError, OSError, UnicodeDecodeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m pagedcore_ptxsim", description="Run the kernels of a PTX file on the CPU and report their faults.",
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("file", type=Path, help="a PTX file")
    add("kernel", nargs="?", help="the kernel to run, or a part of its name; without it the kernels are listed")
    add("args", nargs="*", metavar="ARG", help="one argument per kernel parameter, see below")
    add("--grid", type=_sizes, default=(1,), metavar="X[,Y[,Z]]", help="blocks (default 1)")
    add("--block", type=_sizes, default=(32,), metavar="X[,Y[,Z]]", help="threads of a block (default 32)")
    add("--shared", type=int, default=0, metavar="BYTES", help="dynamic shared memory (default 0)")
    add("--max-steps", type=int, default=20_000_000, metavar="N", help="instructions until a loop counts as endless")
    add("--no-races", action="store_true", help="do not look for data races")
    add("--count", action="store_true", help="also count instructions, sectors and bank conflicts")
    add("--mutants", action="store_true", help="also run every mutant and list those that nothing notices")
    return parser


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))


def _list_kernels(text: str) -> int:
    missing = []
    for kernel in parse(text).kernels.values():
        print(_signature(kernel))
        found = unsupported(text, kernel.name)
        missing += found
        print(*(f"  unsupported: {each}" for each in found), sep="\n", end="\n" if found else "")
    return 1 if missing else 0


def _signature(kernel: Kernel) -> str:
    parameters = ", ".join(f".{each.type} {each.name}" + (f"[{each.count}]" if each.count > 1 else "")
                           for each in kernel.parameters)
    limit = f", blocks of up to {kernel.max_block} threads" if kernel.max_block else ""
    if kernel.required_block:
        limit = f", blocks of {kernel.required_block} threads"
    return f"{kernel.name}({parameters}): {len(kernel.code)} instructions{limit}"


def _run(text: str, options: argparse.Namespace) -> int:
    def once(ptx: str, max_steps: int) -> tuple[Report, list[Argument]]:
        args = [parse_argument(each) for each in options.args]
        report = launch(ptx, options.kernel, options.grid, options.block, args, dynamic_shared_bytes=options.shared,
                        check_races=not options.no_races, max_steps=max_steps, count=options.count)
        return report, args

    report, args = once(text, options.max_steps)
    _print_report(report, text, options.args, args)
    if not options.mutants:
        return 0
    limit = 10 * report.instructions + 1000  # a mutant may loop for ever
    return _try_mutants(text, lambda ptx: _noticed(lambda: once(ptx, limit)[1], args))


def _print_report(report: Report, text: str, given: Sequence[str], args: Sequence[Argument]) -> None:
    print(f"{report.kernel}: blocks: {report.blocks}, instructions issued: {report.instructions}, "
          f"barriers: {report.barriers}, code that ran: {report.coverage:.0%}")
    lines = text.splitlines()
    for line in report.unexecuted:
        print(f"  never ran: line {line}: {lines[line - 1].strip()}")
    if report.work:
        _print_work(report, lines)
    for i, (written, value) in enumerate(zip(given, args, strict=True)):
        if isinstance(value, np.ndarray):
            values = bf16_to_f32(value) if written.startswith("bf16") else value
            shown = np.array2string(values.reshape(-1), threshold=16, max_line_width=120)
            print(f"  argument {i}, {written.partition('=')[0]}: {shown}")


def _print_work(report: Report, lines: Sequence[str]) -> None:
    print("  class          instructions       bytes     sectors  wavefronts   conflicts")
    for name, work in report.work.items():
        if work.instructions.any():
            numbers = (work.instructions, work.bytes, work.sectors, work.wavefronts, work.conflicts)
            print(f"  {name:<15}" + "".join(f"{int(each.sum()):>12}" for each in numbers))
    for line, count in report.conflict_lines.items():
        print(f"  bank conflicts: {count}, line {line}: {lines[line - 1].strip()}")


def _try_mutants(text: str, noticed: Callable[[str], str]) -> int:
    made = mutants(text)
    verdicts = [noticed(mutant.ptx) for mutant in made]
    for mutant, verdict in zip(made, verdicts, strict=True):
        print(f"  {verdict or 'UNNOTICED':<17} {mutant}")
    print(f"mutants: {len(made)}, unnoticed: {verdicts.count('')}")
    return 1 if "" in verdicts else 0


def _noticed(run: Callable[[], list[Argument]], wanted: list[Argument]) -> str:
    """How a mutant was noticed, "" if it was not."""
    try:
        args = run()
    except PtxError as error:
        return type(error).__name__
    same = (np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(args, wanted, strict=True))
    return "" if all(same) else "different result"


def parse_argument(text: str) -> Argument:
    """Return the number or the array that an argument of the command stands for. Raises ``LaunchError``."""
    if match := _ARRAY.fullmatch(text):
        kind, shape, content = match.groups()
        if kind not in _TYPES:
            raise LaunchError(f"{text}: type {kind} is not known; the types are {', '.join(_TYPES)}")
        sizes = tuple(int(size) for size in shape.split(","))
        if math.prod(sizes) > MAX_ELEMENTS:
            raise LaunchError(f"{text}: {math.prod(sizes)} elements; at most {MAX_ELEMENTS} are allowed")
        return _content(kind, content or "0", math.prod(sizes), text).reshape(sizes)
    return _number(text, text)


def _content(kind: str, content: str, count: int, text: str) -> Array:
    dtype = numpy_type("f32" if kind == "bf16" else kind)
    if content.startswith("@"):
        values = np.fromfile(content[1:], numpy_type(kind))
        if values.size != count:
            raise LaunchError(f"{text}: the file has {values.size} elements")
        return values
    if content == "range":
        values = np.arange(count).astype(dtype)
    elif content == "random":
        rng = np.random.default_rng(zlib.crc32(text.encode()))
        values = (rng.standard_normal(count) if dtype.kind == "f" else rng.integers(0, 100, count)).astype(dtype)
    else:
        values = np.resize(_numbers(content, dtype, text), count)
    return f32_to_bf16(values) if kind == "bf16" else values


def _numbers(content: str, dtype: np.dtype[Any], text: str) -> Array:
    numbers = [_number(each, text) for each in content.split(",")]
    if dtype.kind != "f" and not all(isinstance(each, int) for each in numbers):
        raise LaunchError(f"{text}: an array of integers takes integers")
    try:
        return np.array(numbers, dtype)
    except OverflowError as error:
        raise LaunchError(f"{text}: {error}") from None


def _number(number: str, text: str) -> int | float:
    for convert in (lambda: int(number, 0), lambda: float(number)):
        with suppress(ValueError):
            return convert()
    raise LaunchError(f"{text}: write a number or TYPE[SHAPE]=CONTENT, such as 20 or f32[5,20]=random")
