"""Deadlines and targets at the engine: what is shed, with which reason, and what the statistics count."""

from __future__ import annotations

from typing import Any

import pytest

from pagedcore import SamplingParams
from pagedcore.engine.builder import build_components
from pagedcore.engine.engine import Engine
from pagedcore.errors import DeadlineMissed, InvalidRequest
from support.doubles import FakeClock, ToyBackend
from support.engine_builders import assert_all_free, make_engine, run

PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)


class PacedBackend(ToyBackend):
    """A toy model whose every step takes a tenth of a second on a clock of the test's."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, batch: Any) -> Any:
        """Let the time pass."""
        self.clock.advance(0.1)
        return super().forward(batch)


def paced(**settings: Any) -> tuple[Engine, FakeClock]:
    clock = FakeClock()
    settings = {"scheduling_policy": "deadline", "policy_options": {"sheds": True}, "num_kv_blocks": 64,
                "speculation": "off", **settings}
    engine = Engine(build_components(PacedBackend(clock), block_size=4, check_invariants=True, **settings), clock=clock)
    # Why: the costs of a step are learned.
    for _ in range(5):
        engine.add_request([1], PARAMS)
        run(engine)
    return engine, clock


def test_what_cannot_end_in_time_is_not_started() -> None:
    """A request whose deadline is shorter than ten steps ends with ``DeadlineMissed`` and no token; one that has the
    time is served, and both are counted."""
    engine, _ = paced()
    hopeless = engine.add_request([1], PARAMS, deadline_s=0.5)
    in_time = engine.add_request([2], PARAMS, deadline_s=3.0)
    run(engine)
    assert isinstance(hopeless.error, DeadlineMissed)
    assert hopeless.error.deadline_s == 0.5
    assert "0.5 seconds" in str(hopeless.error)
    assert hopeless.output().outputs[0].token_ids == ()
    assert in_time.error is None
    stats = engine.stats()
    assert (stats.num_targeted, stats.num_on_target, stats.goodput) == (2, 1, 0.5)
    assert_all_free(engine)


def test_only_what_is_certain_is_shed() -> None:
    """A completion that may end at its first token is not shed for the length that it may have, and without ``sheds``
    none is."""
    engine, _ = paced()
    short = engine.add_request([1], SamplingParams(max_tokens=10), deadline_s=0.5)
    run(engine)
    assert short.error is None
    engine, _ = paced(policy_options={})
    late = engine.add_request([1], PARAMS, deadline_s=0.5)
    run(engine)
    assert late.error is None
    assert engine.stats().num_on_target == 0


@pytest.mark.parametrize(("target", "is_kept"), [
    ({"ttft_ms": 150}, True), ({"ttft_ms": 50}, False), ({"tpot_ms": 101}, True), ({"tpot_ms": 99}, False),
    ({"deadline_s": 1.05}, True), ({"deadline_s": 0.95}, False), ({"ttft_ms": 150, "tpot_ms": 99}, False),
])
def test_targets_are_counted(target: dict[str, float], is_kept: bool) -> None:
    """A turn with a first token after 0.1 s and nine more, 0.1 s each, is on target or not; aborts do not count."""
    engine, _ = paced(policy_options={})
    engine.add_request([1], PARAMS, **target).abort()
    engine.add_request([1], PARAMS, **target)
    run(engine)
    stats = engine.stats()
    assert (stats.num_targeted, stats.num_on_target) == (1, int(is_kept))


def test_targets_are_refused_where_they_would_be_ignored() -> None:
    """Under a policy that looks at none the refusal names the one that does."""
    engine = make_engine()
    for name in ("deadline_s", "ttft_ms", "tpot_ms"):
        with pytest.raises(InvalidRequest, match=f'{name}.*scheduling_policy="deadline"'):
            engine.add_request([1], PARAMS, **{name: 1.0})
