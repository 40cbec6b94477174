"""The handler that holds Ctrl-C back during a step: an interrupt may break off its coming and going."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from pagedcore.engine.interrupts import CtrlC
from support.interrupts import Lost, interrupted_at


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def use(ctrl_c: CtrlC, line: int) -> bool:
    """Use the context, broken off at a line; return whether it has so many."""
    try:
        with interrupted_at(line), ctrl_c:
            pass
    except Lost:
        return True
    return False


def press(ctrl_c: CtrlC) -> None:
    """Press Ctrl-C, and make a step if it did not come."""
    signal.raise_signal(signal.SIGINT)
    use(ctrl_c, 0)


def test_ctrl_c_works_wherever_the_handler_was_broken_off() -> None:
    """Outside of a step Ctrl-C comes at once or with the next step, whatever line of the way in or out was the last;
    the next step leaves Python's own handler."""
    line = 1
    while use(ctrl_c := CtrlC(), line):
        with pytest.raises(KeyboardInterrupt):
            press(ctrl_c)
        assert not use(ctrl_c, 0)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, f"line {line}"
        line += 1
    assert line > 8
