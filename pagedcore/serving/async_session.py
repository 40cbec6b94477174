"""Conversations with an engine on a thread of its own, usable from any event loop.

Engine state is touched by commands to the engine thread only; files are read and written on other threads, so that
neither the caller's loop nor a step waits for a disk. ``session`` has the operations and describes their arguments.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from pagedcore.errors import EngineClosed, SessionStateError
from pagedcore.outputs import Delta, RequestOutput
from pagedcore.requests.input_processor import Prompt
from pagedcore.requests.request import Request
from pagedcore.sampling_params import SamplingParams
from pagedcore.serving.long_prompts import is_long, is_structured
from pagedcore.serving.stream import StreamReader
from pagedcore.sessions.operation import Done, Operation, Work, advance, run
from pagedcore.sessions.parking import ParkedState
from pagedcore.sessions.session import Session

if TYPE_CHECKING:
    from pagedcore.engine.engine import Engine

_T = TypeVar("_T")


class EngineAccess(Protocol):
    """What a session needs of the engine on its thread."""

    def send(self, function: Callable[[Engine], _T]) -> Future[_T]:
        """Have a function run on the engine thread, without waiting for it."""

    async def call(self, function: Callable[[Engine], _T]) -> _T:
        """Run a function on the engine thread."""

    def read_turn(self, begin: Callable[[], Request]) -> StreamReader:
        """Begin a turn on the engine thread and read its deltas."""


class AsyncSession:
    """One conversation with one ``AsyncEngine``; made by ``AsyncEngine.session``.

        async with engine.session() as session:
            async for delta in session.stream("What is 2 + 3?"):
                print(delta.text, end="")

    One turn at a time; several sessions advance together. Cancelling ``ask``, or leaving ``stream`` early, aborts the
    turn; the next one continues from the tokens generated until then.

    Invariant: a session that is closed, lost, or cancelled while it is opened is closed in the engine too.
    """

    def __init__(self, engine: EngineAccess, make: Callable[[Engine], Session]) -> None:
        self._engine = engine
        self._make: Callable[[Engine], Session] | None = make
        self._opened: list[Session] = []
        self._readers: set[StreamReader] = set()
        self._is_closed = False
        # Why: weak, because an engine that is lost closes its sessions; it does so at the exit of the interpreter too.
        self._close = weakref.finalize(self, _close, weakref.ref(engine), self._opened)
        self._close.atexit = False

    async def open(self) -> None:
        """Make the session now; errors as ``Engine.session``."""
        await self._call(lambda session: None)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompts and completions of all turns so far; complete between two turns."""
        return self._opened[0].token_ids if self._opened else ()

    async def ask(self, prompt: Prompt | None, params: SamplingParams | None = None) -> RequestOutput:
        """Run a turn and return its completion. Arguments and errors as ``Session.ask``."""
        async for _ in self.stream(prompt, params):
            pass
        return await self._call(lambda session: session.output())

    async def stream(self, prompt: Prompt | None, params: SamplingParams | None = None) -> AsyncGenerator[Delta, None]:
        """Run a turn and yield its deltas. Arguments and errors as ``Session.ask``."""

        def start(session: Session) -> tuple[Operation[Request], Work, ParkedState | None, SamplingParams | None]:
            turn = session.turn_operation(prompt, params)
            return turn, next(turn), session.parked, session.params_of_turn(prompt, params)

        turn, work, parked, wanted = await self._call(start)
        is_slow = is_long(prompt) or is_structured(wanted) or (parked is not None and parked.tier == "disk")
        result = await asyncio.to_thread(work) if is_slow else work()
        reader = self._engine.read_turn(lambda: run(turn, result))
        self._readers.add(reader)
        try:
            while deltas := await reader.next():
                for delta in deltas:
                    yield delta
        finally:
            self._readers.discard(reader)
            reader.close()

    async def park(self, tier: Literal["host", "disk"] = "host", ttl_s: float | None = None) -> ParkedState:
        """Keep the KV of the session while it is idle. Arguments, result and errors as ``Session.park``.

        A call that is cancelled is still completed in the background.
        """
        parking = asyncio.create_task(self._run(lambda session: session.park_operation(tier, ttl_s)))
        parking.add_done_callback(_retrieve_exception)
        return await asyncio.shield(parking)

    async def resume(self) -> int:
        """Copy parked KV back to the device now, if there is room. Result as ``Session.resume``."""
        return await self._run(lambda session: session.resume_operation())

    async def fork(self) -> AsyncSession:
        """Return a second session with the same tokens. Errors as ``Session.fork``."""
        return await AsyncSession(self._engine, lambda engine: self._of(engine).fork()).__aenter__()

    async def export(self, path: str | os.PathLike[str], include_kv: bool = True) -> None:
        """Write everything that decides how the session continues. Arguments and errors as ``Session.export``.

        A call that is cancelled while the files are written does not stop that: they may appear later.
        """
        await self._run(lambda session: session.export_operation(path, include_kv))

    async def aclose(self) -> None:
        """Abort a turn that is under way, and free everything; a second call does nothing.

        A call that is cancelled is still completed in the background.
        """
        if self._is_closed:
            return
        self._is_closed = True
        for reader in list(self._readers):
            reader.close()
        if (command := self._close()) is not None:
            closing = asyncio.wrap_future(command)
            closing.add_done_callback(_retrieve_exception)
            with suppress(EngineClosed):
                await asyncio.shield(closing)

    async def __aenter__(self) -> AsyncSession:
        try:
            await self.open()
        except BaseException:
            self._is_closed = True
            self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _run(self, start: Callable[[Session], Operation[_T]]) -> _T:
        """Run an operation: its steps on the engine thread, its work on other threads."""
        operation: Operation[_T] | None = None
        result: Any = None

        def step(session: Session) -> Work | Done[_T]:
            nonlocal operation
            operation = operation or start(session)
            return advance(operation, result)

        try:
            while not isinstance(outcome := await self._call(step), Done):
                result = await asyncio.to_thread(outcome)
            return outcome.result
        except BaseException:
            # Why: the engine thread may be running it now, so no other thread can close it.
            with suppress(EngineClosed):
                self._engine.send(lambda engine: operation.close() if operation else None)
            raise

    async def _call(self, function: Callable[[Session], _T]) -> _T:
        return await self._engine.call(lambda engine: function(self._of(engine)))

    def _of(self, engine: Engine) -> Session:
        """Return the session, made at its first use; runs on the engine thread."""
        if self._is_closed:
            raise SessionStateError("session", "closed", "open", "Open a new session, or import an exported one.")
        if self._make is not None:
            self._opened.append(self._make(engine))
            # Why: it holds what an import has read, or the session that was forked.
            self._make = None
        return self._opened[0]


def _retrieve_exception(future: asyncio.Future[Any]) -> None:
    """Keep the event loop from reporting an exception that nobody reads, because the caller was cancelled."""
    if not future.cancelled():
        future.exception()


def _close(engine: weakref.ref[EngineAccess], opened: list[Session]) -> Future[None] | None:
    """Have a session closed after the command that may be opening it; ``None``: its engine has closed it.

    The garbage collector may call this on any thread, between any two lines.
    """

    def close(_: Engine) -> None:
        for session in opened:
            session.close()

    with suppress(EngineClosed):
        return present.send(close) if (present := engine()) is not None else None
    return None
