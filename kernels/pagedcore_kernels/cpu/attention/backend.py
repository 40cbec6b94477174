"""The default attention of a machine without a GPU: Numba kernels behind the ``AttentionBackend`` contract.

Owns the parameter blocks and the choice of kernel variants; checks everything a kernel will trust. The arithmetic
is in ``attend.py`` and ``write_kv.py``, read them next.
"""

from __future__ import annotations

import torch

from pagedcore_kernels.checks import check_key_value, check_pool, check_query
from pagedcore_kernels.cpu.attention import attend, write_kv
from pagedcore_kernels.cpu.attention.attend_pairs import PairVariant, form_of_attention, pair_attention_kernel
from pagedcore_kernels.cpu.attention.step_words import StepWords
from pagedcore_kernels.cpu.attention.variants import TILE, Variant
from pagedcore_kernels.cpu.runtime.kernel import Kernel, ParameterBlock
from pagedcore_kernels.cpu.runtime.recorded_calls import Resize
from pagedcore_kernels.cpu.simd import LOG2_E
from pagedcore_kernels.errors import InternalError, InvalidConfig
from pagedcore_kernels.interface import RaggedRows
from pagedcore_kernels.layout import KVLayout, ScaledKVLayout
from pagedcore_kernels.step_plan import StepPlan

_DTYPES = (torch.float32, torch.bfloat16)


class NumbaCpuAttention:
    """``AttentionBackend`` for float32 and bfloat16 models, and pools of the same or of int8 in host memory.

    A token's result is the same bits whatever else is in the batch, however its prompt was cut into chunks,
    wherever its blocks lie and however many threads there are; see ``attend.py``.

    Invariant: one thread at a time uses an instance; its parameter blocks serve one call at a time.
    """

    name = "numba-cpu"
    devices = ("cpu",)
    layout_type = KVLayout
    kv_cache_dtypes = ("int8",)
    reads_windows_alone = True
    """Whether tables of a layout with a window may name no blocks before it; see ``ReadsWindowsAlone``."""

    def __init__(self, layout: KVLayout | ScaledKVLayout, pool: torch.Tensor) -> None:
        check_pool(layout, pool)
        if pool.device.type != "cpu":
            raise InvalidConfig(f"KV pool: on {pool.device}, allowed for {self.name} is cpu.")
        self._is_int8 = isinstance(layout, ScaledKVLayout)
        if self._is_int8 and layout.dtype != torch.int8:
            raise InvalidConfig(f"KV dtype: got {layout.dtype}, allowed for {self.name} is int8.")
        dtype = layout.model_dtype if self._is_int8 else layout.dtype
        if dtype not in _DTYPES:
            raise InvalidConfig(
                f"KV dtype: got {dtype}, allowed for {self.name} are float32 and bfloat16. "
                "Load the model with one of them, or choose attention_backend='reference'."
            )
        size = layout.block_size
        if size & (size - 1) or size > TILE:
            raise InvalidConfig(f"block_size: got {size}, allowed for {self.name} is a power of two up to {TILE}.")
        self._layout = layout
        self._pool = pool
        self._is_bf16 = dtype == torch.bfloat16
        self._plan: StepPlan | None = None
        self._kernels: dict[tuple[int, int, int | None], tuple[int, Kernel]] = {}
        self._form = form_of_attention() if self._is_bf16 and not self._is_int8 else None
        self._words = StepWords()
        self._attend_parameters = ParameterBlock(attend.NUM_ARGUMENTS)
        self._write_parameters = ParameterBlock(write_kv.NUM_ARGUMENTS)

    @property
    def layout(self) -> KVLayout | ScaledKVLayout:
        """What the pool's bytes mean; see ``ShowsKVPool``."""
        return self._layout

    @property
    def pool(self) -> torch.Tensor:
        """The pool, uint8 [blocks, block_bytes]."""
        return self._pool

    @property
    def only_runs_kernels(self) -> bool:
        """Whether calls can be recorded: not of a subclass with methods of its own, which would not be called again."""
        kind = type(self)
        return all(
            getattr(kind, name) is getattr(NumbaCpuAttention, name)
            for name in ("attend", "attend_to", "write_kv")
        )

    @staticmethod
    def preferred_block_size(dtype: torch.dtype) -> int:
        """Tokens per block if nothing else decides."""
        return 32

    def plan(self, batch: RaggedRows) -> None:
        """Check the batch and work out what all layers share; see ``AttentionBackend``.

        Raises:
            InternalError: a block id, slot or length is out of range; nothing was computed.
        """
        self._plan = StepPlan(batch, self._pool.shape[0], self._layout.block_size, self._layout.window)
        self._words.follow(self._plan)

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key [T, KVH, D] and value [T, KVH, Dv] in the planned slots; see ``AttentionBackend``."""
        check_key_value(self._layout, layer, key, value, self._current_plan())
        shape, words, item = self._layout.layers[layer], self._words.writes(), key.itemsize
        self._write_parameters.fill(
            key.data_ptr(),
            key.stride(0) * item,
            key.stride(1) * item,
            value.data_ptr(),
            value.stride(0) * item,
            value.stride(1) * item,
            self._pool.data_ptr(),
            self._layout.block_bytes,
            self._layout.key_offset(layer),
            self._layout.value_offset(layer),
            *words,
            shape.num_kv_heads,
        )
        kernel = write_kv.write_kv_kernel(
            shape.key_head_size, shape.value_head_size, self._layout.block_size, int(self._is_bf16), int(self._is_int8)
        )
        resize = self._words.sizes_of_writes, shape.num_kv_heads, write_kv.RUN_TOKENS
        self._run(kernel, self._write_parameters, words[-1] * shape.num_kv_heads, resize)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        chunk: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with query [T, H, D], returning [T, H, Dv]; see ``AttentionBackend``."""
        output = query.new_empty(*query.shape[:2], self._layout.layers[layer].value_head_size)
        self.attend_to(
            output, layer, query, scale=scale, window=window, chunk=chunk, softcap=softcap, sinks=sinks
        )  # fmt: skip
        return output

    def attend_to(
        self,
        output: torch.Tensor,
        layer: int,
        query: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        chunk: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Do the same into output [T, H, Dv], contiguous; see ``RecordableAttention``."""
        plan = self._current_plan()
        check_query(self._layout, layer, query, plan, sinks)
        shape, item = self._layout.layers[layer], query.itemsize
        wanted = plan.num_tokens, query.shape[1], shape.value_head_size
        # Safety: the kernel writes raw memory.
        if output.shape != wanted or output.dtype != query.dtype or not output.is_contiguous():
            given = f"{output.dtype} of shape {tuple(output.shape)}"
            raise InternalError(f"output: {given}, expected {query.dtype} {wanted}")
        if plan.num_computed < plan.num_tokens:
            output[plan.num_computed :] = 0
        group = query.shape[1] // shape.num_kv_heads
        # Why: in pairs the largest score is looked for before it is scaled.
        form = self._form if scale > 0 else None
        queries, kernel = self._attention_kernel(layer, group, form)
        tiles = self._words.tiles(queries)
        sink_values = None if sinks is None else sinks.to(torch.float32).contiguous()
        parameters = self._attend_parameters
        parameters.fill(
            query.data_ptr(),
            query.stride(0) * item,
            query.stride(1) * item,
            output.data_ptr(),
            self._pool.data_ptr(),
            self._layout.block_bytes,
            self._layout.key_offset(layer),
            self._layout.value_offset(layer),
            *self._words.rows,
            *tiles,
            shape.num_kv_heads,
            group,
            max(0, window),
            max(0, chunk),
            0 if sink_values is None else sink_values.data_ptr(),
        )
        # Why: exponentials are powers of two; the factor log2(e) goes where it costs nothing. Queries are scaled before
        # their scores are capped, or, in pairs, not at all.
        of_query, of_score = (scale, 1.0) if form is None else (1.0, scale)
        for word, number in (
            (attend.SCALE, of_query if softcap > 0 else scale * LOG2_E),
            (attend.CAP_INVERSE, of_score / softcap if softcap > 0 else 0.0),
            (attend.CAP, softcap * LOG2_E if softcap > 0 else 0.0),
        ):
            parameters.set_float(word - parameters.FIRST, number)
        resize = self._words.sizes_of_attention, queries, query.shape[1], (attend.BLOCK_TABLES, attend.TILE_ROWS)
        self._run(kernel, parameters, tiles[-1] * query.shape[1], resize)

    def _attention_kernel(self, layer: int, group: int, form: int | None) -> tuple[int, Kernel]:
        """The kernel for ``group`` query heads per KV head, and how many tokens its work items take.

        ``form`` is that of ``form_of_attention``.
        """
        key = layer, group, form
        if key in self._kernels:
            return self._kernels[key]
        shape, block_size = self._layout.layers[layer], self._layout.block_size
        if form is not None:
            pairs = PairVariant.choose(form, group, shape.key_head_size, shape.value_head_size, block_size)
            self._kernels[key] = pairs.queries, pair_attention_kernel(pairs)
        else:
            variant = Variant.choose(
                group, shape.key_head_size, shape.value_head_size, block_size, self._is_bf16,
                is_int8=self._is_int8,
            )  # fmt: skip
            self._kernels[key] = variant.queries, attend.attention_kernel(variant)
        return self._kernels[key]

    def _run(self, kernel: Kernel, parameters: ParameterBlock, num_items: int, resize: Resize | None = None) -> None:
        if num_items:
            kernel.run(parameters, num_items, resize)

    def _current_plan(self) -> StepPlan:
        if self._plan is None:
            raise InternalError("attention: plan was not called before write_kv or attend.")
        return self._plan
