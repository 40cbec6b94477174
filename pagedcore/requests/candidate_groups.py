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

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from pagedcore.outputs import FinishReason
from pagedcore.requests.beam_search import BeamRules, BeamSearch, Continuations, Hypothesis
from pagedcore.requests.request import Request
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.sequence import Sequence

SEED_STRIDE: Final = 0x9E3779B97F4A7C15  # Why: odd, so that consecutive multiples do not meet modulo a power of two
SEED_RANGE: Final = 2**63


@dataclass(slots=True, eq=False, repr=False)
class CandidateGroup:
    """The sequences among which the completions of one request are chosen.

    Invariant: with a search, ``candidates`` are its present beams, in its order; those with continuations are computed,
        the others wait or run.
    """

    request: Request
    candidates: list[Sequence]
    search: BeamSearch | None = None
    """``None``: the candidates are computed as if all were returned, and ranked when all have ended (``best_of``)."""
    continuations_of: dict[int, Continuations] = field(default_factory=dict)
    """What may follow each beam that was computed, by sequence id."""

    @property
    def is_decided(self) -> bool:
        """Whether the search is done, or every candidate has ended."""
        if self.search is not None:
            return self.search.is_done
        return all(one.finish_reason is not None for one in self.candidates)

    def results(self) -> list[Hypothesis]:
        """Return the ``n`` best, best first, the first of equal ones first."""
        if self.search is not None:
            return self.search.hypotheses[: self.request.params.n]
        return sorted(map(_describe, self.candidates), key=lambda one: -one.score)[: self.request.params.n]


Branch = tuple[Sequence, Sequence]
"""A beam that is new to the scheduler, and its parent."""


@dataclass(eq=False, repr=False)
class CandidateGroups:
    """All candidate groups of one engine that are not decided.

    Invariant: candidates are removed with their group, and no sequence becomes a candidate later.
    """

    scheduler: Scheduler
    sequence_ids: Iterator[int]
    open_text: Callable[[Request, Sequence, int, CandidateGroup], object]
    remove_text: Callable[[Sequence], None]
    by_request: dict[str, CandidateGroup] = field(default_factory=dict, init=False)
    """By request id."""

    @property
    def open_requests(self) -> tuple[Request, ...]:
        """The requests whose completions have not been chosen."""
        return tuple(group.request for group in self.by_request.values())

    def open_group(self, request: Request, let_wait: Callable[..., None] | None = None) -> None:
        """Let the sequences wait among which a request's completions will be chosen, by ``add_sequences`` unless
        another verb is given. Raises as ``add_sequences``.
        """
        first, params = request.sequences[0], request.params
        candidates = [
            first.branch(next(self.sequence_ids), seed=(first.seed + index * SEED_STRIDE) % SEED_RANGE)
            for index in range(params.num_initial_sequences)
        ]
        # Why: what the first candidate learns of the prompt is the request's at once; the others have it computed.
        candidates[0].prompt_logprobs = first.prompt_logprobs
        (let_wait or self.scheduler.add_sequences)(*candidates)
        group = CandidateGroup(request, candidates)
        if params.beam_width > 1:
            rules = BeamRules(
                params.beam_width, first.max_tokens, params.min_tokens, first.end_token_ids, params.length_penalty,
                params.early_stopping, params.logprobs, first.stop_token_ids - first.end_token_ids,
                frozenset(params.suppress_tokens),
            )
            group.search = BeamSearch(rules)
        self.by_request[request.request_id] = group
        for candidate in candidates:
            self.open_text(request, candidate, 0, group)

    def clear(self) -> None:
        """Forget all groups, in whatever state they are."""
        self.by_request.clear()

    def find_group(self, request: Request) -> CandidateGroup | None:
        """Return the group of a request whose completions are chosen at the end and have not been chosen."""
        return self.by_request.get(request.request_id)

    def close_group(self, request: Request, reason: FinishReason) -> None:
        """End a request's group, if there is one, and all its candidates."""
        group = self.by_request.pop(request.request_id, None)
        for candidate in group.candidates if group is not None else ():
            self.scheduler.finish_sequence(candidate, reason)
            self._remove_candidate(request, candidate)

    def choose_beams(self, group: CandidateGroup, next_tokens: dict[int, int | None]) -> list[Branch]:
        """Let a search whose round is complete choose its next beams, before the step is committed.

        Beams that continue in place get their token in ``next_tokens`` of the step, by sequence id, where every beam
        has ``None``; the others are returned, for ``add_branches``.
        """
        branches, chosen, parents = list[Branch](), list[Sequence](), group.candidates
        is_open, num_computed = self.find_group(group.request) is group, len(group.continuations_of)
        if group.search is None or not is_open or num_computed < len(parents):
            return branches
        for survivor in group.search.advance([group.continuations_of[parent.sequence_id] for parent in parents]):
            parent = parents[survivor.parent]
            # Why: a parent outside this step, or with a token already, needs a new branch.
            if next_tokens.get(parent.sequence_id, 0) is None:
                next_tokens[parent.sequence_id] = survivor.token_id
                chosen.append(parent)
            else:
                beam = parent.branch(next(self.sequence_ids), seed=parent.seed)
                beam.token_ids.append(survivor.token_id)
                beam.follow_length()
                self.open_text(group.request, beam, 0, group)
                chosen.append(beam)
                branches.append((beam, parent))
        if not group.is_decided:
            for parent in parents:
                if parent not in chosen:
                    if parent.sequence_id in next_tokens:
                        self.scheduler.cancel_branch(parent)
                    self._remove_candidate(group.request, parent)
            group.candidates, group.continuations_of = chosen, {}
        return branches

    def add_branches(self, branches: Iterable[Branch]) -> None:
        """Let the beams wait that ``choose_beams`` made, once the step is committed."""
        for beam, parent in branches:
            # Why: a prompt is looked up once; a beam that finds its parent's blocks is no further hit.
            beam.num_cached_tokens = parent.num_cached_tokens
            self.scheduler.add_branch(beam, parent)

    def _remove_candidate(self, request: Request, sequence: Sequence) -> None:
        first = request.sequences[0]
        first.num_preemptions += sequence.num_preemptions
        if first.num_cached_tokens is None:
            first.num_cached_tokens = sequence.num_cached_tokens
        self.scheduler.remove_sequence(sequence)
        self.remove_text(sequence)


def _describe(candidate: Sequence) -> Hypothesis:
    mean = sum(one.logprob for one in candidate.logprobs) / len(candidate.logprobs)
    token_ids, reason = tuple(candidate.output_token_ids), candidate.finish_reason or "stop"
    return Hypothesis(token_ids, reason, mean, tuple(candidate.logprobs))
