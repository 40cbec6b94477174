"""Which rows of a plan have drafts, and how many: tokens that may follow, computed in the step that draws the first.

Drafts get what everything else in a plan has left of tokens, and of blocks that hold nothing, so nothing is preempted
or delayed for them. ``drafting`` says what may follow and how many are worth their rows, which in a full batch are
none. That they change no answer is the law of ``Sampler.sample_drafted``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from pagedcore.drafting.offers import Chances, share_out
from pagedcore.errors import InvalidDrafts
from pagedcore.kv_cache.prefix_match import NO_MATCH
from pagedcore.outputs import FinishReason
from pagedcore.protocols import ForcedTokens
from pagedcore.scheduler.draft_costs import DraftCosts
from pagedcore.scheduler.plan import ScheduledRow, SchedulePlan
from pagedcore.scheduler.plan_state import PlanState
from pagedcore.sequence import Sequence

_LEAST_GAIN: Final = 0.95
"""Chance of the best draft: where not even one of these is worth its row, none is looked for."""
_FORCED: Final = Chances(0.9, 0.9)
"""Of what a grammar forces: it decides the text, and the model which tokens make it up."""
_log = logging.getLogger("pagedcore")


class DraftSource(Protocol):
    """Says what may follow. It need not be right, and is not trusted.

    For the same tokens it says the same, until something is observed, forgotten or begun.
    """

    def begin(self, sequence_id: int, root: bytes, token_ids: ListOf[int]) -> None:
        """Note that a sequence begins to decode, with all its tokens; those behind one root may learn of each other."""

    def chances(self, sequence_id: int, token_ids: ListOf[int]) -> Chances:
        """Return how likely drafts behind these tokens are right."""

    def propose(self, sequence_id: int, token_ids: ListOf[int], most: int) -> tuple[int, ...]:
        """Return at most ``most`` tokens that may follow these."""

    def observe(self, sequence_id: int, num_tokens: int, num_offered: int, num_kept: int) -> None:
        """Learn how many of the drafts of a row were right, the first ones; the sequence has ``num_tokens`` now."""

    def forget(self, sequence_id: int, token_ids: ListOf[int], keep: bool) -> None:
        """Note that a sequence has ended, if it is known; ``keep``: by itself, so that others of its root may repeat
        it.
        """


class DraftingModel(Protocol):
    """A model that says what may follow. What it says is computed between two plans, for all sequences together.

    It need not be right, and is not trusted. Until ``draft``, ``observe``, ``forget`` or ``reset`` it says the same.
    """

    def chances(self, sequences: ListOf[Sequence]) -> ListOf[Chances]:
        """Return how likely drafts would be right, and what each would take if all of these had some."""

    def answer(self, sequence: Sequence) -> tuple[int, ...] | None:
        """Return the drafts behind the tokens of a sequence; ``None`` if ``draft`` was not asked for these."""

    def draft(self, asked: ListOf[tuple[Sequence, int]]) -> None:
        """Make drafts behind the tokens of sequences, at most so many each."""

    def observe(self, sequence: Sequence, num_offered: int, num_kept: int) -> None:
        """Learn how many of the drafts of a row were right, the first ones."""

    def forget(self, sequence_id: int) -> None:
        """Note that a sequence has ended, if it is known."""

    def reset(self) -> None:
        """Forget all sequences, in whatever state something that broke off has left them."""


@dataclass(slots=True)
class _Offer:
    """Where drafts of one row would come from."""

    row: ScheduledRow
    chances: Chances
    room: int
    forced: tuple[int, ...] = ()
    answer: tuple[int, ...] | None = None
    """What the model says; ``None``: drafts come from elsewhere."""
    is_asked: bool = False
    """Whether the model would have to be asked first."""


class Speculation:
    """Gives rows of a plan drafts.

    Invariant: a plan is a function of the scheduler's state; only ``learn``, ``forget`` and ``reset`` change anything.
    Invariant: nothing of a source reaches a plan that is no token of the vocabulary; a source that says something else,
        or raises, is not asked again.
    """

    def __init__(
        self, source: DraftSource, costs: DraftCosts, vocab_size: int, most: int, forced: ForcedTokens | None = None,
        model: DraftingModel | None = None,
    ) -> None:
        """Give at most ``most`` drafts to a row, and to one with a constraint what ``forced`` says, if it is given;
        where ``model`` is more likely to be right than the source, its drafts.
        """
        self._source: DraftSource | None = source
        self._forced, self._model = forced, model
        self._of_model: set[int] = set()
        """Sequences whose drafts in the latest plan are the model's."""
        self.costs, self._vocab_size, self._most = costs, vocab_size, most
        self._begun: set[int] = set()
        self.failure: InvalidDrafts | None = None
        """Why there are no drafts any more."""
        self.model_failure: InvalidDrafts | None = None
        """Why the model makes none any more."""

    @property
    def trouble(self) -> str:
        """What has gone wrong and is given up, in words; "" for nothing."""
        if self.failure is not None:
            return f"off: {self.failure}"
        return "" if self.model_failure is None else f"on, but {self.model_failure}"

    def add_drafts(self, state: PlanState) -> None:
        """Let the rows of a plan that decode have drafts, as long as there is room."""
        rows = [row for row in state.rows.values() if _may_have_drafts(row)]
        if not rows or self._source is None:
            return
        with self._asking():
            self._add_drafts(state, rows, self._source)

    def draft(self, asked: ListOf[tuple[Sequence, int]]) -> None:
        """Let the model make the drafts that a plan has asked for; another plan has them. It may fail, which ends
        nothing but its drafts.
        """
        if self._model is None:
            return
        try:
            self._model.draft(asked)
        except Exception as error:  # memory may lack for the drafts alone
            self._model = None
            self.model_failure = InvalidDrafts(f"no drafts of speculative_model any more, after {type(error).__name__}")
            self.model_failure.__cause__ = error
            _log.error("speculation: %s; the engine continues without", self.model_failure)

    def learn_costs(self, plan: SchedulePlan, seconds: float) -> None:
        """Learn how long a step took whose rows have nothing but a token and drafts."""
        prefill_tokens, num_rows, _ = plan.work
        if num_rows and prefill_tokens == plan.num_drafts:
            self.costs.observe(num_rows, plan.num_drafts, seconds)

    def learn(self, sequence: Sequence, num_drafts: int, num_right: int) -> None:
        """Learn how many of the drafts of a row were right."""
        if self._source is None or sequence.sequence_id not in self._begun:
            return
        with self._asking():
            if self._model is not None and sequence.sequence_id in self._of_model:
                self._model.observe(sequence, num_drafts, num_right)
            else:
                self._source.observe(sequence.sequence_id, len(sequence.token_ids), num_drafts, num_right)

    def forget(self, sequence: Sequence, reason: FinishReason) -> None:
        """Forget a sequence that has ended."""
        if self._source is None or sequence.sequence_id not in self._begun:
            return
        with self._asking():
            self._source.forget(sequence.sequence_id, sequence.token_ids, reason in ("stop", "length"))
            if self._model is not None:
                self._model.forget(sequence.sequence_id)
        self._begun.discard(sequence.sequence_id)

    def reset(self) -> None:
        """Forget all sequences, whose tokens may have been taken back."""
        if self._source is not None:
            with self._asking():
                for number in self._begun:
                    self._source.forget(number, (), False)
                if self._model is not None:
                    self._model.reset()
        self._begun, self._of_model = set(), set()

    def give_up(self, error: Exception) -> None:
        """Give no drafts any more, after a failure of the source or of a model that computed some."""
        if self.failure is None:
            self.failure = InvalidDrafts(f"no drafts any more, after {type(error).__name__}")
            self._source = self._model = None
            self.failure.__cause__, self._begun = error, set()
            _log.error("speculation: %s; the engine continues without", self.failure)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except MemoryError:
            raise
        except Exception as error:  # the source may be another one's
            self.give_up(error)

    def _add_drafts(self, state: PlanState, rows: ListOf[ScheduledRow], source: DraftSource) -> None:
        for row in rows:
            sequence = row.sequence
            if sequence.sequence_id not in self._begun:
                # Why first: whatever breaks the plan off, ``reset`` forgets what has begun, and what was about to.
                self._begun.add(sequence.sequence_id)
                source.begin(sequence.sequence_id, sequence.cache_root, sequence.token_ids)
        room = min(state.num_draftable, self._most * len(rows))
        if room <= 0:
            return
        seconds = self.costs.predict(len(rows), sum([row.end for row in rows]), room)
        worst = len(rows) / seconds[0]
        if all(len(rows) + _LEAST_GAIN * count <= worst * one for count, one in enumerate(seconds)):
            return
        offers = self._offers(rows, source)
        for one in offers:
            one.room = min(one.room, num_allowed(state, one.row))
        counts = share_out([one.chances for one in offers], [one.room for one in offers], room, num_sampled=len(rows),
                           seconds=seconds, again_s=self.costs.again_s if state.blocks.keeps_states else 0.0)
        self._of_model = set()
        for one, count in zip(offers, counts, strict=True):
            # Why again: rows before this one may have taken the blocks.
            if (most := min(count, num_allowed(state, one.row))) <= 0:
                continue
            if one.is_asked:
                state.to_draft.append((one.row.sequence, most))
            elif drafts := self._drafts_of(one, most, source):
                state.add_drafts(one.row, drafts)

    def _offers(self, rows: ListOf[ScheduledRow], source: DraftSource) -> list[_Offer]:
        """Return for each row what is likelier to be right: what the source says, or the model."""
        offers = []
        for row in rows:
            forced, sequence = self._forced_of(row.sequence), row.sequence
            chances = _FORCED if forced else source.chances(sequence.sequence_id, sequence.token_ids)
            offers.append(_Offer(row, chances, self._most, forced))
        if self._model is not None:
            free = [one for one in offers if not one.forced]
            said = self._model.chances([one.row.sequence for one in free])
            for one, chances in zip(free, said, strict=True):
                answer = self._model.answer(one.row.sequence) if chances.first > one.chances.first else ()
                if answer is None:
                    one.chances, one.is_asked = chances, True
                elif answer:
                    # Why for nothing: they are made.
                    one.chances, one.answer, one.room = chances._replace(each_s=0.0), answer, len(answer)
        return offers

    def _drafts_of(self, offer: _Offer, most: int, source: DraftSource) -> tuple[int, ...]:
        sequence, forced = offer.row.sequence, offer.forced
        if offer.answer is not None:
            self._of_model.add(sequence.sequence_id)
            drafts = offer.answer[:most]
        else:
            drafts = source.propose(sequence.sequence_id, sequence.token_ids, most)
        self._require_tokens(drafts, most)
        # Why: what is certain is followed by what is likely, where the two agree.
        return forced[:most] if forced and drafts[: len(forced)] != forced[:most] else drafts

    def _forced_of(self, sequence: Sequence) -> tuple[int, ...]:
        if self._forced is None or sequence.constraint is None:
            return ()
        return self._forced(sequence.constraint, sequence.output_token_ids, self._most)

    def _require_tokens(self, drafts: object, most: int) -> None:
        if not isinstance(drafts, tuple) or len(drafts) > most:
            raise InvalidDrafts(f"drafts: got {type(drafts).__name__}, allowed is a tuple of up to {most} token ids")
        for token_id in drafts:
            if type(token_id) is not int or not 0 <= token_id < self._vocab_size:
                raise InvalidDrafts(
                    f"drafts: got a {type(token_id).__name__}, allowed are token ids from 0 to {self._vocab_size - 1}")


def _may_have_drafts(row: ScheduledRow) -> bool:
    """Whether a row may have drafts at all."""
    sequence, params = row.sequence, row.sequence.params
    if not row.is_decode or row.match is not NO_MATCH or not sequence.options.speculate:
        return False
    # Why: a beam's next token is chosen when all beams are computed. And only text can tell where a stop string ends a
    # completion, so a processor would be given what comes behind it.
    return params.beam_width == 1 and (params.logits_processor is None or not params.stop)


def num_allowed(state: PlanState, row: ScheduledRow) -> int:
    """Return how many drafts a row may have, whatever they are worth."""
    sequence, size = row.sequence, state.blocks.block_size
    num_tokens = len(sequence.token_ids)
    # Why a cached block at most: the row would take it for its next tokens, and leaves it unused if these are others.
    num_blocks = max(state.num_unused_blocks, min(1, state.free))
    # Why: blocks are those of the positions, so the rest of the last one is its own.
    num_positions = (-(-row.end // size) + num_blocks) * size - row.end
    # Why one less: each row has a token in any case, and so has the one of the last draft.
    most = min(state.num_draftable, num_positions, sequence.max_total_tokens - num_tokens - 1)
    if sequence.num_short_tokens is not None and not sequence.is_long:
        most = min(most, sequence.num_short_tokens - num_tokens)
    return max(0, most)
