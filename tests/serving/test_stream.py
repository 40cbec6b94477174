"""The hand-over between the engine thread and a reader."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from dataclasses import replace

import pytest

from pagedcore.errors import RequestTimeout
from pagedcore.outputs import Delta, TokenLogprobs, Usage, WeightsVersion
from pagedcore.serving.stream import Stream, StreamReader, join, wake


def delta(text: str, *token_ids: int, index: int = 0, reason: str | None = None) -> Delta:
    return Delta("r", index, text, token_ids, reason)  # type: ignore[arg-type]


def joined(*deltas: Delta) -> Delta:
    """Join deltas as a stream does."""
    return join(list(deltas))


def test_joining_deltas_concatenates_text_and_tokens() -> None:
    """Unread deltas of one answer become one that says the same; a single one stays what it is."""
    first, last = delta("a", 1), delta("b", 2, reason="stop")
    both = joined(first, last)
    assert (both.text, both.token_ids, both.finish_reason) == ("ab", (1, 2), "stop")
    assert joined(first) is first


def test_joining_keeps_what_only_one_of_them_has() -> None:
    """Log-probabilities are joined, and the usage that comes with the last delta is not lost."""
    scored = TokenLogprobs(1, -0.5)
    first, last = replace(delta("a", 1), logprobs=(scored,)), replace(delta("b", 2), usage=Usage(3, 0, 2))
    assert joined(first, last).logprobs == (scored,)
    assert joined(last, first).logprobs == (scored,)
    assert joined(first, replace(last, logprobs=(scored,))).logprobs == (scored, scored)
    assert joined(first, last).usage == Usage(3, 0, 2)


def test_joining_keeps_which_weights_each_token_was_drawn_with() -> None:
    """Those that the engine was made with are not named before others come; then each token has its own."""
    first, new = delta("ab", 1, 2), WeightsVersion(7, "seven")
    last = replace(delta("c", 3), weights=(new,))
    assert joined(first, first).weights == ()
    assert joined(first, last).weights == (WeightsVersion(0), WeightsVersion(0), new)
    assert joined(last, last).weights == (new, new)


def test_unread_deltas_do_not_accumulate() -> None:
    """However much is put, a reader that has not read gets one delta per answer."""
    stream = Stream()
    for token in range(1000):
        stream.put([delta("x", token)])
        assert len(stream._unread) == 1
    (only,) = stream.take_or_register(threading.Event()) or []
    assert only.text == "x" * 1000
    assert only.token_ids == tuple(range(1000))


def test_answers_of_one_request_are_kept_apart() -> None:
    """Deltas of different answers are not merged with each other."""
    stream = Stream()
    stream.put([delta("a", 1, index=0), delta("b", 2, index=1)])
    stream.put([delta("c", 3, index=0)])
    assert [(d.index, d.text) for d in stream.take_or_register(threading.Event()) or []] == [(0, "ac"), (1, "b")]


def test_a_sleeping_thread_is_woken_by_the_next_delta() -> None:
    """A reader without an event loop sleeps until something is put."""
    stream = Stream()
    threading.Timer(0.05, lambda: wake([stream.put([delta("late", 1)]), stream.end()])).start()
    assert [d.text for d in StreamReader(stream, lambda: None)] == ["late"]


def test_an_error_comes_after_the_last_delta() -> None:
    """What was generated before a failure is delivered, then the failure is raised."""
    stream = Stream()
    stream.put([delta("first", 1)])
    stream.end(RuntimeError("broken"), [delta("last", 2)])
    reader = iter(StreamReader(stream, lambda: None))
    assert next(reader).text == "firstlast"
    with pytest.raises(RuntimeError, match="broken"):
        next(reader)


def test_only_the_first_end_counts() -> None:
    """A stream that has ended well does not fail afterwards."""
    stream = Stream()
    stream.end()
    stream.end(RuntimeError("too late"))
    assert stream.take_or_register(threading.Event()) == []


async def test_a_reader_on_a_loop_is_handed_back_to_be_woken() -> None:
    """``put`` and ``end`` return the sleeping reader, and waking it on its loop delivers the delta."""
    stream = Stream()
    reader = StreamReader(stream, lambda: None)
    received: list[str] = []

    async def read() -> None:
        while items := await reader.next():
            received.extend(item.text for item in items)

    task = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    wake([stream.put([delta("a", 1)]), None])
    assert stream.put([delta("b", 2)]) is None
    await asyncio.sleep(0.01)
    waiter = stream.end()
    assert waiter is not None
    wake([waiter])
    await task
    assert received == ["ab"]


def test_waking_a_closed_loop_or_a_cancelled_reader_is_harmless() -> None:
    """The engine thread survives readers whose loop is gone, reports them, and wakes the others."""
    gone, here = asyncio.new_event_loop(), asyncio.new_event_loop()
    lost, cancelled, awake = gone.create_future(), here.create_future(), threading.Event()
    gone.close()
    cancelled.cancel()
    assert wake([lost, cancelled, awake]) == [lost]
    here.run_until_complete(asyncio.sleep(0))
    here.close()
    assert awake.is_set()


def test_time_is_up_also_with_something_unread() -> None:
    """A reader that comes too late gets the error, not what has been waiting for it."""
    stream = Stream()
    reader = StreamReader(stream, lambda: None, timeout_s=1e-3)
    stream.put([delta("late")])
    time.sleep(2e-3)
    with pytest.raises(RequestTimeout):
        next(iter(reader))


def test_a_lost_reader_aborts_its_request() -> None:
    """Losing the last reference to a reader is as good as closing it, and happens once."""
    calls: list[int] = []
    reader = StreamReader(Stream(), lambda: calls.append(1))
    reader.close()
    reader.close()
    del reader
    lost = StreamReader(Stream(), lambda: calls.append(2))
    del lost
    gc.collect()
    assert calls == [1, 2]
