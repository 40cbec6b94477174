"""The hand-over between the engine thread and a reader."""

from __future__ import annotations

import asyncio
import gc
import threading
from dataclasses import replace

import pytest

from doubles import FakeClock
from pagedcore.outputs import Delta, TokenLogprobs, Usage
from pagedcore.stream import Pacer, Stream, StreamReader, merge, wake


def delta(text: str, *token_ids: int, index: int = 0, reason: str | None = None) -> Delta:
    return Delta("r", index, text, token_ids, reason)  # type: ignore[arg-type]


def test_merging_deltas_concatenates_text_and_tokens() -> None:
    """Two unread deltas of one answer become one that says the same."""
    merged = merge([delta("a", 1), delta("b", 2, reason="stop")])
    assert (merged.text, merged.token_ids, merged.finish_reason) == ("ab", (1, 2), "stop")


def test_merging_keeps_what_only_one_of_them_has() -> None:
    """Log-probabilities are joined, and the usage that comes with the last delta is not lost."""
    scored = TokenLogprobs(1, -0.5)
    first, last = replace(delta("a", 1), logprobs=(scored,)), replace(delta("b", 2), usage=Usage(3, 0, 2))
    assert merge([first, last]).logprobs == (scored,)
    assert merge([first, replace(last, logprobs=(scored,))]).logprobs == (scored, scored)
    assert merge([first, last]).usage == Usage(3, 0, 2)


def test_unread_deltas_do_not_accumulate() -> None:
    """However much is put, a reader that does not read costs one delta per answer."""
    stream = Stream()
    for token in range(1000):
        stream.put(delta("x", token))
    (only,) = stream.take_or_register(threading.Event()) or []
    assert only.text == "x" * 1000
    assert only.token_ids == tuple(range(1000))


def test_answers_of_one_request_are_kept_apart() -> None:
    """Deltas of different answers are not merged with each other."""
    stream = Stream()
    stream.put(delta("a", 1, index=0))
    stream.put(delta("b", 2, index=1))
    stream.put(delta("c", 3, index=0))
    assert [(d.index, d.text) for d in stream.take_or_register(threading.Event()) or []] == [(0, "ac"), (1, "b")]


def test_a_sleeping_thread_is_woken_by_the_next_delta() -> None:
    """A reader without an event loop sleeps until something is put."""
    stream = Stream()
    threading.Timer(0.05, lambda: (stream.put(delta("late", 1)), wake([stream.end()]))).start()
    assert [d.text for d in StreamReader(stream, lambda: None)] == ["late"]


def test_an_error_comes_after_the_last_delta() -> None:
    """What was generated before a failure is delivered, then the failure is raised."""
    stream = Stream()
    stream.put(delta("first", 1))
    stream.end(RuntimeError("broken"))
    reader = iter(StreamReader(stream, lambda: None))
    assert next(reader).text == "first"
    with pytest.raises(RuntimeError, match="broken"):
        next(reader)


def test_only_the_first_end_counts() -> None:
    """A stream that has ended well does not fail afterwards."""
    stream = Stream()
    stream.end()
    stream.end(RuntimeError("too late"))
    assert stream.take_or_register(threading.Event()) == []


async def test_a_reader_on_a_loop_is_handed_back_to_be_woken() -> None:
    """``rouse`` returns the sleeping reader once, and waking it on its loop delivers the delta."""
    stream = Stream()
    reader = StreamReader(stream, lambda: None)
    received: list[str] = []

    async def read() -> None:
        while items := await reader.next():
            received.extend(item.text for item in items)

    task = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    stream.put(delta("a", 1))
    wake([stream.rouse(), None])
    await asyncio.sleep(0.01)
    waiter = stream.end()
    assert waiter is not None
    assert stream.rouse() is None
    wake([waiter])
    await task
    assert received == ["a"]


def test_waking_a_closed_loop_or_a_cancelled_reader_is_harmless() -> None:
    """The engine thread survives readers whose loop is gone, is told of them, and wakes the others."""
    gone, here = asyncio.new_event_loop(), asyncio.new_event_loop()
    lost, cancelled, awake = gone.create_future(), here.create_future(), threading.Event()
    gone.close()
    cancelled.cancel()
    assert wake([lost, cancelled, awake]) == [lost]
    here.run_until_complete(asyncio.sleep(0))
    here.close()
    assert awake.is_set()


def test_a_lost_reader_abandons_its_request() -> None:
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


def test_a_reader_is_told_at_once_and_then_at_intervals() -> None:
    """The first delta is due immediately, a later one when the interval is over, even if nothing more was put."""
    clock = FakeClock()
    stream, other = Stream(), Stream()
    pacer = Pacer(1.0, clock)
    assert pacer.due([stream, other]) == [stream, other]
    clock.advance(0.5)
    assert pacer.due([stream]) == []
    clock.advance(0.5)
    assert pacer.due([]) == [stream]
    assert pacer.due([stream]) == []
    pacer.forget(stream)
    clock.advance(5.0)
    assert pacer.due([]) == []


def test_readers_are_told_together_except_of_their_first_delta() -> None:
    """Streams that began at different times share their later times, so that their loop wakes once for all of them."""
    clock = FakeClock()
    early, late = Stream(), Stream()
    pacer = Pacer(1.0, clock)
    assert pacer.due([early]) == [early]
    clock.advance(0.75)
    assert pacer.due([late, early]) == [late]
    clock.advance(0.25)
    assert pacer.due([late]) == [early, late]


def test_only_what_finds_nothing_unread_is_news() -> None:
    """A reader that has not read yet need not be told again, whichever answer a delta belongs to."""
    stream = Stream()
    puts = [delta("a", 1), delta("b", 2), delta("c", 3, index=1)]
    assert [stream.put(one) for one in puts] == [True, False, False]
    stream.take()
    assert stream.put(delta("d", 4))


def test_without_an_interval_every_delta_is_due() -> None:
    """An interval of nought holds nothing back."""
    stream, pacer = Stream(), Pacer(0.0, FakeClock())
    assert [pacer.due([stream]) for _ in range(3)] == [[stream]] * 3


def test_a_reader_that_took_what_was_held_back_is_not_woken_for_nothing() -> None:
    """A reader woken with nothing unread would take it for the end of the answer, and lose the rest."""
    clock, stream, waiter = FakeClock(), Stream(), threading.Event()
    pacer = Pacer(1.0, clock)
    stream.put(delta("told at once", 1))
    assert pacer.due([stream]) == [stream]
    stream.put(delta("held back", 2))
    assert pacer.due([stream]) == []
    assert [d.text for d in stream.take()] == ["told at onceheld back"]
    assert stream.take_or_register(waiter) is None
    clock.advance(2.0)
    assert [due.rouse() for due in pacer.due([])] == [None]
    stream.put(delta("more", 3))
    assert stream.rouse() is waiter
