"""Structured output of the LangChain chat model is whole, of the schema that was meant, or an error."""

from __future__ import annotations

import enum
import sys
from typing import Any, Literal, NotRequired, Required, TypedDict

import pytest
import typing_extensions

pytest.importorskip("llguidance")

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage, trim_messages
from pydantic import BaseModel, Field

from pagedcore import AsyncEngine
from pagedcore.errors import InvalidRequest
from pagedcore_langchain import ChatPagedCore

INVOICE = {
    "title": "Invoice", "type": "object", "required": ["amount"], "additionalProperties": False,
    "properties": {"amount": {"type": "integer", "minimum": 100000, "maximum": 999999}},
}


class Two(BaseModel):
    """Two texts."""

    a: str
    b: str = "default"


class Place(enum.Enum):
    """Where it is."""

    HERE = "here"
    THERE = "over there"


class Pair(TypedDict):
    """Two numbers."""

    left: int
    right: int


class Inner(typing_extensions.TypedDict):
    """May be empty."""

    tone: NotRequired[Literal["low", "high"]]


class Partly(typing_extensions.TypedDict, total=False):
    """One member is there, the other may be."""

    word: Required[Literal["red", "blue"]]
    inner: Inner


@pytest.fixture
def chat(engine: AsyncEngine) -> ChatPagedCore:
    """A chat model on the demo engine."""
    return ChatPagedCore.from_engine(engine, max_tokens=96)


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("schema", [INVOICE, Two])
async def test_what_is_cut_off_is_an_error_wherever_it_is_cut(chat: ChatPagedCore, schema: Any, method: Any) -> None:
    """Whole, streamed, on a loop and with the raw message; the object that comes out is of a completion that ended."""
    for max_tokens in (1, 7, 12, 24):
        how = {"method": method, "max_tokens": max_tokens}
        shown = chat.with_structured_output(schema, include_raw=True, **how).invoke("The amount?")
        is_cut = shown["raw"].response_metadata["finish_reason"] == "length"
        assert (shown["parsed"] is None) == (shown["parsing_error"] is not None) == is_cut
        asked = chat.with_structured_output(schema, **how)
        if is_cut:
            assert "max_tokens" in str(shown["parsing_error"])
            with pytest.raises(OutputParserException, match="not whole"):
                asked.invoke("The amount?")
            with pytest.raises(OutputParserException, match="not whole"):
                await asked.ainvoke("The amount?")
            with pytest.raises(OutputParserException, match="not whole"):
                list(asked.stream("The amount?"))
            with pytest.raises(OutputParserException, match="not whole"):
                [part async for part in asked.astream("The amount?")]
            with pytest.raises(OutputParserException, match="not whole"):
                asked.batch(["The amount?"] * 2)
        else:
            assert asked.invoke("The amount?") == shown["parsed"]


def test_a_stop_of_the_caller_s_own_makes_no_object(chat: ChatPagedCore) -> None:
    """A number is a whole one wherever it is cut, so the text does not tell."""
    schema = {"type": "integer", "minimum": 100000, "maximum": 999999}
    whole = chat.with_structured_output(schema).invoke("How many?")
    assert 100000 <= whole <= 999999
    with pytest.raises(OutputParserException, match="its own stop"):
        chat.with_structured_output(schema, stop=[str(whole)[3]]).invoke("How many?")
    last = chat.engine.encode(str(whole))[-1]
    with pytest.raises(OutputParserException, match="its own stop"):
        chat.with_structured_output(schema, stop_token_ids=[last]).invoke("How many?")


@pytest.mark.parametrize(("schema", "is_right"), [
    (Place, lambda one: isinstance(one, Place)),
    (list[Literal[3, 5]], lambda one: isinstance(one, list) and set(one) <= {3, 5}),
    (Pair, lambda one: isinstance(one["left"], int)),
    ({"title": "Numbers", "type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}, lambda one: set(one) <= {1, 2}),
    ({"title": "Word", "enum": ["red", "blue"]}, lambda one: one in ("red", "blue")),
    ({"anyOf": [{"const": 7}, {"const": "seven"}]}, lambda one: one in (7, "seven")),
    ({"$ref": "#/$defs/word", "$defs": {"word": {"enum": ["x", "y"]}}}, lambda one: one in ("x", "y")),
    ({"name": "answer", "schema": {"type": "object", "properties": {"is": {"type": "boolean"}}, "required": ["is"],
                                   "additionalProperties": False}}, lambda one: type(one["is"]) is bool),
    ({"name": "answer", "parameters": INVOICE}, lambda one: one["amount"] >= 100000),
    ({"type": "function", "function": {"name": "answer", "parameters": INVOICE}}, lambda one: one["amount"] >= 100000),
])
def test_every_kind_of_schema_is_kept(chat: ChatPagedCore, schema: Any, is_right: Any) -> None:
    """Schemas that are no object, types that are no model, and the forms of other interfaces."""
    assert is_right(chat.with_structured_output(schema, temperature=1.0, seed=5).invoke("Which one?"))


def test_a_schema_that_is_no_object_is_no_tool(chat: ChatPagedCore) -> None:
    """It is refused where the call is made, and not replaced by another one."""
    with pytest.raises(InvalidRequest, match="function_calling"):
        chat.with_structured_output({"title": "Word", "enum": ["red"]}, method="function_calling")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_members_of_typed_dicts_may_be_missing(chat: ChatPagedCore, method: Any) -> None:
    """``NotRequired`` and ``Required``, also further inside, as a schema and as a tool."""
    for seed in range(3):
        how = {"method": method, "temperature": 1.0, "seed": seed, "max_tokens": 400}
        found = chat.with_structured_output(Partly, **how).invoke("Which one?")
        assert found["word"] in ("red", "blue")
        assert found.keys() <= {"word", "inner"}
        assert found.get("inner", {}).keys() <= {"tone"}
    (tool,) = chat.bind_tools([Partly]).kwargs["tools"]
    parameters = tool["function"]["parameters"]
    assert (tool["function"]["name"], parameters["required"]) == ("Partly", ["word"])
    assert parameters["properties"].keys() == {"word", "inner"}


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="pydantic knows it there")
def test_typed_dicts_that_pydantic_does_not_know_are_refused(chat: ChatPagedCore) -> None:
    """With what to do, as a schema and as a tool."""
    made = TypedDict("made", {"word": NotRequired[str]})  # noqa: UP013  # Why: for this test alone.
    with pytest.raises(InvalidRequest, match=r"^schema: .* typing_extensions\."):
        chat.with_structured_output(made)
    with pytest.raises(InvalidRequest, match=r"^tools: .* typing_extensions\."):
        chat.bind_tools([made])


def test_objects_have_declared_members_only(chat: ChatPagedCore) -> None:
    """Those of models unless they allow more, those of JSON schemas with ``strict``; sets are made of lists."""
    class Open(BaseModel):
        """Any members."""

        model_config = {"extra": "allow"}
        ok: bool

    class Tags(BaseModel):
        """A set."""

        tags: set[Literal["a", "b"]] = Field(max_length=2)

    def schema_of(schema: Any, **how: Any) -> Any:
        return chat.with_structured_output(schema, **how).first.kwargs["structured"]["json_schema"]  # type: ignore[attr-defined]

    assert schema_of(Two)["additionalProperties"] is False
    assert schema_of(Open)["additionalProperties"] is True
    loose = {"type": "object", "properties": {"one": {"type": "object", "properties": {"two": {}}}}}
    assert schema_of(loose) == loose
    strict = schema_of(loose, strict=True)
    assert (strict["additionalProperties"], strict["properties"]["one"]["additionalProperties"]) == (False, False)
    for method in ("json_schema", "function_calling"):
        found = chat.with_structured_output(Tags, method=method, temperature=1.0, max_tokens=400).invoke("Which tags?")
        assert isinstance(found.tags, set)


def test_agents_choose_grammars(chat: ChatPagedCore) -> None:
    """By the profile, and with OpenAI's form of the schema in a call."""
    assert chat.profile is not None
    assert chat.profile["structured_output"] is True
    bound = chat.bind(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [12]}}},
                      parallel_tool_calls=None)
    assert bound.invoke("Which one?").content == "12"
    with pytest.raises(InvalidRequest, match="response_format"):
        chat.invoke("Which one?", response_format={"type": "xml"})


def test_histories_are_trimmed_to_nothing(chat: ChatPagedCore) -> None:
    """LangChain counts the tokens of no messages on the way."""
    messages = [HumanMessage("What is 2 + 3?"), AIMessage("5"), HumanMessage("And 4 + 4?")]
    for max_tokens in (0, 1, 5, 12, 1000):
        kept = trim_messages(messages, max_tokens=max_tokens, token_counter=chat, allow_partial=True)
        assert chat.get_num_tokens_from_messages(kept) <= max_tokens
