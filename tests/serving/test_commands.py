"""The queue of commands: waiting ends in time, also when it is woken for nothing, and no arrival is missed."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pagedcore.serving import commands
from pagedcore.serving.commands import Commands, Places
from pagedcore.serving.stream import CompletionFuture


@pytest.fixture
def queue() -> Commands:
    """A queue without commands."""
    return Commands(Places(4, lambda: 0))


def put(queue: Commands) -> CompletionFuture[Any]:
    sink = CompletionFuture[Any]()
    queue.put(lambda loop: None, sink)
    return sink


def test_a_wait_that_is_woken_for_nothing_ends_when_its_time_is_over(
    queue: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was put and taken leaves a wake-up behind. ``SimpleQueue.get`` slept without end if its time was over then,
    and with it the engine thread, until the next command.
    """
    first = put(queue)
    assert [command.sink for command in queue.take(1)] == [first]
    times = [0.0, 0.0005, 5.0]
    monkeypatch.setattr(commands, "monotonic", lambda: times.pop(0))
    assert queue.wait(0.001) is None
    assert not times


@pytest.mark.parametrize("timeout_s", [0.0, 1e-9, 1e-6, 1e-3])
def test_what_is_there_is_returned_in_order_and_without_time(queue: Commands, timeout_s: float) -> None:
    """However short the wait; afterwards there is nothing, and the wait ends."""
    sinks = [put(queue) for _ in range(3)]
    found = [queue.wait(timeout_s) for _ in range(4)]
    assert [one and one.sink for one in found] == [*sinks, None]


def test_a_sleeping_thread_is_woken_by_every_arrival(queue: Commands) -> None:
    """Two callers put a thousand commands in all, and a thread that sleeps between them gets each of them once."""
    def call() -> None:
        for _ in range(500):
            sent.append(put(queue))

    sent = list[Any]()
    callers = [threading.Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()
    received = [queue.wait(60.0) for _ in range(1000)]
    for caller in callers:
        caller.join()
    assert {id(one.sink) for one in received if one is not None} == set(map(id, sent))
    assert len(sent) == 1000
    assert queue.wait(0.0) is None
