"""The gate of batch formation: new requests wait for company, for a while, and nothing else does."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pagedcore.engine.builder import build_components
from pagedcore.engine.engine import Engine
from pagedcore.errors import QueueTimeout
from pagedcore.requests.request import Request
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler.waiting_queue import WaitingQueue
from support.doubles import FakeClock, ToyBackend, toy_answer
from support.engine_builders import assert_all_free, run

FOUR = SamplingParams(max_tokens=4, ignore_eos=True)
TEN = SamplingParams(max_tokens=10, ignore_eos=True)


def make(**settings: Any) -> tuple[Engine, FakeClock]:
    """An engine with a gate over a clock that only the test and the engine's own sleep move."""
    clock = FakeClock(100.0)
    defaults = {
        "num_kv_blocks": 32, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8, "min_batch_size": 3,
        "max_wait_ms": 50, "speculation": "off", "check_invariants": True,
    }
    return Engine(build_components(ToyBackend(), **{**defaults, **settings}), clock), clock


def num_running(engine: Engine) -> int:
    """How many sequences run."""
    return len(engine.scheduler.running)


def finish(engine: Engine, clock: FakeClock, most_s: float) -> None:
    """Step until nothing is pending, which must be within so much time."""
    begin_s = clock.now()
    while engine.has_pending_requests():
        engine.step()
        assert clock.now() - begin_s <= most_s + 1e-9


def test_requests_start_together_once_enough_wait() -> None:
    """Fewer than min_batch_size wait, and the one that completes the number starts all of them at once."""
    engine, clock = make()
    engine.add_request([1], FOUR)
    engine.add_request([2], FOUR)
    engine.step()
    assert (num_running(engine), engine._runner.backend.num_steps) == (0, 0)
    now_s = clock.now()
    engine.add_request([3], FOUR)
    engine.step()
    assert (num_running(engine), clock.now()) == (3, now_s)


def test_a_lonely_request_starts_when_it_has_waited_long_enough() -> None:
    """The step that finds it waiting sleeps, through the clock, until max_wait_ms at the latest."""
    engine, clock = make()
    request = engine.add_request([1, 2], FOUR)
    assert engine.gated_s == pytest.approx(0.05)
    finish(engine, clock, 0.05)
    assert request.metrics.first_scheduled_s == pytest.approx(100.05)
    assert list(request.sequences[0].output_token_ids) == toy_answer([1, 2], 4)
    assert_all_free(engine)


def test_the_oldest_opens_the_gate_for_all() -> None:
    """A request that came just now starts with the one that has waited long enough."""
    engine, clock = make()
    first = engine.add_request([1], FOUR)
    clock.advance(0.049)
    second = engine.add_request([2], FOUR)
    finish(engine, clock, 0.002)
    assert first.metrics.first_scheduled_s == second.metrics.first_scheduled_s


def test_running_requests_continue_while_new_ones_wait() -> None:
    """A closed gate stops nothing that was started: every step brings a token, and none sleeps."""
    engine, clock = make()
    running = [engine.add_request([number], FOUR) for number in range(3)]
    engine.step()
    late = engine.add_request([7], FOUR)
    for length in range(2, 5):
        engine.step()
        assert [len(one.sequences[0].output_token_ids) for one in running] == [length] * 3
    assert (late.metrics.first_scheduled_s, clock.now()) == (None, 100.0)
    finish(engine, clock, 0.05)


def test_a_preempted_request_is_not_gated() -> None:
    """What was started and lost its blocks starts again without company: only arrivals are gated."""
    engine, clock = make(num_kv_blocks=4, max_num_seqs=2, min_batch_size=2, preemption="recompute")
    requests = [engine.add_request([number] * 3, TEN) for number in (1, 2)]
    finish(engine, clock, 0.0)
    assert engine.stats().num_preemptions > 0
    for number, request in zip((1, 2), requests, strict=True):
        assert list(request.sequences[0].output_token_ids) == toy_answer([number] * 3, 10)


@pytest.mark.parametrize("params", [
    SamplingParams(max_tokens=4, n=3, ignore_eos=True), SamplingParams(max_tokens=3, beam_width=3, ignore_eos=True),
    SamplingParams(max_tokens=3, best_of=3, temperature=1.0, seed=1, ignore_eos=True),
])
def test_the_completions_of_one_request_wait_at_most_once(params: SamplingParams) -> None:
    """Completions that wait for the prompt of their first one, and branches, do not wait for company again."""
    engine, clock = make()
    request = engine.add_request([1, 2, 3, 4, 5, 6], params)
    finish(engine, clock, 0.05)
    assert {one.finish_reason for one in request.sequences} == {"length"}


def test_requests_that_had_no_room_do_not_wait_for_company_again() -> None:
    """Of four requests the budget starts one per step: the last two start in the steps after, not after a wait."""
    engine, clock = make(max_num_batched_tokens=4, num_kv_blocks=64)
    requests = [engine.add_request([number] * 3, FOUR) for number in range(4)]
    finish(engine, clock, 0.0)
    assert all(one.metrics.first_scheduled_s == 100.0 for one in requests)


def test_a_request_that_is_aborted_leaves_the_others_their_time() -> None:
    """Without the one that went, the others start when the oldest of them has waited long enough."""
    engine, clock = make()
    gone, kept = engine.add_request([1], FOUR), engine.add_request([2], FOUR)
    engine.abort_request(gone.request_id)
    finish(engine, clock, 0.05)
    assert kept.sequences[0].finish_reason == "length"


def test_a_gated_request_can_time_out() -> None:
    """queue_timeout_s ends what waits, also for company."""
    engine, clock = make(max_wait_ms=1000, queue_timeout_s=0.1)
    request = engine.add_request([1], FOUR)
    finish(engine, clock, 0.12)
    assert isinstance(request.error, QueueTimeout)


def test_generate_ends_with_fewer_prompts_than_a_batch() -> None:
    """generate of one prompt, and of more than the waiting queue holds, ends after one wait per rest."""
    engine, clock = make(max_num_waiting=2)
    assert engine.generate([[1]], FOUR)[0].outputs[0].token_ids == tuple(toy_answer([1], 4))
    assert clock.now() <= 100.05 + 1e-9
    outputs = engine.generate([[number] for number in range(9)], FOUR)
    assert [one.outputs[0].token_ids for one in outputs] == [tuple(toy_answer([n], 4)) for n in range(9)]


def test_extended_requests_wait_for_company_too() -> None:
    """A further turn is a new arrival."""
    engine, clock = make()
    request = engine.add_request([1], FOUR)
    finish(engine, clock, 0.05)
    began_s = clock.now()
    request.extend([2], FOUR)
    finish(engine, clock, 0.05)
    assert request.metrics.first_scheduled_s == pytest.approx(began_s + 0.05)


def test_ctrl_c_ends_the_sleep_and_nothing_else() -> None:
    """An interrupt while a step sleeps leaves the request waiting, and the engine as it was."""
    engine, clock = make()
    request = engine.add_request([1], FOUR)

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    clock.sleep = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    clock.sleep = clock.advance  # type: ignore[method-assign]
    finish(engine, clock, 0.05)
    assert list(request.sequences[0].output_token_ids) == toy_answer([1], 4)


def test_without_a_minimum_nothing_is_gated(monkeypatch: pytest.MonkeyPatch) -> None:
    """With min_batch_size=1 a step looks at no arrival and opens no gate, whatever max_wait_ms is."""
    monkeypatch.setattr(WaitingQueue, "open_gate", None)
    engine, clock = make(min_batch_size=1, max_wait_ms=1000)
    engine.generate([[1], [2, 3]], FOUR)
    assert (clock.now(), engine.scheduler.waiting.gated) == (100.0, set())


@pytest.mark.parametrize("seed", range(25))
def test_every_accepted_request_ends_whatever_the_knobs(seed: int) -> None:
    """Random knobs, pools, arrivals and aborts: each request ends with the oracle's tokens, each law holds after each
    step, and none starts later than max_wait_ms after it could have."""
    rng = random.Random(f"formation {seed}")
    max_num_seqs, block_size = rng.randint(1, 5), rng.randint(1, 4)
    engine, clock = make(
        max_num_seqs=max_num_seqs, min_batch_size=rng.randint(1, max_num_seqs), max_wait_ms=rng.choice([0, 7, 50, 500]),
        block_size=block_size, num_kv_blocks=-(-rng.randint(8, 30) // block_size), max_num_waiting=rng.randint(1, 6),
        max_num_batched_tokens=max_num_seqs + rng.choice([0, 1, 6]), admission=rng.choice(["optimistic", "guaranteed"]),
        scheduling_policy=rng.choice(["fcfs", "priority", "static"]),
        **rng.choice([{}, {"phases": "separate"}, {"prefill_share": 0.3}]),
    )
    expected: dict[Request, list[int]] = {}
    for _ in range(60):
        if rng.random() < 0.4 and engine.can_accept():
            prompt, max_tokens = [rng.randrange(3) for _ in range(rng.randint(1, 4))], rng.randint(1, 4)
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            expected[engine.add_request(prompt, params)] = toy_answer(prompt, max_tokens)
        if expected and rng.random() < 0.05:
            engine.abort_request(rng.choice(list(expected)).request_id)
        clock.advance(rng.choice([0.0, 0.001, 0.02]))
        engine.step()
    finish(engine, clock, 0.5)
    for request, answer in expected.items():
        tokens = list(request.sequences[0].output_token_ids)
        assert request.is_done
        assert tokens == answer[: len(tokens)]
        assert tokens == answer or request.sequences[0].finish_reason == "abort"
    assert_all_free(engine)


class Phases:
    """What a step held: (decode rows, tokens of prefill chunks), seen where the model is asked to compute it."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[tuple[int, int]] = []
        self._execute, engine._runner.execute = engine._runner.execute, self.execute  # type: ignore[method-assign]

    def execute(self, rows: Any, blocks: Any) -> Any:
        num_decode = sum(
            row.num_tokens == 1 and row.start >= row.sequence.num_prompt_tokens and row.end == len(
                row.sequence.token_ids) for row in rows
        )
        self.steps.append((num_decode, sum(row.num_tokens for row in rows) - num_decode))
        return self._execute(rows, blocks)


def test_separate_phases_alternate_while_there_is_work_for_both() -> None:
    """No step has prefill chunks and decode rows, and a decode row waits for at most one step of prefill, although a
    new prompt comes in every step."""
    engine, _ = make(min_batch_size=1, phases="separate", num_kv_blocks=200, max_num_seqs=8, max_num_batched_tokens=8)
    steps = Phases(engine).steps
    requests = []
    for number in range(30):
        if engine.can_accept():
            requests.append(engine.add_request([number % 5] * 6, FOUR))
        engine.step()
    assert all(not (num_decode and num_prefill) for num_decode, num_prefill in steps)
    kinds = [num_decode > 0 for num_decode, _ in steps]
    assert kinds == [place % 2 == 1 for place in range(len(kinds))]
    run(engine)
    for request in requests:
        assert list(request.sequences[0].output_token_ids) == toy_answer([request.sequences[0].token_ids[0]] * 6, 4)


@pytest.mark.parametrize(("share", "most_tokens"), [(0.5, 8), (0.25, 4), (0.01, 1)])
def test_prefill_takes_its_share_of_a_step_with_decode_rows(share: float, most_tokens: int) -> None:
    """A prompt that comes while another request decodes takes the share of the budget in each step, one token at
    least; alone it takes all."""
    engine, _ = make(min_batch_size=1, prefill_share=share, num_kv_blocks=64, max_num_batched_tokens=16)
    steps = Phases(engine).steps
    engine.add_request([1, 2], SamplingParams(max_tokens=40, ignore_eos=True))
    engine.step()
    engine.add_request([3] * 20, FOUR)
    for _ in range(-(-20 // most_tokens)):
        engine.step()
    assert steps[0] == (0, 2)
    assert steps[1:-1] == [(1, most_tokens)] * (len(steps) - 2)
    assert steps[-1] == (1, 20 - most_tokens * (len(steps) - 2))
    run(engine)
    engine.add_request([4] * 17, FOUR)
    engine.step()
    assert steps[-1] == (0, 16)
