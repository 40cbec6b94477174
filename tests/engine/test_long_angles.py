"""Sequences beyond a longrope model's short context are computed again with the long factors; no more is special.

The oracle of tokens is transformers' ``generate`` without a cache, which computes all of a sequence anew each time;
that of bits is the same request alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedcore.analysis.replay.decisions import replay_decisions
from pagedcore.engine.engine import Engine
from pagedcore.kv_cache.block_hash import KEY_BYTES
from pagedcore.models.transformers_model import TransformersModel
from pagedcore.outputs import RequestOutput
from pagedcore.sampling_params import SamplingParams
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from support.doubles import ToyBackend
from support.families import VOCAB, tiny_model
from support.recordings import dumped, ring_of, run_all, toy_engine
from virtual_gpu.backends import on_gpu
from virtual_gpu.torch_cuda import virtual_gpus

BORDER, NUM_TOKENS = 24, 20
#: The completions of the first are short, those of the others pass the border, begin at it, or lie behind it.
PROMPT_LENGTHS = (3, 5, 17, 24, 25, 40)
#: Architectures by the way they take: fused kernels, and modules whose cosines are scaled by the length too.
MSCALES = {"phi3": {}, "phimoe": {"short_mscale": 1.1, "long_mscale": 1.3}}
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=2)
SMALL: dict[str, Any] = {"num_kv_blocks": 64, "block_size": 4}


def model_of(family: str) -> Any:
    """A small model with very different factors, whose norms and biases are random too."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1 + place / 10 for place in range(8)],
            "long_factor": [3.0 + place for place in range(8)], "original_max_position_embeddings": BORDER,
            **MSCALES[family]}
    model = tiny_model(family, num_hidden_layers=2, max_position_embeddings=96, sliding_window=None,
                       original_max_position_embeddings=BORDER, rope_parameters=rope)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += torch.randn(parameter.shape) * 0.3
    return model


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, VOCAB, length).tolist() for length in PROMPT_LENGTHS]


def generated(model: Any, prompt: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, eos_token_id=None,
                             do_sample=False, pad_token_id=0, use_cache=False, **options)
    return list(out[0, len(prompt) :].tolist())


@pytest.fixture(scope="module", params=MSCALES)
def expected(request: pytest.FixtureRequest) -> tuple[TransformersModel, list[list[int]]]:
    """A backend, and what transformers generates for each prompt."""
    model = model_of(request.param)
    tokens = [generated(model, prompt) for prompt in prompts()]
    return TransformersModel(model, NumbaCpuAttention, block_size=4), tokens


@pytest.fixture(scope="module")
def backend() -> TransformersModel:
    return TransformersModel(model_of("phi3"), NumbaCpuAttention, block_size=4)


def alone(backend: TransformersModel, prompt: list[int], params: SamplingParams = GREEDY) -> RequestOutput:
    with Engine.from_pretrained(backend, **SMALL, enable_prefix_caching=False) as engine:
        return engine.generate([prompt], params)[0]


def bits(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [(one.token_ids, one.logprobs, one.score, one.finish_reason) for one in output.outputs]


@pytest.mark.parametrize("settings", [
    {}, {"max_num_batched_tokens": 7, "max_num_seqs": 3, "num_kv_blocks": 16},
], ids=str)
def test_answers_on_both_sides_of_the_border_are_those_of_generate(
    expected: tuple[TransformersModel, list[list[int]]], settings: dict[str, Any]
) -> None:
    """Before it, behind it and across it, whole and in chunks, with rows of both kinds in one batch."""
    backend, tokens = expected
    with Engine.from_pretrained(backend, **{**SMALL, **settings}, check_invariants=True) as engine:
        assert engine.stats().max_model_len == 96
        outputs = engine.generate(prompts(), GREEDY)
    assert [list(one.outputs[0].token_ids) for one in outputs] == tokens


def test_the_border_depends_on_the_tokens_alone(backend: TransformersModel) -> None:
    """How many tokens were asked for changes none of them; the one that passes the border may be the last."""
    whole = alone(backend, prompts()[2])
    for num_tokens in (6, 7, 8, 9):
        part = alone(backend, prompts()[2], SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True))
        assert part.outputs[0].token_ids == whole.outputs[0].token_ids[:num_tokens]


def test_long_and_short_neighbours_share_nothing(backend: TransformersModel) -> None:
    """A prompt finds the beginnings of its own kind, and those of the other kind are not taken for them."""
    asked = [prompts()[5][:length] for length in (3, 40, 40, 22, 14, 40, 36)]
    with Engine.from_pretrained(backend, **SMALL, check_invariants=True) as engine:
        outputs = [engine.generate([prompt], GREEDY)[0] for prompt in asked]
    assert [one.num_cached_tokens for one in outputs] == [0, 0, 39, 3, 13, 39, 35]
    for prompt, output in zip(asked, outputs, strict=True):
        assert bits(output) == bits(alone(backend, prompt)), len(prompt)


@pytest.mark.parametrize("num_tokens", [6, 8])
@pytest.mark.parametrize("how", ["in place", "host", "disk", "exported"])
def test_a_turn_that_passes_the_border_finds_nothing(
    how: Any, num_tokens: int, backend: TransformersModel, tmp_path: Path
) -> None:
    """However the first turn was kept, the second one is a request with all tokens, scores of the prompt included; also
    where the last token of the first turn was already beyond the border, and no step has followed it.
    """
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    with Engine.from_pretrained(backend, **SMALL, host_kv_memory="4MiB", check_invariants=True) as engine:
        session = engine.session(params)
        first = session.ask(prompts()[2])
        if how == "exported":
            session.export(tmp_path / "session")
            session = engine.import_session(tmp_path / "session")
        elif how != "in place":
            assert session.park(how).tier == (how if num_tokens == 6 else "tokens")
        second = session.ask([7, 8, 9])
    whole = alone(backend, [*prompts()[2], *first.outputs[0].token_ids, 7, 8, 9], params)
    assert bits(second) == bits(whole)
    assert second.prompt_logprobs == whole.prompt_logprobs
    assert second.num_cached_tokens == 0


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_what_the_next_turn_cannot_read_is_not_copied_to_the_host(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session's blocks go there when a turn ends, unless its last token was the one that passed the border."""
    monkeypatch.setattr(ToyBackend, "num_short_tokens", 9)
    with toy_engine(host_kv_memory=24 * 4 * 16, preemption="swap") as engine:
        engine.session().ask([1, 2, 3, 4, 5, 6, 7, 8], SamplingParams(max_tokens=num_tokens, ignore_eos=True))
        assert engine.stats().num_host_blocks_cached == (2 if num_tokens == 1 else 0)


def test_kv_of_one_kind_is_not_read_for_the_other(backend: TransformersModel, tmp_path: Path) -> None:
    """A file with the KV of a long session's beginning is of no use to a session that is that beginning."""
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    with Engine.from_pretrained(backend, **SMALL, session_key="a secret of 16 bytes") as engine:
        for name, prompt in (("long", prompts()[5]), ("short", prompts()[5][:16])):
            session = engine.session(params)
            session.ask(prompt)
            session.export(tmp_path / name)
        kinds = [engine.sessions.describe_kv(tuple(prompts()[5][:length]), 16) for length in (BORDER, BORDER + 1)]
        assert kinds[0].token_ids == kinds[1].token_ids
        assert not set(kinds[0].block_keys()) & set(kinds[1].block_keys())
        for name, num_found in (("long", 41), ("short", 17)):
            with engine.import_session(tmp_path / name) as session:
                assert session.ask([5]).num_cached_tokens == num_found


@pytest.mark.parametrize("more", [
    {"n": 3, "temperature": 0.9, "seed": 3}, {"n": 2, "best_of": 3, "temperature": 0.9, "seed": 3},
    {"beam_width": 3, "n": 3},
], ids=str)
def test_completions_that_branch_pass_the_border(more: dict[str, Any], backend: TransformersModel) -> None:
    """Several completions of a prompt, and beams, are the same alone and where each of them is computed many times."""
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2, **more)
    expected = [bits(alone(backend, prompt, params)) for prompt in prompts()[1:4]]
    tight: dict[str, Any] = {"num_kv_blocks": 34, "block_size": 4, "max_num_seqs": 9, "host_kv_memory": "4MiB"}
    for preemption in ("swap", "recompute"):
        with Engine.from_pretrained(backend, **tight, preemption=preemption, check_invariants=True) as engine:
            assert [bits(one) for one in engine.generate(prompts()[1:4], params)] == expected
            assert engine.stats().num_preemptions > 0 or params.beam_width > 1


def test_beams_across_the_border_are_those_of_generate() -> None:
    """Every beam is computed again as one sequence."""
    model = model_of("phi3")
    tokens = generated(model, prompts()[2], num_beams=3, length_penalty=1.0, early_stopping=True)
    with Engine.from_pretrained(model, **SMALL) as engine:
        params = SamplingParams(max_tokens=NUM_TOKENS, beam_width=3, early_stopping=True, ignore_eos=True)
        output = engine.generate([prompts()[2]], params)[0]
    assert list(output.outputs[0].token_ids) == tokens


@pytest.mark.parametrize("max_steps", [8192, 12])
@pytest.mark.parametrize("more", [{"n": 3, "temperature": 1.0}, {"beam_width": 3}, {}], ids=str)
def test_recordings_tell_long_from_short(
    more: dict[str, Any], max_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decisions are taken again where prompts of both kinds have one beginning, from any step on, and the recording
    says which blocks the other kind may not share."""
    monkeypatch.setattr(ToyBackend, "num_short_tokens", 9)
    with toy_engine(num_kv_blocks=16, host_kv_memory=24 * 4 * 16, preemption="swap") as engine:
        ring_of(engine)._max_steps = max_steps // 2
        for _ in range(3):
            run_all(engine, [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 3, 4]], **more)
        recording = dumped(engine, tmp_path)
    found = replay_decisions(recording)
    assert found.difference is None
    roots = [root for segment in recording.segments for root in segment["state"]["device"]["roots"]]
    assert any(len(root) > KEY_BYTES for root in roots) == (max_steps < 100)
    assert found.num_steps > 4


def test_recorded_steps_have_rows_of_both_kinds() -> None:
    """On a GPU, where decode steps are recorded, the angles of a row belong to the step and not to its recording."""
    model = model_of("phi3")
    tokens = [generated(model, prompt) for prompt in prompts()[1:5]]
    with virtual_gpus() as gpus, on_gpu(model, **SMALL, max_num_batched_tokens=512, max_num_seqs=32) as engine:
        outputs = engine.generate(prompts()[1:5], GREEDY)
    assert [list(one.outputs[0].token_ids) for one in outputs] == tokens
    assert gpus.counts["graph launches"] > 3 * gpus.counts["graphs recorded"] > 0
