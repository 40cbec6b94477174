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
    num_full = generations.count(2)
    assert engine.generate(["What is 2 + 3?"], SamplingParams(max_tokens=3))[0].outputs[0].text
print(num_full, generations.count(1) > 5, gc.get_threshold())
"""


@pytest.fixture(autouse=True)
def _own_threshold() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("third", [10, 12])
def test_a_start_waits_for_no_full_collection(third: int) -> None:
    """Younger objects are collected meanwhile, and what the host had set is there afterwards."""
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
