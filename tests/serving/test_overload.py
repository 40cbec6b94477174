"""More callers than the engine can serve: refused at once and in their own threads, and nobody else is slowed down.

Counted, not timed: commands between two steps, commands and tokenizer calls of a refusal, lines run by a cancellation.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from pagedcore.engine.builder import build_components
from pagedcore.engine.engine import Engine
from pagedcore.errors import (
    EngineOverloaded,
    InvalidRequest,
    InvalidSampling,
    PromptEmpty,
    QueueTimeout,
    TooManySequences,
)
from pagedcore.outputs import RequestOutput
from pagedcore.request_options import RequestOptions
from pagedcore.sampling_params import SamplingParams
from pagedcore.sequence import Sequence
from pagedcore.serving import commands, engine_loop
from pagedcore.serving.async_engine import QUEUE_TIMEOUT_S, AsyncEngine
from pagedcore.serving.commands import Commands, Places
from pagedcore.serving.engine_loop import EngineLoop, StreamFlusher
from pagedcore.serving.long_prompts import LONG_TEXT
from pagedcore.serving.stream import CompletionFuture, Stream
from support.async_helpers import params
from support.doubles import FakeClock, GatedBackend, ToyBackend, toy_answer
from support.engine_builders import make_engine


@pytest.fixture
def backend() -> GatedBackend:
    """A backend that computes when the test says so."""
    return GatedBackend()


@contextmanager
def serving(backend: GatedBackend, **settings: Any) -> Iterator[AsyncEngine]:
    """An engine whose gate is open when it is closed, however the test ends."""
    with AsyncEngine(make_engine(backend, **settings)) as engine:
        try:
            yield engine
        finally:
            backend.gate.set()


def start_one(engine: AsyncEngine, backend: GatedBackend) -> Future[RequestOutput]:
    """Let one request get into a step, which does not end before the gate is open."""
    future = engine.submit([7], params(2))
    assert backend.is_entered.wait(10)
    return future


def tokens(future: Future[RequestOutput]) -> list[int]:
    return list(future.result(30).outputs[0].token_ids)


class CountingTokenizer:
    """Takes every text for one token, and counts."""

    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.num_calls = 0

    def encode(self, text: Any, *_: Any, add_special_tokens: bool = True) -> list[int]:
        """Count."""
        self.num_calls += 1
        return [1]

    encode_chat = encode_chat_turn = encode

    def decode(self, token_ids: Any) -> str:
        """Return nothing."""
        return ""

    def new_detokenizer(self) -> Any:
        """Return what says nothing either."""
        return SimpleNamespace(push=self.decode, finish=str)


@pytest.mark.parametrize("prompt", ["short", "x" * (LONG_TEXT + 1), [1], [{"role": "user", "content": "hi"}]])
def test_a_refusal_sends_no_command_and_tokenises_nothing(
    prompt: Any, backend: GatedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is decided in the caller's thread, before its prompt is looked at, at every door."""
    tokenizer, puts = CountingTokenizer(), list[object]()
    with serving(backend, tokenizer=tokenizer, max_num_waiting=1) as engine:
        start_one(engine, backend)
        engine.submit([1], params(1))
        with monkeypatch.context() as patched:
            patched.setattr(Commands, "put", lambda self, *command: puts.append(command))
            with pytest.raises(EngineOverloaded) as refused:
                engine.submit(prompt)
            with pytest.raises(EngineOverloaded):
                next(engine.generate_sync(prompt))
            with pytest.raises(EngineOverloaded):
                asyncio.run(anext(engine.generate(prompt)))  # type: ignore[arg-type]
        assert (refused.value.num_waiting, refused.value.limit) == (1, 1)
        assert (tokenizer.num_calls, puts) == (0, [])


def test_from_many_threads_exactly_as_many_are_taken_as_have_room_and_all_of_them_are_answered(
    backend: GatedBackend
) -> None:
    """Nobody who was taken is refused later, and nobody is refused while there is room."""
    limit, num_threads = 13, 8
    with serving(backend, max_num_seqs=1, max_num_waiting=limit) as engine:
        start_one(engine, backend)
        taken, refused = list[Future[RequestOutput]](), list[EngineOverloaded]()
        barrier = threading.Barrier(num_threads)

        def ask() -> None:
            barrier.wait()
            for _ in range(20):
                try:
                    taken.append(engine.submit([3], params(2)))
                except EngineOverloaded as error:
                    refused.append(error)

        threads = [threading.Thread(target=ask) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(taken), len(refused)) == (limit, 20 * num_threads - limit)
        backend.gate.set()
        assert [tokens(future) for future in taken] == [toy_answer([3], 2)] * len(taken)


def test_sequences_count_not_requests(backend: GatedBackend) -> None:
    """As in the waiting queue; a request that could never fit is refused for that."""
    several = {n: SamplingParams(max_tokens=2, n=n, temperature=1.0, ignore_eos=True) for n in (1, 2, 3, 6)}
    with serving(backend, max_num_seqs=1, max_num_waiting=4) as engine:
        with pytest.raises(TooManySequences):
            engine.submit([1], several[6])
        start_one(engine, backend)
        futures = [engine.submit([1], several[3])]
        with pytest.raises(EngineOverloaded):
            engine.submit([1], several[2])
        futures.append(engine.submit([1], several[1]))
        backend.gate.set()
        assert [len(future.result(30).outputs) for future in futures] == [3, 1]


async def test_every_place_is_given_back_once_however_its_request_ends(backend: GatedBackend) -> None:
    """Refused by the door, by the tokenizer, by the engine; cancelled while sent, held, waiting; answered."""
    with serving(backend, max_num_seqs=1, max_num_waiting=3) as engine:
        places = engine._commands.places
        for prompt, error in (([], PromptEmpty), (5, InvalidRequest), ("text without a tokenizer", InvalidRequest)):
            with pytest.raises(error):
                engine.submit(prompt, params(2))  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest):
            await asyncio.wrap_future(engine.submit("x" * (LONG_TEXT + 1), params(2)))
        with pytest.raises(InvalidSampling):
            engine.submit([1], object())  # type: ignore[arg-type]
        assert places.sinks() == []
        first = start_one(engine, backend)
        waiting = [engine.submit([value], params(2), wait_for_room=True, request_id="label") for value in range(8)]
        for future in waiting[1::2]:
            future.cancel()
        backend.gate.set()
        ends = await asyncio.gather(*map(asyncio.wrap_future, waiting[::2]), return_exceptions=True)
        assert tokens(first) == toy_answer([7], 2)
        assert any(isinstance(end, InvalidRequest) for end in ends), "the label is another request's"
        await engine.call(lambda _: None)
        assert (places.sinks(), places._num_taken, places._count_in_engine()) == ([], 0, 0)


def test_those_who_wait_for_room_have_a_limit(backend: GatedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over it they are refused as others are; nobody who does not wait passes those who do."""
    monkeypatch.setattr(commands, "MAX_HELD_SEQUENCES", 3)
    with serving(backend, max_num_seqs=1, max_num_waiting=2) as engine:
        first = start_one(engine, backend)
        held = [engine.submit([value], params(2), wait_for_room=True) for value in range(5)]
        for may_wait, limit in ((True, 5), (False, 2)):
            with pytest.raises(EngineOverloaded) as refused:
                engine.submit([9], params(2), wait_for_room=may_wait)
            assert (refused.value.num_waiting, refused.value.limit) == (5, limit)
        held[3].cancel()
        backend.gate.set()
        assert [tokens(future) for future in (first, *held[:3])] == [toy_answer([v], 2) for v in (7, 0, 1, 2)]


def make_loop(clock: FakeClock | None = None, **settings: Any) -> tuple[EngineLoop, Commands]:
    """An engine loop that a test turns by hand, with one request that runs for long."""
    clock = clock or FakeClock()
    engine = Engine(build_components(ToyBackend(), **{
        "num_kv_blocks": 64, "block_size": 4, "max_num_seqs": 1, "max_num_batched_tokens": 8, "speculation": "off",
        **settings,
    }), clock)
    sent = Commands(Places(engine.input_processor.max_num_waiting, lambda: engine.scheduler.num_unstarted))
    loop = EngineLoop(engine, sent, StreamFlusher(0.0, clock))
    engine.add_request([1], params(200))
    loop.run_once()
    return loop, sent


def send(loop: EngineLoop, sent: Commands, *, may_wait: bool = True, **options: Any) -> CompletionFuture[RequestOutput]:
    """Send a request as ``AsyncEngine`` does."""
    sink, prepared = CompletionFuture[RequestOutput](), loop.engine.prepare([2], params(1), **options)
    sent.places.take(sink, 1, may_wait)
    sent.put(lambda worker: worker.accept(prepared, sink), sink)
    return sink


def test_a_request_that_is_handed_over_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two places, one of a request that the engine's queue is just taking, another caller gets the second one."""
    loop, sent = make_loop(max_num_waiting=2)
    other, ends = CompletionFuture[RequestOutput](), list[str]()

    def take() -> None:
        sent.places.take(other, 1, False)
        ends.append("taken")

    caller = threading.Thread(target=take)

    def accept(processed: Any, **options: Any) -> Any:
        request = original(processed, **options)
        caller.start()
        # Why: long enough for a caller that does not wait for the hand-over to be refused.
        caller.join(0.1)
        return request

    original = loop.engine.accept
    monkeypatch.setattr(loop.engine, "accept", accept)
    send(loop, sent, may_wait=False)
    loop.run_once()
    caller.join()
    assert ends == ["taken"]
    with pytest.raises(EngineOverloaded):
        sent.places.take(CompletionFuture(), 1, False)


def test_commands_between_two_steps_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, a step comes after so many; none is lost."""
    monkeypatch.setattr(engine_loop, "MAX_COMMANDS", 10)
    loop, sent = make_loop()
    ran, counts = list[int](), list[int]()
    for number in range(25):
        sent.put(lambda _, number=number: ran.append(number), CompletionFuture())  # type: ignore[misc]
    for _ in range(4):
        before = loop.engine.stats().num_steps
        loop.run_once()
        counts.append(len(ran))
        assert loop.engine.stats().num_steps == before + 1
    assert (ran, counts) == (list(range(25)), [10, 20, 25, 25])


def test_commands_between_two_steps_are_bounded_in_time() -> None:
    """A step comes after a hundredth of a second of commands."""
    clock = FakeClock()
    loop, sent = make_loop(clock)
    ran = list[int]()

    def take_long(_: EngineLoop) -> None:
        clock.advance(0.4 * engine_loop.COMMANDS_S)
        ran.append(1)

    for _ in range(7):
        sent.put(take_long, CompletionFuture())
    loop.run_once()
    assert len(ran) == 3
    loop.run_once()
    assert len(ran) == 6


def test_callers_who_send_while_commands_run_do_not_keep_the_step_away() -> None:
    """A command that sends the next one, for ever, gets its turn once in so many, and steps go on."""
    loop, sent = make_loop()
    ran = Counter[str]()

    def again(_: EngineLoop) -> None:
        ran["commands"] += 1
        sent.put(again, CompletionFuture())

    sent.put(again, CompletionFuture())
    loop.run_once()
    assert ran["commands"] == engine_loop.MAX_COMMANDS


def test_aborts_are_carried_out_before_every_step_whatever_else_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """They pass thousands of commands, and free running, waiting and held requests."""
    monkeypatch.setattr(engine_loop, "MAX_COMMANDS", 10)
    loop, sent = make_loop(max_num_waiting=2)
    sinks = [send(loop, sent) for _ in range(6)]
    loop.run_once()
    assert (len(loop._sinks), len(loop._held)) == (2, 4)
    for _ in range(1000):
        sent.put(lambda _: None, CompletionFuture())
    for sink in sinks:
        sink.future.cancel()
        sent.abort(sink)
    loop.run_once()
    assert (len(loop._sinks), len(loop._held), sent.places.sinks()) == (0, 0, [])
    assert loop.engine.scheduler.num_unstarted == 0


def test_what_was_aborted_before_a_command_was_sent_is_gone_when_it_runs() -> None:
    """A caller that aborts a request may send another with its label at once, also between two commands."""
    loop, sent = make_loop(max_num_waiting=4)
    first = send(loop, sent, request_id="mine")
    loop.run_once()
    second = list[CompletionFuture[RequestOutput]]()

    def abort_and_send(_: EngineLoop) -> None:
        sent.abort(first)
        second.append(send(loop, sent, request_id="mine"))

    sent.put(abort_and_send, CompletionFuture())
    loop.run_once()
    assert not second[0].future.done()
    assert second[0] in loop._requests


def lines_of_cancelling(num_held: int) -> int:
    """How many lines of the engine loop run, loops inside of a line counted, to cancel all that are held."""
    loop, sent = make_loop(max_num_waiting=1)
    sinks, lines = [send(loop, sent) for _ in range(num_held)], 0
    while len(loop._held) < num_held - 1:
        loop.run_once()

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        lines += frame.f_code.co_filename == engine_loop.__file__
        return trace

    for sink in reversed(sinks):
        sink.future.cancel()
        sent.abort(sink)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        loop._take_aborts()
    finally:
        sys.settrace(before)
    assert not loop._held
    return lines


def test_cancelling_a_held_request_costs_the_same_however_many_are_held() -> None:
    """Four times as many cost four times as much, all together, not sixteen times."""
    few, many = lines_of_cancelling(100), lines_of_cancelling(400)
    assert many < 4.5 * few


def test_held_requests_are_taken_in_order_and_cancelled_ones_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """First come, first served, whatever was taken out between."""
    monkeypatch.setattr(engine_loop, "IDLE_CHECK_S", 0.0)
    loop, sent = make_loop(max_num_waiting=1)
    sinks = [send(loop, sent) for _ in range(6)]
    loop.run_once()
    for sink in sinks[1:6:2]:
        sent.abort(sink)
    ended = []
    for request in list(loop.engine.requests):
        if request not in loop._sinks:
            request.abort()
    for _ in range(12):
        loop.run_once()
        ended += [number for number, sink in enumerate(sinks) if sink.future.done() and number not in ended]
    assert ended == [0, 2, 4]


def test_a_held_request_times_out_as_a_waiting_one() -> None:
    """After ``queue_timeout_s`` it ends with QueueTimeout and gives its place back; what is held since later stays."""
    clock = FakeClock()
    loop, sent = make_loop(clock, max_num_waiting=1, queue_timeout_s=10.0)
    early = [send(loop, sent) for _ in range(3)]
    loop.run_once()
    clock.advance(6.0)
    late = send(loop, sent)
    loop.run_once()
    clock.advance(5.0)
    loop.run_once()
    assert all(isinstance(one.future.exception(), QueueTimeout) for one in early[1:])
    assert isinstance(early[0].future.result().outputs[0].error, QueueTimeout)
    assert not late.future.done()
    loop.run_once()
    assert (late in loop._requests, sent.places.sinks()) == (True, [])
    clock.advance(5.1)
    loop.run_once()
    assert isinstance(late.future.result().outputs[0].error, QueueTimeout), "it was held for a part of its time"


def test_the_limit_of_the_queue_is_five_minutes_unless_it_is_said() -> None:
    """For an AsyncEngine; an Engine of its own waits as long as its queue is."""
    own = make_engine()
    assert own.turn_rules.queue_timeout_s is None
    with AsyncEngine(own):
        assert own.turn_rules.queue_timeout_s == QUEUE_TIMEOUT_S == 300.0
    set_by_hand = make_engine(queue_timeout_s=7.0)
    with AsyncEngine(set_by_hand):
        assert set_by_hand.turn_rules.queue_timeout_s == 7.0


def test_a_step_looks_at_one_waiting_request_for_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait, unless some are over it."""
    clock = FakeClock()
    engine = Engine(build_components(ToyBackend(), num_kv_blocks=64, max_num_seqs=1, max_num_waiting=500), clock)
    requests = [engine.add_request([1], params(2)) for _ in range(300)]
    waiting, seen = engine.scheduler.waiting, list[Sequence]()

    def never_started() -> Iterator[Sequence]:
        for one in list(waiting._never_started.values()):
            seen.append(one)
            yield one

    monkeypatch.setattr(waiting, "never_started", never_started)
    engine.turn_rules.queue_timeout_s = 5.0
    engine.turn_rules.apply()
    assert not any(request.is_done for request in requests)
    assert len(seen) == 1
    clock.advance(6.0)
    engine.turn_rules.apply()
    assert all(request.is_done for request in requests)


def test_a_request_of_the_step_in_flight_is_started(backend: GatedBackend) -> None:
    """However long its first step takes, it does not count as waiting; one that a failed step gives back does."""
    with serving(backend, max_num_seqs=2, max_num_waiting=2) as engine:
        first = start_one(engine, backend)
        waiting = [engine.submit([value], params(2)) for value in range(2)]
        with pytest.raises(EngineOverloaded):
            engine.submit([9], params(2))
        backend.gate.set()
        assert [tokens(future) for future in (first, *waiting)] == [toy_answer([v], 2) for v in (7, 0, 1)]
    inner = make_engine(max_num_waiting=1)
    inner.add_request([1], params(2))
    plan = inner.scheduler.schedule()
    inner.scheduler.reserve(plan)
    assert (inner.scheduler.num_unstarted, inner.scheduler.waiting.num_never_started) == (0, 1)
    inner.scheduler.rollback(plan)
    assert (inner.scheduler.num_unstarted, inner.scheduler.waiting.num_never_started) == (1, 1)


def test_a_turn_meets_a_full_queue_as_ever() -> None:
    """The engine refuses it, its session stays as it was, and the same turn is answered when there is room."""
    loop, sent = make_loop(max_num_waiting=1)
    session, waiting = loop.engine.session(params(2)), send(loop, sent)
    loop.run_once()
    refused, taken = Stream(), Stream()
    for stream in (refused, taken):
        sent.put(lambda worker, stream=stream: worker.serve(lambda: session.extend([3]), stream), stream)  # type: ignore[misc]
        while not stream.has_ended:
            loop.run_once()
        while stream is refused and not waiting.future.done():
            loop.run_once()
    with pytest.raises(EngineOverloaded):
        refused.take()
    assert [token for delta in taken.take() for token in delta.token_ids] == toy_answer([3], 2)
    assert session.token_ids == (3, *toy_answer([3], 2))


def test_a_place_that_a_turn_has_taken_refuses_nobody_later() -> None:
    """A request whose place is gone, because code on the engine thread added another one, waits for the next."""
    loop, sent = make_loop(max_num_waiting=1)
    sink = CompletionFuture[RequestOutput]()
    sent.places.take(sink, 1, False)
    loop.engine.add_request([5], params(1))
    prepared = loop.engine.prepare([2], params(1))
    sent.put(lambda worker: worker.accept(prepared, sink), sink)
    loop.run_once()
    assert list(loop._held) == [sink]
    while not sink.future.done():
        loop.run_once()
    assert list(sink.future.result().outputs[0].token_ids) == toy_answer([2], 1)


def test_a_stream_that_left_before_it_was_taken_is_never_begun() -> None:
    """Its place comes back with the command that would have begun it."""
    loop, sent = make_loop(max_num_waiting=4)
    stream, prepared = Stream(), loop.engine.input_processor.process([1], params(1), RequestOptions())
    sent.places.take(stream, 1, False)
    sent.put(lambda worker: worker.accept(prepared, stream), stream)
    stream.is_cancelled = True
    loop.run_once()
    assert (loop._sinks, sent.places.sinks()) == ({}, [])
