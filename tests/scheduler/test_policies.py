"""Policies: what each promises, to whom, and at what price; on a virtual clock, with steps of known costs."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListOf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcore.errors import InternalError, InvalidConfig
from pagedcore.scheduler import policies
from pagedcore.scheduler.plan import NewToken, SchedulePlan
from pagedcore.scheduler.policies import Policy
from pagedcore.scheduler.policy_guard import BURST_S, PolicyTooSlow, make_policy
from pagedcore.scheduler.policy_queues import most_tokens_of
from pagedcore.scheduler.policy_view import MAX_ABSENT, PolicyView, TenantLedger
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.scheduler.step_recipe import run_step
from pagedcore.scheduler.step_time import StepTimes
from pagedcore.sequence import Sequence
from support.doubles import FakeClock, StandingHost, make_scheduler, make_sequence

#: A small model on a CPU: 2 ms for a step, 0.2 ms for each prompt token and 0.5 ms for each row that decodes.
TIMES = StepTimes(0.002, 0.0002, 0.0005, 0.0)


class Server(StandingHost):
    """A scheduler that computes at once and lets the clock advance by what the step would have taken."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.ended_s: dict[Sequence, float] = {}
        self.started_s: dict[Sequence, float] = {}
        self.service: Counter[str] = Counter()

    def step(self) -> SchedulePlan:
        """Run one step."""
        return run_step(self.scheduler, self)

    def compute(self, plan: SchedulePlan, copies: object, begun_s: float) -> None:
        """Let the time of the step pass."""
        for one in plan.admitted:
            self.started_s.setdefault(one, begun_s)
        num_decode = sum(row.is_decode for row in plan.rows)
        self.clock.advance(TIMES.seconds(plan.num_tokens - num_decode, num_decode, 0))
        for row in plan.rows:
            self.service[row.sequence.options.tenant] += row.num_tokens

    def publish(self, plan: SchedulePlan, news: ListOf[NewToken]) -> None:
        """Note what has ended."""
        self.ended_s |= {new.sequence: self.now() for new in news if new.finish_reason is not None}

    def serve(self, arrivals: Iterable[Sequence]) -> None:
        """Serve sequences from their ``arrival_s`` on, in order, to the end."""
        waiting = list(arrivals)
        while waiting or self.scheduler.has_work:
            while waiting and waiting[0].arrival_s <= self.clock.now():
                self.scheduler.add_sequences(waiting.pop(0))
            if self.scheduler.has_work:
                self.step()
            else:
                self.clock.advance(waiting[0].arrival_s - self.clock.now())


def server(policy: str | Policy, **more: Any) -> Server:
    """Rows for eight, blocks for all of them, and room for any number that wait."""
    return Server(make_scheduler(
        **{"num_blocks": 400, "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 64,
           "max_num_waiting": 10_000, "policy": policy, **more}
    ))


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    """Draw a prompt of which nothing is cached."""
    return [rng.randrange(10_000) for _ in range(num_tokens)]


# Starvation ---------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from([None, 1.0]))
def test_ageing_bounds_how_long_a_request_is_overtaken(seed: int, gap: float | None) -> None:
    """With ageing a request of priority p is overtaken, before its start or after, only by requests of priority q that
    came less than ageing_s * (q - p) seconds after it."""
    rng, ageing_s = random.Random(seed), 0.05
    served = server("priority", max_num_seqs=2, policy_options={"ageing_s": ageing_s, "preemption_gap": gap})
    now_s, sequences = 0.0, []
    for _ in range(40):
        now_s += rng.expovariate(100.0)
        num_prompt, num_tokens, priority = rng.randint(1, 9), rng.randint(1, 9), rng.randint(0, 4)
        sequences.append(make_sequence(num_prompt, num_tokens, arrival_s=now_s, priority=priority))
    started: list[tuple[Sequence, float]] = []
    admit = served.step

    def step() -> SchedulePlan:
        before, plan = served.clock.now(), admit()
        started.extend((one, before) for one in plan.admitted)
        return plan

    served.step = step  # type: ignore[method-assign]
    served.serve(sequences)
    for index, (later, at_s) in enumerate(started):
        overtaken = {one for one, _ in started[index + 1 :]} - {one for one, _ in started[: index + 1]}
        for one in overtaken:
            if one.arrival_s <= at_s and one.arrival < later.arrival:
                assert later.arrival_s - one.arrival_s <= ageing_s * (later.priority - one.priority) + 1e-9
    assert len(served.ended_s) == 40


def test_without_ageing_a_low_priority_waits_as_long_as_higher_ones_come() -> None:
    """And with it starts in time: the test above can fail."""
    waits = {}
    for ageing_s in (None, 0.05):
        served = server("priority", max_num_seqs=1, policy_options={"ageing_s": ageing_s})
        low = make_sequence(4, 4, arrival_s=0.001, priority=0)
        high = [make_sequence(4, 4, arrival_s=0.002 * i, priority=1) for i in range(200)]
        served.serve(sorted([low, *high], key=lambda one: one.arrival_s))
        waits[ageing_s] = served.started_s[low]
    assert waits[None] > 5 * waits[0.05]


def test_shortest_first_ages_too() -> None:
    """A request of w tokens is overtaken by shorter ones only that came less than w / ageing_tokens_per_s later."""
    served = server("shortest-first", max_num_seqs=1, policy_options={"ageing_tokens_per_s": 100.0})
    long = make_sequence(16, 24, arrival_s=0.0)
    short = [make_sequence(1, 3, arrival_s=0.004 * i) for i in range(200)]
    served.serve(sorted([long, *short], key=lambda one: one.arrival_s))
    behind = [one for one in short if served.started_s[one] < served.started_s[long]]
    assert len(behind) > 10
    assert max(one.arrival_s for one in behind) <= 40 / 100.0


# Priorities that preempt --------------------------------------------------------------------------------------------


def test_a_priority_far_above_takes_the_place_of_a_running_request() -> None:
    """With a gap of 5 a request of priority 5 starts in the next step, one of 4 waits, and nothing is lost."""
    for urgent, starts in ((5, True), (4, False)):
        served = server("priority", max_num_seqs=2, policy_options={"preemption_gap": 5})
        low = [make_sequence(4, 20) for _ in range(2)]
        served.scheduler.add_sequences(*low)
        for _ in range(3):
            served.step()
        high = make_sequence(4, 4, priority=urgent)
        served.scheduler.add_sequences(high)
        assert (high in served.step().admitted) is starts
        assert (low[1] in served.scheduler.waiting) is starts
        assert low[0] in served.scheduler.running
        while served.scheduler.has_work:
            served.step()
        assert all(len(one.output_token_ids) == one.max_tokens for one in (*low, high))


def test_a_sequence_that_lost_its_place_keeps_the_next_one_until_it_has_one_token_more() -> None:
    """However many urgent requests wait, it is preempted by order again only when it has computed again what it had, in
    many steps, and one position more."""
    served = server("priority", max_num_seqs=1, max_num_batched_tokens=4, preemption="recompute",
                    policy_options={"preemption_gap": 1})
    low, ends, num_steps = make_sequence(prompt(random.Random(1), 30), 30), list[int](), 0
    served.scheduler.add_sequences(low)
    while low.num_output_tokens < 2:
        served.step()
    had = low.num_computed_tokens
    for _ in range(3):
        served.scheduler.add_sequences(make_sequence(1, 1, priority=9))
        while low in served.scheduler.running:
            num_steps, end = num_steps + 1, low.num_computed_tokens
            served.step()
        ends.append(end)
        while low in served.scheduler.waiting:
            served.step()
    assert low.num_preemptions == 3
    assert ends == [had, had + 1, had + 2]
    assert num_steps > 16


def test_blocks_are_taken_only_if_that_lets_the_request_in() -> None:
    """Where not even all lower ones have blocks enough, none is preempted."""
    scheduler = make_scheduler(8, 2, "priority", max_num_seqs=4, preemption="recompute",
                               policy_options={"preemption_gap": 5})
    served = Server(scheduler)
    middle, low = make_sequence(8, 4, priority=3), make_sequence(4, 2)
    scheduler.add_sequences(middle, low)
    served.step()
    scheduler.add_sequences(urgent := make_sequence(list(range(20, 31)), 1, priority=6))
    served.step()
    assert low.num_preemptions == middle.num_preemptions == 0
    assert urgent in scheduler.waiting


@pytest.mark.parametrize("more", [{"admission": "guaranteed"}, {"preemption": "wait"}], ids=str)
def test_no_place_is_taken_where_that_is_promised(more: dict[str, Any]) -> None:
    """Guaranteed admission preempts none, and "wait" computes no position twice."""
    served = server("priority", max_num_seqs=1, policy_options={"preemption_gap": 1}, **more)
    served.scheduler.add_sequences(low := make_sequence(4, 9))
    served.step()
    served.scheduler.add_sequences(make_sequence(4, 9, priority=100))
    served.step()
    assert low in served.scheduler.running


# Tenants ------------------------------------------------------------------------------------------------------------


def saturated(policy: str, weights: dict[str, float], num_steps: int, **options: Any) -> Server:
    """Serve tenants whose queues never run dry, with requests of ragged lengths."""
    served, rng = server(policy, policy_options=options), random.Random(3)
    for _ in range(num_steps):
        waiting = Counter(one.options.tenant for one in served.scheduler.waiting)
        for tenant, weight in weights.items():
            for _ in range(12 - waiting[tenant]):
                served.scheduler.add_sequences(make_sequence(
                    prompt(rng, rng.randint(1, 40)), rng.randint(1, 40), tenant=tenant, weight=weight,
                    arrival_s=served.clock.now(),
                ))
        served.step()
    return served


def test_tenants_are_served_by_their_weights() -> None:
    """Under saturation tenants of weights 1, 2 and 4 have computed tokens in these proportions, within 5 %; under fcfs
    they have not."""
    weights = {"one": 1.0, "two": 2.0, "four": 4.0}
    for policy, is_fair in (("fair", True), ("fcfs", False)):
        service = saturated(policy, weights, 800).service
        shares = {tenant: service[tenant] / sum(service.values()) / (weight / 7) for tenant, weight in weights.items()}
        assert all(0.95 <= share <= 1.05 for share in shares.values()) is is_fair, shares


def test_a_tenant_has_no_more_rows_and_blocks_than_it_may() -> None:
    """Caps hold in every step, others pass what is capped, and a tenant alone still runs one request at a time."""
    served = server("fair", policy_options={"max_rows": 3, "max_share": 0.1})
    served.scheduler.add_sequences(*(make_sequence(100, 60, tenant="big") for _ in range(5)))
    served.scheduler.add_sequences(*(make_sequence(4, 60, tenant="small") for _ in range(5)))
    most: defaultdict[str, int] = defaultdict(int)
    while served.scheduler.has_work:
        served.step()
        rows = Counter(one.options.tenant for one in served.scheduler.running)
        longest = sum(-(-one.max_total_tokens // 16) for one in served.scheduler.running if one.options.tenant == "big")
        assert longest <= 40
        most = defaultdict(int, {tenant: max(most[tenant], rows[tenant]) for tenant in ("big", "small")})
    assert most == {"big": 3, "small": 3}
    assert len(served.ended_s) == 10
    alone = server("fair", policy_options={"max_share": 0.001})
    alone.serve([make_sequence(40, 4, tenant="big") for _ in range(3)])
    assert len(alone.ended_s) == 3


def test_time_without_requests_earns_nothing() -> None:
    """A tenant that comes late begins with what the present one that has had least has; one that leaves ahead of the
    others and comes back is still ahead."""
    served = server("fair", max_num_seqs=1)
    served.serve([make_sequence(20, 40, tenant="early") for _ in range(4)])
    floor = served.scheduler.queues.ledger
    assert floor is not None
    served.scheduler.add_sequences(make_sequence(4, 4, tenant="early"), make_sequence(4, 4, tenant="late"))
    served.step()
    usage = served.scheduler.queues.view.usage
    assert usage["late"].virtual_tokens >= floor.floor > 100
    assert usage["early"].virtual_tokens >= usage["late"].virtual_tokens


@pytest.mark.parametrize(("max_rows", "num_chats"), [(None, 1), (3, 20)], ids=["one small request", "at its cap"])
def test_rows_that_nobody_wanted_are_not_paid_back(max_rows: int | None, num_chats: int) -> None:
    """One tenant cannot use more than some rows and others have the rest. Who comes then shares with these at once: it
    does not first get what they had while nobody else could use it."""
    served = server("fair", max_num_seqs=6, policy_options={"max_rows": max_rows})
    for _ in range(num_chats):
        served.scheduler.add_sequences(make_sequence(4, 400, tenant="chat", weight=8.0))
    served.step()
    for number in range(120):
        served.scheduler.add_sequences(make_sequence(8, 30, tenant=f"batch {number % 2}"))
    for _ in range(100):
        served.step()
    before = Counter(served.service)
    assert before["batch 0"] > 3 * before["chat"] / 8
    for _ in range(60):
        served.scheduler.add_sequences(make_sequence(8, 30, tenant="late"))
    for _ in range(150):
        served.step()
    had = Counter(served.service) - before
    # Why two requests: shares are equal up to those that are under way.
    assert all(abs(had[name] - had["late"]) <= 2 * 38 for name in ("batch 0", "batch 1")), had


def test_who_ran_while_nobody_waited_owes_nothing() -> None:
    """A long completion that nobody had to wait for does not put its tenant behind one that comes later."""
    served = server("fair", max_num_seqs=2)
    served.scheduler.add_sequences(make_sequence(4, 400, tenant="early"))
    for _ in range(200):
        served.step()
    served.scheduler.add_sequences(make_sequence(8, 30, tenant="early"), make_sequence(8, 30, tenant="late"))
    served.step()
    usage = served.scheduler.queues.view.usage
    assert usage["late"].virtual_tokens == usage["early"].virtual_tokens > 200


def test_a_million_tenants_cost_bounded_memory() -> None:
    """Whoever invents a name for each request is remembered by a bounded ledger, in which leads stay the largest."""
    ledger, owner = TenantLedger(), make_sequence(1, tenant="owner")
    ledger.survey([owner], [], lambda _: 0)
    for number in range(5 * MAX_ABSENT):
        other = make_sequence(1, tenant=f"name {number}")
        ledger.survey([owner, other], [], lambda _: 0)
        ledger.virtual[f"name {number}"] += number
        assert len(ledger.virtual) <= 2 * MAX_ABSENT + 3
    assert f"name {5 * MAX_ABSENT - 1}" in ledger.virtual
    assert "name 1" not in ledger.virtual
    assert "owner" in ledger.virtual


def test_a_ledger_is_in_the_same_order_in_every_process() -> None:
    """Not in that of a set of names, which differs from process to process: a recording and what is kept depend on it.
    """
    ledger, tenants = TenantLedger(), [f"tenant {number}" for number in range(9)]
    ledger.survey([make_sequence(1, tenant=one) for one in reversed(tenants)], [], lambda _: 0)
    assert list(ledger.virtual) == tenants
    for one in tenants:
        ledger.virtual[one] = 1.0
    ledger.virtual |= {f"absent {number:04}": 1.0 for number in range(3 * MAX_ABSENT)}
    ledger.survey([make_sequence(1, tenant=one) for one in reversed(tenants)], [], lambda _: 0)
    assert list(ledger.virtual) == [*tenants, *(f"absent {number:04}" for number in range(MAX_ABSENT))]


# Deadlines ----------------------------------------------------------------------------------------------------------


def overloaded(load: float, seed: int = 5) -> list[Sequence]:
    """Requests that come at ``load`` times what eight rows can serve; each has twice to five times what it needs."""
    rng, sequences, now_s = random.Random(seed), list[Sequence](), 0.0
    for _ in range(220):
        num_prompt, num_tokens = rng.randint(4, 60), rng.randint(5, 60)
        alone_s = num_tokens * TIMES.seconds(0, 8, 0) + num_prompt * TIMES.prefill_token_s
        now_s += rng.expovariate(8.0 * load / 0.22)
        within_s = alone_s * rng.uniform(2, 5)
        sequences.append(make_sequence(prompt(rng, num_prompt), num_tokens, arrival_s=now_s, deadline_s=within_s))
    return sequences


def goodput(policy: str, load: float) -> float:
    """Share of the requests that end in time."""
    served = server(policy)
    served.serve(overloaded(load))
    return sum(end_s <= one.deadline_s for one, end_s in served.ended_s.items()) / len(served.ended_s)


def test_deadlines_complete_more_requests_in_time_than_first_come() -> None:
    """At 1.5 times the load that can be served, "deadline" completes at least 1.3 times as many in time as "fcfs"."""
    by_deadline, by_arrival = goodput("deadline", 1.5), goodput("fcfs", 1.5)
    assert by_deadline >= 1.3 * by_arrival, (by_deadline, by_arrival)


def test_what_can_end_in_time_goes_before_what_cannot() -> None:
    """A waiting request that is on time takes the row of one that is late, and no other one's."""
    served = server("deadline", max_num_seqs=2)
    late, on_time = make_sequence(4, 50, deadline_s=0.01), make_sequence(4, 50, deadline_s=9.0)
    served.scheduler.add_sequences(late, on_time)
    for _ in range(8):
        served.step()
    served.scheduler.add_sequences(new := make_sequence(4, 4, arrival_s=served.clock.now(), deadline_s=5.0))
    assert new in served.step().admitted
    assert late in served.scheduler.waiting
    assert on_time in served.scheduler.running


# Views, keys and failures -------------------------------------------------------------------------------------------


def counting(is_dynamic: bool) -> tuple[Policy, list[int]]:
    calls = [0]

    def order(sequence: Sequence, *_: PolicyView) -> int:
        calls[0] += 1
        return sequence.arrival

    return Policy("counting", order, is_dynamic=is_dynamic, cache_bonus=0), calls


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_keys_are_asked_for_once_in_a_step(is_dynamic: bool) -> None:
    """With 64 running and 250 waiting a dynamic policy is asked for one key each in a step, however many plans that
    takes, and a static one for none."""
    policy, calls = counting(is_dynamic)
    served = server(policy, max_num_seqs=64, max_num_batched_tokens=300)
    served.scheduler.add_sequences(*(make_sequence(4, 200) for _ in range(314)))
    served.step()
    for _ in range(5):
        calls[0] = 0
        served.step()
        assert calls[0] == (314 if is_dynamic else 0)


@pytest.mark.parametrize("name", ["fcfs", "priority", "shortest_first", "cache_aware", "static"])
def test_static_policies_are_seen_no_view(name: str) -> None:
    """What is static today pays nothing: no view is made and no service counted for it."""
    served = server(name)
    served.serve([make_sequence(4, 4)])
    queues = served.scheduler.queues
    assert (queues.view.number, queues.ledger) == (0, None)


def test_a_plan_is_out_of_date_when_the_view_is_renewed() -> None:
    """It was made for another order: neither is room made for it nor is it reserved."""
    scheduler = make_scheduler(policy="fair")
    scheduler.add_sequences(make_sequence(2))
    scheduler.begin_step(1.0)
    plan = scheduler.schedule()
    assert plan == scheduler.schedule()
    scheduler.begin_step(2.0)
    for verb in (scheduler.reserve, scheduler.make_room):
        with pytest.raises(InternalError, match="out of date"):
            verb(plan)
    scheduler.reserve(scheduler.schedule())
    with pytest.raises(InternalError, match="begin_step"):
        scheduler.begin_step(3.0)


def test_victims_have_an_order_of_their_own() -> None:
    """Sequences start in one order and are preempted from the end of another one."""
    policy = Policy("mine", lambda one: one.arrival, victim_order=lambda one: -one.arrival)
    served = Server(make_scheduler(4, 2, policy, preemption="recompute"))
    first, second = make_sequence(3, 5), make_sequence([9, 9, 9], 5)
    served.scheduler.add_sequences(second, first)
    assert served.step().admitted == (first, second)
    for _ in range(3):
        served.step()
    assert (first.num_preemptions, second.num_preemptions) == (1, 0)


FAILING: dict[str, Callable[..., Any]] = {
    "order": lambda one, view: 1 / (one.arrival % 3),
    "nan": lambda one, view: float("nan") if view.number > 2 else one.arrival,
    "mixed": lambda one, view: "text" if view.number > 2 and one.arrival % 2 else one.arrival,
}


@pytest.mark.parametrize("name", [*FAILING, "victims", "preempts"])
def test_a_policy_that_fails_in_any_function_is_replaced_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Keys that raise, now or later, that no order has, a victim order or a permission that raises: all requests end,
    under "fcfs", and the log has one line without the error's words."""
    def raising(*_: object) -> Any:
        raise KeyError("a prompt")

    policy = Policy(
        "mine", FAILING.get(name, lambda one, view: one.arrival), is_dynamic=True,
        victim_order=raising if name == "victims" else None, preempts=raising if name == "preempts" else None,
    )
    served = server(policy, max_num_seqs=2)
    served.serve([make_sequence(3, 5) for _ in range(7)])
    assert len(served.ended_s) == 7
    assert served.scheduler.rules.policy.name == "fcfs"
    assert len(caplog.records) == 1
    assert "'mine'" in caplog.text
    assert "a prompt" not in caplog.text


def test_a_slow_policy_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """One whose functions take more than a second, and a tenth of the time since, is; one that pauses once is not, nor
    one that takes its tenth."""
    clock = FakeClock()

    def slow(seconds: float) -> Policy:
        return Policy("slow", lambda one, view: (clock.advance(seconds), one.arrival), is_dynamic=True)

    quick = make_policy(lambda: slow(0.001), {}, clock.now)
    for number in range(5000):
        quick.order(make_sequence(arrival=number), PolicyView())
        clock.advance(0.01)
    make_policy(lambda: slow(60.0), {}, clock.now).order(make_sequence(), PolicyView())
    served = server(make_policy(lambda: slow(0.05), {}, clock.now))
    served.serve([make_sequence(3, 9) for _ in range(30)])
    assert served.scheduler.rules.policy.name == "fcfs"
    assert PolicyTooSlow.__name__ in caplog.text
    assert len(served.ended_s) == 30
    assert BURST_S == 1.0


REFUSED = [
    (policies.priority, {"ageing_s": 0}), (policies.priority, {"preemption_gap": -1}), (policies.priority, {"age": 1}),
    (policies.deadline, {"default_s": "soon"}), (policies.fair, {"max_rows": 0}), (policies.fair, {"max_share": 1.5}),
    (policies.shortest_first, {"ageing_tokens_per_s": -1}), (policies.cache_aware, {"bonus": 1000}),
    (policies.fcfs, {"anything": 1}),
]


@pytest.mark.parametrize(("make", "options"), REFUSED)
def test_options_of_policies_are_checked(make: Callable[..., Policy], options: dict[str, Any]) -> None:
    """A wrong name or value is refused by name before anything is built; so is what makes no policy."""
    with pytest.raises(InvalidConfig, match=f"policy_options.*({next(iter(options))})"):
        make_policy(make, options)
    with pytest.raises(InvalidConfig, match="returned a int"):
        make_policy(lambda: 3, {})  # type: ignore[arg-type,return-value]


# Latency budgets ----------------------------------------------------------------------------------------------------


def slowest_intervals_s(tpot_ms: float | None) -> list[float]:
    """Serve four that decode beside prompts that keep coming; return the times of steps, once costs are known."""
    served, rng = server("deadline", max_num_batched_tokens=256, num_blocks=4000), random.Random(8)
    chats = [make_sequence(4, 900, tpot_ms=tpot_ms) for _ in range(4)]
    served.scheduler.add_sequences(*chats)
    intervals: list[float] = []
    for number in range(400):
        if not number % 3:
            served.scheduler.add_sequences(make_sequence(
                prompt(rng, rng.randint(100, 300)), 1, arrival_s=served.clock.now()
            ))
        before_s = served.clock.now()
        served.step()
        intervals.append(served.clock.now() - before_s)
    assert len(served.ended_s) > 20, "prompts make progress beside them"
    return sorted(intervals[100:])


def test_steps_are_small_enough_for_the_tightest_target() -> None:
    """While a request with a ``tpot_ms`` runs, steps take no longer than that, by the costs that were learned; without
    one they take as many tokens as they may."""
    assert slowest_intervals_s(0.015 * 1000)[-1] <= 0.015 * 1.02
    assert slowest_intervals_s(None)[-1] > 0.04


def test_a_target_that_cannot_be_kept_slows_no_prompt_down() -> None:
    """One below the time of a step without prompts asks for nothing, and one token is left for prompts in any case."""
    running = [make_sequence(4, 9, tpot_ms=tpot_ms) for tpot_ms in (0.5, 4.0)]
    for one in running:
        one.num_computed_tokens = 3
    assert most_tokens_of(running, TIMES) == 2 + 1 + int((0.004 - 0.0032) / 0.0002)
    assert most_tokens_of(running[:1], TIMES) is None
    assert most_tokens_of([make_sequence(4)], TIMES) is None


def test_a_first_token_that_is_due_comes_first() -> None:
    """Among requests with equal deadlines the one with the tighter ``ttft_ms`` starts first, until it is missed."""
    served = server("deadline", max_num_seqs=1)
    plain, urgent = make_sequence(4, 5, deadline_s=9.0), make_sequence(4, 5, deadline_s=9.0, ttft_ms=50)
    served.scheduler.add_sequences(plain, urgent)
    assert served.step().admitted == (urgent,)
    missed = server("deadline", max_num_seqs=1)
    missed.clock.advance(1.0)
    missed.scheduler.add_sequences(plain := make_sequence(4, 5, deadline_s=9.0),
                                   make_sequence(4, 5, deadline_s=9.5, ttft_ms=50))
    assert missed.step().admitted == (plain,)


def test_the_usual_length_is_learned() -> None:
    """Completions that end at a fifth of what they may have are expected to take a fifth of the time."""
    served = server("deadline")
    for _ in range(60):
        one = make_sequence(4, 50, stop_token_ids=[1], min_tokens=10)
        served.serve([one])
        assert one.num_output_tokens == 10
    view = served.scheduler.queues.view
    assert view.length_share == pytest.approx(0.2, abs=0.05)
    assert view.remaining_s(make_sequence(4, 50)) < 0.3 * 50 * view.step_s
