"""Structured output through OpenAI's interface: its own client's helpers, and vLLM's names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import pytest

pytest.importorskip("openai")
pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")

from openai import APIError, BadRequestError, OpenAI
from pydantic import BaseModel, ConfigDict, Field

from adapters.openai.loopback import serving
from pagedcore import AsyncEngine
from pagedcore_openai import openai_app

BRACE = 95
"""The demo model's token for a closing brace."""
CHAT: Any = [{"role": "user", "content": "What is 2 + 3?"}]


class Answer(BaseModel):
    """What a chat shall answer."""

    model_config = ConfigDict(extra="forbid")

    value: int = Field(ge=0, le=99)
    unit: Literal["none", "euro"]


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    """The official client of a served demo model."""
    with AsyncEngine.from_pretrained("demo", num_kv_blocks=256) as engine, serving(
        openai_app(engine, name="demo")
    ) as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_clients_parse_helper_gives_an_object(client: OpenAI) -> None:
    """``chat.completions.parse`` with a class of pydantic's sends its schema and reads an instance of it."""
    completion = client.chat.completions.parse(model="demo", messages=CHAT, response_format=Answer, temperature=2)
    message = completion.choices[0].message
    assert isinstance(message.parsed, Answer)
    assert json.loads(message.content or "") == message.parsed.model_dump()


def test_a_stream_is_parsed_at_its_end(client: OpenAI) -> None:
    """The client's stream helper puts the parts together to the same class."""
    with client.chat.completions.stream(model="demo", messages=CHAT, response_format=Answer, seed=1) as stream:
        completion = stream.get_final_completion()
    assert isinstance(completion.choices[0].message.parsed, Answer)


def test_a_response_is_parsed_and_names_its_format(client: OpenAI) -> None:
    """``responses.parse`` does the same with ``text.format``, which the response repeats."""
    response = client.responses.parse(model="demo", input="What is 2 + 3?", text_format=Answer, temperature=2)
    assert isinstance(response.output_parsed, Answer)
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"


TEAM: Any = {"type": "object", "properties": {"team": {"const": "red"}}, "required": ["team"],
             "additionalProperties": False}


@pytest.mark.parametrize("response_format", [
    {"type": "json_object", "schema": TEAM},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": TEAM}},
])
def test_a_schema_is_kept_in_every_form_that_has_one(client: OpenAI, response_format: Any) -> None:
    """llama.cpp's form, a schema beside ``json_object``, as well as OpenAI's, in chats and in responses."""
    completion = client.chat.completions.create(model="demo", messages=CHAT, response_format=response_format)
    assert json.loads(completion.choices[0].message.content or "") == {"team": "red"}
    flat: Any = {"type": response_format["type"], "name": "x", "schema": TEAM}
    if flat["type"] == "json_object":
        del flat["name"]
    response = client.responses.create(model="demo", input="Which team?", text={"format": flat})
    assert json.loads(response.output_text) == {"team": "red"}


ENDLESS = "a{1000000}"
"""It compiles, and is too large for the library once tokens follow it."""


@pytest.mark.parametrize(("fields", "param"), [
    ({"response_format": {"type": "text", "schema": TEAM}}, "response_format.schema"),
    ({"response_format": {"type": "json_object", "scheme": TEAM}}, "response_format.scheme"),
    ({"response_format": {"type": "json_object", "schema": "{}"}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"pattern": "("}}}},
     "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
        "patternProperties": {str(number): {} for number in range(40)}}}}}, "response_format"),
    ({"extra_body": {"guided_grammar": "start: ("}}, "guided_grammar"),
    ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs"),
    ({"extra_body": {"guided_regex": ENDLESS}}, "guided_regex"),
])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_grammar_that_is_refused_or_fails_is_its_fields(
    client: OpenAI, fields: dict[str, Any], param: str, is_stream: bool
) -> None:
    """When it is read, when it is compiled, and when it is used: a 400, which clients do not repeat, with the caller's
    name of the field; in a stream too."""
    create: Any = client.chat.completions.create
    with pytest.raises((BadRequestError, APIError)) as refused:
        list(create(model="demo", messages=CHAT, stream=is_stream, **fields))
    body: Any = refused.value.body
    assert (body["param"], body["type"]) == (param, "invalid_request_error")


def test_any_json_object(client: OpenAI) -> None:
    """``json_object`` asks for an object of any form; here the model is made to close it."""
    wanted: Any = {"type": "json_object"}
    completion = client.chat.completions.create(model="demo", messages=CHAT, response_format=wanted, temperature=0,
                                                max_tokens=64, logit_bias={str(BRACE): 100})
    assert isinstance(json.loads(completion.choices[0].message.content or ""), dict)


SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
NAMES: dict[str, tuple[dict[str, Any], str]] = {
    "json": ({"structured_outputs": {"json": SCHEMA}}, r'\{\s*"a"\s*:\s*(true|false)\s*\}'),
    "json as text": ({"guided_json": json.dumps(SCHEMA)}, r'\{\s*"a"\s*:\s*(true|false)\s*\}'),
    "regex": ({"structured_outputs": {"regex": "[ab]{3}", "choice": None}}, "[ab]{3}"),
    "older regex": ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
    "choice": ({"structured_outputs": {"choice": ["red", "blue"]}}, "red|blue"),
    "older choice": ({"guided_choice": ["red", "blue"]}, "red|blue"),
    "lark": ({"structured_outputs": {"grammar": 'start: "x" /[0-9]{2}/'}}, "x[0-9]{2}"),
    "ebnf": ({"guided_grammar": 'root ::= "x" [0-9] [0-9]'}, "x[0-9]{2}"),
}


@pytest.mark.parametrize("name", NAMES)
def test_vllms_names(client: OpenAI, name: str) -> None:
    """Chats and text completions take the kinds of grammar by vLLM's names, new and old."""
    body, pattern = NAMES[name]
    chat = client.chat.completions.create(model="demo", messages=CHAT, temperature=2, seed=1, extra_body=body)
    assert re.fullmatch(pattern, chat.choices[0].message.content or "")
    text = client.completions.create(model="demo", prompt="2 + 3 =", temperature=2, seed=1, max_tokens=64,
                                     extra_body=body)
    assert re.fullmatch(pattern, text.choices[0].text)
