"""One call of an endpoint that completes prompts: from its fields to the engine, whole or delta by delta.

The engine validates prompts and parameters; chat, text and response calls say how they are written.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Mapping
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Final

from pagedcore import AsyncEngine, Chat, CompletionOutput, Delta, RequestOutput, SamplingParams
from pagedcore.errors import (
    GrammarFailed,
    InvalidGrammar,
    InvalidMaxTokens,
    InvalidRequest,
    PagedcoreError,
    PromptTooLong,
    RequestTimeout,
)
from pagedcore.request_options import OptionKeywords
from pagedcore.tool_calls.chat_format import CompletionReader
from pagedcore.tool_calls.events import ChatEvent
from pagedcore_http.salts import Caller
from pagedcore_openai import fields as known
from pagedcore_openai import structured
from pagedcore_openai.errors import ChunkStream, CompletionTooLong, Refused, renamed, with_names
from pagedcore_openai.stored import StoredResponses
from pagedcore_openai.times import Timed
from pagedcore_openai.wire import Spell

_READ_AT_ONCE: Final = 4096
"""Characters of a completion that are read for calls without leaving the event loop."""
_NAMED_TOKENS: Final = 2**16
"""Tokens whose names are kept."""


@dataclass(frozen=True)
class ServedModel:
    """A model that calls may name."""

    name: str
    engine: AsyncEngine
    max_model_len: int
    spell: Spell
    created: int = field(default_factory=lambda: int(time.time()))
    stored: StoredResponses = field(default_factory=StoredResponses)
    lora: str | None = None
    """The adapter that its name stands for."""

    @property
    def fingerprint(self) -> dict[str, str]:
        """The field of an answer that says which weights the engine has, where they were loaded later."""
        return {"system_fingerprint": str(self.engine.weights)} if self.engine.weights.number else {}

    @classmethod
    def of(cls, name: str, engine: AsyncEngine) -> ServedModel:
        """Look at an engine, which takes a step at most. Raises ``EngineClosed``."""
        spell = lru_cache(_NAMED_TOKENS)(engine.token_text)
        return cls(name, engine, engine.stats().max_model_len, spell)


class Call(Timed, ABC):
    """A call whose fields were read; making one raises ``InvalidRequest`` for what is refused before the engine."""

    form: ClassVar[known.Form]
    prefix: ClassVar[str]
    stream_class: ClassVar[type[ChunkStream]] = ChunkStream

    def __init__(self, served: ServedModel, fields: Mapping[str, Any], caller: Caller) -> None:
        self.served = served
        self.fields = fields
        self.id = f"{self.prefix}-{secrets.token_hex(16)}"
        self.created = int(time.time())
        self.is_stream = known.flag(fields, "stream")
        self.usages = known.usages_of(fields)
        self.has_token_ids = known.flag(fields, "return_token_ids")
        self.timeout_s = known.timeout_of(fields)
        self.options = known.options_of(fields, caller, self.id, served.lora)
        self.owner: object = None
        """Kept for the time of the call, so that the live view knows whose requests have its salt."""
        try:
            self.prompts = self.prompts_of(fields)
            self.params = self.params_of(fields)
        except InvalidRequest as error:
            raise self.with_own_names(error) from None

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return self.usages is not known.Usages.NONE

    @abstractmethod
    def prompts_of(self, fields: Mapping[str, Any]) -> list[Any]:
        """Return what is to be completed: text, token ids or chats."""

    @abstractmethod
    def params_of(self, fields: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of all prompts."""

    def turn_of(self, prompt: Any, fields: Mapping[str, Any], params: SamplingParams) -> SamplingParams:
        """Note how the completions of a chat are read, and return the parameters that constrain them.

        Raises ``InvalidTools``.
        """
        is_parallel = known.flag(fields, "parallel_tool_calls", default=True)
        chat_format = self.served.engine.chat_format
        self.turn = chat_format.turn(prompt, params, fields.get("tool_choice"), is_parallel)
        return self.turn.params

    def names(self) -> Mapping[str, str]:
        """Return what this body calls otherwise than the engine does."""
        return {}

    def with_own_names(self, error: Refused) -> Refused:
        """Return a refusal that speaks of the body as its caller has written it."""
        return with_names(error, self.names())

    async def events_of(self, completion: CompletionOutput, reader: CompletionReader) -> list[ChatEvent]:
        """Return the events of a whole completion of a chat. Raises ``TextFailed``."""
        read = reader.read_completion
        # Why: long arguments take a microsecond a character, in which the event loop serves other calls.
        is_short = self.turn.is_plain or len(completion.text) < _READ_AT_ONCE
        return read(completion) if is_short else await asyncio.to_thread(read, completion)

    def blame(self, error: PagedcoreError) -> PagedcoreError:
        """Return an error of the engine as one that names the field of the body which it is about."""
        told = self._of_call(self.as_asked(error))
        return self.with_own_names(told) if isinstance(told, InvalidRequest) else told

    def _of_call(self, error: PagedcoreError) -> PagedcoreError:
        match error:
            case GrammarFailed():
                # Why no failure of ours: asked for again, it fails again.
                return InvalidGrammar(structured.field_of(self.fields), "one that fails while it is used",
                                      "one that this model's tokens can follow", f"{error}.", is_described=True)
            case InvalidGrammar():
                return self._of_field(error)
            case PromptTooLong() if self.fields.get("truncation") == "auto":
                return renamed(error, error.what, advice="Nothing is cut off with truncation auto either: send less.")
            case InvalidMaxTokens() if (self.params.max_tokens or 0) < self.served.max_model_len:
                return CompletionTooLong.of(error)
        return error

    def _of_field(self, error: InvalidGrammar) -> InvalidGrammar:
        chat, place = self.prompts[0], None
        if type(chat) is Chat:
            place = structured.refused_tool(error, self.params.structured, chat, self.fields.get("tool_choice"))
        if place is None:
            return structured.of_field(error, structured.field_of(self.fields))
        given = f"the schema of the tool {chat.functions[place]['name']}"
        return structured.of_field(error, f"tools[{place}].function.parameters", given)

    @contextmanager
    def _blaming(self) -> Generator[None, None, None]:
        try:
            yield
        except PagedcoreError as error:
            if (told := self.blame(error)) is error:
                raise
            raise told from error

    @abstractmethod
    async def body(self, outputs: list[RequestOutput]) -> str:
        """Return the whole response as JSON."""

    @abstractmethod
    def events(self) -> AsyncGenerator[str, None]:
        """Yield the events of the response."""

    async def whole(self) -> str:
        """Complete and return the response as JSON; cancelling this aborts the requests.

        Raises:
            PagedcoreError: as from ``AsyncEngine.submit``, or the first error of a completion.
        """
        outputs = await self.complete()
        return await self.body(outputs)

    async def complete(self, params: SamplingParams | None = None) -> list[RequestOutput]:
        """Complete all prompts, with other parameters if they are given. Raises as ``whole``."""
        with self._blaming():
            outputs = await self._complete(params or self.params)
            for output in outputs:
                output.raise_for_error()
        return outputs

    async def _complete(self, params: SamplingParams) -> list[RequestOutput]:
        futures: list[Future[RequestOutput]] = []
        try:
            async with asyncio.timeout(self.left_s):
                for place, prompt in enumerate(self.prompts):
                    # Why: a full queue refuses the first and so the call; the others wait for their room.
                    futures.append(self.served.engine.submit(prompt, params, wait_for_room=place > 0,
                                                             **self._options_at(place)))
                    # Why: each may take a millisecond or two to tokenise.
                    await asyncio.sleep(0)
                return await asyncio.gather(*map(asyncio.wrap_future, futures))
        except TimeoutError:
            raise RequestTimeout(self.timeout_s or 0.0) from None
        finally:
            for future in futures:
                future.cancel()

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Complete, and yield deltas with the place of their prompt; closing this aborts the requests.

        Raises:
            PagedcoreError: as from ``AsyncEngine.generate``, or the first error of a completion.
        """
        streams = [
            self.served.engine.generate(prompt, self.params, timeout_s=self.left_s, wait_for_room=place > 0,
                                        **self._options_at(place))
            for place, prompt in enumerate(self.prompts)
        ]
        async with aclosing(_merge(streams) if len(streams) > 1 else _only(streams[0])) as pairs:
            with self._blaming():
                async for place, delta in pairs:
                    if delta.error is not None:
                        raise delta.error
                    yield place, delta

    def _options_at(self, place: int) -> OptionKeywords:
        # Why: labels are unique among the requests of a salt.
        options = self.options_left
        return options if not place else {**options, "request_id": f"{options['request_id']}-{place}"}


async def _only(stream: AsyncGenerator[Delta, None]) -> AsyncGenerator[tuple[int, Delta], None]:
    async with aclosing(stream) as deltas:
        async for delta in deltas:
            yield 0, delta


async def _merge(streams: list[AsyncGenerator[Delta, None]]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yield deltas of all streams as they come; closing this closes them."""
    pending = {asyncio.ensure_future(_next(stream)): place for place, stream in enumerate(streams)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=pending.__getitem__):
                place, delta = pending.pop(task), task.result()
                if delta is not None:
                    pending[asyncio.ensure_future(_next(streams[place]))] = place
                    yield place, delta
    finally:
        for task in pending:
            task.cancel()
        # Why: a generator cannot be closed while it runs.
        await asyncio.gather(*pending, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[Delta, None]) -> Delta | None:
    async for delta in stream:
        return delta
    return None
