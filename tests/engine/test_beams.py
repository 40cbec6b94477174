"""Answers chosen among more sequences than are returned: shared prompts, ``best_of`` and beam search in the engine."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pagedcore.engine.builder import build_components
from pagedcore.engine.engine import Engine
from pagedcore.errors import InvalidLogits, QueueTimeout, RequestTooLarge, StepFailed, TooManySequences
from pagedcore.outputs import CompletionOutput, RequestOutput
from pagedcore.protocols import FloatArray, RaggedRows
from pagedcore.requests.beam_search import BeamRules, BeamSearch
from pagedcore.requests.request import Request
from pagedcore.sampling_params import SamplingParams
from support.doubles import VOCAB_SIZE, FakeClock, FlakyBackend, ToyBackend, toy_answer, toy_logits
from support.engine_builders import assert_all_free, make_engine, run
from support.families import tiny_model

MODES = ("auto", "swap", "shrink", "recompute", "wait")
EOS = VOCAB_SIZE - 1
TINY_VOCAB = 23


def untied(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The same order of tokens as the toy model's, whose log-probabilities are all alike, without equal sums."""
    noise = np.random.default_rng(zlib.crc32(logits.tobytes())).random(len(logits), np.float32)
    return logits + noise / 5


class UntiedBackend(ToyBackend):
    """A toy model whose beams have different scores."""

    def forward(self, batch: RaggedRows) -> FloatArray:
        """Compute as ``ToyBackend`` does."""
        return np.array([untied(row) for row in super().forward(batch)], np.float32).reshape(-1, VOCAB_SIZE)


def beams(max_tokens: int, width: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, beam_width=width, **more)


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [list(answer.token_ids) for answer in output.outputs]


def toy_beams(prompt: list[int], params: SamplingParams) -> list[tuple[list[int], float]]:
    """The answers of a beam search over the toy model, without an engine: whole sequences, whole vocabularies."""
    stops = frozenset({EOS, *params.stop_token_ids})
    search = BeamSearch(BeamRules(params.beam_width, params.max_tokens or 0, params.min_tokens, stops,
                                  params.length_penalty, params.early_stopping))
    known = [prompt]
    while not search.is_done:
        logits = [untied(toy_logits(np.array(one, np.int64))).astype(np.float64) for one in known]
        offers = [list(enumerate((one - np.log(np.exp(one).sum())).tolist())) for one in logits]
        known = [[*known[one.parent], one.token_id] for one in search.advance(offers)]
    return [(list(one.token_ids), one.score) for one in search.hypotheses[: params.n]]


def random_beams(rng: random.Random, max_tokens: int = 10) -> SamplingParams:
    width = rng.randint(2, 4)
    length = rng.randint(1, max_tokens)
    return beams(
        length, width, n=rng.randint(1, width), min_tokens=rng.choice((0, length // 2)),
        length_penalty=rng.choice((0.0, 1.0, -1.0, 1.7)), early_stopping=rng.choice((True, False, "never")),
        stop_token_ids=rng.choice(((), (20,), (19, 20))),
    )


def assert_beams_are_right(request: Request) -> None:
    output = request.output()
    expected = toy_beams(request.prompt_token_ids, request.params)
    assert tokens_of(output) == [answer for answer, _ in expected]
    assert [one.score for one in output.outputs] == pytest.approx([score for _, score in expected], abs=1e-4)


def test_a_prompt_is_computed_once_for_all_answers() -> None:
    """Siblings wait for the first to compute the prompt, then each computes its last position only."""
    engine = make_engine(num_kv_blocks=64, max_num_batched_tokens=32)
    request = engine.add_request([5] * 11, SamplingParams(max_tokens=6, n=4, temperature=1.0, ignore_eos=True))
    run(engine)
    stats = engine.stats()
    assert stats.num_computed_tokens == 11 + 3 * 1 + 4 * 5
    assert stats.num_cached_tokens == 3 * 10
    request.remove()
    assert_all_free(engine)


@pytest.mark.parametrize("mode", MODES)
def test_several_answers_are_those_of_separate_requests(mode: str) -> None:
    """With the same seeds, and with memory for one of three requests, n answers are n requests' answers."""
    shape: dict[str, Any] = {"max_tokens": 12, "temperature": 1.5, "ignore_eos": True}
    engine = make_engine(num_kv_blocks=20, max_num_batched_tokens=16, max_num_waiting=32, preemption=mode,
                         host_kv_memory=64 * 12)
    requests = [engine.add_request([i] * (3 + i), SamplingParams(n=3, seed=i, **shape)) for i in range(4)]
    run(engine)
    for request in requests:
        for sequence, answer in zip(request.sequences, tokens_of(request.output()), strict=True):
            alone = make_engine(num_kv_blocks=64)
            one = alone.add_request(request.prompt_token_ids, SamplingParams(seed=sequence.seed, **shape))
            run(alone)
            assert tokens_of(one.output()) == [answer]
    assert_all_free(engine)


@pytest.mark.parametrize("num_blocks", [20, 64])
def test_the_best_answers_are_returned_best_first(num_blocks: int) -> None:
    """best_of answers are drawn as n would be; the n with the highest mean log-probability come back, in order."""
    shape: dict[str, Any] = {"max_tokens": 12, "temperature": 1.5, "seed": 5}
    all_of_them = make_engine(num_kv_blocks=64)
    drawn = all_of_them.add_request([7] * 5, SamplingParams(n=4, logprobs=0, **shape))
    run(all_of_them)
    ranked = sorted(
        (-sum(one.logprob for one in answer.logprobs or ()) / len(answer.token_ids), answer.index, answer.token_ids)
        for answer in drawn.output().outputs
    )
    engine = make_engine(num_kv_blocks=num_blocks)
    others = [engine.add_request([1], SamplingParams(max_tokens=20)) for _ in range(3)]
    request = engine.add_request([7] * 5, SamplingParams(n=2, best_of=4, **shape))
    run(engine)
    answers = request.output().outputs
    assert [answer.token_ids for answer in answers] == [token_ids for _, _, token_ids in ranked[:2]]
    assert [answer.score for answer in answers] == pytest.approx([-cost for cost, _, _ in ranked[:2]])
    assert [answer.logprobs for answer in answers] == [None, None]
    assert all(tokens_of(other.output()) == [toy_answer([1], 20, stop_token_ids=[EOS])] for other in others)
    assert_all_free(engine)


def test_equal_answers_of_best_of_stay_in_order() -> None:
    """Greedy contenders are all the same; the first ones are returned, with log-probabilities when asked for."""
    engine = make_engine(num_kv_blocks=64)
    request = engine.add_request([3], SamplingParams(max_tokens=4, n=2, best_of=3, logprobs=1, ignore_eos=True))
    run(engine)
    answers = request.output().outputs
    assert tokens_of(request.output()) == [toy_answer([3], 4)] * 2
    assert all(len(answer.logprobs or ()) == 4 for answer in answers)


@pytest.mark.parametrize("params", [beams(6, 3, n=2), SamplingParams(max_tokens=6, best_of=3, n=2, temperature=1.0)])
def test_chosen_answers_are_delivered_at_the_end_at_once(params: SamplingParams) -> None:
    """Nothing is known of an answer before it is chosen; then there is one delta for each, and it is the last."""
    engine = make_engine(num_kv_blocks=64)
    request = engine.add_request([3, 4], params)
    deltas = []
    while engine.has_pending_requests():
        assert (deltas, tokens_of(request.output()), request.is_done) == ([], [[], []], False)
        deltas += engine.step()
    assert [delta.index for delta in deltas] == [0, 1]
    assert [list(delta.token_ids) for delta in deltas] == tokens_of(request.output())
    assert all(delta.finish_reason in ("stop", "length") for delta in deltas)
    assert [request.take_new_tokens(i) for i in range(2)] == tokens_of(request.output())


@pytest.mark.parametrize("mode", MODES)
def test_beams_under_memory_pressure_are_the_same(mode: str) -> None:
    """With memory and rows for a few of many beams, in every mode, searches and their neighbours are undisturbed."""
    rng = random.Random(17)
    engine = make_engine(UntiedBackend(), num_kv_blocks=22, max_num_seqs=5, max_num_batched_tokens=9,
                         max_num_waiting=64, preemption=mode, host_kv_memory=64 * 12)
    searches = [
        engine.add_request([rng.randrange(20) for _ in range(rng.randint(1, 9))], random_beams(rng)) for _ in range(12)
    ]
    plain = [engine.add_request([i, 3], SamplingParams(max_tokens=30, ignore_eos=True)) for i in range(5)]
    run(engine)
    for request in searches:
        assert_beams_are_right(request)
    for request in plain:
        assert tokens_of(request.output()) == [toy_answer(request.prompt_token_ids, 30)]
    assert engine.stats().num_preemptions > 0
    assert_all_free(engine)


@pytest.mark.parametrize("settings", [
    {"max_num_seqs": 1}, {"max_num_seqs": 2, "max_num_waiting": 1}, {"admission": "guaranteed"},
    {"scheduling_policy": "static"}, {"enable_prefix_caching": False},
])  # fmt: skip
def test_beams_take_turns_where_they_do_not_fit_together(settings: dict[str, Any]) -> None:
    """A search ends as ever when its beams cannot be in one step, and its beams are never refused by the queue."""
    rng = random.Random(2)
    engine = make_engine(UntiedBackend(), num_kv_blocks=40, max_num_batched_tokens=8, **settings)
    for length in (1, 4, 5, 8, 9):
        request = engine.add_request([rng.randrange(20) for _ in range(length)], random_beams(rng))
        run(engine)
        assert_beams_are_right(request)
    assert_all_free(engine)


def test_a_round_of_beams_that_fit_is_one_step_and_computes_one_token_each() -> None:
    """Nothing that beams have in common is computed twice."""
    engine = make_engine(num_kv_blocks=64)
    request = engine.add_request([9] * 6, beams(8, 4, ignore_eos=True))
    assert run(engine) == 8
    stats = engine.stats()
    assert stats.num_computed_tokens == 6 + 4 * 7
    assert request.output().num_cached_tokens == 0
    assert (stats.num_looked_up_tokens, stats.num_generated_tokens) == (6, 8)


@pytest.mark.parametrize("params", [beams(9, 3, n=2), SamplingParams(max_tokens=9, best_of=3, n=2, temperature=1.0)])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_an_aborted_contest_leaves_nothing(params: SamplingParams, num_steps: int) -> None:
    """Aborted at any moment, every answer ends once, all blocks are free, and the neighbour's answer is its own."""
    engine = make_engine(num_kv_blocks=40)
    neighbour = engine.add_request([2], SamplingParams(max_tokens=9, ignore_eos=True))
    request = engine.add_request([8] * 9, params)
    for _ in range(num_steps):
        engine.step()
    assert request.abort()
    assert not request.abort()
    assert [answer.finish_reason for answer in request.output().outputs] == ["abort", "abort"]
    run(engine)
    assert tokens_of(neighbour.output()) == [toy_answer([2], 9)]
    assert_all_free(engine)
    assert engine._outputs.texts.by_sequence == {}


@pytest.mark.parametrize("params", [beams(9, 3, n=2), SamplingParams(max_tokens=9, best_of=3, n=2, temperature=1.0)])
@pytest.mark.parametrize(("fault", "error"), [({"nan_on": (4, 1)}, InvalidLogits), ({"raise_on_step": 4}, StepFailed)])
def test_a_contender_that_fails_ends_its_request(
    params: SamplingParams, fault: dict[str, Any], error: type[Exception]
) -> None:
    """One unusable row or a failed step ends every answer of the request, each with one delta, and leaks nothing."""
    engine = make_engine(FlakyBackend(**fault), num_kv_blocks=40)
    request = engine.add_request([8, 7], params)
    deltas = []
    while engine.has_pending_requests():
        deltas += engine.step()
    assert [(delta.index, delta.finish_reason) for delta in deltas] == [(0, "error"), (1, "error")]
    assert all(isinstance(answer.error, error) for answer in request.output().outputs)
    assert_all_free(engine)


def test_a_contest_that_is_never_started_times_out_once() -> None:
    """Each answer gets one error, however many contenders waited."""
    clock = FakeClock()
    parts = build_components(ToyBackend(), num_kv_blocks=40, block_size=4, max_num_seqs=1, max_num_batched_tokens=8,
                     max_num_waiting=8, queue_timeout_s=5.0)
    engine = Engine(parts, clock)
    engine.add_request([1], SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    request = engine.add_request([8], SamplingParams(max_tokens=9, best_of=3, n=2))
    clock.advance(6.0)
    ended = [delta for delta in engine.step() if delta.request_id == request.request_id]
    assert [delta.finish_reason for delta in ended] == ["error", "error"]
    assert all(isinstance(answer.error, QueueTimeout) for answer in request.output().outputs)
    run(engine)
    assert_all_free(engine)


@pytest.mark.parametrize("num_top", [0, 2, 20])
def test_the_tokens_of_beams_have_their_log_probabilities(num_top: int) -> None:
    """Each returned token has the model's own, and the best at its place; they sum to the score, which nothing changed.

    Beams are preempted, dropped and branched on the way.
    """
    rng = random.Random(6)
    engine = make_engine(UntiedBackend(), num_kv_blocks=22, max_num_seqs=5, max_num_batched_tokens=9,
                         max_num_waiting=64, preemption="recompute")
    requests = []
    for _ in range(8):
        shape = replace(random_beams(rng), logprobs=num_top)
        requests.append(engine.add_request([rng.randrange(20) for _ in range(rng.randint(1, 9))], shape))
    run(engine)
    for request in requests:
        assert_beams_are_right(request)
        for answer in request.output().outputs:
            assert_logprobs_of(request.prompt_token_ids, answer, num_top)
            total = sum(one.logprob for one in answer.logprobs or ())
            length = len(answer.token_ids) ** request.params.length_penalty
            assert answer.score == pytest.approx(total / length, abs=1e-6)
    assert_all_free(engine)


def assert_logprobs_of(prompt: list[int], answer: CompletionOutput, num_top: int) -> None:
    """Compare with the toy model's own distribution after each beginning of the answer."""
    assert [one.token_id for one in answer.logprobs or ()] == list(answer.token_ids)
    for i, one in enumerate(answer.logprobs or ()):
        logits = untied(toy_logits(np.array([*prompt, *answer.token_ids[:i]], np.int64))).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        best = np.argsort(-expected)[:num_top].tolist()
        assert one.logprob == pytest.approx(expected[one.token_id], abs=1e-5)
        assert [token_id for token_id, _ in one.top] == best
        assert [value for _, value in one.top] == pytest.approx(expected[best], abs=1e-5)


@pytest.mark.parametrize("params", [
    SamplingParams(max_tokens=4, n=3, temperature=1.0), SamplingParams(max_tokens=4, n=2, best_of=4, temperature=1.0),
    beams(4, 3, n=2),
])  # fmt: skip
def test_a_prompt_counts_once_for_all_answers(params: SamplingParams) -> None:
    """However many sequences there are, the engine's counter, the output and a further turn count each token once."""
    engine = make_engine(num_kv_blocks=64)
    request = engine.add_request([5] * 7, params)
    run(engine)
    assert engine.stats().num_prompt_tokens == len(request.output().prompt_token_ids) == 7
    single = engine.add_request([5], SamplingParams(max_tokens=2, ignore_eos=True))
    run(engine)
    single.extend([3, 4], replace(params, n=1))
    run(engine)
    assert engine.stats().num_prompt_tokens == 7 + 1 + 2


def test_a_conversation_goes_on_from_the_answer_that_was_chosen() -> None:
    """extend continues a beam search's answer, by another search or without one."""
    engine = make_engine(UntiedBackend(), num_kv_blocks=64)
    request = engine.add_request([3, 1], beams(5, 3))
    run(engine)
    known = [3, 1, *tokens_of(request.output())[0], 6]
    request.extend([6])
    run(engine)
    assert request.prompt_token_ids == known
    assert_beams_are_right(request)
    known += [*tokens_of(request.output())[0], 4]
    request.extend([4], SamplingParams(max_tokens=3, ignore_eos=True))
    run(engine)
    assert tokens_of(request.output()) == [toy_answer(known, 3)]
    assert request.output().outputs[0].score is None


@pytest.mark.parametrize("params", [beams(6, 3), SamplingParams(max_tokens=6, best_of=3, temperature=1.0, seed=4)])
def test_a_session_has_one_way_on(params: SamplingParams) -> None:
    """A conversation grows by one answer, so several sequences for it are refused by name, and it is forked instead."""
    with make_engine(UntiedBackend()) as engine, pytest.raises(TooManySequences, match="Fork the session"):
        engine.session(params)


def test_what_cannot_fit_is_refused_at_the_door() -> None:
    """Memory is asked for as if sequences shared nothing; places in the queue for those that start."""
    engine = make_engine(num_kv_blocks=8, max_num_waiting=2)
    engine.add_request([1], beams(7, 4)).abort()
    with pytest.raises(RequestTooLarge, match=r"got 36, .* 4 x \(1 \+ 8\)"):
        engine.add_request([1], beams(8, 4))
    with pytest.raises(RequestTooLarge, match=r"2 x \(1 \+ 16\)"):
        engine.add_request([1], SamplingParams(max_tokens=16, best_of=2))
    with pytest.raises(TooManySequences, match="best_of: got 3"):
        engine.add_request([1], SamplingParams(max_tokens=1, best_of=3))


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
@pytest.mark.parametrize("mode", ["auto", "recompute"])
def test_beams_are_those_of_generate(family: str, mode: str) -> None:
    """Tokens, order and scores are those of ``generate(num_beams=...)``, ends at every length, rows for few beams."""
    rng = random.Random(f"{family} {mode}")
    oracle, served = (tiny_model(family, vocab_size=TINY_VOCAB) for _ in range(2))
    for model in (oracle, served):
        model.set_attn_implementation("eager")
    with Engine.from_pretrained(served, attention_backend="reference", num_kv_blocks=26, block_size=4, max_num_seqs=5,
                                max_num_batched_tokens=9, max_num_waiting=64, preemption=mode) as engine:
        requests = []
        for length in (1, 3, 4, 5, 8, 9, 16):
            prompt = [rng.randrange(3, TINY_VOCAB) for _ in range(length)]
            requests.append(engine.add_request(prompt, random_beams(rng, max_tokens=9)))
        run(engine)
        for request in requests:
            expected, scores = generate_beams(oracle, request)
            output = request.output()
            assert tokens_of(output) == expected
            assert [one.score for one in output.outputs] == pytest.approx(scores, rel=1e-4, abs=1e-4)
        assert_all_free(engine)


def generate_beams(model: Any, request: Request) -> tuple[list[list[int]], list[float]]:
    """What transformers generates for a request, cut after the first token that ends an answer."""
    params, ids = request.params, torch.tensor([request.prompt_token_ids])
    stops = [2, *params.stop_token_ids]
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=params.beam_width,
            num_return_sequences=params.n, length_penalty=params.length_penalty, early_stopping=params.early_stopping,
            max_new_tokens=params.max_tokens, min_new_tokens=params.min_tokens or None, eos_token_id=stops,
            pad_token_id=0, return_dict_in_generate=True, output_scores=True,
        )
    answers = []
    for padded in out.sequences[:, ids.shape[1] :].tolist():
        end = next((i + 1 for i, token_id in enumerate(padded) if token_id in stops), params.max_tokens)
        answers.append(padded[:end])
    return answers, out.sequences_scores.tolist()
