"""Runs a model backend through a random schedule: chunks, decode rows, company and blocks in any order."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch

from pagedcore.execution.ragged_batch import RaggedBatch, assemble

Rows = list[tuple[int, int, int]]


def random_schedule(rng: random.Random, lengths: Seq[int]) -> list[Rows]:
    """Steps of (sequence, start, end) rows that compute every sequence once, in random company."""
    done = [0] * len(lengths)
    steps: list[Rows] = []
    while any(d < length for d, length in zip(done, lengths, strict=True)):
        rows: Rows = []
        for i in rng.sample(range(len(lengths)), len(lengths)):
            if done[i] < lengths[i] and rng.random() < 0.8:
                end = min(lengths[i], done[i] + rng.choice([1, 1, 2, 5, 13]))
                rows.append((i, done[i], end))
                done[i] = end
        if rows:
            steps.append(rows)
    return steps


def random_tables(rng: random.Random, lengths: Seq[int], block_size: int, num_blocks: int) -> list[Any]:
    """Distinct blocks for every sequence, scattered over the pool."""
    free = rng.sample(range(num_blocks), num_blocks)
    return [np.array([free.pop() for _ in range(-(-n // block_size))], dtype=np.int32) for n in lengths]


class StateBlocks:
    """Two state blocks for each sequence: a row reads the one that the last row of its sequence has written."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}

    def of_rows(self, rows: Rows) -> tuple[Any, Any]:
        """Return ``state_reads`` and ``state_writes``."""
        reads = [self._last[i] if start else -1 for i, start, _ in rows]
        writes = [2 * i + (read == 2 * i) for (i, _, _), read in zip(rows, reads, strict=True)]
        self._last |= {i: block for (i, _, _), block in zip(rows, writes, strict=True)}
        return np.array(reads, dtype=np.int32), np.array(writes, dtype=np.int32)


def states_of(backend: Any, num_sequences: int) -> StateBlocks | None:
    """Blocks in a pool that is made if there is none; ``None``: the model keeps no states."""
    if not getattr(backend, "state_bytes", 0):
        return None
    if backend.state_store is None:
        backend.allocate_states(2 * num_sequences)
    return StateBlocks()


def batch_of(
    sequences: Seq[torch.Tensor], rows: Rows, tables: Seq[Any], block_size: int, states: StateBlocks | None = None
) -> RaggedBatch:
    """One step's batch, with the logits of every token wanted."""
    reads, writes = (None, None) if states is None else states.of_rows(rows)
    ids, starts, ends = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    batch = assemble(
        np.concatenate([sequences[i][start:end].numpy() for i, start, end in rows]), starts, ends - starts,
        seq_ids=ids, tables=[tables[i] for i in ids], block_size=block_size, is_sampled=np.ones(len(rows), np.bool_),
        state_reads=reads, state_writes=writes,
    )
    return dataclasses.replace(batch, logits_rows=np.arange(batch.num_tokens))


def run_schedule(
    backend: Any, sequences: Seq[torch.Tensor], steps: list[Rows], tables: Seq[Any], block_size: int,
    states: StateBlocks | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Logits [n, vocabulary] of every sequence; ``backend`` has its KV pool already."""
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    states = states or states_of(backend, len(sequences))
    for rows in steps:
        logits = backend.forward(batch_of(sequences, rows, tables, block_size, states))
        lengths = [end - start for _, start, end in rows]
        for (i, _, _), part in zip(rows, logits.split(lengths), strict=True):
            parts[i].append(part.clone())
    return [torch.cat(part) for part in parts]


def random_sequences(lengths: Seq[int], vocab_size: int, seed: int = 1) -> list[torch.Tensor]:
    """Random tokens, special ones left out."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (n,), generator=generator) for n in lengths]
