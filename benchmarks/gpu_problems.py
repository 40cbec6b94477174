"""One step's attention as buffers on a GPU: the batch, its work lists and the arguments of the launches.

The same planner, formats and parameter order as ``pagedcore_kernels.cuda.attention.backend``, without torch on the
GPU, and with the knobs that measurements turn. Read ``gpu_stages.py`` for who does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda_plan import BLOCK, step_plan

from pagedcore_kernels.cuda.attention.work_lists import Visibility, WorkLists, make_work_lists
from pagedcore_kernels.cuda.build.variants import attention_name
from pagedcore_kernels.cuda.shapes import LOG2_E, AttentionShape, Format, partial_bytes, segment_shift

CTAS_PER_SM = 3
"""What registers and shared memory of the decode kernel of heads of 128 allow on an H100 or H200."""
_CHUNK = 2**26
_BF16 = 2


@dataclass(frozen=True)
class Layer:
    """One attention layer in bfloat16."""

    group: int = 4
    kv_heads: int = 8
    head_size: int = 128

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.group * self.kv_heads

    @property
    def block_bytes(self) -> int:
        """K and V of one block of this layer alone."""
        return 2 * self.kv_heads * BLOCK * self.head_size * _BF16

    def kernel(self, family: str) -> str:
        """The name of ``decode`` or ``prefill`` for this layer."""
        return attention_name(family, AttentionShape(self.head_size, self.head_size, Format.BF16, Format.BF16))


class Problem:
    """A batch of rows of (tokens, positions before them) over a pool of random numbers with scattered blocks.

    Args:
        gpu: where it goes.
        layer: its shape.
        rows: of the batch.
        block_stride: bytes from a block to the next; by default this layer's alone.
        num_ctas: CTAs that run at once, as the planner assumes.
    """

    def __init__(
        self, gpu: Any, layer: Layer, rows: Sequence[tuple[int, int]], *, block_stride: int = 0, num_ctas: int = 0
    ) -> None:
        self.gpu, self.layer, self.rows = gpu, layer, list(rows)
        self.block_stride = block_stride or layer.block_bytes
        self._plan = step_plan([n for n, _ in rows], [past for _, past in rows])
        needed = -(-self._plan.kv_lens // BLOCK)
        tables = np.full(self._plan.block_tables.shape, 2**30, np.int32)
        ids = np.random.default_rng(3).permutation(int(needed.sum())).astype(np.int32)
        for row, (end, count) in enumerate(zip(np.cumsum(needed).tolist(), needed.tolist(), strict=True)):
            tables[row, :count] = ids[end - count : end]
        described = np.stack([self._plan.query_start[:-1], self._plan.query_lens, self._plan.kv_lens,
                              np.arange(len(rows)) * tables.shape[1]], axis=1).astype(np.int32)
        self.num_blocks, self.num_tokens = int(needed.sum()), int(self._plan.query_lens.sum())
        self.pool = random_bf16(gpu, self.num_blocks * self.block_stride)
        self._tables, self._described = gpu.upload(tables), gpu.upload(described)
        self._query = random_bf16(gpu, self.output_bytes)
        self.cut(num_ctas)

    @property
    def output_bytes(self) -> int:
        """Of the result, and of the query."""
        return self.num_tokens * self.layer.heads * self.layer.head_size * _BF16

    @property
    def kv_bytes(self) -> int:
        """K and V of every row's context, which a decode step reads once."""
        return int(self._plan.kv_lens.sum()) * 2 * self.layer.kv_heads * self.layer.head_size * _BF16

    @property
    def flops(self) -> int:
        """Of both products over the keys that each query sees."""
        return sum(4 * self.layer.heads * self.layer.head_size * (n * past + n * (n + 1) // 2) for n, past in self.rows)

    def cut(self, num_ctas: int = 0, shuffle_seed: int | None = None) -> WorkLists:
        """Cut the work again, for so many CTAs; with a seed the decode items are in random order."""
        target = num_ctas or self.gpu.num_sms * CTAS_PER_SM
        lists = make_work_lists(self._plan, Visibility(self.layer.group), self.layer.kv_heads, target)
        decode: npt.NDArray[np.int32] = lists.decode
        if shuffle_seed is not None:
            decode = np.random.default_rng(shuffle_seed).permutation(decode)
        self.lists = lists
        slots = max(1, lists.num_partials * self.layer.kv_heads)
        self.partials = self.gpu.alloc(slots * partial_bytes(self.layer.head_size))
        self.counters = self.gpu.upload(np.zeros(slots, np.int32))
        self._items = {"decode": self.gpu.upload(decode), "prefill": self.gpu.upload(lists.prefill)}
        self._counts = {"decode": len(decode), "prefill": len(lists.prefill)}
        return lists

    def runner(self, output: Any) -> Callable[[], None]:
        """What launches this step's attention into a buffer."""
        layer = self.layer
        families = [family for family in ("prefill", "decode") if self._counts[family]]
        for family in families:
            self.gpu.prepare(layer.kernel(family))
        values = self.pool.at(layer.block_bytes // 2)
        row = layer.head_size * _BF16
        launches = [
            (layer.kernel(family), self._counts[family] * layer.kv_heads, (
                self._query, self.pool, values, self._tables, self._items[family], self._described, output,
                self.partials, self.counters, None, None, self.block_stride, layer.heads * row, row,
                BLOCK.bit_length() - 1, layer.kv_heads, layer.group, 0, 0,
                segment_shift(layer.kv_heads), layer.head_size**-0.5 * LOG2_E, 0.0,
            )) for family in families
        ]

        def run() -> None:
            for launch in launches:
                self.gpu.launch(*launch)

        return run


def random_bf16(gpu: Any, nbytes: int) -> Any:
    """A buffer of normally distributed bfloat16; a large one repeats 64 MiB of them."""
    numbers = np.random.default_rng(7).standard_normal(min(nbytes, _CHUNK) // _BF16, np.float32)
    chunk = gpu.upload((numbers.view(np.uint32) >> 16).astype(np.uint16))
    if nbytes <= _CHUNK:
        return chunk
    buffer = gpu.alloc(nbytes)
    for start in range(0, nbytes, _CHUNK):
        gpu.copy(buffer.at(start), chunk, min(_CHUNK, nbytes - start))
    return buffer
