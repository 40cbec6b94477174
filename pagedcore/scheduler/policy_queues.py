"""The two queues of a scheduler in the order of its policy, and the view that a dynamic policy decides by."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import replace
from typing import Any, Final, Protocol

from pagedcore.scheduler.plan import SchedulePlan
from pagedcore.scheduler.plan_state import PlanningRules
from pagedcore.scheduler.policies import Policy, fcfs
from pagedcore.scheduler.policy_view import PolicyView, TenantLedger
from pagedcore.scheduler.step_time import FIRST_GUESS, StepTimes
from pagedcore.scheduler.waiting_queue import PolicyOrder, WaitingQueue
from pagedcore.sequence import Sequence

_LENGTH_RATE: Final = 0.05
"""Weight of one more completion's length: about the last 20 count."""
_log = logging.getLogger("pagedcore")


class StepObserver:
    """What else learns from steps and ends; each observer overrides what it wants to know."""

    def step_timed(self, plan: SchedulePlan, seconds: float) -> None:
        """Learn how long a step took."""

    def completion_ended(self, sequence: Sequence) -> None:
        """Learn how long a completion is that has ended by itself."""


class Gatekeeper(Protocol):
    """What may refuse a request at the door."""

    def require(self, sequences: ListOf[Sequence]) -> None:
        """Take new sequences of one request, or raise."""


class PolicyQueues:
    """Waiting and running sequences under one policy.

    Invariant: under a static policy the view never changes, and nothing is counted for it.
    Invariant: under a dynamic one every key is asked for once in a view, and once more for what comes or starts.
    """

    def __init__(self, policy: Policy, limit: int, *, gates_new: bool) -> None:
        self.policy = policy
        self.view = PolicyView()
        self.is_dynamic = is_dynamic = policy.is_dynamic
        """Whether the policy in force looks at a view, which every step renews then."""
        victim_order = policy.victim_order or policy.order
        self.waiting = WaitingQueue(self._waiting_key if is_dynamic else policy.order, limit, gates_new=gates_new)
        self.running = PolicyOrder(self._running_key if is_dynamic else victim_order)
        self.ledger = TenantLedger() if is_dynamic and policy.has_tenants else None
        """``None`` unless a dynamic policy looks at tenants."""
        self.observers: list[StepObserver] = []
        self.gatekeeper: Gatekeeper | None = None
        """``None`` unless the policy promises deadlines."""
        self._length_share = 1.0
        self.most_tokens: int | None = None
        """What a step may compute so that running requests keep their ``tpot_ms``; ``None``: as much as allowed."""
        self._is_replaced = False

    def renew_view(
        self, now_s: float, num_blocks_of: Callable[[int], int], times: StepTimes = FIRST_GUESS
    ) -> None:
        """Look at the present and order both queues by it.

        Args:
            now_s: on the clock of ``Sequence.arrival_s``.
            num_blocks_of: blocks of a sequence, by its id.
            times: what steps cost just now.
        """
        if not self.is_dynamic:
            return
        waiting, running = self.waiting.sequences, self.running.sequences
        usage, ahead = ({}, {}) if self.ledger is None else self.ledger.survey(waiting, running, num_blocks_of)
        self.view = PolicyView(
            self.view.number + 1, now_s, usage, ahead, times, len(running), self._length_share
        )
        self.waiting.reorder()
        self.running.reorder()
        if self.policy.has_deadlines:
            self.most_tokens = most_tokens_of(self.running.sequences, times)

    def bounded(self, rules: PlanningRules, most_tokens: int | None) -> PlanningRules:
        """Return rules with a token budget of ``most_tokens`` and this object's own, as far as there are any."""
        limits = [one for one in (most_tokens, self.most_tokens) if one is not None]
        return replace(rules, max_num_batched_tokens=min(rules.max_num_batched_tokens, *limits))

    def note_length(self, sequence: Sequence) -> None:
        """Learn how long completions are, of one that has ended by itself."""
        if sequence.finish_reason not in ("stop", "length") or sequence.hidden_from is not None:
            return
        for one in self.observers:
            one.completion_ended(sequence)
        share = sequence.num_output_tokens / sequence.max_tokens
        self._length_share += _LENGTH_RATE * (share - self._length_share)

    def push(self, *sequences: Sequence) -> None:
        """Accept new sequences of one request, or none. Raises as ``WaitingQueue.push``, and as the gatekeeper."""
        self.waiting.require_room(len(sequences))
        if self.gatekeeper is not None:
            self.gatekeeper.require(sequences)
        self.waiting.push(*sequences)

    def place_of_new(self, sequence: Sequence) -> int:
        """Return where in the waiting queue a new sequence would come.

        Among equals it comes last, and it comes after all of its tenant if the policy looks at tenants.
        """
        waiting = self.waiting.sequences
        place = self.waiting.place_for(sequence)
        if self.policy.has_tenants:
            tenant = sequence.options.tenant
            own = [index + 1 for index, one in enumerate(waiting) if one.options.tenant == tenant]
            place = max(place, own[-1] if own else 0)
        return place

    def late_ones(self, now_s: float) -> list[Sequence]:
        """List what was not started and cannot end in time any more, at the last view's costs."""
        view = self.view
        return [
            one for one in self.waiting.never_started()
            if one.deadline_s < math.inf and one.deadline_s < now_s + view.remaining_s(one, least_tokens(one))
        ]

    def demote_failed(self) -> bool:
        """Go over to "fcfs" if a function of the policy has failed; return whether it was so."""
        failure = self.waiting.failure or self.running.failure
        if failure is None or self._is_replaced:
            return False
        for queue in (self.waiting, self.running):
            queue.demote(failure)
        # Safety: its message is left out, which may hold what the policy was shown.
        _log.error('scheduling policy %r: its key failed (%s); the engine continues with "fcfs"',
                   self.policy.name, type(failure).__name__)
        self.policy, self.is_dynamic, self.ledger, self.most_tokens = fcfs(), False, None, None
        self._is_replaced = True
        return True

    def snapshot(self) -> dict[str, Any] | None:
        """Copy what views are made of as plain values; ``None`` under a static policy.

        Left out are observers and the gatekeeper, who decides at the door only: whoever was accepted is accepted.
        """
        if not self.is_dynamic:
            return None
        ledger = self.ledger or TenantLedger()
        return {"view": self.view.number, "length_share": self._length_share, **ledger.snapshot()}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Let new queues be as they were copied, save for the sequences in them."""
        if state is None or not self.is_dynamic:
            return
        self.view, self._length_share = replace(self.view, number=state["view"]), state["length_share"]
        if self.ledger is not None:
            self.ledger.restore(state)

    def _waiting_key(self, sequence: Sequence) -> Any:
        # Why: what was loaded for a sequence must not be freed for the next one that comes first before it starts.
        return not sequence.num_computed_tokens, self.policy.order(sequence, self.view)

    def _running_key(self, sequence: Sequence) -> Any:
        if sequence.is_protected:
            return False, sequence.arrival
        return True, (self.policy.victim_order or self.policy.order)(sequence, self.view)


def most_tokens_of(running: Iterable[Sequence], times: StepTimes) -> int | None:
    """Solve a step's time for its tokens, so that it keeps the tightest ``tpot_ms`` that can be kept.

    One token at least is left for prompts, so that they make progress; targets that not even a step without prompts
    keeps ask for nothing. ``None``: there is no target.
    """
    targets = [one.options.tpot_ms / 1000.0 for one in running if one.options.tpot_ms is not None]
    if not targets:
        return None
    decoding = [one.num_computed_tokens for one in running if len(one.token_ids) - one.num_computed_tokens == 1]
    base_s = times.seconds(1, len(decoding), sum(decoding))
    kept = [target_s for target_s in targets if target_s >= base_s]
    if not kept or not times.prefill_token_s:
        return None
    return len(decoding) + 1 + int((min(kept) - base_s) / times.prefill_token_s)


def least_tokens(sequence: Sequence) -> int:
    """Return how many tokens a completion has at least."""
    params = sequence.params
    is_fixed = params.ignore_eos and not params.stop and not params.stop_token_ids
    return sequence.max_tokens if is_fixed else max(1, params.min_tokens)
