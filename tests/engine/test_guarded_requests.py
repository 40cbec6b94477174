"""Code of others that runs for one request: a tokenizer, a policy, a store that fails costs that request at most."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pagedcore import AsyncEngine, SamplingParams
from pagedcore.errors import TextFailed
from pagedcore.scheduler import policies
from pagedcore.scheduler.policies import Policy
from pagedcore.scheduler.policy_view import PolicyView
from pagedcore.sequence import Sequence as TokenSequence
from support.doubles import toy_answer
from support.engine_builders import assert_all_free, make_engine, run

NUM_TOKENS = 8


class FaultyDetokenizer:
    """Writes each token as a letter, and fails where a test wants it to."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self._num_pushed = 0

    def push(self, token_ids: Sequence[int]) -> str:
        self._num_pushed += len(token_ids)
        if {"push": 3, "last": NUM_TOKENS}.get(self._fault) == self._num_pushed:
            raise ZeroDivisionError("a prompt, a path")
        if self._fault == "type":
            return None  # type: ignore[return-value]
        return "".join(chr(ord("a") + token_id % 26) for token_id in token_ids)

    def finish(self) -> str:
        if self._fault == "finish":
            raise ZeroDivisionError("a prompt, a path")
        return ""


class FaultyTokenizer:
    """Makes one faulty detokenizer, the second one."""

    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self._num_made = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        return FaultyDetokenizer("").push(token_ids)

    def new_detokenizer(self) -> FaultyDetokenizer:
        self._num_made += 1
        is_faulty = self._num_made == 2
        if is_faulty and self._fault == "new":
            raise ZeroDivisionError("a prompt, a path")
        return FaultyDetokenizer(self._fault if is_faulty else "")


def text_of(prompt: list[int]) -> str:
    return "".join(chr(ord("a") + token_id % 26) for token_id in toy_answer(prompt, NUM_TOKENS))


FAULTS = ["new", "push", "last", "finish", "type"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("more", [{}, {"stop": "?"}, {"n": 2, "best_of": 2, "logprobs": 0, "temperature": 1.0}])
def test_a_tokenizer_that_fails_ends_its_request_only(fault: str, more: dict[str, Any]) -> None:
    """In its making, at a token, at the last one, at the end, by its type: a typed error with the cause, seven others
    complete, no block is lost, and the engine serves the next one."""
    engine = make_engine(tokenizer=FaultyTokenizer(fault), max_num_seqs=8)
    prompts = [[number] for number in range(1, 9)]
    params = [SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **(more if i == 1 else {})) for i in range(8)]
    requests = [engine.add_request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    run(engine)
    outputs = [request.output() for request in requests]
    failed = [output for output in outputs if any(one.finish_reason == "error" for one in output.outputs)]
    (output,) = failed
    (error,) = {one.error for one in output.outputs if one.finish_reason == "error"}
    assert isinstance(error, TextFailed)
    assert isinstance(error.__cause__, ZeroDivisionError if fault != "type" else TypeError)
    assert "prompt, a path" not in str(error)
    for prompt, one in zip(prompts, outputs, strict=True):
        if one is not output and len(one.outputs) == 1:
            assert (one.outputs[0].text, one.outputs[0].finish_reason) == (text_of(prompt), "length")
    again = engine.add_request([5], SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    run(engine)
    assert again.output().outputs[0].text == text_of([5])
    assert_all_free(engine)


@pytest.mark.parametrize("fault", FAULTS)
async def test_callers_of_an_async_engine_are_apart(fault: str) -> None:
    """Seven of eight streams are complete; the eighth ends with the typed error, and so does its future."""
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    async with AsyncEngine(make_engine(tokenizer=FaultyTokenizer(fault), max_num_seqs=8)) as engine:

        async def read(number: int) -> str:
            deltas = [delta async for delta in engine.generate([number], params)]
            if deltas[-1].error is not None:
                raise deltas[-1].error
            return "".join(delta.text for delta in deltas)

        results = await asyncio.gather(*map(read, range(1, 9)), return_exceptions=True)
        assert [type(one) for one in results].count(TextFailed) == 1
        assert {one for one in results if isinstance(one, str)} < {text_of([number]) for number in range(1, 9)}
        assert [type(one) for one in results].count(str) == 7
        output = await asyncio.wrap_future(engine.submit([3], params))
        assert output.outputs[0].text == text_of([3])


@pytest.mark.parametrize("fault", ["finish", "push"])
def test_a_tokenizer_that_fails_at_a_cancel_changes_nothing(fault: str) -> None:
    """An abort is an abort, whatever the detokenizer says to it."""
    engine = make_engine(tokenizer=FaultyTokenizer(fault))
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    requests = [engine.add_request([number], params) for number in (1, 2)]
    engine.step()
    engine.step()
    assert requests[1].abort()
    run(engine)
    assert [request.output().outputs[0].finish_reason for request in requests] == ["length", "abort"]
    assert_all_free(engine)


def test_a_failed_conversation_can_continue() -> None:
    """A turn that failed is cut off like any other error; the next turn has a detokenizer of its own."""
    engine = make_engine(tokenizer=FaultyTokenizer("push"))
    with engine.session(SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)) as session:
        assert session.ask([1]).outputs[0].finish_reason == "length"
        assert isinstance(session.ask([2]).outputs[0].error, TextFailed)
        output = session.ask([3]).outputs[0]
        assert (output.finish_reason, len(output.text)) == ("length", NUM_TOKENS)
    assert_all_free(engine)


def raising_at(count: int) -> Callable[[TokenSequence], Any]:
    """A key that works until it is asked for the ``count``-th time."""
    asked: list[TokenSequence] = []

    def key(sequence: TokenSequence) -> Any:
        asked.append(sequence)
        if len(asked) >= count:
            raise KeyError("a prompt")
        return -sequence.arrival

    return key


KEYS: dict[str, Callable[[TokenSequence], Any]] = {
    "raises": raising_at(1),
    "raises later": raising_at(9),
    "nan": lambda sequence: math.nan if sequence.arrival % 3 == 0 else -sequence.arrival,
    "nan in a tuple": lambda sequence: (math.nan if sequence.arrival % 2 else 1.0, sequence.arrival),
    "incomparable": lambda sequence: "text" if sequence.arrival == 4 else sequence.arrival,
    "sets": lambda sequence: frozenset([sequence.arrival]),
}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_a_policy_that_fails_is_replaced_by_fcfs(
    key: Callable[[TokenSequence], Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With keys that raise, now or later, or that no order has: every request completes as it would under fcfs, through
    preemptions, and the log has one line with the reason and without its words."""
    monkeypatch.setattr(policies, "priority", lambda: Policy("mine", key))
    engine = make_engine(num_kv_blocks=6, max_num_seqs=3, scheduling_policy="priority")
    with caplog.at_level(logging.ERROR):
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        requests = [engine.add_request([number], params) for number in range(1, 9)]
        run(engine)
    assert [list(one.output().outputs[0].token_ids) for one in requests] == [
        toy_answer([number], 9) for number in range(1, 9)
    ]
    (record,) = [record for record in caplog.records if "policy" in record.message]
    assert "'mine'" in record.message
    assert "a prompt" not in record.message
    assert engine.scheduler.rules.policy.name == "fcfs"
    assert_all_free(engine)


def slowly(sequence: TokenSequence, view: PolicyView) -> int:
    time.sleep(0.4 if sequence.sequence_id <= 4 else 0.0)
    return sequence.arrival


def failing(sequence: TokenSequence, view: PolicyView) -> float:
    return 1.0 / max(0, 3 - view.number)


@pytest.mark.parametrize("key", [slowly, failing])
async def test_a_dynamic_policy_is_replaced_on_the_engines_thread(
    key: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under ``AsyncEngine`` one that raises after some steps, or takes its time, costs one line of the log: streams and
    futures that are under way end as they would alone."""
    monkeypatch.setattr(policies, "priority", lambda: Policy("mine", key, is_dynamic=True))
    with caplog.at_level(logging.ERROR), AsyncEngine(
        make_engine(num_kv_blocks=20, max_num_seqs=2, scheduling_policy="priority")
    ) as engine:
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        futures = [engine.submit([number], params) for number in range(1, 5)]
        stream = [one async for delta in engine.generate([5], params) for one in delta.token_ids]
        outputs = [await asyncio.wrap_future(future) for future in futures]
        assert await engine.call(lambda inner: inner.scheduler.rules.policy.name) == "fcfs"
    assert stream == toy_answer([5], 9)
    assert [list(one.outputs[0].token_ids) for one in outputs] == [toy_answer([n], 9) for n in range(1, 5)]
    assert len([record for record in caplog.records if "'mine'" in record.message]) == 1
