"""``/v1/responses``: text and tools in, messages, calls and reasoning out, whole or as events. A stored response can be
continued."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Final

from pagedcore import CompletionOutput, Delta, RequestOutput, SamplingParams, TokenLogprobs, Usage
from pagedcore.errors import InvalidGrammar, InvalidRequest, InvalidTools, PagedcoreError
from pagedcore.tool_calls.events import ChatEvent, ContentDelta, collect
from pagedcore_http.events import encode, frame, stop_of
from pagedcore_http.json_pieces import map_in_pieces
from pagedcore_http.salts import Caller
from pagedcore_openai import fields as known
from pagedcore_openai.calls import Call, ServedModel
from pagedcore_openai.chat_prompt import chat_of
from pagedcore_openai.errors import ChunkStream, FieldNotSupported, NamedEventStream, Refused, renamed
from pagedcore_openai.prompts import input_of, instructions_of, place_of
from pagedcore_openai.response_items import Items
from pagedcore_openai.structured import format_of
from pagedcore_openai.tools import chat_tools, of_flat_tools, said
from pagedcore_openai.wire import chat_entry

_MESSAGE: Final = re.compile(r"messages\[(\d+)\]")
_PREVIOUS: Final = "previous_response_id"
_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDED_WITHOUT_EFFECT: Final = ("reasoning.encrypted_content",)
"""Reasoning is in a response as it was written."""


class ResponseCall(Call):
    """An input to respond to."""

    form: ClassVar = known.RESPONSE
    prefix: ClassVar = "resp"
    stream_class: ClassVar[type[ChunkStream]] = NamedEventStream

    def __init__(self, served: ServedModel, fields: Mapping[str, Any], caller: Caller) -> None:
        self._events: list[str] = []
        self._num_events = 0
        self._owner = caller.derived
        try:
            super().__init__(served, fields, caller)
        except InvalidTools as error:
            raise of_flat_tools(error) from None

    def blame(self, error: PagedcoreError) -> PagedcoreError:
        """Return an error with the field that it is about, of tools as responses have them."""
        told = super().blame(error)
        return of_flat_tools(told) if isinstance(told, InvalidGrammar) and told.what.startswith("tools[") else told

    def names(self) -> Mapping[str, str]:
        """Return the names of the input and of the numbers that have others in responses."""
        return {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}

    def with_own_names(self, error: Refused) -> Refused:
        """Return a refusal that speaks of the body, of a message as the item that it was made of."""
        if (found := _MESSAGE.match(error.what)) is not None:
            index, within = int(found[1]) - self._num_before, error.what[found.end() :]
            error = renamed(error, self._place_of(index, within))
        return super().with_own_names(error)

    def _place_of(self, index: int, within: str) -> str:
        """Return the place in the body of something within a message, counted from the first of the input."""
        given = self.fields["input"]
        if index < 0:
            # Why no place: both are one field of this body.
            return "instructions" if index == -self._num_before and "instructions" in self.fields else _PREVIOUS
        return f"input[{place_of(index, given)}]{within}" if isinstance(given, list) else "input"

    def prompts_of(self, fields: Mapping[str, Any]) -> list[Any]:
        """Return the chat: the conversation up to the previous response, and the input."""
        self._is_stored = known.flag({"store": True, **fields}, "store")
        self._num_before = 0
        given = input_of(known.required(fields, "input", "text, or a list of items"))
        previous = fields.get(_PREVIOUS)
        before = () if previous is None else self.served.stored.messages_of(previous, self._owner)
        self._messages = [*before, *given]
        # Why apart: instructions are for one response, as at OpenAI.
        messages = [*instructions_of(fields.get("instructions")), *self._messages]
        self._num_before = len(messages) - len(given)
        return [chat_of(messages, chat_tools(fields), self.served.engine.chat_format)]

    def params_of(self, fields: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters."""
        self._metadata = known.metadata_of(fields)
        if fields.get("truncation", "disabled") not in ("auto", "disabled"):
            raise InvalidRequest("truncation", fields["truncation"], "auto or disabled")
        has_logprobs = _LOGPROBS in _included(fields.get("include", []))
        if fields.get("top_logprobs") and not has_logprobs:
            raise FieldNotSupported("top_logprobs", fields["top_logprobs"], f"null without {_LOGPROBS} in include")
        logprobs = {"logprobs": fields.get("top_logprobs", 0)} if has_logprobs else {}
        self._format = known.TEXT.read_in(fields, "text").get("format") or {"type": "text"}
        form = format_of("text.format", self._format)
        wanted = {} if form is None else {"structured": form}
        params = known.params_of(fields, max_tokens=fields.get("max_output_tokens"), **logprobs, **wanted)
        return self.turn_of(self.prompts[0], chat_tools(fields), params)

    async def body(self, outputs: list[RequestOutput]) -> str:
        """Return the response."""
        (output,) = outputs
        (one,) = output.outputs
        items, logprobs = Items(lambda *_, **__: None), await self._entries(one.logprobs)
        reader = self.turn.reader()
        events = await self.events_of(one, reader)
        for event in events:
            logprobs = self._add(items, event, logprobs)
        items.end(_status_of(one))
        usage = _usage_of(output.usage, reader.num_reasoning_tokens)
        body = encode(self._response(one, items.bodies(), usage))
        self._keep(events, body)
        return body

    def _keep(self, events: list[ChatEvent], body: str) -> None:
        if self._is_stored:
            self.served.stored.keep(self.id, self._owner, [*self._messages, said(collect(events))], body)

    async def _entries(self, entries: Sequence[TokenLogprobs] | None) -> list[dict[str, Any]]:
        return await map_in_pieces(lambda one: chat_entry(one, self.served.spell), entries or ())

    def _add(self, items: Items, event: ChatEvent, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add an event; return the log-probabilities that are left: those of a delta go with its first text."""
        items.add(event, logprobs)
        return [] if isinstance(event, ContentDelta) else logprobs

    def _response(
        self, ended: CompletionOutput | Delta | None, items: list[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        status = _status_of(ended)
        fields, params = self.fields, self.params.with_defaults(self.served.engine.generation_defaults)
        has_tools = bool(fields.get("tools"))
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "error": None,
            "incomplete_details": _details_of(ended) if status == "incomplete" else None,
            "instructions": fields.get("instructions"), "max_output_tokens": fields.get("max_output_tokens"),
            "model": self.served.name, "output": items,
            "parallel_tool_calls": has_tools and known.flag(fields, "parallel_tool_calls", default=True),
            "previous_response_id": fields.get("previous_response_id"),
            "reasoning": {"effort": None, "summary": None, **fields.get("reasoning", {})},
            "store": self._is_stored, "temperature": fields.get("temperature", params.temperature),
            "text": {"format": self._format},
            "tool_choice": fields.get("tool_choice", "auto" if has_tools else "none"),
            "tools": fields.get("tools", []), "top_p": fields.get("top_p", params.top_p),
            "truncation": fields.get("truncation", "disabled"), "metadata": self._metadata,
            "usage": usage, **({} if ended is None else stop_of(ended)),
        }

    async def events(self) -> AsyncGenerator[str, None]:
        """Yield the events of all items; the last one has the whole response."""
        reader, items, told = self.turn.reader(), Items(self._tell), list[ChatEvent]()
        has_begun = False
        async with aclosing(self.deltas()) as deltas:
            async for _, delta in deltas:
                if not has_begun:
                    has_begun, response = True, self._response(None, [], None)
                    self._tell("response.created", response=response)
                    self._tell("response.in_progress", response=response)
                logprobs = await self._entries(delta.logprobs)
                events = reader.read(delta)
                if logprobs and self.turn.is_plain and not events:
                    events = [ContentDelta("")]
                told += events
                for event in events:
                    logprobs = self._add(items, event, logprobs)
                if delta.finish_reason is not None:
                    usage = None if delta.usage is None else _usage_of(delta.usage, reader.num_reasoning_tokens)
                    self._close(items, told, delta, usage)
                if self._events:
                    events_text, self._events = "".join(self._events), []
                    yield events_text

    def _close(self, items: Items, told: list[ChatEvent], ended: Delta, usage: dict[str, Any] | None) -> None:
        status = _status_of(ended)
        items.end(status)
        response = self._response(ended, items.bodies(), usage)
        self._keep(told, encode(response))
        self._tell(f"response.{status}", response=response)

    def _tell(self, kind: str, **fields: Any) -> None:
        self._num_events += 1
        self._events.append(frame({"type": kind, "sequence_number": self._num_events - 1, **fields}, kind))


def _included(include: object) -> list[Any]:
    """Return what a response shall have besides. Raises ``InvalidRequest`` for what it cannot have."""
    if not isinstance(include, list):
        raise InvalidRequest("include", include, "a list")
    for place, name in enumerate(include):
        if name not in (_LOGPROBS, *_INCLUDED_WITHOUT_EFFECT):
            limit = ", ".join((_LOGPROBS, *_INCLUDED_WITHOUT_EFFECT))
            raise FieldNotSupported.of_name(f"include[{place}]", name, limit)
    return include


def _status_of(ended: CompletionOutput | Delta | None) -> str:
    if ended is None:
        return "in_progress"
    # Why all others: what was aborted is no more complete than what was too long.
    return "completed" if ended.finish_reason == "stop" else "incomplete"


def _details_of(ended: CompletionOutput | Delta | None) -> dict[str, Any]:
    reason = None if ended is None else ended.finish_reason
    return {"reason": "max_output_tokens" if reason == "length" else reason}


def _usage_of(usage: Usage, num_reasoning_tokens: int) -> dict[str, Any]:
    return {"input_tokens": usage.num_prompt_tokens, "input_tokens_details": {"cached_tokens": usage.num_cached_tokens},
            "output_tokens": usage.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
            "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens}
