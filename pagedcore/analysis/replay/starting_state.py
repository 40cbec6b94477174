"""Where other settings begin: the recorded state of a segment, in a scheduler with other settings.

Tables, the eviction order, cached blocks, queues, positions and costs are the recorded ones. A larger pool has more
free blocks. A smaller one takes the blocks that it lacks as an engine would: free ones first, then cached ones in the
order of eviction, then those of running sequences, which are preempted in the policy's victim order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedcore.analysis.diagnosis.invariants import check, snapshot
from pagedcore.analysis.recorder.recording import MAX_BLOCKS
from pagedcore.analysis.recorder.state import ReplayedSequence, State, build_scheduler, restore
from pagedcore.analysis.replay.decisions import begin, load_policy
from pagedcore.errors import RecordingError
from pagedcore.scheduler.plan import Preemption, PreemptionKind
from pagedcore.scheduler.scheduler import Scheduler


@dataclass(slots=True)
class StartingState:
    """A scheduler with other settings in a recorded state, and what did not fit."""

    scheduler: Scheduler
    sequences: dict[int, ReplayedSequence]
    num_evicted: int = 0
    """Cached blocks that were evicted for a smaller pool."""
    num_preempted: int = 0
    """Running sequences that were preempted for a smaller pool, or for fewer rows."""
    refused: tuple[int, ...] = ()
    """Ids of sequences that are too long for a smaller pool even if they are alone."""


def settings_with(segment: Mapping[str, Any], changes: Mapping[str, Any]) -> State:
    """Return the recorded settings with others instead. Another policy than the recorded one has no options."""
    settings = {**segment["settings"], "policy": segment["state"]["policy"], **changes}
    if settings["policy"] != segment["settings"]["policy"]:
        settings["policy_options"] = {}
    return settings


def starting_state(segment: Mapping[str, Any], changes: Mapping[str, Any], now_s: float) -> StartingState:
    """Make the scheduler that a segment begins with, under other settings.

    Args:
        segment: of a recording.
        changes: settings as in ``settings_of``, by name.
        now_s: the time on the recorded clock, for policies that look at it.

    Raises:
        RecordingError: the recorded state breaks a law, or is not consistent in itself; there is no such policy; the
            pool has more than ``MAX_BLOCKS`` blocks.
    """
    begin(segment)  # Why: it refuses a forged state, before anything of it is taken apart.
    recorded, settings = segment["settings"], settings_with(segment, changes)
    if settings["num_blocks"] > MAX_BLOCKS:
        raise RecordingError(f"a pool of {settings['num_blocks']} blocks, at most {MAX_BLOCKS} are replayed")
    if "num_states" in settings:
        settings["num_host_states"] = _num_host_states(settings, recorded)
    if "windows" in settings and settings["num_host_blocks"]:
        raise RecordingError("its model has window blocks, of which none is on the host")
    names = [name for name in ("num_blocks", "num_host_blocks", "num_host_states") if name in recorded]
    first = {**settings, **{name: recorded[name] for name in names}}
    state, num_more = segment["state"], settings["num_blocks"] - recorded["num_blocks"]
    if num_more > 0:
        state, first["num_blocks"] = {**state, "device": _grown(state["device"], num_more)}, settings["num_blocks"]
    scheduler = build_scheduler(first, load_policy)
    made = StartingState(scheduler, restore(state, scheduler))
    if settings["max_num_seqs"] < recorded["max_num_seqs"] or num_more < 0:
        scheduler.begin_step(now_s)
        while len(scheduler.running) > settings["max_num_seqs"]:
            _preempt_last(made)
    is_host_other = settings["num_host_blocks"] != recorded["num_host_blocks"]
    if is_host_other or num_more < 0:
        _end_transfers(scheduler)
    if is_host_other:
        for number in list(scheduler.kv_cache.host.pins):
            scheduler.kv_cache.host.free_sequence(number)
        scheduler.moves.parked.clear()
    if num_more < 0:
        _take_blocks(made, settings["num_blocks"])
    if is_host_other or num_more < 0:
        _rebuild(made, settings, is_host_other=is_host_other)
    if broken := check(snapshot(made.scheduler)):
        raise RecordingError(f"its state does not fit the other settings (law {broken[0].law})")
    return made


def _num_host_states(settings: State, recorded: Mapping[str, Any]) -> int:
    """Return the states of a host tier that is as large as the settings say: in proportion to the recorded one."""
    num_states, size, known = settings["num_states"], settings["num_host_blocks"], recorded["num_host_blocks"]
    if 2 * settings["max_num_seqs"] > num_states:
        raise RecordingError(f"its model keeps {num_states} states, and each sequence that runs needs 2")
    if size and not known:
        raise RecordingError(f"its model keeps {num_states} states, and without a host tier in the recording it is not "
                             "known how many one would have")
    return max(1, recorded["num_host_states"] * size // known) if size else 0


def _grown(device: State, num_more: int) -> State:
    # Why in front: the recorded free blocks are taken first, as they were.
    num_blocks = len(device["counts"]) + num_more
    more = list(range(num_blocks - 1, num_blocks - num_more - 1, -1))
    return {**device, "free": [*more, *device["free"]], "counts": [*device["counts"], *[0] * num_more]}


def _preempt_last(made: StartingState) -> None:
    """Preempt the running sequence that the policy gives up first. What it computed stays cached."""
    scheduler = made.scheduler
    victim = scheduler.running.sequences[-1]
    lost_s = scheduler.costs.compute_s(victim.num_computed_tokens)
    scheduler.moves.preempt(Preemption(victim, PreemptionKind.SHRINK, lost_s))
    made.num_preempted += 1


def _end_transfers(scheduler: Scheduler) -> None:
    """End transfers as failed: what they would have moved is computed again."""
    for number in list(scheduler.kv_cache.host.in_flight):
        scheduler.moves.complete_transfer(number, 0.0, is_ok=False)
    scheduler.moves.due.clear()


def _take_blocks(made: StartingState, num_blocks: int) -> None:
    """Take so many blocks that ``num_blocks`` are left; the taken ones stay referenced by no table."""
    scheduler = made.scheduler
    device, num_positions = scheduler.kv_cache.device, num_blocks * scheduler.kv_cache.device.block_size
    too_long = [one for one in (*scheduler.waiting, *scheduler.running)
                if one.num_prompt_tokens + one.max_tokens > num_positions]
    for sequence in too_long:
        scheduler.finish_sequence(sequence, "error")
    made.refused = tuple(one.sequence_id for one in too_long)
    num_taken = device.num_blocks - num_blocks
    while device.num_available_blocks < num_taken and len(scheduler.running):
        _preempt_last(made)
    for holder in reversed(scheduler.waiting.sequences):
        if device.num_available_blocks >= num_taken:
            break
        device.free_blocks(holder)
        holder.reset_computed()
    before = device.cache.num_evictions
    if device.cache.allocate(num_taken) is None:
        raise RecordingError("its blocks do not fit the smaller pool")
    made.num_evicted = device.cache.num_evictions - before


def _rebuild(made: StartingState, settings: State, *, is_host_other: bool) -> None:
    """Make the scheduler again in pools of other sizes: the blocks that are left keep their order."""
    state = made.scheduler.snapshot()
    state["device"] = _renumbered(state["device"], settings["num_blocks"])
    if is_host_other:
        size = settings["num_host_blocks"]
        state["host"] = {**state["host"], "free": list(range(size - 1, -1, -1)), "counts": [0] * size,
                         "entries": [], "tokens": [], "roots": [], "cancelled": [], "timed_out": []}
        if size := settings.get("num_host_states", 0):
            state["host"]["states"] = {"free": list(range(size - 1, -1, -1)), "counts": [0] * size, "current": [],
                                       "idle": [], "num_uses": 0, "age": 0, "num_evictions": 0, "kept": []}
    finished = {number: one for number, one in made.sequences.items() if one.finish_reason is not None}
    made.scheduler = build_scheduler(settings, load_policy)
    made.sequences = {**finished, **restore(state, made.scheduler)}


def _renumbered(device: State, num_blocks: int) -> State:
    """Leave out the blocks that no table, cache or free list has, and number the others from 0."""
    known = {*device["free"], *(entry[0] for entry in device["entries"])}
    known.update(block_id for _, block_ids, _ in device["tables"] for block_id in block_ids)
    place = {block_id: number for number, block_id in enumerate(sorted(known))}
    counts = [0] * num_blocks
    for block_id, number in place.items():
        counts[number] = device["counts"][block_id]
    return {
        **device, "free": [place[one] for one in device["free"]], "counts": counts,
        "entries": [[place[entry[0]], *entry[1:]] for entry in device["entries"]],
        **({"states": {**states, "kept": [[place[one], *rest] for one, *rest in states["kept"]]}}
           if (states := device.get("states")) is not None else {}),
        **({"windows": {**windows, "of": [[one, place[owner], place[block_id]] for one, owner, block_id in
                                          windows["of"] if owner in place and block_id in place]}}
           if (windows := device.get("windows")) is not None else {}),
        "tables": [[number, [place[one] for one in block_ids], registered]
                   for number, block_ids, registered in device["tables"]],
    }
