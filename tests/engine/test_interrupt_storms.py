"""Lives of an engine in which most calls are broken off at some line: nothing wrong is ever said, and nothing stays."""

from __future__ import annotations

import random
import signal
from contextlib import suppress

import pytest

from pagedcore.analysis.diagnosis.invariants import check, snapshot
from pagedcore.engine.engine import Engine
from pagedcore.errors import EngineClosed
from pagedcore.requests.request import Request
from pagedcore.sessions.session import Session
from support.doubles import VOCAB_SIZE, toy_answer
from support.drafts import Adversary, Mistaken, assert_forgotten, draft_model, let_guess
from support.engine_builders import assert_all_free, make_engine, run
from support.interrupts import Lost, interrupted_at
from support.step_scenario import params
from support.torture import first_seed, scaled

NUM_CALLS = 60
MOST_LINES = 900


class Life:
    """One engine, its sessions and requests, and a caller that is interrupted again and again."""

    def __init__(self, seed: int, has_drafts: bool = False) -> None:
        self.rng = random.Random(seed)
        self.engine: Engine = make_engine(host_kv_memory=64 * 32, preemption="swap", check_invariants=False)
        # Why half: a model whose drafts seem likelier is asked in its place.
        self.drafts, self.model = Adversary(toy_answer, VOCAB_SIZE, seed, promises=0.5), draft_model(Mistaken())
        if has_drafts:
            let_guess(self.engine, self.drafts, VOCAB_SIZE, model=self.model)
        self.sessions: list[Session] = []
        self.requests: list[tuple[Request, list[int]]] = []
        self.num_interrupted = 0

    def live(self) -> None:
        """Make calls; a call that is broken off is not repeated."""
        for _ in range(NUM_CALLS):
            call = self.rng.choice([self.add, self.step, self.step, self.open, self.talk, self.talk, self.park,
                                    self.resume, self.fork, self.close, self.abort])
            line = self.rng.randint(1, MOST_LINES) if self.rng.random() < 0.7 else 0
            try:
                with interrupted_at(line):
                    call()
            except Lost:
                self.num_interrupted += 1
            self.engine.step()
            check(snapshot(self.engine.scheduler))
        self.end()

    def end(self) -> None:
        """Let everything come to its end without interrupts."""
        run(self.engine)
        for request, prompt in self.requests:
            output = request.output().outputs[0]
            assert list(output.token_ids) == toy_answer(prompt, 6)[: len(output.token_ids)]
            assert output.finish_reason == "abort" or len(output.token_ids) == 6
        for request in list(self.engine.requests):
            request.abort()
        for session in list(self.engine.sessions):
            session.close()
        for request in list(self.engine.requests):
            request.remove()
        self.engine.step()
        assert_all_free(self.engine)
        assert not list(self.engine.requests)
        assert not self.drafts.live
        assert_forgotten(self.model)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def add(self) -> None:
        """Ask for a completion."""
        prompt = [self.rng.randrange(28) for _ in range(self.rng.randint(1, 9))]
        with suppress(IndexError):
            self.requests.append((self.engine.add_request(prompt, params(6)), prompt))

    def step(self) -> None:
        """Make a step."""
        self.engine.step()

    def open(self) -> None:
        """Open a session."""
        self.sessions.append(self.engine.session(params(4)))

    def talk(self) -> None:
        """Have a turn; whatever becomes of it, the session's tokens are the earlier ones and a part of the turn's."""
        # Why idle: a turn may have been begun when its caller was interrupted, and goes on.
        if (session := self._idle()) is None:
            return
        known, prompt = list(session.token_ids), [self.rng.randrange(28) for _ in range(3)]
        if len(known) > 40:
            return
        try:
            session.ask(prompt)
        finally:
            turn = [*prompt, *toy_answer([*known, *prompt], 4)]
            now = list(session.token_ids)
            assert now[: len(known)] == known
            assert now[len(known) :] == turn[: len(now) - len(known)]

    def park(self) -> None:
        """Park a session on the host or on the disk."""
        if (session := self._idle()) is not None:
            session.park(self.rng.choice(["host", "disk"]))

    def resume(self) -> None:
        """Fetch a session's KV."""
        if (session := self._idle()) is not None:
            session.resume()

    def fork(self) -> None:
        """Copy a session."""
        if (session := self._idle()) is not None:
            self.sessions.append(session.fork())

    def close(self) -> None:
        """Close a session."""
        if self.sessions:
            self.sessions.pop(self.rng.randrange(len(self.sessions))).close()

    def abort(self) -> None:
        """Abort a request."""
        if self.requests:
            self.rng.choice(self.requests)[0].abort()

    def _idle(self) -> Session | None:
        open_ones = [one for one in self.sessions if one in self.engine.sessions and not one.is_answering]
        return self.rng.choice(open_ones) if open_ones else None


@pytest.mark.torture
def test_interrupts_come_again_and_again(record_property: object) -> None:
    """Whatever is broken off, what the engine says is true, its laws hold, and in the end all blocks are free; or it is
    closed, and says why."""
    num_lives, num_interrupted, num_closed = scaled(12), 0, 0
    for seed in range(first_seed(), first_seed() + num_lives):
        life = Life(seed, has_drafts=seed % 2 == 1)
        try:
            life.live()
        except EngineClosed as closed:
            if "could not be undone" not in str(closed):
                raise
            num_closed += 1
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            life.engine.close()
            # Why: an engine that was closed by an interrupt makes no further step, which would restore it.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        num_interrupted += life.num_interrupted
    record_property("seeds", num_lives)  # type: ignore[operator]
    record_property("steps", num_lives * NUM_CALLS)  # type: ignore[operator]
    assert num_interrupted > 5 * num_lives
    assert num_closed <= max(1, num_lives // 20)
