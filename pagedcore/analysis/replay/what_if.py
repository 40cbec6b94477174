"""What would have happened under other settings: the recording itself up to the first decision that differs, and from
there its requests on a virtual clock.

It begins in the recorded state. As long as every decision is the recorded one, clock readings, arrivals, lengths and
transfers are those of the recording too. From the first other decision on arrivals, prompts and lengths are still the
recorded ones; a step takes what the recorded steps teach for its tokens, a transfer likewise, and a request that was
aborted ends with as many tokens as it had. What was turned away stays so, and what was accepted is not asked for its
promise again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from pagedcore.analysis.recorder.recording import Recording, canonical
from pagedcore.analysis.recorder.state import sequence_of
from pagedcore.analysis.replay.decisions import RecordedDrafts, SegmentReplay
from pagedcore.analysis.replay.lives import (
    EVERYTHING,
    Life,
    Outcome,
    Place,
    described_in,
    events_between,
    learnt_costs,
    lives_of,
    num_refused_in,
    recorded_outcome,
)
from pagedcore.analysis.replay.starting_state import StartingState, starting_state
from pagedcore.errors import EngineOverloaded, PagedcoreError, RecordingError, RequestTooLarge
from pagedcore.kv_cache.host_cache import Transfer
from pagedcore.outputs import WeightsVersion
from pagedcore.scheduler.plan import NewToken, ScheduledRow, SchedulePlan
from pagedcore.scheduler.plan_state import PlanState
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.scheduler.step_recipe import run_step
from pagedcore.sequence import SequenceStatus


class LikeBefore(RecordedDrafts):
    """Gives rows the drafts that the recording has for as many tokens, as far as there is room."""

    def __init__(self, scheduler: Scheduler, lives: Mapping[int, Life]) -> None:
        """Take the drafts of ``lives``, by sequence id."""
        super().__init__(scheduler)
        self._lives = lives

    def add_drafts(self, state: PlanState) -> None:
        """As of the recorded rows; sequences that have none are left alone."""
        self.counts = {number: _drafts_of(self._lives, row)[0] for number, row in state.rows.items() if row.is_decode}
        super().add_drafts(state)


@dataclass(frozen=True, slots=True)
class NewWeights:
    """One load of weights into the recorded engine."""

    now_s: float
    number: int
    roots: Mapping[int, bytes]
    """The cache roots from then on, of the sequences that went on."""


def _drafts_of(lives: Mapping[int, Life], row: ScheduledRow) -> tuple[int, int]:
    life = lives.get(row.sequence.sequence_id)
    return (0, 0) if life is None else life.drafts_at(len(row.sequence.token_ids))


class WhatIf:
    """One run of a recording under given settings."""

    def __init__(self, recording: Recording, changes: Mapping[str, Any], leave_at: Place = EVERYTHING) -> None:
        """Take settings for those of the recording; all else stays.

        Args:
            recording: what was recorded.
            changes: settings by name, as in ``settings_of``.
            leave_at: go on by the virtual clock from this place, even if decisions are still equal.

        Raises ``RecordingError`` if it has no steps or a beam search, whose beams depend on the schedule, is not
        consistent in itself, or a setting is none.
        """
        if not recording.segments:
            raise RecordingError("it has no steps")
        if any(has_beams(segment) for segment in recording.segments):
            raise RecordingError("it has a beam search, which is not run under other settings")
        self._recording, self._leave_at = recording, leave_at
        # Why first: it refuses a recording whose settings are none.
        self._costs, self._lives_in_order = learnt_costs(recording), lives_of(recording)
        num_waiting = max(recording.segments[0]["settings"]["max_num_waiting"], len(self._lives_in_order))
        # Why: who was accepted is accepted; a queue that empties later must not refuse it.
        self._is_changed, self._changes = bool(changes), {**changes, "max_num_waiting": num_waiting}
        self.starting_states: list[StartingState] = []
        """One, and one more for every place where the recording begins anew."""
        self.left_at: Place | None = None
        """The first place whose decision is not the recorded one; ``None``: all are equal."""
        self._replay = self._begin_at(0)
        self.outcome = Outcome()
        self._coming: list[Life] = []
        self._postponed: list[Life] = []
        self._lives: dict[int, Life] = {}
        self._arrived_s: dict[int, float] = {}
        self._moving: dict[int, float] = {}
        self._new_weights: list[NewWeights] = []
        """The next one last."""
        self._now_s = self._start_s = self._first_s(0)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler that decides."""
        return self._replay.scheduler

    def run(self) -> Outcome:
        """Follow the recording while its decisions are taken, then go on to the end of all requests, or to where
        nothing can progress.
        """
        self.left_at = self._follow()
        self.outcome = recorded_outcome(self._recording, self.left_at or EVERYTHING)
        if self.left_at is not None:
            self._leave(self.left_at)
            while self._coming or self._postponed or self.scheduler.has_work:
                self._take_weights()
                self._arrive()
                if not run_step(self.scheduler, self).rows and not self._sleep():
                    break
            self.outcome.seconds = self._now_s - self._start_s
        return self.outcome

    def _first_s(self, number: int) -> float:
        events = self._recording.segments[number]["events"]
        return float(events[0][0]) if events else 0.0

    def _begin_at(self, number: int) -> SegmentReplay:
        segment = self._recording.segments[number]
        made = starting_state(segment, self._changes, self._first_s(number))
        self.starting_states.append(made)
        return SegmentReplay(self._recording, segment, made.scheduler, made.sequences)

    def _follow(self) -> Place | None:
        """Take recorded decisions; return the place of the first that is another one."""
        for number, segment in enumerate(self._recording.segments):
            if number and segment["is_continuous"]:
                self._replay.continue_with(segment)
            elif number:
                self._replay = self._begin_at(number)
            if self.starting_states[-1].refused:
                return number, 0
            for place, (_, verb, given, recorded) in enumerate(segment["events"]):
                if (number, place) == self._leave_at:
                    return number, place
                try:
                    decided = self._replay.take(verb, given, recorded)
                except (RequestTooLarge, EngineOverloaded):
                    return number, place
                except PagedcoreError as error:
                    decided = {"raised": type(error).__name__}
                if not self._is_same(verb, recorded, decided):
                    return number, place + (verb != "schedule")
        return None

    def _is_same(self, verb: str, recorded: Any, decided: Any) -> bool:
        if self._is_changed:
            recorded, decided = _without_blocks(verb, recorded), _without_blocks(verb, decided)
        return canonical(recorded) == canonical(decided)

    def _leave(self, place: Place) -> None:
        """Go over to the virtual clock: what is in the scheduler stays as it is, what comes later arrives later."""
        scheduler = self.scheduler
        if (plan := self._replay.plan) is not None:
            if scheduler.is_in_flight(plan):
                scheduler.rollback(plan)
            elif self._replay.has_open_drafts:
                scheduler.settle(plan)
        scheduler.speculation = LikeBefore(scheduler, self._lives)
        later = list(events_between(self._recording, place, EVERYTHING))
        self._now_s = later[0][0] if later else self._now_s
        before = lives_of(self._recording, place)
        live = {one.sequence_id for one in (*scheduler.waiting, *scheduler.running)}
        for known, life in zip(before, self._lives_in_order, strict=False):
            if known.end is None and life.number in live:
                self._lives[life.number], self._arrived_s[life.number] = life, life.arrival_s
        self._coming = sorted(self._lives_in_order[len(before) :], key=lambda one: one.arrival_s, reverse=True)
        # Why also later ones: a request that never ran has no length to run with, so it stays refused.
        self.outcome.num_refused += num_refused_in(later) + sum(len(made.refused) for made in self.starting_states)
        self.outcome.num_preemptions += sum(made.num_preempted for made in self.starting_states)
        scheduler.recall()
        for number in live:
            if not self._num_left(number):
                self._finish(number)
        self.publish_further(self._replay.read_foreseen(self._next_token))
        self._new_weights = list(reversed(new_weights_in(later)))
        ends = {given[0]: now_s for now_s, verb, given, _ in later if verb == "complete_transfer"}
        due = {one.transfer_id for one in scheduler.moves.due}
        for number in scheduler.kv_cache.host.in_flight.keys() - due:
            self._moving[number] = ends.get(number, self._now_s + self._seconds_of_known(number))

    def _take_weights(self) -> None:
        """Compute what has not ended anew, with other weights, where some have come by now."""
        while self._new_weights and self._new_weights[-1].now_s <= self._now_s:
            new = self._new_weights.pop()
            known = self._replay.sequences
            roots = {known[number].cache_root: root for number, root in new.roots.items() if number in known}
            live = [*self.scheduler.waiting, *self.scheduler.running]
            for one in live:
                # Why else another one: nobody had this root when they came, and no block of before may be found.
                other = sha256(one.cache_root + str(new.number).encode()).digest()
                one.draw_with(WeightsVersion(new.number), roots.get(one.cache_root, other))
            self._moving.clear()
            self.scheduler.restart(live)

    def _arrive(self) -> None:
        due, self._postponed = self._postponed, []
        while self._coming and self._coming[-1].arrival_s <= self._now_s:
            due.append(self._coming.pop())
        for life in due:
            earlier = self._replay.sequences.get(life.number)
            if earlier is not None and earlier.finish_reason is None:
                # Why: a further turn cannot come before the one before it has ended.
                self._postponed.append(replace(life, arrival_s=self._now_s))
            else:
                self._add(life)
        waiting = self.scheduler.waiting
        for number in [one.sequence_id for one in waiting if not self._num_left(one.sequence_id)]:
            self._finish(number)

    def _add(self, life: Life) -> None:
        self._lives[life.number] = life
        self.outcome.waits_s.pop(life.number, None)
        sequence = self._replay.sequences[life.number] = sequence_of({**life.described, "status": "waiting"})
        sequence.num_computed_tokens = sequence.num_preemptions = sequence.num_protected_tokens = 0
        sequence.arrival_s = life.arrival_s
        sequence.num_cached_tokens = sequence.finish_reason = None
        self._arrived_s[life.number] = life.arrival_s
        try:
            self.scheduler.add_sequences(sequence)
        except (RequestTooLarge, EngineOverloaded):
            self.outcome.num_refused += 1
            sequence.finish_reason = "error"

    def _num_left(self, number: int) -> int:
        return self._lives[number].length - len(self._replay.sequences[number].token_ids)

    def _finish(self, number: int) -> None:
        self.scheduler.finish_sequence(self._replay.sequences[number], self._lives[number].end or "abort")
        self.outcome.finished.append(number)

    def now(self) -> float:
        """Return the virtual time."""
        return self._now_s

    def move_blocks(self) -> None:
        """Book the transfers that have ended by now, and start those that are due."""
        for number, end_s in list(self._moving.items()):
            if end_s <= self._now_s:
                del self._moving[number]
                self.scheduler.moves.complete_transfer(number, self._seconds_of_known(number), is_ok=True)
        self._start(self.scheduler.moves.take_due())

    def _seconds_of_known(self, number: int) -> float:
        return self._seconds_of(self.scheduler.kv_cache.host.in_flight[number])

    def _seconds_of(self, transfer: Transfer) -> float:
        num_units = self._costs.units(len(transfer.moves), len(transfer.state_moves))
        return self._costs.moves[transfer.direction].seconds(num_units)

    def _start(self, transfers: ListOf[Transfer]) -> None:
        for transfer in transfers:
            self._moving[transfer.transfer_id] = self._now_s + self._seconds_of(transfer)

    def make_room(self, plan: SchedulePlan, transfers: ListOf[Transfer]) -> None:
        """Start the transfers, and count what is preempted."""
        self.outcome.num_preemptions += len(plan.preempted)
        self._start(transfers)

    def compute(self, plan: SchedulePlan, copies: object, begun_s: float) -> dict[int, int]:
        """Let the time of the step pass; return how many drafts of each row are right."""
        for sequence in plan.admitted:
            number = sequence.sequence_id
            self.outcome.waits_s.setdefault(number, begun_s - self._arrived_s[number])
        self._now_s += self._costs.steps.predict(*plan.work)
        return {row.sequence.sequence_id: min(_drafts_of(self._lives, row)[1], len(row.drafts))
                for row in plan.rows if row.drafts}

    def tokens(self, plan: SchedulePlan, num_right: dict[int, int]) -> dict[int, int | None]:
        """Return the recorded tokens, and end those that have all."""
        tokens: dict[int, int | None] = {}
        for row in plan.rows:
            number = row.sequence.sequence_id
            if row.sequence.prompt_logprobs is not None:
                row.sequence.prompt_logprobs += [None] * len(row.scored_positions)  # type: ignore[list-item]
            if row.num_sampled:
                tokens[number] = self._next_token(number)
        return tokens

    def _next_token(self, number: int) -> int:
        life, known = self._lives[number], len(self._replay.sequences[number].token_ids)
        if known + 1 == life.length:
            self._replay.sequences[number].next_end = life.end or "abort"
        return life.row[known]

    def further_tokens(self, num_right: dict[int, int], place: int) -> dict[int, int]:
        """Return the recorded tokens behind drafts that were right in the recording."""
        return {
            number: self._next_token(number) for number, count in num_right.items()
            if place < count and self._num_left(number)
            and self._replay.sequences[number].status is SequenceStatus.RUNNING
        }

    def publish_further(self, news: ListOf[NewToken]) -> None:
        """Note what has ended."""
        self.outcome.finished += [new.sequence.sequence_id for new in news if new.finish_reason is not None]

    def publish(self, plan: SchedulePlan, news: ListOf[NewToken]) -> None:
        """Note what has ended."""
        self.publish_further(news)
        self.outcome.num_steps += 1

    def _sleep(self) -> bool:
        """Go to the next moment at which something happens; return whether there is one."""
        moments = [moment for moment in self._moments() if moment > self._now_s]
        if not moments:
            return False
        self._now_s = min(moments)
        return True

    def _moments(self) -> Iterator[float]:
        yield from self._moving.values()
        if self._coming:
            yield self._coming[-1].arrival_s
        if self._new_weights:
            yield self._new_weights[-1].now_s
        if self.scheduler.waiting.gated:
            yield self._now_s + self.scheduler.gated_s(self._now_s)


def new_weights_in(events: ListOf[tuple[float, str, list[Any], Any]]) -> list[NewWeights]:
    """Return the loads of weights among recorded events, in their order."""
    found, roots = list[NewWeights](), dict[int, bytes]()
    for now_s, verb, given, _ in events:
        if verb == "restart":
            roots = {one["plain"]["sequence_id"]: one["root"] for one in described_in(given)}
        elif verb == "weights":
            found.append(NewWeights(now_s, given[0], roots))
    return found


def has_beams(segment: Mapping[str, Any]) -> bool:
    """Whether a beam search is under way at the beginning of a segment, or goes on in it."""
    verbs = {verb for _, verb, _, _ in segment["events"]}
    return bool(segment["state"]["beams"] or verbs & {"beams", "add_branch"})


def _without_blocks(verb: str, decided: Any) -> Any:
    """Return what was decided about sequences, without the numbers of blocks: another pool gives others."""
    if verb == "reserve":
        return None
    if verb == "schedule" and not isinstance(decided, dict):
        rows, rest = decided
        named = {name: [[one[0], one[4]] for one in rest[name]] for name in ("matches", "loaded") if name in rest}
        return [rows, {**rest, **named}]
    if verb in ("make_room", "take_due") and isinstance(decided, list):
        return [[*one[:3], len(one[3])] for one in decided]
    return decided


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same requests three times."""

    recorded: Outcome
    modelled: Outcome
    """The recorded settings, on the virtual clock from where ``changed`` left the recording."""
    changed: Outcome
    left_at: Place | None
    """Where the first other decision was taken; ``None``: all are equal."""
    num_equal_steps: int
    """Steps before it."""
    starting_states: list[StartingState]


def compare(recording: Recording, changes: Mapping[str, Any]) -> Comparison:
    """Run the requests of a recording under its own settings and under others, which are those of ``settings_of``.

    Raises ``RecordingError`` if a setting is none, or it is not consistent in itself.
    """
    try:
        changed = WhatIf(recording, changes)
        outcome, left_at = changed.run(), changed.left_at
        modelled = WhatIf(recording, {}, left_at or EVERYTHING).run()
        before = recorded_outcome(recording, left_at or EVERYTHING)
        return Comparison(recorded_outcome(recording), modelled, outcome, left_at, before.num_steps,
                          changed.starting_states)
    except RecordingError:
        raise
    except Exception as error:  # whatever forged events lead to
        raise RecordingError(f"its requests cannot be run ({type(error).__name__})") from error


def changed_order(one: Outcome, other: Outcome) -> int:
    """Return how many sequences end in another place of the order, among those that end in both."""
    both = set(one.finished) & set(other.finished)
    orders = [[number for number in outcome.finished if number in both] for outcome in (one, other)]
    return sum(first != second for first, second in zip(*orders, strict=True))
