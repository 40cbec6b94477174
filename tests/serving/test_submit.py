"""Whole answers as futures, waiting for room, and time limits of streams."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future

import pytest

from pagedcore.errors import EngineClosed, EngineOverloaded, InvalidRequest, PromptEmpty, RequestTimeout
from pagedcore.outputs import RequestOutput
from pagedcore.sampling_params import SamplingParams
from pagedcore.serving.async_engine import AsyncEngine
from pagedcore.serving.stream import CompletionFuture
from support.async_helpers import SlowBackend, is_told_to_end, wait_until
from support.doubles import FlakyBackend, GatedBackend, toy_answer
from support.engine_builders import make_engine


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    """An engine with two places, and room for one request that waits."""
    with AsyncEngine(make_engine(max_num_seqs=2, max_num_waiting=1)) as engine:
        yield engine


def tokens(future: Future[RequestOutput]) -> list[int]:
    return list(future.result(30).outputs[0].token_ids)


def in_flight(engine: AsyncEngine) -> tuple[int, int, int]:
    stats = engine.stats()
    return stats.num_running, stats.num_waiting, stats.num_blocks_used


def test_more_requests_than_the_queue_holds_wait_for_room(engine: AsyncEngine) -> None:
    """Sixty futures over a queue of one: each has its own answer, and every block is back."""
    futures = [engine.submit([value % 20], params(1 + value % 7), wait_for_room=True) for value in range(60)]
    assert [tokens(future) for future in futures] == [toy_answer([v % 20], 1 + v % 7) for v in range(60)]
    assert in_flight(engine) == (0, 0, 0)


async def test_streams_wait_for_room_too(engine: AsyncEngine) -> None:
    """A stream that may wait is not refused, whatever the queue holds."""

    async def answer(value: int) -> list[int]:
        deltas = engine.generate([value], params(4), wait_for_room=True)
        return [token async for delta in deltas for token in delta.token_ids]

    assert await asyncio.gather(*map(answer, range(20))) == [toy_answer([value], 4) for value in range(20)]


def test_who_does_not_wait_is_refused_at_once() -> None:
    """Without ``wait_for_room`` a full queue is EngineOverloaded, raised by the call; what was taken is answered."""
    backend = GatedBackend()
    with AsyncEngine(make_engine(backend, max_num_seqs=1, max_num_waiting=1)) as engine:
        taken = [engine.submit([0], params(2))]
        assert backend.is_entered.wait(30)
        taken.append(engine.submit([1], params(2)))
        try:
            with pytest.raises(EngineOverloaded):
                engine.submit([2], params(2))
        finally:
            backend.gate.set()
        assert [tokens(future) for future in taken] == [toy_answer([0], 2), toy_answer([1], 2)]
        assert tokens(engine.submit([2], params(2))) == toy_answer([2], 2)


def test_a_refused_request_raises_at_once(engine: AsyncEngine) -> None:
    """What the door refuses is raised by the call itself; no future is made."""
    with pytest.raises(PromptEmpty):
        engine.submit([])


def test_a_future_is_awaitable_on_any_loop(engine: AsyncEngine) -> None:
    """Two event loops one after the other await futures of the same engine."""

    async def answer(value: int) -> list[int]:
        output = await asyncio.wrap_future(engine.submit([value], params(5)))
        return list(output.outputs[0].token_ids)

    assert [asyncio.run(answer(value)) for value in (1, 2)] == [toy_answer([1], 5), toy_answer([2], 5)]


def test_cancelling_aborts_running_waiting_and_held_requests() -> None:
    """One running, one in the queue, two held back: cancelled, all of them are gone between two steps."""
    backend = GatedBackend()
    with AsyncEngine(make_engine(backend, max_num_seqs=1, max_num_waiting=1, num_kv_blocks=64)) as engine:
        futures = [engine.submit([value], params(50), wait_for_room=True) for value in range(4)]
        assert backend.is_entered.wait(30)
        assert all(future.cancel() for future in futures)
        backend.gate.set()
        assert in_flight(engine) == (0, 0, 0)
        with pytest.raises(CancelledError):
            futures[0].result()
        assert tokens(engine.submit([9], params(3))) == toy_answer([9], 3)


def test_a_failed_answer_is_an_output_with_its_error() -> None:
    """A step that fails does not break the future: the output says "error" and why."""
    with AsyncEngine(make_engine(FlakyBackend(raise_on_step=2))) as engine:
        answer = engine.submit([1], params(5)).result(60).outputs[0]
        assert answer.finish_reason == "error"
        assert answer.error is not None


def test_closing_settles_every_future() -> None:
    """Running and held requests get EngineClosed, and so do later ones."""
    backend = GatedBackend()
    engine = AsyncEngine(make_engine(backend, max_num_seqs=1, max_num_waiting=1))
    futures = [engine.submit([value], params(15), wait_for_room=True) for value in range(5)]
    assert backend.is_entered.wait(60)
    closing = threading.Thread(target=engine.close)
    closing.start()
    wait_until(lambda: is_told_to_end(engine))
    backend.gate.set()
    closing.join()
    results = [future.exception(30) for future in futures]
    assert {type(error) for error in results} <= {EngineClosed, type(None)}
    assert type(results[-1]) is EngineClosed
    with pytest.raises(EngineClosed):
        engine.submit([1])


def test_a_future_is_settled_once() -> None:
    """An error that comes after the output, or after a cancellation, changes nothing."""
    output = RequestOutput("r", (), [], True, 0, None)  # type: ignore[arg-type]
    answer, cancelled = CompletionFuture(), CompletionFuture()
    answer.complete(output)
    answer.end(RuntimeError("late"))
    assert answer.future.result() is output
    cancelled.future.cancel()
    cancelled.complete(output)
    cancelled.end(RuntimeError("late"))
    assert cancelled.future.cancelled()


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_stream_that_takes_too_long_is_aborted(way: str) -> None:
    """RequestTimeout is raised, names the limit, and the request is gone after the step in flight."""
    backend = GatedBackend()
    with AsyncEngine(make_engine(backend)) as engine:
        with pytest.raises(RequestTimeout, match=r"0\.05 seconds"):
            READ_ALL[way](engine)
        backend.gate.set()
        assert in_flight(engine) == (0, 0, 0)


async def read_all(engine: AsyncEngine) -> None:
    async for _ in engine.generate([1], params(5), timeout_s=0.05):
        pass


READ_ALL = {
    "sync": lambda engine: list(engine.generate_sync([1], params(5), timeout_s=0.05)),
    "async": lambda engine: asyncio.run(read_all(engine)),
}


def test_a_slow_reader_times_out_too() -> None:
    """Time is up even if something unread is always there."""
    with AsyncEngine(make_engine(SlowBackend(), num_kv_blocks=1100)) as engine:
        # Why so many: the end has to be later than the latest reader.
        deltas = engine.generate_sync([1], params(4000), timeout_s=0.1)
        with pytest.raises(RequestTimeout):
            _ = [time.sleep(0.03) for _ in deltas]


def test_a_generous_time_limit_changes_nothing(engine: AsyncEngine) -> None:
    """An answer in time is the answer without a limit."""
    answer = [t for delta in engine.generate_sync([3], params(9), timeout_s=60) for t in delta.token_ids]
    assert answer == toy_answer([3], 9)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), True, "1", 2_592_001, 1e10, 1e300, 10**400])
def test_a_time_limit_is_a_positive_number(engine: AsyncEngine, timeout_s: object) -> None:
    """Anything else is refused at the door."""
    with pytest.raises(InvalidRequest, match="timeout_s"):
        next(engine.generate_sync([1], timeout_s=timeout_s))  # type: ignore[arg-type]
