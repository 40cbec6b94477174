"""The hand-over of a finished request to one caller who wants no deltas: a future that any thread or loop can wait for.

Nothing is handed over, and nobody is woken, before the request is done; read ``stream.py`` for the other way.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from pagedcore.outputs import RequestOutput


class CompletionFuture:
    """All answers of one request on their way to a future.

    Invariant: the future is settled once, with an output or an error, unless its owner cancelled it first.
    """

    def __init__(self) -> None:
        self.future: Future[RequestOutput] = Future()
        self._is_settled = False

    @property
    def is_abandoned(self) -> bool:
        """Whether its owner cancelled it, which the engine may not know yet."""
        return self.future.cancelled()

    def abandon(self) -> None:
        """Cancel it, unless it is settled."""
        self.future.cancel()

    def complete(self, output: RequestOutput) -> None:
        """Hand the output over; what was settled or cancelled before stays as it is."""
        self._settle(lambda: self.future.set_result(output))

    def end(self, error: Exception | None = None) -> None:
        """Hand an error over if there is one; what was settled or cancelled before stays as it is."""
        if error is not None:
            self._settle(lambda: self.future.set_exception(error))

    def _settle(self, hand_over: Callable[[], None]) -> None:
        # Why: from here on a cancellation comes too late, so it cannot meet a result half-way.
        if not self._is_settled and self.future.set_running_or_notify_cancel():
            hand_over()
        self._is_settled = True
