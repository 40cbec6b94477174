"""Calls the door through AutoGen, in an environment of its own: texts, objects, an agent with a tool, refusals.

    python autogen_client.py BASE_URL API_KEY RESULTS
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Literal

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily, SystemMessage, UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel, Field

QUESTION = [SystemMessage(content="Be brief."), UserMessage(content="What is 2 + 3?", source="user")]
INFO = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True,
        "family": ModelFamily.UNKNOWN}


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=8)
    kind: Literal["big", "small"]


def calculator(expression: str) -> int:
    """Adds or subtracts: two numbers with a sign between them."""
    first, sign, second = expression.split()
    return int(first) + int(sign + second)


async def call(base_url: str, api_key: str) -> dict[str, Any]:
    """Call and return what came back."""

    def client(**fields: Any) -> OpenAIChatCompletionClient:
        common = {"model": "demo", "base_url": base_url, "api_key": api_key, "model_info": INFO, "temperature": 0,
                  "max_tokens": 100, "max_retries": 0}
        return OpenAIChatCompletionClient(**{**common, **fields})

    async def streamed(messages: Any = QUESTION, limit: int = 100, **fields: Any) -> Any:
        return [one async for one in client(max_tokens=limit).create_stream(messages, **fields)][-1]

    whole, stream = await client().create(QUESTION), await streamed(include_usage=True)
    told: dict[str, Any] = {name: [one.content, one.finish_reason, one.usage.prompt_tokens, one.usage.completion_tokens]
                            for name, one in (("whole", whole), ("stream", stream))}
    told["json"] = json.loads((await client().create(QUESTION, json_output=True)).content)
    told["typed"] = [json.loads(one.content) for one in (await client().create(QUESTION, json_output=City),
                                                         await streamed(json_output=City))]
    told["cut"] = [await error_of(client(max_tokens=12).create(QUESTION, json_output=City)),
                   await error_of(streamed(limit=12, json_output=City))]
    for name, fields in (("tool", {"tools": [calculator]}), ("typed agent", {"output_content_type": City}),
                         ("reflecting", {"tools": [calculator], "reflect_on_tool_use": True}),
                         ("streaming", {"tools": [calculator], "model_client_stream": True})):
        agent = AssistantAgent("helper", model_client=client(), system_message="Be brief.", **fields)
        told[name] = [type(message).__name__ for message in (await agent.run(task="What is 12 + 7?")).messages]
    told["errors"] = {
        "temperature": await error_of(client(temperature=99).create(QUESTION)),
        "model": await error_of(client(model="other").create(QUESTION)),
        "key": await error_of(client(api_key="a-key-of-nobody").create(QUESTION)),
        "length": await error_of(client().create([UserMessage(content="2 " * 1100, source="user")])),
    }
    return told


async def error_of(result: Awaitable[Any]) -> str:
    """Return the name of the error that a call raises."""
    try:
        await result
    except Exception as error:
        return type(error).__name__
    return "none"


def main(base_url: str, api_key: str, results: str) -> None:
    """Call and write what came back."""
    Path(results).write_text(json.dumps(asyncio.run(call(base_url, api_key))), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
