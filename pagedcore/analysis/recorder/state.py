"""A scheduler's state as the start of a replay: what of it is recorded, and the scheduler that is made of it.

The state itself is told by ``Scheduler.snapshot``, and by every class under it for its own fields. No content key is
part of a recording: keys follow from tokens, and whoever makes a state again computes them anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pagedcore.kv_cache.eviction import POLICIES
from pagedcore.kv_cache.hybrid_blocks import HybridBlocks
from pagedcore.kv_cache.kv_cache_manager import KVCacheManager
from pagedcore.kv_cache.windowed_blocks import WindowedBlocks
from pagedcore.outputs import FinishReason
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler.adapter_slots import AdapterSlots
from pagedcore.scheduler.batch_gate import BatchGate
from pagedcore.scheduler.policies import Policy
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.sequence import Sequence

State = dict[str, Any]


class ReplayedSequence(Sequence):
    """A sequence whose tokens and end are known: a recorded one. It ends when ``next_end`` says so."""

    next_end: FinishReason | None = None

    def append_token(self, token_id: int) -> FinishReason | None:
        """Append the recorded token; return the recorded end."""
        self.token_ids.append(token_id)
        end, self.next_end = self.next_end, None
        return end


def sequence_of(described: Mapping[str, Any], known: ReplayedSequence | None = None) -> ReplayedSequence:
    """Make a sequence as ``Sequence.snapshot`` described it, or let a known one be so; block keys are the caller's."""
    plain = described["plain"]
    one = known if known is not None else ReplayedSequence(
        plain["sequence_id"], [], SamplingParams(), max_tokens=plain["max_tokens"], seed=plain["seed"],
        cache_root=described["root"],
    )
    one.restore(described)
    # Why also of a known one: with other weights it has another root.
    one.cache_root = described["root"]
    return one


def settings_of(scheduler: Scheduler) -> State:
    """Return what a scheduler like this one is built with."""
    rules, device, host = scheduler.rules, scheduler.kv_cache.device, scheduler.kv_cache.host
    slots = scheduler.adapters
    return {
        "num_blocks": device.num_blocks, "block_size": device.block_size, "num_host_blocks": host.num_blocks,
        "eviction": next(name for name, policy in POLICIES.items() if policy is device.policy),
        "copies_blocks": device.copies_blocks, "policy": rules.policy.name,
        "policy_options": dict(rules.policy.options), "max_num_seqs": rules.max_num_seqs,
        "max_num_batched_tokens": rules.max_num_batched_tokens, "max_num_waiting": scheduler.waiting.limit,
        "admission": "guaranteed" if rules.is_guaranteed else "optimistic", "preemption": rules.preemption.mode,
        "max_scored_tokens": rules.max_scored_tokens, "prefill_share": rules.prefill_share,
        "phases": scheduler.phases,
        "min_batch_size": scheduler.gate.min_batch_size, "max_wait_s": scheduler.gate.max_wait_s,
        # Why if: as in ``Scheduler.snapshot``.
        **({"adapters": [slots.num_slots, slots.num_bytes]} if slots.num_slots else {}),
        **({"num_states": device.states.num_states, "num_host_states": host.states.num_states,
            "state_weight": scheduler.kv_cache.state_weight} if isinstance(device, HybridBlocks) else {}),
        **({"windows": [device.windows.num_windows, device.window]} if isinstance(device, WindowedBlocks) else {}),
    }


def build_scheduler(settings: Mapping[str, Any], load_policy: Callable[[str, Any], Policy]) -> Scheduler:
    """Build an empty scheduler with these settings, and with a policy of that name and those options."""
    num_windows, window = settings.get("windows", (0, 0))
    kv_cache = KVCacheManager(
        settings["num_blocks"], settings["block_size"], num_host_blocks=settings["num_host_blocks"],
        policy=POLICIES[settings["eviction"]], copies_blocks=settings["copies_blocks"],
        num_states=settings.get("num_states", 0), num_host_states=settings.get("num_host_states", 0),
        state_weight=settings.get("state_weight", 0.0),
        num_windows=num_windows, window=window,
    )
    names = ("max_num_seqs", "max_num_batched_tokens", "max_num_waiting", "admission", "preemption",
             "max_scored_tokens", "prefill_share", "phases")
    return Scheduler(
        kv_cache, load_policy(settings["policy"], settings["policy_options"]),
        gate=BatchGate(settings["min_batch_size"], settings["max_wait_s"]),
        adapters=AdapterSlots(*settings.get("adapters", ())),
        **{name: settings[name] for name in names},
    )


def restore(state: Mapping[str, Any], scheduler: Scheduler) -> dict[int, ReplayedSequence]:
    """Let an empty scheduler be in a recorded state; return its sequences by id.

    Raises whatever a state that is not consistent leads to: ``KeyError``, ``ValueError`` and the like.
    """
    hasher = scheduler.kv_cache.device.hasher
    by_id = {one.sequence_id: one for one in map(sequence_of, state["sequences"])}
    for described in state["sequences"]:
        one = by_id[described["plain"]["sequence_id"]]
        hasher.extend(one.block_keys, one.block_root, one.token_ids, described["num_keys"])
    scheduler.restore(state, by_id)
    return by_id


def comparable(state: Mapping[str, Any]) -> State:
    """Return what of two states has to be equal: all but tokens, roots and keys, whose names are each recording's own.
    """
    bare = {name: value for name, value in state.items() if name not in ("sequences", "requests", "beams", "weights")}
    bare["sequences"] = [
        {name: one[name] for name in ("plain", "status", "num_keys", "num_scored", "num_tokens")}
        for one in state["sequences"]
    ]
    for memory in ("device", "host"):
        bare[memory] = {name: value for name, value in state[memory].items() if name not in ("tokens", "roots")}
        # Why: files of version 4 do not say what blocks are minor; from when it matters, their ranks do.
        bare[memory]["entries"] = [entry[:6] for entry in bare[memory]["entries"]]
    bare["moves"] = {**state["moves"], "left": len(state["moves"]["left"])}
    return bare
