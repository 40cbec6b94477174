"""Beam search over one prompt: candidates in, survivors out, and the best completions that have ended.

Knows tokens and log-probabilities, neither sequences nor blocks nor models; ``candidate_groups`` has beams computed.
The rules are those of ``generate(num_beams=...)`` of transformers 5, for one prompt:

    a round    every beam offers its likeliest next tokens; all candidates together are ranked by the sum of their
               log-probabilities. Of the ``width`` best, those that end become hypotheses; the ``width`` best that
               do not end are the next beams.
    a score    sum of log-probabilities / number of tokens ** length_penalty. The ``width`` best are kept.
    the end    no candidate is left; or ``width`` hypotheses are kept and either ``early_stopping`` is true or the
               best beam, at its present length ("never": at the length that suits it best), would not beat the worst
               of them.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from heapq import nsmallest
from typing import Literal

from pagedcore.outputs import FinishReason, TokenLogprobs

Continuations = ListOf[tuple[int, float]]
"""(token id, log-probability) pairs of what may follow one beam."""


@dataclass(frozen=True, slots=True)
class BeamRules:
    """What a search is asked for; the fields are those of ``SamplingParams``, resolved for one prompt."""

    width: int
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_logprobs: int | None = None
    """Keep each token's log-probability and this many of those it was chosen among; ``None``: keep none."""
    barred_token_ids: frozenset[int] = frozenset()
    """No candidates before ``min_tokens``, besides the stop tokens: with ``ignore_eos`` the model's end tokens."""
    suppressed_token_ids: frozenset[int] = frozenset()
    """Never candidates."""

    def score(self, log_probability: float, num_tokens: int) -> float:
        """Return what a completion of ``num_tokens`` tokens is ranked by."""
        return float(log_probability / num_tokens**self.length_penalty)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A completion that has ended and may be chosen."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    score: float
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Survivor:
    """A beam of the next round: which beam of this round it continues, and with what."""

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class _Beam:
    token_ids: tuple[int, ...]
    log_probability: float
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class _Candidate:
    log_probability: float
    parent: int
    token_id: int
    offered: float
    """Its own part of ``log_probability``."""


class BeamSearch:
    """The state of one search between rounds.

    Invariant: all beams have the same number of tokens, and no two have the same tokens; there is one in the first
        round, later as many different ones as there are, up to ``width``.
    Invariant: at most ``width`` hypotheses are kept, best first, the earliest of equal ones first.
    """

    def __init__(self, rules: BeamRules) -> None:
        self._rules = rules
        self._beams = [_Beam((), 0.0)]
        self.hypotheses: list[Hypothesis] = []
        self.is_done = False

    def advance(self, continuations: ListOf[Continuations]) -> list[Survivor]:
        """Finish a round; return the beams of the next one, in order, or none when the search is done.

        ``continuations`` has for each beam of the round, in order, the likeliest tokens, best first: at least ``width``
        that neither stop nor are barred (``Sequence.num_logprobs``), or all possible ones if they are fewer.
        """
        width = self._rules.width
        ranked = self._rank(continuations)
        self.hypotheses += [self._end(one, continuations) for one in ranked[:width] if self._ends(one)]
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[width:]
        unended = [one for one in ranked if not self._ends(one)][:width]
        self._beams = [self._extend(one, continuations) for one in unended]
        self.is_done = not unended or self._cannot_improve()
        return [] if self.is_done else [Survivor(one.parent, one.token_id) for one in unended]

    def _rank(self, continuations: ListOf[Continuations]) -> list[_Candidate]:
        rules, num_tokens = self._rules, len(self._beams[0].token_ids)
        barred = rules.suppressed_token_ids
        if num_tokens < rules.min_tokens:
            barred |= rules.stop_token_ids | rules.barred_token_ids
        everyone = (
            _Candidate(beam.log_probability + log_probability, parent, token_id, log_probability)
            for parent, (beam, offered) in enumerate(zip(self._beams, continuations, strict=True))
            for token_id, log_probability in offered if token_id not in barred
        )
        # Why: this many include ``width`` that do not end, even if every stop token of every beam ranks before them.
        num_needed = rules.width * (1 + len(rules.stop_token_ids))
        return nsmallest(num_needed, everyone, key=lambda one: (-one.log_probability, one.parent, one.token_id))

    def _ends(self, candidate: _Candidate) -> bool:
        num_tokens = len(self._beams[candidate.parent].token_ids) + 1
        return candidate.token_id in self._rules.stop_token_ids or num_tokens == self._rules.max_tokens

    def _end(self, candidate: _Candidate, continuations: ListOf[Continuations]) -> Hypothesis:
        beam = self._extend(candidate, continuations)
        reason: FinishReason = "stop" if candidate.token_id in self._rules.stop_token_ids else "length"
        score = self._rules.score(beam.log_probability, len(beam.token_ids))
        return Hypothesis(beam.token_ids, reason, score, beam.logprobs)

    def _extend(self, candidate: _Candidate, continuations: ListOf[Continuations]) -> _Beam:
        parent, num_top = self._beams[candidate.parent], self._rules.num_logprobs
        token_ids, logprobs = (*parent.token_ids, candidate.token_id), parent.logprobs
        if num_top is not None:
            top = tuple(continuations[candidate.parent][:num_top])
            logprobs = (*logprobs, TokenLogprobs(candidate.token_id, candidate.offered, top))
        return _Beam(token_ids, candidate.log_probability, logprobs)

    def _cannot_improve(self) -> bool:
        rules, best = self._rules, self._beams[0]
        if len(self.hypotheses) < rules.width:
            return False
        is_patient = rules.early_stopping == "never" and rules.length_penalty > 0
        num_tokens = rules.max_tokens if is_patient else len(best.token_ids)
        attainable = rules.score(best.log_probability, num_tokens)
        return rules.early_stopping is True or attainable <= self.hypotheses[-1].score
