"""Batch formation for engines of your own: the gate, the policies and the bounds of ``Engine``, without a model.

A step of your engine takes ``try_form_batch``'s requests; which of them run how long is your engine's business.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count

from pagedcore.config.engine_config import EngineConfig
from pagedcore.config.field_rules import COUNT, integer, invalid_setting
from pagedcore.errors import InvalidRequest
from pagedcore.plugins.manager import create_plugin_manager
from pagedcore.protocols import Clock, MonotonicClock
from pagedcore.request_options import RequestOptions
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler.batch_gate import BatchGate
from pagedcore.scheduler.plan import ScheduledRow
from pagedcore.scheduler.policy_guard import make_policy
from pagedcore.scheduler.policy_queues import PolicyQueues
from pagedcore.sequence import Sequence


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request of an engine of your own.

    Raises:
        InvalidRequest: a number is out of its range.
    """

    request_id: Hashable
    """Yours; no two that wait have the same."""
    input_tokens: int
    """Tokens of the prompt."""
    max_new_tokens: int = 1
    priority: int = 0
    """Higher starts first under a policy that has priorities; others refuse any but 0."""
    tenant: str = ""
    """Who is served, under a policy that looks at tenants: its tokens, prompt and longest completion, count for it when
    it is taken."""
    weight: float = 1.0
    """Share of its tenant beside others, under such a policy; others refuse any but 1."""
    deadline_s: float | None = None
    """When it has to end, in seconds from ``add``, under a policy that has deadlines; others refuse any. How long your
    engine takes is not known here: two requests are compared as if each token took as long as on a small model."""
    options: RequestOptions = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        COUNT.check("input_tokens", self.input_tokens)
        COUNT.check("max_new_tokens", self.max_new_tokens)
        object.__setattr__(self, "options", RequestOptions(
            priority=self.priority, tenant=self.tenant, weight=self.weight, deadline_s=self.deadline_s
        ))


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that start together, in the policy's order; at least one."""

    requests: tuple[BatchRequest, ...]
    waits_s: tuple[float, ...]
    """How long each of them has waited, in seconds."""

    def size(self) -> int:
        """Return the number of requests."""
        return len(self.requests)

    @property
    def total_input_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(request.input_tokens for request in self.requests)

    def avg_wait_time(self) -> float:
        """Return the mean of the waits, in seconds."""
        return sum(self.waits_s) / len(self.waits_s)

    def max_wait_time(self) -> float:
        """Return the longest wait, in seconds."""
        return max(self.waits_s)


class ContinuousBatcher:
    """Forms batches of waiting requests; for one thread at a time.

    Of an ``EngineConfig`` it heeds ``max_num_seqs`` (requests of a batch), ``max_num_batched_tokens`` (their prompt
    tokens together), ``min_batch_size``, ``max_wait_ms``, ``max_num_waiting`` and ``scheduling_policy``.

    Invariant: a request that was added is in exactly one batch, unless it is removed before.
    """

    def __init__(self, config: EngineConfig | None = None, *, clock: Clock | None = None) -> None:
        """Take the settings, and the clock that waits are measured by.

        Raises ``InvalidConfig``: no such policy, or one that looks at what runs: with caps on tenants, or that sheds.
        """
        self.config = config if config is not None else EngineConfig()
        self._clock: Clock = clock if clock is not None else MonotonicClock()
        make = create_plugin_manager().registry.schedulers.load(self.config.scheduling_policy)
        policy = make_policy(make, self.config.policy_options)
        if policy.sheds_late or policy.max_tenant_rows is not None or policy.max_tenant_share is not None:
            raise invalid_setting("policy_options", policy.name, "a policy without caps and shedding: what runs in "
                                  "your engine, and how long it takes, is not known here")
        self._gate = BatchGate(self.config.min_batch_size, self.config.max_wait_s)
        self._queues = PolicyQueues(policy, self.config.waiting_limit, gates_new=False)
        self._waiting = self._queues.waiting
        self._added: dict[int, BatchRequest] = {}
        self._by_id: dict[Hashable, Sequence] = {}
        self._ids = count()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: BatchRequest) -> None:
        """Let a request wait.

        Raises:
            InvalidRequest: its prompt is larger than a batch, its id waits already, or it has a priority, a weight or a
                deadline that the policy does not look at.
            EngineOverloaded: as many wait as ``max_num_waiting`` allows.
        """
        integer(1, self.config.max_num_batched_tokens).check("input_tokens", request.input_tokens)
        if request.request_id in self._by_id:
            raise InvalidRequest("request_id", request.request_id, "an id that does not wait")
        for name, neutral in self._queues.policy.unread_options.items():
            if (given := getattr(request.options, name)) != neutral:
                raise InvalidRequest(name, given, f"{neutral} under the policy {self._queues.policy.name!r}")
        number = next(self._ids)
        sequence = Sequence(
            number, [0] * request.input_tokens, SamplingParams(max_tokens=request.max_new_tokens),
            max_tokens=request.max_new_tokens, seed=0, arrival=number, arrival_s=self._clock.now(),
            options=request.options,
        )
        self._waiting.push(sequence)
        self._added[number], self._by_id[request.request_id] = request, sequence

    def remove(self, request_id: Hashable) -> bool:
        """Remove a request, and return whether it waited."""
        sequence = self._by_id.get(request_id)
        return sequence is not None and self._take(sequence) is not None

    def gated_s(self) -> float | None:
        """Return after how many seconds there is a batch if no request comes; 0: now; ``None``: none waits."""
        oldest = next(self._waiting.never_started(), None)
        if oldest is None:
            return None
        opens_s = self._gate.opens_s(len(self._waiting), oldest.arrival_s)
        return max(0.0, opens_s - self._clock.now())

    def try_form_batch(self) -> Batch | None:
        """Take the next batch; ``None`` if too few wait, and the oldest not long enough.

        Requests are taken in the policy's order, until one more would be too many or its prompt too much.
        """
        if self.gated_s() != 0.0:
            return None
        self._queues.renew_view(self._clock.now(), lambda _: 0)
        self._queues.demote_failed()
        budget, chosen = self.config.max_num_batched_tokens, list[Sequence]()
        for sequence in self._waiting.sequences[: self.config.max_num_seqs]:
            budget -= sequence.num_prompt_tokens
            if budget < 0:
                break
            chosen.append(sequence)
        if self._queues.ledger is not None:
            self._queues.ledger.charge(chosen, [ScheduledRow(one, 0, one.max_total_tokens) for one in chosen])
        now_s = self._clock.now()
        return Batch(tuple(map(self._take, chosen)), tuple(now_s - one.arrival_s for one in chosen))

    def _take(self, sequence: Sequence) -> BatchRequest:
        self._waiting.remove_sequence(sequence)
        taken = self._added.pop(sequence.sequence_id)
        del self._by_id[taken.request_id]
        return taken
