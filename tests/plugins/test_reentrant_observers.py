"""Random lives in which hooks use the engine; what each call does alone is in ``test_calls_from_hooks``."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from pagedcore import AsyncEngine, SamplingParams
from pagedcore.engine.engine import Engine
from pagedcore.outputs import RequestOutput
from pagedcore.plugins.hookspecs import hookimpl
from support.doubles import toy_answer
from support.engine_builders import assert_all_free, make_engine
from support.torture import first_seed, scaled

Prompt = list[int]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


class Observer:
    """Does something at random in two of five hooks, also in the hooks of what it does itself."""

    def __init__(self, rng: random.Random) -> None:
        self.engine: Engine | None = None
        self.failures: list[str] = []
        self.added: list[tuple[Prompt, int, RequestOutput]] = []
        self._rng, self._depth = rng, 0

    @hookimpl
    def pagedcore_step(self, stats: object) -> None:
        self._act()

    @hookimpl
    def pagedcore_request_finished(self, request: object) -> None:
        self._act()

    def _act(self) -> None:
        if self.engine is None or self._depth > 1 or self._rng.random() < 0.6:
            return
        self._depth += 1
        try:
            self._rng.choice(ACTS)(self, self.engine)
        except BaseException as error:
            self.failures.append(repr(error))
            raise
        finally:
            self._depth -= 1

    def _abort(self, engine: Engine) -> None:
        for request in self._rng.sample(alive := list(engine.requests), min(1, len(alive))):
            request.abort()

    def _remove(self, engine: Engine) -> None:
        for request in self._rng.sample(alive := list(engine.requests), min(1, len(alive))):
            request.abort()
            request.remove()

    def _step(self, engine: Engine) -> None:
        engine.step()

    def _generate(self, engine: Engine) -> None:
        (output,) = engine.generate([[9, 8]], greedy(3), show_progress=False)
        self.added.append(([9, 8], 3, output))

    def _ask(self, engine: Engine) -> None:
        with engine.session() as session:
            self.added.append(([7, 7], 3, session.ask([7, 7], greedy(3))))

    def _close_sessions(self, engine: Engine) -> None:
        for session in engine.sessions:
            session.close()


ACTS: list[Callable[[Observer, Engine], None]] = [
    Observer._abort, Observer._remove, Observer._step, Observer._generate, Observer._ask, Observer._close_sessions,
]


def life(seed: int) -> tuple[random.Random, Observer, Engine]:
    rng = random.Random(seed)
    observer = Observer(rng)
    settings = {"num_kv_blocks": rng.choice([12, 24, 64]), "max_num_seqs": rng.choice([2, 5])}
    engine = make_engine(plugins=[observer], check_invariants=True, **settings)
    observer.engine = engine
    return rng, observer, engine


def some_request(rng: random.Random) -> tuple[Prompt, int]:
    return [rng.randrange(3, 30) for _ in range(rng.randrange(1, 12))], rng.randrange(1, 20)


def require_own(prompt: Prompt, max_tokens: int, output: RequestOutput) -> None:
    """A completion is the oracle's, whole or up to where it was aborted."""
    (completion,) = output.outputs
    whole = toy_answer(prompt, max_tokens)
    assert completion.finish_reason in ("length", "abort")
    num_tokens = max_tokens if completion.finish_reason == "length" else len(completion.token_ids)
    assert list(completion.token_ids) == whole[:num_tokens]


@pytest.mark.torture
async def test_every_reader_gets_an_end_whatever_observers_do(record_property: Callable[[str, object], None]) -> None:
    """Whatever hooks do with the engine, several at once and within each other, the laws hold after each step, every
    request ends with its own tokens, also one that is removed under its reader, no call fails, and nothing is left."""
    for seed in range(first_seed(), first_seed() + (number := scaled(12))):
        rng, observer, inner = life(seed)
        requests = [some_request(rng) for _ in range(6)]
        async with AsyncEngine(inner) as engine:
            futures = [asyncio.wrap_future(engine.submit(prompt, greedy(most))) for prompt, most in requests]
            results: list[Any] = await asyncio.wait_for(asyncio.gather(*futures), 60)
            for (prompt, most), output in zip(requests, results, strict=True):
                require_own(prompt, most, output)
            for prompt, most, output in observer.added:
                require_own(prompt, most, output)
            assert not observer.failures, (seed, observer.failures)
            await engine.call(lambda _, observer=observer: setattr(observer, "engine", None))
            await engine.call(assert_all_free)
    record_property("seeds", number)
