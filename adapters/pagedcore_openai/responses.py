"""``/v1/responses``: text in, one message out, whole or as events. A response that is stored can be continued."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Final

from pagedcore import RequestOutput, SamplingParams, TokenLogprobs, Usage
from pagedcore.errors import InvalidRequest
from pagedcore_http.events import encode, frame
from pagedcore_http.json_pieces import map_in_pieces
from pagedcore_http.salts import Caller
from pagedcore_openai import fields as known
from pagedcore_openai.calls import Call, ServedModel
from pagedcore_openai.errors import ChunkStream, FieldNotSupported, NamedEventStream
from pagedcore_openai.prompts import input_of, instructions_of
from pagedcore_openai.structured import format_of
from pagedcore_openai.wire import chat_entry

_LOGPROBS: Final = "message.output_text.logprobs"


class ResponseCall(Call):
    """An input to respond to."""

    form: ClassVar = known.RESPONSE
    prefix: ClassVar = "resp"
    prompt_field: ClassVar = "input"
    stream_class: ClassVar[type[ChunkStream]] = NamedEventStream

    def __init__(self, served: ServedModel, fields: Mapping[str, Any], caller: Caller) -> None:
        self._message_id = f"msg-{secrets.token_hex(16)}"
        self._num_events = 0
        self._owner = caller.derived
        super().__init__(served, fields, caller)

    def prompts_of(self, fields: Mapping[str, Any]) -> list[Any]:
        """Return the chat: the conversation up to the previous response, and the input."""
        self._is_stored = known.flag({"store": True, **fields}, "store")
        given = input_of(known.required(fields, "input", "text, or a list of messages"))
        previous = fields.get("previous_response_id")
        before = () if previous is None else self.served.stored.messages_of(previous, self._owner)
        self._messages = [*before, *given]
        # Why apart: instructions are for one response, as at OpenAI.
        return [[*instructions_of(fields.get("instructions")), *self._messages]]

    def params_of(self, fields: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters."""
        include = fields.get("include", [])
        if not isinstance(include, list):
            raise InvalidRequest("include", include, "a list")
        for name in include:
            if name != _LOGPROBS:
                raise FieldNotSupported("include", name, f"a list of {_LOGPROBS}")
        if fields.get("top_logprobs") and not include:
            raise FieldNotSupported("top_logprobs", fields["top_logprobs"], f"null without {_LOGPROBS} in include")
        logprobs = {"logprobs": fields.get("top_logprobs", 0)} if include else {}
        text = fields.get("text", {})
        if not isinstance(text, dict):
            raise InvalidRequest("text", text, "an object")
        for name in text.keys() - {"format"}:
            if (name, text[name]) not in (("verbosity", "medium"), ("verbosity", None)):
                raise FieldNotSupported("text", name, "format, and the verbosity medium")
        self._format = text.get("format") or {"type": "text"}
        form = format_of("text.format", self._format)
        wanted = {} if form is None else {"structured": form}
        return known.params_of(fields, max_tokens=fields.get("max_output_tokens"), **logprobs, **wanted)

    async def body(self, outputs: list[RequestOutput]) -> str:
        """Return the response."""
        (output,) = outputs
        (one,) = output.outputs
        entries = await self._entries(one.logprobs)
        body = encode(self._response(one.finish_reason, one.text, entries, output.usage))
        self._keep(one.text, body)
        return body

    def _keep(self, text: str, body: str) -> None:
        if self._is_stored:
            messages = [*self._messages, {"role": "assistant", "content": text}]
            self.served.stored.keep(self.id, self._owner, messages, body)

    async def _entries(self, entries: Sequence[TokenLogprobs] | None) -> list[dict[str, Any]]:
        return await map_in_pieces(lambda one: chat_entry(one, self.served.spell), entries or ())

    def _response(self, reason: str | None, text: str, logprobs: list[dict[str, Any]], usage: Usage | None,
                  ) -> dict[str, Any]:
        status = _status_of(reason)
        fields, params = self.fields, self.params
        message = self._message(status, [_part(text, logprobs)])
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": fields.get("instructions"), "max_output_tokens": fields.get("max_output_tokens"),
            "model": self.served.name, "output": [] if reason is None else [message], "parallel_tool_calls": False,
            "previous_response_id": fields.get("previous_response_id"), "reasoning": {"effort": None, "summary": None},
            "store": self._is_stored,
            "temperature": params.temperature, "text": {"format": self._format}, "tool_choice": "none",
            "tools": [], "top_p": params.top_p, "truncation": "disabled", "metadata": {},
            "usage": None if usage is None else _usage_of(usage),
        }

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": content}

    async def events(self) -> AsyncGenerator[str, None]:
        """Yield the events of one message with one part of text; the last one has the whole response."""
        begun, texts, all_logprobs = False, list[str](), list[dict[str, Any]]()
        async with aclosing(self.deltas()) as deltas:
            async for _, delta in deltas:
                events = [] if begun else self._opening()
                begun = True
                logprobs = await self._entries(delta.logprobs)
                all_logprobs += logprobs
                texts.append(delta.text)
                if delta.text or logprobs:
                    events.append(self._of_part("response.output_text.delta", delta=delta.text, logprobs=logprobs))
                if delta.finish_reason is not None:
                    events += self._closing(delta.finish_reason, "".join(texts), all_logprobs, delta.usage)
                if events:
                    yield "".join(events)

    def _opening(self) -> list[str]:
        response = self._response(None, "", [], None)
        item = self._message("in_progress", [])
        return [
            self._event("response.created", response=response), self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=item),
            self._of_part("response.content_part.added", part=_part("", [])),
        ]

    def _closing(self, reason: str, text: str, logprobs: list[dict[str, Any]], usage: Usage | None) -> list[str]:
        status, part = _status_of(reason), _part(text, logprobs)
        response = self._response(reason, text, logprobs, usage)
        self._keep(text, encode(response))
        return [
            self._of_part("response.output_text.done", text=text, logprobs=logprobs),
            self._of_part("response.content_part.done", part=part),
            self._event("response.output_item.done", output_index=0, item=self._message(status, [part])),
            self._event(f"response.{status}", response=response),
        ]

    def _of_part(self, kind: str, **fields: Any) -> str:
        return self._event(kind, item_id=self._message_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        self._num_events += 1
        return frame({"type": kind, "sequence_number": self._num_events - 1, **fields}, kind)


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _status_of(reason: str | None) -> str:
    return {None: "in_progress", "length": "incomplete"}.get(reason, "completed")


def _usage_of(usage: Usage) -> dict[str, Any]:
    return {"input_tokens": usage.num_prompt_tokens, "input_tokens_details": {"cached_tokens": usage.num_cached_tokens},
            "output_tokens": usage.num_output_tokens, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens}
