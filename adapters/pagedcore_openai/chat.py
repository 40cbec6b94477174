"""``/v1/chat/completions``: the call, the whole response, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any, ClassVar

from pagedcore import CompletionOutput, Delta, RequestOutput, SamplingParams, Usage
from pagedcore.errors import InvalidGrammar, InvalidMaxTokens, InvalidTools, PagedcoreError, PromptTooLong
from pagedcore.tool_calls.chat_format import CompletionReader
from pagedcore.tool_calls.events import ChatEvent, collect
from pagedcore_http.events import encode, frame_text, stop_of
from pagedcore_http.salts import Caller
from pagedcore_openai import fields as known
from pagedcore_openai.calls import Call, ServedModel
from pagedcore_openai.chat_prompt import read_chat
from pagedcore_openai.errors import DONE, FieldNotSupported
from pagedcore_openai.tools import delta_of, from_functions, message_of, of_functions
from pagedcore_openai.wire import UsageSoFar, chat_logprobs, stop_text, usage_of


class ChatCall(Call):
    """A chat to complete."""

    form: ClassVar = known.CHAT
    prefix: ClassVar = "chatcmpl"

    def __init__(self, served: ServedModel, fields: Mapping[str, Any], caller: Caller) -> None:
        in_tools = from_functions(fields)
        self._is_older = in_tools is not fields
        try:
            super().__init__(served, in_tools, caller)
        except InvalidTools as error:
            raise (of_functions(error) if self._is_older else error) from None

    def blame(self, error: PagedcoreError) -> PagedcoreError:
        """Return an error with the field that it is about, in the form that the caller has used."""
        told = super().blame(error)
        return of_functions(told) if self._is_older and isinstance(told, InvalidGrammar | PromptTooLong) else told

    def names(self) -> Mapping[str, str]:
        """Return the names of messages, and of the numbers that have others in chats."""
        is_newer = "max_completion_tokens" in self.fields and "max_tokens" not in self.fields
        return {"prompt": "messages", "logprobs": "top_logprobs",
                **({"max_tokens": "max_completion_tokens"} if is_newer else {})}

    def prompts_of(self, fields: Mapping[str, Any]) -> list[Any]:
        """Return the chat."""
        given = known.required(fields, "messages", "a list of messages")
        return [read_chat(given, fields, self.served.engine.chat_format)]

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
        params = known.params_of(fields, max_tokens=limits[0] if limits else None, **limits_of_logprobs)
        return self.turn_of(self.prompts[0], fields, params)

    async def body(self, outputs: list[RequestOutput]) -> str:
        """Return the chat completion."""
        (output,) = outputs
        readers = [self.turn.reader() for _ in output.outputs]
        choices = [await self._choice(one, reader) for one, reader in zip(output.outputs, readers, strict=True)]
        told: dict[str, Any] = {"usage": usage_of([output.usage], _num_reasoning_tokens(readers))}
        if self.has_token_ids:
            told["prompt_token_ids"] = output.prompt_token_ids
        return f'{self._head("chat.completion")}{",".join(choices)}],{encode(told)[1:]}'

    def _reason(self, reader: CompletionReader, ended: CompletionOutput | Delta) -> str | None:
        reason = reader.reason(ended)
        return "function_call" if self._is_older and reason == "tool_calls" else reason

    async def _choice(self, one: CompletionOutput, reader: CompletionReader) -> str:
        parsed = collect(await self.events_of(one, reader))
        message = message_of(parsed, is_older=self._is_older)
        head = encode({"index": one.index, "message": message, "finish_reason": self._reason(reader, one),
                       **stop_of(one), **({"token_ids": one.token_ids} if self.has_token_ids else {})})
        return f'{head[:-1]},"logprobs":{await self._logprobs(one)}}}'

    async def _logprobs(self, one: CompletionOutput | Delta) -> str:
        if one.logprobs is None:
            return "null"
        return f'{{"content":{await chat_logprobs(one.logprobs, self.served.spell)},"refusal":null}}'

    def _head(self, kind: str) -> str:
        head = encode({"id": self.id, "object": kind, "created": self.created, "model": self.served.name,
                       **self.served.fingerprint})
        return f'{head[:-1]},"choices":['

    async def events(self) -> AsyncGenerator[str, None]:
        """Yield chunks: for each completion one with the role, those with text, one with the reason of its end."""
        head, readers = self._head("chat.completion.chunk"), dict[int, CompletionReader]()
        usage = UsageSoFar(self.usages)
        async with aclosing(self.deltas()) as deltas:
            async for _, delta in deltas:
                choices = []
                if delta.index not in readers:
                    readers[delta.index] = self.turn.reader()
                    choices.append(_chunk(delta.index, '{"role":"assistant","content":""}'))
                choices += await self._chunks(delta, readers[delta.index].read(delta))
                if delta.finish_reason is not None:
                    reason = self._reason(readers[delta.index], delta)
                    choices.append(_chunk(delta.index, "{}", reason, more=stop_text(delta)))
                tail = usage.tail(0, delta)
                text = "".join([frame_text(f"{head}{choice}{tail}") for choice in choices])
                yield text if delta.usage is None else text + self._end(head, delta.usage, readers.values())

    async def _chunks(self, delta: Delta, events: list[ChatEvent]) -> list[str]:
        """Return the chunks of a delta; the first one has its tokens and their log-probabilities."""
        texts = [text for event in events if (text := delta_of(event, is_older=self._is_older)) is not None]
        if not texts and delta.token_ids and (self.turn.is_plain or self.has_token_ids or delta.logprobs is not None):
            texts.append('{"content":""}')
        more = f',"token_ids":{encode(delta.token_ids)}' if self.has_token_ids else ""
        chunks = [_chunk(delta.index, text, None, await self._logprobs(delta), more) for text in texts[:1]]
        return chunks + [_chunk(delta.index, text) for text in texts[1:]]

    def _end(self, head: str, usage: Usage, readers: Iterable[CompletionReader]) -> str:
        told = encode(usage_of([usage], _num_reasoning_tokens(readers)))
        return (frame_text(f'{head}],"usage":{told}}}') if self.has_usage else "") + DONE


def _num_reasoning_tokens(readers: Iterable[CompletionReader]) -> int:
    return sum(reader.num_reasoning_tokens for reader in readers)


def _chunk(index: int, delta: str, reason: str | None = None, logprobs: str = "null", more: str = "") -> str:
    return f'{{"index":{index},"delta":{delta},"logprobs":{logprobs},"finish_reason":{encode(reason)}{more}}}'
