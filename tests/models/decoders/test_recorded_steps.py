"""Steps that are recorded and repeated, against the same steps called from Python one kernel after the other."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from models.decoders.test_fused import VOCAB, model_of
from pagedcore.execution.ragged_batch import RaggedBatch, assemble
from pagedcore.models.decoders import fused
from pagedcore.models.decoders.fused import FusedDecoder
from pagedcore.models.linears.schemes import QUANTIZERS
from pagedcore.models.transformers_model import TransformersModel
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from pagedcore_kernels.cpu.runtime.recorded_calls import RecordedCalls, StepShape, present_recording

BLOCK_SIZE, NUM_BLOCKS, NUM_SEQUENCES = 4, 120, 6
#: Names of models, number formats, and options: norms of heads, windows and soft caps, every scheme, KV in int8.
CASES: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "llama": ("llama", torch.float32, {}),
    "llama, bfloat16": ("llama with biases", torch.bfloat16, {}),
    "qwen3": ("qwen3", torch.bfloat16, {}),
    "gemma2": ("gemma2", torch.bfloat16, {}),
    "gemma3": ("gemma3", torch.float32, {}),
    **{name: ("qwen2", torch.bfloat16, {"quantization": name, "linears": one}) for name, one in QUANTIZERS.items()},
    "int8 KV": ("llama", torch.bfloat16, {"kv_cache_dtype": "int8"}),
}
#: Each kind of kernel, of norm and of recorded step once; those of the others take seconds to compile.
QUICK_CASES = [
    pytest.param(case, marks=pytest.mark.slow if case in ("qwen3", "w8a16", "w4a16") else ()) for case in CASES
]


def take_over(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> TransformersModel:
    """Return a backend with a pool."""
    torch.manual_seed(0)
    backend = TransformersModel(model_of(name, dtype=dtype), NumbaCpuAttention, block_size=BLOCK_SIZE, **options)
    backend.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    return backend


def step_of(pieces: list[tuple[int, int, int]], wanted: list[int] | None = None) -> RaggedBatch:
    """Return the batch of (sequence, start, end), each with blocks of its own that lie scattered."""
    ids, starts, ends = (np.array(column, np.int64) for column in zip(*pieces, strict=True))
    tables = [(np.arange(20) * 6 + i).astype(np.int32)[: -(-end // BLOCK_SIZE)] for i, _, end in pieces]
    tokens = [np.random.default_rng(i).integers(3, VOCAB, 80)[start:end] for i, start, end in pieces]
    batch = assemble(np.concatenate(tokens), starts, ends - starts, seq_ids=ids, tables=tables, block_size=BLOCK_SIZE,
                     is_sampled=np.ones(len(ids), np.bool_))  # fmt: skip
    rows = np.arange(batch.num_tokens) if wanted is None else np.array(wanted)
    return dataclasses.replace(batch, logits_rows=rows)


def steps() -> Iterator[RaggedBatch]:
    """All tokens, then one of each sequence at a time again: of all of them, of one, of two, of all again.

    Contexts get longer than one and than two widths of a block table.
    """
    yield step_of([(i, 0, 80) for i in range(NUM_SEQUENCES)])
    for position in range(72):
        present = range(NUM_SEQUENCES) if position % 7 < 4 else range(position % 3, position % 3 + 1 + position % 2)
        yield step_of([(i, 3 + i + position, 4 + i + position) for i in present])


def python_alone(backend: TransformersModel) -> TransformersModel:
    """Let the backend's decoder record nothing."""
    decoder: Any = backend._decoder
    assert type(decoder) is FusedDecoder
    assert decoder._steps is not None
    decoder._steps = None
    return backend


@pytest.mark.parametrize("case", QUICK_CASES)
def test_repeated_steps_give_the_same_bits(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All logits of many steps, most of which are repeated, are those of a decoder that records nothing."""
    num_repeated = 0
    run = RecordedCalls.run

    def counted(self: RecordedCalls, shape: StepShape) -> None:
        nonlocal num_repeated
        num_repeated += 1
        run(self, shape)

    monkeypatch.setattr(RecordedCalls, "run", counted)
    name, dtype, options = CASES[case]
    recording, plain = take_over(name, dtype, **options), python_alone(take_over(name, dtype, **options))
    num_repeated = 0
    for batch in steps():
        assert torch.equal(recording.forward(batch), plain.forward(batch))
    assert num_repeated >= 2 * 70


@pytest.mark.parametrize("case", ["llama", "gemma2"])
def test_steps_with_hidden_states_repeat_the_same_calls(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They and the steps between them have the bits of a decoder that records nothing, and what a step has returned
    is left alone by the next ones."""
    num_made, name, (_, dtype, options) = 0, CASES[case][0], CASES[case]
    enter = RecordedCalls.__enter__

    def counted(self: RecordedCalls) -> RecordedCalls:
        nonlocal num_made
        num_made += 1
        return enter(self)

    monkeypatch.setattr(RecordedCalls, "__enter__", counted)
    recording, plain = take_over(name, dtype, **options), python_alone(take_over(name, dtype, **options))
    returned = []
    for place, batch in enumerate(steps()):
        if place % 3:
            wanted = np.array([0, batch.num_tokens - 1])
            (logits, hidden), (others, expected) = (one.forward_hidden(batch, wanted) for one in (recording, plain))
            assert torch.equal(logits, others)
            returned.append((hidden, expected))
        else:
            assert torch.equal(recording.forward(batch), plain.forward(batch))
    assert all(np.array_equal(hidden, expected) for hidden, expected in returned)
    assert num_made < 10


def test_wanted_rows_that_are_not_all_are_not_mixed_up() -> None:
    """As many rows as tokens may still be others: the last token twice, or both tokens in another order."""
    backend = take_over("llama")
    backend.forward(step_of([(0, 0, 9), (1, 0, 9)]))
    both = backend.forward(step_of([(0, 9, 10), (1, 9, 10)])).clone()
    for wanted in ([1, 1], [1, 0], [0, 0], [1], [0]):
        assert torch.equal(backend.forward(step_of([(0, 9, 10), (1, 9, 10)], wanted)), both[wanted])


def test_another_pool_is_not_written_by_old_calls() -> None:
    """A backend that gave its pool back and made another one records anew: the old one's addresses are others' now."""
    backend = take_over("llama")
    expected = [backend.forward(batch).clone() for batch in steps()]
    backend.release_kv()
    gc.collect()
    backend.allocate_kv(NUM_BLOCKS + 7, BLOCK_SIZE)
    for batch, wanted in zip(steps(), expected, strict=True):
        assert torch.equal(backend.forward(batch), wanted)


class Counting(NumbaCpuAttention):
    """Counts the layers that it attends for."""

    num_calls = 0

    def attend(self, *arguments: Any, **options: Any) -> torch.Tensor:
        Counting.num_calls += 1
        return super().attend(*arguments, **options)


def test_a_method_of_a_subclass_is_called_in_every_step() -> None:
    """A backend of somebody else's that does more than kernels is not recorded."""
    torch.manual_seed(0)
    backend = TransformersModel(model_of("llama"), Counting, block_size=BLOCK_SIZE)
    backend.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    before = Counting.num_calls
    for batch in list(steps())[:5]:
        backend.forward(batch)
    assert Counting.num_calls == before + 5 * len(backend.layers)


def test_an_interrupt_while_a_step_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C between two kernels leaves no recording: the next steps are computed, and recorded, whole."""
    backend, plain = take_over("llama"), python_alone(take_over("llama"))
    attend_to = NumbaCpuAttention.attend_to

    def interrupted(self: NumbaCpuAttention, output: torch.Tensor, layer: int, *given: Any, **options: Any) -> None:
        if layer:
            raise KeyboardInterrupt
        attend_to(self, output, layer, *given, **options)

    first, *others = list(steps())[:6]
    monkeypatch.setattr(NumbaCpuAttention, "attend_to", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backend.forward(first)
    monkeypatch.undo()
    assert present_recording() is None
    for batch in (first, *others):
        assert torch.equal(backend.forward(batch), plain.forward(batch))


def test_models_in_several_threads_record_and_repeat_at_once() -> None:
    """Two tenants of one process and its helpers: neither's kernels get into the other's recording."""
    names = ("llama", "qwen3", "gemma2")
    expected = {}
    for name in names:
        plain = python_alone(take_over(name))
        expected[name] = [plain.forward(batch).clone() for batch in steps()]
    ready = threading.Barrier(len(names))

    def same_bits(name: str, backend: TransformersModel) -> bool:
        ready.wait(60)
        return all(
            torch.equal(backend.forward(batch), wanted) for batch, wanted in zip(steps(), expected[name], strict=True)
        )

    for _ in range(5):
        backends = [take_over(name) for name in names]
        for backend in backends:
            decoder: Any = backend._decoder
            decoder._steps._parts.clear()
        with ThreadPoolExecutor(len(names)) as pool:
            assert all(pool.map(same_bits, names, backends))


def test_steps_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts among tokens, more rows than ever and fewer again, few logits, many and none: the same bits, and logits
    of many rows and steps of very many do not stay in memory.
    """
    monkeypatch.setattr(fused, "MOST_ROWS", 200)
    monkeypatch.setattr(fused, "MOST_LOGITS", 20)
    recording, plain = take_over("qwen2", torch.bfloat16), python_alone(take_over("qwen2", torch.bfloat16))
    sizes = [(3, 3), (17, 1), (150, 2), (150, 150), (18, 18), (40, 0), (200, 5), (201, 5), (2, 2), (201, 201), (5, 1)]
    for num_tokens, num_wanted in sizes:
        pieces = [(0, 0, min(80, num_tokens - 1)), (1, 0, max(1, min(80, num_tokens - 81))), (2, 0, num_tokens - 161)]
        batch = step_of([piece for piece in pieces if piece[2] > 0])
        rows = np.random.default_rng(num_tokens).permutation(batch.num_tokens)[:num_wanted]
        batch = dataclasses.replace(batch, logits_rows=rows)
        assert torch.equal(recording.forward(batch), plain.forward(batch))
    decoder: Any = recording._decoder
    rooms = decoder._steps.workspace._rooms
    assert max(len(room) for room in rooms.values()) == 256
    assert max(len(room) for (purpose, *_), room in rooms.items() if purpose == "logits") <= 32


@pytest.mark.parametrize("name", ["granite", "olmo2", "mixtral"])
def test_models_with_work_of_torch_between_kernels_record_nothing(name: str) -> None:
    """What torch computes would not be computed again."""
    decoder: Any = take_over(name)._decoder
    assert type(decoder) is FusedDecoder
    assert decoder._steps is None
