"""An engine on a thread of its own, usable from any event loop, from several at once, or from none.

Owns the callers' side: commands go into a queue, output comes out of bounded streams or futures. No caller's loop ever
runs engine code, and the engine needs no loop; what runs on the thread is in ``engine_loop``.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from functools import partial
from typing import Any, Final, TypeVar, Unpack

from pagedcore.config.field_rules import invalid_setting, seconds
from pagedcore.engine.engine import Engine
from pagedcore.errors import EngineClosed, ForkedProcess
from pagedcore.outputs import Delta, RequestOutput, TokenText
from pagedcore.plugins.manager import PluginManager
from pagedcore.protocols import MonotonicClock
from pagedcore.request_options import OptionKeywords, RequestOptions
from pagedcore.requests.input_processor import Prompt
from pagedcore.requests.request import Request
from pagedcore.requests.stats import EngineStats
from pagedcore.requests.validation import validate_timeout
from pagedcore.sampling_params import SamplingParams
from pagedcore.serving.async_session import AsyncSession
from pagedcore.serving.engine_loop import Commands, EngineLoop, StreamFlusher
from pagedcore.serving.health import Health
from pagedcore.serving.long_prompts import LongPrompts, is_long
from pagedcore.serving.stream import CompletionFuture, OutputSink, Stream, StreamReader

_STREAM_INTERVAL: Final = seconds(0, 1)
STREAM_INTERVAL_S: Final = 0.05
"""How often a reader gets new text, in seconds: twenty times a second looks continuous."""
_T = TypeVar("_T")


class AsyncEngine(AbstractContextManager["AsyncEngine"], AbstractAsyncContextManager["AsyncEngine"]):
    """Continuous batching for concurrent callers.

    ``generate`` is a real async generator function: leaving it early in any way (``aclose``, cancellation, an
    exception, losing the last reference) aborts its request. A plain ``break`` out of ``async for`` leaves the
    generator to the garbage collector; wrap it in ``contextlib.aclosing`` to abort at once.

    Invariant: every stream that was handed out ends, with a finish reason or an error.
    """

    def __init__(self, engine: Engine, *, stream_interval_s: float = STREAM_INTERVAL_S) -> None:
        """Take over ``engine``: no other code may call it from now on.

        A reader gets its first and last delta at once, and those between, joined, at times ``stream_interval_s`` apart,
        the same for all readers, and farther apart if those are more than fifty; 0: every delta. Raises
        ``InvalidConfig`` if it is not a number of seconds from 0 to 1.
        """
        _STREAM_INTERVAL.check("stream_interval_s", stream_interval_s, invalid_setting)
        self._input_processor = engine.input_processor
        self._read_session = engine.sessions.read
        self._commands = Commands()
        self._long_prompts = LongPrompts(self._commands, engine.input_processor.max_num_waiting)
        worker = EngineLoop(engine, self._commands, StreamFlusher(stream_interval_s, MonotonicClock()))
        self._progress = worker.progress
        # Why: this thread has built the engine; its helpers would slow down those of the engine's own.
        engine.idle()
        self._thread = threading.Thread(target=worker.run, name="pagedcore-engine", daemon=True)
        # Why: the thread must not keep this object alive, so that losing it closes the engine.
        self._finalizer = weakref.finalize(self, _close, self._commands, self._thread, self._long_prompts)
        self._thread.start()

    @classmethod
    def from_pretrained(
        cls, model: Any, *, stream_interval_s: float = STREAM_INTERVAL_S, **settings: Any
    ) -> AsyncEngine:
        """Build an engine and put it on its own thread; arguments and errors as ``Engine.from_pretrained``."""
        _STREAM_INTERVAL.check("stream_interval_s", stream_interval_s, invalid_setting)
        return cls(Engine.from_pretrained(model, **settings), stream_interval_s=stream_interval_s)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, timeout_s: float | None = None,
        wait_for_room: bool = False, **options: Unpack[OptionKeywords],
    ) -> AsyncGenerator[Delta, None]:
        """Complete one prompt, delta by delta; the last delta of each completion has a finish reason.

        The very last delta also has ``usage``, the tokens that the request took, and ``prompt_logprobs`` if asked for.
        Prompt, parameters and options are as for ``Engine.add_request``.

        Args:
            timeout_s: longest time from here to the last delta, in seconds; ``None``: no limit.
            wait_for_room: wait when the waiting queue is full, first come, first served, instead of being refused.

        Raises:
            InvalidRequest: the request is refused, at the first iteration.
            EngineOverloaded: the waiting queue is full.
            EngineClosed: the engine was closed before the completion was.
            RequestTimeout: it took longer than ``timeout_s``; the request is aborted.
        """
        reader = self._open(prompt, params, RequestOptions(**options), timeout_s, wait_for_room)
        try:
            while deltas := await reader.next():
                for delta in deltas:
                    yield delta
        finally:
            reader.close()

    def generate_sync(
        self, prompt: Prompt, params: SamplingParams | None = None, *, timeout_s: float | None = None,
        wait_for_room: bool = False, **options: Unpack[OptionKeywords],
    ) -> Generator[Delta, None, None]:
        """Do the same without an event loop: a plain generator that blocks this thread. Raises as ``generate``."""
        reader = self._open(prompt, params, RequestOptions(**options), timeout_s, wait_for_room)
        try:
            yield from reader
        finally:
            reader.close()

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, wait_for_room: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> Future[RequestOutput]:
        """Send one prompt off and return at once; the future has all its completions when the last one has ended.

        Cheaper than ``generate``, because no reader is woken in between. ``asyncio.wrap_future`` makes the future
        awaitable. Cancelling it aborts the request; losing it does not. Its callbacks run on the engine thread and
        must not block. A completion that failed has the finish reason "error" and its error in the output.

        Raises:
            InvalidRequest: the request is refused; raised by the future if the prompt is long, because it is looked
                at on another thread then.
            EngineOverloaded: the waiting queue is full; raised by the future, or at once for a long prompt.
            EngineClosed: the engine is closed, or, raised by the future, was closed before the end.
        """
        sink, commands = CompletionFuture(), self._commands
        self._accept(prompt, params, RequestOptions(**options), sink, wait_for_room)
        sink.future.add_done_callback(lambda future: _cancel(commands, sink) if future.cancelled() else None)
        return sink.future

    def session(self, params: SamplingParams | None = None, **options: Unpack[OptionKeywords]) -> AsyncSession:
        """Open a conversation at its first use; arguments and errors as ``Engine.session``."""
        return AsyncSession(self, lambda engine: engine.session(params, **options))

    async def import_session(
        self, path: str | os.PathLike[str], *, cache_salt: str | bytes | None = None
    ) -> AsyncSession:
        """Open an exported conversation; errors as ``Engine.import_session``. The file is read on another thread."""
        snapshot = await asyncio.to_thread(self._read_session, path)
        return await AsyncSession(self, lambda engine: engine.sessions.take_in(snapshot, cache_salt)).__aenter__()

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, a chat with its template, as ``generate`` would send them to the model.

        Raises ``InvalidRequest``: ``PromptTooLong`` if the context has no room for the prompt and a completion.
        """
        return self._input_processor.process(prompt, SamplingParams(max_tokens=1), RequestOptions()).token_ids

    def token_text(self, token_id: int) -> TokenText:
        """Say what a token stands for, without waiting. Raises ``InvalidRequest`` outside of the vocabulary."""
        return self._input_processor.token_text(token_id)

    def stats(self, timeout_s: float = 10.0) -> EngineStats:
        """Return the engine's counters as they stand between two steps.

        Raises ``EngineClosed`` if the engine was closed, or its thread did not answer within ``timeout_s`` seconds.
        """
        try:
            return self.send(lambda engine: engine.stats()).result(timeout_s)
        except TimeoutError:
            raise EngineClosed(f"the engine thread did not answer within {timeout_s} seconds.") from None

    def observe(self, plugin: object) -> None:
        """Call the observing hooks of ``plugin`` from now on, on the engine thread; they must not block.

        Raises ``InvalidConfig`` if it has a hook that does not exist, and ``EngineClosed``.
        """
        manager = PluginManager()
        manager.add(plugin, type(plugin).__name__)
        self._commands.put(lambda worker: worker.engine.hooks.add(manager))

    def health(self, *, degraded_after_s: float = 10.0, dead_after_s: float = 60.0) -> Health:
        """Judge whether the engine makes progress, by the seconds since its last step or idle check; never waits.

        While everybody waits for KV blocks that are on their way between the memories there is no step. A long step
        looks like a standstill if it takes more than ``degraded_after_s``; after ``dead_after_s`` waiting is pointless.
        """
        return self._progress.judge(
            is_alive=self._thread.is_alive(), degraded_after_s=degraded_after_s, dead_after_s=dead_after_s
        )

    @property
    def is_alive(self) -> bool:
        """Whether the engine thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Abort everything, end all streams and stop the thread; a second call does nothing."""
        self._finalizer()

    async def aclose(self) -> None:
        """Close without blocking the event loop."""
        await asyncio.to_thread(self.close)

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions, timeout_s: float | None,
        wait_for_room: bool,
    ) -> StreamReader:
        timeout_s, stream = validate_timeout(timeout_s), Stream()
        self._accept(prompt, params, options, stream, wait_for_room)
        return StreamReader(stream, partial(_cancel, self._commands, stream), timeout_s)

    def _accept(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions, sink: OutputSink, may_wait: bool
    ) -> None:
        """Send a request to the engine thread, by way of another one if preparing it takes long."""
        prepare = partial(self._input_processor.process, prompt, params, options)
        if is_long(prompt):
            self._long_prompts.send(prepare, sink, may_wait)
            return
        prepared = prepare()
        self._commands.put(lambda worker: worker.accept(prepared, sink, may_wait))

    def read_turn(self, begin: Callable[[], Request]) -> StreamReader:
        """Read what a session's turn brings forth, which ``begin`` begins on the engine thread."""
        stream = Stream()
        self._commands.put(lambda worker: worker.serve(begin, stream))
        return StreamReader(stream, partial(_cancel, self._commands, stream))

    async def call(self, function: Callable[[Engine], _T]) -> _T:
        """Run a short function on the engine thread, between two steps; return its result or raise its exception.

        Raises ``EngineClosed`` if the engine is closed.
        """
        return await asyncio.wrap_future(self.send(function))

    def send(self, function: Callable[[Engine], _T]) -> Future[_T]:
        """Do the same without waiting for it, from any thread. Raises ``EngineClosed`` if the engine is closed."""
        result: Future[_T] = Future()
        self._commands.put(lambda worker: worker.call(function, result))
        return result


def _cancel(commands: Commands, sink: OutputSink) -> None:
    if isinstance(sink, Stream):
        if sink.has_ended:
            return
        sink.is_cancelled = True
    with suppress(EngineClosed):
        commands.put(lambda worker: worker.cancel_sink(sink))


def _close(commands: Commands, thread: threading.Thread, long_prompts: LongPrompts) -> None:
    try:
        commands.require_process()
    except ForkedProcess:
        # Why: the threads to stop and to wait for are those of another process.
        return
    long_prompts.close()
    with suppress(EngineClosed):
        commands.put(EngineLoop.stop)
    if thread is not threading.current_thread():
        thread.join()
