"""Takes the decisions of a recording again, with the same scheduler and block manager, and compares them byte by byte.

No model and no clock: what came from outside (requests, sampled lengths, ends of transfers, step times, the opening of
the gate) is in the recording, and everything else follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pagedcore.analysis.diagnosis.invariants import check, snapshot
from pagedcore.analysis.recorder.recording import Recording, canonical
from pagedcore.analysis.recorder.ring import ADAPTER_VERBS, decision_of
from pagedcore.analysis.recorder.state import ReplayedSequence, build_scheduler, comparable, restore, sequence_of
from pagedcore.config.speculation import MOST_DRAFTS
from pagedcore.drafting.drafts import Drafts
from pagedcore.errors import InternalError, PagedcoreError, RecordingError
from pagedcore.plugins.manager import create_plugin_manager
from pagedcore.scheduler.draft_costs import DraftCosts
from pagedcore.scheduler.plan import NewToken, SchedulePlan
from pagedcore.scheduler.plan_state import PlanState
from pagedcore.scheduler.policies import Policy
from pagedcore.scheduler.policy_guard import make_policy
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.scheduler.speculation import Speculation, num_allowed

_DECIDES = frozenset({"schedule", "make_room", "reserve", "commit", "accept", "read", "take_due", "park", "fetch"})


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a replay and its recording part."""

    segment: int
    event: int
    verb: str
    recorded: str
    """As the one JSON text of the value; so is the next one."""
    replayed: str


@dataclass(slots=True)
class Replayed:
    """What a replay has shown."""

    num_steps: int = 0
    num_decisions: int = 0
    num_segments: int = 0
    difference: Difference | None = None
    """``None``: every decision is equal."""


def load_policy(name: str, options: Mapping[str, Any]) -> Policy:
    """Return the scheduling policy of this name. Raises ``RecordingError`` if there is none here."""
    try:
        policy = make_policy(create_plugin_manager().registry.schedulers.load(name), options)
    except PagedcoreError as error:
        raise RecordingError(f"its scheduling policy is not installed ({type(error).__name__})") from None
    return policy


def replay_decisions(recording: Recording) -> Replayed:
    """Take all decisions again, up to the first one that differs.

    Raises ``RecordingError`` if the recording is not consistent in itself.
    """
    try:
        return _replay(recording)
    except RecordingError:
        raise
    except Exception as error:  # whatever forged values lead to
        raise RecordingError(f"its decisions cannot be taken again ({type(error).__name__})") from error


def _replay(recording: Recording) -> Replayed:
    replayed = Replayed()
    before: SegmentReplay | None = None
    for number, segment in enumerate(recording.segments):
        if before is not None and segment["is_continuous"]:
            one, other = comparable(segment["state"]), comparable(before.scheduler.snapshot())
            if (was := canonical(one)) != (now := canonical(other)):
                replayed.difference = Difference(number, 0, "state", was, now)
                return replayed
        before = SegmentReplay(recording, segment, *begin(segment))
        replayed.num_segments += 1
        before.run(number, replayed)
        if replayed.difference is not None:
            return replayed
    return replayed


def begin(segment: Mapping[str, Any]) -> tuple[Scheduler, dict[int, ReplayedSequence]]:
    """Make the scheduler that a segment begins with, and its sequences.

    Raises ``RecordingError`` unless the laws of scheduler and cache hold for it.
    """
    try:
        settings = segment["settings"]
        scheduler = build_scheduler({**settings, "policy": segment["state"]["policy"]}, load_policy)
        sequences = restore(segment["state"], scheduler)
        broken = check(snapshot(scheduler))
    except RecordingError:
        raise
    except Exception as error:  # whatever a forged state leads to
        raise RecordingError(f"its state cannot be made again ({type(error).__name__})") from error
    if broken:
        raise RecordingError(f"its state breaks law {broken[0].law}")
    return scheduler, sequences


class RecordedDrafts(Speculation):
    """Gives rows as many drafts as they were given. Which tokens these were is in no recording, and no matter here."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Give none until ``counts`` says so."""
        super().__init__(Drafts(()), DraftCosts(scheduler.costs.steps), 1, MOST_DRAFTS)
        self.counts: dict[int, int] = {}
        """By sequence id, of the next plan."""

    def add_drafts(self, state: PlanState) -> None:
        """Let the rows that had drafts have as many, as far as there is room for them."""
        for number, count in self.counts.items():
            row = state.rows.get(number)
            if row is not None and row.is_decode and (most := min(count, num_allowed(state, row))) > 0:
                state.add_drafts(row, (0,) * most)


class SegmentReplay:
    """Takes what happened in a segment again, from its recorded state or from another one.

    Args:
        recording: what the segment is part of.
        segment: whose rows the sequences have.
        scheduler: the state to begin with.
        sequences: those in it, by id.
    """

    def __init__(
        self, recording: Recording, segment: Mapping[str, Any], scheduler: Scheduler,
        sequences: dict[int, ReplayedSequence],
    ) -> None:
        self.recording, self.scheduler, self.sequences = recording, scheduler, sequences
        self.plan: SchedulePlan | None = None
        """The latest one."""
        self._foreseen: SchedulePlan | None = None
        """The step whose tokens are not read."""
        self._rows: dict[int, int] = {}
        self._drafts = scheduler.speculation = RecordedDrafts(scheduler)
        self.has_open_drafts = False
        """Whether the latest step is committed and its drafts are not settled."""
        self.continue_with(segment)

    def continue_with(self, segment: Mapping[str, Any]) -> None:
        """Go on with a segment that begins where the one before it ends."""
        self.segment = segment
        self._rows |= {one["plain"]["sequence_id"]: one["row"] for one in segment["state"]["sequences"]}
        for _, waiting in segment["state"]["beams"]:
            self._known([one for one in waiting if one["plain"]["sequence_id"] not in self.sequences])

    def run(self, number: int, replayed: Replayed) -> None:
        """Take all decisions of the segment, up to the first that differs."""
        for place, (_, verb, arguments, recorded) in enumerate(self.segment["events"]):
            try:
                decided = self.take(verb, arguments, recorded)
            except RecordingError:
                raise
            except Exception as error:
                is_same = isinstance(error, InternalError) and recorded == {"raised": type(error).__name__}
                decided = recorded if is_same else {"raised": type(error).__name__}
            replayed.num_steps += verb in ("commit", "foresee")
            if verb in _DECIDES or decided is not None:
                replayed.num_decisions += 1
                if (was := canonical(recorded)) != (now := canonical(decided)):
                    replayed.difference = Difference(number, place, verb, was, now)
                    return

    def take(self, verb: str, given: list[Any], recorded: Any) -> Any:
        """Let one event happen; return what was decided, as ``decision_of``.

        Raises ``RecordingError`` for an event of an unknown kind, and whatever the scheduler raises.
        """
        match verb:
            case "schedule":
                self._drafts.counts = {} if isinstance(recorded, dict) else dict(recorded[1].get("drafts", ()))
                self.plan = self.scheduler.schedule(*given)
                return decision_of(verb, self.plan)
            case "accept":
                return self._accept(given[0], recorded)
            case "settle" if self.plan is not None:
                self.has_open_drafts = False
                self.scheduler.settle(self.plan)
            case "make_room" | "reserve" | "rollback":
                return decision_of(verb, getattr(self.scheduler, verb)(self.plan, **(given[-1] if given else {})))
            case "foresee" if self.plan is not None:
                self._foreseen = self.plan
                self.scheduler.foresee(self.plan, given[0])
            case "recall":
                self.scheduler.recall()
            case "read":
                self._note_ends(recorded)
                return decision_of(verb, self.read_foreseen(self._next_token))
            case "commit":
                return self._commit(given, recorded)
            case "in_session":
                self.sequences[given[0]].is_in_session = True
            case "observe":
                self.scheduler.costs.steps.observe(*given)
            case "begin_step":
                self.scheduler.begin_step(*given)
            case "request" | "beams" | "refused" | "weights":
                pass
            case "open_gate" | "count_as_new":
                known = [self._known(one) for one in (given[0] if verb == "count_as_new" else given)]
                if verb == "open_gate":
                    self.scheduler.waiting.open_gate(*known)
                else:
                    self.scheduler.waiting.count_as_new(known)
            case "complete_transfer":
                self.scheduler.moves.complete_transfer(*given[:-1], **given[-1])
            case "time_out_transfer":
                self.scheduler.moves.time_out_transfer(*given)
            case "take_due" | "park" | "fetch" | "free_on_host":
                return decision_of(verb, getattr(self.scheduler.moves, verb)(*map(self._known, given)))
            case _ if verb in ADAPTER_VERBS:
                return decision_of(verb, getattr(self.scheduler.adapters, verb)(*given))
            case ("add_sequences" | "take_back" | "restart" | "add_branch" | "cancel_branch" | "finish_sequence"
                  | "remove_sequence"):
                getattr(self.scheduler, verb)(*map(self._known, given))
            case _:
                raise RecordingError("it has an event of an unknown kind")
        return None

    def _known(self, value: Any) -> Any:
        """Return the sequence that an argument describes or names, and any other argument as it is."""
        if isinstance(value, list):
            return [self._known(one) for one in value]
        if isinstance(value, dict) and "plain" in value:
            number = value["plain"]["sequence_id"]
            one = self.sequences[number] = sequence_of(value, self.sequences.get(number))
            self._rows[number] = value["row"]
            hasher = self.scheduler.kv_cache.device.hasher
            del one.block_keys[value["num_keys"] :]
            hasher.extend(one.block_keys, one.block_root, one.token_ids, value["num_keys"])
            return one
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return self.sequences.get(value, value) if is_number else value

    def _commit(self, given: list[Any], recorded: Any) -> Any:
        plan = self.plan
        if plan is None or not isinstance(recorded, list):
            raise RecordingError("it has a step without a plan")
        _note_scored(plan)
        self._note_ends(recorded)
        numbers, with_token = given[0], set(given[1])
        sampled = {number: self._next_token(number) if number in with_token else None for number in numbers}
        self.has_open_drafts = plan.num_drafts > 0
        return decision_of("commit", self.scheduler.commit(plan, sampled))

    def read_foreseen(self, next_token: Callable[[int], int]) -> list[NewToken]:
        """Read the step that was foreseen, if there is one: ``next_token`` says what each of its sequences gets."""
        if self._foreseen is not None:
            _note_scored(self._foreseen)
        self._foreseen = None
        return self.scheduler.read({number: next_token(number) for number in self.scheduler.unread})

    def _accept(self, numbers: list[int], recorded: Any) -> Any:
        self._note_ends(recorded)
        return decision_of("accept", self.scheduler.accept({number: self._next_token(number) for number in numbers}))

    def _note_ends(self, recorded: Any) -> None:
        for number, reason in recorded:
            self.sequences[number].next_end = reason

    def _next_token(self, number: int) -> int:
        _, row = self.recording.rows[self._rows[number]]
        return row[len(self.sequences[number].token_ids)]


def _note_scored(plan: SchedulePlan) -> None:
    """Note what a computed step has scored of prompts."""
    for row in plan.rows:
        if row.sequence.prompt_logprobs is not None:
            row.sequence.prompt_logprobs += [None] * len(row.scored_positions)  # type: ignore[list-item]
