"""Work on a thread with a deep stack: what interrupts the caller leaves the thread to its end, and then free."""

from __future__ import annotations

import os
import signal
import threading

import pytest

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
    assert not stack._free.acquire(blocking=False)
    is_interrupted.set()
    assert stack.run(lambda: 7) == 7
    assert threading.stack_size() == 0


def test_work_that_does_not_end_is_given_up() -> None:
    """Its caller and the next one are told; what it held is free when it ends after all."""
    stack, may_end = DeepStack(1, 0.05), threading.Event()
    with pytest.raises(TimeoutError):
        stack.run(lambda: may_end.wait(30))
    with pytest.raises(GrammarsBusy):
        stack.run(lambda: 7)
    may_end.set()
    assert stack._free.acquire(timeout=10)
