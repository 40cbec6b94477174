"""The items of a response while they are written: messages, calls and reasoning, and the events that tell of them."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pagedcore.tool_calls.events import (
    ArgumentsDelta,
    ChatEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallEnd,
    ToolCallStart,
)

Tell = Callable[..., None]
"""Takes the kind of an event and its fields."""


@dataclass
class Item:
    """One item: what is in it, and how its events are called."""

    place: int
    kind: str
    id: str
    call_id: str = ""
    name: str = ""
    status: str = "in_progress"
    is_whole: bool = True
    """Whether it is a call that has ended, or no call."""
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text so far: of a message, of reasoning, or of arguments."""
        return "".join(self.texts)

    def body(self) -> dict[str, Any]:
        """Return the item as a response has it."""
        head: dict[str, Any] = {"id": self.id, "type": self.kind, "status": self.status}
        if self.kind == "function_call":
            return {**head, "call_id": self.call_id, "name": self.name, "arguments": self.text}
        content = [] if self.status == "in_progress" else [self.part(self.text, self.logprobs)]
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": content}
        return {**head, "role": "assistant", "content": content}

    def part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the one part of its content."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


_PREFIXES = {"message": "msg", "function_call": "fc", "reasoning": "rs"}
_KINDS: dict[type, str] = {ContentDelta: "message", ReasoningDelta: "reasoning", ToolCallStart: "function_call"}


class Items:
    """The items of one response; every change is told as an event.

    Invariant: one item is open at a time, and the texts of its deltas are its text.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._items: list[Item] = []
        self._is_open = False

    def bodies(self) -> list[dict[str, Any]]:
        """Return all items."""
        return [item.body() for item in self._items]

    def add(self, event: ChatEvent, logprobs: list[dict[str, Any]]) -> None:
        """Take an event, with the log-probabilities of text for the user."""
        if isinstance(event, ToolCallEnd) and self._is_open:
            self._items[-1].is_whole = True
        kind = _KINDS.get(type(event))
        is_next = kind is not None and (not self._is_open or kind == "function_call" or self._items[-1].kind != kind)
        if kind is not None and is_next:
            self._open(kind, event)
        if isinstance(event, ContentDelta | ReasoningDelta | ArgumentsDelta):
            self._write(event.text, logprobs if isinstance(event, ContentDelta) else [])

    def end(self, status: str) -> None:
        """Close what is open; a response without anything has an empty message."""
        if not self._items:
            self._open("message", None)
        self._close(status)

    def _open(self, kind: str, event: ChatEvent | None) -> None:
        self._close("completed")
        item = Item(len(self._items), kind, f"{_PREFIXES[kind]}-{secrets.token_hex(16)}")
        if isinstance(event, ToolCallStart):
            item.call_id, item.name, item.is_whole = event.id, event.name, False
        self._items.append(item)
        self._is_open = True
        self._tell("response.output_item.added", output_index=item.place, item=item.body())
        if kind != "function_call":
            self._tell_of("response.content_part.added", item, content_index=0, part=item.part("", []))

    def _write(self, text: str, logprobs: list[dict[str, Any]]) -> None:
        item = self._items[-1]
        item.texts.append(text)
        item.logprobs += logprobs
        match item.kind:
            case "function_call":
                self._tell_of("response.function_call_arguments.delta", item, delta=text)
            case "reasoning":
                self._tell_of("response.reasoning_text.delta", item, content_index=0, delta=text)
            case _:
                self._tell_of("response.output_text.delta", item, content_index=0, delta=text, logprobs=logprobs)

    def _close(self, status: str) -> None:
        if not self._is_open:
            return
        item, self._is_open = self._items[-1], False
        item.status = status if item.is_whole else "incomplete"
        match item.kind:
            case "function_call":
                done = "response.function_call_arguments.done"
                self._tell_of(done, item, name=item.name, arguments=item.text)
            case "reasoning":
                self._tell_of("response.reasoning_text.done", item, content_index=0, text=item.text)
            case _:
                self._tell_of("response.output_text.done", item, content_index=0, text=item.text,
                              logprobs=item.logprobs)
        if item.kind != "function_call":
            part = item.part(item.text, item.logprobs)
            self._tell_of("response.content_part.done", item, content_index=0, part=part)
        self._tell("response.output_item.done", output_index=item.place, item=item.body())

    def _tell_of(self, kind: str, item: Item, **fields: Any) -> None:
        self._tell(kind, item_id=item.id, output_index=item.place, **fields)
