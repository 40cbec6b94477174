"""Calls the door through LlamaIndex, in an environment of its own: texts, typed objects, a tool, an agent, refusals.

    python llama_index_client.py BASE_URL API_KEY RESULTS
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

QUESTION = "What is 2 + 3?"
PROMPT = PromptTemplate("What is {sum}?")


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=8)
    kind: Literal["big", "small"]


def calculator(expression: str) -> int:
    """Adds or subtracts: two numbers with a sign between them."""
    first, sign, second = expression.split()
    return int(first) + int(sign + second)


def main(base_url: str, api_key: str, results: str) -> None:
    """Call and write what came back."""

    def model(**fields: Any) -> OpenAILike:
        common = {"model": "demo", "api_base": base_url, "api_key": api_key, "is_chat_model": True, "temperature": 0,
                  "is_function_calling_model": True, "context_window": 2048, "max_tokens": 120, "max_retries": 0}
        return OpenAILike(**{**common, **fields})

    def typed(**fields: Any) -> Any:
        return outcome(lambda: model(**fields).structured_predict(City, PROMPT, sum="2 + 3").model_dump())

    chat, text = model(), model(is_chat_model=False, is_function_calling_model=False, max_tokens=16)
    told: dict[str, Any] = {"complete": chat.complete(QUESTION).text, "text": text.complete(QUESTION).text}
    told["usage"] = chat.chat([ChatMessage(QUESTION)]).additional_kwargs
    told["stream"] = "".join([one.delta for one in chat.stream_chat([ChatMessage(QUESTION)])])
    told["text stream"] = "".join([one.delta for one in text.stream_complete(QUESTION)])
    told["asynchronous"] = asyncio.run(chat.achat([ChatMessage(QUESTION)])).message.content
    told["typed"], told["native"] = typed(), typed(should_use_structured_outputs=True)
    told["as structured"] = chat.as_structured_llm(City).complete(QUESTION).raw.model_dump()
    told["cut"] = [typed(max_tokens=size) for size in (1, 12, 45, 55, 200)]
    told["native cut"] = [typed(max_tokens=size, should_use_structured_outputs=True) for size in (1, 12, 200)]
    told["agent"], told["events"] = asyncio.run(run_agent(model()))
    told["errors"] = {name: outcome(lambda fields=fields, prompt=prompt: model(**fields).complete(prompt))
                      for name, (fields, prompt) in {
        "temperature": ({"additional_kwargs": {"temperature": 99}}, "a"), "model": ({"model": "other"}, "a"),
        "key": ({"api_key": "a-key-of-nobody"}, "a"), "length": ({}, "2 " * 1100),
    }.items()}
    Path(results).write_text(json.dumps(told), "utf-8")


async def run_agent(model: OpenAILike) -> tuple[str, list[str]]:
    """Let an agent call the function; return its answer and the kinds of its events."""
    agent = FunctionAgent(tools=[FunctionTool.from_defaults(calculator)], llm=model, system_prompt="Be brief.")
    run = agent.run(user_msg="What is 12 + 7?", max_iterations=4)
    events = {type(event).__name__ async for event in run.stream_events()}
    return str(await run), sorted(events)


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call gives, or the name of its error."""
    try:
        return call()
    except Exception as error:
        return type(error).__name__


if __name__ == "__main__":
    main(*sys.argv[1:])
