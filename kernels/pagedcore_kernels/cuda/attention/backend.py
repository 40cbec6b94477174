"""Attention on NVIDIA GPUs: tensor-core kernels behind the ``AttentionBackend`` contract.

Owns what is decided once per step and the arguments of every launch; checks everything a kernel will trust. The GPU
is behind ``driver.py``, the cutting of work in ``work_lists.py``, the arithmetic in ``device/``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt
import torch

from pagedcore_kernels.checks import check_key_value, check_query
from pagedcore_kernels.cuda.attention.work_lists import Visibility
from pagedcore_kernels.cuda.build.library import KernelLibrary
from pagedcore_kernels.cuda.build.toolchain import require_bindings
from pagedcore_kernels.cuda.build.variants import (
    attention_name,
    needed_capability,
    prefill_name,
    rotate_name,
    supports,
)
from pagedcore_kernels.cuda.build.wheel import installed_kernels
from pagedcore_kernels.cuda.driver import Argument, CudaDriver, Driver, why_driver_too_old
from pagedcore_kernels.cuda.formats import FORMATS, check_kernel_layout, layer_views
from pagedcore_kernels.cuda.layer_plans import LayerPlans, SharedStep, StepFrame
from pagedcore_kernels.cuda.sampling import TokenSampler
from pagedcore_kernels.cuda.shapes import LOG2_E, ROW_THREADS, AttentionShape, segment_shift
from pagedcore_kernels.errors import InternalError, InvalidConfig
from pagedcore_kernels.interface import RaggedRows
from pagedcore_kernels.layout import LayerShape, ScaledKVLayout, TokenMajorLayout

# Why: the plugin table finds out whether a backend can be had by importing it.
require_bindings()

_MODEL_FORMATS: Final = (torch.bfloat16, torch.float16)


class NumbaCudaAttention:
    """``AttentionBackend`` for pools on a CUDA device: bfloat16, float16, and those of 8 bits that CPUs have.

    A token's result is the same bits whatever else is in the batch, however its prompt was cut into chunks, wherever
    its blocks lie and however its context was split among CTAs; ``device/numerics.py`` says why.

    Args:
        layout: of the pool.
        pool: uint8 [blocks, block_bytes] on the device.
        driver: the GPU; by default the one the pool is on.

    Raises:
        MissingDependency: cuda-bindings is missing, or a kernel has to be built and the compiler is.
        InvalidConfig: the kernels cannot serve this layout.

    Invariant: one thread at a time uses an instance.
    """

    name = "numba-cuda"
    layout_type = TokenMajorLayout
    kv_cache_dtypes = ("int8", "e4m3")
    devices = ("cuda",)
    prebuilt: Path | None = None
    """The directory that kernels are taken from which are there; ``None``: that of an installed wheel, if there is one.
    Others are compiled."""

    def __init__(
        self, layout: TokenMajorLayout | ScaledKVLayout, pool: torch.Tensor, *, driver: Driver | None = None
    ) -> None:
        check_kernel_layout(layout, pool)
        _check_formats(layout)
        self._driver = driver or _driver_of(pool, self.prebuilt)
        if pool.device.type != self._driver.device.type:
            raise InvalidConfig(f"KV pool: on {pool.device}, allowed for {self.name} is {self._driver.device}.")
        self._query_format = FORMATS[layout.model_dtype]
        self._pool_format = FORMATS[layout.dtype]
        self._layout = layout
        self._check_gpu()
        self._pool = pool
        self._keys, self._values = layer_views(layout, pool)
        self._write = rotate_name(self._query_format, self._pool_format, interleaved=False)
        self._block_shift = layout.block_size.bit_length() - 1
        self._step: SharedStep | None = None
        self._prefill: dict[LayerShape, tuple[str, int]] = {}
        self._plans = LayerPlans(layout, pool, min(map(self._prepare, set(layout.layers))))

    @property
    def layout(self) -> TokenMajorLayout | ScaledKVLayout:
        """What the pool's bytes mean."""
        return self._layout

    @property
    def pool(self) -> torch.Tensor:
        """The pool, uint8 [blocks, block_bytes]."""
        return self._pool

    @property
    def driver(self) -> Driver:
        """What launches on the stream of the planned step."""
        return self._driver

    def planned_slots(self) -> torch.Tensor:
        """Return the planned slots on the device, int32 [T]."""
        return self._current_step().slots

    @staticmethod
    def preferred_block_size(dtype: torch.dtype) -> int:
        """Tokens per block if nothing else decides: what CPUs prefer, so that sessions travel."""
        return 32

    @classmethod
    def with_kernels(cls, directory: Path) -> type[NumbaCudaAttention]:
        """Return the backend over a directory that ``pagedcore kernels build`` has filled; see ``TakesKernels``."""
        return type(cls.__name__, (cls,), {"prebuilt": directory, "__doc__": cls.__doc__})

    @classmethod
    def check_ahead(cls, dtype: torch.dtype) -> None:
        """Refuse models in other formats than 16 bits, a directory without kernels, and a driver that is too old for
        those in it, or else for those compiled here; see ``ChecksAhead``.
        """
        if dtype not in _MODEL_FORMATS:
            raise InvalidConfig(
                f"dtype: got {str(dtype).removeprefix('torch.')}, allowed for {NumbaCudaAttention.name} are bfloat16 "
                "and float16. Leave dtype at 'auto' for a model that is loaded by name, or load it in bfloat16."
            )
        if (reason := why_driver_too_old(cls.prebuilt)) is not None:
            raise InvalidConfig(reason)

    def plan(self, batch: RaggedRows) -> None:
        """Check the batch, cut its work and copy both to the device; see ``AttentionBackend``.

        Raises:
            InternalError: a block id, slot or length is out of range; nothing was computed.
        """
        self.plan_with(batch, ())

    def plan_with(self, batch: RaggedRows, numbers: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Plan a step and send arrays along; see ``SendsNumbers``. Raises as ``plan``."""
        self._driver.begin_step()
        self._step = self._plans.begin(batch, numbers)
        return self._step.numbers

    def new_frame(self, most_rows: int, most_blocks: int) -> StepFrame | None:
        """Return room for steps that are recorded; see ``RecordsLaunches``."""
        return self._plans.new_frame(most_rows, most_blocks)

    def plan_in(
        self, frame: StepFrame, batch: RaggedRows, numbers: Sequence[npt.NDArray[Any]]
    ) -> tuple[tuple[int, ...], list[torch.Tensor]]:
        """Plan a step whose numbers are in a frame; see ``RecordsLaunches``. Raises as ``plan``."""
        self._driver.begin_step()
        self._step = self._plans.begin(batch, numbers, frame)
        return self._plans.addresses(frame), self._step.numbers

    def follow_stream(self) -> None:
        """Launch on the stream that torch works on now; see ``RecordsLaunches``."""
        self._driver.begin_step()

    def new_token_chooser(self, vocab_size: int) -> TokenSampler:
        """Load the kernel that chooses tokens; see ``ChoosesTokens``."""
        return TokenSampler(vocab_size, self._driver)

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key [T, KVH, D] and value [T, KVH, Dv] in the planned slots; see ``AttentionBackend``."""
        step = self._current_step()
        check_key_value(self._layout, layer, key, value, step.plan)
        shape = self._layout.layers[layer]
        key, value = _in_vectors(key), _in_vectors(value)
        sizes = shape.key_head_size, shape.value_head_size
        group_shift = (max(sizes) // 16 - 1).bit_length()
        threads = step.plan.num_tokens * 2 * shape.num_kv_heads << group_shift
        if not threads:
            return
        self._driver.launch(self._write, -(-threads // ROW_THREADS), (
            None, key, value, None, None, None, None, step.slots, self._keys[layer], self._values[layer],
            self._layout.block_bytes, step.plan.num_tokens, 0, 0,
            key.stride(0) * key.itemsize, key.stride(1) * key.itemsize,
            value.stride(0) * value.itemsize, value.stride(1) * value.itemsize,
            0, shape.num_kv_heads, *sizes, 0, group_shift, self._block_shift, 0, 0.0,
        ))

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
        slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with query [T, H, D], returning [T, H, Dv]; see ``AttentionBackend``.

        ``slopes`` [H] float32 are ALiBi's: each score gets ``slope * (key position - query position)``.
        """
        step, shape = self._current_step(), self._layout.layers[layer]
        # Why all of it in a frame: which rows are padding differs from step to step.
        new = query.new_zeros if step.is_framed else query.new_empty
        output = new(step.plan.num_tokens, query.shape[1], shape.value_head_size)
        if not step.is_framed and step.plan.num_computed < step.plan.num_tokens:
            output[step.plan.num_computed :] = 0
        self.attend_to(output, layer, query, scale=scale, window=window, chunk=chunk, softcap=softcap, sinks=sinks,
                       slopes=slopes)
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
        slopes: torch.Tensor | None = None,
    ) -> None:
        """Write what ``attend`` returns to output [T, H, Dv], contiguous; rows of padding are left as they are."""
        step = self._current_step()
        check_query(self._layout, layer, query, step.plan, sinks)
        if not scale > 0:
            raise InternalError(f"scale: got {scale}, expected a positive number.")
        shape = self._layout.layers[layer]
        _check_output(output, (step.plan.num_tokens, query.shape[1], shape.value_head_size), query)
        query = _in_vectors(query)
        visibility = Visibility(query.shape[1] // shape.num_kv_heads, max(0, window), max(0, chunk))
        work = self._plans.work(step, visibility, shape)
        # Why: exponentials are powers of two, and with a cap the scale goes inside of the tanh.
        unit, cap_input = (softcap * LOG2_E, scale / softcap) if softcap > 0 else (scale * LOG2_E, 0.0)
        arguments: tuple[Argument, ...] = (
            query, self._keys[layer], self._values[layer], step.tables, None, step.rows, output, self._plans.partials,
            self._plans.counters, _floats(slopes), _floats(sinks), self._layout.block_bytes,
            query.stride(0) * query.itemsize, query.stride(1) * query.itemsize, self._block_shift, shape.num_kv_heads,
            visibility.group, visibility.window, visibility.chunk, segment_shift(shape.num_kv_heads), unit, cap_input,
        )
        kernel = AttentionShape(shape.key_head_size, shape.value_head_size, self._query_format, self._pool_format)
        for family, items, count in work.launches:
            name, ctas = self._prefill[shape] if family == "prefill" else (attention_name(family, kernel), 1)
            self._driver.launch(name, count * shape.num_kv_heads * ctas, (*arguments[:4], items, *arguments[5:]))

    def _prepare(self, shape: LayerShape) -> int:
        """Load the kernels of a layer; return how many CTAs of its decode kernel run at once."""
        sizes = shape.key_head_size, shape.value_head_size
        attention = AttentionShape(*sizes, self._query_format, self._pool_format)
        decode = attention_name("decode", attention)
        self._prefill[shape] = prefill_name(attention, self._driver.most_shared_bytes)
        for kernel in (decode, self._prefill[shape][0], self._write):
            self._driver.prepare(kernel)
        return self._driver.num_ctas(decode)

    def _check_gpu(self) -> None:
        """Refuse formats that the GPU's instructions do not have."""
        needed = needed_capability(self._pool_format)
        if self._driver.capability < needed:
            raise InvalidConfig(
                f"KV dtype: got {self._layout.dtype} on a GPU of compute capability "
                f"{_dotted(self._driver.capability)}, allowed from {_dotted(needed)} on. Choose int8 or bfloat16."
            )

    def _current_step(self) -> SharedStep:
        if self._step is None:
            raise InternalError("attention: plan was not called before write_kv or attend.")
        return self._step


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _driver_of(pool: torch.Tensor, prebuilt: Path | None) -> Driver:
    if pool.device.type != "cuda":
        raise InvalidConfig(
            f"KV pool: on {pool.device}, allowed for {NumbaCudaAttention.name} is a CUDA device. "
            "Choose attention_backend='numba-cpu' on this machine."
        )
    directory = prebuilt or installed_kernels()
    return CudaDriver(pool.device, KernelLibrary([] if directory is None else [directory]))


def _check_formats(layout: TokenMajorLayout | ScaledKVLayout) -> None:
    name = NumbaCudaAttention.name
    if layout.dtype not in FORMATS or layout.model_dtype not in _MODEL_FORMATS:
        raise InvalidConfig(
            f"KV dtype: got {layout.dtype} for a model in {layout.model_dtype}, allowed for {name} are models in "
            "bfloat16 and float16. Load the model in bfloat16."
        )
    for shape in layout.layers:
        if not supports(FORMATS[layout.dtype], shape.key_head_size, shape.value_head_size):
            raise InvalidConfig(
                f"head sizes: got {shape.key_head_size} and {shape.value_head_size}, allowed for {name} are multiples "
                f"of {32 // layout.dtype.itemsize} from 16 to 256. "
                "Choose device='cpu' or attention_backend='reference'."
            )


def _check_output(output: torch.Tensor, shape: tuple[int, ...], query: torch.Tensor) -> None:
    expected = tuple(output.shape) == shape and output.dtype == query.dtype and output.device == query.device
    if not expected or not output.is_contiguous() or output.data_ptr() % 16:
        raise InternalError(
            f"output: {output.dtype} {tuple(output.shape)} on {output.device}, expected {query.dtype} {shape} on "
            f"{query.device} in one piece."
        )


def _in_vectors(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy, with every row of elements at a multiple of 16 bytes."""
    apart = (tensor.stride(0) | tensor.stride(1)) * tensor.itemsize | tensor.data_ptr()
    return tensor if apart % 16 == 0 and tensor.stride(-1) == 1 else tensor.contiguous()


def _floats(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(torch.float32).contiguous()
