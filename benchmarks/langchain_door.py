"""What LangChain costs: the same requests through a bare engine and through the adapter, in one process, by turns.

    python benchmarks/langchain_door.py --rounds 7

Prints tokens per second of each way and, per round, its throughput as a share of the bare engine's; the median of
these shares is the result. All ways decode greedily and have to bring the same number of tokens.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable

from pagedcore import AsyncEngine, Engine, SamplingParams
from pagedcore.demo_model.questions import demo_questions
from pagedcore_langchain import ChatPagedCore


def chat_of(prompt: str) -> list[dict[str, str]]:
    """What the chat model makes of a text."""
    return [{"role": "user", "content": prompt}]


def ways(bare: Engine, chat: ChatPagedCore, prompts: list[str], max_tokens: int) -> dict[str, Callable[[], int]]:
    """Return the ways to answer all prompts; each returns how many tokens it generated."""

    def through_the_engine() -> int:
        outputs = bare.generate([*map(chat_of, prompts)], SamplingParams(max_tokens=max_tokens), show_progress=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def count(answers: list) -> int:
        return sum(answer.usage_metadata["output_tokens"] for answer in answers)

    return {
        "engine": through_the_engine,
        "batch": lambda: count(chat.batch(prompts)),
        "abatch": lambda: count(asyncio.run(chat.abatch(prompts))),
    }


def measure(way: Callable[[], int]) -> tuple[float, int]:
    """Return tokens per second, and tokens."""
    start = time.perf_counter()
    num_tokens = way()
    return num_tokens / (time.perf_counter() - start), num_tokens


def main() -> None:
    """Warm up, take turns, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    prompts = [question.prompt for question in demo_questions(given.requests)]
    with Engine.from_pretrained("demo") as bare, AsyncEngine.from_pretrained("demo") as engine:
        chat = ChatPagedCore.from_engine(engine, max_tokens=given.max_tokens)
        all_ways = ways(bare, chat, prompts, given.max_tokens)
        if len({way() for way in all_ways.values()}) != 1:
            raise SystemExit("the ways disagree about the number of tokens")
        rounds = [{name: measure(way)[0] for name, way in all_ways.items()} for _ in range(given.rounds)]
    for name in all_ways:
        shares = [speeds[name] / speeds["engine"] for speeds in rounds]
        speed = statistics.median(speeds[name] for speeds in rounds)
        print(f"{name:8}{speed:8.0f} tokens/s  {statistics.median(shares):.2f} of the engine "
              f"({min(shares):.2f} to {max(shares):.2f})")


if __name__ == "__main__":
    main()
