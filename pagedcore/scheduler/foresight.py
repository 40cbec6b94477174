"""Booking a step whose tokens are drawn and not read yet, so that the next step can be planned while it is computed.

Where it is known that a sequence goes on, ``-1 - place`` stands for its next token: the token of the sampled row number
``place`` of the step, which is on the device. ``read`` puts the token there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from collections.abc import Sequence as ListOf

from pagedcore.kv_cache.block_manager import BlockManager
from pagedcore.outputs import FinishReason
from pagedcore.scheduler.plan import NewToken, ScheduledRow, SchedulePlan, StepInFlight
from pagedcore.scheduler.swapping import Swapping
from pagedcore.sequence import Sequence


class Foresees:
    """The part of a ``Scheduler`` that books steps before their tokens are known.

    Invariant: a token is negative only from ``foresee`` to ``recall``, as the last one of a sequence, and not computed.
    Invariant: a sequence without its next token has none to compute, so that no plan has a row of it.
    """

    moves: Swapping
    _blocks: BlockManager
    _unread: list[ScheduledRow]
    """Sampled rows of the step that was foreseen, until their tokens are read; without sequences that have finished."""
    must_rest = False
    """Whether the step in flight has to be committed before another one is planned: somebody wants to copy the state.
    """

    @property
    def unread(self) -> list[int]:
        """Ids of the sequences whose next tokens are drawn and not read."""
        return [row.sequence.sequence_id for row in self._unread]

    def foresee(self, plan: SchedulePlan, held: Collection[int] = ()) -> None:
        """Book a step that was launched: all that ``commit`` does, but for the tokens, of which ``read`` tells.

        Args:
            plan: what was reserved and is on its way. It has no drafts, and no row that generates nothing.
            held: ids of sequences whose tokens are not on the device, so that nothing can follow before they are read.

        Raises:
            InternalError: ``plan`` is not in flight; nothing changed.
        """
        step = self._require_in_flight(plan)
        self._land(step, step.rows)
        self._advance(step.rows, None)
        sampled = [row for row in plan.rows if row.num_sampled]
        self._unread = [row for row in sampled if row.sequence.sequence_id not in step.gone]
        for place, row in enumerate(sampled):
            sequence = row.sequence
            ends = sequence.num_output_tokens + 1 >= sequence.max_tokens
            if not ends and sequence.sequence_id not in step.gone and sequence.sequence_id not in held:
                sequence.token_ids.append(-1 - place)
                # Why taken back: all of it will be computed anew, once its length is certain.
                if sequence.has_other_angles:
                    del sequence.token_ids[-1]

    def recall(self) -> None:
        """Let sequences end with their last known token again, before ``read``."""
        for row in self._unread:
            self._recall(row.sequence)

    def read(self, sampled: Mapping[int, int | None]) -> list[NewToken]:
        """Append the tokens of the step that was foreseen, and end what they end; return what was appended, row by row.

        A row of the step in flight whose sequence ends is one that was computed too much. ``sampled`` has the token of
        each sequence that has not finished, by its id.
        """
        rows, news = self._unread, list[NewToken]()
        self._unread = []
        for row in rows:
            sequence = row.sequence
            token_id = sampled[sequence.sequence_id]
            assert token_id is not None  # Invariant: a step with beams is committed
            reason = sequence.append_token(token_id)
            if reason is not None:
                self._take_out(sequence)
                self._mark_finished(sequence, reason)
            elif sequence.has_other_angles:
                self.moves.begin_anew(sequence)
            news.append(NewToken(sequence, token_id, reason))
        return news

    def _forget_unread(self, sequence: Sequence) -> None:
        """Expect no token of a sequence any more."""
        if any(row.sequence is sequence for row in self._unread):
            self._recall(sequence)
            self._unread = [row for row in self._unread if row.sequence is not sequence]

    def _recall(self, sequence: Sequence) -> None:
        if sequence.token_ids[-1] < 0:
            del sequence.token_ids[-1]
            # Why: a plan asks for keys of blocks that are not computed yet, too.
            del sequence.block_keys[len(sequence.token_ids) // self._blocks.block_size :]

    @abstractmethod
    def _require_in_flight(self, plan: SchedulePlan) -> StepInFlight:
        """As ``Scheduler`` has it."""

    @abstractmethod
    def _land(self, step: StepInFlight, rows: ListOf[ScheduledRow]) -> None:
        """As ``Scheduler`` has it."""

    @abstractmethod
    def _advance(self, rows: ListOf[ScheduledRow], sampled: Mapping[int, int | None] | None) -> list[NewToken]:
        """As ``Scheduler`` has it."""

    @abstractmethod
    def _take_out(self, sequence: Sequence) -> None:
        """As ``Scheduler`` has it."""

    @abstractmethod
    def _mark_finished(self, sequence: Sequence, reason: FinishReason) -> None:
        """As ``Scheduler`` has it."""
