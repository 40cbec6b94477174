"""The kernels that exist: names, parameters and how to make each one. Imports the compiler only to make one.

Owns the mapping from a name such as ``decode-bf16-e4m3-128-128`` to a kernel, in both directions, and the order of
each family's parameters. Read ``images.py`` for what a name becomes, ``library.py`` for who asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pagedcore.errors import InvalidConfig
from pagedcore_kernels.cuda.shapes import THREADS, AttentionShape, Format

ATTENTION_PARAMETERS: Final = "QQQQQQQQQQQQQIIIiiiiiff"
"""Letters of ``struct``: 12 addresses, the bytes from block to block, and the sizes that ``device/decode.py`` names."""
WRITE_PARAMETERS: Final = "QQQQQQQIIIIIii"
COPY_PARAMETERS: Final = "QQQQI"

HEAD_SIZES: Final = (64, 80, 96, 128, 256)
"""Head sizes that are built ahead and tested; others are compiled when a model needs them."""


@dataclass(frozen=True)
class Source:
    """A kernel before compilation: the Python function, its parameters and what a launch of it needs."""

    function: Callable[..., None]
    parameters: str
    threads: int
    shared_bytes: int
    ctas_per_sm: int
    """At least so many are to run on one multiprocessor; bounds the registers."""


def attention_name(family: str, shape: AttentionShape) -> str:
    """The name of ``decode`` or ``prefill`` for one shape."""
    return f"{family}-{shape.query.value}-{shape.pool.value}-{shape.key_size}-{shape.value_size}"


def write_name(source: Format, pool: Format, key_size: int, value_size: int) -> str:
    """The name of the kernel that stores K and V of these formats and head sizes."""
    return f"write-{source.value}-{pool.value}-{key_size}-{value_size}"


COPY_NAME: Final = "copy"


def make_source(name: str) -> Source:
    """Make the kernel of a name.

    Raises:
        InvalidConfig: no kernel has this name.
    """
    family, *details = name.split("-")
    if family not in _MAKERS:
        raise InvalidConfig(f"kernel: {name!r} names none; families are {', '.join(_MAKERS)}.")
    try:
        return _MAKERS[family](details)
    except (ValueError, TypeError):
        raise InvalidConfig(f"kernel: {name!r} is not complete; a complete one is decode-bf16-bf16-128-128.") from None


def parameters_of(name: str) -> str:
    """The parameters of a named kernel, as letters of ``struct``."""
    return _PARAMETERS[name.partition("-")[0]]


def shipped_names(capability: tuple[int, int]) -> list[str]:
    """Every kernel that ``pagedcore kernels build`` makes for cards of a compute capability, in a stable order."""
    names = [COPY_NAME]
    for query in (Format.BF16, Format.F16):
        for pool in (query, Format.E4M3, Format.INT8):
            for size in HEAD_SIZES:
                if supports(pool, size, size) and capability >= needed_capability(pool):
                    shape = AttentionShape(size, size, query, pool)
                    names += [attention_name("decode", shape), attention_name("prefill", shape)]
                    names.append(write_name(query, pool, size, size))
    return names


def supports(pool: Format, key_size: int, value_size: int) -> bool:
    """Whether the kernels can be made for these head sizes."""
    multiple = 32 // pool.itemsize
    return all(size % multiple == 0 and 16 <= size <= 256 for size in (key_size, value_size))


def needed_capability(pool: Format) -> tuple[int, int]:
    """The first compute capability with the instructions for a pool's format."""
    return (8, 9) if pool is Format.E4M3 else (8, 0)


def _attention_shape(details: Sequence[str]) -> AttentionShape:
    query, pool, key_size, value_size = details
    return AttentionShape(int(key_size), int(value_size), Format(query), Format(pool))


def _make_decode(details: Sequence[str]) -> Source:
    from pagedcore_kernels.cuda.device.decode import decode_kernel

    shape = _attention_shape(details)
    return Source(decode_kernel(shape), ATTENTION_PARAMETERS, THREADS, shape.decode_shared_bytes, 2)


def _make_prefill(details: Sequence[str]) -> Source:
    from pagedcore_kernels.cuda.device.prefill import prefill_kernel

    shape = _attention_shape(details)
    return Source(prefill_kernel(shape), ATTENTION_PARAMETERS, THREADS, shape.prefill_shared_bytes, 2)


def _make_write(details: Sequence[str]) -> Source:
    from pagedcore_kernels.cuda.device.write_kv import WRITE_THREADS, write_kernel

    source, pool, key_size, value_size = details
    kernel = write_kernel(Format(source), Format(pool), int(key_size), int(value_size))
    return Source(kernel, WRITE_PARAMETERS, WRITE_THREADS, 0, 1)


def _make_copy(details: Sequence[str]) -> Source:
    from pagedcore_kernels.cuda.device.copy_blocks import COPY_THREADS, copy_blocks

    () = details
    return Source(copy_blocks, COPY_PARAMETERS, COPY_THREADS, 0, 1)


_MAKERS: Final[dict[str, Callable[[Sequence[str]], Source]]] = {
    "decode": _make_decode, "prefill": _make_prefill, "write": _make_write, "copy": _make_copy,
}
_PARAMETERS: Final = {
    "decode": ATTENTION_PARAMETERS, "prefill": ATTENTION_PARAMETERS, "write": WRITE_PARAMETERS, "copy": COPY_PARAMETERS,
}
