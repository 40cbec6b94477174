"""Calls between steps are transactions too: whatever breaks one off, it was carried out or not, and nothing stays."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from pagedcore.analysis.diagnosis.invariants import check, snapshot
from pagedcore.engine.engine import Engine
from pagedcore.requests.request import Request
from pagedcore.sessions.session import Session
from support.doubles import toy_answer
from support.engine_builders import make_engine, run
from support.interrupts import Lost, interrupted_at
from support.step_scenario import LetterTokenizer, params

PAST, FURTHER = [1, 2, 3, 4, 5, 6, 7], [8, 9]
_MOST_STEPS = 20


@pytest.fixture(autouse=True)
def _no_installed_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for them takes longer than a call."""
    monkeypatch.setenv("PAGEDCORE_DISABLE_PLUGIN_AUTOLOAD", "1")


def engine_of() -> Engine:
    return make_engine(tokenizer=LetterTokenizer(), host_kv_memory=64 * 32, preemption="swap", check_invariants=False)


def asked(engine: Engine) -> Session:
    session = engine.session(params(3))
    session.ask(PAST)
    return session


def parked(engine: Engine, tier: Any) -> Session:
    session = asked(engine)
    session.park(tier)
    engine.step()
    return session


def cut_off(engine: Engine) -> Session:
    session = engine.session(params(5))
    request = session.extend(PAST)
    engine.step()
    engine.step()
    request.abort()
    return session


def finished(engine: Engine, **options: Any) -> Request:
    request = engine.add_request(PAST, params(3, **options), request_id="label")
    run(engine)
    return request


class Case(NamedTuple):
    """A call, what comes before it, and the tokens that its session or request has if it was carried out."""

    prepare: Callable[[Engine], Any]
    call: Callable[[Engine, Any], Any]
    tokens_after: list[int] | None = None


def turn(further: list[int], max_tokens: int = 3) -> list[int]:
    before = PAST + toy_answer(PAST, 3)
    return before + further + toy_answer(before + further, max_tokens)


CASES = {
    "add": Case(lambda engine: None, lambda engine, _: engine.add_request([4], params(2), request_id="label")),
    "add several": Case(lambda engine: None, lambda engine, _: engine.add_request(
        [4], params(2, n=2, best_of=3, temperature=1.0), request_id="label")),
    "extend": Case(finished, lambda engine, request: request.extend(FURTHER), turn(FURTHER)),
    "extend with best of": Case(finished, lambda engine, request: request.extend(
        FURTHER, params(3, best_of=2, temperature=0.0)), turn(FURTHER)),
    "extend one of several": Case(lambda engine: finished(engine, n=2), lambda engine, request: request.extend(
        FURTHER, params(3, n=2), index=0), turn(FURTHER)),
    "remove": Case(lambda engine: finished(engine, n=2), lambda engine, request: request.remove()),
    "first turn": Case(lambda engine: engine.session(params(3)), lambda engine, session: session.extend(PAST),
                       PAST + toy_answer(PAST, 3)),
    "turn": Case(asked, lambda engine, session: session.extend(FURTHER), turn(FURTHER)),
    "turn of a file": Case(lambda engine: parked(engine, "disk"), lambda engine, session: session.extend(FURTHER),
                           turn(FURTHER)),
    "complete": Case(cut_off, lambda engine, session: session.extend(None), PAST + toy_answer(PAST, 5)),
    "park on the host": Case(asked, lambda engine, session: session.park("host")),
    "park on the disk": Case(asked, lambda engine, session: session.park("disk")),
    "resume from the host": Case(lambda engine: parked(engine, "host"), lambda engine, session: session.resume()),
    "resume from the disk": Case(lambda engine: parked(engine, "disk"), lambda engine, session: session.resume()),
    "fork": Case(asked, lambda engine, session: session.fork()),
    "close": Case(lambda engine: parked(engine, "host"), lambda engine, session: session.close()),
    "close within a turn": Case(cut_off, lambda engine, session: session.close()),
    "close the engine": Case(lambda engine: parked(engine, "host"), lambda engine, session: engine.close()),
}


def broken_off_at(case: Case, lines: Iterator[int]) -> None:
    """Demand all the laws after the call was broken off at each of these lines, in an engine of its own each time."""
    for line in lines:
        engine = engine_of()
        held = case.prepare(engine)
        before = tokens_of(held)
        with pytest.raises(Lost), interrupted_at(line):
            case.call(engine, held)
        assert check(snapshot(engine.scheduler)) == [], f"line {line}"
        for _ in range(_MOST_STEPS if not engine._is_closed else 0):
            engine.step()
        assert not engine.has_pending_requests(), f"line {line}"
        if tokens_of(held) != before:
            assert tokens_of(held) == case.tokens_after, f"line {line}"
        judge(engine, held, f"line {line}")


def tokens_of(held: Session | Request | None) -> list[int]:
    if isinstance(held, Session):
        return list(held.token_ids)
    return list(held.sequences[0].token_ids) if held is not None else []


def judge(engine: Engine, held: Any, where: str) -> None:
    """What is left has its text, and can go on or be closed; then nothing is kept of it."""
    if tokens_of(held) and list(engine.requests):
        output = held.output()
        assert output.is_finished, where
        assert [one.text for one in output.outputs] == [
            "".join(chr(ord("a") + token_id % 26) for token_id in one.token_ids) + "." for one in output.outputs], where
    if isinstance(held, Session):
        if not held._is_closed and not engine._is_closed:
            known = tokens_of(held)
            held.ask([4], params(2))
            assert tokens_of(held) == [*known, 4, *toy_answer([*known, 4], 2)], where
        held.close()
        for other in engine.sessions:
            assert other is not held, where
            other.close()
    elif held is not None:
        held.remove()
    assert list(engine.requests) == [], where
    stats = engine.stats()
    kept = (stats.num_blocks_used, len(engine._outputs.by_sequence), len(engine.sessions.parking._parked),
            sum(map(len, (engine.scheduler.kv_cache.host.pins, engine.scheduler.moves.parked))))
    assert kept == (0, 0, 0, 0), where
    engine.close()
    assert len(engine.sessions) == 0, where


def num_lines(case: Case) -> int:
    engine = engine_of()
    held = case.prepare(engine)
    with interrupted_at(0) as count:
        case.call(engine, held)
    return count[0]


@pytest.mark.parametrize("name", CASES)
def test_a_call_may_break_off_at_any_line(name: str) -> None:
    """An exception from outside, at lines chosen by a seed: all laws hold at once; what the call concerned is as before
    or as after it, with its text, and goes on; once it is removed, nothing is left that no caller knows of."""
    case = CASES[name]
    last = num_lines(case)
    broken_off_at(case, iter(random.Random(11).sample(range(1, last + 1), min(12, last))))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_call_may_break_off_at_every_line(name: str) -> None:
    """As above."""
    broken_off_at(CASES[name], iter(range(1, num_lines(CASES[name]) + 1)))


def test_what_was_removed_has_its_text() -> None:
    """The outputs of a request and of a session are the same before and after ``remove``, ``close`` and the end of the
    engine: tokens, text without the stop string, and the reason."""
    engine = engine_of()
    answer = toy_answer(PAST, 6)
    stop = "".join(chr(ord("a") + token_id % 26) for token_id in answer[2:4])
    request = engine.add_request(PAST, params(6, stop=[stop]))
    run(engine)
    session, running = asked(engine), engine.session(params(9))
    running.extend(PAST)
    engine.step()
    engine.step()
    before = [one.output().outputs[0] for one in (request, session)]
    assert (len(before[0].text), before[0].finish_reason) == (2, "stop")
    request.remove()
    engine.close()
    assert [one.output().outputs[0] for one in (request, session)] == before
    cut = running.output().outputs[0]
    assert (len(cut.token_ids), len(cut.text), cut.finish_reason) == (2, 3, "abort")
