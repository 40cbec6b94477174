"""The table of doors and options: priority, cache salt, label and time limit reach the engine through every door."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from adapters.doors import (
    ASYNC_ENGINE,
    GENERATOR,
    HTTP,
    LANGCHAIN,
    Ask,
    House,
    Question,
    by_complete,
    by_http_batch,
    by_submit,
    house,
    openai_body_of,
    outcome_of,
    raise_refusal,
)
from pagedcore.structured.grammars import Grammars
from pagedcore.structured_output import StructuredOutput
from pagedcore_http.salts import combine_salts
from support.accepted import note_accepted
from support.async_helpers import SlowBackend

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
NO_TIME_LIMIT = (by_submit, by_complete)
"""Doors whose callers wait for a future, with a time limit of their own."""


def openai_door(path: str, *, is_stream: bool) -> Ask:
    """A path of the OpenAI app as a door; an error within a stream is raised too."""

    async def ask(opened: House, question: Question) -> list[int]:
        exchange = await opened.openai.call(path, openai_body_of(question, path, is_stream=is_stream))
        raise_refusal(exchange)
        assert '"error":{' not in exchange.text
        return []

    ask.__name__ = f"{path} {'streamed' if is_stream else 'whole'}"
    return ask


OPENAI = tuple(openai_door(path, is_stream=is_stream) for path in PATHS for is_stream in (False, True))
DOORS = (*ASYNC_ENGINE, *GENERATOR, *LANGCHAIN, *HTTP, *OPENAI)


async def by_session(opened: House, question: Question) -> list[int]:
    """A session's first turn; a session has its options, and a turn none of its own."""
    async with opened.engine.session(question.params, **question.options) as session:
        output = await session.ask(question.prompt)
    return list(output.outputs[0].token_ids)


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options of every request that an engine accepts."""
    options = list[Any]()
    note_accepted(monkeypatch, lambda one: options.append(one.options))
    return options


def salt_of(ask: Callable[..., Awaitable[object]]) -> Any:
    """The salt as the engine gets it: over HTTP it is combined with the one of the tenant, of which there is none."""
    return combine_salts(None, "mine") if ask in HTTP or ask in OPENAI else "mine"


async def test_every_option_reaches_the_engine_through_every_door(accepted: list[Any]) -> None:
    """Priority, salt and label, together and alone; without them the engine gets none, and HTTP doors of OpenAI make a
    label of their own."""
    async with house(scheduling_policy="priority") as opened:
        await asyncio.sleep(0)
        for ask in (*DOORS, by_session):
            accepted.clear()
            given = {"priority": 5, "cache_salt": "mine", "request_id": "label"}
            sampling = {"max_tokens": 1}
            assert not isinstance(await outcome_of(ask(opened, Question("ab", sampling, given))), str), ask.__name__
            assert not isinstance(await outcome_of(ask(opened, Question("ab", sampling, {}))), str), ask.__name__
            full, plain = accepted
            assert (full.priority, full.cache_salt, full.request_id) == (5, salt_of(ask), "label"), ask.__name__
            label = None if ask not in OPENAI else plain.request_id
            assert (plain.priority, plain.cache_salt, plain.request_id) == (0, None, label), ask.__name__
        assert opened.is_idle()


async def test_structured_output_is_asked_for_through_every_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mapping of a grammar, beside other sampling parameters, is compiled once for each request; OpenAI's paths,
    which have other names for it, are tested with its client."""
    compiled: list[StructuredOutput] = []
    monkeypatch.setattr(Grammars, "compile", lambda self, wanted, owner: compiled.append(wanted))
    sampling = {"max_tokens": 1, "structured": {"json_schema": {"type": "object"}}}
    async with house() as opened:
        await asyncio.sleep(0)
        for ask in (*(one for one in DOORS if one not in OPENAI), by_session):
            compiled.clear()
            assert not isinstance(await outcome_of(ask(opened, Question("ab", sampling, {}))), str), ask.__name__
            assert compiled == [StructuredOutput(json_schema={"type": "object"})], ask.__name__
        assert opened.is_idle()


async def test_every_door_has_a_time_limit() -> None:
    """A completion that takes longer ends as ``RequestTimeout`` at every door but the two that return a future, whose
    callers wait as long as they like; its blocks are free."""

    class Endless(SlowBackend):
        eos_token_ids = frozenset()

    async with house(Endless(), max_model_len=2000) as opened:
        await asyncio.sleep(0)
        question = Question("ab", {"max_tokens": 1000}, {"timeout_s": 0.1})
        outcomes = dict(zip(DOORS, await asyncio.gather(*(told(opened, ask, question) for ask in DOORS)), strict=True))
        for ask in NO_TIME_LIMIT:
            assert outcomes.pop(ask) == "tokens"
        wrong = {ask.__name__: outcome for ask, outcome in outcomes.items() if outcome != "RequestTimeout"}
        assert wrong == {}
        while not opened.is_idle():
            await asyncio.sleep(0.005)


async def told(opened: House, ask: Ask, question: Question) -> str:
    if ask in NO_TIME_LIMIT:
        question = Question("ab", {"max_tokens": 1}, question.options)
    if ask in OPENAI:
        path, form = ask.__name__.split()
        exchange = await opened.openai.call(path, openai_body_of(question, path, is_stream=form == "streamed"))
        timed_out = "0.1 seconds" in exchange.text and (exchange.status == 504 or '"server_error"' in exchange.text
                                                        or "event: error" in exchange.text)
        return "RequestTimeout" if timed_out else exchange.text
    outcome = await outcome_of(ask(opened, question))
    return outcome if isinstance(outcome, str) else "tokens"


def test_the_table_has_every_door() -> None:
    """A door that is added to the tests is a row here too."""
    assert len(DOORS) == len(set(DOORS)) == 17
    assert by_http_batch in DOORS


async def test_no_door_of_http_takes_code_or_gives_logits() -> None:
    """What only a caller in the process may ask for, every HTTP interface refuses, whatever stands for it."""
    async with house() as opened:
        for wanted in ({"logits_processor": "builtins.print"}, {"return_logits": True}):
            for ask in (*HTTP, *OPENAI):
                outcome = await outcome_of(ask(opened, Question("ab", {"max_tokens": 1, **wanted}, {})))
                assert outcome in ("InvalidSampling", "invalid_request_error"), (ask.__name__, outcome)
        assert opened.is_idle()
