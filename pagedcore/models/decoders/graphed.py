"""Decode steps of any architecture on a GPU as recorded launches: one recording for each size of a step.

The general path launches a thousand kernels a step from Python, which takes ten times as long as the GPU computes. A
step in which every row decodes is padded to the next size, its numbers are put where the recording of that size reads
them, and the recording is launched. Source: CUDA graphs, as vLLM and SGLang use them for decoding.

Invariant: a row is computed by the same kernels on the same numbers as without a recording, in company of padding; the
first step of each recording is computed both ways and compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch

from pagedcore.execution.ragged_batch import RaggedBatch
from pagedcore.models.attention.interface import PagedStep
from pagedcore.models.attention.layers import AttentionLayer
from pagedcore.models.decoders.long_angles import places_of
from pagedcore.models.decoders.plain import Decoder
from pagedcore.protocols import RaggedRows
from pagedcore_kernels.interface import RecordsLaunches

MOST_ROWS: Final = 512
"""Rows of the largest step that is recorded."""
_LEAST_WIDTH: Final = 16
"""Blocks of the narrowest block table; wider ones are twice as wide each."""
_log = logging.getLogger("pagedcore")


class Graphs(Protocol):
    """What records launches; see ``CudaGraphs``."""

    def record(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Record what ``compute`` launches; return what launches it again, and its result."""


@dataclass(slots=True)
class _Recording:
    """One size of steps. It keeps every tensor that launches were told of and that was made before they were."""

    frame: Any
    numbers: torch.Tensor
    """int64 [3, T] on the device: token ids, positions and places (see ``long_angles.py``)."""
    rows: torch.Tensor
    """int64 [T] there: 0, 1, ..., T - 1, all of whose logits are wanted."""
    relies_on: Hashable = None
    made: tuple[Callable[[], None], torch.Tensor] | None = None
    """What launches it, and the logits that this fills."""


class GraphedSteps:
    """The recorded decode steps of one decoder with one attention backend.

    Args:
        decoder: computes a batch.
        attention: has the KV pool.
        layers: as for ``PagedStep``.
        dtype: of the KV pool.
        device: where the model computes.
        graphs: records launches.
        num_short_tokens: as in ``places_of``.
    """

    def __init__(
        self, decoder: Decoder, attention: RecordsLaunches, layers: Mapping[int, AttentionLayer], dtype: torch.dtype,
        device: torch.device, graphs: Graphs, num_short_tokens: int | None = None,
    ) -> None:
        self._decoder, self._layers, self._dtype, self._device = decoder, layers, dtype, device
        self._attention: Any = attention
        self._graphs, self._num_short_tokens = graphs, num_short_tokens
        self._recordings: dict[tuple[int, int], _Recording] = {}
        self.is_possible = True
        """Whether this model's steps can be recorded, as far as is known."""

    def run(self, batch: RaggedRows) -> torch.Tensor | None:
        """Compute a batch; return logits [S, vocabulary] on the device, valid until the next one.

        ``None``: it has to be computed as usual, because not every row decodes, or this model cannot be recorded.
        """
        num_rows = len(batch.kv_lens)
        if not self.is_possible or num_rows > MOST_ROWS or not _decodes_all(batch):
            return None
        padded = _padded(batch)
        key = len(padded.kv_lens), padded.block_tables.shape[1]
        recording = self._recordings.get(key)
        if recording is None:
            if (frame := self._attention.new_frame()) is None:
                return None
            numbers = torch.empty(3, len(padded.token_ids), dtype=torch.int64, device=self._device)
            rows = torch.arange(len(padded.token_ids), device=self._device)
            recording = self._recordings[key] = _Recording(frame, numbers, rows)
        relies_on = self._attention.plan_in(recording.frame, padded)
        places = places_of(padded, self._num_short_tokens)
        staged = torch.from_numpy(np.stack((padded.token_ids, padded.positions, places)))
        # Why pinned: the copy is not waited for, and torch keeps such memory until it was made.
        recording.numbers.copy_(staged.pin_memory() if self._device.type == "cuda" else staged, non_blocking=True)
        if recording.made is None or recording.relies_on != relies_on:
            recording.made, recording.relies_on = None, relies_on
            return self._record(recording, padded, num_rows)
        replay, logits = recording.made
        replay()
        return logits[:num_rows]

    def _record(self, recording: _Recording, padded: RaggedBatch, num_rows: int) -> torch.Tensor | None:
        """Compute a step as usual, record it, and compare; if that is impossible, never try again."""
        token_ids, positions, places = recording.numbers
        step = PagedStep(self._attention, self._layers, padded, self._dtype, positions)

        def compute() -> torch.Tensor:
            self._attention.follow_stream()
            return self._decoder(step, token_ids, places, recording.rows)

        expected = compute()[:num_rows]
        try:
            made = replay, logits = self._graphs.record(compute)
            replay()
            is_same = torch.equal(logits[:num_rows], expected)
            reason = "" if is_same else "a recorded step computed other logits"
            # Why last: what an interrupt breaks off here was not compared, and is recorded again.
            recording.made = made
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
        finally:
            self._attention.follow_stream()
        if reason:
            self.is_possible = False
            self._recordings.clear()
            _log.warning("decode steps are launched kernel by kernel, as they cannot be recorded: %s", reason)
        return expected


def _decodes_all(batch: RaggedRows) -> bool:
    """Say whether each row has one token, whose logits are wanted."""
    num_rows = len(batch.kv_lens)
    return len(batch.logits_rows) == num_rows == int(batch.query_start[-1]) and bool(
        (batch.logits_rows == np.arange(num_rows)).all())


def _padded(batch: RaggedRows) -> RaggedBatch:
    """Return a decode step with rows up to a power of two, two at least, and tables as wide as one, 16 at least."""
    num_rows, width = batch.block_tables.shape
    most = max(2, 1 << (num_rows - 1).bit_length())
    tables = np.full((most, max(_LEAST_WIDTH, 1 << (width - 1).bit_length())), -1, np.int32)
    tables[:num_rows, :width] = batch.block_tables

    def up_to(numbers: Any, size: int, rest: int) -> Any:
        return np.concatenate((numbers[:size], np.full(size - len(numbers[:size]), rest, numbers.dtype)))

    given = {"token_ids": 0, "positions": 0, "slot_mapping": -1}
    tokens = {name: up_to(getattr(batch, name)[:num_rows], most, rest) for name, rest in given.items()}
    return RaggedBatch(
        **tokens, seq_ids=up_to(batch.seq_ids, most, -1), kv_lens=up_to(batch.kv_lens, most, 0), block_tables=tables,
        query_start=up_to(batch.query_start, most + 1, num_rows), logits_rows=np.arange(most),
        is_long=None if batch.is_long is None else up_to(batch.is_long, most, False),
    )
