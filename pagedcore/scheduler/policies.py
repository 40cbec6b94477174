"""Scheduling policies: sort keys and permissions, never a scheduler of their own.

Sequences are admitted in the order of a key, and preempted in the reverse order. A policy is made by a function that is
registered in the plugin table ``schedulers`` and returns a ``Policy``; its keyword arguments are what
``EngineConfig.policy_options`` may hold. How the built-in ones choose, and which is for what, is in docs/scheduling.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pagedcore.config.field_rules import BOOLEAN, COUNT, integer, invalid_setting, number
from pagedcore.config.limits import MAX_PRIORITY, MAX_TIMEOUT_S
from pagedcore.request_options import NO_OPTIONS, OPTIONS
from pagedcore.scheduler.policy_view import PolicyView
from pagedcore.scheduler.waiting_queue import BY_ARRIVAL
from pagedcore.sequence import Sequence

_SECONDS: Final = number(0, MAX_TIMEOUT_S, above_low=True)
_GAP: Final = number(0, 2 * MAX_PRIORITY, above_low=True).or_none()
_SHARE: Final = number(0, 1, above_low=True).or_none()
_RATE: Final = number(0, 1e9)
_LATE: Final = 1e12
"""Slack above which no request comes, in seconds."""
_PLACES: Final = integer(0, 128)


@dataclass(frozen=True, slots=True)
class Policy:
    """How sequences are ordered, when waiting ones may start, and whether they may take the place of running ones.

    A policy of which a function raises, or gives values that cannot be ordered (NaN), or takes too long, is replaced by
    "fcfs"; the engine logs it once.
    """

    name: str
    order: Callable[..., Any]
    """Sort key, smallest first; ties go by sequence id. A static policy's is called with the sequence, once when it is
    added to a queue; a dynamic one's with the sequence and a ``PolicyView``, once in every step."""
    admits_while_running: bool = True
    """``False``: a new batch starts only when the one before has finished completely."""
    has_priorities: bool = False
    """Whether the order looks at ``RequestOptions.priority``; if not, requests with another one than 0 are refused."""
    cache_bonus: int = 8
    """How many arrivals later a request with a cached prefix may be and still start first; it gains one place for each
    cached block. No request is overtaken by more later ones than this. It holds among waiting sequences that the policy
    has in order of arrival."""
    is_dynamic: bool = False
    """Whether keys change while sequences wait or run."""
    victim_order: Callable[..., Any] | None = None
    """Sort key of the running sequences, called as ``order``: the last one is preempted first; ``None``: ``order``."""
    preempts: Callable[[Sequence, Sequence, PolicyView], bool] | None = None
    """Whether a waiting sequence may take the place of a running one. Asked for the first waiting one, when it lacks a
    row or blocks, about the running ones from the last on until the answer is no; never about one that has not regained
    what its last preemption took, and one more token."""
    has_tenants: bool = False
    """Whether it looks at tenants: at ``RequestOptions.weight``, and at the usage in a view, which is empty if not."""
    has_deadlines: bool = False
    """Whether it looks at ``RequestOptions.deadline_s``, and unless it promises at the targets beside it."""
    sheds_late: bool = False
    """Whether requests end with ``DeadlineMissed`` that were not started and cannot end in time any more."""
    promises: bool = False
    """Whether a request with a ``deadline_s`` is accepted only if it will end in time, and no other one if it would
    make such a request late."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What ``make_policy`` made it with."""
    max_tenant_rows: int | None = None
    """Most running sequences of one tenant; further ones wait, and let others pass."""
    max_tenant_share: float | None = None
    """Largest share of the pool that the running sequences of one tenant may come to need, each at its longest; one
    sequence of a tenant may always run."""

    @property
    def has_targets(self) -> bool:
        """Whether it looks at ``ttft_ms`` and ``tpot_ms``."""
        return self.has_deadlines and not self.promises

    @property
    def unread_options(self) -> dict[str, Any]:
        """The request options that the policy does not look at, with the values that mean nothing."""
        return {name: getattr(NO_OPTIONS, name) for name, facts in OPTIONS.items()
                if facts.reader is not None and not getattr(self, facts.reader.trait)}


def fcfs() -> Policy:
    """First come, first served."""
    return Policy("fcfs", BY_ARRIVAL)


def priority(ageing_s: float | None = None, preemption_gap: float | None = None) -> Policy:
    """Highest priority first, first come first served among equals.

    With ageing a request gains a priority for each ``ageing_s`` seconds that it has waited. All age at the same pace,
    so two keys never change their order, and the policy is static.

    Args:
        ageing_s: ``None``: priorities do not age, and a low one waits as long as higher ones come.
        preemption_gap: a waiting request takes the place of a running one whose priority, with what both gained by
            age, is lower by this or more; ``None``: it waits.
    """
    gap = _check("preemption_gap", preemption_gap, _GAP)
    pace = 0.0 if ageing_s is None else 1.0 / _check("ageing_s", ageing_s, _SECONDS)

    def rank(sequence: Sequence) -> float:
        return sequence.arrival_s * pace - sequence.priority

    def preempts(waiting: Sequence, running: Sequence, _: PolicyView) -> bool:
        return bool(rank(waiting) + gap <= rank(running))

    return Policy(
        "priority", lambda sequence: (rank(sequence), sequence.arrival), has_priorities=True,
        preempts=None if gap is None else preempts,
    )


def deadline(default_s: float = 60.0, sheds: bool = False, promises: bool = False) -> Policy:
    """Least slack first: the time left until a request has to end, less what it needs until then.

    Requests that cannot end in time any more come behind all that can, first come first served, and the first of these
    takes the place of one that runs.

    Why it makes progress: a running sequence is late or not, and lateness does not end; a sequence that was preempted
    runs first when it is back, until it has one token more than before. So preemptions are finite in number.

    Args:
        default_s: what a request without a deadline is ordered by, as if it had this one.
        sheds: whether a request that was not started ends with ``DeadlineMissed`` once it cannot end in time, however
            short its completion.
        promises: whether a request with a deadline is accepted only if it will end in time. What was accepted then
            runs without a break, the earliest deadline first, and requests without one last; not beside ``sheds``.
    """
    default_s = _check("default_s", default_s, _SECONDS)
    if _check("promises", promises, BOOLEAN):
        if sheds:
            raise invalid_setting("policy_options.promises", promises, "False beside sheds: what is promised is kept")
        return Policy("deadline", lambda one: (one.deadline_s, one.arrival), cache_bonus=0, has_deadlines=True,
                      promises=True)

    def slack_s(sequence: Sequence, view: PolicyView) -> float:
        options = sequence.options
        age_s = view.now_s - sequence.arrival_s
        slack: float = (options.deadline_s or default_s) - age_s - view.remaining_s(sequence)
        if options.ttft_ms is not None and not sequence.num_output_tokens:
            first = options.ttft_ms / 1000.0 - age_s - view.remaining_s(sequence, 1)
            # Why: a first token that is late already makes the rest no more urgent.
            slack = min(slack, first) if first >= 0.0 else slack
        return slack

    def order(sequence: Sequence, view: PolicyView) -> float:
        slack = slack_s(sequence, view)
        # Why no tuple: a thousand of them in every step keep Python's garbage collector busy.
        return slack if slack >= 0.0 else _LATE + sequence.arrival_s

    return Policy(
        "deadline", order, cache_bonus=0, is_dynamic=True, has_deadlines=True,
        sheds_late=_check("sheds", sheds, BOOLEAN),
        preempts=lambda waiting, running, view: slack_s(waiting, view) >= 0.0 > slack_s(running, view),
    )


def fair(max_rows: int | None = None, max_share: float | None = None) -> Policy:
    """The tenant that has had least first, by computed tokens over its weight; first come first served in a tenant.

    Why it makes progress: computed tokens never become fewer, so a tenant that runs falls behind the others, which are
    finite in number; a sequence that was preempted runs first when it is back, until it has one token more than before.

    Args:
        max_rows: most running sequences of one tenant.
        max_share: largest share of the KV pool that one tenant's running sequences may come to need.
    """
    def order(sequence: Sequence, view: PolicyView) -> float:
        had = view.usage_of(sequence.options.tenant).virtual_tokens
        return had + view.ahead.get(sequence.sequence_id, 0.0)

    return Policy(
        "fair", order, cache_bonus=0, is_dynamic=True, has_tenants=True,
        victim_order=lambda one, view: (view.usage_of(one.options.tenant).virtual_tokens, one.arrival),
        max_tenant_rows=_check("max_rows", max_rows, COUNT.or_none()),
        max_tenant_share=_check("max_share", max_share, _SHARE),
    )


def shortest_first(ageing_tokens_per_s: float = 100.0) -> Policy:
    """Fewest tokens first, prompt and longest completion together; the order is fixed when a request comes.

    Args:
        ageing_tokens_per_s: a request counts as so many tokens shorter for each second that it has waited; 0: long
            requests wait as long as short ones come.
    """
    pace = _check("ageing_tokens_per_s", ageing_tokens_per_s, _RATE)
    return Policy(
        "shortest-first", lambda one: (one.max_total_tokens + one.arrival_s * pace, one.arrival), cache_bonus=0
    )


def cache_aware(bonus: int = 32) -> Policy:
    """First come, first served, but requests whose beginning is cached start up to ``bonus`` arrivals earlier."""
    return Policy("cache-aware", BY_ARRIVAL, cache_bonus=_check("bonus", bonus, _PLACES))


def static() -> Policy:
    """First come, first served, in batches that run to their end: static batching, for comparison."""
    return Policy("static", BY_ARRIVAL, admits_while_running=False, cache_bonus=0)


def _check(name: str, value: Any, rule: Any) -> Any:
    return rule.check(f"policy_options.{name}", value, invalid_setting)
