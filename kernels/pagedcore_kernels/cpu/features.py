"""Which instruction sets kernels may be made of."""

from __future__ import annotations

from functools import cache

import llvmlite.binding
from numba.core import config


def has_instructions(*names: str) -> bool:
    """Whether the processor has these instruction sets, by LLVM's names, and Numba compiles for them.

    Why both: with ``NUMBA_CPU_FEATURES`` set, LLVM knows the instructions that are named there and no others.
    """
    host = _host()
    if config.CPU_FEATURES is None:
        return all(host.get(name, False) for name in names)
    given = {part.strip() for part in config.CPU_FEATURES.split(",")}
    return all(host.get(name, False) and f"+{name}" in given for name in names)


def has_wide_vectors() -> bool:
    """Whether vectors of 512 bits are there."""
    return has_instructions("avx512f")


def has_fused_vectors() -> bool:
    """Whether an x86 processor multiplies and adds vectors of 256 bits or more in one instruction."""
    return has_wide_vectors() or has_instructions("avx2", "fma")


def has_fast_pairs() -> bool:
    """Whether products of pairs of bfloat16 take vectors less time than those of float32.

    Why by name: on a Xeon attention took a third longer with them; on Zen 4 and 5 an instruction does twice the work.
    """
    return bool(llvmlite.binding.get_host_cpu_name().startswith("znver")) and has_instructions("avx512bf16")


def has_sums_of_four() -> bool:
    """Whether one instruction adds four products of int8 to an int32, on the widest vectors that are there."""
    return has_instructions("avx512vnni" if has_wide_vectors() else "avxvnni")


def may_stream() -> bool:
    """Whether to store large outputs past the caches.

    Why there: on a Xeon with matrix units, a store to a line that is not in a cache took 25 to 45 ns of a product's
    time, up to a quarter of all. On processors of other kinds it was not measured.
    """
    return has_instructions("amx-tile")


@cache
def _host() -> dict[str, bool]:
    """Ask LLVM once: it looks at the processor anew, and a model of many layers asks hundreds of times."""
    return dict(llvmlite.binding.get_host_cpu_features())
