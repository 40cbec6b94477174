"""One tenant of an ``AsyncEngine`` sends what takes long to compile; another one's calls with tools go on."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from pagedcore import AsyncEngine, Chat, SamplingParams
from pagedcore.config import limits
from pagedcore.errors import GrammarsBusy, InvalidGrammar
from pagedcore.structured import grammars as compiling
from support.hostile_grammars import EXPANDING
from support.scripted_model import scripted_engine

NOW = {"type": "function", "function": {"name": "now", "parameters": {
    "type": "object", "properties": {"zone": {"type": "string", "pattern": "^[A-Z]{3}$"}}}}}
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "CET"}}\n</tool_call>'
SEARCH = {"lark": "start: A\nA: /a+/ & ~/aa/"}
"""Of the kind that is tried in a child process first."""


async def call_tools(engine: AsyncEngine, salt: str) -> Any:
    prompt = Chat([{"role": "user", "content": "What time is it?"}], (NOW,))
    turn = engine.chat_format.turn(prompt, SamplingParams(max_tokens=120))
    output = await asyncio.wrap_future(engine.submit(prompt, turn.params, cache_salt=salt, wait_for_room=True))
    return [(call.name, call.arguments) for call in turn.reader().read_all(output.outputs[0]).tool_calls]


@pytest.mark.parametrize("options", [[{"cache_salt": "one"}] * 10,
                                     [{"tenant": "one", "cache_salt": f"salt {n}"} for n in range(10)]])
async def test_trials_of_one_tenant_do_not_hold_up_another(
    options: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten grammars that are being tried for as long as the test likes, or wait for that, of one tenant, whatever salts
    it adds: the other's calls come meanwhile, and all ten have their end afterwards."""
    may_end, num_tried = threading.Event(), [0]

    def endless(*_: Any) -> str:
        num_tried[0] += 1
        assert may_end.wait(30)
        return "compiling takes over everything"

    monkeypatch.setattr(limits, "MAX_COMPILING_S", 60.0)
    monkeypatch.setattr(compiling, "try_grammar", endless)
    with scripted_engine(CALL) as engine:
        attack = [engine.submit("hi", SamplingParams(structured=SEARCH), **one) for one in options]
        while num_tried[0] < 2:
            await asyncio.sleep(0.001)
        for _ in range(3):
            assert await call_tools(engine, "two") == [("now", '{"zone": "CET"}')]
        assert num_tried[0] == 2
        assert not any(future.done() for future in attack)
        may_end.set()
        for future in attack:
            with pytest.raises(InvalidGrammar, match="takes over everything"):
                await asyncio.wrap_future(future)


async def test_what_expands_to_too_much_reaches_no_thread_that_compiles() -> None:
    """Beside every grammar of the set that is refused by its size, another tenant's tools are called."""
    with scripted_engine(CALL) as engine:
        assert await call_tools(engine, "two") == [("now", '{"zone": "CET"}')]
        attack = [engine.submit("hi", SamplingParams(structured=one), cache_salt="one", wait_for_room=True)
                  for one in EXPANDING.values()]
        assert await call_tools(engine, "two") == [("now", '{"zone": "CET"}')]
        for future in attack:
            with pytest.raises(InvalidGrammar, match="what it expands to"):
                await asyncio.wrap_future(future)


async def test_a_tenant_whose_grammars_all_take_too_long_is_told_to_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own further ones are refused as from a full queue, after the time that one may take."""
    may_end = threading.Event()
    monkeypatch.setattr(limits, "MAX_COMPILING_S", 0.2)
    monkeypatch.setattr(compiling, "try_grammar", lambda *_: str(may_end.wait(30)))
    with scripted_engine(CALL) as engine:
        attack = [engine.submit("hi", SamplingParams(structured=SEARCH), cache_salt="one") for _ in range(3)]
        errors = [future.exception(30) for future in attack]
        assert [type(one) for one in errors] == [InvalidGrammar, InvalidGrammar, GrammarsBusy]
        assert await call_tools(engine, "two") == [("now", '{"zone": "CET"}')]
        may_end.set()
