"""What tests of engines on a thread of their own share."""

from __future__ import annotations

import time
from collections.abc import Callable

from pagedcore import AsyncEngine, SamplingParams
from support.doubles import ToyBackend


def params(max_tokens: int) -> SamplingParams:
    """Ask for exactly so many tokens."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


async def complete(engine: AsyncEngine, prompt: list[int], max_tokens: int) -> list[int]:
    """Read a stream to its end and return its tokens."""
    return [token async for delta in engine.generate(prompt, params(max_tokens)) for token in delta.token_ids]


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for another thread; fail after ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.005)


class SlowBackend(ToyBackend):
    """A toy whose forward takes a while, so that readers have time to leave."""

    def forward(self, batch):  # type: ignore[no-untyped-def]
        time.sleep(0.005)
        return super().forward(batch)


def broken_step() -> None:
    """Fail as a defect in a step would."""
    raise ZeroDivisionError
