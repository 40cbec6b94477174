"""A second model that guesses, over toys that betray any misplaced block: it is in nobody's way, whatever it says."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.test_speculation import PROMPT
from pagedcore import Engine, SamplingParams
from pagedcore.drafting.drafts import Drafts
from pagedcore.execution.draft_model import DraftModel
from pagedcore.protocols import FloatArray, RaggedRows
from support.doubles import VOCAB_SIZE, ToyBackend, toy_answer
from support.drafts import Mistaken, assert_forgotten, draft_model, let_guess
from support.engine_builders import assert_all_free, make_engine, run

NO_SOURCE = Drafts(())


def with_model(small: Any, *, most: int = 6, pool: dict[str, Any] | None = None, **settings: Any) -> tuple[
    Engine, DraftModel
]:
    """Make an engine over a toy, and a model that drafts for it."""
    engine = make_engine(**{"num_kv_blocks": 64, "max_num_batched_tokens": 64, "speculation": "auto", **settings})
    model = draft_model(small, **(pool or {}))
    let_guess(engine, NO_SOURCE, VOCAB_SIZE, most, model=model)
    return engine, model


def test_right_drafts_save_steps() -> None:
    """A sequence has up to seven tokens a step; drafts that were right are not computed again, and neither is a prompt
    that another sequence had, which the small pool has cached.
    """
    small = ToyBackend()
    engine, _ = with_model(small, pool={"num_blocks": 64})
    params = SamplingParams(max_tokens=29, ignore_eos=True)
    for place in range(2):
        request, num_tokens = engine.add_request(PROMPT * 4, params), sum_of_tokens(small)
        assert run(engine) < 9
        assert list(engine.output_of(request).outputs[0].token_ids) == toy_answer(PROMPT * 4, 29)
        # The prompt and all tokens of the completion but the last ones.
        assert sum_of_tokens(small) - num_tokens <= (20 if place == 0 else 4) + 29


def sum_of_tokens(small: ToyBackend) -> int:
    """How many tokens a toy has computed up to now."""
    forward = small.forward
    if not hasattr(small, "num_computed"):
        small.num_computed = 0  # type: ignore[attr-defined]

        def counting(batch: RaggedRows) -> FloatArray:
            small.num_computed += int(batch.query_start[-1])  # type: ignore[attr-defined]
            return forward(batch)

        small.forward = counting  # type: ignore[method-assign]
    return int(small.num_computed)  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_blocks", [1, 2, 6])
def test_a_pool_without_room_means_fewer_drafts(num_blocks: int) -> None:
    """Sequences that the pool of the small model does not hold have none; the others have theirs."""
    engine, model = with_model(Mistaken(), pool={"num_blocks": num_blocks})
    requests = [engine.add_request([start, *PROMPT], SamplingParams(max_tokens=16, ignore_eos=True))
                for start in range(6)]
    run(engine)
    for start, request in enumerate(requests):
        assert list(engine.output_of(request).outputs[0].token_ids) == toy_answer([start, *PROMPT], 16)
    assert (engine.stats().num_accepted_tokens > 0) == (num_blocks > 1)
    assert_forgotten(model)


def test_a_sequence_that_is_far_behind_is_followed_bit_by_bit() -> None:
    """A long prompt is computed in pieces of the token budget, and no row waits for it; one that will have few tokens
    is not followed at all.
    """
    small = ToyBackend()
    engine, _ = with_model(small, pool={"num_blocks": 64, "max_num_batched_tokens": 16}, num_kv_blocks=128,
                           max_num_batched_tokens=128)
    prompt = [(7 * place) % 31 for place in range(100)]
    request = engine.add_request(prompt, SamplingParams(max_tokens=40, ignore_eos=True))
    counts = []
    while engine.has_pending_requests():
        engine.step()
        counts.append(len(request.sequences[0].output_token_ids))
    assert list(engine.output_of(request).outputs[0].token_ids) == toy_answer(prompt, 40)
    assert counts[:7] == [1, 2, 3, 4, 5, 6, 7]
    assert len(counts) < 16
    before = small.num_steps
    engine.generate([prompt[::-1]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert small.num_steps == before


class Broken(ToyBackend):
    """A toy that fails after some forwards."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self._error = error

    def forward(self, batch: RaggedRows) -> FloatArray:
        """Raise, or return what is no number."""
        logits = super().forward(batch)
        if self.num_steps > 4:
            if self._error is not None:
                raise self._error
            logits[:] = np.nan
        return logits


@pytest.mark.parametrize("error", [None, ValueError("mine"), MemoryError()], ids=str)
def test_a_model_that_fails_guesses_no_more(error: Exception | None, caplog: pytest.LogCaptureFixture) -> None:
    """One line in the log and the statistics say so; requests end as they would have."""
    small = Broken(error)
    engine, _ = with_model(small, pool={"num_blocks": 64})
    with caplog.at_level(logging.ERROR, "pagedcore"):
        outputs = engine.generate([PROMPT, PROMPT[1:]], SamplingParams(max_tokens=30, ignore_eos=True))
    for prompt, output in zip((PROMPT, PROMPT[1:]), outputs, strict=True):
        assert list(output.outputs[0].token_ids) == toy_answer(prompt, 30)
    assert [record.message for record in caplog.records] == [
        f"speculation: no drafts of speculative_model any more, after {type(error).__name__ if error else 'StepFailed'}"
        "; the engine continues without"]
    assert engine.stats().speculation.startswith("on, but no drafts of speculative_model any more")
    num_steps = small.num_steps
    engine.generate([PROMPT], SamplingParams(max_tokens=30, ignore_eos=True))
    assert small.num_steps == num_steps
    assert_all_free(engine)


def test_what_one_request_leaves_nothing_to_draw_from_is_no_failure() -> None:
    """The small model's likeliest tokens may be barred where the large one's are not."""

    class Narrow(ToyBackend):
        def logits_after(self, token_ids: npt.NDArray[np.int64]) -> FloatArray:
            logits = super().logits_after(token_ids)
            logits[1:] = -np.inf
            return logits

    engine, _ = with_model(Narrow())
    outputs = engine.generate([PROMPT], SamplingParams(max_tokens=9, ignore_eos=True, suppress_tokens=[0]))
    assert len(outputs[0].outputs[0].token_ids) == 9
    assert engine.stats().speculation == "on"


def test_a_small_vocabulary_or_context_ends_drafts_for_what_it_does_not_know() -> None:
    """A token that the small model has not, and a position that it was not made for, are nobody else's matter."""

    class Short(ToyBackend):
        max_model_len = 12

    class Few(ToyBackend):
        vocab_size = 8

        def logits_after(self, token_ids: npt.NDArray[np.int64]) -> FloatArray:
            return super().logits_after(token_ids)[:8]

    for small in (Short(), Few()):
        engine, _ = with_model(small)
        output = engine.generate([PROMPT], SamplingParams(max_tokens=20, ignore_eos=True))[0].outputs[0]
        assert list(output.token_ids) == toy_answer(PROMPT, 20)
        assert engine.stats().speculation == "on"
