"""Full garbage collections while an engine is imported and built: none, and the host's settings are as they were."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from pagedcore import full_collections
from pagedcore.full_collections import full_collections_put_off
from support.interrupts import Lost, interrupted_at

START = """
import gc, torch
generations = []
gc.callbacks.append(lambda phase, info: generations.append(info["generation"]) if phase == "start" else None)
from pagedcore import Engine, SamplingParams
with Engine.from_pretrained("demo") as engine:
    for number in range(20):
        assert engine.generate([f"What is {number} + 3?"], SamplingParams(max_tokens=3))[0].outputs[0].text
print(generations.count(2), generations.count(1) > 5, gc.get_threshold())
"""


@pytest.fixture(autouse=True)
def _own_threshold() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("third", [10, 12])
def test_a_start_waits_for_no_full_collection(third: int) -> None:
    """Nor do the first requests. Younger objects are collected, and what the host had set is there afterwards."""
    script = START.replace("generations = []", f"generations = gc.set_threshold(700, 10, {third}) or []")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split(maxsplit=2) == ["0", "True", f"(700, 10, {third})\n"], done.stderr


def test_the_block_that_changed_it_restores_what_the_host_had() -> None:
    """Blocks inside of blocks, those of other threads, and those that raise, change nothing."""
    has_begun, may_end = threading.Event(), threading.Event()

    def other() -> None:
        with full_collections_put_off():
            has_begun.set()
            may_end.wait(60)

    thread = threading.Thread(target=other)
    with full_collections_put_off():
        with pytest.raises(ZeroDivisionError), full_collections_put_off():
            1 / 0  # noqa: B018
        assert gc.get_threshold() == (700, 10, full_collections._PUT_OFF)
        thread.start()
        assert has_begun.wait(60)
    assert gc.get_threshold() == (700, 10, 10)
    may_end.set()
    thread.join()
    assert gc.get_threshold() == (700, 10, 10)


def test_many_threads_come_and_go() -> None:
    """The host's threshold is there whenever nobody is inside."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def come_and_go() -> None:
        for _ in range(300):
            with full_collections_put_off():
                pass

    try:
        for _ in range(10):
            threads = [threading.Thread(target=come_and_go) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert gc.get_threshold() == (700, 10, 10)
    finally:
        sys.setswitchinterval(interval)


def test_an_interrupt_at_any_line_keeps_nothing() -> None:
    """The host has its threshold back, and a block of another thread is not kept waiting."""
    with interrupted_at(0) as num_lines, full_collections_put_off():
        pass
    assert num_lines[0] > 10

    def another() -> None:
        with full_collections_put_off():
            pass

    for line in range(1, num_lines[0] + 1):
        with suppress(Lost), interrupted_at(line), full_collections_put_off():
            pass
        assert gc.get_threshold() == (700, 10, 10), line
        thread = threading.Thread(target=another, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), line


def test_what_became_garbage_meanwhile_is_found_later() -> None:
    """A collection that was due counts as done, and the next one finds all of it."""
    script = """
import gc, weakref
from pagedcore.full_collections import full_collections_put_off
class Cycle:
    def __init__(self):
        self.own = self
gc.set_threshold(700, 10, 0)
with full_collections_put_off():
    early = weakref.ref(Cycle())
    for _ in range(3):
        gc.collect(1)
    late = weakref.ref(Cycle())
    print(gc.get_count()[2] > 0, end=" ")
print(gc.get_count()[2], gc.get_freeze_count(), early() is None, late() is None, end=" ")
gc.collect()
print(late() is None)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "0", "0", "True", "False", "True"], done.stderr


def test_what_a_host_has_frozen_stays_frozen() -> None:
    """Then a collection that is due comes, as there is no other way to have it count as done."""
    script = """
import gc
from pagedcore.full_collections import full_collections_put_off
gc.freeze()
frozen, (first, second, third) = gc.get_freeze_count(), gc.get_threshold()
with full_collections_put_off():
    for _ in range(third + 2):
        gc.collect(1)
print(gc.get_freeze_count() == frozen > 0, gc.get_count()[2] > third)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_a_signal_leaves_nothing_frozen() -> None:
    """Whenever it comes."""
    script = """
import gc, signal
from pagedcore.full_collections import full_collections_put_off
def stop(number, frame):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, stop)
gc.set_threshold(700, 10, 0)
num_stopped = 0
for delay in range(3000):
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-6 + delay % 100 * 2e-7)
        while True:
            with full_collections_put_off():
                gc.collect(0)
                gc.collect(1)
    except KeyboardInterrupt:
        num_stopped += 1
    assert gc.get_freeze_count() == 0, delay
    assert gc.get_threshold() == (700, 10, 0), delay
print(num_stopped)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["3000"], done.stderr


@pytest.mark.parametrize("chosen", [(500, 5, 5), (0, 10, 10), (700, 10, 1000)], ids=str)
def test_what_a_host_sets_meanwhile_stays(chosen: tuple[int, int, int]) -> None:
    """It wins over ours, and a later block begins from it."""
    with full_collections_put_off():
        gc.set_threshold(*chosen)
    assert gc.get_threshold() == chosen
    with full_collections_put_off():
        assert gc.get_threshold() == (*chosen[:2], max(chosen[2], full_collections._PUT_OFF))
    assert gc.get_threshold() == chosen


def test_the_youngest_thresholds_may_change_alone() -> None:
    """A host that sets those of younger objects meanwhile has its own for the oldest back."""
    with full_collections_put_off():
        gc.set_threshold(123, 4)
    assert gc.get_threshold() == (123, 4, 10)


@pytest.mark.parametrize("third", [full_collections._PUT_OFF, 1000])
def test_a_rarer_collection_of_the_host_is_left_as_it_is(third: int) -> None:
    """Even if it has chosen our number."""
    gc.set_threshold(700, 10, third)
    with full_collections_put_off():
        assert gc.get_threshold() == (700, 10, third)
    assert gc.get_threshold() == (700, 10, third)


def test_a_disabled_collector_stays_disabled() -> None:
    """Nothing enables it."""
    gc.disable()
    try:
        with full_collections_put_off():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_child_has_the_threshold_of_the_host() -> None:
    """The threads that were inside of a block do not exist there."""
    script = """
import gc, os
from pagedcore.full_collections import full_collections_put_off
with full_collections_put_off():
    if not (child := os.fork()):
        os._exit(gc.get_threshold()[2])
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), gc.get_threshold()[2])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["10", str(full_collections._PUT_OFF)], done.stderr
