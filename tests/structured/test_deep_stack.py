"""Work on a thread with a deep stack: what interrupts the caller leaves the thread to its end, and then free."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from architecture.sources import PACKAGE_PARENTS
from pagedcore.errors import GrammarsBusy
from pagedcore.structured.deep_stack import DeepStack


def test_ctrl_c_ends_the_wait_and_not_the_thread() -> None:
    """The caller gets its KeyboardInterrupt at once; the thread is taken until its work has ended."""
    stack, is_interrupted = DeepStack(1, 30.0), threading.Event()

    def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        is_interrupted.wait(30)

    with pytest.raises(KeyboardInterrupt):
        stack.run(work)
    assert not stack._shares.take(b"")
    is_interrupted.set()
    assert stack.run(lambda: 7) == 7
    assert threading.stack_size() == 0


def test_an_interrupt_before_the_thread_has_begun_frees_its_place_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may let it begin later; then it does no work and gives nothing back."""
    stack, late, done = DeepStack(1, 60.0), list[threading.Thread](), list[int]()

    def interrupted(thread: threading.Thread) -> None:
        late.append(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stack.run(lambda: done.append(1))
    late[0].start()
    late[0].join()
    assert done == []
    assert [stack._shares.take(b"") for _ in range(2)] == [True, False]


_HOST = """
import contextlib, threading
from pagedcore.errors import GrammarsBusy
from pagedcore.structured import deep_stack
from llguidance import LLMatcher, LLTokenizer
tokens, grammar = LLTokenizer("byte"), LLMatcher.grammar_from_regex("a?" * 1200)
has_begun, stack = threading.Event(), deep_stack.DeepStack(3, 30.0)
def work():
    has_begun.set()
    return LLMatcher(tokens, grammar, log_level=0)
def go_on():
    with contextlib.suppress(GrammarsBusy):
        while True:
            stack.run(work)
for _ in range(2):
    threading.Thread(target=go_on, daemon=True).start()
has_begun.wait()
# What takes a while to be given back, as an engine does.
kept = [{number: [number]} for number in range(300_000)]
"""


def test_a_process_that_ends_while_it_compiles_ends_well() -> None:
    """The library is waited for, because it must not come back to an interpreter that is no more."""
    environment = {"PYTHONPATH": ":".join(map(str, PACKAGE_PARENTS)), "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", _HOST], env=environment, check=False)
    assert done.returncode == 0


def test_work_that_does_not_end_is_given_up() -> None:
    """Its caller and the next one are told; what it held is free when it ends after all."""
    stack, may_end = DeepStack(1, 0.05), threading.Event()
    with pytest.raises(TimeoutError):
        stack.run(lambda: may_end.wait(30))
    with pytest.raises(GrammarsBusy):
        stack.run(lambda: 7)
    may_end.set()
    with stack._changed:
        assert stack._changed.wait_for(lambda: stack._shares.take(b""), 10)


def test_no_owner_has_all_threads() -> None:
    """One owner's endless work leaves a thread to any other, and gets its own back as it ends."""
    stack, may_end = DeepStack(3, 0.1), threading.Event()
    for _ in range(2):
        with pytest.raises(TimeoutError):
            stack.run(lambda: may_end.wait(30), b"one")
    with pytest.raises(GrammarsBusy):
        stack.run(lambda: 7, b"one")
    stack._limit_s = 60.0
    assert [stack.run(lambda: 7, owner) for owner in (b"two", b"", b"two")] == [7, 7, 7]
    may_end.set()
    with stack._changed:
        assert stack._changed.wait_for(lambda: not stack._shares._taken, 10)
    assert stack.run(lambda: 7, b"one") == 7
