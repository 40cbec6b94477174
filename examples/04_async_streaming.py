"""Streaming under asyncio: every caller has an async generator of its own, the engine batches them all.

The engine runs on its own thread and belongs to no event loop. Leaving a generator early aborts its request;
``aclosing`` makes that happen at once.
"""

import asyncio
from contextlib import aclosing

from pagedcore import AsyncEngine, SamplingParams, expose


async def ask(engine: AsyncEngine, prompt: str) -> None:
    """Collect one answer, delta by delta."""
    parts = []
    async for delta in engine.generate(prompt, SamplingParams(max_tokens=64)):
        parts.append(delta.text)
    print(f"{prompt} -> {''.join(parts).strip()} ({len(parts)} deltas)")


async def main() -> None:
    """Ask three questions at once, leave a fourth after its first delta, then use the adapter by name."""
    async with AsyncEngine.from_pretrained("demo") as engine:
        prompts = ["What is 2 + 3?", "What is 9 - 5?", "What is 6 + 6?"]
        await asyncio.gather(*(ask(engine, prompt) for prompt in prompts))

        async with aclosing(engine.generate("What is 20 + 22?", SamplingParams(ignore_eos=True))) as deltas:
            async for delta in deltas:
                print(f"left after {delta.text!r}")
                break

    async with expose("async-generator", model="demo") as generate:
        answer = [delta.text async for delta in generate("What is 3 + 3?", SamplingParams(max_tokens=16))]
        print("".join(answer).strip())


if __name__ == "__main__":
    asyncio.run(main())
