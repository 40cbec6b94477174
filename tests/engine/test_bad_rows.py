"""A request that makes the model raise ends alone; a step that lacks memory is repeated with half of its tokens."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pagedcore import AsyncEngine, SamplingParams
from pagedcore.errors import StepFailed
from pagedcore.serving import health
from support.doubles import ToyBackend, toy_answer
from support.engine_builders import assert_all_free, make_engine, run

POISON = 29
"""Twice in a row it is poison; no completion of these tests has that."""


def params(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)


class PoisonBackend(ToyBackend):
    """Raises while a row computes the poison, after it has written the batch."""

    def forward(self, batch: Any) -> Any:
        """Compute, then raise."""
        logits = super().forward(batch)
        for first, last in zip(batch.query_start, batch.query_start[1:], strict=False):
            if (POISON, POISON) in pairwise(batch.token_ids[first:last].tolist()):
                raise ValueError("a bad token")
        return logits


class SmallBackend(ToyBackend):
    """Has memory for so many tokens at a time, and keeps the sizes of its batches."""

    def __init__(self, most_tokens: int) -> None:
        super().__init__()
        self.most_tokens = most_tokens
        self.sizes: list[int] = []

    def forward(self, batch: Any) -> Any:
        """Compute what fits."""
        self.sizes.append(int(batch.query_start[-1]))
        if self.sizes[-1] > self.most_tokens:
            raise RuntimeError("CUDA error: out of memory")
        return super().forward(batch)


def tokens(request: Any) -> list[int]:
    return list(request.output().outputs[0].token_ids)


def test_a_bad_prompt_ends_alone() -> None:
    """In a chunk of its prompt or in its last one: the others of the batch have the tokens that they have alone, what
    the bad one wrote is found by no other request, and no block is lost."""
    for bad in ([POISON, POISON, 2], [1] * 5 + [POISON] * 2 + [2] * 4, [3, POISON, POISON]):
        engine = make_engine(PoisonBackend(), num_kv_blocks=32, max_num_seqs=8, max_num_batched_tokens=16)
        requests = [engine.add_request(one, params(6)) for one in ([1, 1], bad, [2, 2], [1, 1, 1])]
        run(engine)
        assert isinstance(requests[1].error, StepFailed)
        assert isinstance(requests[1].error.__cause__, ValueError)
        for request, prompt in zip(requests[::2] + requests[3:], ([1, 1], [2, 2], [1, 1, 1]), strict=True):
            assert tokens(request) == toy_answer(prompt, 6)
        assert_all_free(engine)


def test_draws_of_the_others_are_those_without_the_bad_one() -> None:
    """Sampled, penalised and chosen completions are bit for bit the same with the bad request and without it."""
    wanted = [params(6, temperature=1.0, seed=1, logprobs=2), params(6, temperature=2.0, seed=2, frequency_penalty=1.0),
              params(4, n=2, best_of=3, temperature=1.0, seed=3), params(4, beam_width=2)]

    def draw(*, is_disturbed: bool) -> list[Any]:
        engine = make_engine(PoisonBackend(), num_kv_blocks=64, max_num_seqs=16, max_num_batched_tokens=32)
        requests = [engine.add_request([1 + i, 2], one) for i, one in enumerate(wanted)]
        engine.step()
        bad = engine.add_request([POISON] * 2, params(3)) if is_disturbed else None
        run(engine)
        assert bad is None or bad.is_done
        return [[(one.token_ids, one.logprobs, one.score) for one in request.output().outputs] for request in requests]

    assert draw(is_disturbed=True) == draw(is_disturbed=False)


def test_of_a_group_only_the_bad_request_ends() -> None:
    """All completions of a request with the poison end with its error; of its neighbours none."""
    engine = make_engine(PoisonBackend(), num_kv_blocks=64, max_num_seqs=16, max_num_batched_tokens=32)
    bad = [engine.add_request([POISON] * 2, one) for one in (
        params(3, n=2, temperature=1.0), params(3, n=2, best_of=3, temperature=1.0), params(3, beam_width=3))]
    good = engine.add_request([1, 2], params(3))
    run(engine)
    for request in bad:
        assert {one.finish_reason for one in request.output().outputs} == {"error"}
        assert isinstance(request.error, StepFailed)
    assert tokens(good) == toy_answer([1, 2], 3)
    assert_all_free(engine)


def test_a_conversation_continues_after_its_bad_turn() -> None:
    """A turn whose rows made the model raise is cut off like any other error; another session continues meanwhile."""
    engine = make_engine(PoisonBackend())
    with engine.session(params(3)) as session, engine.session(params(3)) as other:
        first = session.ask([1, 2])
        running = other.extend([4])
        assert isinstance(session.ask([POISON] * 2).outputs[0].error, StepFailed)
        run(engine)
        assert tokens(running) == toy_answer([4], 3)
        assert list(first.outputs[0].token_ids) == toy_answer([1, 2], 3)
        assert session.token_ids[-1] == POISON
    assert_all_free(engine)


async def test_seven_of_eight_callers_finish() -> None:
    """With the tokens that they have alone; the eighth gets ``StepFailed``, and the engine's health is "ready", however
    many such requests come one after the other."""
    async with AsyncEngine(make_engine(PoisonBackend(), num_kv_blocks=64, max_num_seqs=8)) as engine:
        for bad in range(health.MAX_FAILED_STEPS + 2):
            prompts = [[POISON, POISON] if i == bad else [i + 1, 2, 3] for i in range(8)]
            futures = [asyncio.wrap_future(engine.submit(prompt, params(12))) for prompt in prompts]
            outputs = [(await future).outputs[0] for future in futures]
            assert [one.finish_reason for one in outputs].count("error") == 1
            assert isinstance(outputs[bad].error, StepFailed)
            for prompt, one in zip(prompts, outputs, strict=True):
                assert one.error is not None or list(one.token_ids) == toy_answer(prompt, 12)
            assert engine.health().status == "ready"
            assert engine.health().num_failed_steps == 0


@pytest.mark.parametrize("most_tokens", [8, 5, 4])
def test_a_step_without_memory_is_repeated_with_half_of_its_tokens(most_tokens: int) -> None:
    """Never in halves of its rows: one forward more, all completions are right, no request ends."""
    backend = SmallBackend(most_tokens)
    engine = make_engine(backend, max_num_seqs=2, max_num_batched_tokens=8)
    requests = [engine.add_request(prompt, params(4)) for prompt in ([1] * 9, [2, 3])]
    run(engine)
    assert [tokens(request) for request in requests] == [toy_answer([1] * 9, 4), toy_answer([2, 3], 4)]
    for size, following in zip(backend.sizes, backend.sizes[1:], strict=False):
        assert size <= most_tokens or following <= size // 2
    assert_all_free(engine)


def test_a_half_without_memory_ends_the_requests_of_that_half() -> None:
    """It is tried once; what was not part of it waits for the next step."""
    backend = SmallBackend(1)
    engine = make_engine(backend, max_num_seqs=2, max_num_batched_tokens=8)
    requests = [engine.add_request([1] * 6, params(2)), engine.add_request([2], params(2))]
    run(engine)
    assert backend.sizes[:2] == [7, 3]
    assert isinstance(requests[0].error, StepFailed)
    assert tokens(requests[1]) == toy_answer([2], 2)
    assert_all_free(engine)


def test_memory_that_a_lack_of_memory_in_the_forward_needs() -> None:
    """Python's own error counts too, and a lost device ends the batch without a further forward."""
    backend = ToyBackend()
    engine = make_engine(backend, max_num_seqs=4)
    forward, errors = backend.forward, [MemoryError(), None, RuntimeError("CUDA error: device lost"), None, None]

    def failing(batch: Any) -> Any:
        error = errors.pop(0) if errors else None
        if error is not None:
            raise error
        return forward(batch)

    backend.forward = failing  # type: ignore[method-assign]
    requests = [engine.add_request([value], params(3)) for value in (1, 2)]
    engine.step()
    assert not any(request.is_done for request in requests)
    engine.step()
    assert len(errors) == 2
    assert [type(request.error) for request in requests] == [StepFailed, StepFailed]
    assert_all_free(engine)


def test_a_model_that_returns_no_logits_ends_its_requests_and_nothing_else() -> None:
    """Every request of the batch gets a typed error, whose cause says what was returned; the next ones are answered."""
    backend = ToyBackend()
    engine, forward = make_engine(backend, max_num_seqs=8), backend.forward
    backend.forward = lambda batch: np.asarray(forward(batch), np.float64)  # type: ignore[method-assign]
    requests = [engine.add_request([value], params(3)) for value in range(1, 9)]
    run(engine)
    assert [type(request.error) for request in requests] == [StepFailed] * 8
    assert "float64" in str(requests[0].error.__cause__)
    backend.forward = forward  # type: ignore[method-assign]
    again = engine.add_request([1], params(3))
    run(engine)
    assert tokens(again) == toy_answer([1], 3)
    assert_all_free(engine)
