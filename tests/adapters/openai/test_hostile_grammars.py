"""Hostile grammars over HTTP, in every field that takes one: 400, and another key's tools are called beside them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

import adapters.bentoml.home  # noqa: F401  # Why first: BentoML reads its home when it is imported.

pytest.importorskip("bentoml")
pytest.importorskip("llguidance")

from adapters.bentoml.asgi_caller import JSON_TYPE, App
from pagedcore_openai import ApiKeys, openai_app
from support.hostile_grammars import EXPANDING
from support.scripted_model import scripted_engine

ONE, TWO = "key-of-tenant-one", "key-of-tenant-two"
CHATS = "/v1/chat/completions"
NAMES = {"json_schema": "guided_json", "regex": "guided_regex", "lark": "guided_grammar", "ebnf": "guided_grammar"}
PARAMETERS = {"type": "object", "properties": {"zone": {"type": "string", "pattern": "^[A-Z]{3}$"}}}
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "CET"}}\n</tool_call>'


def body(parameters: Any = PARAMETERS, **fields: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "now", "parameters": parameters}}
    question = {"model": "scripted", "messages": [{"role": "user", "content": "What time is it?"}], "max_tokens": 60}
    return {**question, **fields} if fields else {**question, "tools": [tool]}


def with_key(key: str) -> list[tuple[bytes, bytes]]:
    return [*JSON_TYPE, (b"authorization", f"Bearer {key}".encode())]


async def test_hostile_grammars_are_refused_beside_another_tenants_tools() -> None:
    """As a form of the answer, or as the schema of a tool; the refusal names the kind and says what is allowed."""
    hostile = [body(**{NAMES[kind]: value}) for one in EXPANDING.values() for kind, value in one.items()]
    # Why short: a tool's schema is in the prompt too.
    hostile += [body({"type": "object", "properties": {"a": {"type": "string", "pattern": r"\W?" * 300}}})]
    with scripted_engine(CALL, max_model_len=4096) as engine:
        asgi: Any = openai_app(engine, name="scripted", api_keys=ApiKeys([ONE, TWO]))
        app = App(asgi, asgi, engine)  # type: ignore[arg-type]
        for start in range(0, len(hostile), 8):
            attack = [app.begin(CHATS, {**one, "cache_salt": f"{n}"}, headers=with_key(ONE))
                      for n, one in enumerate(hostile[start : start + 8])]
            called = json.loads((await app.call(CHATS, body(), headers=with_key(TWO))).text)
            call = called["choices"][0]["message"]["tool_calls"][0]["function"]
            assert (call["name"], call["arguments"]) == ("now", '{"zone": "CET"}')
            await asyncio.gather(*(exchange.task for exchange in attack))
            for exchange in attack:
                assert exchange.status == 400, exchange.text
                assert "what it expands to: got at least" in exchange.text
        assert app.is_idle()
