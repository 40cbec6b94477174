"""How late a timer comes on the event loop of the program that an engine lives in, while that loop reads 64 streams.

    python benchmarks/event_loop.py [--doors asyncgen bentoml] [--seconds 60] [--long-prompts]

A timer is due every millisecond, on a fixed schedule: a loop that stands still for ten makes ten of them late. In
turns, twenty of each, the same is measured with a stub in the engine's place, which computes nothing and hands the same
readers a delta of 16 tokens every 50 ms, as often as the demo model does. The difference is what the engine takes from
the loop. Every request is followed by the next one of its reader, with 64 to 208 tokens, so requests begin and end all
the time. ``--long-prompts`` adds a caller who asks, one after the other, as long a text, a chat of as many messages and
a list of as many token ids as the model has room for.

``asyncgen`` runs engine and readers in this process. ``bentoml`` measures inside the server's worker, whose loop does
all that HTTP needs; ``bentoml_client.py`` is the other end.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from door_measuring import NUM_REQUESTS, NUM_TOKENS, SETTINGS, prompts
from guest import summary

from pagedcore import AsyncEngine, Delta, SamplingParams, Usage
from pagedcore.serving.stream import Stream, StreamReader, wake

Measure = Callable[[float], list[float]]
"""Lets readers read for so many seconds and returns the lateness of each tick."""
PERIOD_S = 0.001
WARM_UP_S = 1.5
SHARES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "maximum": 1.0}
MODEL_LEN = 2048
"""Of the demo model."""
STUB_TOKENS = 16
"""Tokens of a stub's delta."""

SERVICE = """
import os

import bentoml
from door_measuring import SETTINGS
from event_loop import StubEngine, lateness

from pagedcore_bentoml import PagedCoreRunner, create_service

class Measured(PagedCoreRunner):
    @bentoml.api
    async def lateness(self, seconds: float) -> list:
        return await lateness(seconds)

is_stub = bool(os.environ.get("GUEST_STUB"))
LLM = create_service(StubEngine() if is_stub else "demo", runner=Measured, **({} if is_stub else SETTINGS))
"""


async def lateness(seconds: float) -> list[float]:
    """Return how late each tick of a timer came on the running loop, in seconds."""
    late: list[float] = []
    due = time.monotonic() + PERIOD_S
    end = due + seconds
    while due < end:
        await asyncio.sleep(due - time.monotonic())
        now = time.monotonic()
        while due <= now and due < end:
            late.append(now - due)
            due += PERIOD_S
    return late


class StubEngine(AsyncEngine):
    """Answers like an engine that takes no time: what every reader is due comes every 50 ms from another thread."""

    def __init__(self) -> None:  # no engine to take over
        self._left: dict[Stream, int] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._feed, daemon=True).start()

    async def generate(  # type: ignore[override]
        self, prompt: Any, params: SamplingParams, **_: Any
    ) -> AsyncGenerator[Delta, None]:
        """Answer anything with as many tokens as may be."""
        stream = Stream()
        with self._lock:
            self._left[stream] = params.max_tokens or 1
        reader = StreamReader(stream, lambda: None)
        while deltas := await reader.next():
            for delta in deltas:
                yield delta

    def submit(self, *_: Any, **__: Any) -> Future[Any]:
        """Answer at once."""
        done: Future[Any] = Future()
        done.set_result(SimpleNamespace(outputs=[SimpleNamespace(error=None)]))
        return done

    def observe(self, plugin: object) -> None:
        """Have nothing to observe."""

    def health(self, **_: Any) -> Any:
        """Be healthy."""
        return SimpleNamespace(status="ready")

    def close(self) -> None:
        """Have nothing to close."""

    def _feed(self) -> None:
        while True:
            time.sleep(0.05)
            with self._lock:
                waiters = [self._hand_over(stream) for stream in list(self._left)]
            wake(waiters)

    def _hand_over(self, stream: Stream) -> Any:
        number = min(STUB_TOKENS, self._left[stream])
        self._left[stream] -= number
        if self._left[stream]:
            return stream.put([Delta("stub", 0, " word" * number, (7,) * number)])
        del self._left[stream]
        last = Delta("stub", 0, " word" * number, (7,) * number, "length", usage=Usage(48, 0, NUM_TOKENS))
        return stream.end(None, [last])


def lengths(reader: int) -> Iterator[dict[str, Any]]:
    """What one reader wants, request by request: the sampling of each."""
    rng = random.Random(reader)
    while True:
        yield {"max_tokens": NUM_TOKENS + rng.randint(-72, 72), "ignore_eos": True}


def long_prompts() -> list[Any]:
    """As much as fits the context: a text, a chat, token ids."""
    question = prompts()[0]
    text = question * (3 * MODEL_LEN // len(question))
    chat = [{"role": ("user", "assistant")[turn % 2], "content": "yes"} for turn in range(MODEL_LEN // 12)]
    return [text, chat, [7] * (MODEL_LEN - 8)]


async def read_streams(engine: AsyncEngine, seconds: float, others: list[Any]) -> list[float]:
    """Let 64 readers ask one request after the other, and one the long ones, and measure meanwhile."""
    async def read(prompt: str, lengths: Iterator[dict[str, Any]]) -> None:
        for wanted in lengths:
            async for _ in engine.generate(prompt, SamplingParams(**wanted), wait_for_room=True):
                pass

    async def ask() -> None:
        for prompt in itertools.cycle(others):
            async for _ in engine.generate(prompt, SamplingParams(max_tokens=1), wait_for_room=True):
                pass
            await asyncio.sleep(0.1)

    tasks = [asyncio.create_task(read(prompt, lengths(number))) for number, prompt in enumerate(prompts())]
    if others:
        tasks.append(asyncio.create_task(ask()))
    await asyncio.sleep(WARM_UP_S)
    try:
        return await lateness(seconds)
    finally:
        for task in tasks:
            task.cancel()
        failed = [one for one in await asyncio.gather(*tasks, return_exceptions=True)
                  if not isinstance(one, asyncio.CancelledError)]  # fmt: skip
        if failed:
            raise SystemExit(f"a reader failed: {failed[0]!r}")


@contextmanager
def asyncgen(is_stub: bool, others: list[Any]) -> Iterator[Measure]:
    """Measure on a loop of this process."""
    engine = StubEngine() if is_stub else AsyncEngine.from_pretrained("demo", **SETTINGS)
    with closing(engine):
        yield lambda seconds: asyncio.run(read_streams(engine, seconds, others))


@contextmanager
def bentoml(is_stub: bool, others: list[Any]) -> Iterator[Measure]:
    """Measure on the loop of a server's worker."""
    from bentoml_door import served

    bodies = [[{"prompt": prompt, "sampling": wanted} for wanted in islice(lengths(number), 100)]
              for number, prompt in enumerate(prompts())]  # fmt: skip
    if others:
        bodies.append([{"prompt": prompt, "sampling": {"max_tokens": 1}} for prompt in others])
    with served("demo", SERVICE, {"GUEST_STUB": "1" if is_stub else ""}) as door:
        yield lambda seconds: _measure_server(door.port, seconds, json.dumps(bodies))


def _measure_server(port: str, seconds: float, bodies: str) -> list[float]:
    client = [sys.executable, str(Path(__file__).with_name("bentoml_client.py")), port, str(seconds + 3)]
    with subprocess.Popen(client, stdin=subprocess.PIPE, text=True) as reading:
        assert reading.stdin is not None
        print(bodies, file=reading.stdin, flush=True)
        time.sleep(WARM_UP_S)
        request = urllib.request.Request(f"http://127.0.0.1:{port}/lateness", json.dumps({"seconds": seconds}).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            late = json.load(response)
        if reading.wait():
            raise SystemExit("the client failed")
        return list(late)


def percentile(values: list[float], share: float) -> float:
    """Return the value that this share of all is below."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def compare(door: str, given: argparse.Namespace) -> None:
    """Measure one door, both ways in turns, and print."""
    others, way = long_prompts() if given.long_prompts else [], {"asyncgen": asyncgen, "bentoml": bentoml}[door]
    with way(True, others) as stub, way(False, others) as engine:
        results: list[tuple[list[float], list[float]]] = []
        for number in range(given.turns):
            both = [("stub", stub), ("engine", engine)]
            done = {name: measure(given.seconds / given.turns) for name, measure in both[:: 1 if number % 2 else -1]}
            results.append((done["stub"], done["engine"]))
    for place, name in enumerate(("stub", "engine")):
        late = [value for one in results for value in one[place]]
        shown = ", ".join(f"{label} {1000 * percentile(late, share):.2f}" for label, share in SHARES.items())
        print(f"{door}, {NUM_REQUESTS} streams, {name}: ms late: {shown} of {len(late)}", flush=True)
    above = [1000 * (percentile(of_engine, 0.999) - percentile(of_stub, 0.999)) for of_stub, of_engine in results]
    print(f"{door}: p99.9 of the engine above that of the stub, ms: {summary(above)}", flush=True)


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--doors", nargs="*", default=["asyncgen", "bentoml"])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each way")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--long-prompts", action="store_true")
    given = parser.parse_args()
    for door in given.doors:
        compare(door, given)


if __name__ == "__main__":
    main()
