from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from pagedcore.errors import InternalError, InvalidConfig, ModelTakenOver
from pagedcore.models import transformers_model
from pagedcore.models.attention.interface import attention_step
from pagedcore.models.attention.layers import RecordingStep
from pagedcore.models.decoders.plain import ModuleDecoder
from pagedcore.models.transformers_model import TransformersModel
from pagedcore.protocols import ModelBackend
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from pagedcore_kernels.reference import ReferenceAttention
from support.families import VOCAB, tiny_model
from support.ragged_schedules import batch_of, random_schedule, random_sequences, random_tables, run_schedule

LENGTHS = (20, 7, 33)


def backend_of(family: str, num_blocks: int = 40) -> TransformersModel:
    backend = TransformersModel(tiny_model(family), ReferenceAttention, block_size=4)
    backend.allocate_kv(num_blocks, 4)
    return backend


def run(backend: TransformersModel, seed: int) -> list[torch.Tensor]:
    rng = random.Random(seed)
    tables = random_tables(rng, LENGTHS, 4, 40)
    return run_schedule(backend, random_sequences(LENGTHS, VOCAB), random_schedule(rng, LENGTHS), tables, 4)


def test_it_is_a_model_backend() -> None:
    """The class has every member of the port."""
    assert isinstance(backend_of("llama"), ModelBackend)


def test_forward_needs_a_pool() -> None:
    """A batch before ``allocate_kv`` is an error with that name in it; a second pool is another."""
    backend = TransformersModel(tiny_model("llama"), ReferenceAttention, block_size=4)
    batch = batch_of(random_sequences((4,), VOCAB), [(0, 0, 4)], random_tables(random.Random(0), (4,), 4, 8), 4)
    with pytest.raises(InternalError, match="allocate_kv"):
        backend.forward(batch)
    backend.allocate_kv(8, 4)
    with pytest.raises(ModelTakenOver, match="already"):
        backend.allocate_kv(8, 4)


def test_a_taken_over_model_cannot_be_called_by_itself() -> None:
    """Its attention has nowhere to go outside of a step, and says so."""
    model = tiny_model("llama")
    TransformersModel(model, ReferenceAttention)
    with pytest.raises(ModelTakenOver, match="KV pool and nowhere else"):
        model(torch.arange(4)[None], use_cache=False)


def test_engines_in_threads_do_not_meet() -> None:
    """Two models that run at the same time on two threads compute what each computes alone."""
    backends = [backend_of("llama"), backend_of("mistral")]
    expected = [run(backend, 0) for backend in backends]
    actual: list[list[torch.Tensor]] = [[], []]

    def work(number: int) -> None:
        for seed in range(3):
            actual[number] = run(backends[number], seed)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        for ours, theirs in zip(actual[number], expected[number], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_steps_nest_and_end() -> None:
    """A forward inside another engine's step uses its own step, and the outer one is back afterwards."""
    backend = backend_of("llama")
    expected = run(backend, 0)
    outer = RecordingStep()
    with attention_step(outer):
        actual = run(backend, 0)
        assert outer.calls == []
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_an_error_inside_a_step_ends_it() -> None:
    """After a failed forward the model is as unreachable as before, and the next step works."""
    backend = backend_of("llama")
    expected = run(backend, 0)

    def fail(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("broken")

    attention = backend._attention
    assert attention is not None
    attention.attend = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="broken"):
        run(backend, 0)
    del attention.attend
    assert all(torch.equal(a, b) for a, b in zip(run(backend, 0), expected, strict=True))


def test_blocks_of_other_sequences_are_never_read() -> None:
    """What lies in blocks that a sequence does not own, NaN for example, changes nothing."""
    clean, dirty = backend_of("qwen3"), backend_of("qwen3")
    assert dirty.cache_store is not None
    dirty.cache_store.pool.view(torch.float32).fill_(float("nan"))
    for ours, theirs in zip(run(dirty, 5), run(clean, 5), strict=True):
        assert torch.equal(ours, theirs)


def test_the_block_size_is_the_backends_unless_given() -> None:
    """Without a wish the attention backend says what it prefers."""
    assert TransformersModel(tiny_model("llama"), ReferenceAttention).block_size == 16
    assert TransformersModel(tiny_model("llama"), ReferenceAttention, block_size=8).block_size == 8


def test_a_number_format_without_a_pool_is_refused() -> None:
    """double precision has no KV layout; the message says what has."""
    with pytest.raises(InvalidConfig, match="float64, allowed for KVLayout: float32"):
        TransformersModel(tiny_model("llama", dtype=torch.float64), ReferenceAttention, runs_self_test=False)


def test_weights_that_are_not_in_memory_are_refused() -> None:
    """A model on another device, or one that was never loaded, is refused with the device."""
    with pytest.raises(InvalidConfig, match="'meta'"):
        TransformersModel(tiny_model("llama").to("meta"), ReferenceAttention)


class _WithOthers(ModuleDecoder):
    """Packs everything, and yet says that there is a matrix of another kind."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.other_matrices = ("Experts",)


def test_products_that_were_not_packed_make_no_promise() -> None:
    """A model declares itself invariant only if every one of its products was packed and probed."""
    for decoder, expected in ((ModuleDecoder, True), (_WithOthers, False)):
        model = tiny_model("llama")
        backend = TransformersModel(model, NumbaCpuAttention, block_size=16, decoder_factory=decoder)
        assert backend.is_schedule_invariant == expected


def test_a_product_that_fails_the_probe_takes_the_promise_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """One shape that depends on company is enough."""
    monkeypatch.setattr(transformers_model, "probe_invariance", lambda products: ((1, 2, torch.float32),))
    assert not TransformersModel(tiny_model("llama"), NumbaCpuAttention, block_size=16).is_schedule_invariant


def test_attention_that_depends_on_company_takes_the_promise_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test compares bits under three schedules; a backend that rounds by batch size is found out."""
    attend_to = NumbaCpuAttention.attend_to

    def rounded_by_size(self: NumbaCpuAttention, output: torch.Tensor, *given: Any, **arguments: Any) -> None:
        attend_to(self, output, *given, **arguments)
        output *= 1 + 1e-6 * len(output)

    monkeypatch.setattr(NumbaCpuAttention, "attend_to", rounded_by_size)
    assert not TransformersModel(tiny_model("llama"), NumbaCpuAttention, block_size=16).is_schedule_invariant
