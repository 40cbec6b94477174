"""The one order in which a step happens: plan, make room, reserve, compute, commit.

The engine, exact quotes, what-if replays, the load simulator and the tests take their steps here. What differs between
them is a ``StepHost``: the clock, where moved blocks go, and how tokens come about.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as ListOf
from typing import Protocol, TypeVar, runtime_checkable

from pagedcore.kv_cache.host_cache import Transfer
from pagedcore.scheduler.adapter_slots import AdapterMoves
from pagedcore.scheduler.plan import NewToken, SchedulePlan
from pagedcore.scheduler.scheduler import Scheduler

Sampled = TypeVar("Sampled")
Drawn = TypeVar("Drawn", contravariant=True)
_BlockCopies = tuple[tuple[int, int], ...]


class StepHost(Protocol[Sampled]):
    """What a step needs besides its scheduler."""

    def now(self) -> float:
        """Return the time in seconds, on the clock of ``Sequence.arrival_s``."""

    def move_blocks(self) -> None:
        """Book the transfers that have ended, and start those that are due; called where there is a host tier."""

    def make_room(self, plan: SchedulePlan, transfers: ListOf[Transfer]) -> None:
        """Start the transfers that make room for a plan, and note what it preempts."""

    def compute(self, plan: SchedulePlan, copies: _BlockCopies, begun_s: float) -> Sampled:
        """Copy blocks (source, destination), then compute the rows of a plan. What it raises rolls the step back."""

    def tokens(self, plan: SchedulePlan, sampled: Sampled) -> Mapping[int, int | None]:
        """Return the next tokens by sequence id, as ``Scheduler.commit`` takes them."""

    def publish(self, plan: SchedulePlan, news: ListOf[NewToken]) -> None:
        """Take what the committed step has appended, row by row."""


@runtime_checkable
class TakesDrafts(Protocol[Drawn]):
    """A ``StepHost`` whose sampled rows may go on behind their first token; of others no draft is accepted."""

    def further_tokens(self, sampled: Drawn, place: int) -> Mapping[int, int]:
        """Return the token behind the draft number ``place`` of a row, from 0, by sequence id, of those rows that have
        accepted so many drafts and one more."""

    def publish_further(self, news: ListOf[NewToken]) -> None:
        """Take what ``further_tokens`` have appended, row by row."""


@runtime_checkable
class LoadsAdapters(Protocol):
    """A ``StepHost`` that has to read adapters; with others, they are there at once."""

    def move_adapters(self, moves: AdapterMoves) -> None:
        """Empty the slots of some adapters, and begin to load others."""


def run_step(scheduler: Scheduler, host: StepHost[Sampled], most_tokens: int | None = None) -> SchedulePlan:
    """Run one step, and return its plan; a plan without rows has computed nothing.

    Args:
        scheduler: decides.
        host: does what was decided.
        most_tokens: of a step that is tried once more with fewer tokens; ``None``: as many as the rules allow.

    Raises:
        InternalError: as ``Scheduler.schedule``. Whatever ``host.compute`` raises; the step is rolled back then.
    """
    if most_tokens is None:
        look_at_the_time(scheduler, host)
    plan = next_plan(scheduler, host, most_tokens)
    if plan.rows:
        copies, begun_s = scheduler.reserve(plan), host.now()
        try:
            sampled = host.compute(plan, copies, begun_s)
            scheduler.observe(plan, host.now() - begun_s)
        except BaseException:
            scheduler.rollback(plan)
            raise
        host.publish(plan, scheduler.commit(plan, host.tokens(plan, sampled)))
        if plan.num_drafts:
            _accept_drafts(scheduler, host, plan, sampled)
        if scheduler.kv_cache.host.num_blocks:
            host.move_blocks()
    return plan


def _accept_drafts(
    scheduler: Scheduler, host: StepHost[Sampled], plan: SchedulePlan, sampled: Sampled
) -> None:
    """Append what was drawn behind accepted drafts, one token of each row at a time, as if each had taken a step: what
    a token ends ends there, and what was drawn behind it is not looked at.
    """
    if isinstance(host, TakesDrafts):
        place = 0
        while drawn := host.further_tokens(sampled, place):
            host.publish_further(scheduler.accept(drawn))
            place += 1
    scheduler.settle(plan)


def next_plan(scheduler: Scheduler, host: StepHost[Sampled], most_tokens: int | None = None) -> SchedulePlan:
    """Make room as long as plans ask for it, and drafts if one does; return a plan that computes, or nothing while
    blocks move.
    """
    if scheduler.kv_cache.host.num_blocks:
        host.move_blocks()
    if scheduler.adapters.sizes and (moves := scheduler.adapter_moves()).load:
        move = host.move_adapters if isinstance(host, LoadsAdapters) else scheduler.adapters.carry_out
        move(moves)
    plan = scheduler.schedule(most_tokens)
    while plan.moves_blocks:
        host.make_room(plan, scheduler.make_room(plan))
        plan = scheduler.schedule(most_tokens)
    if plan.to_draft and scheduler.speculation is not None:
        scheduler.speculation.draft(plan.to_draft)
        plan = scheduler.schedule(most_tokens)
    return plan


def look_at_the_time(scheduler: Scheduler, host: StepHost[Sampled]) -> None:
    """Open the gate if it is due, and let a dynamic policy see the present."""
    if scheduler.waiting.gated and scheduler.gated_s(host.now()) <= 0.0:
        scheduler.waiting.open_gate()
    if scheduler.queues.is_dynamic:
        scheduler.begin_step(host.now())
