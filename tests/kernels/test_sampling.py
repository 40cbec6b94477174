"""The laws of choosing tokens: the kernels against sorting in float64, exact supports, distribution, independence."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedcore.errors import InternalError
from pagedcore_kernels.cpu.sampling.logit_search import pick
from pagedcore_kernels.cpu.sampling.samplers import (
    GreedyPicker,
    LogitWidener,
    LogprobReporter,
    TokenSampler,
    sampling_rows,
)
from support.sampling_reference import ROUNDING, Draw, choose, explains, kept_tokens, uniform, weights_of

VOCABULARIES = [1, 2, 63, 64, 65, 127, 1000, 4095, 4096, 4097, 5003, 50257]
MODES = [
    Draw(1.0), Draw(0.3), Draw(3.0), Draw(1.0, top_k=1), Draw(0.8, top_k=50), Draw(1.0, top_k=3000),
    Draw(1.0, top_p=0.5), Draw(1.0, top_p=0.95), Draw(2.0, top_p=0.999), Draw(1.0, top_p=1e-9), Draw(1.0, min_p=0.05),
    Draw(1.0, min_p=1.0), Draw(0.8, top_k=40, top_p=0.9), Draw(1.0, top_k=4500, top_p=0.97),
    Draw(1.0, top_p=0.9, min_p=0.02), Draw(1.5, top_k=100, top_p=0.99, min_p=0.01), Draw(10.0), Draw(1e-300),
]  # fmt: skip


def sample(logits, draws):
    """Tokens of ``draws``, one per row of ``logits``, which are left alone."""
    fields = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    rows = sampling_rows(*[[getattr(draw, field) for draw in draws] for field in fields])
    return TokenSampler(logits.shape[1])(np.array(logits, np.float32, order="C"), rows)


def sample_and_leave(logits, draws):
    """The same, and the rows as they are left with ``leaves_drawable``."""
    fields = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    rows = sampling_rows(*[[getattr(draw, field) for draw in draws] for field in fields])
    rows["leaves_drawable"] = True
    left = np.array(logits, np.float32, order="C")
    return TokenSampler(logits.shape[1])(left, rows), left


def repeat(draw, count, seed=0):
    """The same parameters at many positions."""
    values = draw.temperature, draw.top_k, draw.top_p, draw.min_p
    return [Draw(*values, seed=seed, position=position) for position in range(count)]


def normal_logits(num_rows, vocab_size, scale=3.0, seed=0):
    """Random logits."""
    return (np.random.default_rng(seed).standard_normal((num_rows, vocab_size)) * scale).astype(np.float32)


@pytest.mark.parametrize("vocab_size", [*VOCABULARIES, 151936])
def test_greedy_is_the_argmax(vocab_size):
    """The largest logit wins, wherever it stands."""
    logits = normal_logits(7, vocab_size)
    logits[0, 0] = logits[1, -1] = logits[2, vocab_size // 2] = 99
    np.testing.assert_array_equal(GreedyPicker(vocab_size)(logits), logits.argmax(axis=1))


def test_equal_logits_give_the_lowest_id():
    """Of equal largest logits the first one is chosen; zero and minus zero are equal."""
    logits = np.full((4, 200), -1.0, np.float32)
    logits[0, [190, 70, 130]] = 5
    logits[1, [199, 192]] = 5
    logits[2, [66, 65]] = [0.0, -0.0]
    np.testing.assert_array_equal(GreedyPicker(200)(logits), [70, 192, 65, 0])
    np.testing.assert_array_equal(sample(logits, [Draw(0.0)] * 4), [70, 192, 65, 0])
    np.testing.assert_array_equal(sample(logits, [Draw(1.0, top_k=1)] * 4), [70, 192, 65, 0])


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_every_mode_chooses_as_the_reference_does(vocab_size, scale):
    """The same random number gives the reference's token, or one that only rounding separates from it."""
    num_seeds = 4 if vocab_size > 5000 else 12
    logits = normal_logits(len(MODES) * num_seeds, vocab_size, scale, seed=vocab_size)
    draws = [Draw(m.temperature, m.top_k, m.top_p, m.min_p, seed, 7 + seed) for seed in range(num_seeds) for m in MODES]
    chosen = sample(logits, draws)
    expected = np.array([choose(row, draw) for row, draw in zip(logits, draws, strict=True)])
    assert np.mean(chosen == expected) > 0.98
    for i in np.flatnonzero(chosen != expected):
        assert explains(logits[i], draws[i], chosen[i]), (draws[i], chosen[i], expected[i])


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_a_row_is_left_as_what_was_drawn_from(vocab_size, scale):
    """It has the reference's distribution, and a probability wherever one may be drawn; the token is the same."""
    logits = normal_logits(len(MODES), vocab_size, scale, seed=vocab_size)
    draws = [Draw(m.temperature, m.top_k, m.top_p, m.min_p, 5, 7) for m in MODES]
    chosen, left = sample_and_leave(logits, draws)
    np.testing.assert_array_equal(chosen, sample(logits, draws))
    for row, after, draw, token in zip(logits, left, draws, chosen, strict=True):
        expected, weights = np.zeros(vocab_size), weights_of(row, draw.temperature)
        expected[kept_tokens(row, draw)] = weights[kept_tokens(row, draw)]
        found = np.exp(after.astype(np.float64) - after.max())
        assert after[token] > -np.inf
        # Why: one at the border of a nucleus may be on either side.
        others = np.flatnonzero((after > -np.inf) != np.isin(np.arange(vocab_size), kept_tokens(row, draw)))
        assert weights[others].sum() <= (ROUNDING * weights.sum() if draw.top_p < 1 else 0.0), draw
        np.testing.assert_allclose(found / found.sum(), expected / expected.sum(), rtol=2e-3, atol=2 * ROUNDING)


def test_at_temperature_1_a_row_without_limits_is_left_alone():
    """And so is one that is greedy; of equal logits at a cut the later ones are not left."""
    logits = normal_logits(2, 300)
    _, left = sample_and_leave(logits, [Draw(1.0), Draw(0.0, top_k=3)])
    np.testing.assert_array_equal(left, logits)
    logits[:, [7, 80, 150, 280]] = 20.0
    _, left = sample_and_leave(logits, [Draw(1.0, top_k=2), Draw(0.5, top_p=0.6)])
    assert [np.flatnonzero(row > -np.inf).tolist() for row in left] == [[7, 80], [7, 80, 150]]


@pytest.mark.parametrize("mode", MODES)
def test_a_large_vocabulary_is_sampled_as_the_reference_does(mode):
    """So it is with 151,936 tokens, flat and peaked."""
    for scale in (1.0, 4.0):
        logits = normal_logits(2, 151936, scale, seed=3)
        draws = repeat(mode, 2, seed=11)
        for row, draw, token in zip(logits, draws, sample(logits, draws), strict=True):
            assert token == choose(row, draw) or explains(row, draw, token)


tied_logits = st.lists(
    st.one_of(
        st.integers(-6, 6).map(lambda half: half / 2),
        st.sampled_from([-np.inf, -0.0, 3e38, -3e38, -1e9]),
        # Why: logits that differ by less than their probabilities can are a tie or not, as arithmetic has it.
        st.floats(-50, 50, width=32).map(lambda value: round(value * 64) / 64),
    ),
    min_size=1,
    max_size=300,
).filter(lambda logits: any(np.isfinite(logits)))


@settings(max_examples=500, suppress_health_check=list(HealthCheck))
@given(
    values=tied_logits,
    temperature=st.sampled_from([1e-320, 0.01, 0.5, 1.0, 2.0, 10.0]),
    top_k=st.integers(0, 310),
    top_p=st.sampled_from([5e-324, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 5e-324, 0.1, 0.9, 1.0]),
    seed=st.integers(0, 2**63 - 1),
)
def test_ties_masks_and_extremes_are_handled_as_in_the_reference(values, temperature, top_k, top_p, min_p, seed):
    """Equal logits are kept in order of their ids, masked ones never, and no finite logit is too large."""
    logits = np.array([values], np.float32)
    draws = repeat(Draw(temperature, min(top_k, len(values)), top_p, min_p), 8, seed)
    for draw, token in zip(draws, sample(logits.repeat(8, axis=0), draws), strict=True):
        assert np.isfinite(logits[0, token])
        with np.errstate(over="ignore"):
            assert token == choose(logits[0], draw) or explains(logits[0], draw, token)


@pytest.mark.parametrize(
    "mode",
    [
        Draw(1.0, top_k=1), Draw(1.0, top_k=7), Draw(1.0, top_p=0.5), Draw(1.0, top_p=0.9), Draw(1.0, min_p=0.3),
        Draw(2.0, top_k=20, top_p=0.8), Draw(2.0, top_k=20, top_p=0.8, min_p=0.5), Draw(5.0, top_p=0.3),
    ],
)  # fmt: skip
@pytest.mark.parametrize("vocab_size", [30, 200])
def test_exactly_the_kept_tokens_are_ever_drawn(mode, vocab_size):
    """Over many draws the tokens seen are the support of the reference, no more and no fewer."""
    rng = np.random.default_rng(5)
    logits = rng.permutation(np.linspace(0, 4, vocab_size)).astype(np.float32)
    drawn = set(sample(logits[None].repeat(6000, axis=0), repeat(mode, 6000)).tolist())
    assert drawn == set(kept_tokens(logits, mode).tolist())


@pytest.mark.parametrize("vocab_size", [64, 300, 9000])
def test_equal_logits_beyond_the_limit_are_left_out_from_the_end(vocab_size):
    """With all logits equal, top-k and top-p keep the lowest ids."""
    logits = np.full((4000, vocab_size), 1.5, np.float32)
    by_k = sample(logits, repeat(Draw(1.0, top_k=10), 4000))
    assert set(by_k.tolist()) == set(range(10))
    by_p = sample(logits, repeat(Draw(1.0, top_p=0.5), 4000))
    assert by_p.max() < vocab_size / 2
    assert by_p.max() >= vocab_size / 2 * 0.99 - 1
    both = sample(logits, repeat(Draw(1.0, top_k=vocab_size - 1, top_p=0.1), 4000))
    assert both.max() < vocab_size * 0.1


@pytest.mark.parametrize(
    "mode", [Draw(1.0), Draw(0.7, top_k=12), Draw(1.3, top_p=0.8), Draw(1.0, min_p=0.2), Draw(0.9, top_k=20, top_p=0.9)]
)
def test_draws_follow_the_distribution(mode):
    """20,000 draws deviate from the exact probabilities by no more than a chi-square test allows."""
    count, logits = 20_000, normal_logits(1, 40, scale=1.5, seed=8)[0]
    observed = np.bincount(sample(logits[None].repeat(count, axis=0), repeat(mode, count, seed=5)), minlength=40)
    kept = kept_tokens(logits, mode)
    expected = weights_of(logits, mode.temperature)[kept]
    expected *= count / expected.sum()
    assert observed.sum() == observed[kept].sum() == count
    statistic, freedom = ((observed[kept] - expected) ** 2 / expected).sum(), len(kept) - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def test_seeds_are_as_independent_as_positions():
    """Draws at one position under many seeds follow the distribution too."""
    count, logits = 20_000, np.zeros((1, 16), np.float32)
    draws = [Draw(1.0, seed=seed * 2**40, position=3) for seed in range(count)]
    observed = np.bincount(sample(logits.repeat(count, axis=0), draws), minlength=16)
    assert ((observed - count / 16) ** 2 / (count / 16)).sum() < 15 + 4 * np.sqrt(30)


def test_the_random_number_is_the_documented_one():
    """Known values of the number itself, and the kernel draws with it: seeds mean the same for ever."""
    assert [uniform(0, 0), uniform(1, 0), uniform(0, 1), uniform(2**63 - 1, 10**6)] == KNOWN_NUMBERS
    vocab_size = 4096
    flat = np.zeros((4, vocab_size), np.float32)
    places = [(0, 0), (1, 0), (0, 1), (2**63 - 1, 10**6)]
    drawn = sample(flat, [Draw(1.0, seed=seed, position=position) for seed, position in places])
    np.testing.assert_array_equal(drawn, [int(number * vocab_size) for number in KNOWN_NUMBERS])


KNOWN_NUMBERS = [0.3437718133056411, 0.9604102559276009, 0.0793587565353654, 0.1637546464014401]


def mixed_batch(vocab_size=5003):
    """Rows of all modes, with invalid ones among them."""
    modes = [*MODES, Draw(0.0)] * 3
    logits = normal_logits(len(modes), vocab_size, seed=2)
    logits[4, 17], logits[9, 5000], logits[13] = np.nan, np.inf, -np.inf
    draws = [Draw(m.temperature, m.top_k, m.top_p, m.min_p, seed=i, position=3 * i) for i, m in enumerate(modes)]
    return logits, draws


def test_rows_do_not_depend_on_their_neighbours():
    """Alone, shuffled, or beside broken rows, a row gives the same token."""
    logits, draws = mixed_batch()
    together = sample(logits, draws)
    alone = [int(sample(logits[i : i + 1], draws[i : i + 1])[0]) for i in range(len(draws))]
    assert together.tolist() == alone
    order = np.random.default_rng(1).permutation(len(draws))
    np.testing.assert_array_equal(sample(logits[order], [draws[i] for i in order]), together[order])


def test_rows_do_not_depend_on_the_number_of_threads():
    """One thread, two or three: the same tokens and the same log-probabilities, bit for bit."""
    logits, draws = mixed_batch()
    assert logits.size > 3 * 2**16
    results = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        normalisers, ids, values = LogprobReporter(5003)(logits, np.arange(len(logits)), 5)
        results.append((sample(logits, draws), GreedyPicker(5003)(logits), normalisers, ids, values))
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            assert mine.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("vocab_size", [1, 64, 70, 5003])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
def test_rows_with_nan_or_plus_infinity_are_not_sampled(vocab_size, value):
    """Wherever the value stands, only its own row is refused."""
    for place in {0, vocab_size - 1, vocab_size // 2}:
        logits = normal_logits(3, vocab_size)
        logits[1, place] = value
        for tokens in (GreedyPicker(vocab_size)(logits), *[sample(logits, [mode] * 3) for mode in MODES[:9:4]]):
            assert tokens[1] == -1
            assert (tokens[[0, 2]] >= 0).all()


@pytest.mark.parametrize("vocab_size", [*VOCABULARIES, 151936])
def test_greedy_reads_bfloat16_as_the_float32_it_is(vocab_size):
    """Tokens are those of the widened logits: with ties, the largest at either end, and rows that are not valid."""
    logits = torch.from_numpy(normal_logits(9, vocab_size)).bfloat16()
    logits[0, 0] = logits[1, -1] = logits[2, vocab_size // 2] = 99.0
    logits[3, torch.randint(vocab_size, (9,), generator=torch.Generator().manual_seed(0))] = 100.0
    for row, (place, value) in enumerate([(0, torch.nan), (-1, torch.inf), (vocab_size // 2, -torch.nan)], start=4):
        logits[row, place] = value
    logits[7] = -torch.inf
    logits[8] = torch.tensor([-0.0, 0.0]).repeat(vocab_size)[:vocab_size]
    given = GreedyPicker(vocab_size)(logits.view(torch.int16).numpy())
    np.testing.assert_array_equal(given, GreedyPicker(vocab_size)(logits.float().numpy()))
    expected = logits.float().numpy().argmax(axis=1)
    np.testing.assert_array_equal(given, [*expected[:4], -1, -1, -1, -1, 0])


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_bfloat16_is_widened_bit_for_bit(vocab_size):
    """Each bit pattern keeps its sign, infinities and what its NaN says; fewer rows than before take the first ones."""
    bits = np.random.default_rng(0).integers(-(2**15), 2**15, (9, vocab_size), np.int16)
    widen = LogitWidener(vocab_size)
    for rows in (bits, bits[5:], bits[:0]):
        np.testing.assert_array_equal(widen(rows).view(np.int32), rows.astype(np.int32) << 16)


def test_masked_tokens_are_never_drawn():
    """Minus infinity is a probability of 0; a row of nothing else is refused."""
    logits = np.full((500, 130), -np.inf, np.float32)
    logits[:-1, [3, 77, 129]] = [0.5, 1.0, 0.0]
    for mode in (Draw(0.0), *MODES):
        tokens = sample(logits, repeat(mode, 500))
        assert set(tokens[:-1].tolist()) <= {3, 77, 129}
        assert tokens[-1] == -1


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("count", [0, 1, 20])
def test_reported_logprobs_are_those_of_a_sort(vocab_size, count):
    """The normaliser is the log-sum-exp, the best are those of a stable sort, of the chosen rows only."""
    logits = np.round(normal_logits(5, vocab_size) * 4) / 4
    raw = logits.copy()
    numbers = np.array([3, 0], np.int64)
    normalisers, ids, values = LogprobReporter(vocab_size)(logits, numbers, count)
    exact = np.log(np.exp(logits[numbers].astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(normalisers, exact, rtol=0, atol=3e-6)
    best = np.argsort(-logits[numbers], axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(ids, best)
    np.testing.assert_array_equal(values, np.take_along_axis(logits[numbers], best, axis=1))
    np.testing.assert_array_equal(logits, raw)


def test_ten_thousand_equal_logits_are_reported_in_order_of_their_ids():
    """Ties beyond all candidates are cut exactly."""
    logits = np.zeros((1, 10_000), np.float32)
    logits[0, 9_999] = 1
    _, ids, _ = LogprobReporter(10_000)(logits, np.zeros(1, np.int64), 4)
    assert ids[0].tolist() == [9_999, 0, 1, 2]


def test_no_row_is_reported_into_the_place_of_the_next():
    """However many logits are equal, no more than asked for are written."""
    logits = np.zeros((2, 300), np.float32)
    logits[1, 7] = np.nan
    _, ids, values = LogprobReporter(300)(logits, np.arange(2), 3)
    assert ids.tolist() == [[0, 1, 2], [-1, -1, -1]]
    assert values[1].tolist() == [-np.inf] * 3


def test_the_largest_and_smallest_floats_are_ranked():
    """Differences beyond float32 do not disturb the ranking."""
    logits = np.array([[-3e38, 3.4e38, 0.0, -3.4e38, 3e38]], np.float32)
    for count in range(1, 6):
        _, ids, _ = LogprobReporter(5)(logits, np.zeros(1, np.int64), count)
        assert ids[0].tolist() == [1, 4, 2, 0, 3][:count]


def test_rounding_never_leads_past_the_last_weight():
    """If sums taken in another order leave a rest, the last token that has a weight is drawn."""
    weights = np.array([0.5, 0.25, 0.0, 0.0])
    assert pick(weights.ctypes.data, 4, 0.6) == (1, pytest.approx(0.1))
    assert pick(weights.ctypes.data, 4, 0.75) == (1, np.inf)


def test_reports_of_invalid_and_short_rows_say_so():
    """A broken row has the normaliser NaN; what is not finite is not among the best."""
    logits = np.full((3, 90), -np.inf, np.float32)
    logits[1, 5], logits[2, 80], logits[2, 8] = np.nan, 2.0, 3.0
    normalisers, ids, values = LogprobReporter(90)(logits, np.arange(3), 4)
    assert np.isnan(normalisers[:2]).all()
    assert ids[2].tolist() == [8, 80, -1, -1]
    assert values[2, :2].tolist() == [3.0, 2.0]


def test_no_rows_are_no_tokens():
    """An empty batch is sampled to an empty answer."""
    empty = np.empty((0, 10), np.float32)
    assert GreedyPicker(10)(empty).shape == sample(empty, []).shape == (0,)


@pytest.mark.parametrize(
    "logits",
    [
        np.zeros((2, 9), np.float32), np.zeros((2, 10)), np.zeros(10, np.float32), np.zeros((4, 10), np.float32)[::2],
        np.zeros((10, 2), np.float32).T, np.zeros((2, 9), np.int16), np.zeros((10, 2), np.int16).T,
    ],
)  # fmt: skip
def test_memory_of_another_shape_is_refused(logits):
    """A kernel that reads raw memory gets rows of exactly its vocabulary."""
    with pytest.raises(InternalError):
        GreedyPicker(10)(logits)


def test_parameters_and_row_numbers_have_to_match_the_rows():
    """So it is with everything else a kernel reads by address."""
    logits = np.zeros((2, 10), np.float32)
    with pytest.raises(InternalError):
        TokenSampler(10)(logits, sampling_rows([1], [0], [1], [0], [0], [0]))
    with pytest.raises(InternalError):
        TokenSampler(10)(logits, np.zeros(2))
    for numbers in ([2], [-1]):
        with pytest.raises(InternalError):
            LogprobReporter(10)(logits, np.array(numbers), 1)
