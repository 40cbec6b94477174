"""The hand-over between the engine thread and a reader."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from pagedcore.outputs import Delta
from pagedcore.stream import Stream, StreamReader, merge


def delta(text: str, *token_ids: int, index: int = 0, reason: str | None = None) -> Delta:
    return Delta("r", index, text, token_ids, reason)  # type: ignore[arg-type]


def test_merging_deltas_concatenates_text_and_tokens() -> None:
    """Two unread deltas of one answer become one that says the same."""
    merged = merge(delta("a", 1), delta("b", 2, reason="stop"))
    assert (merged.text, merged.token_ids, merged.finish_reason) == ("ab", (1, 2), "stop")


def test_unread_deltas_do_not_accumulate() -> None:
    """However much is put, a reader that does not read costs one delta per answer."""
    stream = Stream()
    for token in range(1000):
        stream.put(delta("x", token))
    (only,) = stream.take_or_wait()
    assert only.text == "x" * 1000
    assert only.token_ids == tuple(range(1000))


def test_answers_of_one_request_are_kept_apart() -> None:
    """Deltas of different answers are not merged with each other."""
    stream = Stream()
    stream.put(delta("a", 1, index=0))
    stream.put(delta("b", 2, index=1))
    stream.put(delta("c", 3, index=0))
    assert [(d.index, d.text) for d in stream.take_or_wait()] == [(0, "ac"), (1, "b")]


def test_a_sleeping_thread_is_woken_by_the_next_delta() -> None:
    """A reader without an event loop sleeps until something is put."""
    stream = Stream()
    threading.Timer(0.05, lambda: (stream.put(delta("late", 1)), stream.end())).start()
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
    assert stream.take_or_wait() == []


async def test_a_reader_on_a_loop_is_handed_back_to_be_woken() -> None:
    """``put`` returns the sleeping reader, and waking it on its loop delivers the delta."""
    stream = Stream()
    reader = StreamReader(stream, lambda: None)
    received: list[str] = []

    async def read() -> None:
        async for item in reader:
            received.append(item.text)

    task = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    for end in (stream.put(delta("a", 1)), None):
        if end is not None:
            end.wake()
    await asyncio.sleep(0.01)
    waiter = stream.end()
    assert waiter is not None
    waiter.wake()
    await task
    assert received == ["a"]


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
