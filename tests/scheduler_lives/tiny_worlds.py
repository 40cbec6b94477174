"""Tiny pools for the exhaustive search: what can happen in one, and what its future depends on.

A ``Life`` is a scheduler with at most four requests and at most six blocks. It can be copied, so that each event is
tried on a copy; ``exploration`` visits all lives. Two lives with the same ``Life.key`` have the same future. Why:

*   An event is a function of what a plan and a commit read. The key has all of it, in terms of roles (the requests, by
    their place in ``World.requests``), of contents and of differences:

    - of a sequence: status, numbers of tokens (which tokens they are follows from the role and the number, because a
      step samples the token 1), preemptions, which make admission promise more, protection, whether it was counted as
      looked up, as never started, as gated;
    - of a block: what the cache knows of it, which tables, pins and transfers hold it, in which order, and for idle
      ones the order in which they will be evicted;
    - of the policy: order and differences of arrival, ages, service of the tenants that are present, and step times.

*   What is left out changes no decision. Numbers of blocks: choices are by contents or by order of use, and a block
    without known contents is as good as another one; of two that have equally many first tokens of a sequence
    ``PrefixCache.find_beginning`` takes the one with the smaller tokens. Ids of sequences beyond their order. The time
    itself, counters, and the order of the queues, which each step and each insertion makes anew from the keys of the
    policy. What a shrunk sequence has lost (``CostModel.loss_share``): a step's wait costs more than computing a whole
    sequence of these, whatever the share is; ``test_no_cost_decides_in_a_tiny_pool`` holds that.
*   Differences are capped where no decision tells larger ones apart; the caps stand beside the code.

``test_exhaustive_merging`` compares this with lives that are merged only if every byte of them is the same. It notices
when transfers in flight, the order of eviction, what is idle apart from what is held, tenants, or all of the policy are
left out. No world was found in which it notices one of the parts below. They stay because code reads them:

*   preemptions, protection: admission promises more to who lost its place; a policy may not take a place from who is
    protected;
*   looked up, never started: the first admission counts found tokens once; the gate counts who never started;
*   order of arrival: queues and victims are ordered by it, within what a policy puts first;
*   tables, pins: their blocks are what a sequence gives up, and what it shares and must not be evicted;
*   phases: with separate ones the next step takes the other kind of rows first.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import FunctionType, MappingProxyType
from typing import Any, Final, Literal

from pagedcore.analysis.diagnosis.invariants import check, snapshot
from pagedcore.kv_cache.block_table import BlockTable
from pagedcore.kv_cache.host_cache import Transfer
from pagedcore.kv_cache.prefix_cache import BlockMemory
from pagedcore.request_options import RequestOptions
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler import policies
from pagedcore.scheduler.plan import SchedulePlan
from pagedcore.scheduler.policies import Policy
from pagedcore.scheduler.policy_view import PolicyView
from pagedcore.scheduler.preemption import MAX_PREEMPTIONS
from pagedcore.scheduler.step_time import StepTimes
from pagedcore.sequence import Sequence, SequenceStatus
from support.doubles import make_policy, make_scheduler, make_sequence

Event = tuple[str, int]
Requests = tuple[tuple[int, int, int], ...]
Key = tuple[Any, ...]

LIVE: Final = (SequenceStatus.WAITING, SequenceStatus.RUNNING)
_CONTINUED: Final = 100
"""Added to the arrival number of a continued sequence, which is then behind all others."""
_FAR_S: Final = 5.0
"""Seconds between two arrivals above which no policy here that orders by arrival and merit tells them apart: merits
differ by 2 priorities of 2 s each, or by 4 tokens of 1 s each, at most."""


@dataclass(frozen=True)
class TinyPolicy:
    """A policy, and what of the clock its decisions depend on, so that no more is in the key and no tick is in vain."""

    make: Callable[[], Policy]
    clock: Literal["", "arrivals", "ages", "parity"] = ""
    """Nothing; seconds between arrivals; how long each has been here; or whether the seconds are odd."""
    estimates: tuple[StepTimes, ...] = ()
    """Step times that measurements may take turns to suggest, besides the first guess."""


def fickle() -> Policy:
    """A policy that turns its order round with every tick, and lets any sequence take any other one's place."""
    def order(sequence: Sequence, view: PolicyView) -> float:
        return (1 if view.now_s % 2 else -1) * sequence.sequence_id

    return Policy("fickle", order, cache_bonus=0, is_dynamic=True, has_priorities=True, preempts=lambda *_: True)


#: Under the first, prompts are dear; under the second, every step is. A long prompt is late under one, and many tokens
#: under the other.
NOISY_TIMES: Final = StepTimes(0.0, 1.0, 0.0, 0.0), StepTimes(2.0, 0.0, 0.0, 0.0)
POLICIES: Final[dict[str, TinyPolicy]] = {
    **{name: TinyPolicy(lambda name=name: make_policy(name)) for name in ("fcfs", "priority", "static")},
    "ageing": TinyPolicy(lambda: policies.priority(ageing_s=2.0, preemption_gap=1.0), "arrivals"),
    "preempting": TinyPolicy(lambda: policies.priority(preemption_gap=1.0)),
    "deadline": TinyPolicy(policies.deadline, "ages"),
    "noisy deadline": TinyPolicy(policies.deadline, "", NOISY_TIMES),
    "fair": TinyPolicy(policies.fair),
    "capped": TinyPolicy(lambda: policies.fair(max_rows=1, max_share=0.5)),
    "fickle": TinyPolicy(fickle, "parity"),
    "shortest-first": TinyPolicy(lambda: policies.shortest_first(ageing_tokens_per_s=1.0), "arrivals"),
    "shortest-first for ever": TinyPolicy(lambda: policies.shortest_first(ageing_tokens_per_s=0.0)),
    "cache-aware": TinyPolicy(policies.cache_aware),
}


@dataclass(frozen=True)
class World:
    """A pool, a policy, and what may happen."""

    pool: tuple[int, int, int]
    """Blocks, block size, host blocks."""
    policy: str
    requests: Requests
    """(prompt, max_tokens, priority) of each; they arrive in this order, whenever they like."""
    admission: str = "optimistic"
    has_faults: bool = False
    """Whether steps fail, and requests are aborted or continued."""
    most_ticks: int = 4
    """Seconds after which a request that waits or runs stops the clock, if the policy looks at ages."""
    num_endless: int = 0
    """The first so many requests come again as soon as they have ended, for ever."""
    deadlines_s: tuple[float | None, ...] = (1.0, None, 2.5)
    """Of the requests, in turn."""
    shares_prefixes: bool = True
    formation: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    most_failures: int | None = None
    """How often a step may fail; ``None``: always."""


class Life:
    """One world after some events."""

    def __init__(self, world: World) -> None:
        num_blocks, block_size, num_host_blocks = world.pool
        self.world = world
        self.policy = POLICIES[world.policy]
        self.scheduler = make_scheduler(
            num_blocks, block_size, _policy(world.policy), admission=world.admission, num_host_blocks=num_host_blocks,
            **{"max_num_seqs": 2, "max_num_batched_tokens": 2, "preemption": "swap" if num_host_blocks else "auto",
               **world.formation},
        )
        self.scheduler.kv_cache.host.transfer_ids = _Count()  # type: ignore[assignment]
        # Why: the cache warns when it has recomputed as many blocks as it has, and would do so in every state.
        self.scheduler.kv_cache.device.cache.num_recomputed = num_blocks + 1
        self.sequences: list[Sequence] = [self._make(index, index) for index in range(len(world.requests))]
        self.num_arrived, self.now_s, self.estimate, self.num_failures = 0, 0.0, 0, 0
        self.next_number = len(world.requests)

    @classmethod
    def copy_of(cls, state: bytes, world: World) -> Life:
        """Make a life of what ``state`` returned."""
        life = cls.__new__(cls)
        life.__dict__ = pickle.loads(state)
        life.world, life.policy = world, POLICIES[world.policy]
        return life

    def state(self) -> bytes:
        """Write down everything that this life is, also what no decision depends on."""
        buffer = io.BytesIO()
        _Pickler(buffer, protocol=5).dump({
            name: value for name, value in self.__dict__.items() if name not in ("world", "policy")
        })
        return buffer.getvalue()

    def _make(self, index: int, number: int) -> Sequence:
        prompt, max_tokens, priority = self.world.requests[index]
        # Why powers of two: service over weight is then exact, so that equal sums are equal numbers.
        return make_sequence(
            prompt, max_tokens, sequence_id=number, priority=priority, arrival=number, tenant="ab"[index % 2],
            weight=2.0**index, deadline_s=self.world.deadlines_s[index % len(self.world.deadlines_s)],
            cache_root=b"" if self.world.shares_prefixes else bytes([1 + index]),
        )

    # What can happen ----------------------------------------------------------------------------------------------

    def next_events(self) -> Iterator[Event]:
        """Everything that can happen now."""
        has_faults, world = self.world.has_faults, self.world
        if self.scheduler.has_work:
            yield "step", 0
            if has_faults and (world.most_failures is None or self.num_failures < world.most_failures):
                yield "fail", 0
            if self._may_tick():
                yield "tick", 0
            if self.policy.estimates:
                yield "learn", 0
        if self.scheduler.waiting.gated:
            yield "wait", 0
        for place in range(len(self.transfers)):
            yield "arrive_transfer", place
            yield "lose_transfer", place
        if self.num_arrived < len(self.sequences):
            yield "arrive", self.num_arrived
        for index, sequence in enumerate(self.arrived):
            if index < world.num_endless and sequence.status not in LIVE:
                yield "return", index
            if has_faults and sequence.status in LIVE:
                yield "abort", index
            elif has_faults and self._may_continue(sequence):
                yield "continue", index

    def happen(self, event: Event) -> None:
        """Let something happen."""
        getattr(self, f"_{event[0]}")(event[1])

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """Those in flight, in the order in which they were booked."""
        return tuple(self.scheduler.kv_cache.host.in_flight.values())

    @property
    def arrived(self) -> list[Sequence]:
        """The sequences that have come, whatever became of them."""
        return self.sequences[: self.num_arrived]

    @property
    def is_held_up(self) -> bool:
        """Whether a step may have to change nothing: a transfer is in flight, or the gate is closed."""
        return bool(self.transfers or self.scheduler.waiting.gated)

    def _may_continue(self, sequence: Sequence) -> bool:
        return (self.world.has_faults and sequence.status not in LIVE and sequence.finish_reason != "abort"
                and sequence.arrival < _CONTINUED and self.scheduler.can_ever_fit(len(sequence.token_ids) + 2))

    def _may_come(self) -> bool:
        """Whether something can still arrive, or be continued."""
        return (self.num_arrived < len(self.sequences) or self.world.num_endless > 0
                or any(one.status in LIVE or self._may_continue(one) for one in self.arrived if self.world.has_faults))

    def _may_tick(self) -> bool:
        if self.policy.clock == "arrivals" and self.world.num_endless:
            return True
        if not self.policy.clock or (self.policy.clock == "arrivals" and not self._may_come()):
            return False
        ages = [self.now_s - one.arrival_s for one in self.arrived if one.status in LIVE]
        return self.policy.clock == "parity" or all(age < self.world.most_ticks for age in ages)

    def _wait(self, _: int) -> None:
        """The oldest has waited long enough."""
        self.scheduler.waiting.open_gate()

    def _tick(self, _: int) -> None:
        # Why: a policy that looks at odd and even seconds cannot tell the third second from the first.
        self.now_s = (self.now_s + 1.0) % 2 if self.policy.clock == "parity" else self.now_s + 1.0

    def _learn(self, _: int) -> None:
        """Measurements have changed what steps are thought to take."""
        self.estimate = 1 + self.estimate % len(self.policy.estimates)
        self.scheduler.costs.steps.times = self.policy.estimates[self.estimate - 1]

    def plan(self) -> SchedulePlan:
        """Decide the next step, with all the room made that it asks for."""
        self.scheduler.begin_step(self.now_s)
        waiting = self.scheduler.waiting
        if waiting.gated and self.scheduler.gate.opens_s(waiting.num_never_started, 0.0) < 0.0:
            waiting.open_gate()
        self.scheduler.moves.take_due()
        plan, num_rooms = self.scheduler.schedule(), 0
        while plan.moves_blocks:
            num_rooms += 1
            assert num_rooms < 20, "room is made without end"
            self.scheduler.make_room(plan)
            assert check(snapshot(self.scheduler)) == []
            plan = self.scheduler.schedule()
        return plan

    def _step(self, _: int) -> None:
        plan = self.plan()
        if plan.rows:
            self.scheduler.reserve(plan)
            self.scheduler.commit(plan, {row.sequence.sequence_id: 1 for row in plan.rows if row.num_sampled})

    def _fail(self, _: int) -> None:
        plan = self.plan()
        self.num_failures += 1
        if plan.rows:
            self.scheduler.reserve(plan)
            assert check(snapshot(self.scheduler)) == []
            self.scheduler.rollback(plan)

    def _arrive_transfer(self, place: int) -> None:
        self.scheduler.moves.complete_transfer(self.transfers[place].transfer_id, 0.0, is_ok=True)

    def _lose_transfer(self, place: int) -> None:
        self.scheduler.moves.complete_transfer(self.transfers[place].transfer_id, 0.0, is_ok=False)

    def _arrive(self, index: int) -> None:
        self.sequences[index].arrival_s = self.now_s
        self.scheduler.add_sequences(self.sequences[index])
        self.num_arrived += 1

    def _return(self, index: int) -> None:
        """The same is asked for once more."""
        self.scheduler.remove_sequence(self.sequences[index])
        self.sequences[index] = self._make(index, self.next_number)
        self.sequences[index].arrival_s = self.now_s
        self.next_number += 1
        self.scheduler.add_sequences(self.sequences[index])

    def _abort(self, index: int) -> None:
        self.scheduler.finish_sequence(self.sequences[index], "abort")

    def _continue(self, index: int) -> None:
        sequence = self.sequences[index]
        sequence.begin_turn([1], sequence.params, max_tokens=1, stop_token_ids=frozenset(),
                            arrival=_CONTINUED + sequence.arrival, arrival_s=self.now_s)
        self.scheduler.add_sequences(sequence)

    # What the future depends on -----------------------------------------------------------------------------------

    def key(self) -> Key:
        """What decisions depend on; see the module for why there is nothing else."""
        world, scheduler = self.world, self.scheduler
        kv_cache = scheduler.kv_cache
        roles = {one.sequence_id: role for role, one in enumerate(self.sequences)}
        here, there = _Names(kv_cache.device), _Names(kv_cache.host)
        tables = tuple(
            (table.num_registered, here.of(table.block_ids.tolist()))
            if (table := kv_cache.device._tables.get(one.sequence_id)) is not None else None for one in self.sequences
        )
        pins = tuple(there.of(kv_cache.host.pins.get(one.sequence_id, ())) for one in self.sequences)
        moving = tuple(
            (roles.get(one.sequence_id), one.direction.name, one.num_tokens, one.is_pinned,
             one.transfer_id in kv_cache.host._cancelled, here.of(one.device_blocks), there.of(one.host_blocks),
             # Why no destinations: they have no known contents, and are among the blocks before in the same order.
             tuple(map(_number_of, [move.content.key for move in one.moves])))
            for one in self.transfers
        )
        return (
            self.num_arrived, tuple(map(self._of_sequence, self.sequences)), self._arrivals(), tables, pins, moving,
            here.cached(), there.cached(), scheduler._phases, self._of_policy(),
            0 if world.most_failures is None else self.num_failures,
        )

    def _is_over(self, sequence: Sequence) -> bool:
        """Whether nothing depends any more on what a sequence was."""
        return sequence.status not in LIVE and not self._may_continue(sequence)

    def _of_sequence(self, one: Sequence) -> Key | None:
        if self._is_over(one):
            return None
        waiting, policy = self.scheduler.waiting, self.scheduler.rules.policy
        reads_protection = policy.is_dynamic or policy.preempts is not None
        return (
            one.status.value, len(one.token_ids), one.num_computed_tokens, one.max_total_tokens,
            # Why capped: more make no difference to whether it is spared, and it has promises for all its length then.
            min(one.num_preemptions, MAX_PREEMPTIONS),
            one.num_protected_tokens if reads_protection and one.status in LIVE else 0,
            one.num_cached_tokens is None, waiting.is_never_started(one), one.sequence_id in waiting.gated,
        )

    def _arrivals(self) -> Key:
        """The live sequences in order of arrival with the differences, as far as a policy can tell."""
        live = [(one.arrival, role) for role, one in enumerate(self.arrived) if one.status in LIVE]
        most = self.scheduler.rules.policy.cache_bonus + 1
        live.sort()
        apart = tuple(min(most, after[0] - before[0]) for before, after in pairwise(live))
        newest = min(most, self.next_number - live[-1][0]) if live and self.world.num_endless else 0
        return tuple(role for _, role in live), apart, newest, any(arrival >= _CONTINUED for arrival, _ in live)

    def _of_policy(self) -> Key:
        queues = self.scheduler.queues
        tenants: Key = ()
        if (ledger := queues.ledger) is not None:
            had = {name: ledger.virtual.get(name, 0.0) for name in "ab"}
            # Why: a floor below all tenants lifts none, and the next start raises it to one of them.
            floor = max(ledger.floor, min(had.values()))
            known = ledger._waiting | {one.options.tenant for one in self.scheduler.running}
            # Why 0: another tenant that has had less is lifted to the floor as soon as it is seen to wait.
            tenants = tuple(
                (name in ledger._waiting, tokens - floor if name in known else max(0.0, tokens - floor))
                for name, tokens in had.items()
            )
        return self._times(), tenants, queues._length_share, self.estimate

    def _times(self) -> Key:
        clock, live = self.policy.clock, [one for one in self.arrived if one.status in LIVE]
        if clock == "parity":
            return (self.now_s,)
        if clock == "ages":
            return tuple(self.now_s - one.arrival_s if one.status in LIVE else None for one in self.arrived)
        if clock == "arrivals":
            # Why no ages: such a policy compares moments of arrival, of those that are here or still come.
            moments = sorted((one.arrival_s, role) for role, one in enumerate(self.arrived) if one.status in LIVE)
            apart = tuple(min(_FAR_S, after[0] - before[0]) for before, after in pairwise(moments))
            newest = min(_FAR_S, self.now_s - moments[-1][0]) if live and self._may_come() else 0.0
            return tuple(role for _, role in moments), apart, newest
        return ()


class _Names:
    """Names of the blocks of one memory that do not depend on their numbers.

    A block with known contents is named by their key; another one by when it is met in an order that the key fixes.
    """

    def __init__(self, memory: BlockMemory) -> None:
        self._known = memory.cache._by_block
        self._idle = memory._pool.idle_blocks
        self._met: dict[int, int] = {}

    def of(self, block_ids: Iterable[int]) -> tuple[int, ...]:
        """Return the names of blocks: 0 or more for known contents, less for others."""
        known, met = self._known, self._met
        return tuple(
            _number_of(known[one].content.key) if one in known else met.setdefault(one, -1 - len(met))
            for one in block_ids
        )

    def cached(self) -> Key:
        """What is known of held blocks, and of idle ones in the order of their last use."""
        known, idle = self._known, self._idle
        held = sorted(_number_of(one.content.key) for number, one in known.items() if number not in idle)
        by_use = sorted((one.rank, _number_of(one.content.key)) for number, one in known.items() if number in idle)
        return tuple(held), tuple(name for _, name in by_use)


class _Count:
    """As ``itertools.count(1)``, and can be copied."""

    def __init__(self) -> None:
        self.number = 0

    def __next__(self) -> int:
        self.number += 1
        return self.number


_made: dict[str, Policy] = {}
_numbers: dict[bytes, int] = {}
_shared: dict[int, object] = {}


def _policy(name: str) -> Policy:
    return _made.setdefault(name, POLICIES[name].make())


def _number_of(key: bytes) -> int:
    """A number for each content key, which is shorter."""
    return _numbers.setdefault(key, len(_numbers))


def _get_shared(number: int) -> object:
    return _shared[number]


def _make_table(block_ids: list[int], num_registered: int) -> BlockTable:
    table = BlockTable()
    table.append(block_ids)
    table.num_registered = num_registered
    return table


class _Pickler(pickle.Pickler):
    """Copies a scheduler; what never changes is shared between the copies."""

    def reducer_override(self, obj: Any) -> Any:
        is_local = isinstance(obj, FunctionType) and "<" in obj.__qualname__
        if is_local or isinstance(obj, Policy | SamplingParams | RequestOptions):
            _shared[id(obj)] = obj
            return _get_shared, (id(obj),)
        if isinstance(obj, BlockTable):
            return _make_table, (obj.block_ids.tolist(), obj.num_registered)
        return NotImplemented
