"""A scheduler and its KV cache between two steps as plain values, and made again of them: where a replay begins.

No content key is part of it: keys follow from tokens, and whoever makes a state again computes them anew. Statistics
that no decision depends on (blocks that were recomputed) are left out.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import asdict, astuple, fields, replace
from enum import Enum
from itertools import count
from typing import Any, Final

import numpy as np

from pagedcore.kv_cache.block_table import BlockTable
from pagedcore.kv_cache.eviction import POLICIES
from pagedcore.kv_cache.host_cache import BlockMove, Direction, Transfer
from pagedcore.kv_cache.kv_cache_manager import KVCacheManager
from pagedcore.kv_cache.prefix_cache import BlockMemory, CachedBlock, Content
from pagedcore.kv_cache.prefix_match import contents
from pagedcore.outputs import FinishReason
from pagedcore.request_options import RequestOptions
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler.batch_gate import BatchGate
from pagedcore.scheduler.cost_model import CostModel, Line
from pagedcore.scheduler.plan import Preemption, PreemptionKind
from pagedcore.scheduler.policies import Policy
from pagedcore.scheduler.policy_queues import PolicyQueues
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.scheduler.step_time import StepTimes
from pagedcore.scheduler.swapping import Decision
from pagedcore.sequence import Sequence, SequenceStatus

State = dict[str, Any]
_NOT_PLAIN: Final = frozenset({
    "token_ids", "params", "stop_token_ids", "cache_root", "block_keys", "logprobs", "prompt_logprobs", "status",
    "options", "constraint",
})
_OPTIONS: Final = ("priority", "tenant", "weight", "deadline_s", "ttft_ms", "tpot_ms")
"""What of its request's options decisions about a sequence depend on."""
_UNKNOWN: Final = Content(b"", b"", (), True)
_PLAIN: Final = frozenset(one.name for one in fields(Sequence)) - _NOT_PLAIN
_PLAIN_TYPES: Final = (int, float, str, bytes, type(None))
"""Of what a policy may look at; others, such as the state of a grammar, decide tokens only, and these are recorded."""


class ReplayedSequence(Sequence):
    """A sequence whose tokens and end are known: a recorded one. It ends when ``next_end`` says so."""

    next_end: FinishReason | None = None

    def append_token(self, token_id: int) -> FinishReason | None:
        """Append the recorded token; return the recorded end."""
        self.token_ids.append(token_id)
        end, self.next_end = self.next_end, None
        return end


def describe(sequence: Sequence) -> State:
    """Copy what decisions about a sequence depend on, and how its tokens are sampled."""
    scored, options = sequence.prompt_logprobs, sequence.options
    plain = {name: value for name in _PLAIN if isinstance(value := getattr(sequence, name), _PLAIN_TYPES)}
    plain |= {name: getattr(options, name) for name in _OPTIONS}
    return {
        "plain": plain, "status": sequence.status.value,
        "num_keys": len(sequence.block_keys), "num_scored": None if scored is None else len(scored),
        "num_sequences": sequence.params.num_sequences, "num_tokens": len(sequence.token_ids),
        "tokens": array("q", sequence.token_ids), "root": sequence.cache_root, "params": sequence.params,
    }


def sequence_of(described: Mapping[str, Any], known: ReplayedSequence | None = None) -> ReplayedSequence:
    """Make a sequence as it was described, or let a known one be as described; its block keys are the caller's."""
    plain, num_scored = described["plain"], described["num_scored"]
    params = SamplingParams(n=described["num_sequences"])
    one = known if known is not None else ReplayedSequence(
        plain["sequence_id"], [], params, max_tokens=plain["max_tokens"], seed=plain["seed"],
        cache_root=described["root"],
    )
    for name in _PLAIN & plain.keys():
        setattr(one, name, plain[name])
    one.options = RequestOptions(**{name: plain[name] for name in _OPTIONS})
    one.token_ids, one.params = list(described["tokens"]), params
    one.prompt_logprobs = None if num_scored is None else [None] * num_scored  # type: ignore[list-item]
    one.status = SequenceStatus(described["status"])
    return one


def settings_of(scheduler: Scheduler) -> State:
    """Return what a scheduler like this one is built with."""
    rules, device, host = scheduler.rules, scheduler.kv_cache.device, scheduler.kv_cache.host
    return {
        "num_blocks": device.num_blocks, "block_size": device.block_size, "num_host_blocks": host.num_blocks,
        "eviction": next(name for name, policy in POLICIES.items() if policy is device._policy),
        "copies_blocks": device._copies_blocks, "policy": rules.policy.name,
        "policy_options": dict(rules.policy.options), "max_num_seqs": rules.max_num_seqs,
        "max_num_batched_tokens": rules.max_num_batched_tokens, "max_num_waiting": scheduler.waiting.limit,
        "admission": "guaranteed" if rules.is_guaranteed else "optimistic", "preemption": rules.preemption.mode,
        "max_scored_tokens": rules.max_scored_tokens, "prefill_share": rules.prefill_share,
        "phases": "separate" if len(scheduler._phases) > 1 else "mixed",
        "min_batch_size": scheduler.gate.min_batch_size, "max_wait_s": scheduler.gate.max_wait_s,
    }


def build_scheduler(settings: Mapping[str, Any], load_policy: Callable[[str, Any], Policy]) -> Scheduler:
    """Build an empty scheduler with these settings, and with a policy of that name and those options."""
    kv_cache = KVCacheManager(
        settings["num_blocks"], settings["block_size"], num_host_blocks=settings["num_host_blocks"],
        policy=POLICIES[settings["eviction"]], copies_blocks=settings["copies_blocks"],
    )
    names = ("max_num_seqs", "max_num_batched_tokens", "max_num_waiting", "admission", "preemption",
             "max_scored_tokens", "prefill_share", "phases")
    return Scheduler(
        kv_cache, load_policy(settings["policy"], settings["policy_options"]),
        gate=BatchGate(settings["min_batch_size"], settings["max_wait_s"]),
        **{name: settings[name] for name in names},
    )


def capture(scheduler: Scheduler) -> State:
    """Copy a scheduler's state while no step is in flight."""
    kv_cache, moves, waiting = scheduler.kv_cache, scheduler.moves, scheduler.waiting
    decided = [decision.preemption.sequence for decision in moves._open.values()]
    live = {one.sequence_id: one for one in (*waiting, *scheduler.running, *moves._moving.values(), *decided)}
    return {
        "sequences": [describe(one) for one in live.values()],
        "waiting": _ids(waiting), "running": _ids(scheduler.running), "gated": sorted(waiting.gated),
        "never_started": _ids(waiting.never_started()), "policy": scheduler.rules.policy.name,
        "phases": list(scheduler._phases), "counters": _by_value(asdict(scheduler.counters)),
        "costs": _costs(scheduler.costs), "queues": _queues(scheduler.queues),
        "device": {**_memory(kv_cache.device), "tables": [
            [number, one.block_ids.tolist(), one.num_registered] for number, one in kv_cache.device._tables.items()
        ]},
        "host": {
            **_memory(kv_cache.host), "pins": [[number, list(blocks)] for number, blocks in kv_cache.host.pins.items()],
            "in_flight": [
                _transfer(one, moves._moving.get(one.transfer_id), kv_cache) for one in kv_cache.host.in_flight.values()
            ],
            "cancelled": sorted(kv_cache.host._cancelled), "timed_out": sorted(kv_cache.host._timed_out),
            "next_transfer_id": next(copy(kv_cache.host.transfer_ids)),
        },
        "moves": {
            "open": [[number, one.preemption.kind.value, one.preemption.estimated_s, one.preemption.num_left_tokens,
                      one.num_computed_tokens, one.actual_s] for number, one in moves._open.items()],
            "moving": [[number, one.sequence_id] for number, one in moves._moving.items()],
            "parked": sorted(moves.parked), "due": [one.transfer_id for one in moves.due],
            "left": list(moves._reuse._left), "num_left": moves._reuse._num_left,
            "num_wanted": moves._reuse._num_wanted,
        },
    }


def _ids(sequences: Iterable[Sequence]) -> list[int]:
    return [one.sequence_id for one in sequences]


def _by_value(counters: Mapping[str, Any]) -> State:
    return {name: {_plain_key(key): one for key, one in value.items()} if isinstance(value, dict) else value
            for name, value in counters.items()}


def _plain_key(key: Any) -> Any:
    return key.value if isinstance(key, Enum) else key


def _costs(costs: CostModel) -> State:
    lines = {"step": costs.step, **{way.value: line for way, line in costs.moves.items()}}
    return {
        "lines": {name: [line.fixed_s, line.per_unit_s, *line._sums] for name, line in lines.items()},
        "loss_share": costs.loss_share, "num_estimates": costs.num_estimates,
        "sum_relative_error": costs.sum_relative_error,
    }


def _queues(queues: PolicyQueues) -> State | None:
    """Copy what a dynamic policy's views are made of; ``None`` under a static one."""
    model, ledger = queues.step_times, queues.ledger
    return None if model is None else {
        "view": queues.view.number, "length_share": queues._length_share, "times": list(astuple(model.times)),
        "num_observed": model.num_observed, "errors": list(model.errors), "spread": model._spread,
        "moments": model._moments.tolist(), "floor": 0.0 if ledger is None else ledger.floor,
        "virtual": [] if ledger is None else [
            [tenant, tokens, tenant in ledger._waiting] for tenant, tokens in ledger.virtual.items()
        ],
    }


def _restore_queues(queues: PolicyQueues, saved: Mapping[str, Any] | None) -> None:
    if saved is None or (model := queues.step_times) is None:
        return
    queues.view, queues._length_share = replace(queues.view, number=saved["view"]), saved["length_share"]
    model.times, model.num_observed = StepTimes(*saved["times"]), saved["num_observed"]
    model.errors.extend(saved["errors"])
    model._spread, model._moments = saved["spread"], np.array(saved["moments"])
    if queues.ledger is not None:
        queues.ledger.floor = saved["floor"]
        queues.ledger.virtual = {tenant: tokens for tenant, tokens, _ in saved["virtual"]}
        queues.ledger._waiting = {tenant for tenant, _, is_waiting in saved["virtual"] if is_waiting}


def _memory(memory: BlockMemory) -> State:
    cache, pool = memory.cache, memory._pool
    places = {key: place for place, key in enumerate(cache._by_key)}
    return {
        "free": list(pool.free_blocks), "counts": list(pool.reference_counts), "num_uses": cache._num_uses,
        "num_evictions": cache.num_evictions,
        "entries": [
            [one.block_id, -1 if one.content.is_first else places[one.content.parent_key], one.first_used,
             one.last_used, one.num_hits, list(one.rank)] for one in cache._by_key.values()
        ],
        "tokens": [one.content.token_ids for one in cache._by_key.values()],
        "roots": [one.content.parent_key if one.content.is_first else b"" for one in cache._by_key.values()],
    }


def _transfer(one: Transfer, sequence: Sequence | None, kv_cache: KVCacheManager) -> list[Any]:
    size, ends = kv_cache.device.block_size, dict[bytes, int]()
    # Why none: one that was timed out has no sequence; what it copied is not used.
    for block, content in enumerate(contents(kv_cache.device.hasher, sequence, one.num_tokens) if sequence else ()):
        ends[content.key] = min((block + 1) * size, one.num_tokens)
    return [one.transfer_id, one.direction.value, one.sequence_id, list(one.device_blocks), list(one.host_blocks),
            one.num_tokens, one.is_pinned,
            [[move.source, move.destination, ends.get(move.content.key, 0)] for move in one.moves]]


def restore(state: Mapping[str, Any], scheduler: Scheduler) -> dict[int, ReplayedSequence]:
    """Let an empty scheduler be in a captured state; return its sequences by id.

    Raises whatever a state that is not consistent leads to: ``KeyError``, ``ValueError`` and the like.
    """
    kv_cache, hasher = scheduler.kv_cache, scheduler.kv_cache.device.hasher
    by_id = {one.sequence_id: one for one in map(sequence_of, state["sequences"])}
    for memory, saved in ((kv_cache.device, state["device"]), (kv_cache.host, state["host"])):
        _restore_memory(memory, saved, hasher.key)
    for number, block_ids, num_registered in state["device"]["tables"]:
        table = kv_cache.device._tables[number] = BlockTable()
        table.append(block_ids)
        table.num_registered = num_registered
    _restore_host(state, scheduler, by_id)
    for described in state["sequences"]:
        one = by_id[described["plain"]["sequence_id"]]
        del one.block_keys[described["num_keys"] :]
        hasher.extend(one.block_keys, one.cache_root, one.token_ids, described["num_keys"])
    _restore_queues(scheduler.queues, state["queues"])
    for queue, numbers in ((scheduler.waiting, state["waiting"]), (scheduler.running, state["running"])):
        queue.reset(*(by_id[number] for number in numbers))
    scheduler.waiting._never_started.update((number, by_id[number]) for number in state["never_started"])
    scheduler.waiting.gated.update(state["gated"])
    scheduler._phases = tuple(state["phases"])
    for name, value in state["counters"].items():
        is_by_kind = isinstance(value, dict)
        setattr(scheduler.counters, name,
                {PreemptionKind(kind): number for kind, number in value.items()} if is_by_kind else value)
    _restore_costs(scheduler.costs, state["costs"])
    return by_id


def _restore_memory(
    memory: BlockMemory, saved: Mapping[str, Any], key_of: Callable[[bytes, tuple[int, ...]], bytes]
) -> None:
    pool, cache, cached = memory._pool, memory.cache, list[CachedBlock]()
    pool.free_blocks, pool.reference_counts = list(saved["free"]), list(saved["counts"])
    for (block_id, parent, first_used, last_used, num_hits, rank), tokens, root in zip(
        saved["entries"], saved["tokens"], saved["roots"], strict=True
    ):
        if not -1 <= parent < len(cached):
            raise ValueError("a block comes before its parent")
        parent_key = cached[parent].content.key if parent >= 0 else root
        content = Content(key_of(parent_key, tuple(tokens)), parent_key, tuple(tokens), parent < 0)
        if content.key in cache._by_key or block_id in cache._by_block:
            raise ValueError("two blocks hold the same")
        one = CachedBlock(block_id, content, first_used, last_used, num_hits, tuple(rank))
        cached.append(one)
        cache._by_key[content.key] = cache._by_block[block_id] = one
        cache._children.setdefault(parent_key, []).append(one)
    for siblings in cache._children.values():
        siblings.sort(key=lambda one: one.content.token_ids)
    pool.idle_blocks = {one.block_id for one in cached if pool.reference_counts[one.block_id] == 0}
    pool.num_available = len(pool.idle_blocks) + len(pool.free_blocks)
    for one in cached:
        if one.block_id in pool.idle_blocks:
            parent_key = one.content.parent_key
            cache._num_idle_children[parent_key] = cache._num_idle_children.get(parent_key, 0) + 1
    for one in cached:
        cache._offer(one)
    cache._num_uses, cache.num_evictions = saved["num_uses"], saved["num_evictions"]


def _restore_host(state: Mapping[str, Any], scheduler: Scheduler, by_id: Mapping[int, Sequence]) -> None:
    host, moves, hasher = scheduler.kv_cache.host, scheduler.moves, scheduler.kv_cache.device.hasher
    saved, moving = state["host"], {number: by_id[owner] for number, owner in state["moves"]["moving"]}
    for number, way, owner, device_blocks, host_blocks, num_tokens, is_pinned, pairs in saved["in_flight"]:
        sequence = moving.get(number)
        known = list(contents(hasher, sequence, num_tokens)) if sequence is not None else []
        copies = tuple(
            BlockMove(source, destination, known[(end - 1) // hasher.block_size] if known else _UNKNOWN)
            for source, destination, end in pairs
        )
        host.in_flight[number] = Transfer(
            number, Direction(way), owner, copies, tuple(device_blocks), tuple(host_blocks), num_tokens, is_pinned
        )
    host.pins.update((number, tuple(blocks)) for number, blocks in saved["pins"])
    host._cancelled, host._timed_out = set(saved["cancelled"]), set(saved["timed_out"])
    host.transfer_ids = count(saved["next_transfer_id"])
    moves._moving.update(moving)
    moves.parked.update(state["moves"]["parked"])
    moves.due = [host.in_flight[number] for number in state["moves"]["due"]]
    for number, kind, estimated_s, num_left, num_computed, actual_s in state["moves"]["open"]:
        preemption = Preemption(by_id[number], PreemptionKind(kind), estimated_s, num_left)
        moves._open[number] = Decision(preemption, num_computed, actual_s)
    moves._reuse._left.update(dict.fromkeys(state["moves"]["left"]))
    moves._reuse._num_left, moves._reuse._num_wanted = state["moves"]["num_left"], state["moves"]["num_wanted"]


def _restore_costs(costs: CostModel, saved: Mapping[str, Any]) -> None:
    lines: dict[str, Line] = {"step": costs.step, **{way.value: line for way, line in costs.moves.items()}}
    for name, line in lines.items():
        line.fixed_s, line.per_unit_s, *line._sums = saved["lines"][name]
    costs.loss_share, costs.num_estimates = saved["loss_share"], saved["num_estimates"]
    costs.sum_relative_error = saved["sum_relative_error"]


def comparable(state: Mapping[str, Any]) -> State:
    """Return what of two states has to be equal: all but tokens, roots and keys, whose names are each recording's own.
    """
    bare = {name: value for name, value in state.items() if name not in ("sequences", "requests", "beams")}
    bare["sequences"] = [
        {name: one[name] for name in ("plain", "status", "num_keys", "num_scored", "num_tokens")}
        for one in state["sequences"]
    ]
    for memory in ("device", "host"):
        bare[memory] = {name: value for name, value in state[memory].items() if name not in ("tokens", "roots")}
    bare["moves"] = {**state["moves"], "left": len(state["moves"]["left"])}
    return bare
