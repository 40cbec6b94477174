"""Hooks whose calls bring what they are told of again: the chain ends by name, and costs nobody else anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pagedcore import AsyncEngine, SamplingParams
from pagedcore.engine.engine import Engine
from pagedcore.engine.step import MOST_DEPTH
from pagedcore.errors import HooksTooDeep
from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.requests.observers import EngineObserver
from pagedcore.requests.request import Request
from support.ahead import launched_ahead
from support.doubles import ToyBackend, toy_answer
from support.engine_builders import assert_all_free, make_engine

KINDS = {"plain": ToyBackend, "overlapping": launched_ahead(ToyBackend)}
NEIGHBOURS = [[1, 2, 3], [4, 5, 6, 7]]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


class Endless(EngineObserver):
    """Calls the engine each time that it is told of one of its own requests, or of any step."""

    def __init__(self, hook: str, num_prompts: int) -> None:
        self.engine: Engine | None = None
        self.refusals: list[HooksTooDeep] = []
        self.deepest = self._depth = 0
        self._hook, self._num_prompts = hook, num_prompts

    def fire(self, hook: str, call: Callable[[Engine], object]) -> None:
        if self.engine is None or hook != self._hook:
            return
        self._depth += 1
        self.deepest = max(self.deepest, self._depth)
        try:
            call(self.engine)
        except HooksTooDeep as error:
            self.refusals.append(error)
            raise
        finally:
            self._depth -= 1

    def generate(self, engine: Engine) -> None:
        engine.generate([[9, 8, one] for one in range(self._num_prompts)], greedy(2), show_progress=False)

    def request_accepted(self, request: Request) -> None:
        self.fire("request_accepted", lambda engine: engine.add_request([9], greedy(1)))

    def request_ended(self, request: Request) -> None:
        self.fire("request_ended", self.generate)

    def step_ended(self) -> None:
        self.fire("step_ended", lambda engine: engine.step())

    @hookimpl
    def pagedcore_step(self, stats: object) -> None:
        self.fire("pagedcore_step", lambda engine: engine.step())

    @hookimpl
    def pagedcore_request_finished(self, request: object) -> None:
        self.fire("pagedcore_request_finished", self.generate)


HOOKS = {"request_accepted": "add_request", "request_ended": "generate", "step_ended": "step",
         "pagedcore_step": "step", "pagedcore_request_finished": "generate"}


def made(hook: str, kind: str, num_prompts: int = 1) -> tuple[Engine, Endless]:
    """An engine with such a hook, which begins with the next call."""
    endless = Endless(hook, num_prompts)
    engine = make_engine(KINDS[kind](), plugins=[endless], num_kv_blocks=64, max_num_seqs=8)
    if not hook.startswith("pagedcore"):
        engine.add_observer(endless)
    endless.engine = engine
    return engine, endless


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_chain_of_hooks_ends_and_its_neighbours_do_not_notice(
    hook: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The fifth hook's call is refused by the names of both and the bound, which is logged; no call of the program
    raises, and all others have their tokens."""
    engine, endless = made(hook, kind)
    requests = [engine.add_request(prompt, greedy(6)) for prompt in NEIGHBOURS]
    while engine.has_pending_requests():
        engine.step()
    for request, prompt in zip(requests, NEIGHBOURS, strict=True):
        assert list(request.output().outputs[0].token_ids) == toy_answer(prompt, 6)
    assert endless.deepest == MOST_DEPTH + 1
    assert {(one.call, one.hook) for one in endless.refusals} == {(HOOKS[hook], f"Endless.{hook}")}
    assert f"allowed are {MOST_DEPTH}" in caplog.text
    endless.engine = None
    assert [one.outputs[0].token_ids for one in engine.generate([[5]], greedy(3))] == [tuple(toy_answer([5], 3))]
    assert_all_free(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_refused_hook_had_in_flight_is_withdrawn(kind: str) -> None:
    """Of several prompts that a hook completes at once, none keeps blocks when the first that ends brings the
    refusal."""
    engine, endless = made("request_ended", kind, 3)
    request = engine.add_request([1], greedy(6))
    while engine.has_pending_requests():
        engine.step()
    assert endless.refusals
    assert list(engine.requests) == [request]
    endless.engine = None
    assert_all_free(engine)


@pytest.mark.parametrize("hook", ["request_ended", "pagedcore_request_finished"])
def test_the_readers_of_an_engine_on_a_thread_do_not_notice(hook: str) -> None:
    """They get their tokens, and so does whoever comes later."""
    engine, endless = made(hook, "plain")
    with AsyncEngine(engine) as served:
        futures = [served.submit(prompt, greedy(6)) for prompt in NEIGHBOURS]
        for future, prompt in zip(futures, NEIGHBOURS, strict=True):
            assert list(future.result(20).outputs[0].token_ids) == toy_answer(prompt, 6)
        assert endless.refusals
        assert list(served.submit([5], greedy(3)).result(20).outputs[0].token_ids) == toy_answer([5], 3)


def test_a_hook_that_answers_each_of_many_ends_is_no_chain() -> None:
    """Of sixteen requests that end in one step, each has a hook's call that is carried out."""
    class Answering(EngineObserver):
        def request_ended(self, request: Request) -> None:
            if request in asked:
                answers.append(engine.generate([[9, len(answers)]], greedy(2), show_progress=False))
                added.append(engine.add_request([8], greedy(1)))

    engine = make_engine(num_kv_blocks=64, max_num_seqs=16, max_num_batched_tokens=64)
    asked, answers, added = list[Request](), list[Any](), list[Request]()
    engine.add_observer(Answering())
    asked += [engine.add_request([1, number], greedy(1)) for number in range(16)]
    while engine.has_pending_requests():
        engine.step()
    assert len(answers) == 16
    assert all(list(one.output().outputs[0].token_ids) == toy_answer([8], 1) for one in added)
