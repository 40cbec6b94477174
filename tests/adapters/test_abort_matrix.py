"""Leaving: every state of a request x every way to leave x every door, and what has to be left, which is nothing."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from threading import Condition
from typing import Any

import pytest

from adapters.doors import EndlessBackend, House, Question, body_of, for_langchain, house, openai_body_of
from pagedcore import RequestOutput, SamplingParams
from pagedcore.errors import EngineClosed
from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.requests.request import Request
from pagedcore.sequence import SequenceStatus
from pagedcore_langchain import PagedCoreLLM
from support.async_helpers import is_told_to_end, wait_until
from support.doubles import ToyBackend, toy_answer
from support.sinks import num_sinks
from support.torture import scaled

BLOCK = 4 * ToyBackend.kv_bytes_per_token
LABEL = "mine"
NEIGHBOURS = ([1, 2, 3], [5, 6])
NUM_NEIGHBOUR_TOKENS = 28


class GatedBackend(EndlessBackend):
    """A toy model whose steps a test lets happen one by one; between them the engine's thread stands still."""

    def __init__(self) -> None:
        super().__init__()
        self._is_open = True
        self._num_arrived = self._num_permits = 0
        self._changed = Condition()

    def forward(self, batch: Any) -> Any:
        """Wait for the test."""
        with self._changed:
            self._num_arrived += 1
            assert self._changed.wait_for(lambda: self._is_open or self._num_permits, 60)
            self._num_permits = 0
        return super().forward(batch)

    async def step(self) -> None:
        """Let one step happen, and wait until the next one begins."""
        await self._let(is_open=False, num_permits=1)

    async def shut(self) -> None:
        """Hold the step that begins next."""
        await self._let(is_open=False, num_permits=0)

    async def _let(self, *, is_open: bool, num_permits: int) -> None:
        with self._changed:
            arrived, self._is_open, self._num_permits = self._num_arrived, is_open, num_permits
            self._changed.notify_all()
        async with asyncio.timeout(30):
            while self._num_arrived == arrived:
                await asyncio.sleep(0.0005)

    def open(self) -> None:
        """Let everything run."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()


@asynccontextmanager
async def gated_house(state: str) -> AsyncIterator[tuple[House, GatedBackend, Finished]]:
    """A house with the settings of a state, its gate open at the beginning and at the end."""
    backend, finished = GatedBackend(), Finished()
    async with house(backend, **{"num_kv_blocks": 64, "max_num_waiting": 8, **STATES[state]}) as opened:
        opened.engine.observe(finished)
        await asyncio.sleep(0)
        try:
            yield opened, backend, finished
        finally:
            backend.open()


class Finished:
    """Notes why the requests of the label ended, as a plugin sees it."""

    def __init__(self) -> None:
        self.reasons: list[str | None] = []

    @hookimpl
    def pagedcore_request_finished(self, request: RequestOutput) -> None:
        """Note one."""
        if request.client_request_id == LABEL:
            self.reasons.append(request.outputs[0].finish_reason)


def sequence_of(opened: House) -> Any:
    request: Request | None = next((one for one in opened.inner.requests if one.client_request_id == LABEL), None)
    return None if request is None else request.sequences[0]


def is_at(state: str, sequence: Any) -> bool:
    """Whether a request, ``None`` if the engine does not have it, is in a state, while the engine's thread waits."""
    if sequence is None:
        return state in ("held", "finished")
    match state:
        case "waiting":
            return sequence.status is SequenceStatus.WAITING and not sequence.num_preemptions
        case "prefilling":
            return bool(0 < sequence.num_computed_tokens < sequence.num_prompt_tokens)
        case "decoding":
            return sequence.status is SequenceStatus.RUNNING and sequence.num_output_tokens >= 2
        case "swapped":
            return sequence.status is SequenceStatus.WAITING and sequence.num_preemptions > 0
    return False


STATES: dict[str, dict[str, Any]] = {
    "held": {"max_num_seqs": 1, "max_num_waiting": 1},
    "waiting": {"max_num_seqs": 1},
    "prefilling": {"enable_prefix_caching": False},
    "decoding": {},
    "swapped": {"num_kv_blocks": 12, "host_kv_memory": 32 * BLOCK, "preemption": "swap"},
    "finished": {},
}
REASONS: dict[str, list[str | None]] = {"held": [], "finished": ["length"]}
"""Why requests that were left in a state ended, as plugins see it; others were aborted."""
HAS_DELTA = ("decoding", "swapped", "finished")
MINE = {state: Question("ab" * 20 if state == "prefilling" else "ab",
                        {"max_tokens": 2 if state == "finished" else 20}, {"request_id": LABEL}) for state in STATES}


@dataclass
class Visit:
    """One call of one door, and how to leave it."""

    opened: House
    question: Question
    reads: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the caller reads what comes; clear in the state "finished", where it has one delta at most."""
    deltas: AsyncGenerator[Any, None] | None = None
    task: asyncio.Task[Any] | None = None
    exchange: Any = None
    future: Any = None
    limit: asyncio.Timeout | None = None

    async def run(self, work: Awaitable[Any]) -> Any:
        """Do the work under a time limit that has not been set."""
        async with asyncio.timeout(None) as self.limit:
            return await work

    async def read(self) -> None:
        """Read the deltas, as fast as they come or only the first."""
        assert self.deltas is not None
        async with aclosing(self.deltas):
            async for _ in self.deltas:
                await self.reads.wait()

    async def end(self) -> None:
        """Wait until the call has ended, however."""
        if self.task is not None:
            done, _ = await asyncio.wait({self.task}, timeout=10)
            assert done, "the call has not ended"
            with suppress(asyncio.CancelledError, TimeoutError, EngineClosed):
                self.task.result()


Opener = Callable[[Visit], AsyncGenerator[Any, None]]
STREAMS: dict[str, Opener] = {
    "generate": lambda v: v.opened.engine.generate(
        v.question.prompt, v.question.params, wait_for_room=True, **v.question.options),
    "async generator": lambda v: v.opened.generator(
        v.question.prompt, v.question.params, wait_for_room=True, **v.question.options),
    "LangChain astream": lambda v: PagedCoreLLM.from_engine(v.opened.engine).astream(
        v.question.prompt, **for_langchain(v.question)),
}
WHOLE: dict[str, Callable[[Visit], Awaitable[Any]]] = {
    "complete": lambda v: v.opened.generator.complete(
        v.question.prompt, v.question.params, wait_for_room=True, **v.question.options),
    "LangChain ainvoke": lambda v: PagedCoreLLM.from_engine(v.opened.engine).ainvoke(
        v.question.prompt, **for_langchain(v.question)),
}
PATHS = ("/generate", "/stream", "/batch")
OPENAI = [(path, form) for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses")
          for form in ("whole", "stream")] + [("/v1/completions", "several"), ("/v1/completions", "several, stream")]
"""Paths of the OpenAI door, and the forms of a call."""


def begin(visit: Visit, door: str, kind: str) -> None:
    """Call the door."""
    if door in STREAMS:
        visit.deltas = STREAMS[door](visit)
        visit.task = asyncio.ensure_future(
            anext(visit.deltas) if kind in ("aclose", "lost") else visit.run(visit.read()))
    elif door == "submit":
        visit.future = visit.opened.engine.submit(
            visit.question.prompt, visit.question.params, wait_for_room=True, **visit.question.options)
        if kind != "future.cancel":
            visit.task = asyncio.ensure_future(visit.run(asyncio.wrap_future(visit.future)))
    elif door in WHOLE:
        visit.task = asyncio.ensure_future(visit.run(WHOLE[door](visit)))
    elif door.startswith("/v1"):
        path, _, form = door.partition(" ")
        body = openai_body_of(visit.question, path, is_stream="stream" in form, is_batch="several" in form)
        visit.exchange = visit.opened.openai.begin(path, body, reads=visit.reads)
        visit.task = visit.exchange.task
    else:
        body = body_of(visit.question, is_batch=door == "/batch")
        if door == "/batch":
            # Why: only the prompts of a batch after its first are held.
            body = {**body, "prompts": [[9], visit.question.prompt], "request_id": ["other", LABEL]}
        visit.exchange = visit.opened.app.begin(door, body, reads=visit.reads)
        visit.task = visit.exchange.task


async def leave(visit: Visit, kind: str) -> None:
    """Leave the call; afterwards only the engine's thread may have something to do."""
    match kind:
        case "aclose":
            assert visit.deltas is not None
            await visit.deltas.aclose()
        case "lost":
            visit.deltas = visit.task = None
            gc.collect()
            await asyncio.sleep(0)
        case "cancel":
            assert visit.task is not None
            visit.task.cancel()
        case "timeout":
            assert visit.limit is not None
            visit.limit.reschedule(0.0)
        case "future.cancel":
            visit.future.cancel()
        case "disconnect":
            visit.exchange.leaving.set()
            visit.reads.set()
        case "close":
            closing = asyncio.ensure_future(visit.opened.engine.aclose())
            await asyncio.to_thread(wait_until, lambda: is_told_to_end(visit.opened.engine))
            backend: Any = visit.opened.inner._runner.backend
            backend.open()
            await closing


def cells(state: str) -> list[tuple[str, str]]:
    """The doors and ways to leave that a state has."""
    found = [(door, kind) for door in STREAMS for kind in ("cancel", "timeout", *(
        ("aclose", "lost") if state in HAS_DELTA else ()))]
    found.append(("submit", "future.cancel"))
    # Why: a call that returns everything has nothing left to leave when it has ended.
    found += [(door, kind) for door in ("submit", *WHOLE) for kind in ("cancel", "timeout") if state != "finished"]
    # Why: servers do not cancel a call whose client has left, they say so; only a batch is held.
    found += [(path, "disconnect") for path in PATHS if path == "/batch" or state != "held"]
    return found + [(f"{path} {form}", "disconnect") for path, form in OPENAI if state != "held"]


async def visit_until(
    opened: House, backend: GatedBackend, state: str, door: str, kind: str
) -> tuple[Visit, list[Any]]:
    """Start the neighbours, shut the gate, call the door, and step until the call is in the state."""
    prompts = NEIGHBOURS[: 2 if state == "held" and door != "/batch" else 1]
    neighbours = [asyncio.ensure_future(read_neighbour(opened, prompt)) for prompt in prompts]
    await backend.shut()
    for _ in range(2):
        await backend.step()
    visit = Visit(opened, MINE[state])
    if state != "finished":
        visit.reads.set()
    begin(visit, door, kind)
    await asyncio.sleep(0.002)
    for _ in range(2 if state == "held" else 1):
        await backend.step()
    for _ in range(40):
        sequence = sequence_of(opened)
        has_first = kind not in ("aclose", "lost") or (visit.task is not None and visit.task.done())
        if is_at(state, sequence) and has_first:
            return visit, neighbours
        await backend.step()
        await asyncio.sleep(0)
    raise AssertionError(f"{door} never was {state}")


async def read_neighbour(opened: House, prompt: list[int]) -> list[int]:
    params = SamplingParams(max_tokens=NUM_NEIGHBOUR_TOKENS)
    deltas = opened.engine.generate(prompt, params, wait_for_room=True)
    return [token async for delta in deltas for token in delta.token_ids]


async def settle(num_tasks: int) -> None:
    """Wait until no more tasks are left than before; a task that was cancelled needs a few rounds of the loop."""
    async with asyncio.timeout(60):
        while len(asyncio.all_tasks()) != num_tasks:
            await asyncio.sleep(0.001)
    # Why: what the engine's thread has told the loop at last, futures and errors of sinks, is in its queue.
    await asyncio.sleep(0.001)


async def require_no_more_sinks(before: int) -> None:
    """Wait until there are no more sinks than before: the engine's threads and the loop are done with them then.

    Those of an earlier test may end meanwhile.
    """
    async with asyncio.timeout(60):
        while num_sinks() > before:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(("state", "third"), [
    pytest.param(state, third, marks=[] if third == place % 3 else [pytest.mark.slow])
    for place, state in enumerate(STATES) for third in range(3)
])  # fmt: skip
async def test_whoever_leaves_in_any_state_by_any_door_leaves_nothing(state: str, third: int) -> None:
    """No request, block, label, task or sink is left, and the neighbours get the tokens that they get alone."""
    before = num_sinks()
    async with gated_house(state) as (opened, backend, finished):
        num_tasks = len(asyncio.all_tasks())
        for door, kind in cells(state)[third::3]:
            visit, neighbours = await visit_until(opened, backend, state, door, kind)
            await leave(visit, kind)
            await asyncio.sleep(0.001)
            # Law: leaving does not wait for the step in flight.
            await visit.end()
            backend.open()
            for prompt, neighbour in zip(NEIGHBOURS, neighbours, strict=False):
                assert await neighbour == toy_answer(prompt, NUM_NEIGHBOUR_TOKENS), (state, door, kind)
            del visit, neighbours, neighbour
            await settle(num_tasks)
            assert opened.is_idle(), (state, door, kind)
            assert finished.reasons == REASONS.get(state, ["abort"]), (state, door, kind)
            finished.reasons.clear()
        await require_no_more_sinks(before)


CLOSING = {"held": "/batch", "waiting": "submit", "prefilling": "/generate", "decoding": "/stream",
           "swapped": "LangChain astream", "finished": "generate"}
"""The door of a state that is tried first; there are more where there is time."""


@pytest.mark.torture
@pytest.mark.parametrize("state", STATES)
async def test_closing_the_engine_in_any_state_ends_every_call(state: str) -> None:
    """Every door's call ends, with its completion, EngineClosed or 503; no thread, task or sink is left."""
    others = {door for door, _ in cells(state)} - {CLOSING[state]}
    for door in [CLOSING[state], *sorted(others)][: scaled(1)]:
        before = num_sinks()
        async with gated_house(state) as (opened, backend, _):
            num_tasks = len(asyncio.all_tasks())
            visit, neighbours = await visit_until(opened, backend, state, door, "close")
            await leave(visit, "close")
            visit.reads.set()
            await visit.end()
            for prompt, neighbour in zip(NEIGHBOURS, neighbours, strict=False):
                with suppress(EngineClosed):
                    assert await neighbour == toy_answer(prompt, NUM_NEIGHBOUR_TOKENS)
            if visit.exchange is not None and visit.exchange.status != 200:
                kind = "server_error" if door.startswith("/v1") else "EngineClosed"
                assert (visit.exchange.status, visit.exchange.error["type"]) == (503, kind)
            elif door.startswith("/v1"):
                assert '"error"' in visit.exchange.text or state == "finished", json.dumps(visit.exchange.text)
            elif visit.exchange is not None:
                assert "EngineClosed" in visit.exchange.text or state == "finished", json.dumps(visit.exchange.text)
            del visit, neighbours, neighbour
            assert not opened.engine.is_alive
            await settle(num_tasks)
        await require_no_more_sinks(before)
