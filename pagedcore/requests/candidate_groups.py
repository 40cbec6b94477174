"""Requests whose completions are chosen at the end, among more sequences than they return: ``best_of`` and beam search.

The scheduler runs the candidates like any other sequences; the request's own sequences stay outside until they receive
the chosen completions. Candidates share their common beginning through the prefix cache.

Beams are chosen together, so a beam that is computed waits for the others of its round, wherever memory or the batch
left them. It waits *outside* the scheduler: it leaves what it computed in the cache, so it holds nothing that other
sequences could need, and everything inside can run. When the last beam of a round is computed, the beams of that step
continue in place, each with its first survivor; every other survivor is a new sequence. Where all beams fit the batch,
as usual, a round is one step and only beams that do not survive leave it. Read ``beam_search`` next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pagedcore.outputs import FinishReason, TokenLogprobs
from pagedcore.requests.beam_search import BeamRules, BeamSearch, Continuations, Hypothesis
from pagedcore.requests.request import Request
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chosen:
    """One completion that was chosen."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    score: float
    logprobs: tuple[TokenLogprobs, ...] = ()


class BestOf:
    """Candidates that are computed as if all were returned, and ranked when all have ended."""

    def __init__(self, request: Request, candidates: list[Sequence]) -> None:
        self.request = request
        self.candidates = candidates
        self._num_known = len(candidates[0].token_ids)

    @property
    def is_decided(self) -> bool:
        """Whether every candidate has ended."""
        return all(one.finish_reason is not None for one in self.candidates)

    def results(self) -> list[Chosen]:
        """Return the ``n`` best, best first, the first of equal ones first."""
        ranked = sorted(map(self._describe, self.candidates), key=lambda chosen: -chosen.score)
        return ranked[: self.request.params.n]

    def _describe(self, candidate: Sequence) -> Chosen:
        reason, logprobs = candidate.finish_reason or "stop", tuple(candidate.logprobs)
        mean = sum(one.logprob for one in logprobs) / len(logprobs)
        return Chosen(tuple(candidate.token_ids[self._num_known :]), reason, mean, logprobs)


@dataclass(slots=True, eq=False)
class Beams:
    """A beam search and the sequences of its present round.

    Invariant: ``candidates`` are the search's beams, in its order.
    Invariant: a beam with continuations is computed; one without is waiting or running.
    """

    request: Request
    search: BeamSearch
    candidates: list[Sequence]
    continuations_of: dict[int, Continuations] = field(default_factory=dict)
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
        return len(self.continuations_of) == len(self.candidates)

    def results(self) -> list[Chosen]:
        """Return the ``n`` best hypotheses, best first."""
        end_token_ids = self.request.sequences[0].end_token_ids
        return [_choose(one, end_token_ids) for one in self.search.hypotheses[: self.request.params.n]]


CandidateGroup = BestOf | Beams


class CandidateGroups:
    """All candidate groups of one engine that are not decided.

    Invariant: candidates are removed with their group, and no sequence becomes a candidate later.
    """

    def __init__(
        self, scheduler: Scheduler, branch: Callable[[Sequence, int], Sequence],
        open_text: Callable[[CandidateGroup, Sequence], object], remove_text: Callable[[Sequence], None],
    ) -> None:
        """Begin without groups.

        Args:
            scheduler: runs the candidates.
            branch: makes a sequence that continues another with the seed of a given number.
            open_text: begins the output of a candidate.
            remove_text: removes it.
        """
        self._scheduler = scheduler
        self._branch = branch
        self._open_text = open_text
        self._remove_text = remove_text
        self._groups: dict[str, CandidateGroup] = {}

    def make_candidates(self, request: Request) -> list[Sequence]:
        """Return the sequences among which a request's completions will be chosen."""
        first = request.sequences[0]
        candidates = [self._branch(first, index) for index in range(request.params.num_initial_sequences)]
        # Why: what the first candidate learns of the prompt is the request's at once; the others have it computed.
        candidates[0].prompt_logprobs = first.prompt_logprobs
        return candidates

    def open_group(self, request: Request, candidates: list[Sequence]) -> None:
        """Begin the group of a request whose candidates the scheduler has accepted."""
        first, params = request.sequences[0], request.params
        group: CandidateGroup
        if params.beam_width == 1:
            group = BestOf(request, candidates)
        else:
            rules = BeamRules(
                params.beam_width, first.max_tokens, params.min_tokens, first.end_token_ids, params.length_penalty,
                params.early_stopping, params.logprobs, first.stop_token_ids - first.end_token_ids,
            )
            group = Beams(request, BeamSearch(rules), candidates)
        self._groups[request.request_id] = group
        for candidate in candidates:
            self._open_text(group, candidate)

    def find_group(self, request: Request) -> CandidateGroup | None:
        """Return the group of a request whose completions are chosen at the end and have not been chosen."""
        return self._groups.get(request.request_id)

    def close_group(self, request: Request, reason: FinishReason) -> None:
        """End a request's group, if there is one, and all its candidates."""
        group = self._groups.pop(request.request_id, None)
        for candidate in group.candidates if group is not None else ():
            self._scheduler.finish_sequence(candidate, reason)
            self._remove_candidate(request, candidate)

    def choose_beams(self, groups: Iterable[CandidateGroup], next_tokens: dict[int, int | None]) -> None:
        """Let every search whose round is complete choose its next beams, before the step is committed.

        Args:
            groups: those that had candidates in the step.
            next_tokens: of the step, by sequence id, ``None`` for every beam; beams that continue in place get theirs.
        """
        for group in groups:
            if isinstance(group, Beams) and group.is_complete and self.find_group(group.request) is group:
                self._choose_beams(group, next_tokens)

    def add_branches(self, groups: Iterable[CandidateGroup]) -> None:
        """Let the beams wait that ``choose_beams`` made, once the step is committed."""
        for group in groups:
            if isinstance(group, Beams):
                branches, group.branches = group.branches, []
                for sequence, parent in branches:
                    # Why: a prompt is looked up once; a beam that finds its parent's blocks is no further hit.
                    sequence.num_cached_tokens = parent.num_cached_tokens
                    self._scheduler.add_branch(sequence, parent)

    def _choose_beams(self, group: Beams, next_tokens: dict[int, int | None]) -> None:
        parents, chosen = group.candidates, list[Sequence]()
        survivors = group.search.advance([group.continuations_of[parent.sequence_id] for parent in parents])
        for survivor in survivors:
            parent = parents[survivor.parent]
            # Why: a parent outside this step, or with a token already, needs a new branch.
            if next_tokens.get(parent.sequence_id, 0) is None:
                next_tokens[parent.sequence_id] = survivor.token_id
                chosen.append(parent)
            else:
                chosen.append(self._add_beam(group, parent, survivor.token_id))
        if survivors:
            self._remove_beams([one for one in parents if one not in chosen], group, next_tokens)
            group.candidates, group.continuations_of = chosen, {}

    def _add_beam(self, group: Beams, parent: Sequence, token_id: int) -> Sequence:
        sequence = self._branch(parent, 0)
        sequence.token_ids.append(token_id)
        self._open_text(group, sequence)
        group.branches.append((sequence, parent))
        return sequence

    def _remove_beams(self, parents: list[Sequence], group: Beams, next_tokens: dict[int, int | None]) -> None:
        for parent in parents:
            if parent.sequence_id in next_tokens:
                self._scheduler.cancel_branch(parent)
            self._remove_candidate(group.request, parent)

    def _remove_candidate(self, request: Request, sequence: Sequence) -> None:
        first = request.sequences[0]
        first.num_preemptions += sequence.num_preemptions
        if first.num_cached_tokens is None:
            first.num_cached_tokens = sequence.num_cached_tokens
        self._scheduler.remove_sequence(sequence)
        self._remove_text(sequence)


def _choose(hypothesis: Hypothesis, end_token_ids: frozenset[int]) -> Chosen:
    is_stopped = hypothesis.token_ids[-1] in end_token_ids
    return Chosen(hypothesis.token_ids, "stop" if is_stopped else "length", hypothesis.score, hypothesis.logprobs)
