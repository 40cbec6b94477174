"""Scores of given completions: the bits of a completion that the engine made, and the numbers of transformers."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from pagedcore import AsyncEngine
from pagedcore.engine.engine import Engine
from pagedcore.errors import InvalidPrompt, InvalidRequest, InvalidText, InvalidToken, PromptTooLong
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
    with make_engine() as engine:
        expected = engine.score([1, 2, 3], completions)

    async def main() -> None:
        async with AsyncEngine(make_engine()) as engine:
            found = await engine.score([1, 2, 3], completions)
            assert [one.logprobs for one in found] == [one.logprobs for one in expected]
            assert engine.stats().num_blocks_used == 0

    asyncio.run(main())
