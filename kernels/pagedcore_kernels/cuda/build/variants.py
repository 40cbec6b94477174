"""The kernels that exist: names, parameters and how to make each one. Imports the compiler only to make one.

Owns the mapping from a name such as ``decode-bf16-e4m3-128-128`` to a kernel, in both directions, and the order of
each family's parameters. Read ``images.py`` for what a name becomes, ``library.py`` for who asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from pagedcore_kernels.cuda.shapes import (
    HALF_PREFILL,
    NORM_VECTORS,
    PREFILL_ROWS,
    ROW_THREADS,
    SAMPLE_SHARED_BYTES,
    SAMPLE_THREADS,
    THREADS,
    AttentionShape,
    Format,
    most_shared_bytes,
)
from pagedcore_kernels.errors import InvalidConfig

ATTENTION_PARAMETERS: Final = "QQQQQQQQQQQQIIiiiiiiff"
"""Letters of ``struct``: 11 addresses, the bytes from block to block, and the sizes that ``device/decode.py`` names."""
ROTATE_PARAMETERS: Final = "QQQQQQQQQQQIIIIIIIIIIIIIIIf"
"""10 addresses, the bytes from block to block, and the sizes that ``device/rotate.py`` names."""
NORM_PARAMETERS: Final = "QQQQiif"
GATED_PARAMETERS: Final = "QQII"
QUANTIZE_PARAMETERS: Final = "QQQif"
SAMPLE_PARAMETERS: Final = "QQQQi"

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


def prefill_name(shape: AttentionShape, most_shared: int) -> tuple[str, int]:
    """The name of ``prefill`` for a GPU that gives a CTA so much shared memory, and the CTAs of an item."""
    rows = shape.prefill_rows(most_shared)
    return attention_name("prefill" if rows == PREFILL_ROWS else f"prefill{rows}", shape), PREFILL_ROWS // rows


def rotate_name(source: Format, pool: Format, interleaved: bool) -> str:
    """The name of the kernel that turns queries and keys and stores K and V."""
    return f"rotate-{source.value}-{pool.value}-{'interleaved' if interleaved else 'halves'}"


def norm_name(storage: Format, hidden: int) -> str:
    """The name of the smallest RMS norm that holds rows of ``hidden`` elements.

    Raises:
        InvalidConfig: no kernel holds them.
    """
    for vectors in NORM_VECTORS:
        if hidden <= ROW_THREADS * vectors * 8 and hidden % 8 == 0 and hidden > 0:
            return f"norm-{storage.value}-{vectors}"
    most = ROW_THREADS * NORM_VECTORS[-1] * 8
    raise InvalidConfig(f"hidden size: got {hidden}, allowed for CUDA norms are multiples of 8 up to {most}.")


def gated_name(storage: Format, activation: str) -> str:
    """The name of a gated activation, which is one of ``ACTIVATIONS``."""
    return f"gated-{storage.value}-{activation}"


def quantize_name(storage: Format) -> str:
    """The name of the kernel that makes rows of e4m3."""
    return f"quantize-{storage.value}"


SAMPLE_NAME: Final = "sample"
ACTIVATIONS: Final = ("silu", "gelu_tanh")


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
    """Every kernel that ``pagedcore kernels build`` makes for GPUs of a compute capability, in a stable order."""
    names = [SAMPLE_NAME]
    for query in (Format.BF16, Format.F16):
        names += [f"norm-{query.value}-{vectors}" for vectors in NORM_VECTORS]
        names += [gated_name(query, activation) for activation in ACTIVATIONS]
        # Why not with float16: models are loaded in bfloat16, and what else is needed is compiled then.
        if query is Format.BF16 and capability >= needed_capability(Format.E4M3):
            names.append(quantize_name(query))
        for pool in (query, Format.E4M3, Format.INT8) if query is Format.BF16 else (query,):
            if capability >= needed_capability(pool):
                names += [rotate_name(query, pool, interleaved) for interleaved in (False, True)]
            for size in HEAD_SIZES:
                if supports(pool, size, size) and capability >= needed_capability(pool):
                    shape = AttentionShape(size, size, query, pool)
                    names += [attention_name("decode", shape), prefill_name(shape, most_shared_bytes(capability))[0]]
    return names


def supports(pool: Format, key_size: int, value_size: int) -> bool:
    """Whether the kernels can be made for these head sizes."""
    multiple = 32 // pool.itemsize
    return all(size % multiple == 0 and 16 <= size <= 256 for size in (key_size, value_size))


def needed_capability(pool: Format) -> tuple[int, int]:
    """The first compute capability with the instructions for a format of pools, or of rows."""
    return (8, 9) if pool is Format.E4M3 else (8, 0)


def _attention_shape(details: Sequence[str]) -> AttentionShape:
    query, pool, key_size, value_size = details
    return AttentionShape(int(key_size), int(value_size), Format(query), Format(pool))


def _make_decode(details: Sequence[str]) -> Source:
    from pagedcore_kernels.cuda.device.decode import decode_kernel

    shape = _attention_shape(details)
    return Source(decode_kernel(shape), ATTENTION_PARAMETERS, THREADS, shape.decode_shared_bytes, 2)


def _make_prefill(details: Sequence[str], rows: int = PREFILL_ROWS) -> Source:
    from pagedcore_kernels.cuda.device.prefill import prefill_kernel

    shape = _attention_shape(details)
    return Source(prefill_kernel(shape, rows), ATTENTION_PARAMETERS, 2 * rows, shape.prefill_shared_bytes(rows), 2)


def _make_rotate(details: Sequence[str]) -> Source:
    from pagedcore_kernels.cuda.device.rotate import rotate_kernel

    source, pool, pairing = details
    interleaved = ("halves", "interleaved").index(pairing) == 1
    kernel = rotate_kernel(Format(source), Format(pool), interleaved)
    return Source(kernel, ROTATE_PARAMETERS, ROW_THREADS, 0, 3)


def _make_norm(details: Sequence[str]) -> Source:
    from pagedcore_kernels.cuda.device.rms_norm import rms_norm_kernel

    storage, vectors = details
    return Source(rms_norm_kernel(Format(storage), int(vectors)), NORM_PARAMETERS, ROW_THREADS, 0, 4)


def _make_gated(details: Sequence[str]) -> Source:
    from pagedcore_kernels.cuda.device.gated import gated_kernel

    storage, activation = details
    if activation not in ACTIVATIONS:
        raise ValueError(activation)
    return Source(gated_kernel(Format(storage), activation), GATED_PARAMETERS, ROW_THREADS, 0, 4)


def _make_quantize(details: Sequence[str]) -> Source:
    from pagedcore_kernels.cuda.device.quantize import quantize_kernel

    (storage,) = details
    return Source(quantize_kernel(Format(storage)), QUANTIZE_PARAMETERS, ROW_THREADS, 0, 4)


def _make_sample(details: Sequence[str]) -> Source:
    from pagedcore_kernels.cuda.device.sample import sample_kernel

    () = details
    return Source(sample_kernel(), SAMPLE_PARAMETERS, SAMPLE_THREADS, SAMPLE_SHARED_BYTES, 1)


_MAKERS: Final[dict[str, Callable[[Sequence[str]], Source]]] = {
    "decode": _make_decode, "prefill": _make_prefill,
    f"prefill{HALF_PREFILL}": partial(_make_prefill, rows=HALF_PREFILL),
    "rotate": _make_rotate, "norm": _make_norm, "gated": _make_gated, "quantize": _make_quantize,
    "sample": _make_sample,
}
_PARAMETERS: Final = {
    "decode": ATTENTION_PARAMETERS, "prefill": ATTENTION_PARAMETERS, f"prefill{HALF_PREFILL}": ATTENTION_PARAMETERS,
    "rotate": ROTATE_PARAMETERS, "norm": NORM_PARAMETERS, "gated": GATED_PARAMETERS,
    "quantize": QUANTIZE_PARAMETERS, "sample": SAMPLE_PARAMETERS,
}
