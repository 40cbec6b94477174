"""Batches for engines of others: the source's rules, by the gate and the policies of the engine."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pagedcore import BatchRequest, ContinuousBatcher, EngineConfig
from pagedcore.errors import EngineOverloaded, InvalidConfig, InvalidRequest
from support.doubles import FakeClock


def make(**settings: Any) -> tuple[ContinuousBatcher, FakeClock]:
    """A batcher over a clock of the test's own, with the names of other engines."""
    clock = FakeClock()
    defaults = {"max_batch_size": 4, "max_batch_tokens": 32, "min_batch_size": 2, "max_wait_ms": 50}
    return ContinuousBatcher(EngineConfig.from_keywords(**{**defaults, **settings}), clock=clock), clock


def ids(batcher: ContinuousBatcher) -> list[object]:
    """The ids of the next batch; none without one."""
    batch = batcher.try_form_batch()
    return [one.request_id for one in batch.requests] if batch is not None else []


def test_a_batch_needs_enough_requests_or_one_that_waited() -> None:
    """An empty queue gives none, too few requests none before the oldest has waited long enough, enough at once."""
    batcher, clock = make()
    assert (batcher.try_form_batch(), batcher.gated_s()) == (None, None)
    batcher.add(BatchRequest("a", 3))
    assert (ids(batcher), batcher.gated_s()) == ([], 0.05)
    clock.advance(0.049)
    assert ids(batcher) == []
    clock.advance(0.0011)
    assert ids(batcher) == ["a"]
    batcher.add(BatchRequest("b", 3))
    batcher.add(BatchRequest("c", 3))
    assert (ids(batcher), len(batcher)) == (["b", "c"], 0)


def test_a_batch_ends_at_its_size_and_at_its_tokens() -> None:
    """It has at most max_batch_size requests and max_batch_tokens prompt tokens, and no request is overtaken."""
    batcher, _ = make(min_batch_size=1)
    for number in range(6):
        batcher.add(BatchRequest(number, 1))
    assert (ids(batcher), ids(batcher), ids(batcher)) == ([0, 1, 2, 3], [4, 5], [])
    for number, tokens in enumerate([20, 13, 1]):
        batcher.add(BatchRequest(number, tokens))
    assert (ids(batcher), ids(batcher)) == ([0], [1, 2])


def test_a_batch_knows_its_sizes_and_waits() -> None:
    """size, total_input_tokens, avg_wait_time and max_wait_time are of its requests."""
    batcher, clock = make()
    batcher.add(BatchRequest("a", 5, max_new_tokens=7))
    clock.advance(0.03)
    batcher.add(BatchRequest("b", 6))
    clock.advance(0.01)
    batch = batcher.try_form_batch()
    assert batch is not None
    assert (batch.size(), batch.total_input_tokens) == (2, 11)
    assert (batch.avg_wait_time(), batch.max_wait_time()) == (pytest.approx(0.025), pytest.approx(0.04))


def test_the_policy_orders_a_batch() -> None:
    """Under "priority" higher ones come first; "fcfs" refuses priorities; another name is no policy."""
    batcher, _ = make(scheduling_policy="priority", max_batch_size=2)
    for name, priority in (("low", 0), ("high", 10), ("middle", 5)):
        batcher.add(BatchRequest(name, 1, priority=priority))
    assert ids(batcher) == ["high", "middle"]
    with pytest.raises(InvalidRequest, match="priority: got 1, allowed is 0 under the policy 'fcfs'"):
        make()[0].add(BatchRequest("a", 1, priority=1))
    with pytest.raises(InvalidConfig):
        make(scheduling_policy="none of these")


def test_what_cannot_be_taken_is_refused() -> None:
    """A prompt above the budget, an id that waits, a full queue and numbers out of range; then nothing was added."""
    batcher, _ = make(max_num_waiting=1)
    for wrong in ({"input_tokens": 0}, {"input_tokens": "9"}, {"input_tokens": 1, "max_new_tokens": True}):
        with pytest.raises(InvalidRequest):
            BatchRequest("a", **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="input_tokens: got 33, allowed is an integer from 1 to 32"):
        batcher.add(BatchRequest("a", 33))
    batcher.add(BatchRequest("a", 1))
    with pytest.raises(InvalidRequest, match="request_id"):
        batcher.add(BatchRequest("a", 1))
    with pytest.raises(EngineOverloaded):
        batcher.add(BatchRequest("b", 1))
    assert (batcher.remove("a"), batcher.remove("a"), batcher.remove("b"), len(batcher)) == (True, False, False, 0)


@pytest.mark.parametrize("seed", range(20))
def test_every_request_is_in_one_batch(seed: int) -> None:
    """Whatever the knobs: no request is lost or doubled, none waits longer than max_wait_ms and the batches before
    it, and no batch is over a bound or comes before its time."""
    rng = random.Random(seed)
    size = rng.randint(1, 5)
    batcher, clock = make(
        max_batch_size=size, max_batch_tokens=size + rng.randint(0, 9), min_batch_size=rng.randint(1, size),
        max_wait_ms=rng.choice([0, 20]), scheduling_policy=rng.choice(["fcfs", "priority"]), max_num_waiting=50,
    )
    config, seen, num_added = batcher.config, list[object](), 0
    for _ in range(100):
        if rng.random() < 0.5 and len(batcher) < 50:
            batcher.add(BatchRequest(num_added, rng.randint(1, config.max_num_batched_tokens)))
            num_added += 1
        clock.advance(rng.choice([0.0, 0.005]))
        num_waiting, batch = len(batcher), batcher.try_form_batch()
        if batch is not None:
            assert 1 <= batch.size() <= size
            assert batch.total_input_tokens <= config.max_num_batched_tokens
            assert num_waiting >= config.min_batch_size or batch.max_wait_time() >= config.max_wait_s - 1e-9
            seen += [one.request_id for one in batch.requests]
    clock.advance(config.max_wait_s)
    while len(batcher):
        seen += ids(batcher)
    assert sorted(seen) == list(range(num_added))  # type: ignore[type-var]


def test_tenants_are_served_by_their_weights() -> None:
    """Under "fair", with a full queue of each, tokens are taken as the weights; in a tenant in the order of arrival."""
    batcher, _ = make(scheduling_policy="fair", max_batch_size=2, max_num_waiting=600)
    for number in range(150):
        for tenant, weight in (("a", 1.0), ("b", 2.0), ("c", 4.0)):
            batcher.add(BatchRequest((tenant, number), 6, 4, tenant=tenant, weight=weight))
    taken = [one for _ in range(105) for one in ids(batcher)]
    counts = {tenant: sum(one[0] == tenant for one in taken) for tenant in "abc"}  # type: ignore[index]
    assert counts == {"a": pytest.approx(30, abs=1), "b": pytest.approx(60, abs=1), "c": pytest.approx(120, abs=1)}
    for tenant in "abc":
        own = [one[1] for one in taken if one[0] == tenant]  # type: ignore[index]
        assert own == sorted(own)


def test_the_least_slack_starts_first() -> None:
    """Under "deadline", by the time that is left when the batch is formed; late requests come behind the others."""
    batcher, clock = make(scheduling_policy="deadline", max_batch_size=2)
    batcher.add(BatchRequest("late", 3, deadline_s=1.0))
    batcher.add(BatchRequest("soon", 3, deadline_s=9.0))
    clock.advance(5.0)
    batcher.add(BatchRequest("sooner", 3, deadline_s=3.0))
    batcher.add(BatchRequest("some time", 3))
    assert [ids(batcher), ids(batcher)] == [["sooner", "soon"], ["some time", "late"]]


@pytest.mark.parametrize("given", [
    {"scheduling_policy": "fair", "policy_options": {"max_rows": 2}},
    {"scheduling_policy": "deadline", "policy_options": {"sheds": True}},
])
def test_policies_that_look_at_what_runs_are_refused(given: dict[str, Any]) -> None:
    """A batcher does not know what runs, so that caps and shedding would be promises without effect."""
    with pytest.raises(InvalidConfig, match="caps and shedding"):
        make(**given)


def test_an_option_that_the_policy_does_not_look_at_is_refused() -> None:
    """Weights need "fair", deadlines "deadline"; a value out of range is refused when the request is made."""
    batcher, _ = make()
    with pytest.raises(InvalidRequest, match="weight"):
        batcher.add(BatchRequest("a", 1, weight=2.0))
    with pytest.raises(InvalidRequest, match="deadline_s"):
        batcher.add(BatchRequest("a", 1, deadline_s=1.0))
    for wrong in ({"tenant": "\n"}, {"weight": 0.0}, {"deadline_s": -1.0}, {"priority": 1.5}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            BatchRequest("a", 1, **wrong)  # type: ignore[arg-type]
    assert len(batcher) == 0
