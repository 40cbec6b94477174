"""When the engine thread tells readers what was added to their answers; how they get it is in ``stream.py``.

Deltas are made when they are told, not when their tokens are: until then it is enough to know who has news.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from pagedcore.protocols import Clock
from pagedcore.requests.output_text import PendingOutput
from pagedcore.requests.request import Request
from pagedcore.serving.stream import Stream

READERS_PER_INTERVAL: Final = 50
"""Readers that are told of news once per interval; with more of them intervals are longer in proportion."""


class StreamFlusher:
    """Remembers, on the engine thread, which answers have news for a reader, and says when to tell them: a request's
    first at once, later ones of all requests together, every ``interval_s``, or less often if there are more than
    ``READERS_PER_INTERVAL`` of them.

    Why: a delta of ten steps takes the engine thread as long as a delta of one, and waking a reader costs an event loop
    ten to fifty microseconds, which the engine thread has to wait for; this keeps both to a few per cent of the time,
    however many readers there are. And a loop that wakes takes the processor from whoever computes, which is why it
    wakes once for all of its readers.

    Invariant: news wait for less than such an interval and the length of a step.
    """

    def __init__(self, interval_s: float, clock: Clock) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._next_s = -math.inf
        self._readers: dict[Request, Stream] = {}
        self._beginners: set[Request] = set()
        self._untold: dict[PendingOutput, None] = {}

    def expect(self, request: Request, stream: Stream) -> None:
        """Let a request's news be told to a stream from now on."""
        self._readers[request] = stream
        self._beginners.add(request)

    def add(self, news: Iterable[PendingOutput]) -> None:
        """Remember the news of a step."""
        if self._readers:
            self._untold.update(dict.fromkeys(news))

    def take_due(self) -> dict[Stream, list[PendingOutput]]:
        """Take what it is time to tell; call it once after every step."""
        now = self._clock.now()
        if now >= self._next_s:
            due = self._take(list(self._untold))
            self._next_s = now + self._interval_s * max(1.0, len(due) / READERS_PER_INTERVAL)
            return due
        return self._take([one for one in self._untold if one[0] in self._beginners]) if self._beginners else {}

    def _take(self, news: list[PendingOutput]) -> dict[Stream, list[PendingOutput]]:
        due: dict[Stream, list[PendingOutput]] = {}
        for one in news:
            del self._untold[one]
            self._beginners.discard(one[0])
            if (stream := self._readers.get(one[0])) is not None:
                due.setdefault(stream, []).append(one)
        return due

    def take(self, request: Request) -> list[PendingOutput]:
        """Take the news of one request, which may be none, and expect no more of it."""
        self._readers.pop(request, None)
        self._beginners.discard(request)
        own = [(request, sequence) for sequence in request.sequences if (request, sequence) in self._untold]
        for one in own:
            del self._untold[one]
        return own
