"""Calls the door through litellm, in an environment of its own: whole, streamed, asynchronous, in
Anthropic's form, and refused.

    python litellm_client.py BASE_URL API_KEY RESULTS
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]


def main(base_url: str, api_key: str, results: str) -> None:
    """Call and write what came back."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    litellm.telemetry = False
    common: Any = {"model": "openai/demo", "api_base": base_url, "api_key": api_key, "temperature": 0, "num_retries": 0}
    told: dict[str, Any] = {}
    whole = litellm.completion(messages=QUESTION, max_tokens=32, logprobs=True, top_logprobs=2, **common)
    told["whole"] = whole.model_dump()
    chunks = list(litellm.completion(messages=QUESTION, stream=True, stream_options={"include_usage": True}, **common))
    told["stream"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    told["usage"] = chunks[-1].usage.model_dump()
    told["text"] = litellm.text_completion(prompt="What is 2 + 3?", max_tokens=16,
                                           **{**common, "model": "text-completion-openai/demo"}).choices[0].text
    told["asynchronous"], told["asynchronous stream"] = asyncio.run(asynchronously(litellm, common))
    told["errors"] = {name: error_of(litellm, {**common, "messages": QUESTION, **fields}) for name, fields in {
        "temperature": {"temperature": 99}, "model": {"model": "openai/other"},
        "key": {"api_key": "another-key-of-nobody"},
        "length": {"messages": [{"role": "user", "content": "2 " * 1100}]},
    }.items()}
    told["anthropic"] = asyncio.run(anthropic(litellm, {**common, "max_tokens": 64}))
    Path(results).write_text(json.dumps(told, default=str), "utf-8")


async def asynchronously(litellm: Any, common: Any) -> tuple[str, str]:
    """Call on an event loop, whole and streamed."""
    whole = await litellm.acompletion(messages=QUESTION, **common)
    stream = await litellm.acompletion(messages=QUESTION, stream=True, **common)
    texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    return whole.choices[0].message.content, "".join(texts)


async def anthropic(litellm: Any, common: Any) -> dict[str, Any]:
    """Call in Anthropic's form, which litellm translates to responses and chats."""
    common = {name: value for name, value in common.items() if name != "num_retries"}

    async def create(**fields: Any) -> Any:
        return await litellm.anthropic.messages.acreate(**{**common, "messages": QUESTION, **fields})

    async def error_of(**fields: Any) -> str:
        try:
            await create(**fields)
        except Exception as error:
            return type(error).__name__
        return "none"

    tools = [{"name": "add", "description": "Adds.", "input_schema": {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}]
    called = await create(tools=tools, tool_choice={"type": "any"})
    (use,) = (part for part in called["content"] if part["type"] == "tool_use")
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": "5"}]}
    said = [{"type": "thinking", "thinking": "A sum.", "signature": "x"}, *called["content"]]
    system = [{"type": "text", "text": "You answer.", "cache_control": {"type": "ephemeral"}}]
    cut = await create(max_tokens=16, tools=tools, tool_choice={"type": "any"})
    streams = [[part async for part in await create(stream=True, **fields)]
               for fields in ({}, {"tools": tools, "tool_choice": {"type": "tool", "name": "add"}})]
    return {
        "whole": await create(system=system), "called": called, "cut": cut,
        "after": await create(tools=tools, messages=[*QUESTION, {"role": "assistant", "content": said}, result]),
        "without thinking": await create(thinking={"type": "disabled"}, stop_sequences=["="]),
        "streams": [b"".join(part if isinstance(part, bytes) else str(part).encode() for part in parts).decode()
                    for parts in streams],
        "errors": {"model": await error_of(model="openai/other"),
                   "key": await error_of(api_key="another-key-of-nobody"),
                   "temperature": await error_of(temperature=99),
                   "length": await error_of(messages=[{"role": "user", "content": "2 " * 1100}])},
    }


def error_of(litellm: Any, fields: dict[str, Any]) -> str:
    """Return the class of error that a call raises."""
    try:
        litellm.completion(**fields)
    except Exception as error:
        return type(error).__name__
    return "none"


if __name__ == "__main__":
    main(*sys.argv[1:])
