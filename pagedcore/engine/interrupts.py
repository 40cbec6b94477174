"""Ctrl-C during a step: held back until the step can stop, so that it costs no computed block.

This is a convenience over the recovery in ``step``, which any interrupt is undone by. Only Python's own handler is
replaced, for as long as a step lasts; a handler of the application does what it does.
"""

from __future__ import annotations

# Why not ``signal``: its functions convert their arguments to enums, which takes 2 % of a small model's step.
from _signal import SIGINT, default_int_handler, getsignal, signal  # type: ignore[import-not-found]
from threading import current_thread, main_thread
from types import FrameType


class CtrlC:
    """A context that notes Ctrl-C and raises it at its end, or where ``allow`` says; a second one is raised at once.

    Invariant: outside of the context, SIGINT has the handler that it had before; if another asynchronous exception
    broke off the way in or out, after the next use of the context, and until then Ctrl-C comes at once or with that.
    """

    def __init__(self) -> None:
        self._is_noted = self._is_allowed = self._is_replaced = False

    def __enter__(self) -> None:
        self._is_allowed = False
        self._raise_noted()
        # Why first asked for the thread: only the main one may set handlers, and only there signals arrive.
        if current_thread() is main_thread() and (
            (handler := getsignal(SIGINT)) is default_int_handler or handler == self._note
        ):
            signal(SIGINT, self._note)
            # Why last: until here, and from its way back on, the handler raises at once.
            self._is_replaced = True

    def __exit__(self, *_: object) -> None:
        if self._is_replaced:
            self._is_replaced = False
            # Why asked: an observer of the application may have installed a handler of its own meanwhile.
            if getsignal(SIGINT) == self._note:
                signal(SIGINT, default_int_handler)
            self._raise_noted()

    def allow(self) -> None:
        """Raise Ctrl-C at once from now on, also one that was noted."""
        self._is_allowed = True
        self._raise_noted()

    def hold(self) -> None:
        """Note Ctrl-C from now on."""
        self._is_allowed = False

    def _raise_noted(self) -> None:
        if self._is_noted:
            self._is_noted = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_noted or self._is_allowed or not self._is_replaced:
            self._is_noted = False
            default_int_handler(number, frame)
        self._is_noted = True
