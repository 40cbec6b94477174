"""Callers of an ``AsyncEngine``: patient, hasty, slow and lost ones, and what each of them may expect."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedcore import AsyncEngine, SamplingParams
from pagedcore.errors import (
    EngineClosed,
    EngineOverloaded,
    InvalidLogits,
    PagedcoreError,
    QueueTimeout,
    RequestTimeout,
    SessionStateError,
    StepFailed,
    TextFailed,
)
from pagedcore.outputs import Delta, RequestOutput
from pagedcore.serving.async_session import AsyncSession
from scheduler_lives.faults import Injected, letters
from scheduler_lives.laws import SimulationFailure, require
from scheduler_lives.one_thread import SimLoop
from support.doubles import toy_answer

if TYPE_CHECKING:
    from scheduler_lives.engine_simulator import EngineSimulation

#: Few different tokens, so that prompts resemble each other.
PROMPT_TOKENS = 3
MANNERS = ("reads", "reads", "reads", "reads slowly", "leaves", "is lost", "raises")


class Leaving(Exception):
    """Raised by a reader's own code."""


class Turn:
    """What one completion, or several of one prompt, must be."""

    def __init__(self, client: Client, known: list[int], params: SamplingParams) -> None:
        self._client, self._params = client, params
        assert params.max_tokens is not None
        stops = params.stop_token_ids
        self.expected = toy_answer(known, params.max_tokens, stop_token_ids=stops, min_tokens=params.min_tokens)
        self.reasons: dict[int, str] = {}
        self._tokens: dict[int, list[int]] = defaultdict(list)
        self._texts: dict[int, str] = defaultdict(str)

    def take(self, delta: Delta) -> None:
        """Compare one delta."""
        require(delta.index not in self.reasons, "a delta came after the end")
        self._tokens[delta.index] += delta.token_ids
        self._texts[delta.index] += delta.text
        if delta.finish_reason is not None:
            self.end(delta.index, delta.finish_reason, delta.error)

    def end(self, index: int, reason: str, error: Exception | None) -> None:
        """Compare how a completion ended."""
        self.reasons[index] = reason
        tokens, client = self._tokens[index], self._client
        require(tokens == self.expected[: len(tokens)], f"client {client.number} got {tokens} of {self.expected}")
        is_whole = tokens == self.expected
        require(reason not in ("length", "stop") or is_whole, f"client {client.number}: {reason} after {tokens}")
        if reason == "error":
            client.world.count_error(error)
        elif client.world.has_text:
            is_text = self._texts[index] == letters(tokens)
            require(is_text, f"client {client.number}: the text is not that of its tokens")

    def take_output(self, output: RequestOutput) -> None:
        """Compare everything at once."""
        for one in output.outputs:
            self.take(Delta(output.request_id, one.index, one.text, one.token_ids, one.finish_reason, error=one.error))
        self.require_complete()

    def require_complete(self) -> None:
        """Every completion has ended."""
        what = f"client {self._client.number}: {self.reasons} of {self._params.n}"
        require(len(self.reasons) == self._params.n, what)


class Client:
    """One caller on an event loop of its own."""

    def __init__(self, world: EngineSimulation, number: int, prompt: list[int] | None = None) -> None:
        self.world, self.number = world, number
        self.rng = random.Random(f"{world.seed} {number}")
        self._prompt = prompt
        self.folder: Path = world.folder
        self.engine: AsyncEngine = world.async_engine
        self.loop = SimLoop(world.turns)
        self.loop.set_exception_handler(lambda loop, context: world.failures.append(str(context)))
        self.is_conversing = prompt is None and self.rng.random() < 0.35
        self.task = self.loop.create_task(self._live())

    @property
    def is_done(self) -> bool:
        """Whether nothing of it is left to run."""
        return all(task.done() for task in self.loop.tasks)

    async def _live(self) -> None:
        try:
            await (self._converse() if self.is_conversing else self._ask_once())
        except asyncio.CancelledError:
            # Why not raised again: the task would keep the error, its frames, and a lost session in one of them.
            self.note("cancelled")
        except (PagedcoreError, Injected) as error:
            self.note(type(error).__name__)
            try:
                self.require_allowed(error)
            except SimulationFailure as failure:
                self.world.failures.append(str(failure))
        except Leaving:
            self.note("left")
        except Exception as error:  # of the simulation, or one that no caller should see
            self.world.failures.append(f"client {self.number}: {type(error).__name__}: {error}")

    def note(self, what: object) -> None:
        self.world.trace.append(f"{self.world.clock.now():.6f} client {self.number}: {what}")

    def require_allowed(self, error: Exception) -> None:
        """Fail unless this error can be explained."""
        world = self.world
        is_allowed = (
            isinstance(error, EngineOverloaded | RequestTimeout)
            or (isinstance(error, EngineClosed | SessionStateError) and world.is_closing)
            or (isinstance(error, QueueTimeout) and world.has_queue_timeout)
            or (isinstance(error, Injected) and world.faults.fired["encode"] > 0)
        )
        if not is_allowed:
            world.count_error(error)

    def _draw(self, num_known: int = 0, n: int = 1) -> tuple[list[int], SamplingParams]:
        rng, longest = self.rng, self.world.longest // n - num_known
        num_random = rng.randint(1, max(1, longest // 2))
        prompt = list(self._prompt or [rng.randrange(PROMPT_TOKENS) for _ in range(num_random)])
        if self._prompt is None and rng.random() < 0.5:
            prompt = [*self.world.prefix, *prompt][: max(1, longest // 2)]
        max_tokens = rng.randint(1, max(1, longest - len(prompt)))
        stops = tuple(rng.sample(range(self.world.backend.vocab_size), rng.choice([0, 0, 3])))
        return prompt, SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True, stop_token_ids=stops)

    def _as_input(self, prompt: list[int]) -> Any:
        """The same tokens as ids, as a short text, or as one long enough for a thread of its own."""
        if not self.world.has_text or self.rng.random() < 0.5:
            return prompt
        text = " ".join(map(str, prompt))
        return text if self.rng.random() < 0.7 else text + " " * 2100

    def _options(self) -> dict[str, Any]:
        rng = self.rng
        options: dict[str, Any] = {"wait_for_room": rng.random() < 0.4}
        if self.world.has_priorities:
            options["priority"] = rng.randrange(3)
        if rng.random() < 0.3:
            options["cache_salt"] = rng.choice(["one", "other"])
        return options

    async def _ask_once(self) -> None:
        n = self.rng.choice([1, 1, 1, 2])
        prompt, params = self._draw(n=n)
        turn, given, options = Turn(self, prompt, params), self._as_input(prompt), self._options()
        if self.rng.random() < 0.4:
            future = self.engine.submit(given, params, **options)
            if self.rng.random() < 0.2:
                self.note("forgets its future")
                return
            turn.take_output(await asyncio.wrap_future(future))
            self.note(turn.reasons)
            return
        if self.rng.random() < 0.2:
            options["timeout_s"] = self.rng.uniform(0.1, 5.0)
        await self._read(self.engine.generate(given, params, **options), turn)

    async def _read(self, deltas: AsyncGenerator[Delta, None], turn: Turn) -> None:
        manner, num_left = self.rng.choice(MANNERS), self.rng.randint(1, 4)
        async for delta in deltas:
            self.note((delta.index, delta.token_ids, delta.finish_reason))
            turn.take(delta)
            num_left -= 1
            if manner == "reads slowly":
                await asyncio.sleep(self.rng.uniform(0.0, 3.0))
            elif manner != "reads" and num_left == 0:
                break
        else:
            turn.require_complete()
            return
        self.note(manner)
        if manner == "leaves":
            await deltas.aclose()
        elif manner == "raises":
            raise Leaving
        # Why: what is lost is found by nobody else; its generator is closed when this frame is left.

    async def _converse(self) -> None:
        session = self.engine.session(SamplingParams(max_tokens=2), cache_salt="one" if self.number % 2 else None)
        if self.rng.random() < 0.15:
            await self._use(session, self.rng.randint(1, 3))
            self.note("loses its session")
            return
        async with session:
            await self._use(session, self.rng.randint(1, 5))

    async def _use(self, session: AsyncSession, num_operations: int) -> None:
        for _ in range(num_operations):
            if self.world.is_draining:
                return
            await self.rng.choice([self._turn, self._turn, self._park, self._resume, self._fork, self._travel])(session)

    async def _turn(self, session: AsyncSession) -> None:
        await self._between_turns(session)
        known = list(session.token_ids)
        if len(known) + 4 > self.world.longest:
            return
        prompt, params = self._draw(len(known))
        turn = Turn(self, [*known, *prompt], params)
        try:
            if self.rng.random() < 0.5:
                await self._read(session.stream(self._as_input(prompt), params), turn)
            else:
                turn.take_output(await session.ask(self._as_input(prompt), params))
                self.note(turn.reasons)
        except (EngineOverloaded, QueueTimeout, Injected, Leaving) as error:
            self.note(type(error).__name__)
            if not isinstance(error, Leaving):
                self.require_allowed(error)

    async def _park(self, session: AsyncSession) -> None:
        await self._between_turns(session)
        state = await session.park(self.rng.choice(["host", "disk"]), self.rng.choice([None, 5.0]))
        self.note((state.tier, state.num_tokens_kept))

    async def _resume(self, session: AsyncSession) -> None:
        await self._between_turns(session)
        self.note(await session.resume())

    async def _fork(self, session: AsyncSession) -> None:
        await self._between_turns(session)
        async with await session.fork() as fork:
            await self._use(fork, 1)

    async def _travel(self, session: AsyncSession) -> None:
        await self._between_turns(session)
        path = self.folder / f"{self.number}.json"
        await session.export(path, include_kv=self.rng.random() < 0.7)
        async with await self.engine.import_session(path, cache_salt="one" if self.number % 2 else None) as copy:
            require(copy.token_ids == session.token_ids, "an imported session has other tokens")
            await self._use(copy, 1)

    async def _between_turns(self, session: AsyncSession) -> None:
        """A turn whose reader has left, and whose generator is lost, ends when that is found out."""
        while await session._call(lambda one: one.is_answering):
            await asyncio.sleep(0.5)


#: What an accepted request may end with when a fault concerns it.
FAILURES: tuple[type[Exception], ...] = (StepFailed, InvalidLogits, TextFailed, QueueTimeout, Injected)
