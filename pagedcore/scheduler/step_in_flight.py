"""A step between reserve and commit: its plan, its provisional blocks, and who has left it meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pagedcore.errors import InternalError
from pagedcore.kv_cache.reservation import Reservation
from pagedcore.scheduler.plan import ScheduledRow, SchedulePlan
from pagedcore.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """What a reserved plan needs until it is committed or rolled back."""

    plan: SchedulePlan
    reservation: Reservation
    gone: set[int] = field(default_factory=set)
    """Ids of sequences that were finished since; the step goes on without them, even if they come back."""

    @property
    def rows(self) -> list[ScheduledRow]:
        """The rows that still count."""
        return [row for row in self.plan.rows if row.sequence.sequence_id not in self.gone]

    @property
    def admitted(self) -> list[Sequence]:
        """The admitted sequences that still count."""
        return [sequence for sequence in self.plan.admitted if sequence.sequence_id not in self.gone]

    def next_tokens(self, sampled: Mapping[int, int | None]) -> list[int | None]:
        """Return what follows each of ``rows``, ``None`` where nothing does.

        Raises:
            InternalError: a sampled row has no token.
        """
        return [sampled[self._require_sampled(row, sampled)] if row.is_sampled else None for row in self.rows]

    @staticmethod
    def _require_sampled(row: ScheduledRow, sampled: Mapping[int, int | None]) -> int:
        if row.sequence.sequence_id not in sampled:
            raise InternalError(f"commit: no token for sequence {row.sequence.sequence_id}")
        return row.sequence.sequence_id
