"""When the engine thread hands pending output to its readers; how they receive it is in ``stream``.

Deltas are made when they are due, not when their tokens are: until then it is enough to know which completions have
pending output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from pagedcore.protocols import Clock
from pagedcore.requests.output_processor import PendingOutput
from pagedcore.requests.request import Request
from pagedcore.serving.stream import Stream

READERS_PER_INTERVAL: Final = 50
"""Readers that get their output once per interval; with more of them intervals are longer in proportion."""


class StreamFlusher:
    """Says when which pending output is due: a request's first at once, later output of all requests together, every
    ``interval_s``, or less often if there are more than ``READERS_PER_INTERVAL`` readers.

    Why: a delta of ten steps takes the engine thread as long as a delta of one, and waking a reader costs an event loop
    ten to fifty microseconds, which the engine thread has to wait for; this keeps both to a few per cent of the time,
    however many readers there are. And a loop that wakes takes the processor from the threads that compute, which is
    why it wakes once for all of its readers.

    Invariant: output waits for less than such an interval and the length of a step.
    """

    def __init__(self, interval_s: float, clock: Clock) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._next_s = -math.inf
        self._readers: dict[Request, Stream] = {}
        self._without_first: set[Request] = set()
        self._pending: dict[Request, list[PendingOutput]] = {}

    def expect(self, request: Request, stream: Stream) -> None:
        """Deliver a request's output to a stream from now on."""
        self._readers[request] = stream
        self._without_first.add(request)

    def add(self, pending: Iterable[PendingOutput]) -> None:
        """Keep what a step made pending."""
        for one in pending if self._readers else ():
            own = self._pending.setdefault(one.request, [])
            if one not in own:
                own.append(one)

    def take_due(self) -> dict[Stream, list[PendingOutput]]:
        """Take what is due; call it once after every step."""
        now = self._clock.now()
        if now >= self._next_s:
            due = self._take(list(self._pending))
            self._next_s = now + self._interval_s * max(1.0, len(due) / READERS_PER_INTERVAL)
            return due
        return self._take([request for request in self._without_first if request in self._pending])

    def take(self, request: Request) -> list[PendingOutput]:
        """Take the pending output of one request, which may be none, and expect no more of it."""
        self._readers.pop(request, None)
        self._without_first.discard(request)
        return sorted(self._pending.pop(request, []), key=lambda one: one.index)

    def _take(self, requests: Iterable[Request]) -> dict[Stream, list[PendingOutput]]:
        due: dict[Stream, list[PendingOutput]] = {}
        for request in requests:
            pending = self._pending.pop(request)
            self._without_first.discard(request)
            if (stream := self._readers.get(request)) is not None:
                due[stream] = pending
        return due
