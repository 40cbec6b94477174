"""``/v1/chat/completions``: the call, the whole response, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, ClassVar

from pagedcore import CompletionOutput, Delta, RequestOutput, SamplingParams, Usage
from pagedcore.errors import InvalidMaxTokens
from pagedcore_http.events import encode, frame_text
from pagedcore_openai import fields as known
from pagedcore_openai.calls import Call
from pagedcore_openai.errors import DONE, FieldNotSupported
from pagedcore_openai.prompts import messages_of
from pagedcore_openai.wire import chat_logprobs, usage_of


class ChatCall(Call):
    """A chat to complete."""

    form: ClassVar = known.CHAT
    prefix: ClassVar = "chatcmpl"
    prompt_field: ClassVar = "messages"

    def prompts_of(self, fields: Mapping[str, Any]) -> list[Any]:
        """Return the chat."""
        return [messages_of(known.required(fields, "messages", "a list of messages"))]

    def params_of(self, fields: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters; ``max_completion_tokens`` is the newer name of ``max_tokens``."""
        limits = [fields[name] for name in ("max_completion_tokens", "max_tokens") if name in fields]
        if len(limits) == 2 and limits[0] != limits[1]:
            raise InvalidMaxTokens("max_tokens", limits[1], "the same as max_completion_tokens, or null")
        if known.flag(fields, "logprobs"):
            limits_of_logprobs = {"logprobs": fields.get("top_logprobs", 0)}
        elif fields.get("top_logprobs"):
            raise FieldNotSupported("top_logprobs", fields["top_logprobs"], "null without logprobs: true")
        else:
            limits_of_logprobs = {}
        return known.params_of(fields, max_tokens=limits[0] if limits else None, **limits_of_logprobs)

    async def body(self, outputs: list[RequestOutput]) -> str:
        """Return the chat completion."""
        (output,) = outputs
        choices = [await self._choice(one) for one in output.outputs]
        told: dict[str, Any] = {"usage": usage_of([output.usage])}
        if self.has_token_ids:
            told["prompt_token_ids"] = output.prompt_token_ids
        return f'{self._head("chat.completion")}{",".join(choices)}],{encode(told)[1:]}'

    async def _choice(self, one: CompletionOutput) -> str:
        message = {"role": "assistant", "content": one.text, "refusal": None}
        head = encode({"index": one.index, "message": message, "finish_reason": one.finish_reason,
                       **({"token_ids": one.token_ids} if self.has_token_ids else {})})
        return f'{head[:-1]},"logprobs":{await self._logprobs(one)}}}'

    async def _logprobs(self, one: CompletionOutput | Delta) -> str:
        if one.logprobs is None:
            return "null"
        return f'{{"content":{await chat_logprobs(one.logprobs, self.served.spell)},"refusal":null}}'

    def _head(self, kind: str) -> str:
        head = encode({"id": self.id, "object": kind, "created": self.created, "model": self.served.name})
        return f'{head[:-1]},"choices":['

    async def events(self) -> AsyncGenerator[str, None]:
        """Yield chunks: for each completion one with the role, those with text, one with the reason of its end."""
        head, has_begun = self._head("chat.completion.chunk"), set[int]()
        tail = '],"usage":null}' if self.has_usage else "]}"
        async with aclosing(self.deltas()) as deltas:
            async for _, delta in deltas:
                choices = []
                if delta.index not in has_begun:
                    has_begun.add(delta.index)
                    choices.append(_chunk(delta.index, '{"role":"assistant","content":""}'))
                if delta.text or delta.token_ids:
                    choices.append(await self._text_chunk(delta))
                if delta.finish_reason is not None:
                    choices.append(_chunk(delta.index, "{}", delta.finish_reason))
                text = "".join([frame_text(f"{head}{choice}{tail}") for choice in choices])
                yield text if delta.usage is None else text + self._end(head, delta.usage)

    async def _text_chunk(self, delta: Delta) -> str:
        more = f',"token_ids":{encode(delta.token_ids)}' if self.has_token_ids else ""
        return _chunk(delta.index, encode({"content": delta.text}), None, await self._logprobs(delta), more)

    def _end(self, head: str, usage: Usage) -> str:
        return (frame_text(f'{head}],"usage":{encode(usage_of([usage]))}}}') if self.has_usage else "") + DONE


def _chunk(index: int, delta: str, reason: str | None = None, logprobs: str = "null", more: str = "") -> str:
    return f'{{"index":{index},"delta":{delta},"logprobs":{logprobs},"finish_reason":{encode(reason)}{more}}}'
