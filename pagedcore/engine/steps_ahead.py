"""Steps that overlap: while a GPU computes one, the host plans the next, launches it, and only then reads the tokens of
the first; so a step takes as long as the slower of the two.

A call of ``step`` launches one step and reads the one before. The next step has rows of sequences whose tokens are
known on the device alone, where it looks them up. Tokens are chosen when those before them have been read, so that
masks, penalties and ends are those of a single step; what ends a sequence has cost one row that is not looked at.

What cannot be known ahead is not guessed. A row whose token is chosen on the host is in every other step. A plan that
asks for room, or has a beam or a row that generates nothing, is made again when everything before it is known.

Invariant: between two calls at most one step is in flight, and no sequence has a token that is not known.
Invariant: a step that fails has not cost a token of the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pagedcore.engine.step_host import BrokenOff, EngineHost
from pagedcore.requests.output_processor import OutputProcessor
from pagedcore.scheduler.plan import NewToken, SchedulePlan
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.scheduler.step_recipe import look_at_the_time, next_plan

if TYPE_CHECKING:
    import torch

    from pagedcore.execution.model_runner import ModelRunner
    from pagedcore.execution.sampler import SampledTokens


class TokensLost(BrokenOff):
    """The tokens of a step could not be read, and its sequences are to be taken back; the cause says why."""


@dataclass(slots=True)
class _Flight:
    """A step that was launched and not read."""

    plan: SchedulePlan
    begun_s: float
    logits: torch.Tensor | None
    held: set[int]
    """Sequences whose tokens are chosen on the host."""
    started: list[tuple[int, float]] = field(default_factory=list)
    """As of an ``OutputProcessor``."""
    wait: Callable[[], SampledTokens] | None = None
    """Returns the tokens, once they are being chosen."""


class StepsAhead:
    """The steps of one engine whose model can be told of tokens that are on its device alone."""

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner, host: EngineHost, outputs: OutputProcessor,
        apply_rules: Callable[[], None],
    ) -> None:
        """Take the parts of an engine; ``apply_rules`` ends what is over a limit before a plan is made."""
        self._scheduler, self._runner, self._host, self._outputs = scheduler, runner, host, outputs
        self._apply_rules = apply_rules
        self._flight: _Flight | None = None
        self._last_read_s = float("-inf")

    @property
    def is_in_flight(self) -> bool:
        """Whether a step was launched and not read."""
        return self._flight is not None

    def forget(self) -> None:
        """Expect no tokens any more: whoever calls this takes the step in flight back."""
        self._flight = None

    def leave_if_over(self) -> None:
        """Do not read a step of which no sequence is left."""
        if self._flight is not None and not self._scheduler.rows_in_flight:
            self._scheduler.rollback(self._flight.plan)
            self._flight = None

    def land(self) -> SchedulePlan:
        """Commit the step in flight, for which this waits. Raises ``TokensLost``."""
        flight = self._take_off()
        plan = flight.plan
        self._read(flight, lambda sampled: self._scheduler.commit(plan, self._host.tokens(plan, sampled)))
        return plan

    def step(self) -> SchedulePlan | None:
        """Launch a step and read the one before; return the plan of the latter, or of a step without rows if there was
        none. ``None``: nothing was done, because the next step has to be taken by itself.

        Raises:
            BrokenOff: the launch was interrupted, and the step before was read; or the device has failed for good.
            TokensLost: the step before could not be read.
            InternalError: as ``Scheduler.schedule``.
        """
        scheduler = self._scheduler
        if scheduler.kv_cache.host.num_blocks:
            self._host.move_blocks()
        can_launch = self._runner.can_launch and scheduler.speculation is None
        if self._flight is None:
            return self._begin() if can_launch else None
        if scheduler.must_rest or not can_launch:
            return self.land()
        before = self._take_off()
        scheduler.foresee(before.plan, before.held)
        # Why now: what was launched counts as started from here on.
        self._apply_rules()
        look_at_the_time(scheduler, self._host)
        plan, launched, interruption = scheduler.schedule(), None, None
        if _can_launch(plan) and not (scheduler.adapters.sizes and scheduler.adapter_moves().load):
            try:
                launched = self._launch(plan)
            except BrokenOff as broken:
                # Why not told: what fails alone as well will fail in the next call.
                interruption = broken if self._is_final(broken) else None
        scheduler.recall()
        if interruption is not None and isinstance(interruption.cause, Exception):
            # Why now: the device is lost, and a read would raise what says less of the reason.
            raise interruption
        self._read(before, lambda sampled: scheduler.read(self._host.tokens(before.plan, sampled)))
        if interruption is not None:
            raise interruption
        if launched is not None:
            self._choose(launched)
        return before.plan

    def _begin(self) -> SchedulePlan | None:
        """Launch a step when nothing is in flight."""
        self._apply_rules()
        look_at_the_time(self._scheduler, self._host)
        plan = next_plan(self._scheduler, self._host)
        if not plan.rows:
            return plan
        if not _can_launch(plan):
            return None
        try:
            launched = self._launch(plan)
        except BrokenOff as broken:
            if self._is_final(broken):
                raise
            return None
        return SchedulePlan(stopped_by=plan.stopped_by) if self._choose(launched) else None

    def _take_off(self) -> _Flight:
        """Return the step in flight, which is read in this call or taken back."""
        flight, rows = self._flight, self._scheduler.rows_in_flight
        assert flight is not None  # Invariant: the caller has looked
        self._flight = None
        # Why not all: a sequence that was aborted meanwhile is not to come back.
        is_whole = len(rows) == len(flight.plan.rows)
        self._host.plan = flight.plan if is_whole else replace(flight.plan, rows=tuple(rows))
        return flight

    def _launch(self, plan: SchedulePlan) -> _Flight:
        """Begin to compute a plan. Raises ``BrokenOff``; then it was rolled back."""
        copies, begun_s = self._scheduler.reserve(plan, is_queued=True), self._host.now()
        self._outputs.started = []
        try:
            logits = self._host.launch(plan, copies, begun_s)
        except BaseException:
            self._scheduler.rollback(plan)
            raise
        return _Flight(plan, begun_s, logits, self._runner.chosen_on_host(plan.rows), self._outputs.started)

    def _choose(self, launched: _Flight) -> bool:
        """Begin to choose the tokens of a launched step; return whether it is in flight then. If not, it was rolled
        back.
        """
        assert launched.logits is not None  # Invariant: this is called once
        if not self._scheduler.rows_in_flight:
            self._scheduler.rollback(launched.plan)
            return True
        try:
            launched.wait = self._host.choose(launched.plan, launched.logits)
        except BrokenOff as broken:
            self._scheduler.rollback(launched.plan)
            if self._is_final(broken):
                raise
            return False
        launched.logits, self._flight = None, launched
        return True

    def _is_final(self, broken: BrokenOff) -> bool:
        """Whether what broke off is not taken by itself: it was interrupted, or the device has failed for good."""
        return not isinstance(broken.cause, Exception) or self._runner.has_lost_device

    def _read(self, flight: _Flight, book: Callable[[SampledTokens], list[NewToken]]) -> None:
        """Wait for the tokens of a step, book them, and give them to completions. Raises ``TokensLost``."""
        scheduler, host = self._scheduler, self._host
        assert flight.wait is not None  # Invariant: what is in flight is being chosen
        try:
            sampled = flight.wait()
        except Exception as error:
            raise TokensLost(flight.plan, error) from error
        now_s = host.now()
        # Why the later one: what the step before has taken is no part of it.
        scheduler.observe(flight.plan, now_s - max(flight.begun_s, self._last_read_s))
        self._last_read_s, self._outputs.started = now_s, flight.started
        host.publish(flight.plan, book(sampled))
        if scheduler.kv_cache.host.num_blocks:
            host.move_blocks()


def _can_launch(plan: SchedulePlan) -> bool:
    """Whether a plan computes something, and its tokens can be chosen where they are."""
    return bool(plan.rows) and not (plan.moves_blocks or plan.to_draft) and all(
        row.sequence.hidden_from is None and row.sequence.params.beam_width == 1 for row in plan.rows)
