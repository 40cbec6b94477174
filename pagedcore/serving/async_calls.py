"""Calls of an ``AsyncEngine`` that are awaited whole, and the end of a request by its id."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Unpack

from pagedcore.errors import RequestTimeout
from pagedcore.outputs import RequestOutput
from pagedcore.protocols import ChatMessage
from pagedcore.request_options import TIMEOUT, OptionKeywords, read_options
from pagedcore.requests.input_processor import Prompt
from pagedcore.requests.text_verbs import TextVerbs
from pagedcore.sampling_params import SamplingParams
from pagedcore.serving.commands import Commands
from pagedcore.serving.host_program import running_loop
from pagedcore.serving.stream import AwaitableFuture, CompletionFuture, awaitable
from pagedcore.tokenizer.chat import Chat
from pagedcore.tool_calls.chat_format import ChatFormat
from pagedcore.tool_calls.chat_reply import KEYWORDS, ChatReply, begin_chat, read_reply


class AsyncCalls(TextVerbs):
    """The part of an ``AsyncEngine`` that completes prompts whole."""

    chat_format: ChatFormat
    _commands: Commands

    @abstractmethod
    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, wait_for_room: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> AwaitableFuture[RequestOutput]:
        """As ``AsyncEngine`` has it."""

    @staticmethod
    def awaitable(running: Future[RequestOutput]) -> AwaitableFuture[RequestOutput]:
        """Return what ``submit`` returns, for a subclass that completes elsewhere; it is cancelled with ``running``."""
        return awaitable(running)

    async def complete(
        self, prompt: Prompt, params: SamplingParams | None = None, *, timeout_s: float | None = None,
        wait_for_room: bool = False, **options: Unpack[OptionKeywords],
    ) -> RequestOutput:
        """Complete one prompt and return its whole output; cancelling this aborts the request.

        Prompt, parameters and options are as for ``submit``, and a completion that failed is in the output likewise.

        Args:
            timeout_s: longest time from here to the end, in seconds; ``None``: no limit.
            wait_for_room: as for ``submit``.

        Raises:
            InvalidRequest, EngineOverloaded, EngineClosed, QueueTimeout: as ``submit``.
            RequestTimeout: it took longer than ``timeout_s``; the request is aborted.
            NoEventLoop: no event loop of asyncio runs here.
        """
        running_loop()
        limit_s = TIMEOUT.check("timeout_s", timeout_s)
        read_options(options, "timeout_s", "wait_for_room")
        future = self.submit(prompt, params, wait_for_room=wait_for_room, **options)
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise RequestTimeout(limit_s or 0.0) from None
        finally:
            # Why: if the task is cancelled, that reaches the future by way of its event loop, which may be at its end.
            future.cancel()

    async def chat(
        self, messages: Sequence[ChatMessage] | Chat, params: SamplingParams | None = None, *,
        tools: Sequence[Mapping[str, Any]] | None = None, tool_choice: Any = None, parallel_tool_calls: bool = True,
        template_arguments: Mapping[str, Any] | None = None, reasoning_effort: str | None = None,
        timeout_s: float | None = None, wait_for_room: bool = False, **options: Unpack[OptionKeywords],
    ) -> ChatReply:
        """Complete one chat and return what the model says; arguments as ``Engine.chat`` and ``complete``.

        Raises:
            RequestFailed: a completion failed; otherwise as ``complete``.
        """
        read_options(options, "timeout_s", "wait_for_room", *KEYWORDS)
        prompt, turn = begin_chat(
            self.chat_format, messages, params, tools=tools, tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls, template_arguments=template_arguments,
            reasoning_effort=reasoning_effort)
        return read_reply(turn, await self.complete(
            prompt, turn.params, timeout_s=timeout_s, wait_for_room=wait_for_room, **options))

    async def abort(self, request_id: str, *, cache_salt: str | bytes | None = None) -> bool:
        """End a request now; return whether one was live. Its reader gets the end with the reason "abort".

        Args:
            request_id: the engine's own, of any delta, or the label that its caller gave it, also while it waits for
                room; then its reader gets ``RequestAborted``.
            cache_salt: that the caller gave with the label.

        Raises ``EngineClosed``, and ``InvalidRequest`` for an id that is no text, or a salt that is none.
        """
        loop = running_loop()
        salt = read_options({"cache_salt": cache_salt}).salt
        result = CompletionFuture[bool]()
        self._commands.put(lambda worker: result.complete(worker.abort(request_id, salt)), result)
        return await asyncio.wrap_future(result.future, loop=loop)
