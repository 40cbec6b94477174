"""The one function through which every model's attention reaches the paged KV cache.

Registers the key "pagedcore" with transformers' attention interface and keeps the step that is being computed. No mask
function is registered under the key, so transformers hands over no mask.

The step is found through a context variable and not through the model's keyword arguments, because some architectures
do not pass those on to the attention function. A context variable is the thread's own and is put back after each
step, so several engines can run in one process, in threads or one inside the other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import numpy as np
import torch

from pagedcore.errors import ModelTakenOver
from pagedcore.models.attention.layers import AttentionLayer, LayersByCall, RecordingStep
from pagedcore.protocols import AttentionBackend, Int32Array, RaggedRows
from pagedcore_kernels.interface import StateBackend

ATTENTION_KEY: Final = "pagedcore"


class PagedStep:
    """Sends the layers of one forward to an attention backend that has planned the batch.

    Args:
        attention: has memory for K and V, and has planned the batch.
        layers: by the number that a module gives itself (``layer_idx``), or by call.
        batch: the rows to compute.
        dtype: number format of the KV pool; calls in another one are converted.
        positions: int64 [T] of the batch where the model computes; by default on the CPU.
        states: has memory for the states of recurrent layers, and has planned the batch; ``None``: there are none.

    ``slots`` [T] are the batch's, on the CPU, and ``window_slots`` [T] if it has some; ``adapter_slots`` [T] those of
    the tokens' adapters, if any has one.
    """

    __slots__ = ("_call", "_dtype", "_layers", "adapter_slots", "attention", "positions", "slots", "states",
                 "window_slots")

    def __init__(
        self, attention: AttentionBackend, layers: Mapping[int, AttentionLayer], batch: RaggedRows, dtype: torch.dtype,
        positions: torch.Tensor | None = None, states: StateBackend | None = None,
    ) -> None:
        self.attention, self.states = attention, states
        self._layers, self._call = layers, -1
        self._dtype = dtype
        self.positions = torch.from_numpy(batch.positions) if positions is None else positions
        self.slots = torch.from_numpy(batch.slot_mapping)
        self.window_slots = None if batch.window_slots is None else torch.from_numpy(batch.window_slots)
        self.adapter_slots = None if batch.adapter_slots is None else _of_tokens(batch.adapter_slots, batch)

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
        arguments: Mapping[str, Any],
    ) -> torch.Tensor:
        """Store K and V unless another layer's are shared, and attend; shapes as in ``AttentionCall``."""
        number = module.layer_idx
        if isinstance(self._layers, LayersByCall):
            number = self._call = (self._call + 1) % len(self._layers)
        layer = self._layers[number]
        if layer.owns_kv:
            self.attention.write_kv(layer.index, self._rows(key), self._rows(value))
        rows = self._rows(query)
        if layer.query_tuning is not None:
            rows = layer.query_tuning(rows, self.positions)
        sinks = arguments.get("s_aux")
        out = self.attention.attend(
            layer.index, rows, scale=layer.scale, window=layer.window, chunk=layer.chunk, softcap=layer.softcap,
            sinks=None if sinks is None else sinks.float(),
        )
        return out.to(query.dtype)[None]

    def _rows(self, heads_first: torch.Tensor) -> torch.Tensor:
        """Turn [1, H, T, D] into [T, H, D] in the pool's number format, each vector in one piece."""
        rows = heads_first[0].transpose(0, 1).to(self._dtype)
        return rows if rows.stride(-1) == 1 else rows.contiguous()


def _of_tokens(of_rows: Int32Array, batch: RaggedRows) -> Int32Array:
    """Repeat a number of each row for its tokens, and that of the last one for padding."""
    found = np.repeat(of_rows, np.diff(batch.query_start))
    return np.pad(found, (0, len(batch.token_ids) - len(found)), mode="edge")


_current_step: ContextVar[PagedStep | RecordingStep | None] = ContextVar("pagedcore_attention_step", default=None)


@contextmanager
def attention_step(step: PagedStep | RecordingStep) -> Iterator[None]:
    """Send the attention calls made inside the ``with`` block, on this thread, to ``step``."""
    token = _current_step.set(step)
    try:
        yield
    finally:
        _current_step.reset(token)


def register() -> None:
    """Make transformers know the key; calling it again changes nothing."""
    # Why: the models of transformers come with this module, and importing it for other models takes a second.
    if "transformers.modeling_utils" not in sys.modules:
        return
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_KEY, paged_attention)


def paged_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None = None, **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attend in the current step; shapes as in ``AttentionCall``.

    Raises:
        ModelTakenOver: there is no step.
    """
    return current_step().attend(module, query, key, value, attention_mask, arguments), None


def current_step() -> PagedStep | RecordingStep:
    """Return the step that is being computed on this thread.

    Raises:
        ModelTakenOver: there is none.
    """
    step = _current_step.get()
    if step is None:
        raise ModelTakenOver(
            "model: an engine has taken it over, so that its attention goes to the engine's KV pool and nowhere else. "
            "Generate with the engine, or load the model once more to call it."
        )
    return step
