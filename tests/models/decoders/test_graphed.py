"""Decode steps as recorded launches: padded to a size, at the same addresses, and only where every row decodes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pagedcore.execution.cuda_graphs import CudaGraphs
from pagedcore.execution.ragged_batch import RaggedBatch, assemble
from pagedcore.models.decoders import graphed
from pagedcore.models.decoders.graphed import MOST_ROWS, GraphedSteps
from virtual_gpu.machine import Machine
from virtual_gpu.torch_cuda import virtual_gpus

WIDTH = 5
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def gpus() -> Iterator[Machine]:
    """What records, and counts what it has recorded and launched."""
    with virtual_gpus() as machine:
        yield machine


class Frames:
    """An attention backend that notes what it was given."""

    def __init__(self) -> None:
        self.planned: list[RaggedBatch] = []
        self.has_frames, self.place, self.num_frames = True, 0, 0

    def new_frame(self, most_rows: int, most_blocks: int) -> torch.Tensor | None:
        self.num_frames += self.has_frames
        return torch.empty(3 * most_rows, dtype=torch.int32, device=GPU) if self.has_frames else None

    def plan_in(self, frame: torch.Tensor, batch: RaggedBatch, numbers: list[Any]) -> tuple[int, list[torch.Tensor]]:
        self.planned.append(batch)
        staged = torch.from_numpy(np.concatenate(numbers, dtype=np.int32, casting="same_kind")).pin_memory()
        frame[: len(staged)].copy_(staged, non_blocking=True)
        return self.place, list(frame[: len(staged)].split([len(one) for one in numbers]))

    def follow_stream(self) -> None:
        pass


def decoder(step: Any, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Logits that say which token stands where."""
    return (token_ids * 1000 + positions)[rows, None] * torch.ones(1, 3, device=GPU)


def decode(*positions: int, counts: list[int] | None = None) -> RaggedBatch:
    """Rows at these positions, each of one token by default."""
    num = np.array(counts or [1] * len(positions))
    ends = [position + count for position, count in zip(positions, num, strict=True)]
    tables = [np.arange(one * 100, one * 100 + -(-end // WIDTH), dtype=np.int32) for one, end in enumerate(ends, 1)]
    return assemble(np.arange(7, 7 + num.sum()), np.array(positions), num, seq_ids=np.arange(len(num)), tables=tables,
                    block_size=WIDTH)


def make(**more: Any) -> tuple[GraphedSteps, Frames]:
    attention = Frames()
    return GraphedSteps(decoder, attention, {}, torch.float32, GPU, CudaGraphs(GPU), 100, **more), attention


def test_steps_of_one_size_are_one_recording(gpus: Machine) -> None:
    """Three rows and four are both steps of four, however long they are, each with its own numbers; five rows are other
    steps, and so is one; there is one frame."""
    steps, attention = make()
    for positions in [(3, 9, 4), (3, 9, 4), (1, 2, 3, 70), (12, 2, 3), (5,) * 5, (100, 3, 2, 1), (0,), (6,)]:
        batch = decode(*positions)
        found = steps.run(batch)
        assert found is not None
        assert found.tolist() == [[(7 + row) * 1000.0 + at] * 3 for row, at in enumerate(positions)]
    assert gpus.counts["graphs recorded"] == 3
    assert gpus.counts["graph launches"] == 8
    assert [len(batch.token_ids) for batch in attention.planned] == [4, 4, 4, 4, 8, 4, 1, 1]
    assert attention.num_frames == 1


def test_the_largest_size_is_the_most_rows() -> None:
    """Sizes are powers of two up to what an engine has room for, which no step is padded beyond."""
    steps, attention = make(most_rows=6)
    assert steps.sizes == [1, 2, 4, 6]
    for num_rows in (5, 6):
        assert steps.run(decode(*range(num_rows))) is not None
    assert [len(batch.token_ids) for batch in attention.planned] == [6, 6]
    assert steps.run(decode(*range(7))) is None


def test_a_replay_is_one_copy_and_one_launch(gpus: Machine) -> None:
    """Nothing is allocated on the GPU, nothing else is sent and nobody waits; tensors stay where they are."""
    steps, _ = make()
    first = steps.run(decode(3, 9, 4))
    before = gpus.counts.copy()
    found = steps.run(decode(1, 2, 3))
    assert gpus.counts - before == {
        "copies to the device": 1, "bytes to the device": 4 * 4 * 2, "graph launches": 1}
    assert first is not None
    assert found is not None
    again = steps.run(decode(5, 6, 7))
    assert again is not None
    assert again.data_ptr() == found.data_ptr()


def test_sizes_are_recorded_ahead(gpus: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """The largest first, from rows that have been computed; the log says how far it is; nothing is recorded later."""
    steps, attention = make(most_rows=6)
    computed = list[RaggedBatch]()
    with caplog.at_level(logging.INFO, logger="pagedcore"):
        steps.record_ahead(computed.append, 4, WIDTH)
    assert [(len(batch.kv_lens), batch.kv_lens[0]) for batch in computed] == [(6, 2)]
    assert [len(batch.token_ids) for batch in attention.planned] == [6, 4, 2, 1]
    assert attention.planned[0].block_tables.tolist() == [[0], [1], [2], [3], [0], [1]]
    assert [attention.planned[0].kv_lens[0], *attention.planned[0].token_ids[:5]] == [3, 2, 3, 4, 5, 2]
    assert caplog.messages[0] == "recording decode steps of 6, 4, 2, 1 rows, for 60 s at most"
    assert [line.split(" are")[0] for line in caplog.messages[1:]] == [
        f"decode steps of {num_rows} rows" for num_rows in (6, 4, 2, 1)]
    steps.run(decode(1, 2, 3))
    assert gpus.counts["graphs recorded"] == 4


@pytest.mark.parametrize(("num_blocks", "seconds", "expected"), [(4, 0.0, 0), (0, 60.0, 0), (4, 60.0, 1)])
def test_recording_ahead_has_an_end(
    num_blocks: int, seconds: float, expected: int, monkeypatch: pytest.MonkeyPatch, gpus: Machine
) -> None:
    """It takes no longer than is said, needs room for a row, and ends where nothing can be recorded."""
    steps, _ = make(most_rows=6)
    monkeypatch.setattr(graphed, "MOST_SECONDS", seconds)
    monkeypatch.setattr(steps, "_decoder", lambda *step: decoder(*step).cpu().to(GPU))
    steps.record_ahead(lambda batch: None, num_blocks, WIDTH)
    assert gpus.counts["graphs recorded"] == expected
    assert steps.is_possible == (not expected)


def test_padding_is_no_row() -> None:
    """What is added has no token, no slot and no table, so that nothing is written and nothing read for it."""
    steps, attention = make()
    steps.run(decode(3, 9, 4))
    (batch,) = attention.planned
    assert batch.block_tables.tolist() == [[100, -1], [200, 201], [300, -1]]
    assert batch.query_start.tolist() == [0, 1, 2, 3, 3]
    assert batch.kv_lens.tolist() == [4, 10, 5, 0]
    assert batch.slot_mapping.tolist() == [503, 1009, 1504, -1]


def test_long_rows_stand_elsewhere() -> None:
    """Rows of both kinds are one recording: what the decoder is told is their places."""
    steps, _ = make(num_short_tokens=100)
    for is_long in ((False, True, True), (True, False, False)):
        batch = dataclasses.replace(decode(3, 9, 4), is_long=np.array(is_long))
        found = steps.run(batch)
        assert found is not None
        wanted = [(7 + row) * 1000.0 + at + 100 * is_long[row] for row, at in enumerate((3, 9, 4))]
        assert found[:, 0].tolist() == wanted


@pytest.mark.parametrize("batch", [
    decode(0, 4, counts=[3, 1]), decode(*[1] * (MOST_ROWS + 1)), decode(5, 6, counts=[0, 1]),
])
def test_other_steps_are_computed_as_usual(batch: RaggedBatch) -> None:
    """A step with a prompt, without a token of some row, or with too many rows, is not recorded."""
    steps, attention = make()
    assert steps.run(batch) is None
    assert attention.planned == []


def test_nothing_is_recorded_before_a_step_was_computed(gpus: Machine) -> None:
    """An attention backend that does not know the layers yet has no frame; it is asked again."""
    steps, attention = make()
    attention.has_frames = False
    assert steps.run(decode(1)) is None
    attention.has_frames = True
    assert steps.run(decode(1)) is not None
    assert gpus.counts["graphs recorded"] == 1


def test_what_moved_is_recorded_anew(gpus: Machine) -> None:
    """When memory that launches were told of has grown elsewhere, the recording is void."""
    steps, attention = make()
    steps.run(decode(1, 2))
    attention.place = 1
    steps.run(decode(1, 2))
    steps.run(decode(1, 2))
    assert gpus.counts["graphs recorded"] == 2


@pytest.mark.parametrize("is_wrong", [False, True])
def test_what_cannot_be_recorded_is_tried_once(
    is_wrong: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that waits for the device, or whose recording computes something else, says so once, and its steps are
    right all the same."""
    steps, _ = make()
    if is_wrong:
        monkeypatch.setattr(CudaGraphs, "record", lambda self, compute: (lambda: None, compute() + 1))
    else:
        monkeypatch.setattr(steps, "_decoder", lambda *step: decoder(*step).cpu().to(GPU))
    with caplog.at_level(logging.WARNING, logger="pagedcore"):
        found = steps.run(decode(3, 4))
        assert found is not None
        assert found[:, 0].tolist() == [7003.0, 8004.0]
        assert steps.run(decode(3, 4)) is None
    (line,) = [one.getMessage() for one in caplog.records]
    assert ("other logits" if is_wrong else "stream is capturing") in line
    assert "\n" not in line


def test_a_recording_that_was_interrupted_is_made_again(monkeypatch: pytest.MonkeyPatch, gpus: Machine) -> None:
    """Ctrl-C before the first step was compared leaves no recording that nobody has compared."""
    steps, _ = make()

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CudaGraphs, "record", lambda self, compute: (interrupted, compute() + 1))
        with pytest.raises(KeyboardInterrupt):
            steps.run(decode(3, 4))
    for _ in range(2):
        found = steps.run(decode(3, 4))
        assert found is not None
        assert found[:, 0].tolist() == [7003.0, 8004.0]
    assert (gpus.counts["graphs recorded"], gpus.counts["graph launches"]) == (1, 2)
