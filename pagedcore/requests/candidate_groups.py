"""Requests whose answers are chosen at the end, among more sequences than they return: ``best_of`` and beam search.

The scheduler runs the contenders as it runs anybody; the request's own sequences stay out of it until they are given
the chosen answers. Contenders share what they have in common through the prefix cache.

Beams are chosen together, so a beam that is computed has to wait for the others of its round, wherever memory or the
batch have left them. It waits *outside* the scheduler: it leaves with what it computed in the cache, so it holds
nothing that others could need, and whatever is inside can run. When the last beam of a round is computed, those in
that step go on in place, each with its first survivor; every other survivor is a new sequence. Where all beams fit
the batch, as usual, a round is one step and nobody leaves it but those who are dropped. Read ``beam_search`` next.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pagedcore.outputs import FinishReason, TokenLogprobs
from pagedcore.requests.beam_search import BeamRules, BeamSearch, Candidates, Hypothesis
from pagedcore.requests.output_text import CompletionTexts
from pagedcore.requests.request import Request
from pagedcore.requests.request_table import RequestTable
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chosen:
    """One answer that was chosen."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    score: float
    logprobs: tuple[TokenLogprobs, ...] = ()


class BestOf:
    """Answers that are computed as if they were all returned, and ranked when all have ended."""

    def __init__(self, request: Request, contenders: list[Sequence]) -> None:
        self.request = request
        self.contenders = contenders
        self._num_known = len(contenders[0].token_ids)
        self.branches: list[tuple[Sequence, Sequence]] = []
        """Always empty: every contender is there from the beginning."""

    @property
    def is_decided(self) -> bool:
        """Whether every contender has ended."""
        return all(one.finish_reason is not None for one in self.contenders)

    def results(self) -> list[Chosen]:
        """Return the ``n`` best, best first, the first of equal ones first."""
        ranked = sorted(map(self._describe, self.contenders), key=lambda chosen: -chosen.score)
        return ranked[: self.request.params.n]

    def _describe(self, contender: Sequence) -> Chosen:
        reason, logprobs = contender.finish_reason or "stop", tuple(contender.logprobs)
        mean = sum(one.logprob for one in logprobs) / len(logprobs)
        return Chosen(tuple(contender.token_ids[self._num_known :]), reason, mean, logprobs)


@dataclass(slots=True)
class Beams:
    """A beam search and the sequences of its present round.

    Invariant: ``contenders`` are the search's beams, in its order.
    Invariant: a beam with an offer is computed; one without is waiting or running.
    """

    request: Request
    search: BeamSearch
    contenders: list[Sequence]
    offers: dict[int, Candidates] = field(default_factory=dict)
    """What may follow each beam that was computed, by sequence id."""
    branches: list[tuple[Sequence, Sequence]] = field(default_factory=list)
    """(beam, parent) of those that have to be added to the scheduler."""

    @property
    def is_decided(self) -> bool:
        """Whether the search is done."""
        return self.search.is_done

    @property
    def is_complete(self) -> bool:
        """Whether every beam of the round is computed."""
        return len(self.offers) == len(self.contenders)

    def results(self) -> list[Chosen]:
        """Return the ``n`` best hypotheses, best first."""
        stops = self.request.sequences[0].stop_token_ids
        return [_choose(one, stops) for one in self.search.hypotheses[: self.request.params.n]]


Contest = BestOf | Beams


class Contests:
    """All contests of one engine that are not decided.

    Invariant: contenders are in the request book until they are dismissed, and no sequence is a contender later.
    """

    def __init__(self, scheduler: Scheduler, requests: RequestTable, answers: CompletionTexts) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._answers = answers
        self._contests: dict[str, Contest] = {}

    def open(self, request: Request) -> list[Sequence]:
        """Begin the contest for a request's answers; return the sequences to start, none of them among its answers."""
        first, params = request.sequences[0], request.params
        contenders = [self._requests.branch(first, index) for index in range(params.num_initial_sequences)]
        # Why: what the first contender learns of the prompt is the request's at once; the others have it computed.
        contenders[0].prompt_logprobs = first.prompt_logprobs
        if params.beam_width == 1:
            self._contests[request.request_id] = BestOf(request, contenders)
            return contenders
        rules = BeamRules(
            params.beam_width, first.max_tokens, params.min_tokens, first.stop_token_ids, params.length_penalty,
            params.early_stopping, params.logprobs,
        )
        self._contests[request.request_id] = Beams(request, BeamSearch(rules), contenders)
        return contenders

    def find(self, request: Request) -> Contest | None:
        """Return the contest for a request's answers, if they are chosen at the end and have not been chosen."""
        return self._contests.get(request.request_id)

    def close(self, request: Request, reason: FinishReason) -> None:
        """End the contest for a request's answers, if there is one, and all who contend in it."""
        contest = self._contests.pop(request.request_id, None)
        for sequence in contest.contenders if contest is not None else ():
            self._scheduler.finish_sequence(sequence, reason)
            self._dismiss(request, sequence)

    def steer(self, contests: Iterable[Contest], next_tokens: dict[int, int | None]) -> None:
        """Let every search whose round is complete choose its next beams, before the step is committed.

        Args:
            contests: those that had contenders in the step.
            next_tokens: of the step, by sequence id, ``None`` for every beam; beams that go on in place get theirs.
        """
        for one in contests:
            if isinstance(one, Beams) and one.is_complete and self.find(one.request) is one:
                self._choose_beams(one, next_tokens)

    def add_branches(self, contests: Iterable[Contest]) -> None:
        """Let the beams wait that ``steer`` made, once the step is committed."""
        for one in contests:
            branches, one.branches = one.branches, []
            for sequence, parent in branches:
                # Why: a prompt is looked up once; beams that find their parents' blocks are no news.
                sequence.num_cached_tokens = parent.num_cached_tokens
                self._scheduler.add_branch(sequence, parent)

    def _choose_beams(self, beams: Beams, next_tokens: dict[int, int | None]) -> None:
        parents, chosen = beams.contenders, list[Sequence]()
        survivors = beams.search.advance([beams.offers[parent.sequence_id] for parent in parents])
        for survivor in survivors:
            parent = parents[survivor.parent]
            # Why: whoever is not in this step has left the scheduler, and who has a token goes on already.
            if next_tokens.get(parent.sequence_id, 0) is None:
                next_tokens[parent.sequence_id] = survivor.token_id
                chosen.append(parent)
            else:
                chosen.append(self._branch(beams, parent, survivor.token_id))
        if survivors:
            self._drop([one for one in parents if one not in chosen], beams, next_tokens)
            beams.contenders, beams.offers = chosen, {}

    def _branch(self, beams: Beams, parent: Sequence, token_id: int) -> Sequence:
        sequence = self._requests.branch(parent)
        sequence.token_ids.append(token_id)
        beams.branches.append((sequence, parent))
        return sequence

    def _drop(self, parents: list[Sequence], beams: Beams, next_tokens: dict[int, int | None]) -> None:
        for parent in parents:
            if parent.sequence_id in next_tokens:
                self._scheduler.cancel_branch(parent)
            self._dismiss(beams.request, parent)

    def _dismiss(self, request: Request, sequence: Sequence) -> None:
        first = request.sequences[0]
        first.num_preemptions += sequence.num_preemptions
        if first.num_cached_tokens is None:
            first.num_cached_tokens = sequence.num_cached_tokens
        self._scheduler.remove_sequence(sequence)
        self._answers.close(sequence)
        self._requests.strike(sequence)


def _choose(hypothesis: Hypothesis, stop_token_ids: frozenset[int]) -> Chosen:
    is_stopped = hypothesis.token_ids[-1] in stop_token_ids
    return Chosen(hypothesis.token_ids, "stop" if is_stopped else "length", hypothesis.score, hypothesis.logprobs)
