"""Attention in plain torch and plain NumPy: the oracle that kernels are compared with, and the fallback.

``ReferenceAttention`` is a whole backend, slow and portable; ``attention_float64`` is one sequence over contiguous
K and V, written a second time so that the two can check each other. Neither knows how a kernel works.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from pagedcore_kernels.checks import check_key_value, check_pool, check_query
from pagedcore_kernels.cuda.shapes import SMALLEST
from pagedcore_kernels.errors import InternalError
from pagedcore_kernels.interface import RaggedRows
from pagedcore_kernels.layout import BlockLayout, KVLayout, ScaledKVLayout
from pagedcore_kernels.step_plan import StepPlan

Float64Array = npt.NDArray[np.float64]


class ReferenceAttention:
    """``AttentionBackend`` in plain torch: gathers each row's K and V and computes in float32.

    Works on any device and dtype that the layout allows. Its memory grows with the square of a prompt.
    """

    name = "reference"
    devices = ("cpu", "cuda")
    layout_type: type[BlockLayout] = KVLayout
    kv_cache_dtypes = ("int8", "e4m3")

    def __init__(self, layout: BlockLayout, pool: torch.Tensor) -> None:
        check_pool(layout, pool)
        self._layout = layout
        self._pool = pool
        self._plan: StepPlan | None = None

    @staticmethod
    def preferred_block_size(dtype: torch.dtype) -> int:
        """Tokens per block if nothing else decides; any positive number works."""
        return 16

    def plan(self, batch: RaggedRows) -> None:
        """Check and keep the batch; see ``AttentionBackend``."""
        self._plan = StepPlan(batch, self._pool.shape[0], self._layout.block_size)

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key [T, KVH, D] and value [T, KVH, Dv]; see ``AttentionBackend``."""
        plan = self._current_plan()
        check_key_value(self._layout, layer, key, value, plan)
        tokens = np.flatnonzero(plan.slots >= 0)
        slots = plan.slots[tokens]
        index, blocks, offsets = (
            torch.from_numpy(a).to(self._pool.device)
            for a in (tokens, slots // self._layout.block_size, slots % self._layout.block_size)
        )
        keys, values = key[index], value[index]
        if isinstance(self._layout, ScaledKVLayout):
            keys, self._layout.key_scales(self._pool, layer)[blocks, :, offsets] = self._quantized(keys)
            values, self._layout.value_scales(self._pool, layer)[blocks, :, offsets] = self._quantized(values)
        self._stored_keys(layer)[blocks, :, :, offsets] = keys
        self._stored_values(layer)[blocks, :, offsets] = values

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
        plan = self._current_plan()
        check_query(self._layout, layer, query, plan, sinks)
        output = query.new_zeros(*query.shape[:2], self._layout.layers[layer].value_head_size)
        for row in range(plan.num_rows):
            tokens = slice(int(plan.query_start[row]), int(plan.query_start[row + 1]))
            if tokens.start == tokens.stop:  # padding
                continue
            key, value = self._gather(layer, row, plan)
            output[tokens] = _attention(
                query[tokens].float(), key, value, scale=scale, window=window, chunk=chunk, softcap=softcap, sinks=sinks
            ).to(query.dtype)
        return output

    def _gather(self, layer: int, row: int, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """The row's K [L, KVH, D] and V [L, KVH, Dv] in float32."""
        length = int(plan.kv_lens[row])
        used = -(-length // self._layout.block_size)
        blocks = torch.from_numpy(plan.block_tables[row, :used].astype(np.int64)).to(self._pool.device)
        key, value = self._stored_keys(layer)[blocks], self._stored_values(layer)[blocks]
        if isinstance(self._layout, ScaledKVLayout):
            key, value = key.view(self._layout.dtype).float(), value.view(self._layout.dtype).float()
            key = key * self._layout.key_scales(self._pool, layer)[blocks].unsqueeze(2)
            value = value * self._layout.value_scales(self._pool, layer)[blocks].unsqueeze(3)
        key, value = key.permute(0, 3, 1, 2).flatten(0, 1), value.permute(0, 2, 1, 3).flatten(0, 1)
        return key[:length].float(), value[:length].float()

    def _stored_keys(self, layer: int) -> torch.Tensor:
        return _as_bytes(self._layout.key_view(self._pool, layer))

    def _stored_values(self, layer: int) -> torch.Tensor:
        return _as_bytes(self._layout.value_view(self._pool, layer))

    def _quantized(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scales = quantize_rows(rows, self._layout.dtype)
        return _as_bytes(values), scales

    def _current_plan(self) -> StepPlan:
        if self._plan is None:
            raise InternalError("attention: plan was not called before write_kv or attend.")
        return self._plan


def _as_bytes(stored: torch.Tensor) -> torch.Tensor:
    """Return elements of 8 bits as int8: torch indexes no numbers of e4m3."""
    return stored.view(torch.int8) if stored.dtype.itemsize == 1 else stored


LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number of each format of 8 bits."""


def quantize_rows(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 or e4m3 [..., D] and float32 scales [...] of ``rows`` [..., D], each row by itself.

    A value is the nearest number of the format to ``row * (most / largest)``, ties to even, and a scale ``largest /
    most``, all in float32, with ``most`` of ``LARGEST``. A row below 2**-100 becomes zeros, one with an infinity or a
    NaN zeros with a scale of NaN.
    """
    exact = rows.float()
    largest = exact.abs().amax(-1)
    is_finite = largest.isfinite()
    is_used = is_finite & (largest >= SMALLEST)
    # Why a tensor: of a number and a tensor torch multiplies by a reciprocal, which is rounded once more.
    most = torch.full_like(largest, LARGEST[dtype])
    factor = torch.where(is_used, most / largest, 0.0)
    scale = torch.where(is_used, largest / most, torch.where(is_finite, 0.0, float("nan")))
    exact = exact.where(is_finite.unsqueeze(-1), 0.0) * factor.unsqueeze(-1)
    return (exact.round() if dtype == torch.int8 else exact).to(dtype), scale


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of the last n positions; query [n, H, D], key [L, KVH, D], value [L, KVH, Dv], all float32."""
    n, heads, _ = query.shape
    length, kv_heads, _ = key.shape
    grouped = query.reshape(n, kv_heads, heads // kv_heads, -1)
    scores = torch.einsum("nkgd,lkd->kgnl", grouped, key) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(length, device=query.device)
    own = positions[length - n :, None]
    visible = positions <= own
    if window > 0:
        visible &= positions > own - window
    if chunk > 0:
        visible &= positions >= own // chunk * chunk
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        extra = sinks.float().view(kv_heads, -1, 1, 1).expand(-1, -1, n, 1)
        weights = torch.cat([scores, extra], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("kgnl,lkv->nkgv", weights, value).flatten(1, 2)


def attention_float64(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    *,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: npt.ArrayLike | None = None,
    positions: npt.ArrayLike | None = None,
) -> Float64Array:
    """Causal attention of one sequence in float64: query [n, H, D], key [L, KVH, D], value [L, KVH, Dv].

    ``positions`` [n] are the queries' positions, by default the last n of the L. Returns [n, H, Dv].
    """
    q, k, v = (np.asarray(array, np.float64) for array in (query, key, value))
    own = np.arange(len(k) - len(q), len(k)) if positions is None else np.asarray(positions)
    group = q.shape[1] // k.shape[1]
    output = np.empty((*q.shape[:2], v.shape[2]))
    for i, position in enumerate(own):
        first = max(0, position + 1 - window if window else 0, position // chunk * chunk if chunk else 0)
        for head in range(q.shape[1]):
            scores = k[first : position + 1, head // group] @ q[i, head] * scale
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            sink = -np.inf if sinks is None else np.asarray(sinks, np.float64)[head]
            largest = max(scores.max(), sink)
            weights = np.exp(scores - largest)
            total = weights.sum() + np.exp(sink - largest)
            output[i, head] = weights @ v[first : position + 1, head // group] / total
    return output
