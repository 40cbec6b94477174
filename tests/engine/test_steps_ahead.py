"""Steps that are launched before the one before them is read: what callers get is what they would get one by one."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.test_torn_steps import explore
from pagedcore import AsyncEngine, SamplingParams
from pagedcore.analysis.recorder.recording import read_recording
from pagedcore.analysis.replay.decisions import replay_decisions
from pagedcore.analysis.replay.lives import recorded_outcome
from pagedcore.analysis.replay.what_if import WhatIf, compare
from pagedcore.engine.engine import Engine
from pagedcore.errors import EngineClosed, InvalidLogits, QueueTimeout, StepFailed
from pagedcore.protocols import FloatArray, RaggedRows
from pagedcore.requests.observers import EngineObserver
from pagedcore.requests.request import Request
from pagedcore.scheduler import chunk_ends
from pagedcore.scheduler.plan import SchedulePlan
from scheduler_lives.engine_simulator import EngineSimulation
from support.ahead import FlakyAhead, HybridAhead, ToyAhead
from support.doubles import FakeClock, toy_answer
from support.engine_builders import assert_all_free, make_engine, run
from support.interrupts import Lost, lose
from support.recordings import ring_of, toy_engine
from support.step_scenario import LetterTokenizer, Scenario
from support.torture import first_seed, scaled

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [2, 2, 2, 2]]


def plain(max_tokens: int = 8, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, **more})


def tokens(request: Request) -> list[int]:
    return list(request.output().outputs[0].token_ids)


class Paced(ToyAhead):
    """Each token takes a second of a fake clock."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, batch: RaggedRows) -> FloatArray:
        self.clock.advance(float(batch.query_start[-1]))
        return super().forward(batch)


class Sizes(ToyAhead):
    """Keeps the sequences of each launch."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[list[int]] = []

    def forward(self, batch: RaggedRows) -> FloatArray:
        self.launches.append(batch.seq_ids.tolist())
        return super().forward(batch)


def test_a_step_is_launched_before_the_one_before_is_read() -> None:
    """Each call launches one step and tells the tokens of the one before, whose last tokens the host did not know when
    it launched; the last call launches nothing, and a length costs no row too many."""
    backend = Sizes()
    engine = make_engine(backend)
    request = engine.add_request([1, 2, 3], plain(4))
    told = []
    while engine.has_pending_requests():
        told.append([token for delta in engine.step() for token in delta.token_ids])
    assert told == [[], *([token] for token in toy_answer([1, 2, 3], 4))]
    assert len(backend.launches) == 4
    assert backend.num_looked_up == 3
    assert tokens(request) == toy_answer([1, 2, 3], 4)
    assert_all_free(engine)


def test_an_end_that_only_the_token_tells_costs_one_row() -> None:
    """A stop token, or a stop string, is seen when one more row is on its way; nothing of that row is seen."""
    answer = toy_answer([1, 2, 3], 9)
    for wanted in (plain(9, stop_token_ids=(answer[3],)), plain(9, stop=[LetterTokenizer().decode([answer[3]])])):
        backend = Sizes()
        engine = make_engine(backend, tokenizer=LetterTokenizer())
        first, other = engine.add_request([1, 2, 3], wanted), engine.add_request([4], plain(9))
        run(engine)
        place = answer.index(answer[3]) + 1
        assert tokens(first) == answer[:place]
        assert first.output().outputs[0].finish_reason == "stop"
        assert tokens(other) == toy_answer([4], 9)
        assert sum(one.count(first.sequences[0].sequence_id) for one in backend.launches) == place + 1
        assert_all_free(engine)


def test_a_processor_holds_back_its_own_row_alone() -> None:
    """A row whose token is chosen on the host is in every other step, its neighbours in each; so it is where a caller
    wants the logits."""
    def tripled(output_token_ids: list[int], logits: FloatArray) -> FloatArray:
        return logits * np.float32(3)

    for wanted in (plain(5, logits_processor=tripled), plain(5, logprobs=1, return_logits=True)):
        backend = Sizes()
        engine = make_engine(backend)
        seen, other = engine.add_request([1, 2, 3], wanted), engine.add_request([4], plain(12))
        long = engine.add_request([5] * 30, plain(2))
        run(engine)
        assert tokens(seen) == toy_answer([1, 2, 3], 5)
        assert tokens(other) == toy_answer([4], 12)
        number, neighbour = seen.sequences[0].sequence_id, other.sequences[0].sequence_id
        places = [place for place, one in enumerate(backend.launches) if number in one]
        assert places == [0, 2, 4, 6, 8]
        assert sum(neighbour in one for one in backend.launches) == len(backend.launches) == 12
        chunks = [place for place, one in enumerate(backend.launches) if long.sequences[0].sequence_id in one]
        assert chunks == list(range(len(chunks)))
        assert_all_free(engine)


EVERY_KIND = [
    plain(9), plain(9, temperature=0.9, seed=3), plain(7, n=2, temperature=1.0, seed=4),
    plain(8, presence_penalty=1.5, repetition_penalty=1.3, logit_bias={3: 2.0}), plain(9, min_tokens=5, logprobs=2),
    plain(6, prompt_logprobs=1, logprobs=1), plain(8, n=1, best_of=2, temperature=1.0, seed=9),
    plain(4, beam_width=2, n=2), plain(8, stop=["q", "zz"]), plain(8, no_repeat_ngram_size=2),
    plain(6, forced_eos_token_id=(4,)), plain(9, allowed_token_ids=list(range(3, 20)), temperature=1.0, seed=1),
]


def all_kinds(engine: Engine) -> list[Any]:
    """What requests of every kind get together, with a text that is embedded beside them."""
    requests = [engine.add_request([3 + i, *range(i % 5)], one) for i, one in enumerate(EVERY_KIND)]
    vectors = engine.embed([[1, 2, 3, 4, 5, 6, 7]], show_progress=False)
    run(engine)
    found = [[(one.token_ids, one.text, one.finish_reason) for one in request.output().outputs] for request in requests]
    scored = [[None if one is None else one.token_id for one in request.prompt_logprobs or ()] for request in requests]
    return [found, scored, [vector.vector.tolist() for vector in vectors]]


@pytest.mark.parametrize("settings", [
    {}, {"num_kv_blocks": 12, "preemption": "swap", "host_kv_memory": 2048}, {"phases": "separate"},
    {"num_kv_blocks": 12, "preemption": "recompute"}, {"admission": "guaranteed", "scheduling_policy": "static"},
])
def test_requests_of_every_kind_get_what_they_get_one_by_one(settings: dict[str, Any]) -> None:
    """Draws, penalties, minimum lengths, log-probabilities, candidates, beams, stop strings, masks, embeddings, with
    preemption and swaps: tokens, texts and ends are those of an engine that waits for every step."""

    more: dict[str, Any] = {"tokenizer": LetterTokenizer(), "max_num_waiting": 64, **settings}
    alone, backend = ToyAhead(), ToyAhead()
    alone.is_ahead = False
    assert all_kinds(make_engine(backend, **more)) == all_kinds(make_engine(alone, **more))
    assert alone.num_looked_up == 0
    assert backend.num_looked_up > 30


@pytest.mark.torture
@pytest.mark.parametrize("has_faults", [False, True])
def test_callers_of_an_engine_that_launches_ahead(has_faults: bool) -> None:
    """Streams, futures, sessions, forks, files, cancels, lost readers, failing and undone steps: every completion is
    the oracle's, each request ends once, every law holds between two calls, and nothing is left."""
    num_looked_up = num_preempted = 0
    for seed in range(first_seed(), first_seed() + scaled(8)):
        simulation = EngineSimulation(
            700 + seed, has_faults, has_formation=seed % 3 == 0, is_ahead=True, keeps_states=seed % 4 == 3,
            has_windows=seed % 4 == 1).run()
        num_looked_up += simulation.backend.num_looked_up  # type: ignore[attr-defined]
        num_preempted += simulation.engine.stats().num_preemptions
    assert num_looked_up > 100
    assert has_faults or num_preempted > 0


def test_a_model_that_keeps_states_goes_on_from_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that was computed too much has written a state of its own, which nothing is found behind."""
    monkeypatch.setattr(chunk_ends, "LEAST_SAVED", 2)
    engine, answer = make_engine(HybridAhead()), toy_answer([1, 2, 3], 9)
    for _ in range(2):
        first = engine.add_request([1, 2, 3], plain(9, stop_token_ids=(answer[3],)))
        other = engine.add_request([1, 2, 3, *answer[:2]], plain(6))
        run(engine)
        assert tokens(first) == answer[: answer.index(answer[3]) + 1]
        assert tokens(other) == toy_answer([1, 2, 3, *answer[:2]], 6)
    assert_all_free(engine)


# What goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2, 4, 5])
def test_a_launch_that_fails_costs_no_token(step: int) -> None:
    """The tokens of the step before are told by the same call, and the step is taken again by itself."""
    backend = FlakyAhead(raise_on_step=step)
    engine = make_engine(backend)
    requests = [engine.add_request(prompt, plain()) for prompt in PROMPTS]
    run(engine)
    assert [tokens(one) for one in requests] == [toy_answer(prompt, 8) for prompt in PROMPTS]
    assert_all_free(engine)


def test_a_call_that_fails_withholds_no_end() -> None:
    """What a step has ended that was landed for such a call is told with the next step, which may be the last one."""
    ended = list[Request]()

    class Watching(EngineObserver):
        def request_ended(self, request: Request) -> None:
            ended.append(request)

    engine = make_engine(ToyAhead())
    engine.add_observer(Watching())
    request = engine.add_request(PROMPTS[0], plain(1))
    engine.step()
    with pytest.raises(LookupError), engine.exclusive():
        raise LookupError
    assert request.is_done
    run(engine)
    assert ended == [request]


class LosesDevice(ToyAhead):
    """Fails for good in a launch; later ones say less of it."""

    lost_on, has_lost_device = 0, False

    def forward(self, batch: RaggedRows) -> FloatArray:
        if self.has_lost_device:
            raise RuntimeError("something failed earlier")
        if self.num_launches == self.lost_on:
            self.has_lost_device = True
            raise RuntimeError("kernel decode: status 700")
        return super().forward(batch)


@pytest.mark.parametrize("launch", [1, 2, 4])
def test_a_launch_that_loses_the_device_says_why(launch: int) -> None:
    """The engine ends with what the launch said, and does not try it again."""
    backend = LosesDevice()
    backend.lost_on = launch
    engine = make_engine(backend)
    requests = [engine.add_request(prompt, plain()) for prompt in PROMPTS]
    with pytest.raises(EngineClosed, match=r"kernel decode: status 700.*restart the process"):
        run(engine)
    assert backend.num_launches == launch
    assert all("status 700" in str(request.error) for request in requests)


class Poisoned(ToyAhead):
    """Raises in every step of one sequence."""

    number = -1

    def forward(self, batch: RaggedRows) -> FloatArray:
        if self.number in batch.seq_ids:
            raise ValueError("a bad row")
        return super().forward(batch)


def test_a_row_that_makes_the_model_raise_ends_alone() -> None:
    """In its first step or later: its request ends with what it has, and its neighbours miss nothing."""
    for num_steps in (0, 3):
        backend = Poisoned()
        engine = make_engine(backend)
        bad, *others = [engine.add_request(prompt, plain()) for prompt in PROMPTS]
        for _ in range(num_steps):
            engine.step()
        backend.number = bad.sequences[0].sequence_id
        run(engine)
        assert isinstance(bad.error, StepFailed)
        got = tokens(bad)
        assert got == toy_answer(PROMPTS[0], 8)[: len(got)]
        assert [tokens(one) for one in others] == [toy_answer(prompt, 8) for prompt in PROMPTS[1:]]
        assert_all_free(engine)


def test_a_row_without_usable_logits_ends_alone() -> None:
    """NaN is known when the next row is on its way: the request ends without a token, and no token is negative."""
    backend = FlakyAhead(nan_on=(4, 1))
    engine = make_engine(backend)
    requests = [engine.add_request(prompt, plain()) for prompt in PROMPTS]
    run(engine)
    ended = [one for one in requests if one.error is not None]
    assert [type(one.error) for one in ended] == [InvalidLogits]
    for one, prompt in zip(requests, PROMPTS, strict=True):
        assert tokens(one) == toy_answer(prompt, 8)[: len(tokens(one)) if one in ended else 8]
    assert_all_free(engine)


class LosesTokens(ToyAhead):
    """Its tokens cannot be read in chosen launches."""

    lost_on: tuple[int, ...] = ()

    def lose(self, engine: Engine) -> None:
        runner: Any = engine._runner
        choose = runner.choose

        def losing(logits: Any, rows: Any) -> Any:
            wait, number = choose(logits, rows), self.num_launches

            def waited() -> Any:
                if number in self.lost_on:
                    raise RuntimeError("the copy failed")
                return wait()

            return waited

        runner.choose = losing


def test_tokens_that_cannot_be_read_are_computed_again() -> None:
    """A step whose tokens are lost is taken back with the one that was launched behind it; nobody notices."""
    backend = LosesTokens()
    backend.lost_on = (3, 6)
    engine = make_engine(backend)
    backend.lose(engine)
    requests = [engine.add_request(prompt, plain(10)) for prompt in PROMPTS]
    run(engine)
    assert [tokens(one) for one in requests] == [toy_answer(prompt, 10) for prompt in PROMPTS]
    assert all(one.error is None for one in requests)
    assert_all_free(engine)


@pytest.mark.parametrize("keeps_states", [False, True])
def test_a_call_may_break_off_at_any_line(keeps_states: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception from outside, or Ctrl-C, at lines chosen by a seed: all laws hold at once, every request completes
    with its own tokens and text, and no block is held in the end."""
    monkeypatch.setattr(chunk_ends, "LEAST_SAVED", 1)
    monkeypatch.setattr(Scenario, "is_ahead", True)
    monkeypatch.setattr(Scenario, "keeps_states", keeps_states)
    explore(lose, Lost, 20, seed=7)
    explore(lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt, 5, seed=8)


# What comes between two calls ----------------------------------------------------------------------------------------


def begun(**settings: Any) -> tuple[Engine, list[Request]]:
    """An engine with a step in flight."""
    engine = make_engine(ToyAhead(), **settings)
    requests = [engine.add_request(prompt, plain()) for prompt in PROMPTS[:2]]
    for _ in range(3):
        engine.step()
    assert not engine.scheduler.has_landed
    return engine, requests


def test_aborted_requests_leave_nothing_in_flight() -> None:
    """Whoever aborts all requests gets an engine at rest, whose blocks are free; whoever aborts one does not wait."""
    engine, requests = begun()
    requests[0].abort()
    assert not engine.scheduler.has_landed
    requests[1].abort()
    assert engine.scheduler.has_landed
    assert not engine.has_pending_requests()
    for one, prompt in zip(requests, PROMPTS, strict=False):
        assert tokens(one) == toy_answer(prompt, 8)[: len(tokens(one))]
    assert_all_free(engine)


def test_a_completion_that_is_cut_off_and_goes_on_gets_no_token_of_before() -> None:
    """A turn that comes between a launch and its tokens is not given the tokens of the turn before."""
    engine, (first, second) = begun()
    first.abort()
    known = [*PROMPTS[0], *tokens(first)]
    first.extend([6, 6], plain(5))
    assert engine.scheduler.has_landed
    run(engine)
    assert tokens(first) == toy_answer([*known, 6, 6], 5)
    assert tokens(second) == toy_answer(PROMPTS[1], 8)
    assert_all_free(engine)


def test_an_aborted_request_does_not_come_back_with_a_step_that_is_taken_back() -> None:
    """It was aborted while the step was on its way whose tokens cannot be read."""
    backend = LosesTokens()
    engine = make_engine(backend)
    backend.lose(engine)
    requests = [engine.add_request(prompt, plain()) for prompt in PROMPTS[:2]]
    for _ in range(3):
        engine.step()
    backend.lost_on = (backend.num_launches,)
    requests[0].abort()
    run(engine)
    assert requests[0].output().outputs[0].finish_reason == "abort"
    assert len(tokens(requests[0])) == 2
    assert tokens(requests[1]) == toy_answer(PROMPTS[1], 8)
    assert_all_free(engine)


def reused(engine: Engine) -> list[Any]:
    """What prompts find that begin as earlier completions do, in a small pool, and a session after others came by."""
    found = list[Any]()
    for first in ([1, 2, 3], [1, 2], [1]):
        begun = [engine.add_request(prompt, plain(9)) for prompt in (first, [7, 7], [7, 7, 7], [8])]
        run(engine)
        again = engine.add_request([*first, *tokens(begun[0])], plain(2))
        run(engine)
        found.append(again.output().num_cached_tokens)
    with engine.session(plain(6)) as session:
        engine.add_request([30], plain(12))
        session.ask([3, 1, 4, 1, 5])
        for number in range(8):
            engine.generate([[number + 9] * 12], plain(8), show_progress=False)
        found.append(session.ask([2, 6]).num_cached_tokens)
    return [*found, engine.stats().swapped_out_bytes > 0]


def test_what_was_computed_is_found_as_if_steps_were_taken_one_by_one() -> None:
    """Blocks get the keys of their tokens although plans were made when the last one was not known, and what ends while
    a step is in flight is kept on the host."""
    found = []
    for is_ahead in (False, True):
        clock = FakeClock()
        backend = Paced(clock)
        backend.is_ahead = is_ahead
        found.append(reused(toy_engine(
            backend=backend, clock=clock, speculation="off", num_kv_blocks=16, max_num_seqs=3, host_kv_memory=65536)))
    assert found[0] == found[1]
    assert found[0][-1]
    assert min(found[0][:-1]) > 4


def test_who_looks_at_the_engine_sees_it_at_rest() -> None:
    """Quotes, explanations and changes of anything else end the step in flight; what it gave is told by the next call,
    even where that has nothing to compute."""
    engine, requests = begun()
    seen = [len(tokens(one)) for one in requests]
    engine.quote([1, 2], plain(4), exact=True)
    assert engine.scheduler.has_landed
    assert [len(tokens(one)) for one in requests] == [one + 1 for one in seen]
    assert sum(len(delta.token_ids) for delta in engine.step()) == 2
    engine.step()
    assert engine.explain(requests[0].request_id).state == "decode"
    while not all(one.is_done for one in requests):
        assert engine.has_pending_requests()
        engine.quote([1, 2], plain(4))
        engine.step()
    assert [tokens(one) for one in requests] == [toy_answer(prompt, 8) for prompt in PROMPTS[:2]]
    assert not engine.has_pending_requests()


def test_a_request_that_was_launched_has_started() -> None:
    """A time limit for the queue does not end a request whose first step is in flight."""
    clock = FakeClock()
    engine = toy_engine(backend=ToyAhead(), speculation="off", clock=clock, max_num_seqs=1, queue_timeout_s=5.0)
    first, second = (engine.add_request(prompt, plain()) for prompt in PROMPTS[:2])
    engine.step()
    clock.advance(6.0)
    while engine.has_pending_requests():
        engine.step()
    assert tokens(first) == toy_answer(PROMPTS[0], 8)
    assert isinstance(second.error, QueueTimeout)


def test_readers_of_an_async_engine_get_every_token() -> None:
    """Streams end with their last token although the engine's thread finds nothing more to compute by then."""
    async def main() -> list[Any]:
        async with AsyncEngine(make_engine(ToyAhead())) as engine:
            async def read(prompt: list[int]) -> list[int]:
                return [token async for one in engine.generate(prompt, plain()) for token in one.token_ids]

            found = await asyncio.gather(*map(read, PROMPTS))
            await engine.quote([1, 2], plain(3))
            return list(found)

    assert asyncio.run(main()) == [toy_answer(prompt, 8) for prompt in PROMPTS]


class Timed(EngineObserver):
    """The seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def step_timed(self, plan: SchedulePlan, seconds: float) -> None:
        self.seconds.append(seconds)


def test_a_step_is_timed_from_the_end_of_the_one_before() -> None:
    """What the step before has taken is no part of it, nor is a pause: the steps of a time are as long as that time."""
    clock, timed = FakeClock(), Timed()
    engine = toy_engine(backend=Paced(clock), speculation="off", clock=clock)
    engine.add_observer(timed)
    for first in range(2):
        timed.seconds.clear()
        begin_s = clock.now()
        engine.add_request([first, 2, 3], plain(5))
        while engine.has_pending_requests():
            engine.step()
        assert timed.seconds == [4.0, 1.0, 1.0, 1.0, 0.0]
        assert sum(timed.seconds) == clock.now() - begin_s
        clock.advance(100.0)


# Recordings ----------------------------------------------------------------------------------------------------------


def recorded(tmp_path: Path, **settings: Any) -> Any:
    engine = toy_engine("tokens", ToyAhead(), num_kv_blocks=12, speculation="off", **settings)
    requests = [engine.add_request([3 + i, *range(i % 4)], one) for i, one in enumerate(EVERY_KIND[:7])]
    for number in range(40):
        engine.step()
        if number == 6:
            requests[0].abort()
    while engine.has_pending_requests():
        engine.step()
    engine.dump_recording(tmp_path / "recording.gz")
    return engine, read_recording(tmp_path / "recording.gz")


def test_decisions_of_steps_ahead_are_taken_again(tmp_path: Path) -> None:
    """A replay takes the same decisions, and other settings can be tried from every place of the recording."""
    engine, recording = recorded(tmp_path)
    assert recording.header["version"] == 8
    replayed = replay_decisions(recording)
    assert replayed.difference is None
    assert replayed.num_steps == engine.scheduler.counters.num_steps > 20
    outcome = recorded_outcome(recording)
    assert compare(recording, {"max_num_seqs": 2}).changed.num_steps > 0
    (segment,) = recording.segments
    for place in range(0, len(segment["events"]), 7):
        what_if = WhatIf(recording, {}, leave_at=(0, place))
        assert sorted(what_if.run().finished) == sorted(outcome.finished)
        assert what_if.scheduler.stats().num_blocks_used == 0


def test_a_full_ring_lets_the_engine_rest(tmp_path: Path) -> None:
    """A segment begins when no step is in flight: the ring stays as small as it is without steps ahead."""
    engine = toy_engine("tokens", ToyAhead(), num_kv_blocks=20, speculation="off")
    ring_of(engine)._max_steps = 5
    requests = [engine.add_request(prompt, plain(30)) for prompt in PROMPTS[:2]]
    while engine.has_pending_requests():
        engine.step()
    assert [tokens(one) for one in requests] == [toy_answer(prompt, 30) for prompt in PROMPTS[:2]]
    assert next(segment.num_steps for segment in ring_of(engine).segments) in (5, 6)
    assert len(ring_of(engine).segments) == 2
    engine.dump_recording(tmp_path / "recording.gz")
    assert replay_decisions(read_recording(tmp_path / "recording.gz")).difference is None


