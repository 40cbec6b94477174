"""Engines whose model has layers with a window: what they keep, what is found again, and that no byte of an answer
depends on it. The oracle is transformers' ``generate``, or the same engine with one kind of blocks.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from pagedcore.cli.size import size_model
from pagedcore.config.memory_budget import MemoryBudget
from pagedcore.engine import window_memory
from pagedcore.engine.engine import Engine
from pagedcore.models.attention.layers import AttentionLayer
from pagedcore.models.attention.windows import WindowSplit
from pagedcore.models.transformers_model import TransformersModel
from pagedcore.sampling_params import SamplingParams
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from support.doubles import ToyWindowed, toy_answer
from support.engine_builders import assert_all_free, make_engine, run
from support.families import VOCAB, tiny_model

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma 3": ("gemma3_text", {"num_hidden_layers": 3, "sliding_window": 40, "layer_types": [
        "sliding_attention", "sliding_attention", "full_attention"]}),
    "gpt-oss": ("gpt_oss", {"num_hidden_layers": 2, "sliding_window": 24}),
    "windows alone": ("mistral", {"num_hidden_layers": 2, "sliding_window": 40}),
}
SIZES: dict[str, Any] = {"num_kv_blocks": 256, "block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64,
                         "num_threads": 1, "check_invariants": True, "max_num_waiting": 64}


def params(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = random.Random(str(lengths))
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


def backend_of(kind: str, dtype: torch.dtype = torch.float32) -> TransformersModel:
    name, overrides = KINDS[kind]
    model = tiny_model(name, dtype=dtype, max_position_embeddings=4096, **overrides)
    return TransformersModel(model, NumbaCpuAttention, runs_self_test=False)


# Why fewer each time: ``generate`` takes 30 ms a token, and 25 tokens pass each border from 15, 17, window and 65 on.
@pytest.mark.parametrize(("others", "num_tokens"), [
    ((), 25), pytest.param((1, 16, 63, 64), 40, marks=pytest.mark.slow),
], ids=["few", "many"])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_generate(kind: str, others: tuple[int, ...], num_tokens: int) -> None:
    """At lengths around the borders of window and blocks, a ragged batch answers as transformers' ``generate`` does."""
    name, overrides = KINDS[kind]
    window = overrides["sliding_window"]
    prompts = prompts_of(*others, 15, 17, window - 1, window, window + 1, 65, 150)
    model = tiny_model(name, max_position_embeddings=4096, **overrides)
    with torch.no_grad():
        expected = [model.generate(torch.tensor([one]), max_new_tokens=num_tokens, min_new_tokens=num_tokens,
                                   do_sample=False, pad_token_id=0)[0, len(one) :].tolist() for one in prompts]
    with Engine.from_pretrained(model, **SIZES) as engine:
        outputs = engine.generate(prompts, params(num_tokens, min_tokens=num_tokens))
        assert engine.stats().num_windows_evicted > 0
    assert [list(one.outputs[0].token_ids) for one in outputs] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_sequence_keeps_its_window(kind: str) -> None:
    """Between steps a sequence of 1,000 tokens has blocks for all of them, and window blocks for its window alone; the
    bytes of both are those of the layers."""
    window, size = KINDS[kind][1]["sliding_window"], SIZES["block_size"]
    engine = make_engine(backend_of(kind), **SIZES)
    engine.add_request(prompts_of(980)[0], params(20))
    most = 0
    while engine.has_pending_requests():
        engine.step()
        most = max(most, engine.stats().num_windows_used)
    stats, whole = engine.stats(), backend_of(kind).kv_block_bytes(size)
    assert most <= -(-window // size) + 1
    assert stats.num_windows == 4 * (-(-window // size) + 2) + 64 // size
    of_window = engine.components.memory.windows.block_bytes
    assert stats.kv_bytes == 256 * (whole - of_window) + stats.num_windows * of_window
    num_layers, num_full = KINDS[kind][1]["num_hidden_layers"], 0 if kind == "windows alone" else 1
    assert of_window * num_layers == whole * (num_layers - num_full)
    engine.close()


def test_size_says_what_an_engine_takes(tmp_path: Path) -> None:
    """``pagedcore size`` counts blocks without layers with a window, and window blocks, as the engine makes them."""
    name, overrides = KINDS["gemma 3"]
    model = tiny_model(name, max_position_embeddings=4096, **overrides)
    model.config.save_pretrained(tmp_path)
    report = size_model(str(tmp_path), context=2000, concurrency=4, dtype="float32", memory="1GiB")
    settings: dict[str, Any] = {**report.settings, "block_size": report.block_size}
    engine = make_engine(TransformersModel(model, NumbaCpuAttention, runs_self_test=False), **settings)
    assert (report.window, report.num_windows) == (40, engine.stats().num_windows)
    assert engine.stats().kv_bytes == report.kv_bytes + report.window_bytes
    assert report.block_bytes * 2 == report.window_block_bytes
    engine.close()


def answers(backend: TransformersModel, **settings: Any) -> list[str]:
    """What requests with a common beginning answer that come at once, are sampled, forked and preempted."""
    engine = make_engine(backend, **{**SIZES, **settings})
    beginning, rng = prompts_of(50)[0], random.Random(5)
    requests = []
    for number in range(8):
        own = [rng.randrange(3, VOCAB) for _ in range(1 + 11 * number)]
        how: dict[str, Any] = {} if number % 2 else {"temperature": 0.9, "seed": number}
        forks: dict[str, Any] = {"n": 2} if number == 4 else {"beam_width": 2} if number == 5 else {"logprobs": 2}
        requests.append(engine.add_request([*beginning, *own], params(30, **how, **forks)))
    run(engine)
    found = [repr([(one.token_ids, one.logprobs) for one in request.output().outputs]) for request in requests]
    assert_all_free(engine)
    engine.close()
    return found


@pytest.mark.parametrize(("kind", "dtype"), [("gemma 3", torch.float32), ("windows alone", torch.bfloat16)])
def test_two_kinds_give_the_bits_of_one(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and log-probabilities are the same bytes with one kind of blocks and with two, in pools of all sizes and
    chunks of all lengths, with drafts and without."""
    with monkeypatch.context() as patch:
        patch.setattr(window_memory, "num_windows_for", lambda *_: 0)
        alone = answers(backend_of(kind, dtype), max_num_seqs=1, max_num_batched_tokens=256)
    for settings in ({}, {"num_kv_blocks": 24}, {"max_num_batched_tokens": 7, "max_num_seqs": 7},
                     {"speculation": "auto"} if dtype == torch.float32 else {"preemption": "recompute"}):
        backend = backend_of(kind, dtype)
        assert answers(backend, **settings) == alone, settings


def test_a_prefix_is_found_with_its_window() -> None:
    """Requests behind a common beginning compute it once; where its window blocks are gone it is computed again."""
    engine = make_engine(ToyWindowed(), num_kv_blocks=400, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    beginning = [number % 30 for number in range(200)]
    for number, computed in enumerate((200 + 4, 4, 4)):
        before = engine.stats().num_computed_tokens
        request = engine.add_request([*beginning, number + 1], params(4))
        run(engine)
        assert list(request.output().outputs[0].token_ids) == toy_answer([*beginning, number + 1], 4)
        assert engine.stats().num_computed_tokens - before == computed
    engine.add_request([9] * 800, params(1))
    run(engine)
    before = engine.stats().num_computed_tokens
    engine.add_request([*beginning, 9], params(4))
    run(engine)
    assert engine.stats().num_computed_tokens - before == 4, "what was found before is evicted last"
    assert_all_free(engine)


@pytest.mark.parametrize("settings", [
    {"host_kv_memory": 2**16}, {"max_model_len": 12}, {"num_kv_blocks": 7},
    {"num_kv_blocks": None, "kv_cache_memory": 7 * 128},
])
def test_where_a_pool_has_one_kind(settings: dict[str, Any]) -> None:
    """With a host tier, in contexts that a window covers, or with too little memory for two windows, all layers keep
    all positions in their blocks."""
    engine = make_engine(ToyWindowed(), **{"num_kv_blocks": 64, **settings})
    request = engine.add_request([1, 2, 3, 4, 5], params(6))
    run(engine)
    assert list(request.output().outputs[0].token_ids) == toy_answer([1, 2, 3, 4, 5], 6)
    assert (engine.stats().num_windows, engine.stats().block_size) == (0, 4)
    engine.close()


def test_windows_share_the_budget_of_blocks() -> None:
    """Half the blocks of a pool of one kind get window blocks, the rest of the bytes are blocks; what a shared budget
    has given goes back."""
    engine = make_engine(ToyWindowed(), num_kv_blocks=None, kv_cache_memory=100 * 128, max_num_seqs=64,
                         max_num_batched_tokens=64)
    stats = engine.stats()
    assert (stats.num_windows, stats.num_blocks, stats.kv_bytes) == (50, 150, 100 * 128)
    engine.close()
    budget = MemoryBudget(100 * 128)
    engine = make_engine(ToyWindowed(), num_kv_blocks=None, kv_cache_memory=budget.share(100 * 128), max_num_seqs=64,
                         max_num_batched_tokens=64)
    assert (engine.stats().num_windows, engine.stats().num_blocks, budget.left_bytes) == (50, 150, 0)
    engine.close()
    assert budget.left_bytes == 100 * 128


def test_sessions_travel_with_their_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation that was exported goes on elsewhere without computing anything again, from a file of window blocks
    and from one of an engine with one kind of blocks."""
    backend, path, told = backend_of("gemma 3"), tmp_path / "conversation", prompts_of(100)[0]
    for has_one_kind in (True, False):
        with monkeypatch.context() as patch:
            if has_one_kind:
                patch.setattr(window_memory, "num_windows_for", lambda *_: 0)
            engine = make_engine(backend, **SIZES)
            session = engine.session(params(10))
            session.ask(told, params(20))
            session.export(path, include_kv=True)
            expected = session.ask([7, 8, 9], params(10)).outputs[0].token_ids
            engine.close()
        engine = make_engine(backend, **SIZES)
        assert engine.stats().num_windows > 0
        session = engine.import_session(path)
        before = engine.stats().num_computed_tokens
        assert session.ask([7, 8, 9], params(10)).outputs[0].token_ids == expected
        assert engine.stats().num_computed_tokens - before == 1 + 3 + 9
        engine.close()
        if has_one_kind:
            engine = make_engine(backend, **SIZES)
            with monkeypatch.context() as patch:
                patch.setattr(engine.sessions.parking.window_store, "divide", Mock(side_effect=MemoryError))
                session = engine.import_session(path)
            assert session.ask([7, 8, 9], params(10)).outputs[0].token_ids == expected, "what fails costs the KV alone"
            engine.close()


@pytest.mark.parametrize("windows", [(0, 8), (8, 0)])
def test_keys_that_a_layer_without_a_window_reads_too_are_kept_to_the_beginning(windows: tuple[int, int]) -> None:
    """Layers that share K and V have window blocks only if all of them have a window: the largest one."""
    def split(*given: tuple[int, int]) -> WindowSplit | None:
        layers = {number: AttentionLayer(index, True, 1, 1, 8, 8, 1.0, window=window)
                  for number, (index, window) in enumerate(given)}
        return WindowSplit.of(layers, NumbaCpuAttention)

    assert split(*((0, one) for one in windows)) is None
    assert split(*((0, one) for one in windows), (1, 4)) == WindowSplit(4, ((False, 0), (True, 0)))
    assert split((0, 4), (0, 8)) == WindowSplit(8, ((True, 0),))
