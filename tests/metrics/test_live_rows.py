"""What a view learns of the rows: every computed position in a stretch, every ending, every reason, within bounds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pagedcore import SamplingParams
from pagedcore.engine.builder import build_components
from pagedcore.engine.engine import Engine
from pagedcore.metrics import live
from pagedcore.metrics.live import LiveRows, Look, Progress
from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.plugins.manager import PluginManager
from pagedcore.requests.stats import StepStats
from support.doubles import VOCAB_SIZE, FakeClock, ToyBackend, toy_answer
from support.drafts import Adversary, let_guess
from support.engine_builders import run


class TimedBackend(ToyBackend):
    """A toy whose every forward takes a second."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock(100.0)

    def forward(self, batch):  # type: ignore[no-untyped-def]
        self.clock.advance(1.0)
        return super().forward(batch)


class LookAfterEveryStep:
    """Looks at rows after each step, and keeps the looks with the reasons that the step reported."""

    def __init__(self, engine: Engine, rows: LiveRows) -> None:
        self.rows = rows
        self.looks: list[Look] = []
        self.waits: list[dict[str, int]] = []
        self.counts: list[tuple[int, int]] = []
        manager = PluginManager()
        manager.add(self, "look")
        engine.hooks.add(manager)

    @hookimpl
    def pagedcore_step(self, stats: StepStats) -> None:
        self.looks.append(self.rows.look())
        self.waits.append(stats.waits)
        self.counts.append((stats.num_running, stats.num_waiting))


def make(**settings: Any) -> tuple[Engine, LookAfterEveryStep]:
    """An engine whose steps take a second each, and rows that are looked at after each."""
    backend = TimedBackend()
    defaults = {"num_kv_blocks": 32, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8,
                "check_invariants": True}
    engine = Engine(build_components(backend, **{**defaults, **settings}), backend.clock)
    rows = LiveRows()
    rows.attach(engine)
    return engine, LookAfterEveryStep(engine, rows)


def asked(max_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=n, temperature=0.0 if n == 1 else 1.0)


def test_a_request_is_a_prompt_and_then_a_completion() -> None:
    """Its stretches say what was computed when, without a pause between them, and how it ended; so do the figures."""
    engine, seen = make()
    engine.add_request([1] * 12, asked(3))
    run(engine)
    stretches = [(one.kind, one.start_s - 100, one.end_s - 100, one.num_tokens, one.ending)
                 for look in seen.looks for one in look.ended]
    assert stretches == [("prefill", 0.0, 2.0, 12, ""), ("decode", 2.0, 4.0, 2, "length")]
    assert [(one.kind, one.num_tokens, one.num_blocks) for one in seen.looks[0].running] == [("prefill", 8, 2)]
    progress = [look.progress.get(b"") or Progress() for look in seen.looks]
    assert [one.num_sampled for one in progress] == [0, 1, 1, 1]
    assert [list(one.ttfts_s) for one in progress] == [[], [2.0], [], []]
    assert (sum(one.intervals_s for one in progress), sum(one.num_intervals for one in progress)) == (2.0, 2)
    assert not seen.looks[-1].is_quiet
    assert seen.rows.look().is_quiet


def test_a_request_of_one_step_is_seen() -> None:
    """One that begins and ends in the same step never runs between two steps, and still has its stretch."""
    engine, seen = make()
    engine.add_request([1, 2], asked(1))
    run(engine)
    (look,) = seen.looks
    assert [(one.kind, one.num_tokens, one.ending) for one in look.ended] == [("prefill", 2, "length")]
    assert look.running == []


@pytest.mark.parametrize("settings", [
    {}, {"num_kv_blocks": 13}, {"num_kv_blocks": 13, "host_kv_memory": 4096, "preemption": "swap"},
    {"num_kv_blocks": 13, "preemption": "recompute"}, {"phases": "separate"},
    {"min_batch_size": 3, "max_wait_ms": 5000.0}, {"scheduling_policy": "static"},
], ids=str)
def test_every_position_every_preemption_and_every_reason_is_told(settings: dict[str, Any]) -> None:
    """Over a crowded run the stretches hold as many positions as the engine has computed and as many preemptions as it
    counts, and the reasons of those that wait are the counts of ``StepStats.waits``."""
    engine, seen = make(**settings)
    for number in range(9):
        engine.add_request([number % 3] * (3 + 2 * number), asked(9, n=1 + number % 2))
    run(engine)
    ended = [one for look in seen.looks for one in look.ended]
    stats = engine.stats()
    assert sum(one.num_tokens for one in ended) == stats.num_computed_tokens
    endings = Counter(one.ending for one in ended)
    assert (endings["preempted"], endings["length"]) == (stats.num_preemptions, 5 * 1 + 4 * 2)
    assert ("num_kv_blocks" in settings) == (stats.num_preemptions > 0)
    assert sum(one.num_sampled for look in seen.looks for one in look.progress.values()) == stats.num_generated_tokens
    for look, waits in zip(seen.looks, seen.waits, strict=True):
        reasons = Counter(one.reason for one in look.waiting)
        assert reasons == {name: count for name, count in waits.items() if name != "stall"}
    assert any(seen.waits)
    assert [(len(look.running), len(look.waiting)) for look in seen.looks] == seen.counts


def test_what_leaves_between_two_steps_is_gone() -> None:
    """An aborted request has no row in the next look, without another step."""
    engine, seen = make()
    request = engine.add_request([1, 2], asked(9))
    engine.step()
    assert len(seen.looks[-1].running) == 1
    request.abort()
    look = seen.rows.look()
    assert (look.running, [one.ending for one in look.ended]) == ([], ["abort"])


def test_an_engine_without_views_does_nothing_for_them() -> None:
    """Detached, the engine has no observer of its steps more than before, and a second detaching changes nothing."""
    engine = Engine.from_pretrained(ToyBackend(), num_kv_blocks=16, block_size=4)
    rows = LiveRows()
    rows.attach(engine)
    assert engine.hooks.observes_steps
    for _ in range(2):
        rows.detach(engine)
        assert not engine.hooks.observes_steps
    LiveRows().detach(engine)


def test_without_looks_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests end between two looks, and of however many tenants, only the latest stretches are kept."""
    monkeypatch.setattr(live, "MAX_KEPT", 5)
    engine = Engine.from_pretrained(ToyBackend(), num_kv_blocks=64, block_size=4)
    rows = LiveRows()
    rows.attach(engine)
    for number in range(20):
        engine.add_request([1, 2], asked(3), cache_salt=f"tenant {number}")
        run(engine)
    look = rows.look()
    assert (len(look.ended), len(look.progress)) == (5, 5)


def test_the_first_step_after_a_quiet_look_wakes_the_view() -> None:
    """And only that one, so that a view need not ask an engine that has nothing to tell."""
    engine = Engine.from_pretrained(ToyBackend(), num_kv_blocks=16, block_size=4)
    woken: list[None] = []
    rows = LiveRows(lambda: woken.append(None))
    rows.attach(engine)
    assert rows.look().is_quiet
    for _ in range(2):
        engine.add_request([1, 2], asked(3))
        run(engine)
        assert len(woken) == 1


def test_each_of_several_tokens_of_a_row_is_told() -> None:
    """With drafts a step has more than one token of a row, of which each counts; so does each position computed."""
    engine, seen = make(max_num_batched_tokens=32)
    let_guess(engine, Adversary(toy_answer, VOCAB_SIZE), VOCAB_SIZE)
    for start in range(3):
        engine.add_request([start, 5, 7], SamplingParams(max_tokens=20, ignore_eos=True))
    run(engine)
    stats = engine.stats()
    assert stats.num_accepted_tokens > 0
    progress = [one for look in seen.looks for one in look.progress.values()]
    assert sum(one.num_sampled for one in progress) == stats.num_generated_tokens == 60
    assert sum(one.num_intervals for one in progress) == 60 - 3
    assert sum(one.num_tokens for look in seen.looks for one in look.ended) == stats.num_computed_tokens
