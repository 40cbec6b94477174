"""Conversations from event loops: the engine's thread answers, other threads read and write the files."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import pytest

from pagedcore.analysis.diagnosis.invariants import check, snapshot
from pagedcore.engine.engine import Engine
from pagedcore.errors import EngineClosed, InvalidRequest, InvalidSessionFile, PromptEmpty, SessionStateError
from pagedcore.sampling_params import SamplingParams
from pagedcore.serving import async_engine
from pagedcore.serving.async_engine import AsyncEngine
from pagedcore.serving.async_session import AsyncSession
from pagedcore.sessions import kv_file
from pagedcore.sessions.parking import ParkedFile
from support.async_helpers import PausedBackend, SlowBackend, wait_until
from support.doubles import FakeClock, ToyBackend, toy_answer
from support.engine_builders import make_engine

PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)


def make(backend: ToyBackend | None = None, **settings: Any) -> AsyncEngine:
    """A small engine on its own thread."""
    defaults: dict[str, Any] = {
        "num_kv_blocks": 16, "host_kv_memory": 24 * 4 * ToyBackend.kv_bytes_per_token,
        # Why: by the clock computing costs a toy model nothing, so that "auto" would copy nothing.
        "preemption": "swap",
    }
    return AsyncEngine(make_engine(backend, **{**defaults, **settings}))


async def ask(session: AsyncSession, *prompt: int) -> int:
    """Give a turn, compare the answer with the oracle, and return what was found in a cache."""
    output = await session.ask(list(prompt), PARAMS)
    known = output.prompt_token_ids
    assert known[len(known) - len(prompt) :] == prompt
    assert list(output.outputs[0].token_ids) == toy_answer(known, 5)
    assert session.token_ids == known + output.outputs[0].token_ids
    return output.num_cached_tokens


async def flood(engine: AsyncEngine) -> None:
    """Use every block that can be had for something else."""
    for start in range(10):
        prompt = [(start * i * i + i // 3 + start) % 30 for i in range(60)]
        async for _ in engine.generate(prompt, SamplingParams(max_tokens=1)):
            pass


async def test_a_conversation_in_turns() -> None:
    """Turns are answered right, streamed or whole, and reuse what was computed."""
    async with make() as engine, engine.session(PARAMS) as session:
        assert await ask(session, 1, 2, 3) == 0
        assert await ask(session, 4) == 7
        known = [*session.token_ids, 6]
        tokens = [token async for delta in session.stream([6]) for token in delta.token_ids]
        assert tokens == toy_answer(known, 5)
        assert list(session.token_ids) == known + tokens
        assert engine.stats().num_blocks_used == 0


async def test_many_conversations_at_once() -> None:
    """Sixteen sessions advance together on a pool for a few, parked here and there; every answer is right."""
    async with make() as engine:

        async def converse(number: int) -> None:
            async with engine.session(PARAMS) as session:
                for turn in range(4):
                    await ask(session, number, turn)
                    if (number + turn) % 3 == 0:
                        await session.park("host" if number % 2 else "disk")
                    if (number + turn) % 5 == 0:
                        await session.resume()

        await asyncio.gather(*(converse(number) for number in range(16)))
        await flood(engine)
        stats = engine.stats()
        assert (stats.num_blocks_used, stats.num_host_blocks_used, stats.num_running) == (0, 0, 0)
        assert await engine.call(lambda engine: len(engine.sessions)) == 0


async def test_parked_resumed_forked_and_exported(tmp_path: Path) -> None:
    """Every way a session can be kept works from a loop as it does without one."""
    async with make() as engine:
        session = engine.session(PARAMS)
        await ask(session, 1, 2, 3)
        for tier in ("host", "disk"):
            state = await session.park(tier)  # type: ignore[arg-type]
            num_tokens = len(session.token_ids) - 1
            assert (state.tier, state.num_tokens_kept) == (tier, num_tokens)
            await flood(engine)
            assert await session.resume() == num_tokens
            assert await ask(session, 4) == num_tokens
        await session.park("disk")
        await flood(engine)
        await session.export(tmp_path / "chat.json")
        fork = await session.fork()
        num_tokens = len(session.token_ids) - 1
        assert await ask(session, 9) == num_tokens
        assert await ask(fork, 9) >= num_tokens
    async with make() as engine:
        imported = await engine.import_session(tmp_path / "chat.json")
        assert await ask(imported, 9) == num_tokens
        (tmp_path / "chat.json").write_text("{}")
        with pytest.raises(InvalidSessionFile):
            await engine.import_session(tmp_path / "chat.json")


async def test_from_disk_to_the_host() -> None:
    """Parked on the host after the disk, a session is read from its file first, on another thread."""
    async with make() as engine:
        session = engine.session(PARAMS)
        await ask(session, 1, 2, 3)
        num_tokens = len(session.token_ids) - 1
        assert (await session.park("disk")).tier == "disk"
        await flood(engine)
        state = await session.park("host")
        assert (state.tier, state.num_tokens_kept) == ("host", num_tokens)
        await flood(engine)
        assert await ask(session, 4) == num_tokens


async def test_leaving_early_aborts_the_turn_only() -> None:
    """A stream that is left and an ask that is cancelled end their turn; the session continues from there."""
    backend, long = PausedBackend(), SamplingParams(max_tokens=30, ignore_eos=True)
    async with make(backend) as engine, engine.session(PARAMS) as session:
        backend.pause_after(4)
        async with aclosing(session.stream([1, 2, 3], long)) as stream:
            async for _ in stream:
                break
        backend.gate.set()
        await ask(session, 4)
        num_known = len(session.token_ids)
        backend.pause_after(4)
        task = asyncio.create_task(session.ask([5], long))
        while len(session.token_ids) < num_known + 4:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        backend.gate.set()
        await ask(session, 6)
        assert len(session.token_ids) < num_known + 30
        assert engine.stats().num_blocks_used == 0


async def test_no_file_is_touched_on_the_loop_or_the_engine_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading and writing KV happens on other threads, so that neither steps nor loops wait for a disk."""
    threads: list[str] = []

    def watched(method: Callable[[ParkedFile], Any]) -> Callable[[ParkedFile], Any]:
        def call(file: ParkedFile) -> Any:
            threads.append(threading.current_thread().name)
            return method(file)

        return call

    monkeypatch.setattr(ParkedFile, "write", watched(ParkedFile.write))
    monkeypatch.setattr(ParkedFile, "read", watched(ParkedFile.read))
    async with make() as engine, engine.session(PARAMS) as session:
        await ask(session, 1, 2, 3)
        await session.park("disk")
        await session.resume()
        await session.park("disk")
        await ask(session, 4)
    assert len(threads) == 4
    assert not {"pagedcore-engine", threading.current_thread().name} & set(threads)


async def test_cancelled_and_closed_while_a_file_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A caller that is cancelled while a file is written is parked in it nevertheless; a closed session keeps none."""
    are_writing, may_write = threading.Barrier(3), threading.Event()
    real = kv_file.write_kv

    def slow(*arguments: Any) -> None:
        are_writing.wait(60)
        may_write.wait(60)
        real(*arguments)

    monkeypatch.setattr("pagedcore.sessions.parking.write_kv", slow)
    async with make(disk_kv_dir=str(tmp_path)) as engine:
        cancelled, closed = engine.session(PARAMS), engine.session(PARAMS)
        await ask(cancelled, 1, 2, 3)
        await ask(closed, 3, 2, 1)
        tasks = [asyncio.create_task(one.park("disk")) for one in (cancelled, closed)]
        await asyncio.to_thread(are_writing.wait, 60)
        tasks[0].cancel()
        closing = asyncio.create_task(closed.aclose())
        # Why: the engine closes the session before it takes the next turn.
        await asyncio.sleep(0)
        assert await ask(engine.session(PARAMS), 7) == 0
        may_write.set()
        await asyncio.gather(*tasks, closing, return_exceptions=True)
        async with asyncio.timeout(30):
            while not await engine.call(lambda engine: any(session.parked for session in engine.sessions)):
                await asyncio.sleep(0.01)
            while len(list(tmp_path.glob("*/*"))) != 1:
                await asyncio.sleep(0.01)
        assert await ask(cancelled, 4) == 7
    assert list(tmp_path.iterdir()) == []


async def test_nobody_is_told_of_errors_of_cancelled_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Parking goes on when its caller is cancelled, fails when the session is closed, and the loop reports nothing."""
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    is_writing, may_write, has_written = threading.Event(), threading.Event(), threading.Event()
    real = kv_file.write_kv

    def slow(*arguments: Any) -> None:
        is_writing.set()
        may_write.wait(30)
        real(*arguments)
        has_written.set()

    monkeypatch.setattr("pagedcore.sessions.parking.write_kv", slow)
    async with make(disk_kv_dir=str(tmp_path)) as engine:
        session = engine.session(PARAMS)
        await ask(session, 1, 2, 3)
        parking = asyncio.create_task(session.park("disk"))
        await asyncio.to_thread(is_writing.wait, 30)
        parking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await parking
        await session.aclose()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        may_write.set()
        results = await asyncio.gather(*(asyncio.wait([other]) for other in others))
        assert has_written.is_set()
        assert len(results) == 1
        del others, results, parking
        gc.collect()
        await asyncio.sleep(0)
    assert told == []


def test_a_loop_ends_while_a_file_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The end of a loop cancels what it runs, but not the thread that writes: no file stays that no session has."""
    is_writing, may_write = threading.Event(), threading.Event()
    real = kv_file.write_kv

    def slow(*arguments: Any) -> None:
        is_writing.set()
        may_write.wait(30)
        real(*arguments)

    async def main(session: AsyncSession) -> None:
        await ask(session, 1, 2, 3)
        parking = asyncio.create_task(session.park("disk"))
        while not is_writing.is_set():
            await asyncio.sleep(0.01)
        assert not parking.done()
        # Why: a loop that ends waits for its threads.
        threading.Timer(0.2, may_write.set).start()

    monkeypatch.setattr("pagedcore.sessions.parking.write_kv", slow)
    with make(disk_kv_dir=str(tmp_path)) as engine:
        session = engine.session(PARAMS)
        asyncio.run(main(session))
        wait_until(lambda: not list(tmp_path.glob("*/*")))
        asyncio.run(ask(session, 4))


class Interrupted:
    """Interrupts one task at its ``at``-th await: before what it waits for has begun, or when its result is lost."""

    def __init__(self, engine: AsyncEngine, at: int, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._engine, self._at, self._when = engine, at, when
        self.num_awaits = 0
        for owner, name in ((engine, "call"), (asyncio, "to_thread")):
            monkeypatch.setattr(owner, name, self._around(getattr(owner, name)))

    def _around(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        async def interrupted(function: Callable[..., Any], *arguments: Any) -> Any:
            # Why: what tidies up after the interruption is not interrupted itself.
            is_here, self.num_awaits = self.num_awaits == self._at, self.num_awaits + 1
            if is_here and self._when == "closed":
                await asyncio.get_running_loop().run_in_executor(None, self._engine.close)
            if is_here and self._when == "before":
                raise asyncio.CancelledError
            result = await wait(function, *arguments)
            if is_here and self._when == "after":
                raise asyncio.CancelledError
            return result

        return interrupted


OPERATIONS: dict[str, tuple[Callable[[AsyncSession, Path], Any], int, int]] = {
    "park on the host": (lambda session, path: session.park("host"), 1, 3),
    "park on disk": (lambda session, path: session.park("disk"), 3, 1),
    "resume": (lambda session, path: session.resume(), 1, 3),
    "ask": (lambda session, path: session.ask([4], PARAMS), 2, 3),
    "export": (lambda session, path: session.export(path / "chat.json"), 3, 5),
}
"""How often each waits for the engine or a thread: of a session that is not parked, and of one that is on disk."""


async def interrupt(
    name: str, at: int, when: str, is_parked: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Interrupt an operation, continue its session, and return whether the operation has so many awaits."""
    (path / "kv").mkdir(parents=True)
    async with make(disk_kv_dir=str(path / "kv")) as engine:
        session = engine.session(PARAMS)
        await ask(session, 1, 2, 3)
        if is_parked:
            await session.park("disk")
        with monkeypatch.context() as patch:
            interrupted = Interrupted(engine, at, when, patch)
            with suppress(asyncio.CancelledError, EngineClosed):
                await OPERATIONS[name][0](session, path)
        if engine.is_alive:
            await asyncio.to_thread(wait_until, lambda: engine.stats().num_running == 0)
            parked, num_files, broken = await engine.call(lambda engine: (
                next(iter(engine.sessions)).parked, len(engine.sessions.parking.directory.files),
                check(snapshot(engine.scheduler)),
            ))
            assert broken == []
            assert num_files == len(list((path / "kv").glob("*/*")))
            assert num_files == int(parked is not None and parked.tier == "disk")
            await ask(session, 9)
            await session.aclose()
            stats = engine.stats()
            assert (stats.num_blocks_used, stats.num_host_blocks_used) == (0, 0)
    assert list((path / "kv").iterdir()) == []
    assert not list(path.glob(".*"))
    return interrupted.num_awaits > at


@pytest.mark.parametrize("is_parked", [False, True])
@pytest.mark.parametrize("when", ["before", "after", "closed"])
@pytest.mark.parametrize("name", OPERATIONS)
async def test_interrupted_at_any_await(
    name: str, when: str, is_parked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled at any await, before the engine or a thread has begun or when its result is lost, and with the engine
    closed there: no file is left that belongs to no session, no block is lost, and the session continues correctly."""
    at = 0
    while await interrupt(name, at, when, is_parked, tmp_path / str(at), monkeypatch):
        at += 1
    assert at == OPERATIONS[name][1 + is_parked]


async def test_going_on_with_a_cut_off_answer_tells_what_is_new() -> None:
    """What was delivered before the cut is not delivered again."""
    backend, params = PausedBackend(), SamplingParams(max_tokens=30, ignore_eos=True)
    async with make(backend) as engine, engine.session(params) as session:
        # Why: without the pause a fast engine completes the answer before this task has left the stream.
        backend.pause_after(4)
        async with aclosing(session.stream([1, 2, 3])) as deltas:
            await anext(deltas)
        backend.gate.set()
        await asyncio.to_thread(wait_until, lambda: engine.stats().num_running == 0)
        cut = session.token_ids
        delivered = [token async for delta in session.stream(None) for token in delta.token_ids]
        assert 3 < len(cut) < 33
        assert cut + tuple(delivered) == session.token_ids
        assert session.token_ids == (1, 2, 3, *toy_answer([1, 2, 3], 30))


async def test_who_reads_a_session_that_somebody_closes_gets_what_there_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that was generated until then, also what was not due yet."""
    # Why: by it nothing is due before the end but the first token.
    monkeypatch.setattr(async_engine, "MonotonicClock", FakeClock)
    async with AsyncEngine(make_engine(SlowBackend(), num_kv_blocks=200), stream_interval_s=1) as engine:
        session = engine.session(SamplingParams(max_tokens=500, ignore_eos=True))
        delivered: list[int] = []

        async def read() -> None:
            async for delta in session.stream([1]):
                delivered.extend(delta.token_ids)

        reading = asyncio.create_task(read())
        await asyncio.to_thread(wait_until, lambda: engine.stats().num_generated_tokens >= 5)
        assert len(delivered) < 5
        await session.aclose()
        await reading
        assert len(delivered) >= 5
        assert delivered == toy_answer([1], 500)[: len(delivered)]


async def test_what_is_refused_is_raised_where_it_was_asked() -> None:
    """Errors arrive at the caller, and neither the engine nor other sessions notice."""
    backend = PausedBackend()
    async with make(backend) as engine:
        session = engine.session(PARAMS)
        with pytest.raises(PromptEmpty):
            await session.ask([])
        with pytest.raises(SessionStateError):
            await session.ask(None)
        with pytest.raises(InvalidRequest):
            await session.park(ttl_s=-1)
        with pytest.raises(InvalidRequest):
            await engine.session(SamplingParams(n=2)).open()
        backend.pause_after(4)
        turn = asyncio.create_task(session.ask([1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True)))
        while not session.token_ids:
            await asyncio.sleep(0)
        second = asyncio.create_task(session.ask([4]))
        # Why: its command is in the queue when the step under way ends.
        await asyncio.sleep(0)
        backend.gate.set()
        with pytest.raises(SessionStateError, match="answering"):
            await second
        assert len((await turn).outputs[0].token_ids) == 40
        await session.aclose()
        await session.aclose()
        with pytest.raises(SessionStateError):
            await session.ask([1])


async def test_closing_ends_a_stream() -> None:
    """A session that is closed while it answers ends its stream; an engine that is closed ends it with an error."""
    engine = make()
    session, other = engine.session(PARAMS), engine.session(PARAMS)
    long = SamplingParams(max_tokens=55, ignore_eos=True)
    tasks = [asyncio.create_task(_drain(one, long)) for one in (session, other)]
    while not (session.token_ids and other.token_ids):
        await asyncio.sleep(0)
    await session.aclose()
    await engine.aclose()
    assert await tasks[0] in ("ended", "closed")
    assert await tasks[1] in ("ended", "closed")
    await other.aclose()
    with pytest.raises((EngineClosed, SessionStateError)):
        await other.ask([1])


async def _drain(session: AsyncSession, params: SamplingParams) -> str:
    try:
        async for _ in session.stream([1, 2, 3], params):
            pass
    except (EngineClosed, SessionStateError):
        return "closed"
    return "ended"


async def test_a_session_keeps_its_engine_alive() -> None:
    """A caller that holds only the session can continue it."""
    session = make().session(PARAMS)
    gc.collect()
    assert await ask(session, 1, 2, 3) == 0


def test_the_engine_can_be_taken_over_with_open_sessions() -> None:
    """What was exported from a plain engine is asked on a thread's one, in a loop of its own."""
    engine: Engine = make_engine()
    with engine.session(PARAMS) as session:
        session.ask([1, 2, 3])

    async def main() -> None:
        async with AsyncEngine(engine) as taken, taken.session(PARAMS) as session:
            await ask(session, 1, 2, 3)

    asyncio.run(main())
