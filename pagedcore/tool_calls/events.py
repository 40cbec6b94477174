"""What a chat completion consists of: text, reasoning and tool calls, whole or as events while they are written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Further text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Further text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; its arguments follow."""

    index: int
    """Which call of the completion it is, from 0."""
    id: str
    """Unique and not to be guessed."""
    name: str
    """The name of a tool that was offered."""


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """Further text of a call's arguments, which are a JSON object when the call has ended."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A call is complete. A completion that is cut off in a call has no end of it."""

    index: int


ChatEvent = ContentDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta | ToolCallEnd


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, as the model wrote it."""

    id: str
    name: str
    arguments: str
    """The text of a JSON object; not valid JSON if the completion was cut off in it, or the model wrote it wrong."""
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """A whole completion of a chat."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]


def collect(events: Iterable[ChatEvent]) -> ParsedCompletion:
    """Return the completion that events add up to."""
    content, reasoning = list[str](), list[str]()
    calls, arguments, ended = list[ToolCallStart](), dict[int, list[str]](), set[int]()
    for event in events:
        match event:
            case ContentDelta(text):
                content.append(text)
            case ReasoningDelta(text):
                reasoning.append(text)
            case ToolCallStart(index):
                calls.append(event)
                arguments[index] = []
            case ArgumentsDelta(index, text):
                arguments[index].append(text)
            case ToolCallEnd(index):
                ended.add(index)
    return ParsedCompletion("".join(content), "".join(reasoning), tuple(
        ToolCall(one.id, one.name, "".join(arguments[one.index]), one.index in ended) for one in calls
    ))
