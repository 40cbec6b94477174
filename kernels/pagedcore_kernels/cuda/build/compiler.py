"""From a kernel's name to a cubin: Numba compiles to PTX, nvJitLink links. Neither needs a GPU or its driver.

Owns the compile options and the reading of the resource report. PTX never goes to a driver, which may be older than
the NVVM that wrote it; a cubin of one CUDA major version runs on every driver of that version.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from pagedcore_kernels.cuda.build.toolchain import explain_link_failure, require_compiler
from pagedcore_kernels.cuda.build.variants import Source, make_source
from pagedcore_kernels.errors import InternalError, InvalidConfig

FAST_MATH: Final = False
"""Without fast math: the kernels name the approximations and fusions they want, and nothing else may move a rounding.
"""


@dataclass(frozen=True)
class Resources:
    """What one thread of a compiled kernel takes, as the assembler reports it."""

    registers: int
    stack_bytes: int
    spill_bytes: int


def parse_arch(arch: str) -> tuple[int, int]:
    """Turn ``"sm_90"`` into ``(9, 0)``.

    Raises:
        InvalidConfig: it is no such name, or older than the kernels allow.
    """
    match = re.fullmatch(r"sm_(\d+)(\d)", arch)
    if match is None or (int(match[1]), int(match[2])) < (8, 0):
        raise InvalidConfig(f"arch: got {arch!r}, allowed is sm_80 or newer, such as sm_90.")
    return int(match[1]), int(match[2])


def compile_ptx(source: Source, arch: str) -> str:
    """Compile a kernel for an architecture and return its PTX.

    Raises:
        MissingDependency: a part of the compiler is not installed.
    """
    require_compiler()
    from numba import cuda, types

    letters = {"Q": types.uint64, "I": types.uint32, "i": types.int32, "f": types.float32}
    ptx, _ = cuda.compile(
        source.function, tuple(letters[letter] for letter in source.parameters), device=False, abi="numba",
        cc=parse_arch(arch), fastmath=FAST_MATH, launch_bounds=(source.threads, source.ctas_per_sm),
    )
    return str(ptx)


def entry_of(ptx: str) -> str:
    """The name under which the driver finds the kernel."""
    found = re.search(r"\.entry\s+([\w$]+)", ptx)
    if found is None:
        raise InternalError("compiled kernel: the PTX has no entry.")
    return found[1]


def link(ptx: str, arch: str) -> tuple[bytes, Resources]:
    """Link PTX to a cubin.

    Raises:
        MissingDependency: nvJitLink is not installed.
        InvalidConfig: nvJitLink refuses the PTX; the message says what to install if that is the reason.
    """
    require_compiler()
    from cuda.bindings import nvjitlink

    handle = nvjitlink.create(3, [f"-arch={arch}", "-verbose", "-O3"])
    try:
        text = ptx.encode() + b"\0"
        try:
            nvjitlink.add_data(handle, nvjitlink.InputType.PTX, text, len(text), "kernel")
            nvjitlink.complete(handle)
        except nvjitlink.nvJitLinkError:
            log = bytearray(nvjitlink.get_error_log_size(handle))
            nvjitlink.get_error_log(handle, log)
            raise explain_link_failure(log.decode(errors="replace"), ptx) from None
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
        log = bytearray(nvjitlink.get_info_log_size(handle))
        nvjitlink.get_info_log(handle, log)
    finally:
        nvjitlink.destroy(handle)
    return bytes(cubin), _resources(log.decode(errors="replace"))


def compile_kernel(name: str, arch: str) -> tuple[Source, str, bytes, Resources]:
    """Make, compile and link a named kernel; returns what it was made from, its entry, the cubin and the resources."""
    source = make_source(name)
    ptx = compile_ptx(source, arch)
    cubin, resources = link(ptx, arch)
    return source, entry_of(ptx), cubin, resources


def _resources(log: str) -> Resources:
    def number(pattern: str) -> int:
        found = re.search(pattern, log)
        return int(found[1]) if found else 0

    registers = number(r"Used (\d+) registers")
    if not registers:
        raise InternalError("linked kernel: nvJitLink's report names no registers.")
    return Resources(
        registers, number(r"(\d+) bytes stack frame"),
        number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
    )
