"""The laws of the sampler: biases, penalties and masks, log-probabilities, and rows that do not touch each other."""

import numpy as np
import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pagedcore.execution.row_adjuster import RowAdjuster
from pagedcore.execution.sampler import Sampler
from pagedcore.sampling_params import SamplingParams
from pagedcore.sequence import Sequence, SequenceStatus
from support.sampling_reference import Draw, choose, explains, kept_tokens, weights_of

VOCAB_SIZE = 300


def make_sequence(prompt=(1, 2, 3), output=(), *, sequence_id=0, seed=0, stop_token_ids=(), **params):
    """A sequence that has generated ``output``."""
    sequence = Sequence(
        sequence_id, list(prompt), SamplingParams(**params), max_tokens=100, seed=seed,
        stop_token_ids=frozenset(stop_token_ids),
    )  # fmt: skip
    sequence.token_ids.extend(output)
    return sequence


def make_logits(num_rows, seed=0, vocab_size=VOCAB_SIZE):
    """Random logits of both signs."""
    return (np.random.default_rng(seed).standard_normal((num_rows, vocab_size)) * 3).astype(np.float32)


def adjusted(sequence, row):
    """What a fresh adjuster makes of a copy of the row."""
    copy = row.copy()
    RowAdjuster(sequence, len(row)).adjust(copy, sequence)
    return copy


def adjusted_naively(sequence, row):
    """The definition, one token at a time, in Python's float."""
    params, out = sequence.params, [float(logit) for logit in row]
    for token_id, bias in (params.logit_bias or {}).items():
        out[token_id] = float(np.float32(out[token_id]) + np.float32(bias))
    for token_id in set(sequence.token_ids):
        logit, penalty = out[token_id], params.repetition_penalty
        out[token_id] = logit / penalty if logit > 0 else logit * penalty
    for token_id in set(sequence.output_token_ids):
        count = sequence.output_token_ids.count(token_id)
        out[token_id] -= params.presence_penalty + params.frequency_penalty * count
    if sequence.num_output_tokens < params.min_tokens:
        for token_id in sequence.stop_token_ids:
            out[token_id] = -np.inf
    return np.array(out)


ADJUSTMENTS = [
    {"logit_bias": {5: 3.5, 299: -100, 0: 100}},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.4},
    {"presence_penalty": -2, "frequency_penalty": 2},
    {"min_tokens": 50},
    {"logit_bias": {7: 2.0, 9: -3.0}, "repetition_penalty": 1.7, "presence_penalty": 0.3, "frequency_penalty": 0.2,
     "min_tokens": 50},
]  # fmt: skip


@pytest.mark.parametrize("params", ADJUSTMENTS)
def test_adjustments_are_what_they_are_defined_to_be(params):
    """Bias, penalties and mask agree with the definition applied token by token, and touch no other token."""
    row = make_logits(1)[0]
    sequence = make_sequence((1, 7, 7, 250), (7, 9, 9, 9, 12), stop_token_ids=(4, 9), **params)
    result, expected = adjusted(sequence, row), adjusted_naively(sequence, row)
    np.testing.assert_allclose(result, expected, rtol=2e-7, atol=1e-6)
    untouched = expected == row
    assert result[untouched].tobytes() == row[untouched].tobytes()


def test_penalties_are_those_of_transformers():
    """Repetition penalty and minimum length agree with transformers' own processors."""
    row, ids = make_logits(1)[0], [1, 7, 7, 250, 9, 12]
    sequence = make_sequence(ids[:3], ids[3:], repetition_penalty=1.4, min_tokens=5, stop_token_ids=(4, 9))
    scores = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([ids]), torch.tensor(row[None]))
    scores = MinNewTokensLengthLogitsProcessor(3, 5, [4, 9], device="cpu")(torch.tensor([ids]), scores)
    np.testing.assert_allclose(adjusted(sequence, row), scores[0].numpy(), rtol=2e-7)


def test_stop_tokens_are_masked_until_the_completion_is_long_enough():
    """With min_tokens = 3 no stop token is chosen for the first three tokens, then it may be."""
    sampler, sequence = Sampler(VOCAB_SIZE), make_sequence(min_tokens=3, stop_token_ids=(4, 9))
    for expected in (6, 6, 6, 4):
        logits = np.zeros((1, VOCAB_SIZE), np.float32)
        logits[0, [4, 9, 6]] = [5, 4, 3]
        token = int(sampler.sample(logits, [sequence]).token_ids[0])
        sequence.append_token(token)
        assert token == expected


def test_a_stop_token_that_the_model_does_not_have_is_no_error():
    """A tokenizer may know end tokens beyond the model's vocabulary."""
    sequence = make_sequence(min_tokens=3, stop_token_ids=(4, VOCAB_SIZE, VOCAB_SIZE + 7))
    result = Sampler(VOCAB_SIZE).sample(make_logits(1), [sequence])
    assert (result.token_ids >= 0).all()


def test_no_penalty_makes_a_finite_logit_infinite():
    """The smallest and largest penalties on the largest logits leave the row valid."""
    row = np.full(VOCAB_SIZE, 3.4e38, np.float32)
    row[::2] = -3.4e38
    for penalty in (5e-324, 1e-300, 10.0):
        result = adjusted(make_sequence(range(200), repetition_penalty=penalty, presence_penalty=-2), row)
        assert np.isfinite(result).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_adjustments_hide_no_broken_logit(value):
    """A NaN or an infinity under a bias, a penalty or a mask still makes its row invalid."""
    for params in ADJUSTMENTS:
        logits = make_logits(2)
        logits[0, 9] = value
        bias = {9: -100.0} if "logit_bias" in params else None
        sequences = [make_sequence((9,), (9,), stop_token_ids=(9,), **{**params, "logit_bias": bias}) for _ in "ab"]
        result = Sampler(VOCAB_SIZE).sample(logits, sequences)
        assert (result.token_ids >= 0).tolist() == [False, True]
        assert result.token_ids[0] == -1


def test_counts_follow_a_growing_sequence():
    """Adjusting step by step with one sampler is the same as counting from the start every time."""
    params = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    sampler, sequence = Sampler(VOCAB_SIZE), make_sequence(**params)
    for step in range(60):
        row = make_logits(1, seed=step)[0]
        chosen = int(sampler.sample(row[None].copy(), [sequence]).token_ids[0])
        assert chosen == int(np.argmax(adjusted_naively(sequence, row)))
        sequence.append_token(chosen)


def test_counts_start_anew_with_a_turn_a_sequence_or_parameters():
    """A continued turn, other parameters, or another sequence under the same id: nothing is remembered wrongly."""
    sampler = Sampler(VOCAB_SIZE)
    params = {"presence_penalty": 2, "frequency_penalty": 2}

    def check(sequence):
        row = make_logits(1, seed=len(sequence.token_ids))[0] / 10
        row[sequence.token_ids] = 4
        row[sequence.output_token_ids] = 5
        chosen = int(sampler.sample(row[None].copy(), [sequence]).token_ids[0])
        assert chosen == int(np.argmax(adjusted_naively(sequence, row)))

    first = make_sequence(output=range(290), **params)
    check(first)
    first.move_to(SequenceStatus.FINISHED)
    first.begin_turn([5, 6], first.params, max_tokens=9, stop_token_ids=frozenset(), arrival=1)
    check(first)
    first.append_token(298)
    check(first)
    first.params = SamplingParams(frequency_penalty=-2.0)
    check(first)
    check(make_sequence((3, 299), (299,), **params))
    other = make_sequence((8, 9), (9, 9, 9), **params)
    check(other)
    twin = Sequence(0, [3, 4], other.params, max_tokens=9, seed=0)
    twin.token_ids.extend((4, 5, 6))
    check(twin)


def test_a_sequence_that_was_away_is_counted_again():
    """Steps without a sequence (preempted, or in a chunk of its prompt) do not spoil its counts."""
    sampler = Sampler(VOCAB_SIZE)
    away, present = (make_sequence(sequence_id=i, presence_penalty=2.0, frequency_penalty=1.0) for i in (1, 2))
    for step in range(9):
        sequences = [present] if step % 3 else [away, present]
        logits = make_logits(len(sequences), seed=step) / 10
        expected = [int(np.argmax(adjusted_naively(s, row))) for s, row in zip(sequences, logits, strict=True)]
        chosen = sampler.sample(logits.copy(), sequences).token_ids.tolist()
        assert chosen == expected
        for sequence, token in zip(sequences, chosen, strict=True):
            sequence.append_token(token)


def test_only_the_sequences_of_the_last_step_are_remembered():
    """What a sampler keeps is bounded by a step, however many sequences it has seen."""
    sampler = Sampler(VOCAB_SIZE)
    for i in range(20):
        sampler.sample(make_logits(2), [make_sequence(sequence_id=2 * i + j, presence_penalty=1.0) for j in (0, 1)])
    assert sampler._adjusters.keys() == {38, 39}
    sampler.sample(make_logits(1), [make_sequence()])
    assert not sampler._adjusters


MODES = [
    {"temperature": 0.7}, {"temperature": 0.7, "top_k": 20}, {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1}, {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
]  # fmt: skip


@pytest.mark.parametrize("params", MODES)
def test_kept_tokens_are_those_of_transformers(params):
    """Temperature, top-k, top-p and min-p keep the tokens that transformers' warpers keep."""
    row = np.random.default_rng(4).permutation(np.linspace(-4, 4, VOCAB_SIZE)).astype(np.float32)
    warpers = {"temperature": TemperatureLogitsWarper, "top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper,
               "min_p": MinPLogitsWarper}  # fmt: skip
    scores = torch.tensor(row[None])
    for name in warpers:
        if name in params:
            scores = warpers[name](params[name])(None, scores)
    kept = set(torch.isfinite(scores[0]).nonzero()[:, 0].tolist())
    sequences = [make_sequence(seed=seed, **params) for seed in range(8000)]
    drawn = Sampler(VOCAB_SIZE).sample(row[None].repeat(8000, axis=0), sequences).token_ids.tolist()
    assert set(drawn) <= kept
    likely = (scores[0].softmax(0) * 8000 > 12).nonzero()[:, 0].tolist()
    assert set(likely) <= set(drawn)


@pytest.mark.parametrize("params", MODES)
def test_the_token_is_a_function_of_seed_and_position(params):
    """The random number is that of the sequence's seed and the length of its tokens."""
    for seed, output in ((0, ()), (5, (1,)), (2**63 - 1, range(20))):
        row = make_logits(1, seed=7)
        sequence = make_sequence(output=output, seed=seed, **params)
        token = int(Sampler(VOCAB_SIZE).sample(row.copy(), [sequence]).token_ids[0])
        draw = Draw(**params, seed=seed, position=len(sequence.token_ids))
        assert token == choose(row[0], draw) or explains(row[0], draw, token)


def mixed_batch():
    """Sequences of every kind, and their logits."""
    kinds = [{}, *MODES, *ADJUSTMENTS, *[{**mode, **ADJUSTMENTS[-1], "logprobs": 3} for mode in MODES], {"logprobs": 0}]
    sequences = [
        make_sequence((1, 2, i), (7, i), sequence_id=i, seed=i, stop_token_ids=(4,), **kind)
        for i, kind in enumerate(kinds)
    ]
    return make_logits(len(kinds), seed=1), sequences


def test_rows_do_not_depend_on_each_other():
    """Alone or in a shuffled batch, with other samplers or the same: the same tokens and log-probabilities."""
    logits, sequences = mixed_batch()
    sampler = Sampler(VOCAB_SIZE)
    together = sampler.sample(logits.copy(), sequences)
    order = np.random.default_rng(3).permutation(len(sequences))
    shuffled = sampler.sample(logits[order], [sequences[i] for i in order])
    np.testing.assert_array_equal(shuffled.token_ids, together.token_ids[order])
    assert shuffled.logprobs == [together.logprobs[i] for i in order]
    for i, sequence in enumerate(sequences):
        alone = Sampler(VOCAB_SIZE).sample(logits[i : i + 1].copy(), [sequence])
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs[0] == together.logprobs[i]


def test_sampling_changes_no_sequence():
    """A sampled step can be thrown away and sampled again."""
    logits, sequences = mixed_batch()
    before = [list(sequence.token_ids) for sequence in sequences]
    sampler = Sampler(VOCAB_SIZE)
    first = sampler.sample(logits.copy(), sequences)
    again = sampler.sample(logits.copy(), sequences)
    assert [list(sequence.token_ids) for sequence in sequences] == before
    np.testing.assert_array_equal(first.token_ids, again.token_ids)


@pytest.mark.parametrize("params", [{}, *MODES, *ADJUSTMENTS])
def test_logprobs_are_those_of_the_raw_logits_and_change_nothing(params):
    """They describe the model's distribution before any parameter, and asking for them chooses the same token."""
    logits = make_logits(1, seed=6)
    exact = logits[0].astype(np.float64) - np.log(np.exp(logits[0].astype(np.float64)).sum())
    silent = Sampler(VOCAB_SIZE).sample(logits.copy(), [make_sequence(stop_token_ids=(4,), **params)])
    for count in (0, 1, 20):
        sequence = make_sequence(stop_token_ids=(4,), logprobs=count, **params)
        result = Sampler(VOCAB_SIZE).sample(logits.copy(), [sequence])
        assert result.token_ids.tolist() == silent.token_ids.tolist()
        report = result.logprobs[0]
        assert report.token_id == result.token_ids[0]
        assert report.logprob == pytest.approx(exact[report.token_id], abs=1e-5)
        best = np.argsort(-logits[0], kind="stable")[:count]
        assert [token_id for token_id, _ in report.top] == best.tolist()
        np.testing.assert_allclose([value for _, value in report.top], exact[best], atol=1e-5)
    assert silent.logprobs == [None]


PROCESSED = [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 2.0, "top_k": 9, "min_p": 0.1},
             {}, {"top_k": 1}]  # fmt: skip


@pytest.mark.parametrize("limits", PROCESSED)
@pytest.mark.parametrize("changes", [{}, ADJUSTMENTS[-1]])
def test_processed_logprobs_are_of_what_the_token_was_drawn_from(limits, changes):
    """After bias, penalties and masks, at the temperature, of the tokens that are kept; the token is the same, and so
    are the reports of a neighbour. A greedy row is taken at temperature 1, with all tokens."""
    logits, turn = make_logits(2, seed=6), {"stop_token_ids": (4, 9), "prompt": (1, 7, 7, 250), "output": (7, 9, 12)}
    silent = Sampler(VOCAB_SIZE).sample(logits.copy(), [make_sequence(**turn, **limits, **changes)] * 2)
    sequence = make_sequence(**turn, **limits, **changes, logprobs=20, logprobs_mode="processed")
    neighbour = make_sequence(sequence_id=1, **turn, **limits, **changes, logprobs=20)
    result = Sampler(VOCAB_SIZE).sample(logits.copy(), [sequence, neighbour])
    plain = Sampler(VOCAB_SIZE).sample(logits[1:].copy(), [neighbour])
    assert result.token_ids.tolist() == silent.token_ids.tolist()
    assert result.logprobs[1] == plain.logprobs[0]
    report, row = result.logprobs[0], adjusted_naively(sequence, logits[0])
    draw = Draw(**limits) if limits.get("temperature") else Draw(1.0)
    kept = kept_tokens(row, draw)
    exact = np.full(VOCAB_SIZE, -np.inf)
    exact[kept] = np.log(weights_of(row, draw.temperature)[kept] / weights_of(row, draw.temperature)[kept].sum())
    best = np.argsort(-exact, kind="stable")[: min(20, len(kept))]
    assert report.token_id == result.token_ids[0]
    assert report.logprob == pytest.approx(exact[report.token_id], abs=1e-5)
    assert [token_id for token_id, _ in report.top] == best.tolist()
    np.testing.assert_allclose([value for _, value in report.top], exact[best], atol=1e-5)


def test_without_limits_processed_logprobs_are_the_raw_ones():
    """In every bit, at temperature 1 and at 0; and the model's logits are returned as they are."""
    for temperature in (0.0, 1.0):
        logits, turn = make_logits(1, seed=6), {"temperature": temperature, "logprobs": 5, "return_logits": True}
        raw, processed = (Sampler(VOCAB_SIZE).sample(logits.copy(), [make_sequence(**turn, logprobs_mode=mode)])
                          for mode in ("raw", "processed"))
        assert raw.logprobs == processed.logprobs
        np.testing.assert_array_equal(processed.logprobs[0].logits, logits[0])
    tempered = make_sequence(temperature=0.5, top_k=3, return_logits=True, logprobs_mode="processed")
    np.testing.assert_array_equal(Sampler(VOCAB_SIZE).sample(logits.copy(), [tempered]).logprobs[0].logits, logits[0])


def test_logprobs_of_small_and_masked_vocabularies_are_finite():
    """There are never more alternatives than tokens with a probability."""
    logits = np.array([[0.0, -np.inf, 0.0]], np.float32)
    report = Sampler(3).sample(logits, [make_sequence((0,), logprobs=20)]).logprobs[0]
    assert [token_id for token_id, _ in report.top] == [0, 2]
    assert report.logprob == pytest.approx(np.log(0.5))


def test_a_broken_row_is_reported_and_the_others_are_sampled():
    """NaN, infinity or nothing finite in one row costs that row only, with log-probabilities asked for or not."""
    logits = make_logits(5)
    logits[1, 3], logits[2, 299], logits[3] = np.nan, np.inf, -np.inf
    for params in ({}, {"logprobs": 2}, {"temperature": 1.0}, {"temperature": 1.0, "logprobs": 2, "min_tokens": 9}):
        result = Sampler(VOCAB_SIZE).sample(logits.copy(), [make_sequence(sequence_id=i, **params) for i in range(5)])
        assert (result.token_ids >= 0).tolist() == [True, False, False, False, True]
        assert result.token_ids[1:4].tolist() == [-1] * 3
        assert [report is None for report in result.logprobs[1:4]] == [True] * 3


def test_a_mask_that_leaves_nothing_makes_the_row_invalid():
    """With one token, which ends the completion, min_tokens leaves nothing to choose."""
    result = Sampler(1).sample(np.zeros((1, 1), np.float32), [make_sequence((0,), min_tokens=1, stop_token_ids=(0,))])
    assert (result.token_ids >= 0).tolist() == [False]


@pytest.mark.parametrize("form", ["array", "tensor", "inference tensor", "read-only array", "every other row"])
def test_logits_may_be_arrays_or_tensors(form):
    """Tensors, arrays, read-only ones and rows with gaps give the same tokens."""
    logits, sequences = mixed_batch()
    expected = Sampler(VOCAB_SIZE).sample(logits.copy(), sequences).token_ids
    given = {"array": logits.copy(), "tensor": torch.from_numpy(logits.copy()).requires_grad_()}.get(form)
    if form == "inference tensor":
        with torch.inference_mode():
            given = torch.from_numpy(logits.copy()) + 0
    elif form == "read-only array":
        given = logits.copy()
        given.flags.writeable = False
    elif form == "every other row":
        given = logits.repeat(2, axis=0)[::2]
    np.testing.assert_array_equal(Sampler(VOCAB_SIZE).sample(given, sequences).token_ids, expected)


@pytest.mark.parametrize("params", [{}, {"logprobs": 2}, {"temperature": 1.0}, {"logit_bias": {7: 50.0}}], ids=str)
@pytest.mark.parametrize("form", ["whole", "every other row"])
def test_bfloat16_logits_give_what_the_same_numbers_in_float32_give(form, params):
    """The other rows of the step are greedy; one has no valid logits."""
    logits = torch.from_numpy(make_logits(6)).bfloat16()
    logits[2, 5] = torch.nan
    sequences = [make_sequence(sequence_id=i, **(params if i == 1 else {})) for i in range(6)]
    expected = Sampler(VOCAB_SIZE).sample(logits.float(), sequences)
    given = logits if form == "whole" else logits.repeat_interleave(2, dim=0)[::2]
    result = Sampler(VOCAB_SIZE).sample(given.requires_grad_(), sequences)
    np.testing.assert_array_equal(result.token_ids, expected.token_ids)
    assert result.logprobs == expected.logprobs
    assert result.token_ids[2] == -1


def test_plainly_greedy_rows_are_read_in_bfloat16(monkeypatch):
    """No float32 copy is made of them."""
    logits = torch.from_numpy(make_logits(3)).bfloat16()
    monkeypatch.setattr(Sampler, "_as_array", None)
    result = Sampler(VOCAB_SIZE).sample(logits, [make_sequence(sequence_id=i) for i in range(3)])
    np.testing.assert_array_equal(result.token_ids, logits.float().argmax(dim=1))


def test_an_empty_step_samples_nothing():
    """A step that completes no prompt has no rows to sample."""
    result = Sampler(VOCAB_SIZE).sample(np.empty((0, VOCAB_SIZE), np.float32), [])
    assert result.token_ids.shape == (0,)
    assert result.logprobs == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_no_row_nothing_is_sampled(dtype):
    """A step of prompt chunks has logits of no row."""
    assert len(Sampler(64).sample(torch.zeros(0, 64, dtype=dtype), []).token_ids) == 0
