"""A hundred streams at once, and every way of leaving one: nothing is lost, mixed or left behind."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing, closing
from typing import Any

import pytest
from langchain_core.output_parsers import StrOutputParser

from pagedcore import AsyncEngine
from pagedcore.demo_model.questions import demo_questions, is_correct
from pagedcore_langchain import ChatPagedCore, PagedCoreLLM
from support.async_helpers import wait_until
from support.paused_steps import slowed

MODELS = [ChatPagedCore, PagedCoreLLM]
ENDLESS = {"max_tokens": 1900, "sampling": {"ignore_eos": True}}


def text_of(chunk: Any) -> str:
    return chunk if isinstance(chunk, str) else chunk.content


@pytest.mark.parametrize("kind", MODELS)
async def test_a_hundred_concurrent_streams(engine: AsyncEngine, kind: Any) -> None:
    """Every answer is right, so none is mixed with another and none is lost."""
    model, questions = kind.from_engine(engine, max_tokens=96), demo_questions(100)

    async def answer(prompt: str) -> str:
        return "".join([text_of(chunk) async for chunk in model.astream(prompt)])

    answers = await asyncio.gather(*(answer(question.prompt) for question in questions))
    assert [is_correct(*pair) for pair in zip(questions, answers, strict=True)] == [True] * 100


async def until_running(engine: AsyncEngine) -> None:
    while not engine.stats().num_running:
        await asyncio.sleep(0)


async def cancelled_call(model: Any, engine: AsyncEngine) -> None:
    """A whole answer whose task is cancelled."""
    task = asyncio.create_task(model.ainvoke("What is 2 + 3?"))
    await until_running(engine)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def cancelled_batch(model: Any, engine: AsyncEngine) -> None:
    """A batch larger than what runs at once, cancelled while some of it runs and some waits."""
    task = asyncio.create_task(model.abatch(["What is 2 + 3?"] * 40))
    await until_running(engine)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def cancelled_before_the_first_chunk(model: Any, engine: AsyncEngine) -> None:
    """A stream whose task is cancelled as soon as it has begun."""
    stream = model.astream("What is 2 + 3?")
    task = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def cancelled_mid_stream(model: Any, engine: AsyncEngine) -> None:
    """A stream whose reading task is cancelled after some chunks."""
    seen: list[Any] = []

    async def read() -> None:
        async for chunk in model.astream("What is 2 + 3?"):
            seen.append(chunk)

    task = asyncio.create_task(read())
    while len(seen) < 3:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def closed_mid_stream(model: Any, engine: AsyncEngine) -> None:
    """A stream that is closed after its first chunk."""
    async with aclosing(model.astream("What is 2 + 3?")) as stream:
        await anext(stream)


async def broken_out_of(model: Any, engine: AsyncEngine) -> None:
    """A loop that is broken out of, its generator lost."""
    async for _ in model.astream("What is 2 + 3?"):
        break


async def closed_chain(model: Any, engine: AsyncEngine) -> None:
    """A chain's stream that is closed after its first chunk."""
    async with aclosing((model | StrOutputParser()).astream("What is 2 + 3?")) as stream:
        await anext(stream)


async def failed_reader(model: Any, engine: AsyncEngine) -> None:
    """A reader that raises on its first chunk."""

    async def read() -> None:
        async for _ in model.astream("What is 2 + 3?"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await read()


WAYS = [cancelled_call, cancelled_batch, cancelled_before_the_first_chunk, cancelled_mid_stream, closed_mid_stream,
        broken_out_of, closed_chain, failed_reader]


def assert_nothing_is_left(engine: AsyncEngine) -> None:
    """The abort was sent before this question, and the engine answers between two steps: so at most one has passed."""
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)


@pytest.mark.parametrize("leave", WAYS)
@pytest.mark.parametrize("kind", MODELS)
async def test_leaving_frees_the_blocks_within_one_step(
    engine: AsyncEngine, kind: Any, leave: Callable[[Any, AsyncEngine], Awaitable[None]]
) -> None:
    """Whatever way a caller leaves, the engine's very next look at itself shows nothing of the request."""
    with slowed(engine):
        await leave(kind.from_engine(engine, **ENDLESS), engine)
    gc.collect()
    # Why: a lost generator is closed by its event loop, one nested in another after the other.
    for _ in range(50):
        await asyncio.sleep(0)
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("kind", MODELS)
def test_leaving_a_blocking_stream_frees_the_blocks_within_one_step(engine: AsyncEngine, kind: Any) -> None:
    """Broken out of, closed, or closed before its first chunk, and also inside a chain."""
    model = kind.from_engine(engine, **ENDLESS)
    for _ in model.stream("What is 2 + 3?"):
        break
    assert_nothing_is_left(engine)
    for runnable in (model, model | StrOutputParser()):
        with closing(runnable.stream("What is 2 + 3?")) as stream:
            next(stream)
        assert_nothing_is_left(engine)
    model.stream("What is 2 + 3?").close()
    assert_nothing_is_left(engine)


# Why: LangChain tells its callbacks on the loop that is gone, and that cannot succeed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine:RuntimeWarning")
@pytest.mark.parametrize("kind", MODELS)
def test_a_loop_that_ends_under_its_streams(engine: AsyncEngine, kind: Any) -> None:
    """An event loop that stops and is closed with a stream half-read frees the request too."""
    model = kind.from_engine(engine, **ENDLESS)
    loop = asyncio.new_event_loop()
    stream = model.astream("What is 2 + 3?")
    loop.run_until_complete(anext(stream))
    loop.close()
    del stream
    gc.collect()
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("kind", MODELS)
def test_an_interrupted_blocking_call_is_aborted(
    engine: AsyncEngine, kind: Any, request: pytest.FixtureRequest
) -> None:
    """Ctrl-C while a thread waits for one answer or for a batch takes the requests out of the engine."""
    # Why: a shell starts background jobs with the signal ignored, and Python leaves it so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    model = kind.from_engine(engine, **ENDLESS)
    for call in (model.invoke, lambda prompt: model.batch([prompt] * 3)):
        interrupter = threading.Thread(target=interrupt_main_thread, args=[engine])
        with slowed(engine):
            interrupter.start()
            with pytest.raises(KeyboardInterrupt):
                call("What is 2 + 3?")
            interrupter.join()
        wait_until(lambda: (engine.stats().num_running, engine.stats().num_blocks_used) == (0, 0))


def interrupt_main_thread(engine: AsyncEngine) -> None:
    wait_until(lambda: engine.stats().num_running > 0)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
