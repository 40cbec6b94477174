"""Scores of given completions: the bits of a completion that the engine made, and the numbers of transformers."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pagedcore import AsyncEngine
from pagedcore.engine.engine import Engine
from pagedcore.errors import (
    InvalidPrompt,
    InvalidRequest,
    InvalidSampling,
    InvalidText,
    InvalidToken,
    ProcessorFailed,
    PromptTooLong,
)
from pagedcore.sampling_params import SamplingParams
from support.engine_builders import assert_all_free, make_engine, run
from support.families import VOCAB, tiny_model

PROMPT = [5 + (7 * place) % 40 for place in range(37)]


def engine_of(**settings: Any) -> Engine:
    return Engine.from_pretrained(tiny_model("llama"), **{"num_kv_blocks": 64, "block_size": 16, **settings})


def log_softmax(prompt: list[int], completion: list[int]) -> list[float]:
    """What transformers says of each token of a completion."""
    model = tiny_model("llama")
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0].double()
    scores = torch.log_softmax(logits, -1)
    return [float(scores[len(prompt) + place - 1, token]) for place, token in enumerate(completion)]


def test_scores_are_those_of_transformers() -> None:
    """Of completions of any length, of one and of several."""
    completions = [[7], [3, 4, 5, 6], list(range(10, 40))]
    with engine_of() as engine:
        found = engine.score(PROMPT, completions)
        (alone,) = engine.score(PROMPT, completions[1])
    for completion, score in zip(completions, found, strict=True):
        expected = log_softmax(PROMPT, completion)
        assert score.token_ids == tuple(completion)
        np.testing.assert_allclose(score.logprobs, expected, atol=2e-3)
        assert score.total == pytest.approx(sum(expected), abs=2e-2)
        assert score.mean == pytest.approx(np.mean(expected), abs=2e-3)
    assert alone.logprobs == found[1].logprobs


@pytest.mark.parametrize("settings", [
    {}, {"enable_prefix_caching": False, "max_num_batched_tokens": 8, "max_num_seqs": 8},
    {"num_kv_blocks": 10, "block_size": 8, "preemption": "recompute", "max_num_seqs": 4},
])
def test_scores_have_the_bits_of_rollouts(settings: dict[str, Any]) -> None:
    """A sampled completion that is scored has the log-probabilities that it was reported with, byte for byte, in any
    schedule, beside other completions; the prompt is computed once."""
    params = SamplingParams(max_tokens=15, ignore_eos=True, temperature=1.0, logprobs=0)
    with engine_of(enable_prefix_caching=False) as engine:
        made = [engine.generate([PROMPT], SamplingParams(**{**vars_of(params), "seed": seed}), show_progress=False)[0]
                for seed in range(6)]
    rollouts = [one.outputs[0] for one in made]
    with engine_of(**settings) as engine:
        chat = engine.add_request([9, 8, 7], params)
        found = engine.score(PROMPT, [list(one.token_ids) for one in rollouts])
        for score, rollout in zip(found, rollouts, strict=True):
            assert score.logprobs == tuple(one.logprob for one in rollout.logprobs or ())
        run(engine)
        assert chat.is_done
        assert_all_free(engine)
        if not settings:
            assert min(one.num_cached_tokens for one in found[1:]) >= 32


ROLLOUTS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.9, "top_k": 12, "presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.3},
    {"temperature": 1.2, "min_p": 0.05, "logit_bias": {7: 3.0}, "min_tokens": 4, "stop_token_ids": [7, 9],
     "no_repeat_ngram_size": 2, "bad_words_ids": [[3], [4, 5]]},
    {"repetition_penalty": 1.5, "forced_eos_token_id": 11},
    {"temperature": 0.8, "top_p": 0.5, "logits_processor": lambda token_ids, row: row * np.float32(1 + len(token_ids))},
]


@pytest.mark.parametrize("place", range(len(ROLLOUTS)))
def test_processed_scores_have_the_bits_of_processed_rollouts(place: int) -> None:
    """What a request drew from at each token is what its tokens are scored by, in any schedule."""
    params = SamplingParams(max_tokens=15, ignore_eos=True, logprobs=2, logprobs_mode="processed", n=16,
                            **ROLLOUTS[place])
    with engine_of() as engine:
        rollouts = engine.generate([PROMPT], params, show_progress=False)[0].outputs
    settings: dict[str, Any] = [{}, {"enable_prefix_caching": False, "max_num_batched_tokens": 8, "max_num_seqs": 8}][
        place % 2]
    with engine_of(**settings) as engine:
        scores = engine.score(PROMPT, [list(one.token_ids) for one in rollouts], params=params)
        assert_all_free(engine)
    for score, rollout in zip(scores, rollouts, strict=True):
        assert score.logprobs == tuple(one.logprob for one in rollout.logprobs or ())
        assert math.isfinite(score.total)


def test_parameters_have_no_effect_on_scores_of_the_model() -> None:
    """Which ``logprobs_mode`` says, and is what it says where nothing else is given."""
    shaped = SamplingParams(temperature=0.3, top_k=2, repetition_penalty=2.0, max_tokens=1)
    with engine_of() as engine:
        plain = engine.score(PROMPT, [[5, 6, 7]])[0].logprobs
        assert engine.score(PROMPT, [[5, 6, 7]], params=shaped)[0].logprobs == plain
        assert engine.score(PROMPT, [[5, 6, 7]], temperature=1.0)[0].logprobs == plain
        assert engine.score(PROMPT, [[5, 6, 7]], temperature=0.9)[0].logprobs != plain


@pytest.mark.slow
@pytest.mark.parametrize("place", range(3))
def test_a_thousand_completions_of_the_demo_model(place: int) -> None:
    """Scores are the bytes of what the rollouts reported."""
    params = SamplingParams(max_tokens=32, logprobs=0, logprobs_mode="processed", n=16, **ROLLOUTS[place])
    with Engine.from_pretrained("demo") as engine:
        for number in range(21):
            prompt = f"What is {number % 7} + {number}?"
            rollouts = engine.generate([prompt], replace(params, seed=number), show_progress=False)[0].outputs
            scores = engine.score(prompt, [list(one.token_ids) for one in rollouts], params=params)
            for score, rollout in zip(scores, rollouts, strict=True):
                assert score.logprobs == tuple(one.logprob for one in rollout.logprobs or ())


def test_a_token_that_would_not_be_drawn_scores_minus_infinity() -> None:
    """Those behind it are scored as if it had been drawn; behind one that a grammar refuses, nothing can be."""
    with engine_of() as engine:
        best = engine.score(PROMPT, [[token] for token in range(VOCAB)], temperature=0.5)
        assert sum(math.exp(one.total) for one in best) == pytest.approx(1.0, abs=1e-5)
        first = max(range(VOCAB), key=lambda token: best[token].total)
        score = engine.score(PROMPT, [first, (first + 1) % VOCAB, first],
                             params=SamplingParams(temperature=0.5, top_k=1, logprobs_mode="processed"))[0]
        assert score.logprobs[0] == 0.0
        assert score.total == -math.inf
        banned = engine.score(PROMPT, [[first, 7, 8], [8, first, 7]], params=SamplingParams(
            allowed_token_ids=[7, 8], logprobs_mode="processed"))
        assert [[math.isfinite(value) for value in one.logprobs] for one in banned] == [
            [False, True, True], [True, False, True]]


def test_a_grammar_takes_part_in_scores() -> None:
    """The scores of a completion under it are the rollout's, in any chunks; what it refuses has none from there on."""
    pytest.importorskip("llguidance")
    params = SamplingParams(max_tokens=12, temperature=1.0, logprobs=0, logprobs_mode="processed", n=4,
                            structured={"regex": "[0-9]{3,8}"})
    with Engine.from_pretrained("demo", max_num_batched_tokens=8, max_num_seqs=8) as engine:
        made = engine.generate(["Hello"], params, show_progress=False)[0].outputs
        scores = engine.score("Hello", [*(list(one.token_ids) for one in made), "1234567 x 1"], params=params)
    assert [one.logprobs for one in scores[:-1]] == [
        tuple(entry.logprob for entry in one.logprobs or ()) for one in made]
    finite = [math.isfinite(value) for value in scores[-1].logprobs]
    assert finite[0]
    assert not finite[-1]
    assert finite == sorted(finite, reverse=True)


def test_what_the_processor_of_a_score_raises_ends_it() -> None:
    """As it ends a completion; nothing is left behind."""
    def fail(token_ids: list[int], row: Any) -> Any:
        raise ValueError("no")

    with engine_of() as engine:
        with pytest.raises(ProcessorFailed):
            engine.score(PROMPT, [[1, 2], [3]], params=SamplingParams(logits_processor=fail, logprobs_mode="processed"))
        with pytest.raises(InvalidSampling, match=r"got 0\.5"):
            engine.score(PROMPT, [[1]], temperature=0.5, params=SamplingParams())
        assert_all_free(engine)


def vars_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.given}


@pytest.mark.parametrize(("completions", "error", "words"), [
    ([[]], Exception, "at least 1 token"), ([""], InvalidText, "completion: got a string of 0"),
    ([[VOCAB]], InvalidToken, str(VOCAB)), ([7.5], InvalidPrompt, "completion: got 7.5"),
    (7, InvalidPrompt, "completions: got 7"), ([[1] * 5000], PromptTooLong, "behind this prompt"),
    (["a"], InvalidRequest, "tokenizer"),
])
def test_what_cannot_be_scored_is_refused(completions: Any, error: type[Exception], words: str) -> None:
    """With a typed error, and nothing was started."""
    with engine_of() as engine:
        with pytest.raises(error, match=words):
            engine.score(PROMPT, completions)
        assert not engine.has_pending_requests()


def test_an_engine_on_its_own_thread_scores_too() -> None:
    """With the same numbers."""
    completions = [[1 + place % 30] * 3 for place in range(100)]
    params = SamplingParams(temperature=0.7, presence_penalty=1.0, logprobs_mode="processed")
    with make_engine() as engine:
        expected = engine.score([1, 2, 3], completions)
        processed = engine.score([1, 2, 3], completions, params=params)

    async def main() -> None:
        async with AsyncEngine(make_engine()) as engine:
            found = await engine.score([1, 2, 3], completions)
            assert [one.logprobs for one in found] == [one.logprobs for one in expected]
            found = await engine.score([1, 2, 3], completions, params=params)
            assert [one.logprobs for one in found] == [one.logprobs for one in processed]
            assert engine.stats().num_blocks_used == 0

    asyncio.run(main())
