"""What LangChain costs: ``batch`` and ``abatch`` of a chat model against the bare engine's step loop.

    python benchmarks/langchain_door.py [--rounds 9] [--model DIRECTORY | --model-size 80m]

The bare engine gets the same chats and renders them with the same template. Read ``door_measuring.py`` for how the
sides are compared.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

from door_measuring import (
    NUM_REQUESTS,
    NUM_TOKENS,
    SETTINGS,
    Run,
    model_of,
    parse,
    prompts,
    run_bare_behind,
    show,
    take_turns,
)

from pagedcore import AsyncEngine
from pagedcore_langchain import ChatPagedCore
from pagedcore_langchain.background import BACKGROUND


def run_door(engine: AsyncEngine, answer: Callable[[list[str]], list[Any]], loop_cpu_s: Callable[[], float]) -> Run:
    """Answer all requests in one call."""
    before_s = _cpu_of(engine), loop_cpu_s()
    start_s = time.perf_counter()
    messages = answer(prompts())
    wall_s = time.perf_counter() - start_s
    cpu_s = {"engine thread": _cpu_of(engine) - before_s[0], "event loop": loop_cpu_s() - before_s[1]}
    if sum(message.usage_metadata["output_tokens"] for message in messages) != NUM_REQUESTS * NUM_TOKENS:
        raise SystemExit("the door generated another number of tokens")
    return Run([message.content for message in messages], wall_s, cpu_s)


def _cpu_of(engine: AsyncEngine) -> float:
    return asyncio.run(engine.call(lambda _: time.thread_time()))


async def _cpu_here() -> float:
    return time.thread_time()


def main() -> None:
    """Compare and print."""
    given, load = parse(__doc__), os.getloadavg()[0]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts()]
    with model_of(given) as model, AsyncEngine.from_pretrained(model, **SETTINGS) as engine:
        chat = ChatPagedCore.from_engine(engine, max_tokens=NUM_TOKENS, sampling={"ignore_eos": True})
        ways = {"bare engine": lambda: run_bare_behind(engine, chats, lambda answer: answer.text),
                "batch": lambda: run_door(engine, chat.batch, lambda: BACKGROUND.run(_cpu_here())),
                "abatch": lambda: run_door(engine, lambda inputs: asyncio.run(chat.abatch(inputs)), time.thread_time)}
        show("LangChain", given, take_turns(ways, given.rounds), load)


if __name__ == "__main__":
    main()
