"""A scheduler that is made again of its snapshot is the same, attribute by attribute, in every class under it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Set
from copy import copy
from dataclasses import replace
from enum import Enum
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

from pagedcore.analysis.recorder.state import build_scheduler, restore, settings_of
from pagedcore.errors import InternalError
from pagedcore.kv_cache.block_manager import BlockManager
from pagedcore.kv_cache.block_pool import BlockPool
from pagedcore.kv_cache.block_table import BlockTable
from pagedcore.kv_cache.host_cache import HostCache, Transfer
from pagedcore.kv_cache.kv_cache_manager import KVCacheManager
from pagedcore.kv_cache.prefix_cache import CachedBlock, PrefixCache
from pagedcore.kv_cache.state_blocks import StateBlocks
from pagedcore.kv_cache.window_blocks import WindowBlocks
from pagedcore.request_options import RequestOptions
from pagedcore.scheduler.adapter_slots import AdapterSlots
from pagedcore.scheduler.cost_model import CostModel, Line
from pagedcore.scheduler.plan import Preemption
from pagedcore.scheduler.policy_queues import PolicyQueues
from pagedcore.scheduler.policy_view import PolicyView, TenantLedger, TenantUsage
from pagedcore.scheduler.retention import ReuseRate
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.scheduler.stats import SchedulerCounters
from pagedcore.scheduler.step_time import StepTimeModel, StepTimes
from pagedcore.scheduler.swapping import Decision, Swapping
from pagedcore.scheduler.waiting_queue import PolicyOrder, WaitingQueue
from pagedcore.sequence import Sequence
from scheduler_lives.simulator import Simulation
from support.doubles import make_scheduler, make_sequence

SETTING = "given to the constructor, and in ``settings_of``"
WIRING = "another object of the scheduler, looked at where it is owned"
DERIVED = "an index or a cache of what is in the snapshot"
STATISTIC = "counted for people; no decision depends on it"
DRAFTS = "decides about drafts, and those of a plan are recorded"
LANDED = "of a step in flight, and there is none"
TOKENS = "decides about tokens, and these are recorded"
DOOR = "decides at the door; whoever was accepted is accepted"

LEFT_OUT: dict[type, dict[str, str]] = {
    Scheduler: {"_blocks": WIRING, "_num_pool_tokens": SETTING, "rules": SETTING, "gate": SETTING,
                "_in_flight": LANDED, "_unread": LANDED, "_drafted": LANDED, "waiting": WIRING, "running": WIRING,
                "speculation": DRAFTS, "_is_hybrid": SETTING, "_of_kind": SETTING},
    KVCacheManager: {"state_weight": SETTING},
    BlockManager: {"num_blocks": SETTING, "policy": SETTING, "block_size": SETTING, "copies_blocks": SETTING,
                   "hasher": SETTING, "window": SETTING, "_sources": LANDED, "_to_keep": LANDED, "_unsettled": LANDED},
    StateBlocks: {"num_states": SETTING, "block_size": SETTING, "written": LANDED, "_heap": DERIVED},
    WindowBlocks: {"num_windows": SETTING, "_num_blocks": SETTING, "_is_registered": WIRING},
    HostCache: {"num_blocks": SETTING, "policy": SETTING},
    BlockPool: {"num_blocks": SETTING},
    BlockTable: {"_ids": DERIVED, "_view": DERIVED, "num_changes": "tells one state of a table from others in memory"},
    PrefixCache: {"_pool": WIRING, "_policy": SETTING, "_heap": DERIVED, "num_recomputed": STATISTIC,
                  "_evicted": STATISTIC, "forget_state": WIRING, "forget_window": WIRING},
    CachedBlock: {},
    Transfer: {},
    CostModel: {"state_weight": SETTING},
    Line: {},
    PolicyQueues: {"policy": SETTING, "_is_replaced": "the policy's name is in the snapshot", "observers": DOOR,
                   "gatekeeper": DOOR, "most_tokens": "``begin_step`` finds it anew"},
    PolicyOrder: {"_key": SETTING, "_keys": DERIVED, "_key_of": DERIVED, "failure": "a key that fails, fails again"},
    WaitingQueue: {"_key": SETTING, "_keys": DERIVED, "_key_of": DERIVED, "failure": "a key that fails, fails again",
                   "limit": SETTING, "_gates_new": SETTING},
    PolicyView: {},
    TenantUsage: {},
    TenantLedger: {},
    StepTimeModel: {},
    StepTimes: {},
    SchedulerCounters: {},
    Swapping: dict.fromkeys(("_kv_cache", "_blocks", "_host", "_running", "_waiting", "_counters", "_rules"), WIRING),
    Decision: {},
    AdapterSlots: {"num_slots": SETTING, "num_bytes": SETTING},
    Preemption: {},
    ReuseRate: {"_capacity": SETTING},
    Sequence: {"params": TOKENS, "stop_token_ids": TOKENS, "constraint": TOKENS, "logprobs": TOKENS,
               "prompt_logprobs": TOKENS, "scored_as": TOKENS,
               "weights": "says which weights drew a token; what may be shared is in the cache root"},
    RequestOptions: {**dict.fromkeys(("request_id", "cache_salt", "salt"), "who may share is in the cache root"),
                     "speculate": DRAFTS, "lora": "the adapter that it stood for is in the sequence"},
}
"""Every class of a scheduler's state, and what of it no snapshot has, with the reason."""


def attributes(value: object) -> dict[str, Any]:
    """Return all attributes of an object, in a dictionary or in slots, without a method that a test has replaced."""
    slots = [name for one in type(value).__mro__ for name in getattr(one, "__slots__", ()) if name[:2] != "__"]
    names = [name for name in (*getattr(value, "__dict__", ()), *slots) if not callable(getattr(type(value), name, 0))]
    return {name: getattr(value, name) for name in names}


class Look:
    """One look at a scheduler and everything under it, as values that can be compared."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.seen: dict[tuple[str, str], list[Any]] = defaultdict(list)
        """What each attribute of each class was."""
        self.met: set[tuple[type, str]] = set()
        """Every attribute of every class, those included that are left out."""
        self._late = scheduler.kv_cache.host._timed_out
        self._whole = {one.sequence_id: one for one in (*scheduler.waiting, *scheduler.running)}
        self.scheduler = self.of(scheduler)
        self.sequences = [self._attributes(Sequence, one) for one in self._whole.values()]

    def of(self, value: Any) -> Any:
        """Return a value that equals that of an equal object."""
        match value:
            case Sequence():
                return "sequence", value.sequence_id
            case Transfer() if value.transfer_id in self._late:
                # Why: what is copied late is not used, so nobody knows what it is.
                value = replace(value, moves=tuple([one._replace(content=None) for one in value.moves]))
            case PolicyQueues() if not value.is_dynamic:
                # Why: what is learned of lengths is for views, and a static policy has none.
                value = copy(value)
                value._length_share = 1.0
        if (known := next((one for one in type(value).__mro__ if one in LEFT_OUT), None)) is not None:
            return self._attributes(known, value)
        match value:
            case OrderedDict() | deque():
                return [self.of(one) for one in (value.items() if isinstance(value, OrderedDict) else value)]
            case Mapping():
                return sorted([(self.of(key), self.of(one)) for key, one in value.items()], key=repr)
            case Set():
                return sorted(map(self.of, value))
            case list() | tuple():
                return [self.of(one) for one in value]
            case np.ndarray():
                return value.tolist()
            case count():
                return next(copy(value))
            case Enum():
                return value.value
            case int() | float() | str() | bytes() | None:
                return value
        raise AssertionError(f"{type(value).__name__} is in a scheduler's state and in no list of this test")

    def _attributes(self, known: type, value: object) -> dict[str, Any]:
        every = attributes(value)
        self.met.update((known, name) for name in every)
        found = {name: self.of(one) for name, one in every.items() if name not in LEFT_OUT[known]}
        for name, one in found.items():
            if one not in self.seen[known.__name__, name][:2]:
                self.seen[known.__name__, name].append(one)
        return found


def twin_of(scheduler: Scheduler) -> Scheduler:
    """Make a scheduler again of a snapshot."""
    twin = build_scheduler(settings_of(scheduler), lambda *_: scheduler.rules.policy)
    restore(scheduler.snapshot(), twin)
    return twin


def make_unusual(scheduler: Scheduler) -> None:
    """Set what no simulated life has."""
    queues, moves = (scheduler.waiting, scheduler.running), scheduler.moves
    for one in [one for queue in queues for one in queue]:
        one.seed, one.is_in_session, one.is_adjusted, one.num_logprobs, one.score = 7, True, True, 2, -1.5
        one.finish_reason, one.adapter = "abort", 2
        one.options = replace(one.options, ttft_ms=5.0, tpot_ms=9.0)
    scheduler.waiting.gated = {one.sequence_id for one in scheduler.waiting.never_started()}
    slots = scheduler.adapters = AdapterSlots(3, 100)
    slots.sizes, slots.slot_of, slots.loading, slots.pinned, slots.load_s = {1: 9, 2: 9, 3: 9}, {2: 1}, {1: 3}, {2}, 0.5
    scheduler.costs.loss_share = 0.25
    scheduler.counters.num_drafted_tokens, scheduler.counters.num_accepted_tokens = 5, 2
    moves.due, moves.parked = list(scheduler.kv_cache.host.in_flight.values()), {10**6}
    for decision in moves._open.values():
        decision.actual_s = 0.25


MORE_LIVES = [
    *[{"seed": seed, "has_faults": seed % 2 == 1, "has_formation": seed % 3 == 0} for seed in range(12)],
    *[{"seed": seed, "has_faults": seed % 2 == 1, "has_policies": True} for seed in range(8)],
    *[{"seed": seed, "has_faults": seed % 2 == 1, "keeps_states": True} for seed in (*range(7), 8, 87)],
    *[{"seed": seed, "has_faults": seed % 2 == 1, "has_windows": True} for seed in range(8)],
]
LIVES = [
    {"seed": 9, "has_faults": True, "has_formation": True}, {"seed": 10},
    {"seed": 1, "has_faults": True, "has_policies": True}, {"seed": 2, "has_policies": True},
    {"seed": 4, "num_short_tokens": 6}, {"seed": 5, "has_readers": True},
    {"seed": 3, "has_faults": True, "keeps_states": True}, {"seed": 8, "keeps_states": True},
    {"seed": 3, "has_faults": True, "has_windows": True},
]
"""Fewest that show two values of every attribute."""


@pytest.mark.parametrize("lives", [LIVES, pytest.param(LIVES + MORE_LIVES, marks=pytest.mark.slow)], ids=["few", "all"])
def test_every_attribute_comes_back(lives: list[dict[str, Any]]) -> None:
    """At every plan of random lives, under all policies, a scheduler that is made again of the snapshot has the
    attributes that the scheduler has, but for those that are listed above with a reason. Each of them was seen with two
    values at least, so that one that nobody copies cannot pass as what the constructor gave it.
    """
    seen, met = defaultdict[tuple[str, str], list[Any]](list), set[tuple[type, str]]()

    def compare(scheduler: Scheduler, now_s: float) -> Scheduler:
        twin = twin_of(scheduler)
        for one in (scheduler, twin):
            Scheduler.begin_step(one, now_s)
        was, made = Look(scheduler), Look(twin)
        assert made.sequences == was.sequences
        for name, value in was.scheduler.items():
            assert made.scheduler[name] == value, name
        met.update(was.met)
        for key, values in was.seen.items():
            seen[key] += [one for one in values if one not in seen[key]][: 2 - len(seen[key])]
        return twin

    def look(life: Simulation, *given: Any) -> Any:
        if life.scheduler.has_landed:
            twin = compare(life.scheduler, life.clock.now())
            make_unusual(twin)
            compare(twin, life.clock.now())
        return None if life.has_policies else Scheduler.schedule(life.scheduler, *given)

    for settings in lives:
        life = Simulation(**settings)
        # Why not at every plan: under a dynamic policy the order is another one after ``begin_step``.
        setattr(life.scheduler, "begin_step" if life.has_policies else "schedule", partial(look, life))
        life.run()
    assert sorted(f"{one}.{name}" for (one, name), values in seen.items() if len(values) < 2) == []
    assert not [name for known, names in LEFT_OUT.items() for name in names if (known, name) not in met]


def test_a_step_in_flight_is_not_copied() -> None:
    """Between ``reserve`` and its end a scheduler has no snapshot, and afterwards it has one again."""
    scheduler = make_scheduler(8, 4)
    scheduler.add_sequences(make_sequence([1, 2, 3], 4))
    plan = scheduler.schedule()
    scheduler.reserve(plan)
    with pytest.raises(InternalError, match="snapshot"):
        scheduler.snapshot()
    scheduler.rollback(plan)
    assert scheduler.snapshot()["waiting"] == [plan.admitted[0].sequence_id]
