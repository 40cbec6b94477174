"""What a tile of K and V costs the attention kernels, counted without a GPU: python benchmarks/cuda_counts.py [WORD]

Compiles decode and prefill for three shapes and every format of the KV pool, runs one CTA of each on the PTX
interpreter over two lengths of context, and prints what a tile more takes, summed over the CTA's warps, with what comes
once in a segment spread over its tiles. Beside it is the floor: the products and the bytes of K and V. Words choose
kernels by name. Then it prints how many CTAs the planner makes of long contexts of few sequences, on a GPU with 132
multiprocessors.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
from cuda_plan import NUM_CTAS, step_plan

from pagedcore_kernels.cuda.attention.work_lists import Visibility, make_work_lists
from pagedcore_kernels.cuda.build.compiler import compile_ptx
from pagedcore_kernels.cuda.build.variants import attention_name, make_source
from pagedcore_kernels.cuda.shapes import (
    DECODE_ROWS,
    PREFILL_ROWS,
    SEGMENT_SHIFT,
    AttentionShape,
    Format,
    segment_shift,
)
from pagedcore_ptxsim import CLASSES, launch

ARCH = "sm_90"
SHAPES = {"Llama-3-8B": (128, 4, 8), "Qwen2-0.5B": (64, 7, 2), "Gemma-2B": (256, 8, 1)}
"""Head size, query heads of a KV head, and KV heads."""
FORMATS = (Format.BF16, Format.INT8, Format.E4M3)
BLOCK_SHIFT = 4
CONTEXTS = (1 << SEGMENT_SHIFT, 3 << SEGMENT_SHIFT)
COLUMNS = ("mma", "ldmatrix", "cp.async", "global loads", "shared loads", "shared stores", "shuffles", "barriers",
           "integer", "float", "other")


@dataclass(frozen=True)
class TileCounts:
    """What one tile takes: instructions by class, shared bytes, wavefronts, conflicts, and sectors of global memory."""

    instructions: dict[str, float]
    shared_bytes: float
    wavefronts: float
    conflicts: float
    sectors: float


def count_launch(ptx: str, family: str, shape: AttentionShape, group: int, shift: int, context: int) -> np.ndarray:
    """Totals of one CTA over a context in segments of ``1 << shift`` tokens.

    Returns [classes, (instructions, bytes, sectors, wavefronts, conflicts)].
    """
    tokens = (DECODE_ROWS if family == "decode" else PREFILL_ROWS) // group
    block = 1 << BLOCK_SHIFT
    scale_bytes = 4 if shape.is_scaled else 0
    key_block = block * (shape.key_size * shape.pool.itemsize + scale_bytes)
    stride = key_block + block * (shape.value_size * shape.pool.itemsize + scale_bytes)
    num_blocks = context // block
    pool = np.zeros(num_blocks * stride, np.uint8)
    query, output = (np.zeros((tokens, group, shape.key_size), np.uint16) for _ in range(2))
    item = [0, 0, 0, (context - 1 >> shift) + 1, -1, 0, 0, 1] if family == "decode" else [0, 0]
    source = make_source(attention_name(family, shape))
    report = launch(ptx, None, 1, source.threads, [
        query, pool, pool[key_block:], np.arange(num_blocks, dtype=np.int32), np.array(item, np.int32),
        np.array([0, tokens, context, 0], np.int32), output, 0, 0, 0, 0, stride, group * shape.key_size * 2,
        shape.key_size * 2, BLOCK_SHIFT, 1, group, 0, 0, shift, 1.0, 0.0,
    ], dynamic_shared_bytes=source.shared_bytes, check_races=False, count=True)
    return np.array([[each.sum() for each in (work.instructions, work.bytes, work.sectors, work.wavefronts,
                                              work.conflicts)] for work in map(report.work.__getitem__, CLASSES)])


def count_tile(ptx: str, family: str, shape: AttentionShape, group: int, kv_heads: int) -> TileCounts:
    """What a tile in the middle of a context takes."""
    shift = segment_shift(kv_heads)
    short, long = (count_launch(ptx, family, shape, group, shift, context) for context in CONTEXTS)
    counts = (long - short) / ((CONTEXTS[1] - CONTEXTS[0]) // shape.tile)
    is_shared = counts[:, 3] > 0
    return TileCounts(dict(zip(CLASSES, counts[:, 0].tolist(), strict=True)), *(
        float(each) for each in (counts[is_shared, 1].sum(), *counts[:, 3:].sum(0), counts[:, 2].sum())))


def floor(family: str, shape: AttentionShape) -> tuple[int, int]:
    """The fewest tensor-core instructions of a tile, and the bytes of its K and V."""
    rows = DECODE_ROWS if family == "decode" else PREFILL_ROWS
    products = rows // 16 * shape.tile * (shape.key_size + shape.value_size) // 128
    scales = 8 if shape.is_scaled else 0
    return products, shape.tile * ((shape.key_size + shape.value_size) * shape.pool.itemsize + scales)


def print_tiles(words: list[str]) -> None:
    """Count every kernel whose name has one of the words."""
    print("| of a tile | instructions | " + " | ".join(COLUMNS) + " | mma at least | shared bytes | wavefronts | "
          "conflicts | global bytes | K and V |")
    print("|---" * (len(COLUMNS) + 8) + "|")
    for model, (size, group, kv_heads) in SHAPES.items():
        for pool in FORMATS:
            shape = AttentionShape(size, size, Format.BF16, pool)
            for family in ("decode", "prefill"):
                name = attention_name(family, shape)
                if words and not any(word in name for word in words):
                    continue
                tile = count_tile(compile_ptx(make_source(name), ARCH), family, shape, group, kv_heads)
                products, kv_bytes = floor(family, shape)
                cells = [sum(tile.instructions.values()), *(tile.instructions[each] for each in COLUMNS), products,
                         tile.shared_bytes, tile.wavefronts, tile.conflicts, 32 * tile.sectors, kv_bytes]
                print(f"| {name}, {model} | " + " | ".join(f"{cell:,.0f}" for cell in cells) + " |", flush=True)


def print_ctas() -> None:
    """How contexts of one to eight sequences become CTAs."""
    print("\n| sequences x KV heads x tokens | CTAs | a multiprocessor | tokens of the longest | partials of a head |")
    print("|---|---|---|---|---|")
    for sequences, kv_heads, tokens in ((1, 8, 2048), (1, 8, 8192), (1, 8, 32768), (1, 8, 131072), (1, 2, 2048),
                                        (1, 2, 8192), (1, 2, 32768), (1, 1, 8192), (4, 2, 4096), (8, 8, 4096)):
        plan = step_plan([1] * sequences, [tokens - 1] * sequences)
        decode = make_work_lists(plan, Visibility(4), kv_heads, NUM_CTAS).decode
        ctas = len(decode) * kv_heads
        longest = int((decode[:, 3] - decode[:, 2]).max()) << segment_shift(kv_heads)
        print(f"| {sequences} x {kv_heads} x {tokens:,} | {ctas} | {ctas / NUM_CTAS * 2:.2f} | {longest:,} | "
              f"{int(decode[:, 6].max())} |")


if __name__ == "__main__":
    print_tiles(sys.argv[1:])
    print_ctas()
