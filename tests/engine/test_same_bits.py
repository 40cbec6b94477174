"""The central promise, end to end: tokens and logits are the same bytes whatever the scheduler does."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pagedcore.engine.engine import Engine
from pagedcore.requests.request import Request
from pagedcore.sampling_params import SamplingParams
from support.engine_builders import assert_all_free, run
from support.session_builders import VOCAB, Recorder, tiny_model


def make_requests() -> list[tuple[list[int], SamplingParams]]:
    """A ragged set: greedy and sampled, short and long."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.choice((1, 5, 16, 17, 40)))] for _ in range(10)]
    kinds: list[dict[str, Any]] = [{}, {"temperature": 1.3, "top_k": 40}, {"temperature": 0.8, "top_p": 0.9}]
    return [
        (prompt, SamplingParams(max_tokens=rng.randint(12, 40), ignore_eos=True, seed=i, **kinds[i % 3]))
        for i, prompt in enumerate(prompts)
    ]


def make_engine(dtype: str, **settings: Any) -> Engine:
    model = tiny_model(num_layers=3)
    return Engine.from_pretrained(model, dtype=dtype, block_size=16, max_num_waiting=16, **settings)


def play(dtype: str, order: list[int], **settings: Any) -> tuple[dict[int, Any], int]:
    """Run the requests in ``order``; return tokens and logits bytes by request number, and the preemptions."""
    requests = make_requests()
    with make_engine(dtype, **settings) as engine:
        recorder = Recorder(engine._runner.backend)
        engine._runner.backend = recorder
        handles: dict[int, Request] = {i: engine.add_request(*requests[i]) for i in order}
        run(engine)
        results = {}
        for i, handle in handles.items():
            sequence = handle.sequences[0]
            rows = {pos: data for (sid, pos), data in recorder.logits.items() if sid == sequence.sequence_id}
            results[i] = (list(handle.output().outputs[0].token_ids), rows)
        num_preemptions = engine.stats().num_preemptions
        assert_all_free(engine)
    return results, num_preemptions


ALL = list(range(10))
COMPANIES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "reversed": (ALL[::-1], {}),
    "small chunks": (ALL, {"max_num_batched_tokens": 10, "max_num_seqs": 10}),
    "two at a time": (ALL, {"max_num_seqs": 2, "max_num_batched_tokens": 64}),
    "static batches": (ALL, {"max_num_seqs": 4, "scheduling_policy": "static"}),
    "a pool that is too small": (ALL, {"num_kv_blocks": 6, "max_num_batched_tokens": 64}),
}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def alone(request: pytest.FixtureRequest) -> tuple[str, dict[int, Any]]:
    """The completions of requests that run alone in the engine."""
    results: dict[int, Any] = {}
    for i in ALL:
        results |= play(request.param, [i])[0]
    return request.param, results


@pytest.mark.parametrize("company", COMPANIES)
def test_tokens_and_logits_are_the_same_bytes_as_alone(alone: tuple[str, dict[int, Any]], company: str) -> None:
    """Batch mates, order, chunking, batching policy and preemption by recompute change no bit."""
    dtype, expected = alone
    order, settings = COMPANIES[company]
    results, num_preemptions = play(dtype, order, **settings)
    assert (num_preemptions >= 3) == (company == "a pool that is too small"), num_preemptions
    for i in ALL:
        assert results[i][0] == expected[i][0], f"tokens of request {i}"
        assert results[i][1] == expected[i][1], f"logits of request {i}"


#: Ways to the same answers: what is found, and what happens when blocks are lacking.
TIGHT: dict[str, Any] = {"num_kv_blocks": 6, "max_num_batched_tokens": 64}
WAYS: dict[str, dict[str, Any]] = {
    "shared beginnings": {},
    "nothing shared": {"enable_prefix_caching": False},
    "swapped": {**TIGHT, "preemption": "swap", "host_kv_memory": "4MiB"},
    "recomputed": {**TIGHT, "preemption": "recompute"},
    "shrunk": {**TIGHT, "preemption": "shrink"},
    "waited": {**TIGHT, "preemption": "wait"},
    "the cheapest way": {**TIGHT, "preemption": "auto", "host_kv_memory": "4MiB"},
}


def ask_twice(dtype: str, **settings: Any) -> tuple[list[Any], Any]:
    """Answer requests with a common beginning together, then all again; return tokens, logits and the statistics."""
    rng = random.Random(8)
    beginning = [rng.randrange(3, VOCAB) for _ in range(19)]
    prompts = [[*beginning, *(rng.randrange(3, VOCAB) for _ in range(rng.choice((1, 7, 13))))] for _ in range(4)]
    requests = [(prompt, SamplingParams(max_tokens=20, ignore_eos=True)) for prompt in prompts]
    with make_engine(dtype, **settings) as engine:
        recorder = Recorder(engine._runner.backend)
        engine._runner.backend = recorder
        results = []
        for _ in range(2):
            handles = [engine.add_request(*request) for request in requests]
            run(engine)
            for handle in handles:
                sequence = handle.sequences[0]
                rows = {pos: data for (sid, pos), data in recorder.logits.items() if sid == sequence.sequence_id}
                results.append((list(handle.output().outputs[0].token_ids), rows))
        stats = engine.stats()
        assert_all_free(engine)
    return results, stats


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def cold(request: pytest.FixtureRequest) -> tuple[str, list[Any]]:
    """The completions of an engine without prefix hits and without memory pressure."""
    return request.param, ask_twice(request.param, enable_prefix_caching=False)[0]


@pytest.mark.parametrize("way", WAYS)
def test_reuse_and_every_kind_of_preemption_change_no_bit(cold: tuple[str, list[Any]], way: str) -> None:
    """Cold, found, swapped, shrunk, recomputed or kept waiting: the same tokens from the same logits, byte for byte."""
    dtype, expected = cold
    results, stats = ask_twice(dtype, **WAYS[way])
    kinds = stats.num_preemptions_by_kind
    assert (stats.num_cached_tokens > 0) == (way != "nothing shared")
    assert {"swapped": kinds["swap"] > 0, "recomputed": kinds["recompute"] > 0, "shrunk": kinds["shrink"] > 0}.get(
        way, True
    ), kinds
    assert (stats.swapped_in_bytes > 0) or way != "swapped"
    for number, (result, answer) in enumerate(zip(results, expected, strict=True)):
        assert result[0] == answer[0], f"tokens of request {number}"
        assert result[1] == answer[1], f"logits of request {number}"
