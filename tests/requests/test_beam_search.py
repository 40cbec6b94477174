"""Beam search without an engine: what survives a round, what is kept, and when the search ends."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from pagedcore.requests.beam_search import BeamRules, BeamSearch, Survivor
from pagedcore.sampling_params import SamplingParams
from pagedcore.sequence import Sequence

STOP = 0
Answer = tuple[int, ...]
Distributions = dict[Answer, dict[int, float]]
"""What may follow each answer so far, with its log-probability."""


def search(**rules: object) -> BeamSearch:
    defaults: dict[str, object] = {"width": 2, "max_tokens": 4, "stop_token_ids": frozenset({STOP})}
    return BeamSearch(BeamRules(**{**defaults, **rules}))  # type: ignore[arg-type]


def run(found: BeamSearch, distributions: Distributions) -> list[tuple[Answer, float]]:
    """Drive a search with the log-probabilities of what follows each answer so far."""
    beams: list[Answer] = [()]
    while not found.is_done:
        survivors = found.advance([sorted(distributions[beam].items(), key=lambda one: -one[1]) for beam in beams])
        beams = [(*beams[one.parent], one.token_id) for one in survivors]
    return [(one.token_ids, one.score) for one in found.hypotheses]


def random_distributions(rng: random.Random, vocab_size: int, max_tokens: int) -> Distributions:
    """A distribution for every answer that could be."""
    distributions = {}
    for length in range(max_tokens):
        for answer in itertools.product(range(vocab_size), repeat=length):
            weights = [rng.random() ** 3 + 1e-3 for _ in range(vocab_size)]
            distributions[answer] = {i: math.log(weight / sum(weights)) for i, weight in enumerate(weights)}
    return distributions


def test_the_first_round_makes_as_many_beams_as_are_asked_for() -> None:
    """The likeliest tokens that do not end an answer become the beams, likeliest first."""
    found = search(width=3)
    assert len(found._beams) == 1
    assert found.advance([[(5, -1.0), (STOP, -1.5), (7, -2.0), (6, -3.0)]]) == [
        Survivor(0, 5), Survivor(0, 7), Survivor(0, 6),
    ]
    assert len(found._beams) == 3
    assert [one.token_ids for one in found.hypotheses] == [(STOP,)]


def test_a_beam_may_have_several_children_and_another_none() -> None:
    """Candidates of all beams are ranked together."""
    found = search()
    found.advance([[(1, -0.1), (2, -3.0), (3, -4.0)]])
    assert found.advance([[(4, -0.5), (5, -0.6), (6, -9.0)], [(7, -0.1), (8, -5.0), (9, -6.0)]]) == [
        Survivor(0, 4), Survivor(0, 5),
    ]


def test_equal_candidates_go_by_beam_and_token() -> None:
    """Of equal candidates the earlier beam's comes first, then the lower token."""
    found = search()
    assert found.advance([[(3, -1.0), (2, -1.0), (1, -1.0)]]) == [Survivor(0, 1), Survivor(0, 2)]


def test_an_end_beyond_the_best_is_no_hypothesis() -> None:
    """A candidate that ends is kept only if it is among the ``width`` best of its round."""
    found = search()
    found.advance([[(1, -1.0), (2, -1.1), (STOP, -1.2)]])
    assert found.hypotheses == []


def test_before_min_tokens_nothing_stops() -> None:
    """A stop token is no candidate until the answer has ``min_tokens`` tokens."""
    found = search(min_tokens=1)
    assert found.advance([[(STOP, -0.1), (1, -3.0), (2, -4.0)]]) == [Survivor(0, 1), Survivor(0, 2)]
    found.advance([[(STOP, -0.1), (1, -3.0), (2, -4.0)], [(5, -9.0), (6, -9.0), (7, -9.0)]])
    assert [one.token_ids for one in found.hypotheses] == [(1, STOP)]


def test_before_min_tokens_what_is_barred_is_no_candidate() -> None:
    """Beside stop tokens, tokens that end nothing may be barred; after ``min_tokens`` they are as any other."""
    found = search(min_tokens=1, barred_token_ids=frozenset({9}))
    assert found.advance([[(9, -0.1), (STOP, -0.2), (1, -3.0), (2, -4.0)]]) == [Survivor(0, 1), Survivor(0, 2)]
    assert found.advance([[(9, -0.1), (1, -3.0), (2, -4.0)], [(5, -9.0), (6, -9.0), (7, -9.0)]]) == [
        Survivor(0, 9), Survivor(0, 1),
    ]
    assert found.hypotheses == []


def test_the_last_token_allowed_ends_every_answer() -> None:
    """At ``max_tokens`` the best candidates are hypotheses and the search is done."""
    found = search(max_tokens=1)
    assert found.advance([[(1, -1.0), (2, -2.0), (3, -3.0)]]) == []
    assert found.is_done
    assert [(one.token_ids, one.score) for one in found.hypotheses] == [((1,), -1.0), ((2,), -2.0)]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "is_done"),
    [(True, 1.0, True), (False, 1.0, False), ("never", 1.0, False), (False, 0.0, True), ("never", 0.0, True),
     (False, 0.5, True), ("never", 0.5, False)],
)
def test_when_a_search_with_enough_hypotheses_ends(
    early_stopping: bool, length_penalty: float, is_done: bool
) -> None:
    """True: at once. False: when no beam is better at its length. "never": when none can be at any length."""
    found = search(early_stopping=early_stopping, length_penalty=length_penalty, max_tokens=100)
    found.advance([[(1, -0.5), (STOP, -2.0), (2, -3.0)]])
    found.advance([[(STOP, -1.5), (3, -2.6), (4, -2.7)], [(5, -9.0), (6, -9.0), (7, -9.0)]])
    assert len(found.hypotheses) == 2
    assert found.is_done is is_done


def test_a_wide_search_finds_the_best_answer_there_is() -> None:
    """With a beam for every possible answer the search is exhaustive, whatever the length penalty."""
    rng = random.Random(3)
    for length_penalty in (0.0, 1.0, -0.5, 2.0):
        distributions = random_distributions(rng, vocab_size=3, max_tokens=3)
        rules = {"width": 16, "max_tokens": 3, "length_penalty": length_penalty, "early_stopping": "never"}
        scores = {}
        for length in (1, 2, 3):
            for answer in itertools.product(range(3), repeat=length):
                if STOP not in answer[:-1] and (answer[-1] == STOP or length == 3):
                    total = sum(distributions[answer[:i]][answer[i]] for i in range(length))
                    scores[answer] = total / length**length_penalty
        expected = sorted(scores.items(), key=lambda one: -one[1])[:16]
        assert [one[0] for one in run(search(**rules), distributions)] == [one[0] for one in expected]


def test_few_candidates_are_enough() -> None:
    """Offering only as many tokens of each beam as a step reports changes nothing."""
    rng = random.Random(7)
    for _ in range(20):
        distributions = random_distributions(rng, vocab_size=8, max_tokens=3)
        rules = BeamRules(2, 3, 0, frozenset({STOP, 1}))
        beam = Sequence(0, [1], SamplingParams(beam_width=2), max_tokens=3, seed=0, stop_token_ids=rules.stop_token_ids)
        few = {
            answer: dict(sorted(options.items(), key=lambda one: -one[1])[: beam.num_logprobs])
            for answer, options in distributions.items()
        }
        assert run(BeamSearch(rules), few) == run(BeamSearch(rules), distributions)


def test_where_everything_stops_the_search_ends() -> None:
    """Without a candidate that continues there is no further round, however few hypotheses there are."""
    found = search(width=3, stop_token_ids=frozenset({0, 1}))
    assert found.advance([[(0, -0.5), (1, -1.0)]]) == []
    assert found.is_done
    assert len(found.hypotheses) == 2


def test_a_hypothesis_beyond_the_width_keeps_no_search_alive() -> None:
    """The end is measured by the worst of those that are kept, not by one that has been pushed out."""
    search = BeamSearch(BeamRules(2, 10, stop_token_ids=frozenset({0})))
    search.advance([[(1, -0.2), (0, -2.0), (2, -2.5)]])
    search.advance([[(0, -0.1), (3, -1.0)], [(0, -0.1), (3, -3.0)]])
    assert [one.score for one in search.hypotheses] == pytest.approx([-0.15, -2.0])
    assert not search.is_done
    search.advance([[(0, -0.1), (4, -1.2)], [(0, -0.1), (4, -3.0)]])
    assert [one.score for one in search.hypotheses] == pytest.approx([-0.15, -1.3 / 3])
    assert search.is_done
