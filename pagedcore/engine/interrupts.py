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
    """A context that notes Ctrl-C and raises it at its end, or at once while ``is_allowed``; a second one always is.

    Invariant: outside of the context, SIGINT has the handler that it had before; if another asynchronous exception
    broke off the way in or out, after the next use of the context, and until then Ctrl-C comes at once or with that.
    """

    def __init__(self) -> None:
        self.is_noted = self._is_replaced = False
        self.is_allowed = False
        """Whether it is raised at once; whoever sets it raises what was noted before."""

    def __enter__(self) -> None:
        self.is_allowed = False
        self.raise_noted()
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
            self.raise_noted()

    def raise_noted(self) -> None:
        """Raise ``KeyboardInterrupt`` if Ctrl-C was noted and not raised yet."""
        if self.is_noted:
            self.is_noted = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_noted or self.is_allowed or not self._is_replaced:
            self.is_noted = False
            default_int_handler(number, frame)
        self.is_noted = True
