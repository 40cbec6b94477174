"""An engine on a thread of its own, usable from any event loop, from several at once, or from none.

Callers put commands into a queue; the engine thread takes them between steps and hands deltas to bounded streams.
No caller's loop ever runs engine code, and the engine needs no loop.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

from pagedcore.engine import Engine
from pagedcore.errors import EngineClosed, PagedcoreError
from pagedcore.intake import PreparedPrompt, Prompt
from pagedcore.outputs import Delta, Usage
from pagedcore.request import Request
from pagedcore.sampling_params import SamplingParams
from pagedcore.stats import EngineStats
from pagedcore.stream import Stream, StreamReader, Waiter, wake

_Command = Callable[["_EngineThread"], None]


class AsyncEngine:
    """Continuous batching for concurrent callers.

    ``generate`` is a real async generator function: leaving it early in any way (``aclose``, cancellation, an
    exception, losing the last reference) aborts its request. A plain ``break`` out of ``async for`` leaves the
    generator to the garbage collector; wrap it in ``contextlib.aclosing`` to abort at once.

    Invariant: every stream that was handed out ends, with a finish reason or an error.
    """

    def __init__(self, engine: Engine) -> None:
        """Take over ``engine``: nobody else may call it from now on."""
        self._prepare = engine.prepare
        self._commands = _Commands()
        worker = _EngineThread(engine, self._commands)
        self._thread = threading.Thread(target=worker.run, name="pagedcore-engine", daemon=True)
        # Why: the thread must not keep this object alive, so that losing it closes the engine.
        self._finalizer = weakref.finalize(self, _close, self._commands, self._thread)
        self._thread.start()

    @classmethod
    def from_pretrained(cls, model: Any, **settings: Any) -> AsyncEngine:
        """Build an engine and put it on its own thread; arguments and errors as ``Engine.from_pretrained``."""
        return cls(Engine.from_pretrained(model, **settings))

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncGenerator[Delta, None]:
        """Answer one prompt, delta by delta; the last delta of each answer has a finish reason.

        The very last delta also has ``usage``: the tokens that the request took.

        Raises:
            InvalidRequest: the request is refused, at the first iteration.
            EngineOverloaded: the waiting queue is full.
            EngineClosed: the engine was closed before the answer was complete.
        """
        reader = self._open(prompt, params, priority)
        try:
            while deltas := await reader.next():
                for delta in deltas:
                    yield delta
        finally:
            reader.close()

    def generate_sync(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> Iterator[Delta]:
        """Do the same without an event loop: a plain generator that blocks this thread. Raises as ``generate``."""
        reader = self._open(prompt, params, priority)
        try:
            yield from reader
        finally:
            reader.close()

    def stats(self, timeout_s: float = 10.0) -> EngineStats:
        """Return the engine's counters as they stand between two steps.

        Raises:
            EngineClosed: the engine was closed, or its thread did not answer within ``timeout_s`` seconds.
        """
        answers: SimpleQueue[EngineStats] = SimpleQueue()
        self._send(lambda worker: answers.put(worker.engine.stats()))
        try:
            return answers.get(timeout=timeout_s)
        except Empty:
            raise EngineClosed(f"the engine thread did not answer within {timeout_s} seconds.") from None

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

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, prompt: Prompt, params: SamplingParams | None, priority: int) -> StreamReader:
        prepared = self._prepare(prompt, params, priority=priority)
        stream, commands = Stream(), self._commands
        self._send(lambda worker: worker.accept(prepared, stream))
        return StreamReader(stream, lambda: _abandon(commands, stream))

    def _send(self, command: _Command) -> None:
        if not self._commands.put(command):
            raise EngineClosed("this engine is closed; make a new one.")


def _abandon(commands: _Commands, stream: Stream) -> None:
    commands.put(lambda worker: worker.abandon(stream))


def _close(commands: _Commands, thread: threading.Thread) -> None:
    commands.put(_EngineThread.stop)
    if thread is not threading.current_thread():
        thread.join()


class _Commands:
    """What callers ask of the engine thread, in order.

    Invariant: a command for which ``put`` returned True is carried out.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Command] = SimpleQueue()
        # Why: re-entrant, because the garbage collector may abandon a stream while this thread is in ``put``.
        self._lock = threading.RLock()
        self._is_closed = False

    def put(self, command: _Command) -> bool:
        """Hand a command over; False if the engine thread takes no more."""
        with self._lock:
            if not self._is_closed:
                self._queue.put(command)
            return not self._is_closed

    def wait(self) -> _Command:
        """Return the next command, sleeping until there is one."""
        return self._queue.get()

    def take_all(self) -> Iterator[_Command]:
        """Yield the commands that are there, without sleeping."""
        while not self._queue.empty():
            yield self._queue.get()

    def close(self) -> Iterator[_Command]:
        """Refuse further commands and yield those that came before."""
        with self._lock:
            self._is_closed = True
        return self.take_all()


class _EngineThread:
    """What runs on the thread: take commands, step, deliver.

    Invariant: a stream is in ``_streams`` exactly while its request is in the engine.
    """

    def __init__(self, engine: Engine, commands: _Commands) -> None:
        self.engine = engine
        self._commands = commands
        self._streams: dict[str, tuple[Request, Stream]] = {}
        self._is_stopping = False

    def run(self) -> None:
        """Serve until ``stop``; whatever happens, every stream ends and the engine is closed."""
        cause: BaseException | None = None
        try:
            while not self._is_stopping:
                self._take_commands()
                self._deliver(self.engine.step())
        except BaseException as error:
            cause = error
            raise
        finally:
            self._shut_down(cause)

    def stop(self) -> None:
        """Leave the loop after the step in flight."""
        self._is_stopping = True

    def accept(self, prepared: PreparedPrompt, stream: Stream) -> None:
        """Take a request for a stream, or end the stream with the reason why not."""
        try:
            request = self.engine.accept(prepared)
        except PagedcoreError as error:
            wake([stream.end(error)])
        else:
            self._streams[request.request_id] = (request, stream)

    def abandon(self, stream: Stream) -> None:
        """Abort the request whose reader is gone."""
        for request, other in list(self._streams.values()):
            if other is stream:
                request.abort()
                self._release(request, stream)

    def _take_commands(self) -> None:
        if not self.engine.has_pending_requests():
            self._commands.wait()(self)
        for command in self._commands.take_all():
            command(self)

    def _deliver(self, deltas: list[Delta]) -> None:
        ended = {}
        for i, delta in enumerate(deltas):
            # Why: several answers of one request may end in one step; the last of them is the end of the stream.
            if delta.finish_reason is not None and self._streams[delta.request_id][0].is_done:
                ended[delta.request_id] = i
        for request_id, i in ended.items():
            deltas[i] = replace(deltas[i], usage=_usage_of(self._streams[request_id][0]))
        waiters = [self._streams[delta.request_id][1].put(delta) for delta in deltas]
        waiters += [self._release(*self._streams[request_id]) for request_id in ended]
        wake(waiters)

    def _release(self, request: Request, stream: Stream) -> Waiter | None:
        del self._streams[request.request_id]
        request.remove()
        return stream.end()

    def _shut_down(self, cause: BaseException | None) -> None:
        error = EngineClosed("the engine was closed while this request was in flight.")
        error.__cause__ = cause
        wake([stream.end(error) for _, stream in self._streams.values()])
        self._streams.clear()
        self.engine.close()
        # Why: what was sent while stopping gets its answer too; accepting fails now, because the engine is closed.
        for command in self._commands.close():
            command(self)


def _usage_of(request: Request) -> Usage:
    first = request.sequences[0]
    num_output_tokens = sum(sequence.num_output_tokens for sequence in request.sequences)
    return Usage(first.num_prompt_tokens, first.num_cached_tokens, num_output_tokens)
