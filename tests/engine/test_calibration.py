"""What an engine measures before its first request: enough to choose by, in little time, without a visible effect."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from pagedcore.engine.builder import build_components
from pagedcore.engine.engine import Engine
from pagedcore.protocols import FloatArray, RaggedRows
from pagedcore.sampling_params import SamplingParams
from support.doubles import FakeClock, ToyBackend, toy_answer
from support.engine_builders import assert_all_free, run

BLOCK = 4 * ToyBackend.kv_bytes_per_token


class TimedBackend(ToyBackend):
    """A ``ToyBackend`` that takes its time, on a clock of its own."""

    def __init__(self, fixed_s: float, token_s: float, disturbed: Callable[[int], float] = lambda number: 1.0) -> None:
        super().__init__()
        self.clock = FakeClock()
        self._costs_s = fixed_s, token_s
        self._disturbed = disturbed

    def forward(self, batch: RaggedRows) -> FloatArray:
        """Compute, and let the time pass, so many times as much as it should in the forward of that number."""
        seconds = self._costs_s[0] + self._costs_s[1] * int(batch.query_start[-1])
        self.clock.advance(seconds * self._disturbed(self.num_steps))
        return super().forward(batch)


def make(backend: ToyBackend, **settings: Any) -> Engine:
    defaults: dict[str, Any] = {
        "num_kv_blocks": 24, "block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 4,
        "host_kv_memory": 24 * BLOCK,
    }
    clock = backend.clock if isinstance(backend, TimedBackend) else None
    return Engine(build_components(backend, **{**defaults, **settings}), clock)


@pytest.mark.parametrize(("fixed_s", "token_s"), [(5e-3, 1e-4), (1e-4, 1e-3), (1e-3, 1e-5)])
def test_a_step_is_known_before_the_first_one(fixed_s: float, token_s: float) -> None:
    """Whatever a forward costs, the first decision is made with estimates within a hundredth of the truth."""
    costs = make(TimedBackend(fixed_s, token_s)).scheduler.costs
    for num_tokens in (2, 16, 64):
        assert costs.steps.predict(num_tokens, 0, num_tokens) == pytest.approx(fixed_s + num_tokens * token_s, rel=0.01)


@pytest.mark.parametrize(("fixed_s", "token_s"), [(0.03, 1e-4), (0.04, 1e-3)])
def test_a_step_that_takes_long_whatever_its_tokens_is_known_too(fixed_s: float, token_s: float) -> None:
    """A large model takes tens of milliseconds for two tokens and hardly more for eight: that is enough to know it."""
    costs = make(TimedBackend(fixed_s, token_s)).scheduler.costs
    for num_tokens in (2, 16, 64):
        assert costs.steps.predict(num_tokens, 0, num_tokens) == pytest.approx(fixed_s + num_tokens * token_s, rel=0.01)


def test_the_first_forward_of_all_may_take_long() -> None:
    """Kernels that are loaded in it, and memory that is touched, neither end the measurement nor are learned from."""
    costs = make(TimedBackend(2e-3, 1e-4, lambda number: 1000.0 if number == 0 else 1.0)).scheduler.costs
    assert costs.steps.predict(16, 0, 16) == pytest.approx(3.6e-3, rel=0.01)


@pytest.mark.parametrize("seed", range(8))
def test_a_busy_machine_is_seen_through(seed: int) -> None:
    """Where something else runs in every second forward, the undisturbed ones of each size tell."""
    rng = random.Random(seed)
    slow = [rng.choice([1.0, 3.0]) for _ in range(64)]
    costs = make(TimedBackend(1e-3, 1e-4, slow.__getitem__)).scheduler.costs
    assert costs.steps.predict(32, 0, 32) == pytest.approx(4.2e-3, rel=0.01)


def test_nobody_notices() -> None:
    """No step, token or cached block comes of it, and what is asked then is answered as ever."""
    engine = make(TimedBackend(1e-3, 1e-4))
    stats = engine.stats()
    assert (stats.num_steps, stats.num_computed_tokens, stats.num_looked_up_tokens) == (0, 0, 0)
    assert (stats.num_blocks_used, stats.num_blocks_cached, stats.num_blocks_evicted) == (0, 0, 0)
    request = engine.add_request([0] * 9, SamplingParams(max_tokens=5, ignore_eos=True))
    run(engine)
    assert list(request.output().outputs[0].token_ids) == toy_answer([0] * 9, 5)
    assert request.output().num_cached_tokens == 0
    assert_all_free(engine)


@pytest.mark.parametrize(("fixed_s", "token_s"), [(0.0, 0.004), (0.15, 0.0), (0.0, 0.09)])
def test_a_slow_model_is_not_measured_for_long(fixed_s: float, token_s: float) -> None:
    """No forward begins that would end after a fifth of a second, the very first one aside."""
    backend = TimedBackend(fixed_s, token_s)
    make(backend)
    assert 0 < backend.clock.now() <= 0.3


@pytest.mark.parametrize(
    "settings", [{"host_kv_memory": None}, {"preemption": "swap"}, {"preemption": "recompute"}]
)
def test_where_nothing_is_to_be_chosen_nothing_is_measured(settings: dict[str, Any]) -> None:
    """Without a host tier, or with one way forced, the model is first called by the first step."""
    backend = ToyBackend()
    make(backend, **settings)
    assert backend.num_steps == 0


@pytest.mark.parametrize("settings", [{"num_kv_blocks": 1}, {"max_model_len": 3}, {"max_num_batched_tokens": 4}])
def test_small_engines_are_measured_within_their_bounds(settings: dict[str, Any]) -> None:
    """Fewer positions, or tokens in a step, than a measurement would like: it takes what there is."""
    backend = TimedBackend(1e-3, 1e-3)
    engine = make(backend, **settings)
    assert backend.num_steps > 0
    assert engine.scheduler.costs.steps.predict(2, 0, 2) == pytest.approx(3e-3, rel=0.01)


def test_a_model_that_fails_is_left_for_its_first_step() -> None:
    """The engine starts all the same; the first request gets the error."""

    class Broken(ToyBackend):
        def forward(self, batch: RaggedRows) -> FloatArray:
            raise RuntimeError("no device")

    engine = make(Broken())
    request = engine.add_request([1, 2], SamplingParams(max_tokens=2))
    run(engine)
    assert "RuntimeError" in str(request.error)
