"""Decode steps of any architecture on a GPU as recorded launches: one recording for each size of a step.

The general path launches a thousand kernels a step from Python, which takes ten times as long as the GPU computes. A
step in which every row decodes is padded to the next size, its numbers are put where the recording of that size reads
them, in one copy, and the recording is launched. Sizes are recorded when an engine starts. Source: CUDA graphs, as vLLM
and SGLang use them for decoding.

Invariant: a row is computed by the same kernels on the same numbers as without a recording, in company of padding; the
first step of each recording is computed both ways and compared.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch

from pagedcore.execution.ragged_batch import RaggedBatch, assemble
from pagedcore.models.attention.interface import PagedStep
from pagedcore.models.attention.layers import AttentionLayer
from pagedcore.models.decoders.long_angles import places_of
from pagedcore.models.decoders.plain import Decoder
from pagedcore.models.decoders.step_numbers import look_up
from pagedcore.protocols import RaggedRows
from pagedcore_kernels.interface import RecordsLaunches

MOST_ROWS: Final = 512
"""Rows of the largest step that is recorded."""
MOST_SECONDS: Final = 60.0
"""How long recording ahead may take at an engine's start; sizes that are left are recorded when they are first met."""
_POSITIONS: Final = 3
"""Of the rows that sizes are recorded with ahead: two of a prompt, and the one that is decoded."""
_TRIED_TOKENS: Final = 32
"""Tokens of those rows: the first ones of the vocabulary."""
_log = logging.getLogger("pagedcore")


class Graphs(Protocol):
    """What records launches; see ``CudaGraphs``."""

    def record(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Record what ``compute`` launches; return what launches it again, and its result."""


@dataclass(slots=True)
class _Recording:
    """One size of steps."""

    relies_on: Hashable
    replay: Callable[[], None]
    """Launches it."""
    logits: torch.Tensor
    """What this fills."""
    rows: torch.Tensor
    """0, 1, ...: launches were told of it, and it was made before they were."""


class GraphedSteps:
    """The recorded decode steps of one decoder with one attention backend.

    Args:
        decoder: computes a batch.
        attention: has the KV pool.
        layers: as for ``PagedStep``.
        dtype: of the KV pool.
        device: where the model computes.
        graphs: records launches.
        most_blocks: of a row.
        most_rows: of a step that is recorded, ``MOST_ROWS`` at most.
        num_short_tokens: as in ``places_of``.
        latest: as of ``DeviceTokens``; it stays where it is.
    """

    def __init__(
        self, decoder: Decoder, attention: RecordsLaunches, layers: Mapping[int, AttentionLayer], dtype: torch.dtype,
        device: torch.device, graphs: Graphs, most_blocks: int, most_rows: int = MOST_ROWS,
        num_short_tokens: int | None = None, latest: torch.Tensor | None = None,
    ) -> None:
        self._decoder, self._layers, self._dtype, self._device = decoder, layers, dtype, device
        self._attention: Any = attention
        self._graphs, self._num_short_tokens, self._latest = graphs, num_short_tokens, latest
        self._most_rows, self._most_blocks = min(most_rows, MOST_ROWS), most_blocks
        self._frame: Any = None
        self._recordings: dict[int, _Recording] = {}
        self.is_possible = True
        """Whether this model's steps can be recorded, as far as is known."""

    @property
    def sizes(self) -> list[int]:
        """Numbers of rows that there are recordings for: powers of two, and the most rows."""
        below = [1 << power for power in range(self._most_rows.bit_length()) if 1 << power < self._most_rows]
        return [*below, self._most_rows]

    def record_ahead(self, compute: Callable[[RaggedBatch], object], num_blocks: int, block_size: int) -> None:
        """Record all sizes, the largest first, so that the others find room in its memory; say so in the log.

        Args:
            compute: computes a batch as usual.
            num_blocks: of the pool, in which nothing is kept yet.
            block_size: tokens of a block.
        """
        begin, left = time.monotonic(), self.sizes[::-1]
        num_groups = num_blocks // -(-_POSITIONS // block_size)
        _log.info("recording decode steps of %s rows, for %.0f s at most", ", ".join(map(str, left)), MOST_SECONDS)
        if num_groups:
            compute(_trial(left[0], num_groups, block_size, range(_POSITIONS - 1)))
        while left and num_groups and self.is_possible and time.monotonic() - begin < MOST_SECONDS:
            if self.run(_trial(left[0], num_groups, block_size, range(_POSITIONS - 1, _POSITIONS))) is None:
                return
            num_rows = left.pop(0)
            _log.info("decode steps of %d rows are recorded, after %.1f s", num_rows, time.monotonic() - begin)

    def run(self, batch: RaggedRows) -> torch.Tensor | None:
        """Compute a batch; return logits [S, vocabulary] on the device, valid until the next one.

        ``None``: it has to be computed as usual, because not every row decodes, or this model cannot be recorded.
        """
        num_rows = len(batch.kv_lens)
        if not self.is_possible or num_rows > self._most_rows or not _decodes_all(batch):
            return None
        if self._frame is None:
            self._frame = self._attention.new_frame(self._most_rows, self._most_blocks)
        if self._frame is None:
            return None
        padded = _padded(batch, size := min(1 << (num_rows - 1).bit_length(), self._most_rows))
        numbers = [padded.token_ids, padded.positions]
        if self._num_short_tokens is not None:
            numbers.append(places_of(padded, self._num_short_tokens))
        relies_on, sent = self._attention.plan_in(self._frame, padded, numbers)
        recording = self._recordings.get(size)
        if recording is None or recording.relies_on != relies_on:
            # Why first: the memory of one that is void is there for the next.
            self._recordings.pop(size, None)
            return self._record(padded, sent, relies_on, num_rows)
        recording.replay()
        return recording.logits[:num_rows]

    def _record(
        self, padded: RaggedRows, sent: list[torch.Tensor], relies_on: Hashable, num_rows: int
    ) -> torch.Tensor:
        """Compute a step as usual, record it, and compare; if that is impossible, never try again."""
        token_ids, positions, places = sent[0], sent[1], sent[-1]
        step = PagedStep(self._attention, self._layers, padded, self._dtype, positions)
        rows = torch.arange(len(token_ids), device=self._device)

        def compute() -> torch.Tensor:
            self._attention.follow_stream()
            # Why always: whether tokens are known on the host differs from step to step.
            known = token_ids if self._latest is None else look_up(token_ids, self._latest)
            return self._decoder(step, known, places, rows)

        expected = compute()[:num_rows]
        try:
            replay, logits = self._graphs.record(compute)
            replay()
            is_same = torch.equal(logits[:num_rows], expected)
            reason = "" if is_same else "a recorded step computed other logits"
            # Why last: what an interrupt breaks off here was not compared, and is recorded again.
            self._recordings[len(token_ids)] = _Recording(relies_on, replay, logits, rows)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
        finally:
            self._attention.follow_stream()
        if reason:
            self.is_possible, self._frame = False, None
            self._recordings.clear()
            _log.warning("decode steps are launched kernel by kernel, as they cannot be recorded: %s", reason)
        return expected


def _decodes_all(batch: RaggedRows) -> bool:
    """Say whether each row has one token, whose logits are wanted."""
    num_rows = len(batch.kv_lens)
    return len(batch.logits_rows) == num_rows == int(batch.query_start[-1]) and bool(
        (batch.logits_rows == np.arange(num_rows)).all())


def _padded(batch: RaggedRows, size: int) -> RaggedRows:
    """Return a decode step with so many rows, and as many tokens; what it has more than before has no table."""
    num_rows = len(batch.kv_lens)
    if num_rows == size == len(batch.token_ids):
        return batch

    def up_to(numbers: Any, size: int, rest: int) -> Any:
        return np.concatenate((numbers[:size], np.full(size - len(numbers[:size]), rest, numbers.dtype)))

    given = {"token_ids": 0, "positions": 0, "slot_mapping": -1}
    tokens = {name: up_to(getattr(batch, name)[:num_rows], size, rest) for name, rest in given.items()}
    return RaggedBatch(
        **tokens, seq_ids=up_to(batch.seq_ids, size, -1), kv_lens=up_to(batch.kv_lens, size, 0),
        block_tables=batch.block_tables, query_start=up_to(batch.query_start, size + 1, num_rows),
        logits_rows=np.arange(size),
        is_long=None if batch.is_long is None else up_to(batch.is_long, size, False),
    )


def _trial(num_rows: int, num_groups: int, block_size: int, positions: range) -> RaggedBatch:
    """Return a step that computes the same positions of so many rows, which share as many groups of blocks."""
    blocks, groups = -(-_POSITIONS // block_size), np.arange(num_rows) % num_groups
    # Why by group: rows that write to one place write the same there.
    token_ids = (groups[:, None] + np.array(positions)).reshape(-1) % _TRIED_TOKENS
    begins, counts = np.full(num_rows, positions.start), np.full(num_rows, len(positions))
    tables = [np.arange(group * blocks, (group + 1) * blocks, dtype=np.int32) for group in groups.tolist()]
    return assemble(token_ids, begins, counts, seq_ids=np.arange(num_rows), tables=tables, block_size=block_size)
