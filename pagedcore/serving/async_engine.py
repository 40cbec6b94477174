"""An engine on a thread of its own, usable from any event loop, from several at once, or from none.

Owns the callers' side: commands go into a queue, output comes out of bounded streams or futures. No caller's loop ever
runs engine code, and the engine needs no loop; what runs on the thread is in ``engine_loop``.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from functools import partial
from typing import Any, Final, TypeVar, Unpack

from pagedcore.config.field_rules import invalid_setting, seconds
from pagedcore.config.limits import MAX_TIMEOUT_S
from pagedcore.engine.engine import Engine
from pagedcore.engine.new_weights import Running, Way
from pagedcore.errors import EngineClosed, ForkedProcess, NotPicklable
from pagedcore.lazy_names import delegate
from pagedcore.outputs import Delta, Explanation, Quote, RequestOutput, WeightsVersion
from pagedcore.plugins.manager import PluginManager
from pagedcore.protocols import MonotonicClock
from pagedcore.request_options import WAIT, OptionKeywords, read_options
from pagedcore.requests.input_processor import ProcessedRequest, Prompt
from pagedcore.requests.request import Request
from pagedcore.requests.stats import EngineStats
from pagedcore.requests.validation import validate_timeout
from pagedcore.sampling_params import SamplingParams
from pagedcore.serving.async_adapters import AsyncAdapters
from pagedcore.serving.async_calls import AsyncCalls
from pagedcore.serving.async_embedding import AsyncEmbeddings
from pagedcore.serving.async_session import AsyncSession
from pagedcore.serving.async_sleep import AsyncSleep
from pagedcore.serving.async_weights import AsyncNewWeights
from pagedcore.serving.commands import Commands, Places
from pagedcore.serving.engine_loop import EngineLoop, StreamFlusher
from pagedcore.serving.health import Health, watch
from pagedcore.serving.host_program import EngineThread, require_other_thread, running_loop, warn_of_gevent
from pagedcore.serving.long_prompts import LongPrompts, is_long, is_structured
from pagedcore.serving.stream import AwaitableFuture, CompletionFuture, OutputSink, Stream, StreamReader

_STREAM_INTERVAL: Final = seconds(0, 1)
STREAM_INTERVAL_S: Final = 0.05
"""How often a reader gets new text, in seconds: twenty times a second looks continuous."""
_DEAD_AFTER: Final = seconds(0, MAX_TIMEOUT_S, above_low=True)
DEAD_AFTER_S: Final = 300.0
"""How long a step may take before the engine is given up, in seconds. Unlike "degraded", which a late step takes back,
that is final; so it is longer than any step should be, of a large model on a small machine too."""
QUEUE_TIMEOUT_S: Final = 300.0
"""The longest wait for a first start unless the engine has its own ``queue_timeout_s``, in seconds."""
_T = TypeVar("_T")
_quote: Callable[..., Coroutine[Any, Any, Quote]] = delegate("pagedcore.analysis.quotes.async_quoting", "quote")


class AsyncEngine(
    AsyncCalls, AsyncEmbeddings, AsyncAdapters, AsyncSleep, AbstractContextManager["AsyncEngine"],
    AbstractAsyncContextManager["AsyncEngine"],
):
    """Continuous batching for concurrent callers.

    ``generate`` is a real async generator function: leaving it early in any way (``aclose``, cancellation, an
    exception, losing the last reference) aborts its request. A plain ``break`` out of ``async for`` leaves the
    generator to the garbage collector; wrap it in ``contextlib.aclosing`` to abort at once.

    Invariant: every stream that was handed out ends, with a finish reason or an error.
    """

    def __init__(
        self, engine: Engine, *, stream_interval_s: float = STREAM_INTERVAL_S, dead_after_s: float = DEAD_AFTER_S
    ) -> None:
        """Take over ``engine``: no other code may call it from now on.

        Args:
            engine: if it has no ``queue_timeout_s``, it gets one of 300 seconds.
            stream_interval_s: a reader gets its first and last delta at once, and those between, joined, at times so
                far apart, the same for all readers, and farther apart if those are more than fifty; 0: every delta.
            dead_after_s: an engine thread that has work and does not end a step for so many seconds is given up: every
                reader and every later call gets ``EngineHung``. Compiling kernels, and times in which the process is
                stopped, do not count.

        Raises:
            InvalidConfig: ``stream_interval_s`` is not a number of seconds from 0 to 1, or ``dead_after_s`` not one
                above 0 and up to thirty days.
        """
        _check(stream_interval_s, dead_after_s)
        warn_of_gevent()
        if engine.turn_rules.queue_timeout_s is None:
            engine.turn_rules.queue_timeout_s = QUEUE_TIMEOUT_S
        # Why kept: what it is called changes with its weights; nothing else is asked of it here.
        self._named = engine
        self.generation_defaults = engine.generation_defaults
        """As ``Engine.generation_defaults``."""
        self.chat_format = engine.chat_format
        """How the model writes calls of tools and reasoning, for those who read its chats."""
        self.input_processor = engine.input_processor
        self._read_session, self._adapter_registry = engine.sessions.read, engine.adapter_registry
        scheduler = engine.scheduler
        self._commands = Commands(Places(engine.input_processor.max_num_waiting, lambda: scheduler.num_unstarted))
        self._long_prompts = LongPrompts(self._commands)
        worker = EngineLoop(engine, self._commands, StreamFlusher(stream_interval_s, MonotonicClock()))
        self._progress = worker.progress
        # Why: this thread has built the engine; its helpers would slow down those of the engine's own.
        engine.idle()
        self._thread = EngineThread(target=worker.run, name="pagedcore-engine", daemon=True)
        watchdog = threading.Thread(
            target=watch, args=(worker.progress, worker.is_over, dead_after_s, worker.give_up),
            name="pagedcore-watchdog", daemon=True,
        )
        # Why: neither thread may keep this object alive, so that losing it closes the engine.
        closing = partial(_close, self._commands, self._thread, self._long_prompts, worker)
        self._finalizer = weakref.finalize(self, closing)
        self._thread.start()
        watchdog.start()

    @classmethod
    def from_pretrained(
        cls, model: Any, *, stream_interval_s: float = STREAM_INTERVAL_S, dead_after_s: float = DEAD_AFTER_S,
        **settings: Any,
    ) -> AsyncEngine:
        """Build an engine and put it on its own thread; arguments as here and as ``Engine.from_pretrained``, errors
        likewise."""
        _check(stream_interval_s, dead_after_s)
        engine = Engine.from_pretrained(model, **settings)
        return cls(engine, stream_interval_s=stream_interval_s, dead_after_s=dead_after_s)

    @property
    def identity(self) -> str:
        """As ``Engine.identity``."""
        return self._named.identity

    @property
    def weights(self) -> WeightsVersion:
        """As ``Engine.weights``."""
        return self._named.weights

    def new_weights(self, version: str = "", *, running: Running = "wait", way: Way = "staged") -> AsyncNewWeights:
        """Return an asynchronous context whose ``load`` is awaited; arguments as ``Engine.new_weights``.

            async with engine.new_weights(version="7", running="keep") as weights:
                await weights.load(model.state_dict())

        Staged weights are made ready on another thread, while the engine serves. With "wait" requests that come
        meanwhile are held until the others have ended; turns of sessions that begin meanwhile are waited for too.
        """
        return AsyncNewWeights(self.call, self._when_settled, version, running, way)

    async def _call_loop(self, function: Callable[[EngineLoop], _T]) -> _T:
        loop, result = running_loop(), CompletionFuture[_T]()
        self._commands.put(lambda worker: result.complete(function(worker)), result)
        return await asyncio.wrap_future(result.future, loop=loop)

    def _hold(self, is_held: bool) -> None:
        with suppress(EngineClosed):
            self._commands.put(lambda worker: worker.hold(is_held), CompletionFuture())

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
            EngineOverloaded: the waiting queue is full, or too many callers wait for room.
            EngineClosed: the engine was closed before the completion was; ``EngineHung``: it made no progress.
            QueueTimeout: the request waited for room longer than ``queue_timeout_s``.
            RequestTimeout: it took longer than ``timeout_s``; the request is aborted.
        """
        reader = self._open(prompt, params, options, timeout_s, wait_for_room)
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
        """Do the same without an event loop: a plain generator that blocks this thread. Raises as ``generate``, and
        ``CalledFromHook`` on the engine's own thread.
        """
        require_other_thread(self._thread)
        reader = self._open(prompt, params, options, timeout_s, wait_for_room)
        try:
            yield from reader
        finally:
            reader.close()

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, wait_for_room: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> AwaitableFuture[RequestOutput]:
        """Send one prompt off and return at once; the future has all its completions when the last one has ended.

        Cheaper than ``generate``, because no reader is woken in between. The future is one of ``concurrent.futures``
        and can be awaited too, on any event loop. Cancelling it aborts the request, and so does Ctrl-C in its
        ``result``; losing it does not. Its callbacks run on the engine thread and
        must not block; what they raise is logged and ends nothing else. A completion that failed has the finish reason
        "error" and its error in the output.

        Raises:
            InvalidRequest: the request is refused; raised by the future if the prompt is long or structured output is
                asked for, because it is looked at on another thread then.
            EngineOverloaded: the waiting queue is full, or too many callers wait for room; raised at once, before
                anything is done.
            EngineClosed: the engine is closed, or, raised by the future, was closed before the end.
            QueueTimeout: raised by the future; the request waited for room longer than ``queue_timeout_s``.
        """
        asked = read_options(options, "wait_for_room")
        prepare = partial(self.input_processor.process, prompt, params, asked)
        return self._submit(prepare, prompt, params, asked.owner, wait_for_room)

    def extend(
        self, output: RequestOutput, prompt: Prompt, params: SamplingParams | None = None, *, index: int | None = None,
        wait_for_room: bool = False, **options: Unpack[OptionKeywords],
    ) -> AwaitableFuture[RequestOutput]:
        """Continue a completion of a finished request with a further prompt; otherwise as ``submit``.

        The engine keeps nothing for it: the conversation is in ``output``, and its KV is what the prefix cache still
        holds under the same ``cache_salt``. Several continuations of one output may run at once, of each completion.

        Args:
            output: what ``submit`` or an earlier call has returned.
            prompt: text, token ids, or chat messages that follow the conversation so far.
            params: of the new turn; ``None``: as of a request. Without a seed the engine derives a new one.
            index: the completion that is continued, needed where ``output`` has several.

        Raises:
            RequestStateError: ``output`` is of a running request, or has several completions and no ``index``.
            InvalidRequest, EngineOverloaded, EngineClosed, QueueTimeout: as ``submit``.
        """
        asked = read_options(options, "index", "wait_for_room")
        prepare = partial(self.input_processor.process_further, output, index, prompt, params, asked)
        return self._submit(prepare, prompt, params, asked.owner, wait_for_room)

    def session(self, params: SamplingParams | None = None, **options: Unpack[OptionKeywords]) -> AsyncSession:
        """Open a conversation at its first use; arguments and errors as ``Engine.session``."""
        return AsyncSession(self, lambda engine: engine.session(params, **options))

    async def import_session(
        self, path: str | os.PathLike[str], *, other_weights: str = "refuse", **options: Unpack[OptionKeywords]
    ) -> AsyncSession:
        """Open an exported conversation; as ``Engine.import_session``. The file is read on another thread."""
        snapshot = await asyncio.to_thread(self._read_session, path, other_weights)
        return await AsyncSession(self, lambda engine: engine.sessions.take_in(snapshot, options)).__aenter__()

    def stats(self, timeout_s: float = 10.0) -> EngineStats:
        """Return the engine's counters as they stand between two steps.

        Raises:
            InvalidRequest: ``timeout_s`` is not a number of seconds from 0 to thirty days.
            EngineClosed: the engine was closed, or its thread did not answer within so many seconds.
        """
        timeout_s = WAIT.check("timeout_s", timeout_s)
        try:
            return self.send(lambda engine: engine.stats()).result(timeout_s)
        except TimeoutError:
            raise EngineClosed(f"the engine thread did not answer within {timeout_s} seconds.") from None

    async def quote(
        self, prompt: Prompt, params: SamplingParams | None = None, *, exact: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> Quote:
        """Say when a request would start, have its first token and end if it came now; as ``Engine.quote``.

        The prompt is prepared before the engine thread is asked, and a dry run (``exact``) has a thread of its own. At
        most eight quotes at a time, so that they cannot keep steps from being made.

        Raises:
            InvalidRequest: as ``generate``.
            EngineOverloaded: as many quotes are being made as may be.
            EngineClosed: the engine is closed.
        """
        return await _quote(self, prompt, params, options, exact=exact)

    async def explain(self, request_id: str) -> Explanation:
        """Say where a request stands and why it waits; ``request_id`` is the engine's or the caller's own label.

        For operators: the answer names other requests. As ``Engine.explain``, and "held" for a labelled request that
        the engine's queue has no room for yet; one whose caller waits for room is unknown. Raises ``EngineClosed``, and
        ``InvalidRequest`` for an id that is no text.
        """
        return await self._call_loop(lambda worker: worker.explain(request_id))

    def observe(self, plugin: object) -> None:
        """Call the observing hooks of ``plugin`` from now on, on the engine thread; they must not block.

        Raises ``InvalidConfig`` if it has a hook that does not exist, and ``EngineClosed``.
        """
        manager = PluginManager()
        manager.add(plugin, type(plugin).__name__)
        self.send(lambda engine: engine.hooks.add(manager))

    def health(self, *, degraded_after_s: float = 10.0) -> Health:
        """Judge whether the engine makes progress, by the seconds since its last step or idle check; never waits.

        While everybody waits for KV blocks that are on their way between the memories there is no step. A long step
        looks like a standstill if it takes more than ``degraded_after_s``. "dead" is an engine that refuses calls: it
        was closed, its thread has ended, or it was given up after ``dead_after_s`` of this object.

        Raises ``InvalidRequest`` if ``degraded_after_s`` is not a number of seconds from 0 to thirty days.
        """
        limit_s = WAIT.check("degraded_after_s", degraded_after_s)
        return self._progress.judge(is_alive=self._thread.is_alive(), degraded_after_s=limit_s)

    @property
    def is_alive(self) -> bool:
        """Whether the engine thread runs and was not given up."""
        return self._thread.is_alive() and not self._progress.is_given_up

    def close(self, timeout_s: float | None = None) -> None:
        """Abort everything, end all streams and stop the thread; a second call does nothing.

        A step that has not ended after ``timeout_s`` seconds, or ``dead_after_s`` without it, is left to itself, with
        the memory that it may write to: readers get ``EngineHung``, and this returns.

        Raises ``InvalidRequest`` if ``timeout_s`` is not a number of seconds from 0 to thirty days; nothing is closed.
        """
        timeout_s = WAIT.or_none().check("timeout_s", timeout_s)
        if (finalizer := self._finalizer.detach()) is not None:
            finalizer[1](timeout_s)

    async def aclose(self, timeout_s: float | None = None) -> None:
        """Close without blocking the event loop."""
        running_loop()
        await asyncio.to_thread(self.close, timeout_s)

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise NotPicklable("an engine")

    def _open(
        self, prompt: Prompt, params: SamplingParams | None, options: OptionKeywords, timeout_s: float | None,
        wait_for_room: bool,
    ) -> StreamReader:
        asked = read_options(options, "timeout_s", "wait_for_room")
        timeout_s, stream = validate_timeout(timeout_s), Stream()
        prepare = partial(self.input_processor.process, prompt, params, asked)
        self._accept(prepare, prompt, params, asked.owner, stream, wait_for_room)
        return StreamReader(stream, partial(_cancel, self._commands, stream), timeout_s)

    def _submit(
        self, prepare: Callable[[], ProcessedRequest], prompt: Prompt, params: SamplingParams | None, owner: bytes,
        may_wait: bool,
    ) -> AwaitableFuture[RequestOutput]:
        sink, commands = CompletionFuture[RequestOutput](self._thread), self._commands
        self._accept(prepare, prompt, params, owner, sink, may_wait)
        sink.future.add_done_callback(lambda future: commands.abort(sink) if future.cancelled() else None)
        return sink.future

    def _accept(
        self, prepare: Callable[[], ProcessedRequest], prompt: Prompt, params: SamplingParams | None, owner: bytes,
        sink: OutputSink, may_wait: bool,
    ) -> None:
        """Send a request to the engine thread, by way of another one if preparing it takes long."""
        places = self._commands.places
        self._commands.require_open()
        try:
            # Why before the prompt is looked at: a refusal must cost next to nothing. Parameters of another type, whose
            # values mean nothing, are refused with the prompt.
            places.take(sink, params.num_initial_sequences if type(params) is SamplingParams else 1, may_wait)
            if is_long(prompt) or is_structured(params):
                self._long_prompts.send(prepare, sink, owner)
                return
            prepared = prepare()
            self._commands.put(lambda worker: worker.accept(prepared, sink), sink)
        except BaseException:
            places.give_back(sink)
            raise

    def read_turn(self, begin: Callable[[], Request]) -> StreamReader:
        """Read what a session's turn brings forth, which ``begin`` begins on the engine thread."""
        stream = Stream()
        self._commands.put(lambda worker: worker.serve(begin, stream), stream)
        return StreamReader(stream, partial(_cancel, self._commands, stream))

    async def call(self, function: Callable[[Engine], _T]) -> _T:
        """Run a short function on the engine thread, between two steps; return its result or raise its exception.

        One that calls ``Engine.step`` takes the deltas of that step from their readers.

        Raises ``EngineClosed`` if the engine is closed, and ``RuntimeError`` instead of what would end more than the
        call: ``SystemExit``, ``KeyboardInterrupt`` and ``StopIteration``.
        """
        return await asyncio.wrap_future(loop=running_loop(), future=self.send(function))

    def send(self, function: Callable[[Engine], _T]) -> Future[_T]:
        """Do the same without waiting for it, from any thread. Raises ``EngineClosed`` if the engine is closed."""
        result = CompletionFuture[_T](self._thread)
        self._commands.put(lambda worker: worker.call(function, result), result)
        return result.future


def _check(stream_interval_s: float, dead_after_s: float) -> None:
    _STREAM_INTERVAL.check("stream_interval_s", stream_interval_s, invalid_setting)
    _DEAD_AFTER.check("dead_after_s", dead_after_s, invalid_setting)


def _cancel(commands: Commands, stream: Stream) -> None:
    if not stream.has_ended:
        stream.is_cancelled = True
        commands.abort(stream)


def _close(
    commands: Commands, thread: threading.Thread, long_prompts: LongPrompts, worker: EngineLoop,
    timeout_s: float | None = None,
) -> None:
    try:
        commands.require_open()
    except ForkedProcess:
        # Why: the threads to stop and to wait for are those of another process.
        return
    except EngineClosed:
        pass
    long_prompts.close()
    with suppress(EngineClosed):
        commands.put(EngineLoop.stop, CompletionFuture())
    if thread is threading.current_thread():
        return
    if not worker.is_over.wait(timeout_s):
        worker.give_up(timeout_s or 0.0)
    if not worker.progress.is_given_up:
        thread.join()
