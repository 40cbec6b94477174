"""Calls the door through litellm, in an environment of its own: whole, streamed, asynchronous, and refused.

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
        "length": {"messages": [{"role": "user", "content": "2 " * 4000}]},
    }.items()}
    Path(results).write_text(json.dumps(told, default=str), "utf-8")


async def asynchronously(litellm: Any, common: Any) -> tuple[str, str]:
    """Call on an event loop, whole and streamed."""
    whole = await litellm.acompletion(messages=QUESTION, **common)
    stream = await litellm.acompletion(messages=QUESTION, stream=True, **common)
    texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    return whole.choices[0].message.content, "".join(texts)


def error_of(litellm: Any, fields: dict[str, Any]) -> str:
    """Return the class of error that a call raises."""
    try:
        litellm.completion(**fields)
    except Exception as error:
        return type(error).__name__
    return "none"


if __name__ == "__main__":
    main(*sys.argv[1:])
