"""Steps that overlap on a GPU that is as late as it may be: tokens are those of steps that are taken one by one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest

from pagedcore import AsyncEngine, SamplingParams
from pagedcore.demo_model.questions import demo_questions
from pagedcore.engine.engine import Engine
from pagedcore.execution.model_runner import ModelRunner
from pagedcore.requests.request import Request
from support.engine_builders import assert_all_free
from virtual_gpu.backends import on_gpu
from virtual_gpu.machine import Machine

FORMS: list[dict[str, Any]] = [
    {}, {"temperature": 0.9, "top_k": 12}, {"n": 2, "temperature": 1.0}, {"stop": ["3", "e"]},
    {"presence_penalty": 0.8, "repetition_penalty": 1.3}, {"min_tokens": 5, "logprobs": 2}, {"max_tokens": 1},
    {"ignore_eos": False, "structured": {"regex": "[a-z ]{2,9}[0-9]+"}, "temperature": 1.2},
    {"ignore_eos": False, "structured": {"choice": ["seven", "eleven"]}},
    {"prompt_logprobs": 1, "logprobs": 1}, {"logits_processor": lambda output_token_ids, logits: logits * 2.0},
    {"no_repeat_ngram_size": 2}, {"best_of": 2, "temperature": 1.0}, {"logit_bias": {7: 3.0}},
]
"""Which parameters requests have, in turn."""


def wanted(count: int, seed: int) -> list[tuple[str, SamplingParams]]:
    """Questions with parameters of every form, each with its own seed."""
    questions, rng = demo_questions(count, seed=seed), random.Random(seed)
    forms = [{"max_tokens": rng.randint(5, 12), "seed": place, "ignore_eos": place % 7 < 5, **FORMS[place % len(FORMS)]}
             for place in range(count)]
    return [(one.prompt, SamplingParams(**form)) for one, form in zip(questions, forms, strict=True)]


def demo(**settings: Any) -> Engine:
    return on_gpu("demo", dtype="float32", num_kv_blocks=12, preemption="swap", host_kv_memory="1MiB",
                  max_num_batched_tokens=12, max_num_waiting=64, **settings)


def results(request: Request) -> list[Any]:
    return [(one.token_ids, one.text, one.finish_reason, one.logprobs and [each.token_id for each in one.logprobs])
            for one in request.output().outputs]


def one_by_one(asked: list[tuple[str, SamplingParams]]) -> list[list[Any]]:
    """What requests get alone, from an engine that reads each step before it launches the next."""
    found = list[list[Any]]()
    with patch.object(ModelRunner, "can_launch", PropertyMock(return_value=False)), demo() as engine:
        for prompt, params in asked:
            request = engine.add_request(prompt, params)
            while engine.has_pending_requests():
                engine.step()
            found.append(results(request))
            request.remove()
    return found


class Faulty:
    """Lets launches, choices and reads fail by chance, after they were made."""

    def __init__(self, rng: random.Random, share: float) -> None:
        self.rng, self.share, self.num_failures = rng, share, 0

    def fails(self) -> bool:
        failed = self.rng.random() < self.share
        self.num_failures += failed
        return failed

    def after(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(runner: ModelRunner, *given: Any) -> Any:
            made = method(runner, *given)
            if self.fails():
                raise RuntimeError("a launch failed")
            return self.read(made) if callable(made) else made

        return call

    def read(self, wait: Callable[[], Any]) -> Callable[[], Any]:
        def waited() -> Any:
            if self.fails():
                raise RuntimeError("a copy failed")
            return wait()

        return waited


@pytest.mark.parametrize(("seed", "share"), [pytest.param(1, 0.0, marks=pytest.mark.slow), (2, 0.03)])
def test_random_company_changes_no_token(seed: int, share: float, gpus: Machine) -> None:
    """Requests of every form come and are aborted at random, are swapped, and steps fail now and then: every completion
    is what it is alone and one by one, one that was aborted a beginning of it, and no block is lost."""
    asked, rng = wanted(len(FORMS) + 5, seed), random.Random(seed)
    expected, faulty = one_by_one(asked), Faulty(random.Random(seed), share)
    launch, choose = (patch.object(ModelRunner, name, faulty.after(getattr(ModelRunner, name)))
                      for name in ("launch", "choose"))
    with demo(flight_recorder="off") as engine, launch, choose:
        coming, requests = list(asked), list[Request]()
        aborted = list[Request]()
        while coming or engine.has_pending_requests():
            if coming and rng.random() < 0.4:
                requests.append(engine.add_request(*coming.pop(0)))
            live = [one for one in requests if not one.is_done]
            if live and rng.random() < 0.04:
                aborted.append(rng.choice(live))
                aborted[-1].abort()
            engine.step()
        for request, alone in zip(requests, expected, strict=True):
            found = results(request)
            if request not in aborted:
                assert found == alone
                continue
            for (tokens, _, _, _), (whole, _, _, _) in zip(found, alone, strict=True):
                assert tokens == whole[: len(tokens)]
        assert engine.stats().num_preemptions > 0
        assert (faulty.num_failures > 0) == (share > 0)
        for _ in range(3):  # asks after the transfers that were still on their way
            engine.step()
        assert_all_free(engine)


@pytest.mark.kernels
def test_streams_of_an_async_engine_are_the_same(gpus: Machine) -> None:
    """All at once through an engine on a thread of its own: every stream has the tokens that its request gets alone."""
    asked = [one for one in wanted(len(FORMS), 3) if one[1].num_sequences == 1]
    expected = [[tokens for tokens, _, _, _ in one] for one in one_by_one(asked)]

    async def main() -> list[Any]:
        async with AsyncEngine(demo()) as engine:
            async def last(prompt: str, params: SamplingParams) -> Any:
                return [tuple([token async for one in engine.generate(prompt, params) for token in one.token_ids])]

            return await asyncio.gather(*(last(*one) for one in asked))

    assert asyncio.run(main()) == expected
