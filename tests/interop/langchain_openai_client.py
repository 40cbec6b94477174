"""Calls the door through ``langchain_openai.ChatOpenAI``, in an environment of its own, over chats and over responses.

    python langchain_openai_client.py BASE_URL API_KEY RESULTS
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

QUESTION = "What is 2 + 3?"


class Sum(BaseModel):
    """Numbers and a note."""

    a: int
    b: int
    note: str


class add(BaseModel):
    """Add two numbers."""

    a: int
    b: int


def main(base_url: str, api_key: str, results: str) -> None:
    """Call and write what came back."""
    common: Any = {"model": "demo", "base_url": base_url, "api_key": api_key, "temperature": 0, "max_retries": 0}
    told: dict[str, Any] = {name: calls(common | {"use_responses_api": name == "responses"})
                            for name in ("chats", "responses")}
    told["asynchronous"] = asyncio.run(asynchronously(common))
    text = OpenAI(**common, max_tokens=16)
    told["text"] = [text.invoke(QUESTION), "".join(text.stream(QUESTION))]
    Path(results).write_text(json.dumps(told, default=str), "utf-8")


def calls(common: dict[str, Any]) -> dict[str, Any]:
    """Make all calls over one interface."""
    chat = ChatOpenAI(**common, max_tokens=96, stream_usage=True)
    told: dict[str, Any] = {}
    whole = chat.invoke(QUESTION)
    told["whole"] = [whole.text, whole.usage_metadata]
    chunks = list(chat.stream(QUESTION))
    streamed = sum(chunks[1:], chunks[0])
    told["stream"] = [streamed.text, streamed.usage_metadata]
    tools = chat.bind_tools([add], tool_choice="required")
    called = tools.invoke(QUESTION)
    told["call"] = [called.tool_calls, called.response_metadata.get("finish_reason")]
    chunks = list(tools.stream(QUESTION))
    told["streamed call"] = sum(chunks[1:], chunks[0]).tool_calls
    result = ToolMessage("5", tool_call_id=called.tool_calls[0]["id"])
    told["after"] = chat.bind_tools([add]).invoke([HumanMessage(QUESTION), called, result]).text
    told["strict"] = chat.bind_tools([add], tool_choice="add", strict=True, parallel_tool_calls=False).invoke(
        QUESTION).tool_calls
    told["objects"] = {}
    told["cut"] = {}
    for method in ("json_schema", "function_calling", "json_mode"):
        question = QUESTION + (" Answer with JSON." if method == "json_mode" else "")
        schema = None if method == "json_mode" else Sum
        told["objects"][method] = chat.with_structured_output(schema, method=method).invoke(question)
        short = ChatOpenAI(**common, max_tokens=3).with_structured_output(schema, method=method)
        told["cut"][method] = result_of(lambda short=short, question=question: short.invoke(question))
    told["objects"] = {name: one if type(one) is dict else one.model_dump() for name, one in told["objects"].items()}
    if not common["use_responses_api"]:
        scored = ChatOpenAI(**common, logprobs=True, top_logprobs=2).invoke(QUESTION)
        told["scored"] = len(scored.response_metadata["logprobs"]["content"])
    told["errors"] = {name: result_of(lambda fields=fields: ChatOpenAI(**common | fields).invoke(QUESTION))
                      for name, fields in {"temperature": {"temperature": 99}, "model": {"model": "other"},
                                           "key": {"api_key": "another-key-of-nobody"}}.items()}
    told["errors"]["length"] = result_of(lambda: chat.invoke("2 " * 1100))
    return told


async def asynchronously(common: dict[str, Any]) -> list[str]:
    """Call on an event loop, whole and streamed, over both interfaces."""
    chats = [ChatOpenAI(**common, use_responses_api=is_response) for is_response in (False, True)]
    whole = [message.text for message in await asyncio.gather(*(chat.ainvoke(QUESTION) for chat in chats))]
    return whole + ["".join([chunk.text async for chunk in chat.astream(QUESTION)]) for chat in chats]


def result_of(call: Any) -> Any:
    """Return the class of error that a call raises, or what it returns."""
    try:
        return ["result", call()]
    except Exception as error:
        return type(error).__name__


if __name__ == "__main__":
    main(*sys.argv[1:])
