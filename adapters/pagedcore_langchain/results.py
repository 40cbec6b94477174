"""Outputs of the engine as LangChain's types: generations, chunks, usage and metadata. Never calls an engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn

from langchain_core.messages import AIMessage, AIMessageChunk, InvalidToolCall, ToolCall, ToolCallChunk
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, Generation, GenerationChunk

from pagedcore import CompletionOutput, Delta, RequestOutput, TokenLogprobs, TokenText, Usage
from pagedcore.tool_calls.chat_format import ChatTurn, CompletionReader
from pagedcore.tool_calls.events import ArgumentsDelta, ChatEvent, ContentDelta, ReasoningDelta, ToolCallStart

Spell = Callable[[int], TokenText]
"""Returns what a token stands for."""
_LEAST_LOGPROB: Final = -9999.0
"""OpenAI's value for an impossible token; JSON has no infinity."""


def usage_metadata(usage: Usage, num_reasoning_tokens: int = 0) -> UsageMetadata:
    """Return LangChain's usage; "cache_read" is the part of the input that was found in the cache."""
    told = UsageMetadata(
        input_tokens=usage.num_prompt_tokens,
        output_tokens=usage.num_output_tokens,
        total_tokens=usage.num_prompt_tokens + usage.num_output_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.num_cached_tokens),
    )
    if num_reasoning_tokens:
        told["output_token_details"] = OutputTokenDetails(reasoning=num_reasoning_tokens)
    return told


def chat_result(output: RequestOutput, model: str, spell: Spell, turn: ChatTurn) -> ChatResult:
    """Return one generation per completion; the first one has the usage of all and the prompt's log-probabilities.

    Raises ``TextFailed``: the parser of the model's calls failed.
    """
    readers = [turn.reader() for _ in output.outputs]
    generations = [_chat_generation(one, model, spell, reader)
                   for one, reader in zip(output.outputs, readers, strict=True)]
    for generation, one in zip(generations, output.outputs, strict=True):
        generation.generation_info = (generation.generation_info or {}) | _times(output, one.itl_s)
    generations[0].generation_info = (generations[0].generation_info or {}) | _prompt_info(output, spell)
    usage = usage_metadata(output.usage, sum(reader.num_reasoning_tokens for reader in readers))
    first = generations[0].message
    if isinstance(first, AIMessage):
        first.usage_metadata = usage
    return ChatResult(generations=generations, llm_output={"token_usage": _token_usage(usage), "model_name": model})


def _chat_generation(
    completion: CompletionOutput, model: str, spell: Spell, reader: CompletionReader
) -> ChatGeneration:
    parsed = reader.read_all(completion)
    info = _info(reader.reason(completion), completion.logprobs or (), spell) | _stop(completion)
    message = AIMessage(content=parsed.content, response_metadata=_origin(model))
    for call in parsed.tool_calls:
        arguments = _arguments(call.arguments) if call.is_complete else None
        if arguments is None:
            message.invalid_tool_calls.append(InvalidToolCall(
                type="invalid_tool_call", id=call.id, name=call.name, args=call.arguments,
                error="the arguments are no JSON object, or two of its members have one name"))
        else:
            message.tool_calls.append(ToolCall(type="tool_call", id=call.id, name=call.name, args=arguments))
    if parsed.reasoning:
        message.additional_kwargs["reasoning_content"] = parsed.reasoning
    return ChatGeneration(message=message, generation_info=info)


def _stop(ended: CompletionOutput | Delta) -> dict[str, Any]:
    return {} if ended.stop_reason is None else {"stop_reason": ended.stop_reason}


def _arguments(text: str) -> dict[str, Any] | None:
    """Return arguments; ``None`` if two readers of their text could take different ones, or none."""
    try:
        arguments = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("two members have one name")
    return members


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)  # NaN and infinities, which JSON does not have


def text_generations(output: RequestOutput, model: str, spell: Spell) -> list[Generation]:
    """Return one generation per completion; the first one's info has the usage of all, and the prompt's."""
    generations = [
        Generation(text=one.text, generation_info=_info(one.finish_reason, one.logprobs or (), spell)
                   | _stop(one) | _times(output, one.itl_s))
        for one in output.outputs
    ]
    generations[0].generation_info = {
        **(generations[0].generation_info or {}), **_origin(model), "usage_metadata": usage_metadata(output.usage),
        **_prompt_info(output, spell),
    }
    return generations


def llm_output(outputs: list[RequestOutput], model: str) -> dict[str, Any]:
    """Sum the usage of several requests."""
    each = [_token_usage(usage_metadata(output.usage)) for output in outputs]
    total = {name: sum(one[name] for one in each) for name in (each[0] if each else {})}
    return {"token_usage": total, "model_name": model}


class Chunks:
    """Turns the deltas of one completion into chunks, whose sum is equal to the whole completion.

    Invariant: log-probabilities of tokens without text yet are in the next chunk.
    """

    def __init__(self, model: str, spell: Spell) -> None:
        self._model = model
        self._spell = spell
        self._logprobs: tuple[TokenLogprobs, ...] = ()

    def text(self, delta: Delta) -> GenerationChunk | None:
        """Return the next chunk of a completion, or ``None`` if it has no text yet.

        Raises:
            RequestFailed: the completion ended with an error.
        """
        info = self._next_info(delta, delta.finish_reason, bool(delta.text))
        if info is None:
            return None
        if delta.usage is not None:
            info |= {**_origin(self._model), "usage_metadata": usage_metadata(delta.usage)}
        return GenerationChunk(text=delta.text, generation_info=info or None)

    def _next_info(self, delta: Delta, reason: str | None, is_due: bool) -> dict[str, Any] | None:
        if delta.error is not None:
            raise delta.error
        self._logprobs += delta.logprobs or ()
        if not is_due and reason is None:
            return None
        logprobs, self._logprobs = self._logprobs, ()
        times = _times(delta, delta.itl_s)
        return _info(reason, logprobs, self._spell) | _stop(delta) | _prompt_info(delta, self._spell) | times


class ChatChunks(Chunks):
    """The same for the chunks of a message, with the calls and the reasoning in it."""

    def __init__(self, model: str, spell: Spell, turn: ChatTurn) -> None:
        super().__init__(model, spell)
        self._reader = turn.reader()

    def message(self, delta: Delta) -> ChatGenerationChunk | None:
        """Return the next chunk of a message, or ``None`` if there is nothing in it yet.

        Raises:
            RequestFailed: the completion ended with an error, or the parser of the model's calls failed.
        """
        events = self._reader.read(delta) if delta.error is None else []
        info = self._next_info(delta, self._reader.reason(delta), bool(events))
        if info is None:
            return None
        message = AIMessageChunk(
            content="".join(event.text for event in events if isinstance(event, ContentDelta)),
            tool_call_chunks=_call_chunks(events),
        )
        if reasoning := "".join(event.text for event in events if isinstance(event, ReasoningDelta)):
            message.additional_kwargs["reasoning_content"] = reasoning
        if delta.usage is not None:
            message.usage_metadata = usage_metadata(delta.usage, self._reader.num_reasoning_tokens)
            message.response_metadata = _origin(self._model)
            message.chunk_position = "last"
        return ChatGenerationChunk(message=message, generation_info=info or None)


def _call_chunks(events: Iterable[ChatEvent]) -> list[ToolCallChunk]:
    """Return one chunk for each call: LangChain joins those of two messages, and not those of one."""
    chunks: dict[int, ToolCallChunk] = {}
    for event in events:
        match event:
            case ToolCallStart(index, id_, name):
                chunks[index] = ToolCallChunk(type="tool_call_chunk", index=index, id=id_, name=name, args="")
            case ArgumentsDelta(index, text):
                empty = ToolCallChunk(type="tool_call_chunk", index=index, id=None, name=None, args="")
                chunk = chunks.setdefault(index, empty)
                chunk["args"] = (chunk["args"] or "") + text
    return list(chunks.values())


def _origin(model: str) -> dict[str, Any]:
    return {"model_name": model, "model_provider": "pagedcore"}


def _info(finish_reason: str | None, logprobs: Iterable[TokenLogprobs], spell: Spell) -> dict[str, Any]:
    info: dict[str, Any] = {"finish_reason": finish_reason} if finish_reason else {}
    if content := [_scored(token, spell) for token in logprobs]:
        info["logprobs"] = {"content": content}
    return info


def _times(output: RequestOutput | Delta, itl_s: Iterable[float]) -> dict[str, Any]:
    if (metrics := output.metrics) is None:
        return {}
    return {"queue_s": metrics.queue_s, "ttft_s": metrics.ttft_s, "itl_s": list(itl_s)}


def _prompt_info(output: RequestOutput | Delta, spell: Spell) -> dict[str, Any]:
    if output.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": [None if one is None else _scored(one, spell) for one in output.prompt_logprobs]}


def _scored(token: TokenLogprobs, spell: Spell) -> dict[str, Any]:
    top = [_token(token_id, logprob, spell) for token_id, logprob in token.top]
    return {**_token(token.token_id, token.logprob, spell), "top_logprobs": top}


def _token(token_id: int, logprob: float, spell: Spell) -> dict[str, Any]:
    text = spell(token_id)
    return {
        "token": text.text, "bytes": None if text.utf8 is None else list(text.utf8),
        "logprob": max(logprob, _LEAST_LOGPROB), "token_id": token_id,
    }


def _token_usage(usage: UsageMetadata) -> dict[str, int]:
    return {"prompt_tokens": usage["input_tokens"], "completion_tokens": usage["output_tokens"],
            "total_tokens": usage["total_tokens"]}
