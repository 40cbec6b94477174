"""What an observer of steps is told: sizes, waits and the reasons why sequences wait, are preempted or evicted."""

from __future__ import annotations

from typing import Any

import pytest

from pagedcore.engine.builder import build_components
from pagedcore.engine.engine import Engine
from pagedcore.engine.step_report import StepReport
from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.requests.stats import StepStats
from pagedcore.sampling_params import SamplingParams
from support.doubles import FakeClock, ToyBackend
from support.engine_builders import run

FOUR = SamplingParams(max_tokens=4, ignore_eos=True)


class Observer:
    """Keeps every report."""

    def __init__(self) -> None:
        self.reports: list[StepStats] = []

    @hookimpl
    def pagedcore_step(self, stats: StepStats) -> None:
        """Keep it."""
        self.reports.append(stats)


def make(**settings: Any) -> tuple[Engine, FakeClock, list[StepStats]]:
    """An engine with an observer and a clock of the test's own."""
    clock, observer = FakeClock(), Observer()
    defaults = {
        "num_kv_blocks": 32, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8, "check_invariants": True,
    }
    parts = build_components(ToyBackend(), plugins=[observer], **{**defaults, **settings})
    return Engine(parts, clock), clock, observer.reports


def test_a_report_says_what_the_step_computed_and_started() -> None:
    """Rows, prefill and decode tokens, the prompts of what started, and how long these have waited."""
    engine, clock, reports = make(max_num_batched_tokens=16)
    engine.add_request([1, 2, 3], FOUR)
    clock.advance(2.0)
    engine.add_request([4] * 5, FOUR)
    clock.advance(1.0)
    engine.step()
    engine.step()
    first, second = reports
    assert (first.num_rows, first.num_prefill_tokens, first.num_decode_tokens) == (2, 8, 0)
    assert (first.num_started, first.num_input_tokens) == (2, 8)
    assert (first.mean_wait_s, first.longest_wait_s, first.waits) == (2.0, 3.0, {})
    assert (second.num_rows, second.num_prefill_tokens, second.num_decode_tokens) == (2, 0, 2)
    assert (second.num_started, second.num_input_tokens, second.mean_wait_s, second.longest_wait_s) == (0, 0, 0.0, 0.0)


@pytest.mark.parametrize(("settings", "prompts", "waits"), [
    ({"max_num_seqs": 2}, [[1], [2], [3], [4]], {"rows": 2}),
    ({"max_num_batched_tokens": 4}, [[1] * 4, [2], [3]], {"tokens": 2}),
    ({"num_kv_blocks": 2, "max_num_batched_tokens": 16}, [[1] * 4, [2] * 4, [3]], {"blocks": 1}),
    ({"scheduling_policy": "static", "max_num_seqs": 2}, [[1], [2], [3]], {"rows": 1}),
    ({}, [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]], {"prefix": 1}),
    ({"min_batch_size": 2, "max_wait_ms": 10_000}, [[1], [2]], {}),
])
def test_a_report_says_why_others_wait(settings: Any, prompts: list[list[int]], waits: dict[str, int]) -> None:
    """Every waiting sequence is counted under the reason that kept it from starting in this step."""
    engine, _, reports = make(**settings)
    for prompt in prompts:
        engine.add_request(prompt, FOUR)
    engine.step()
    assert reports[-1].waits == waits
    assert sum(waits.values()) == reports[-1].num_waiting
    run(engine)


def test_a_report_says_who_waits_for_company_a_phase_or_a_batch() -> None:
    """While others run: the gate, a step of decode rows, and a static batch."""
    for settings, reason in [
        ({"min_batch_size": 2, "max_wait_ms": 10_000}, "company"), ({"phases": "separate"}, "phase"),
        ({"scheduling_policy": "static"}, "batch"),
    ]:
        engine, _, reports = make(**settings)
        for _ in range(2):
            engine.add_request([1], FOUR)
        engine.step()
        engine.add_request([2] * 3, FOUR)
        engine.step()
        assert reports[-1].waits[reason] >= 1, reason


def test_a_report_counts_preemptions_and_evictions() -> None:
    """Reports add up to the engine's own counts, and an observer that comes late counts from then on."""
    engine, _, reports = make(num_kv_blocks=4, preemption="recompute")
    late = Observer()
    for number in range(4):
        engine.add_request([number] * 3, SamplingParams(max_tokens=10, ignore_eos=True))
    run(engine)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert sum(one.preemptions.get("recompute", 0) for one in reports) == stats.num_preemptions
    assert sum(one.evictions.get("device", 0) for one in reports) == stats.num_blocks_evicted > 0
    quiet = Engine(build_components(ToyBackend(), num_kv_blocks=4, block_size=4), FakeClock())
    for number in range(4):
        quiet.generate([[number] * 15], SamplingParams(max_tokens=1))
    from pagedcore.plugins.manager import create_plugin_manager

    before = quiet.stats().num_blocks_evicted
    quiet.hooks.add(create_plugin_manager([late], entry_points=False))
    quiet.generate([[9] * 15], SamplingParams(max_tokens=1))
    evicted = sum(one.evictions.get("device", 0) for one in late.reports)
    assert before > 0
    assert evicted == quiet.stats().num_blocks_evicted - before > 0


def test_nothing_is_counted_without_an_observer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without an observer of steps makes no report and notes no start."""
    monkeypatch.setattr(StepReport, "describe", None)
    monkeypatch.setattr(StepReport, "begin", None)
    engine = Engine(build_components(ToyBackend(), num_kv_blocks=8, block_size=4), FakeClock())
    engine.generate([[1, 2], [3]], FOUR)
    assert engine._outputs.started == []
