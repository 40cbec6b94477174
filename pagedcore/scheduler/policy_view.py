"""What a dynamic policy decides by: one frozen view for all plans of a step, and the service that tenants have had."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

from pagedcore.scheduler.plan import ScheduledRow
from pagedcore.scheduler.step_time import FIRST_GUESS, StepTimes
from pagedcore.sequence import Sequence

MAX_ABSENT: Final = 1024
"""Tenants without a request whose lead over the others is remembered; of more, the largest leads."""


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What one tenant has, and has had."""

    virtual_tokens: float = 0.0
    """Computed tokens, each divided by the weight of its request. A tenant whose requests begin to wait has at least as
    many as the tenant had whose request started last: what others had while it wanted nothing is not paid back."""
    num_rows: int = 0
    """Its running sequences."""
    num_blocks: int = 0
    """Blocks in their tables; a block that several share counts for each."""


_NO_USAGE: Final = TenantUsage()


@dataclass(frozen=True, slots=True)
class PolicyView:
    """What a dynamic policy may look at besides a sequence. It is the same for all plans of a step."""

    number: int = 0
    """Counts the views of a scheduler; a plan that was made with another view is out of date."""
    now_s: float = 0.0
    """The engine's clock, in seconds; ``Sequence.arrival_s`` and ``deadline_s`` are on the same one."""
    usage: Mapping[str, TenantUsage] = field(default_factory=dict)
    """By tenant, of those that have a request."""
    ahead: Mapping[int, float] = field(default_factory=dict)
    """For each waiting sequence, by id: the most virtual tokens of the same tenant's sequences that came before it and
    wait too. It orders several sequences of one tenant that could start in the same step."""
    times: StepTimes = FIRST_GUESS
    """What steps cost, as learned so far."""
    num_running: int = 0
    length_share: float = 1.0
    """Length of completions over ``max_tokens``, of those that have ended lately."""
    step_s: float = field(init=False)
    """Seconds of a step in which all that run decode, and no other prompt is computed."""

    def __post_init__(self) -> None:
        times = self.times
        object.__setattr__(self, "step_s", times.fixed_s + times.decode_row_s * max(1, self.num_running))

    def usage_of(self, tenant: str) -> TenantUsage:
        """Return a tenant's usage; zeros for one that has none."""
        return self.usage.get(tenant, _NO_USAGE)

    def remaining_s(self, sequence: Sequence, num_steps: float | None = None) -> float:
        """Estimate the seconds until a sequence has so many tokens more if it runs without a break from now on.

        Args:
            sequence: waiting or running.
            num_steps: tokens to come; ``None``: to the end of a completion of the length that is usual.
        """
        num_known = len(sequence.token_ids)
        if num_steps is None:
            num_steps = max(1.0, self.length_share * sequence.max_tokens + sequence.num_prompt_tokens - num_known)
        return num_steps * self.step_s + (num_known - sequence.num_computed_tokens) * self.times.prefill_token_s


class TenantLedger:
    """The service of every tenant that has a request, and of the latest others as long as it matters.

    Source: virtual token counters (Sheng et al., Fairness in Serving Large Language Models, 2024), where a tenant that
    begins to wait is lifted to the least of those that wait. Here it is lifted to the start of the latest request that
    was taken up (start-time fair queueing; Goyal, Vin and Cheng 1996): a tenant that waits at its own cap keeps no mark
    low.

    Invariant: ``floor`` never falls, and no tenant begins to wait below it.
    Invariant: memory is bounded by the requests that wait or run, and ``MAX_ABSENT``.
    """

    def __init__(self) -> None:
        self.virtual: dict[str, float] = {}
        self.floor = 0.0
        """Virtual tokens that the tenant had whose request started last; while none waits, the most that one has."""
        self._waiting: set[str] = set()
        """Tenants with a request that waited when the latest view was made."""

    def charge(self, started: Iterable[Sequence], rows: Iterable[ScheduledRow]) -> None:
        """Count what a step has taken up and computed."""
        self._raise_floor(one.options.tenant for one in started)
        for row in rows:
            options = row.sequence.options
            before = self.virtual.get(options.tenant, self.floor)
            self.virtual[options.tenant] = before + row.num_tokens / options.weight

    def survey(
        self, waiting: Iterable[Sequence], running: Iterable[Sequence], num_blocks_of: Callable[[int], int]
    ) -> tuple[dict[str, TenantUsage], dict[int, float]]:
        """Return usage by tenant, and what waits ahead by sequence id; lift those that have come."""
        ahead, behind = dict[int, float](), defaultdict[str, float](float)
        for one in sorted(waiting, key=attrgetter("arrival")):
            tenant = one.options.tenant
            before = behind[tenant]
            ahead[one.sequence_id] = before
            behind[tenant] = before + (one.num_prompt_tokens + one.max_tokens) / one.options.weight
        rows, blocks = dict.fromkeys(behind, 0), defaultdict[str, int](int)
        for one in running:
            tenant = one.options.tenant
            rows[tenant] = rows.get(tenant, 0) + 1
            blocks[tenant] += num_blocks_of(one.sequence_id)
        self._lift(set(behind), {one.options.tenant for one in running})
        return {one: TenantUsage(self.virtual[one], count, blocks[one]) for one, count in rows.items()}, ahead

    def snapshot(self) -> dict[str, Any]:
        """Copy the service of all tenants, and which of them wait, as plain values."""
        virtual = [[tenant, tokens, tenant in self._waiting] for tenant, tokens in self.virtual.items()]
        return {"floor": self.floor, "virtual": virtual}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Be as it was copied."""
        self.floor, self.virtual = state["floor"], {tenant: tokens for tenant, tokens, _ in state["virtual"]}
        self._waiting = {tenant for tenant, _, is_waiting in state["virtual"] if is_waiting}

    def _raise_floor(self, tenants: Iterable[str]) -> None:
        self.floor = max([self.floor, *(self.virtual.get(one, 0.0) for one in tenants)])

    def _lift(self, waiting: set[str], running: set[str]) -> None:
        virtual, present = self.virtual, waiting | running
        if not self._waiting:
            # Why: nobody waited, so all had what they wanted.
            self._raise_floor(running)
        # Why sorted, here and below: the order of a set is another one in every process, and decisions are not.
        for one in sorted(waiting - self._waiting):
            virtual[one] = max(virtual.get(one, 0.0), self.floor)
        self._waiting = waiting
        if len(virtual) > 2 * MAX_ABSENT + len(present):
            absent = [one for one in virtual if one not in present and virtual[one] > self.floor]
            kept = heapq.nlargest(MAX_ABSENT, absent, key=virtual.__getitem__)
            self.virtual = {one: virtual[one] for one in (*sorted(present), *kept)}
