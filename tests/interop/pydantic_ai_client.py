"""Calls the door through pydantic-ai, in an environment of its own: typed outputs, a tool, streams, cuts, refusals.

    python pydantic_ai_client.py BASE_URL API_KEY RESULTS
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelRetry, ModelSettings, NativeOutput, PromptedOutput, ToolOutput, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What is 2 + 3?"
GREEDY = ModelSettings(temperature=0)
CUTS = (16, 40, 55, 200)
Expression = Annotated[str, Field(pattern="^[0-9]{1,3} [+-] [0-9]{1,3}$")]


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=8)
    kind: Literal["big", "small"]
    people: int | None = Field(default=None, ge=0, le=99)


def main(base_url: str, api_key: str, results: str) -> None:
    """Call and write what came back."""
    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    other = OpenAIProvider(base_url=base_url, api_key="a-key-of-nobody")
    told = {kind.__name__: told_by(kind, provider, other) for kind in (OpenAIChatModel, OpenAIResponsesModel)}
    Path(results).write_text(json.dumps(told), "utf-8")


def told_by(kind: Any, provider: OpenAIProvider, other: OpenAIProvider) -> dict[str, Any]:
    """Return what the client's model class of one of the two interfaces makes of the answers."""
    model = kind("demo", provider=provider)
    plain = Agent(model, model_settings=GREEDY, instructions="Be brief.").run_sync(QUESTION)
    told: dict[str, Any] = {"plain": plain.output, "usage": [plain.usage.input_tokens, plain.usage.output_tokens]}
    for output in (ToolOutput(City), NativeOutput(City)):
        name = type(output).__name__
        told[name] = Agent(model, output_type=output, model_settings=GREEDY).run_sync(QUESTION).output.model_dump()
        told[f"{name} stream"] = asyncio.run(streamed(model, output)).model_dump()
        told[f"{name} cut"] = [outcome(lambda output=output, size=size: Agent(
            model, output_type=output, model_settings={"temperature": 0, "max_tokens": size}, retries=0,
        ).run_sync(QUESTION).output.model_dump()) for size in CUTS]
        told[f"{name} stream cut"] = [outcome(lambda output=output, size=size: asyncio.run(
            streamed(model, output, size)).model_dump()) for size in CUTS]
    told["PromptedOutput cut"] = outcome(lambda: Agent(
        model, output_type=PromptedOutput(City), model_settings={"temperature": 0, "max_tokens": 16}, retries=0,
    ).run_sync(QUESTION).output.model_dump())
    told["union"] = Agent(model, output_type=[ToolOutput(City, name="city"), ToolOutput(bool, name="flag")],
                          model_settings=GREEDY).run_sync(QUESTION).output.model_dump()
    told["text"] = asyncio.run(text_of(model))
    told["retried"], told["tool"], told["later"] = retried(model), *with_a_tool(model)
    told["errors"] = {name: outcome(call) for name, call in {
        "temperature": lambda: Agent(model, model_settings={"temperature": 99}).run_sync("a"),
        "model": lambda: Agent(kind("other", provider=provider)).run_sync("a"),
        "key": lambda: Agent(kind("demo", provider=other)).run_sync("a"),
        "length": lambda: Agent(model).run_sync("2 " * 1100),
        "room": lambda: Agent(model, model_settings={"max_tokens": 2040}).run_sync(QUESTION),
    }.items()}
    return told


async def streamed(model: Any, output: Any, size: int = 200) -> Any:
    """Return the last object of a stream."""
    agent = Agent(model, output_type=output, model_settings={"temperature": 0, "max_tokens": size}, retries=0)
    async with agent.run_stream(QUESTION) as run:
        async for _ in run.stream_output():
            pass
        return await run.get_output()


async def text_of(model: Any) -> str:
    """Return the text of a stream, joined."""
    async with Agent(model, model_settings=GREEDY).run_stream(QUESTION) as run:
        return "".join([delta async for delta in run.stream_text(delta=True)])


def retried(model: Any) -> int:
    """Refuse the first object, and return how many there were."""
    agent, outputs = Agent(model, model_settings=GREEDY, retries=2, output_type=City), list[City]()

    @agent.output_validator
    def refuse_once(output: City) -> City:
        outputs.append(output)
        if len(outputs) == 1:
            raise ModelRetry("another one")
        return output

    agent.run_sync(QUESTION)
    return len(outputs)


def with_a_tool(model: Any) -> tuple[list[str], str]:
    """Let the model call a function, ask on with the messages so far, and return their parts and the last answer."""
    agent = Agent(model, model_settings=GREEDY)

    @agent.tool_plain
    def calculator(expression: Expression) -> int:
        """Adds or subtracts."""
        first, sign, second = expression.split()
        return int(first) + int(sign + second)

    run = agent.run_sync("What is 12 + 7?", usage_limits=UsageLimits(request_limit=4))
    parts = [type(part).__name__ for message in run.all_messages() for part in message.parts]
    return parts, agent.run_sync(QUESTION, message_history=run.all_messages()).output


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call gives, or the name of its error."""
    try:
        return call()
    except Exception as error:
        return type(error).__name__


if __name__ == "__main__":
    main(*sys.argv[1:])
