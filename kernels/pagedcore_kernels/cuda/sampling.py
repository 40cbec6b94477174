"""Choosing tokens from float32 logits on the GPU: greedily, by temperature, top-k, top-p and min-p.

Owns the object that launches the kernel of ``device/sample.py`` and the packing of what it needs of each row. It means
what the CPU's ``TokenSampler`` and ``GreedyPicker`` mean. With equal logits they choose the same tokens, but for sums
and exponentials that are rounded otherwise: a token may differ where the random number or a limit lies within 1e-5 of
the probability at which the choice changes.

Invariant: what comes out for a row depends on that row and its own parameters alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagedcore_kernels.cuda.attention.uploads import StepBuffer
from pagedcore_kernels.cuda.build.variants import SAMPLE_NAME
from pagedcore_kernels.cuda.driver import Driver
from pagedcore_kernels.cuda.shapes import SAMPLE_ROW_BYTES
from pagedcore_kernels.errors import InternalError

_MOST_TOKENS = 2**23
"""Of a vocabulary, so that the sum of all weights fits into 64 bits."""
_PACKED = np.dtype([
    ("scale", "f4"), ("offset", "f4"), ("offset_rest", "f4"), ("top_k", "u4"), ("top_p", "u8"), ("seed", "i8"),
    ("position", "i8"), ("nothing", "i8"),
])


def pack_rows(rows: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Turn ``SAMPLING_ROW`` [S], as ``cpu.sampling.sampling_rows`` makes them, into what the kernel reads, [S, 12].

    A top_p below 1 is in units of 2**-64 and 0 otherwise; an offset is the sum of two float32.
    """
    packed = np.zeros(len(rows), _PACKED)
    packed["scale"] = rows["scale"]
    with np.errstate(over="ignore", invalid="ignore"):
        packed["offset"] = rows["min_p_offset"]
        rest = rows["min_p_offset"] - packed["offset"]
    packed["offset_rest"] = np.where(np.isfinite(rest), rest, 0.0)
    packed["top_k"] = np.clip(rows["top_k"], 0, 2**31 - 1)
    limited = rows["top_p"] < 1
    packed["top_p"][limited] = np.maximum(np.ldexp(rows["top_p"][limited], 64), 1).astype(np.uint64)
    packed["seed"], packed["position"] = rows["seed"], rows["position"]
    return packed.view(np.int32).reshape(len(rows), SAMPLE_ROW_BYTES // 4)


class TokenSampler:
    """One token for each row, the most likely one or one that is drawn; see ``TokenChooser`` and ``cpu.sampling``."""

    def __init__(self, vocab_size: int, driver: Driver) -> None:
        if not 0 < vocab_size <= _MOST_TOKENS:
            raise InternalError(f"vocabulary: got {vocab_size} tokens, expected 1 to {_MOST_TOKENS}.")
        self._vocab_size = vocab_size
        self._driver = driver
        self._buffer = StepBuffer(driver.device)
        driver.prepare(SAMPLE_NAME)

    def __call__(self, logits: torch.Tensor, rows: npt.NDArray[Any] | None) -> torch.Tensor:
        """Return int64 [S] on the device, token ids; -1 where a row of logits is not valid: a logit is NaN or plus
        infinity, or none is finite.

        Args:
            logits: float32 [S, vocab_size] on the device, elements of a row together; they are left alone.
            rows: [S] of ``SAMPLING_ROW``, made by ``cpu.sampling.sampling_rows``; ``None``: the most likely token of
                each row is wanted, the lowest id of equal ones.
        """
        # Safety: the kernel reads raw memory.
        if logits.shape[1:] != (self._vocab_size,) or logits.dtype != torch.float32 or logits.dim() != 2:
            raise InternalError(
                f"logits: {logits.dtype} {tuple(logits.shape)}, expected float32 [S, {self._vocab_size}]."
            )
        if (logits.stride(1) != 1 and self._vocab_size > 1) or logits.device.type != self._driver.device.type:
            raise InternalError(f"logits: strides {logits.stride()} on {logits.device}, expected rows on the GPU.")
        if rows is not None and rows.shape != logits.shape[:1]:
            raise InternalError(f"sampling rows: got shape {rows.shape}, expected one for each of {len(logits)} rows.")
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        if len(logits):
            packed = None if rows is None else self._buffer.upload([pack_rows(rows)])[0]
            self._driver.begin_step()
            self._driver.launch(SAMPLE_NAME, len(logits), (
                logits, packed, tokens, logits.stride(0) * logits.itemsize, self._vocab_size,
            ))
        return tokens
