"""What tests of engines on a thread of their own share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pagedcore import AsyncEngine, SamplingParams
from pagedcore.serving.engine_loop import EngineLoop
from support.doubles import ToyBackend


def params(max_tokens: int) -> SamplingParams:
    """Ask for exactly so many tokens."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


async def complete(engine: AsyncEngine, prompt: list[int], max_tokens: int) -> list[int]:
    """Read a stream to its end and return its tokens."""
    return [token async for delta in engine.generate(prompt, params(max_tokens)) for token in delta.token_ids]


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for another thread, which a busy machine may stop for seconds; fail after ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.005)


def is_told_to_end(engine: AsyncEngine) -> bool:
    """Whether ``close`` has sent its command, which an engine thread that stands still does not take."""
    commands = engine._commands
    return commands.is_closed or any(one.run is EngineLoop.stop for one in commands._queue._items.copy())


class SlowBackend(ToyBackend):
    """A toy whose forward takes a while, so that readers have time to leave."""

    def forward(self, batch):  # type: ignore[no-untyped-def]
        time.sleep(0.005)
        return super().forward(batch)


class PausedBackend(ToyBackend):
    """A toy whose forward waits for ``gate`` once it has run as often as ``pause_after`` said."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self._num_left = -1

    def pause_after(self, num_forwards: int) -> None:
        """Wait in the forward after this many more."""
        self.gate.clear()
        self._num_left = num_forwards

    def forward(self, batch):  # type: ignore[no-untyped-def]
        """Compute, later if the gate is closed."""
        if self._num_left == 0:
            assert self.gate.wait(60)
        self._num_left -= 1
        return super().forward(batch)


def broken_step() -> None:
    """Fail as a defect in a step would."""
    raise ZeroDivisionError
