"""The engine at the step level, over a backend whose answer depends on every token it reads back."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pagedcore.engine.builder import build_components
from pagedcore.engine.engine import Engine
from pagedcore.errors import (
    EngineClosed,
    EngineOverloaded,
    InvalidConfig,
    InvalidLogits,
    InvalidPrompt,
    InvalidRequest,
    PromptEmpty,
    PromptTooLong,
    QueueTimeout,
    RequestStateError,
    RequestTooLarge,
    StepFailed,
    TooManySequences,
)
from pagedcore.outputs import Delta, RequestOutput
from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.requests.pending_output import PendingOutput
from pagedcore.sampling_params import SamplingParams
from support.doubles import FakeClock, FlakyBackend, ToyBackend, toy_answer
from support.engine_builders import assert_all_free, make_engine, run


def params(max_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)  # type: ignore[arg-type]


def test_answers_equal_the_sequential_oracle_under_constant_preemption() -> None:
    """With a pool for about two sequences, thirty requests still get exactly the oracle's tokens."""
    rng = random.Random(5)
    engine = make_engine(num_kv_blocks=12, max_num_waiting=64)
    prompts = [[rng.randrange(20) for _ in range(rng.randint(1, 20))] for _ in range(30)]
    requests = [engine.add_request(prompt, params(rng.randint(1, 20))) for prompt in prompts]
    run(engine)
    for prompt, request in zip(prompts, requests, strict=True):
        (answer,) = request.output().outputs
        assert list(answer.token_ids) == toy_answer(prompt, len(answer.token_ids))
        assert answer.finish_reason == "length"
        request.remove()
    assert engine.stats().num_preemptions > 5
    assert_all_free(engine)


def test_new_tokens_are_taken_once_and_in_order() -> None:
    """The tokens taken step by step are the answer, each exactly once."""
    engine = make_engine()
    request = engine.add_request([1, 2, 3], params(7))
    taken: list[int] = []
    while engine.has_pending_requests():
        engine.step()
        taken += request.take_new_tokens()
    assert taken == toy_answer([1, 2, 3], 7)
    assert request.take_new_tokens() == []
    assert request.is_done


def test_deltas_of_a_step_add_up_to_the_output() -> None:
    """Concatenated deltas are the final token ids, and exactly the last one has a finish reason."""
    engine = make_engine()
    request = engine.add_request([4], params(5))
    deltas = []
    while engine.has_pending_requests():
        deltas += engine.step()
    assert [token for delta in deltas for token in delta.token_ids] == toy_answer([4], 5)
    assert [delta.finish_reason for delta in deltas] == [None] * 4 + ["length"]
    assert {delta.request_id for delta in deltas} == {request.request_id}


def test_a_delta_has_the_log_probabilities_of_its_own_tokens(engine: Engine) -> None:
    """Taken in any portions, those of all deltas are those of the completion."""
    request = engine.add_request([1, 2], params(6, logprobs=1))
    taken = []
    while engine.has_pending_requests():
        taken += [entry for delta in engine.step() for entry in delta.logprobs or ()]
    whole = request.output().outputs[0]
    assert whole.logprobs == tuple(taken)
    assert [entry.token_id for entry in taken] == list(whole.token_ids)


def test_an_abort_keeps_the_reasons_of_completions_that_have_ended(engine: Engine) -> None:
    """Of two completions the one that came to its end stays as it is."""
    first, *_ = toy_answer([1, 2], 1)
    request = engine.add_request([1, 2], params(8, n=2, temperature=2.0, seed=11, stop_token_ids=(first,)))
    while all(sequence.finish_reason is None for sequence in request.sequences):
        engine.step()
    assert not request.is_done
    request.abort()
    assert sorted(one.finish_reason or "" for one in request.output().outputs) == ["abort", "stop"]
    assert request.error is None


def test_extending_continues_as_if_the_conversation_had_been_one_prompt() -> None:
    """The second turn answers the concatenation, computing only what is new."""
    engine = make_engine()
    request = engine.add_request([1, 2, 3, 4, 5], params(4))
    run(engine)
    computed_before = engine.stats().num_computed_tokens
    first = toy_answer([1, 2, 3, 4, 5], 4)
    request.extend([9, 8], params(3))
    assert not request.is_done
    run(engine)
    known = [1, 2, 3, 4, 5, *first, 9, 8]
    output = request.output()
    assert list(output.outputs[0].token_ids) == toy_answer(known, 3)
    assert list(output.prompt_token_ids) == known
    assert output.num_cached_tokens == 8
    assert engine.stats().num_computed_tokens - computed_before == 3 + 2


def test_a_kept_request_gives_its_blocks_to_running_work_and_still_extends() -> None:
    """Finished requests never block running ones; what they lose is recomputed when they continue."""
    engine = make_engine(num_kv_blocks=4, block_size=4)
    kept = engine.add_request([1, 2, 3], params(5))
    run(engine)
    other = engine.add_request([7] * 9, params(7))
    run(engine)
    assert list(other.output().outputs[0].token_ids) == toy_answer([7] * 9, 7)
    kept.extend([6], params(2))
    run(engine)
    known = [1, 2, 3, *toy_answer([1, 2, 3], 5), 6]
    assert list(kept.output().outputs[0].token_ids) == toy_answer(known, 2)


def test_several_answers_of_one_request_differ_only_by_their_seeds() -> None:
    """n answers at a temperature are independent draws, and the same again with the same seed."""
    def draw() -> list[tuple[int, ...]]:
        engine = make_engine()
        request = engine.add_request([1, 2], params(8, n=3, temperature=2.0, seed=11))
        run(engine)
        return [answer.token_ids for answer in request.output().outputs]

    first = draw()
    assert len(set(first)) > 1
    assert first == draw()


def test_requests_without_a_seed_draw_different_numbers() -> None:
    """Two equal requests are independent draws, and the same again in an engine with the same seed."""
    def draw() -> list[tuple[int, ...]]:
        engine = make_engine(seed=3)
        requests = [engine.add_request([1, 2], params(8, temperature=2.0)) for _ in range(3)]
        run(engine)
        return [request.output().outputs[0].token_ids for request in requests]

    first = draw()
    assert len(set(first)) == 3
    assert first == draw()


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode", "finished", "removed"])
def test_aborting_in_every_state_returns_all_blocks(when: str) -> None:
    """Abort is idempotent, frees everything at once, and affects no other request."""
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=4)
    other = engine.add_request([5, 6], params(6))
    request = engine.add_request([1] * 10, params(4))
    if when != "waiting":
        for _ in range({"prefill": 2, "decode": 5}.get(when, 1000)):
            if engine.has_pending_requests():
                engine.step()
    was_done = request.is_done
    if when == "removed":
        request.remove()
    assert request.abort() is not was_done
    assert request.abort() is False
    assert request.output().outputs[0].finish_reason == ("length" if was_done else "abort")
    run(engine)
    assert list(other.output().outputs[0].token_ids) == toy_answer([5, 6], 6)
    request.remove()
    other.remove()
    assert_all_free(engine)


def test_a_failing_step_ends_its_batch_and_no_other_request() -> None:
    """A model that raises costs the requests of that batch; waiting ones are answered, nothing leaks."""
    engine = make_engine(FlakyBackend(raise_on_step=3), max_num_seqs=2, max_num_batched_tokens=8)
    requests = [engine.add_request([value], params(6)) for value in (1, 2, 3)]
    run(engine)
    reasons = [request.output().outputs[0].finish_reason for request in requests]
    assert reasons == ["error", "error", "length"]
    assert isinstance(requests[0].error, StepFailed)
    assert str(requests[0].error.__cause__) == "CUDA error: the device is gone"
    assert "device" not in str(requests[0].error), "its words are for the log of the operator"
    assert list(requests[2].output().outputs[0].token_ids) == toy_answer([3], 6)
    for request in requests:
        request.remove()
    assert_all_free(engine)


def test_a_row_without_usable_logits_ends_only_its_request() -> None:
    """NaN in one row is that request's failure; its neighbour in the same batch is answered."""
    engine = make_engine(FlakyBackend(nan_on=(2, 0)), max_num_seqs=2)
    requests = [engine.add_request([value], params(6)) for value in (1, 2)]
    run(engine)
    assert isinstance(requests[0].error, InvalidLogits)
    assert list(requests[1].output().outputs[0].token_ids) == toy_answer([2], 6)


def test_a_full_queue_refuses_and_keeps_what_it_has() -> None:
    """Overload is an error at the call, with the numbers; accepted requests are all answered."""
    engine = make_engine(max_num_waiting=2)
    accepted = [engine.add_request([1], params(2)) for _ in range(2)]
    with pytest.raises(EngineOverloaded) as refused:
        engine.add_request([1], params(2))
    assert (refused.value.num_waiting, refused.value.limit) == (2, 2)
    run(engine)
    assert all(request.is_done for request in accepted)


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    """What exceeds the whole pool is refused at the door; exactly the pool is accepted and finishes."""
    engine = make_engine(num_kv_blocks=4, block_size=4)
    with pytest.raises(RequestTooLarge, match="17"):
        engine.add_request([1] * 10, params(7))
    request = engine.add_request([1] * 10, params(6))
    run(engine)
    assert list(request.output().outputs[0].token_ids) == toy_answer([1] * 10, 6)


def test_absent_max_tokens_means_what_fits() -> None:
    """Without max_tokens the answer may grow to the model's length or the pool's, whichever is less."""
    engine = make_engine(num_kv_blocks=4, block_size=4)
    request = engine.add_request([1] * 10, SamplingParams(ignore_eos=True))
    run(engine)
    assert len(request.output().outputs[0].token_ids) == 6


def test_waiting_too_long_is_a_queue_timeout() -> None:
    """A request that was not started within queue_timeout_s ends with that error; a started one continues."""
    clock = FakeClock()
    engine = Engine(build_components(ToyBackend(), num_kv_blocks=16, block_size=4, max_num_seqs=1, queue_timeout_s=5.0,
                             max_num_batched_tokens=8), clock)
    started = engine.add_request([1], params(4))
    engine.step()
    late = engine.add_request([2], params(4))
    clock.advance(10.0)
    engine.step()
    assert isinstance(late.error, QueueTimeout)
    run(engine)
    assert list(started.output().outputs[0].token_ids) == toy_answer([1], 4)


def test_the_door_refuses_before_anything_is_taken(engine: Engine) -> None:
    """Bad input is a typed error, and the engine is as if nothing had been asked."""
    for prompt, error in (([], PromptEmpty), ("text", InvalidPrompt), ([True], InvalidRequest), ({}, InvalidRequest)):
        with pytest.raises(error):
            engine.add_request(prompt)  # type: ignore[arg-type]
    assert not engine.has_pending_requests()
    assert engine.stats().num_prompt_tokens == 0


def test_handles_refuse_calls_out_of_turn(engine: Engine) -> None:
    """Extending or removing a running request, or extending a removed one, says which state is needed."""
    request = engine.add_request([1], params(2))
    with pytest.raises(RequestStateError, match="running"):
        request.extend([2])
    with pytest.raises(RequestStateError, match="abort"):
        request.remove()
    run(engine)
    request.remove()
    request.remove()
    with pytest.raises(RequestStateError, match="removed"):
        request.extend([2])


def test_a_refused_continuation_leaves_the_request_as_it_was(engine: Engine) -> None:
    """After a refused extend the finished answer is still there and can be extended properly."""
    request = engine.add_request([1], params(2))
    run(engine)
    before = request.output()
    with pytest.raises(InvalidRequest):
        request.extend([10**9])
    # Why: with the conversation so far one position too many, without it not.
    with pytest.raises(PromptTooLong):
        request.extend([1] * (engine.stats().max_model_len - 3))
    assert request.output() == before
    request.extend([3], params(1))
    run(engine)
    assert len(request.output().outputs[0].token_ids) == 1


def test_generate_keeps_order_beyond_the_queue_bound(engine: Engine) -> None:
    """More prompts than may wait are fed as there is room; outputs come in the order of the prompts."""
    prompts = [[value % 20, value % 7] for value in range(60)]
    outputs = engine.generate(prompts, params(3))
    assert [list(out.outputs[0].token_ids) for out in outputs] == [toy_answer(prompt, 3) for prompt in prompts]
    assert_all_free(engine)


def test_more_answers_than_may_wait_are_refused_at_the_door() -> None:
    """A request that could never enter the queue is refused instead of being retried for ever."""
    engine = make_engine(max_num_waiting=2)
    with pytest.raises(TooManySequences, match="max_num_waiting"):
        engine.generate([[1]], params(2, n=3))
    assert len(engine.generate([[1]], params(2, n=2))[0].outputs) == 2


def test_generate_refuses_all_when_one_prompt_is_bad(engine: Engine) -> None:
    """A bad prompt among good ones is found before any is started."""
    with pytest.raises(PromptEmpty):
        engine.generate([[1], []], params(2))
    with pytest.raises(InvalidRequest):
        engine.generate("one prompt", params(2))
    with pytest.raises(InvalidRequest):
        engine.generate([[1], [2]], [params(2)])
    assert engine.stats().num_steps == 0


def test_an_interrupted_generate_leaves_no_request_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control-C inside the model rolls the step back, frees every block and reaches the caller."""
    backend = ToyBackend()
    engine = make_engine(backend)
    forward, calls = backend.forward, iter(range(100))

    def interrupted(batch: object) -> object:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return forward(batch)  # type: ignore[arg-type]

    monkeypatch.setattr(backend, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1], [2]], params(9))
    assert_all_free(engine)
    assert list(engine.generate([[3]], params(2))[0].outputs[0].token_ids) == toy_answer([3], 2)


@pytest.mark.parametrize("place", ["note_started", "copy", "execute", "observe"])
def test_ctrl_c_between_the_lines_of_a_step_rolls_it_back(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it comes between the reservation and the commit: no block is lost, and the same requests complete."""
    engine = make_engine()
    owners = {"note_started": engine._outputs, "copy": engine._transfers, "execute": engine._runner,
              "observe": engine.scheduler.costs.steps}
    owner, real = owners[place], getattr(owners[place], place)

    def interrupted(*arguments: object) -> None:
        monkeypatch.setattr(owner, place, real)
        raise KeyboardInterrupt

    # Why: the second one continues inside a block of the first one, so that a block is copied.
    engine.generate([[1, 2, 3, 4, 5, 6]], params(2), show_progress=False)
    requests = [engine.add_request([1, 2, 3, 4, 5, 7], params(6)), engine.add_request([3], params(6))]
    monkeypatch.setattr(owner, place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    run(engine)
    assert [list(request.output().outputs[0].token_ids) for request in requests] == [
        toy_answer([1, 2, 3, 4, 5, 7], 6), toy_answer([3], 6)
    ]
    assert_all_free(engine)


def test_a_closed_engine_refuses_and_ends_what_was_running() -> None:
    """Closing aborts, twice is once, and later calls say that the engine is closed."""
    engine = make_engine()
    request = engine.add_request([1], params(5))
    engine.step()
    engine.close()
    engine.close()
    assert request.sequences[0].finish_reason == "abort"
    for call in (engine.step, lambda: engine.add_request([1])):
        with pytest.raises(EngineClosed):
            call()


def test_unknown_settings_are_refused_by_name() -> None:
    """A misspelt setting is an error that lists the known ones."""
    with pytest.raises(InvalidConfig, match="num_kv_blocs"):
        make_engine(num_kv_blocs=3)


def test_static_batching_admits_only_into_an_empty_batch() -> None:
    """In static mode a freed slot stays empty until the whole batch is done; answers are the same."""
    prompts, lengths = [[1], [2], [3], [4]], [2, 9, 2, 9]
    steps = {}
    for policy in ("fcfs", "static"):
        engine = make_engine(scheduling_policy=policy, max_num_seqs=2)
        outputs = engine.generate(prompts, [params(length) for length in lengths])
        assert [list(out.outputs[0].token_ids) for out in outputs] == [
            toy_answer(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)
        ]
        steps[policy] = engine.stats().num_steps
    assert steps == {"fcfs": 13, "static": 18}


def test_priority_runs_the_more_important_request_first() -> None:
    """Under the priority policy a later, more important request overtakes waiting ones."""
    engine = make_engine(scheduling_policy="priority", max_num_seqs=1)
    low = engine.add_request([1], params(2))
    high = engine.add_request([2], params(2), priority=5)
    while not high.is_done:
        engine.step()
    assert not low.is_done


def test_a_request_with_several_answers_finishes_once() -> None:
    """Answers that end in the same step are one finished request, reported to observers once, with all its texts."""
    reported: list[RequestOutput] = []

    class Watcher:
        @hookimpl
        def pagedcore_request_finished(self, request: RequestOutput) -> None:
            reported.append(request)

    engine = make_engine(plugins=[Watcher()])
    request = engine.add_request([1, 2, 3], SamplingParams(n=3, max_tokens=5, ignore_eos=True, temperature=1.0))
    run(engine)
    assert engine.stats().num_finished == 1
    assert [output.outputs for output in reported] == [request.output().outputs]
    assert all(len(answer.token_ids) == 5 for answer in reported[0].outputs)


def test_what_happens_meanwhile_is_told_afterwards() -> None:
    """Tokens that another caller's ``generate`` brought along are in the next delta, none is lost."""
    with make_engine(num_kv_blocks=64) as engine:
        request = engine.add_request([1], params(30))
        engine.generate([[2]], params(5), show_progress=False)
        streamed = [token for _ in range(25) for delta in engine.step() for token in delta.token_ids]
        assert request.is_done
    assert streamed == toy_answer([1], 30)


def in_pieces(engine: Engine, take_after: Callable[[int], bool]) -> dict[tuple[int, int], list[Delta]]:
    """Answer requests of several kinds; the deltas by request and answer, taken after the steps that are asked for."""
    wanted = [("What is 2 + 3?", SamplingParams(max_tokens=12)),
              ("Count from 3 to 9.", SamplingParams(max_tokens=20, stop=["7"], logprobs=2)),
              ("What is 9 - 5?", SamplingParams(max_tokens=9, n=2, temperature=1.0, seed=1, ignore_eos=True)),
              ([1, 2, 3], SamplingParams(max_tokens=6, best_of=3, n=2, temperature=1.0, seed=2, logprobs=0))]
    requests = [engine.add_request(prompt, params) for prompt, params in wanted]
    numbers = {request.request_id: number for number, request in enumerate(requests)}
    found: dict[tuple[int, int], list[Delta]] = {}
    pending: dict[PendingOutput, None] = {}
    while engine.has_pending_requests():
        pending.update(dict.fromkeys(engine.step_pending()))
        if take_after(engine.stats().num_steps) or not engine.has_pending_requests():
            for delta in (one.take_delta() for one in pending):
                found.setdefault((numbers[delta.request_id], delta.index), []).append(delta)
            pending.clear()
    for request in requests:
        for answer in request.output().outputs:
            deltas = found[numbers[request.request_id], answer.index]
            assert "".join(delta.text for delta in deltas) == answer.text
            assert sum((delta.token_ids for delta in deltas), ()) == answer.token_ids
            assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [answer.finish_reason]
            if answer.logprobs is not None:
                assert sum((delta.logprobs or () for delta in deltas), ()) == answer.logprobs
    return found


@pytest.mark.parametrize("every", [1, 2, 7, 1000])
def test_deltas_can_be_taken_at_any_time(every: int) -> None:
    """However many steps a delta tells of, all of them together are the answer, and the last one has its end."""
    with Engine.from_pretrained("demo", num_kv_blocks=256) as engine:
        found = in_pieces(engine, lambda num_steps: num_steps % every == 0)
    assert len(found) == 6
    assert max(map(len, found.values())) == {1: 10, 2: 5, 7: 2, 1000: 1}[every]
