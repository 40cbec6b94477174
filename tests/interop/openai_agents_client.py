"""Runs agents of the OpenAI Agents SDK on the door, in an environment of its own, over responses and over chats.

    python openai_agents_client.py BASE_URL API_KEY RESULTS

Each: an answer, a stream, a tool, a handoff, an object, a session, a call cut off and calls refused.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

QUESTION = "What is 2 + 3?"


class Sum(BaseModel):
    """Numbers and a note."""

    a: int
    b: int
    note: str


def main(base_url: str, api_key: str, results: str) -> None:
    """Run and write what came back."""
    set_tracing_disabled(True)
    told = asyncio.run(run_both(base_url, api_key))
    Path(results).write_text(json.dumps(told, default=str), "utf-8")


async def run_both(base_url: str, api_key: str) -> dict[str, Any]:
    """Run all agents on both kinds of model."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        return {"responses": await run(OpenAIResponsesModel, client),
                "chats": await run(OpenAIChatCompletionsModel, client)}


async def run(kind: Any, client: AsyncOpenAI) -> dict[str, Any]:
    """Run all agents on one kind of model."""
    greedy = ModelSettings(temperature=0, max_tokens=64)

    def agent(settings: ModelSettings | None = None, **fields: Any) -> Agent:
        model = kind(fields.pop("model", "demo"), fields.pop("client", client))
        return Agent(name="Adder", instructions="You answer.", model=model,
                     model_settings=greedy.resolve(settings), **fields)

    told: dict[str, Any] = {}
    plain = await Runner.run(agent(), QUESTION)
    told["plain"] = [plain.final_output, plain.context_wrapper.usage.total_tokens]
    stream = Runner.run_streamed(agent(), QUESTION)
    texts = [event.data.delta async for event in stream.stream_events()
             if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"]
    told["stream"] = [stream.final_output, "".join(texts)]

    calls: list[Any] = []

    @function_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        calls.append([a, b])
        return str(a + b)

    required = ModelSettings(tool_choice="required")
    told["tool"] = (await Runner.run(agent(required, tools=[add]), QUESTION)).final_output
    streamed = Runner.run_streamed(agent(required, tools=[add]), QUESTION)
    told["tool events"] = [event.name async for event in streamed.stream_events()
                           if event.type == "run_item_stream_event"]
    told["calls"] = calls
    handed = await Runner.run(agent(required, handoffs=[agent(handoff_description="Adds numbers.")]), QUESTION)
    told["handoff"] = [handed.final_output, [item.type for item in handed.new_items]]
    made = await Runner.run(agent(output_type=Sum), QUESTION)
    told["object"] = made.final_output_as(Sum, raise_if_incorrect_type=True).model_dump()
    session = SQLiteSession("one")
    for _ in range(2):
        again = await Runner.run(agent(), QUESTION, session=session)
    told["session"] = [again.final_output, len(await session.get_items())]
    told["errors"] = {
        "cut": await error_of(agent(ModelSettings(max_tokens=3), output_type=Sum)),
        "model": await error_of(agent(model="other")),
        "key": await error_of(agent(client=client.with_options(api_key="another-key-of-nobody"))),
        "temperature": await error_of(agent(ModelSettings(temperature=99))),
        "length": await error_of(agent(), "2 " * 1100),
    }
    return told


async def error_of(agent: Agent, question: str = QUESTION) -> str:
    """Return the class of error that a run raises."""
    try:
        await Runner.run(agent, question)
    except Exception as error:
        return type(error).__name__
    return "none"


if __name__ == "__main__":
    main(*sys.argv[1:])
