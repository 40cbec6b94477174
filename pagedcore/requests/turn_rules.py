"""Which requests end before a step without having been started: they waited too long, or cannot end in time."""

from __future__ import annotations

from itertools import takewhile
from typing import Final

from pagedcore.errors import DeadlineMissed, QueueTimeout
from pagedcore.protocols import Clock
from pagedcore.requests.output_processor import OutputProcessor
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.sequence import Sequence

_ITS_ADAPTER: Final = "its adapter"


class TurnRules:
    """The rules of one engine.

    Invariant: a sequence that was started is ended by none of them.
    """

    def __init__(
        self, scheduler: Scheduler, outputs: OutputProcessor, clock: Clock, queue_timeout_s: float | None
    ) -> None:
        self._scheduler, self._outputs, self._clock = scheduler, outputs, clock
        self.queue_timeout_s = queue_timeout_s
        """Longest wait for a first start, in seconds; ``None``: no limit."""

    def apply(self) -> None:
        """End what is over a limit now."""
        if self.queue_timeout_s is not None:
            self._expire(self.queue_timeout_s)
        if self._scheduler.rules.policy.sheds_late:
            for one in self._scheduler.queues.late_ones(self._clock.now()):
                self._outputs.end_waiting(
                    [one], DeadlineMissed(one.options.deadline_s or 0.0, waits_for=self._lack_of(one)))

    def _expire(self, limit_s: float) -> None:
        latest_s = self._clock.now() - limit_s
        # Why: the oldest comes first, so a step in which none expires looks at one.
        expired = list[Sequence](takewhile(
            lambda sequence: sequence.arrival_s < latest_s, self._scheduler.waiting.never_started()
        ))
        if self._scheduler.rules.policy.promises:
            expired = [one for one in expired if one.options.deadline_s is None]
        for lack in ("", _ITS_ADAPTER):
            if alike := [one for one in expired if self._lack_of(one) == lack]:
                self._outputs.end_waiting(alike, QueueTimeout(limit_s, waits_for=lack))

    def _lack_of(self, sequence: Sequence) -> str:
        """Say what kept a waiting sequence from starting, if that was not the queue."""
        is_there = sequence.adapter is None or sequence.adapter in self._scheduler.adapters.slot_of
        return "" if is_there else _ITS_ADAPTER
