"""Clients of others that make objects and calls of completions, in environments of their own (``make interop-NAME``).

What they ask for is made sound by the door, so each object that arrives is one of its type, whatever the model knows; a
completion that was cut off is never one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from adapters.openai.interop import told_by
from pagedcore import AsyncEngine

pytestmark = pytest.mark.interop
ANSWER = "2 + 3 = 5."
AT_OPENAI = {"temperature": "BadRequestError", "model": "NotFoundError", "key": "AuthenticationError",
             "length": "BadRequestError"}
"""The exceptions of OpenAI's client, which most of these pass on."""


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    """The demo model."""
    with AsyncEngine.from_pretrained("demo", num_kv_blocks=512, max_num_waiting=256) as engine:
        yield engine


def require_whole_or_errors(outcomes: list[Any], *errors: str) -> None:
    """Of completions with ever more tokens the first are errors, and those that have enough of them the same object."""
    num_errors = sum(isinstance(one, str) for one in outcomes)
    assert 0 < num_errors < len(outcomes), outcomes
    assert set(outcomes[:num_errors]) <= set(errors)
    assert all(one == outcomes[-1] for one in outcomes[num_errors:])


def test_instructor_gets_objects_in_every_mode(engine: AsyncEngine, tmp_path: Path) -> None:
    """Nested, optional and enumerated fields; a refused object is asked for anew with the error in the conversation."""
    told = told_by("instructor", engine, tmp_path)
    modes = {"TOOLS", "TOOLS_STRICT", "FUNCTIONS", "JSON_SCHEMA", "RESPONSES_TOOLS"}
    assert set(told["typed"]) == set(told["retried"]) == modes
    for mode in modes:
        assert told["typed"][mode]["color"] in ("red", "green")
        assert told["typed"][mode]["address"]["kind"] in ("home", "work")
        assert len(told["retried"][mode]["refused"]) == 1
        # Why another one: of responses it knows no reason of the end, and looks for choices.
        incomplete = "InstructorRetryException" if mode == "RESPONSES_TOOLS" else "IncompleteOutputException"
        require_whole_or_errors(told["cut"][mode], incomplete)
    assert told["cut"]["JSON"] == told["cut"]["MD_JSON"] == ["IncompleteOutputException"]
    assert set(told["partial"]) == set(told["whole"]) == set(told["asynchronous"]) == {"amount", "kind"}
    assert (told["literal"] in ("yes", "no"), told["plain"]) == (True, ANSWER)
    usage = told["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert told["errors"] == {name: ["InstructorRetryException", error] for name, error in AT_OPENAI.items()}


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai_gets_objects_of_chats_and_responses(told_of_pydantic_ai: Any, kind: str) -> None:
    """By a call and natively, whole and streamed; a tool is called, and the conversation goes on after it."""
    told = told_of_pydantic_ai[kind]
    assert (told["plain"], told["text"], told["usage"]) == (ANSWER, ANSWER, [33, 9])
    for output in ("ToolOutput", "NativeOutput"):
        assert told[output]["kind"] in ("big", "small")
        assert told[f"{output} stream"] == told[output]
        for cut in (f"{output} cut", f"{output} stream cut"):
            require_whole_or_errors(told[cut], "OutputTokenLimitExceeded", "IncompleteToolCall",
                                    "UnexpectedModelBehavior")
            assert told[cut][-1] == told[output]
    assert told["PromptedOutput cut"] == "OutputTokenLimitExceeded"
    assert told["retried"] == 2
    assert told["tool"] == ["UserPromptPart", "ToolCallPart", "ToolReturnPart", "TextPart"]
    assert told["later"] == ANSWER
    assert told["errors"] == {
        "temperature": "ModelRequestRejectedError", "model": "ModelNotFoundError", "key": "ModelAuthenticationError",
        "length": "ModelContextWindowExceededError", "room": "ModelContextWindowExceededError"}


@pytest.fixture(scope="module")
def told_of_pydantic_ai(engine: AsyncEngine, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One run for both interfaces."""
    return told_by("pydantic-ai", engine, tmp_path_factory.mktemp("pydantic_ai"))


def test_llama_index_gets_texts_objects_and_an_agent(engine: AsyncEngine, tmp_path: Path) -> None:
    """Chats and text completions, whole and streamed; objects by a call and natively; an agent calls a function."""
    told = told_by("llama-index", engine, tmp_path)
    assert {told[name] for name in ("complete", "stream", "asynchronous")} == {ANSWER}
    assert told["text"] == told["text stream"]
    assert told["usage"] == {"prompt_tokens": 19, "completion_tokens": 9, "total_tokens": 28}
    assert {told[name]["kind"] for name in ("typed", "native", "as structured")} <= {"big", "small"}
    require_whole_or_errors(told["cut"], "ValueError")
    require_whole_or_errors(told["native cut"], "ValidationError")
    assert {"AgentStream", "ToolCall", "ToolCallResult", "StopEvent"} <= set(told["events"])
    assert told["agent"]
    assert told["errors"] == AT_OPENAI


def test_smolagents_runs_agents(engine: AsyncEngine, tmp_path: Path) -> None:
    """Whole and streamed; an agent's calls have arguments of the tool's form; a cut object says so."""
    told = told_by("smolagents", engine, tmp_path)
    assert (told["whole"], told["stream"], told["flat"], told["stopped"]) == (ANSWER, ANSWER, ANSWER, "2 + 3 ")
    assert told["usage"] == [[19, 9], [19, 9]]
    assert (set(told["object"]), told["cut"]) == ({"thought", "code"}, "length")
    assert [[name, set(arguments)] for name, arguments in told["calls"]] == [["calculator", {"expression"}]]
    for agent in ("ToolCallingAgent", "streamed"):
        assert told[agent]["calls"][0] == {"expression": "12 + 7"}
    assert told["CodeAgent"]["steps"] == ["TaskStep", "ActionStep", "ActionStep", "ActionStep"]
    assert told["errors"] == AT_OPENAI


def test_autogen_gets_objects_and_runs_agents(engine: AsyncEngine, tmp_path: Path) -> None:
    """Usage whole and streamed, JSON, objects of a type; an agent calls its tool with and without a last answer."""
    told = told_by("autogen", engine, tmp_path)
    assert told["whole"] == told["stream"] == [ANSWER, "stop", 33, 9]
    assert isinstance(told["json"], dict)
    assert {one["kind"] for one in told["typed"]} <= {"big", "small"}
    assert told["cut"] == ["LengthFinishReasonError"] * 2
    called = ["TextMessage", "ToolCallRequestEvent", "ToolCallExecutionEvent"]
    assert told["tool"] == told["streaming"] == [*called, "ToolCallSummaryMessage"]
    assert told["reflecting"] == [*called, "TextMessage"]
    assert told["typed agent"] == ["TextMessage", "StructuredMessage[City]"]
    assert told["errors"] == AT_OPENAI


def test_dspy_fills_signatures(engine: AsyncEngine, tmp_path: Path) -> None:
    """With each adapter, with reasoning and with calls of its own form; over chats, responses and texts."""
    told = told_by("dspy", engine, tmp_path)
    assert {*told["plain"], told["litellm"]} == {ANSWER}
    assert told["text"]
    for adapter in ("JSONAdapter", "ChatAdapter"):
        city, is_true = told[adapter]
        assert (city["kind"] in ("big", "small"), type(is_true)) == (True, bool)
    assert told["thought"] in ("big", "small")
    usage = told["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert (told["cut"], told["calls"]) == ("AdapterParseError", [["add", ["a", "b"]]])
    assert told["errors"] == {
        "temperature": "LMUnsupportedFeatureError", "model": "LMUnsupportedModelError", "key": "LMAuthError",
        "length": "ContextWindowExceededError", "room": "ContextWindowExceededError"}
