"""Server-sent events: written for the deltas of a stream, and parsed.

The format is the HTML standard's ("Server-sent events", section 9.2). Every event is one line of JSON in ASCII, so that
a client may cut the bytes anywhere. Events without a name are deltas; the last one is called "done" or "error", and
a stream that ends with neither was cut off.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import dataclass
from typing import Any, Final

from pagedcore import CompletionOutput, Delta

WAITING: Final = ": waiting\n\n"
"""A comment, which every reader skips: it shows that the connection lives."""

_END: Final = re.compile("^event: (done|error)$", re.MULTILINE)
encode = json.JSONEncoder(separators=(",", ":")).encode
"""Writes a value as JSON in ASCII."""


def stop_of(ended: CompletionOutput | Delta) -> dict[str, str | int]:
    """Return the stop of the caller's own, a text or a token's id, that ended a completion, as a field; else none."""
    return {} if ended.stop_reason is None else {"stop_reason": ended.stop_reason}


def frame(data: Any, name: str = "") -> str:
    """Write one event."""
    return frame_text(encode(data), name)


def frame_text(data: str, name: str = "") -> str:
    """Write one event whose data are JSON already."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {data}\n\n"


def ends_stream(text: str) -> bool:
    """Whether ``text`` has the last event. Data cannot be taken for it: they are one line that begins with "data"."""
    return _END.search(text) is not None


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream."""

    name: str
    """"" for a delta, "done" for the end, "error" for a failure."""
    data: Any
    """Of a delta: index, text, token_ids and, on a completion's last one, finish_reason, with
    stop_reason if a stop of the caller's own ended it."""


class EventParser:
    """Turns pieces of text, cut anywhere, into events.

    Invariant: what is kept between two calls is less than one event.
    """

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, text: str) -> list[Event]:
        """Return the events that ``text`` completes."""
        *blocks, self._rest = (self._rest + text).split("\n\n")
        return [event for block in blocks if (event := _parse(block)) is not None]


async def parse_events(chunks: AsyncIterable[str]) -> AsyncGenerator[Event, None]:
    """Yield the events in the chunks of text that a client receives."""
    parser = EventParser()
    async for chunk in chunks:
        for event in parser.feed(chunk):
            yield event


def _parse(block: str) -> Event | None:
    fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
    return Event(fields.get("event", ""), json.loads(fields["data"])) if "data" in fields else None
