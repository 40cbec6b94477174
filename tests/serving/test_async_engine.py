"""The engine on its own thread: many readers, many loops, every way of leaving early."""

from __future__ import annotations

import asyncio
import errno
import gc
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from typing import Any

import psutil
import pytest
import torch

from pagedcore.engine.engine import Engine
from pagedcore.errors import EngineClosed, EngineOverloaded, InvalidConfig, PromptEmpty
from pagedcore.outputs import Usage
from pagedcore.protocols import FloatArray, RaggedRows
from pagedcore.sampling_params import SamplingParams
from pagedcore.serving import async_engine, engine_loop
from pagedcore.serving.async_engine import AsyncEngine
from pagedcore.serving.commands import Commands
from support.async_helpers import PausedBackend, SlowBackend, broken_step, complete, params, wait_until
from support.doubles import FakeClock, FlakyBackend, GatedBackend, ToyBackend, raising, toy_answer
from support.engine_builders import make_engine


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    """An asynchronous engine over the toy backend."""
    with AsyncEngine(make_engine(num_kv_blocks=64, max_num_waiting=256)) as engine:
        yield engine


async def test_a_reader_that_has_read_everything_asks_no_more_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only who leaves early has something to cancel; every command wakes the engine's thread."""
    backend, sent = PausedBackend(), list[str]()
    backend.pause_after(1)
    with AsyncEngine(make_engine(backend)) as engine:
        commands = engine._commands
        put, abort = commands.put, commands.abort
        monkeypatch.setattr(commands, "put", lambda *command: (sent.append("put"), put(*command)))
        monkeypatch.setattr(commands, "abort", lambda sink: (sent.append("abort"), abort(sink)))
        async with aclosing(engine.generate([1, 2], params(40))) as deltas:
            await anext(deltas)
        assert sent == ["put", "abort"]
        backend.gate.set()
        sent.clear()
        assert await complete(engine, [1, 2], 3) == toy_answer([1, 2], 3)
        assert sent == ["put"]


def thread_ids() -> set[int]:
    """Return this process's threads. Why not their number: one of a test before this one may end meanwhile."""
    return {thread.id for thread in psutil.Process().threads()}


@pytest.mark.skipif(sys.platform != "linux", reason="counts the helpers of libgomp")
def test_whoever_built_the_engine_keeps_no_helpers() -> None:
    """Helpers of two threads would sleep after every kernel: those of the builder end when the engine is taken over."""
    counts = []

    def build() -> None:
        engine = make_engine()
        torch.set_num_threads(3)
        before = thread_ids()
        _ = torch.ones(1 << 20).exp()
        torch.set_num_threads(1)
        helpers = thread_ids() - before
        with AsyncEngine(engine):
            # Why waited for: the system lists a thread that was joined until it is quite gone.
            wait_until(lambda: not thread_ids() & helpers)
            counts.extend((len(helpers), len(thread_ids() - before)))

    builder = threading.Thread(target=build)
    builder.start()
    builder.join()
    assert counts == [2, 2], "two helpers, then the engine's own thread and its watchdog"


@pytest.mark.skipif(sys.platform != "linux", reason="counts the helpers of libgomp")
def test_an_idle_engine_keeps_no_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines of one process do not slow each other down while only one of them is busy."""
    monkeypatch.setattr(engine_loop, "IDLE_CHECK_S", 0.01)

    def compute(_: Engine) -> int:
        torch.set_num_threads(3)
        before = thread_ids()
        _ = torch.ones(1 << 20).exp()
        torch.set_num_threads(1)
        return len(thread_ids() - before)

    with AsyncEngine(make_engine()) as engine:
        without = thread_ids()
        assert asyncio.run(engine.call(compute)) == 2
        wait_until(lambda: not thread_ids() - without)


def is_idle(engine: AsyncEngine) -> bool:
    stats = engine.stats()
    return (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)


async def test_a_hundred_concurrent_streams_get_their_own_answers(engine: AsyncEngine) -> None:
    """None lost, none mixed, and every block is back afterwards."""
    prompts = [[index % 20, index // 20] for index in range(100)]
    answers = await asyncio.gather(*(complete(engine, prompt, 1 + index % 9) for index, prompt in enumerate(prompts)))
    assert answers == [toy_answer(prompt, 1 + index % 9) for index, prompt in enumerate(prompts)]
    assert is_idle(engine)


def test_generate_is_a_real_async_generator_function() -> None:
    """Frameworks look for exactly this."""
    assert inspect.isasyncgenfunction(AsyncEngine.generate)


def test_several_loops_and_no_loop_at_once(engine: AsyncEngine) -> None:
    """Readers on three event loops and one without any share the engine."""
    results: dict[int, list[int]] = {}

    def on_a_loop(value: int) -> None:
        results[value] = asyncio.run(complete(engine, [value], 12))

    def on_no_loop(value: int) -> None:
        results[value] = [t for delta in engine.generate_sync([value], params(12)) for t in delta.token_ids]

    threads = [threading.Thread(target=on_a_loop, args=(value,)) for value in (1, 2, 3)]
    threads.append(threading.Thread(target=on_no_loop, args=(4,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {value: toy_answer([value], 12) for value in (1, 2, 3, 4)}


async def test_bad_input_and_overload_reach_the_caller() -> None:
    """A refusal is raised at the first iteration, with its type; the engine keeps running."""
    backend = GatedBackend()
    with AsyncEngine(make_engine(backend, max_num_waiting=1, max_num_seqs=1)) as engine:
        with pytest.raises(PromptEmpty):
            await complete(engine, [], 3)
        first = asyncio.create_task(complete(engine, [1], 30))
        await asyncio.to_thread(backend.is_entered.wait, 60)
        second = asyncio.create_task(complete(engine, [2], 3))
        await asyncio.sleep(0)
        with pytest.raises(EngineOverloaded):
            await complete(engine, [3], 3)
        backend.gate.set()
        assert await first == toy_answer([1], 30)
        assert await second == toy_answer([2], 3)


async def test_answers_that_end_in_one_step_are_all_delivered(engine: AsyncEngine) -> None:
    """Of several answers each gets its reason, the request's usage comes once and last; the engine keeps running."""
    several = SamplingParams(max_tokens=3, n=2, ignore_eos=True, temperature=1.0, seed=1)
    deltas = [delta async for delta in engine.generate([1, 2], several)]
    reasons = {delta.index: delta.finish_reason for delta in deltas if delta.finish_reason is not None}
    assert reasons == {0: "length", 1: "length"}
    assert sum(len(delta.token_ids) for delta in deltas) == 6
    assert [delta.usage for delta in deltas if delta.usage is not None] == [Usage(2, 0, 6)]
    assert deltas[-1].usage is not None
    assert await complete(engine, [7], 3) == toy_answer([7], 3)


class PatientBackend(ToyBackend):
    """Computes its second step only after a reader has read the output of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.was_read = threading.Event()

    def forward(self, batch: RaggedRows) -> FloatArray:
        assert self.num_steps == 0 or self.was_read.wait(10)
        return super().forward(batch)


async def test_readers_are_told_of_the_first_delta_and_the_last_whatever_the_interval(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between them deltas are joined, so that nothing is lost and no reader waits for the end."""
    # Why: its interval never ends.
    monkeypatch.setattr(async_engine, "MonotonicClock", FakeClock)
    backend, deltas = PatientBackend(), []
    with AsyncEngine(make_engine(backend, num_kv_blocks=64), stream_interval_s=1) as engine:
        async for delta in engine.generate([1], params(20)):
            backend.was_read.set()
            deltas.append(delta)
        assert [len(delta.token_ids) for delta in deltas] == [1, 19]
        assert [token for delta in deltas for token in delta.token_ids] == toy_answer([1], 20)


def test_requests_that_come_together_begin_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle engine waits for a lull, so that a burst takes no more steps than one request."""
    monkeypatch.setattr(engine_loop, "LULL_S", lull_s := 30.0)
    monkeypatch.setattr(engine_loop, "GATHER_S", 2 * lull_s)
    is_lull, wait = threading.Event(), Commands.wait

    def wait_for_lull(commands: Commands, timeout_s: float) -> Any:
        # Why: how long nothing comes is the test's to say, not the machine's.
        while (command := wait(commands, 0.01)) is None and timeout_s == lull_s and not is_lull.is_set():
            pass
        return command

    monkeypatch.setattr(Commands, "wait", wait_for_lull)
    with AsyncEngine(make_engine(num_kv_blocks=64)) as engine:
        answers = []
        for token in range(4):
            answers.append(engine.submit([token], params(3)))
            time.sleep(0.02)
        is_lull.set()
        assert [list(one.result(10).outputs[0].token_ids) for one in answers] == [toy_answer([t], 3) for t in range(4)]
        assert engine.stats().num_steps == 3


def test_nobody_waits_long_for_a_lull(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a lull has to be, the first step begins in time."""
    monkeypatch.setattr(engine_loop, "LULL_S", 60.0)
    with AsyncEngine(make_engine(num_kv_blocks=64)) as engine:
        assert engine.submit([1], params(3)).result(10).is_finished


@pytest.mark.parametrize("interval", [-0.1, 1.5, float("nan"), "soon", True])
def test_an_interval_that_makes_no_sense_is_refused(interval: float) -> None:
    """The message names the setting and its bounds, and no model is loaded first."""
    with pytest.raises(InvalidConfig, match=r"stream_interval_s: .* from 0 to 1"):
        AsyncEngine.from_pretrained("no-such-model", stream_interval_s=interval)


async def test_several_answers_of_a_failed_step_all_say_so() -> None:
    """A step that fails ends every answer of a request with its error, not the engine."""
    with AsyncEngine(make_engine(FlakyBackend(raise_on_step=2))) as engine:
        several = SamplingParams(max_tokens=5, n=3, ignore_eos=True, temperature=1.0)
        deltas = [delta async for delta in engine.generate([1], several)]
        assert sorted(delta.index for delta in deltas if delta.finish_reason == "error") == [0, 1, 2]
        assert await complete(engine, [2], 5) == toy_answer([2], 5)


async def leave_by_closing(engine: AsyncEngine, after: int) -> None:
    async with aclosing(engine.generate([1], params(500))) as deltas:
        if after == 0:
            return
        async for _ in deltas:
            after -= 1
            if after == 0:
                return


async def leave_by_cancellation(engine: AsyncEngine, after: int) -> None:
    task = asyncio.create_task(complete(engine, [1], 500))
    await asyncio.sleep(0.002 if after == 0 else 0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_break(engine: AsyncEngine, after: int) -> None:
    async for _ in engine.generate([1], params(500)):
        break
    gc.collect()
    await asyncio.sleep(0)


async def leave_by_exception(engine: AsyncEngine, after: int) -> None:
    async def read() -> None:
        async for _ in engine.generate([1], params(500)):
            raise ValueError("the reader failed")

    with pytest.raises(ValueError, match="reader"):
        await read()
    gc.collect()
    await asyncio.sleep(0)


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("leave", [leave_by_closing, leave_by_cancellation, leave_by_break, leave_by_exception])
async def test_leaving_in_any_way_aborts_and_frees(leave: Callable[..., object], after: int) -> None:
    """Whether closed, cancelled, broken out of or failed, before or after the first token: the blocks come back."""
    with AsyncEngine(make_engine(SlowBackend(), num_kv_blocks=200)) as engine:
        neighbour = asyncio.create_task(complete(engine, [7], 30))
        await leave(engine, after)  # type: ignore[misc]
        assert await neighbour == toy_answer([7], 30)
        await asyncio.to_thread(wait_until, lambda: is_idle(engine))
        assert engine.stats().num_generated_tokens < 500


def test_losing_a_blocking_generator_aborts_its_request() -> None:
    """A plain generator that is dropped half-way frees its request too."""
    with AsyncEngine(make_engine(SlowBackend(), num_kv_blocks=200)) as engine:
        deltas = engine.generate_sync([1], params(500))
        next(deltas)
        del deltas
        gc.collect()
        wait_until(lambda: is_idle(engine))
        assert engine.stats().num_generated_tokens < 500


async def test_a_failed_step_is_told_to_its_readers_and_the_engine_goes_on() -> None:
    """The last delta carries the error; the next request is answered."""
    with AsyncEngine(make_engine(FlakyBackend(raise_on_step=2))) as engine:
        deltas = [delta async for delta in engine.generate([1], params(5))]
        assert deltas[-1].finish_reason == "error"
        assert deltas[-1].error is not None
        assert await complete(engine, [2], 5) == toy_answer([2], 5)


async def test_closing_ends_every_stream_and_refuses_new_ones() -> None:
    """Readers in flight hear EngineClosed, the thread ends, and later calls are refused."""
    engine = AsyncEngine(make_engine(SlowBackend(), num_kv_blocks=200))
    running = [asyncio.create_task(complete(engine, [value], 500)) for value in range(6)]
    await asyncio.sleep(0.03)
    await engine.aclose()
    await engine.aclose()
    results = await asyncio.gather(*running, return_exceptions=True)
    assert [type(result) for result in results] == [EngineClosed] * 6
    assert not engine.is_alive
    with pytest.raises(EngineClosed):
        await complete(engine, [1], 1)
    with pytest.raises(EngineClosed):
        engine.stats()


async def test_what_was_held_back_comes_before_the_end_of_the_engine() -> None:
    """A reader gets every token that was generated before it hears EngineClosed."""
    engine = AsyncEngine(make_engine(SlowBackend(), num_kv_blocks=200), stream_interval_s=1)
    stream = engine.generate([1], params(500))
    tokens = (await anext(stream)).token_ids
    await asyncio.to_thread(wait_until, lambda: engine.stats().num_generated_tokens >= 4)
    await engine.aclose()
    tokens += (await anext(stream)).token_ids
    assert len(tokens) >= 4
    assert list(tokens) == toy_answer([1], 500)[: len(tokens)]
    with pytest.raises(EngineClosed):
        await anext(stream)


def test_a_reader_whose_loop_was_closed_hurts_nobody() -> None:
    """Neither when it has pending output, nor when its request ends with the only output that it did not read."""
    with AsyncEngine(make_engine(SlowBackend(), num_kv_blocks=200)) as engine:
        for max_tokens in (2, 500):
            loop, streams = asyncio.new_event_loop(), []

            async def read(max_tokens: int = max_tokens, streams: list[object] = streams) -> None:
                stream = engine.generate([1], params(max_tokens))
                await anext(stream)
                streams.extend((stream, asyncio.ensure_future(anext(stream))))
                await asyncio.sleep(0)

            loop.run_until_complete(read())
            loop.close()
            wait_until(lambda: engine.stats().num_running == 0)
            streams[1]._log_destroy_pending = False  # type: ignore[attr-defined]  # Why: it is what this is about
        assert engine.stats().num_generated_tokens < 500
        assert engine.submit([2], params(3)).result(10).outputs[0].token_ids == tuple(toy_answer([2], 3))


async def test_a_request_that_was_removed_behind_its_readers_back_hurts_nobody_else() -> None:
    """The remaining output is delivered without it, and the other reader gets its whole completion."""
    backend = PausedBackend()
    # Why: by then the stream has output that is not due yet.
    backend.pause_after(4)
    inner = make_engine(backend, num_kv_blocks=200)
    async with (AsyncEngine(inner, stream_interval_s=1) as engine,
                aclosing(engine.generate([1], params(500))) as stream):
        await anext(stream)
        other = asyncio.ensure_future(complete(engine, [2], 20))
        # Why: the engine takes it in before it is asked for what follows.
        await asyncio.sleep(0)
        removing = asyncio.ensure_future(engine.call(
            lambda inner: [(one.abort(), one.remove()) for one in list(inner.requests)[:1]]))
        await asyncio.sleep(0)
        backend.gate.set()
        assert len(await removing) == 1
        assert await other == toy_answer([2], 20)


async def test_a_request_that_a_call_has_added_has_no_reader() -> None:
    """It is answered like any other, for the code that added it, and the engine's own callers notice nothing."""
    async with AsyncEngine(make_engine()) as engine:
        request = await engine.call(lambda inner: inner.add_request([1], params(3)))
        assert await complete(engine, [2], 8) == toy_answer([2], 8)
        assert await engine.call(lambda _: request.output().outputs[0].token_ids) == tuple(toy_answer([1], 3))


async def test_a_dying_engine_thread_tells_every_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect in the engine itself does not leave anybody waiting."""
    inner = make_engine(SlowBackend(), num_kv_blocks=200)
    monkeypatch.setattr(inner, "step_pending", broken_step)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    engine = AsyncEngine(inner)
    with pytest.raises(EngineClosed) as refused:
        await complete(engine, [1], 5)
    assert isinstance(refused.value.__cause__, ZeroDivisionError)
    await asyncio.to_thread(wait_until, lambda: not engine.is_alive)


def test_losing_the_engine_stops_its_thread() -> None:
    """An engine without references does not keep a thread alive."""
    engine = AsyncEngine(make_engine())
    thread = engine._thread
    del engine
    gc.collect()
    wait_until(lambda: not thread.is_alive())



@pytest.mark.parametrize(("error", "advice"), [
    (ValueError(), "ValueError); it is not asked again"),
    (OSError(errno.EMFILE, "Too many open files"), "OSError); it is asked again later"),
    (MemoryError(), "MemoryError); it is asked again later"),
])
def test_a_store_that_cannot_take_memory_ahead_stops_nobody(
    error: Exception, advice: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, requests are served as before, and a store that lacked what may come back is asked again."""
    monkeypatch.setattr(engine_loop, "IDLE_CHECK_S", 0.01)
    backend, asked = ToyBackend(), list[int]()

    def populate(num_blocks: int) -> bool:
        asked.append(num_blocks)
        raise error

    with AsyncEngine(make_engine(backend, check_invariants=False)) as engine:
        backend.cache_store.populate = populate  # type: ignore[attr-defined]
        wait_until(lambda: bool(asked))
        assert asyncio.run(complete(engine, [1] * 9, 3)) == toy_answer([1] * 9, 3)
        assert asyncio.run(engine.call(Engine.idle)) is False
    assert (len(asked) == 1) is ("not" in advice)
    assert [record.getMessage() for record in caplog.records if "ahead" in record.getMessage()] == [
        f"KV pool: the store cannot take memory ahead ({advice}"
    ]


def test_a_system_without_file_handles_switches_nothing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it cannot be read how much memory is free, none is taken ahead; afterwards it is."""
    backend, asked = ToyBackend(), list[int]()
    engine = make_engine(backend, check_invariants=False)
    backend.cache_store.populate = asked.append  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", raising(OSError(errno.EMFILE, "Too many open files", "/proc/meminfo")))
        assert not engine.idle()
    assert asked == []
    engine.idle()
    assert asked == [0]


def test_an_idle_engine_takes_memory_for_as_many_blocks_as_were_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Piece after piece while no request comes, each for the blocks that hold something and as many again; an engine
    that has done nothing takes nothing, and a store that takes none is left alone.
    """
    monkeypatch.setattr(engine_loop, "IDLE_CHECK_S", 0.01)
    backend, asked = ToyBackend(), list[int]()

    def populate(num_blocks: int) -> bool:
        asked.append(num_blocks)
        return len(asked) % 5 > 0

    with AsyncEngine(make_engine(backend, check_invariants=False)) as engine:
        assert asyncio.run(engine.call(Engine.idle)) is False, "this store has no such verb"
        backend.cache_store.populate = populate  # type: ignore[attr-defined]
        wait_until(lambda: len(asked) >= 2)
        assert set(asked) == {0}
        asyncio.run(complete(engine, [1] * 9, 3))
        num_filled = engine.stats().num_blocks_cached
        del asked[:]
        wait_until(lambda: len(asked) >= 20)
        assert num_filled > 0
        assert set(asked) == {2 * num_filled}
