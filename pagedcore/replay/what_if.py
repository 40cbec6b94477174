"""What would have happened under other settings: the requests of a recording on a virtual clock, decided anew.

Arrivals, prompts and lengths are the recorded ones; a step takes what the recorded steps teach for its tokens, a
transfer likewise. It begins with an empty pool: what ran when the recording began arrives at its first moment.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any, Final

from pagedcore.errors import EngineOverloaded, RecordingError, RequestTooLarge
from pagedcore.kv_cache.host_cache import Transfer
from pagedcore.outputs import FinishReason
from pagedcore.recorder.recording import Recording
from pagedcore.recorder.state import ReplayedSequence, build_scheduler, sequence_of
from pagedcore.replay.decisions import begin, load_policy
from pagedcore.scheduler.cost_model import CostModel, Line
from pagedcore.scheduler.plan import SchedulePlan

_BRANCHING: Final = ("add_branch", "cancel_branch")
_MOST_TYPICAL: Final = 20.0


@dataclass(slots=True, eq=False)
class Life:
    """One sequence's turn as it was recorded."""

    number: int
    described: Mapping[str, Any]
    row: array[int]
    arrival_s: float
    length: int
    """Tokens at its end, or at the recording's."""
    end: FinishReason | None = None
    """``None``: it had not ended when the recording was written."""
    start_s: float | None = None
    end_s: float | None = None


@dataclass(slots=True)
class Outcome:
    """What became of the requests under some settings."""

    num_steps: int = 0
    seconds: float = 0.0
    num_preemptions: int = 0
    num_refused: int = 0
    """Sequences that the pool or the queue is too small for."""
    waits_s: dict[int, float] = field(default_factory=dict)
    """From arrival to first start, by sequence."""
    finished: list[int] = field(default_factory=list)
    """Sequences in the order of their ends."""

    @property
    def mean_wait_s(self) -> float:
        """Mean of all waits; 0 without any."""
        return fmean(self.waits_s.values()) if self.waits_s else 0.0

    @property
    def longest_wait_s(self) -> float:
        """The longest wait; 0 without any."""
        return max(self.waits_s.values(), default=0.0)


def recorded_outcome(recording: Recording, lives: list[Life]) -> Outcome:
    """Return what the recording itself shows."""
    events = [event for segment in recording.segments for event in segment["events"]]
    outcome = Outcome(seconds=events[-1][0] - events[0][0] if events else 0.0)
    for _, verb, _, decision in events:
        outcome.num_steps += verb == "commit"
        if verb == "schedule" and isinstance(decision, list):
            outcome.num_preemptions += len(decision[1].get("preempted", ()))
    outcome.waits_s = {one.number: one.start_s - one.arrival_s for one in lives if one.start_s is not None}
    ended = [(one.end_s, one.number) for one in lives if one.end_s is not None]
    outcome.finished = [number for _, number in sorted(ended)]
    return outcome


def lives_of(recording: Recording) -> list[Life]:
    """Return the turns of all sequences of a recording, in the order of their arrivals.

    Raises ``RecordingError`` if sequences branched (beam search): what they do depends on each other's logits.
    """
    lives, open_lives = list[Life](), dict[int, Life]()

    def arrive(described: Mapping[str, Any], now_s: float) -> None:
        number = described["plain"]["sequence_id"]
        _, row = recording.rows[described["row"]]
        open_lives[number] = Life(number, described, row, now_s, described["num_tokens"])
        lives.append(open_lives[number])

    for segment in recording.segments:
        first_s = segment["events"][0][0] if segment["events"] else 0.0
        queued = {*segment["state"]["waiting"], *segment["state"]["running"]}
        for described in segment["state"]["sequences"]:
            number = described["plain"]["sequence_id"]
            if number in queued and number not in open_lives:
                arrive(described, first_s)
        for now_s, verb, given, decision in segment["events"]:
            if verb in _BRANCHING:
                raise RecordingError("sequences branch in it (beam search), so other decisions are not known")
            if verb == "add_sequences":
                for described in given:
                    arrive(described, now_s)
            _follow(open_lives, now_s, verb, given, decision)
    return lives


def _follow(lives: dict[int, Life], now_s: float, verb: str, given: list[Any], decision: Any) -> None:
    if verb == "schedule" and isinstance(decision, list):
        for number in decision[1].get("admitted", ()):
            if number in lives and lives[number].start_s is None:
                lives[number].start_s = now_s
    elif verb == "commit":
        for number in given[1]:
            if number in lives:
                lives[number].length += 1
        for number, reason in decision:
            _end(lives, number, reason, now_s)
    elif verb == "finish_sequence":
        number = given[0]["plain"]["sequence_id"] if isinstance(given[0], dict) else given[0]
        _end(lives, number, given[1], now_s)


def _end(lives: dict[int, Life], number: int, reason: FinishReason, now_s: float) -> None:
    if (life := lives.pop(number, None)) is not None:
        life.end, life.end_s = reason, now_s


def learnt_costs(recording: Recording) -> CostModel:
    """Return the cost model that the recording begins with, taught by the recorded steps."""
    scheduler, _ = begin(recording.segments[0])
    steps = [given for segment in recording.segments for _, verb, given, _ in segment["events"] if verb == "observe"]
    typical_s = median(seconds for _, seconds in steps) if steps else 0.0
    scheduler.costs.step = Line(typical_s, 0.0)
    for num_tokens, seconds in steps:
        # Why not all: a step in which kernels were compiled says nothing of others.
        if seconds <= _MOST_TYPICAL * typical_s:
            scheduler.costs.step.observe(num_tokens, seconds)
    return scheduler.costs


class WhatIf:
    """One run of recorded requests under given settings."""

    def __init__(self, recording: Recording, lives: list[Life], changes: Mapping[str, Any]) -> None:
        """Take settings for those of the recording; all else stays. Raises ``RecordingError``, ``InvalidConfig``."""
        if not recording.segments:
            raise RecordingError("it has no steps")
        # Why first: it refuses a recording whose settings are none.
        self.outcome, self._costs = Outcome(), learnt_costs(recording)
        settings = {**recording.segments[0]["settings"], **changes}
        if changes.get("policy", settings["policy"]) != recording.segments[0]["settings"]["policy"]:
            settings["policy_options"] = {}
        settings["max_num_waiting"] = max(settings["max_num_waiting"], len(lives))
        self.scheduler = build_scheduler(settings, load_policy)
        self._lives = {one.number: one for one in lives}
        self._coming = sorted(lives, key=lambda one: one.arrival_s, reverse=True)
        self._postponed: list[Life] = []
        self._arrived_s: dict[int, float] = {}
        self._sequences: dict[int, ReplayedSequence] = {}
        self._moving: dict[int, float] = {}
        self._now_s = self._start_s = self._coming[-1].arrival_s if self._coming else 0.0

    def run(self) -> Outcome:
        """Run to the end of all requests, or to where nothing can progress."""
        while self._coming or self._postponed or self.scheduler.has_work:
            self._arrive()
            self._settle()
            if not self._step() and not self._sleep():
                break
        self.outcome.seconds = self._now_s - self._start_s
        return self.outcome

    def _arrive(self) -> None:
        due, self._postponed = self._postponed, []
        while self._coming and self._coming[-1].arrival_s <= self._now_s:
            due.append(self._coming.pop())
        for life in due:
            earlier = self._sequences.get(life.number)
            if earlier is not None and earlier.finish_reason is None:
                # Why: a further turn cannot come before the one before it has ended.
                self._postponed.append(replace(life, arrival_s=self._now_s))
            else:
                self._add(life)
        waiting = self.scheduler.waiting
        if waiting.gated and self._gate_s() <= self._now_s:
            waiting.open_gate()
        for number in [one.sequence_id for one in waiting if not self._num_left(one.sequence_id)]:
            self._finish(number)

    def _add(self, life: Life) -> None:
        self._lives[life.number] = life
        sequence = self._sequences[life.number] = sequence_of({**life.described, "status": "waiting"})
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
        return self._lives[number].length - len(self._sequences[number].token_ids)

    def _finish(self, number: int) -> None:
        self.scheduler.finish_sequence(self._sequences[number], self._lives[number].end or "abort")
        self.outcome.finished.append(number)

    def _gate_s(self) -> float:
        oldest = next(self.scheduler.waiting.never_started())
        opens_s = self.scheduler.gate.opens_s(
            self.scheduler.waiting.num_never_started, self._arrived_s[oldest.sequence_id]
        )
        return opens_s

    def _settle(self) -> None:
        for number, end_s in list(self._moving.items()):
            if end_s <= self._now_s:
                del self._moving[number]
                self.scheduler.moves.complete_transfer(number, self._seconds_of_known(number), is_ok=True)
        self._start(self.scheduler.moves.take_due())

    def _seconds_of_known(self, number: int) -> float:
        return self._seconds_of(self.scheduler.kv_cache.host.in_flight[number])

    def _seconds_of(self, transfer: Transfer) -> float:
        return self._costs.moves[transfer.direction].seconds(len(transfer.moves))

    def _start(self, transfers: list[Transfer]) -> None:
        for transfer in transfers:
            self._moving[transfer.transfer_id] = self._now_s + self._seconds_of(transfer)

    def _step(self) -> bool:
        self.scheduler.begin_step(self._now_s)
        plan = self.scheduler.schedule()
        while plan.moves_blocks:
            self.outcome.num_preemptions += len(plan.preempted)
            self._start(self.scheduler.make_room(plan))
            plan = self.scheduler.schedule()
        if not plan.rows:
            return False
        for sequence in plan.admitted:
            number = sequence.sequence_id
            self.outcome.waits_s.setdefault(number, self._now_s - self._arrived_s[number])
        self.scheduler.reserve(plan)
        seconds = self._costs.step.seconds(plan.num_tokens)
        self._now_s += seconds
        self.scheduler.costs.step.observe(plan.num_tokens, seconds)
        self.scheduler.queues.observe(plan, seconds)
        self._commit(plan)
        return True

    def _commit(self, plan: SchedulePlan) -> None:
        sampled: dict[int, int | None] = {}
        for row in plan.rows:
            number = row.sequence.sequence_id
            if row.sequence.prompt_logprobs is not None:
                row.sequence.prompt_logprobs += [None] * len(row.scored_positions)  # type: ignore[list-item]
            if row.is_sampled:
                life, known = self._lives[number], len(row.sequence.token_ids)
                sampled[number] = life.row[known]
                if known + 1 == life.length:
                    self._sequences[number].next_end = life.end or "abort"
        for new in self.scheduler.commit(plan, sampled):
            if new.finish_reason is not None:
                self.outcome.finished.append(new.sequence.sequence_id)
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
        if self.scheduler.waiting.gated:
            yield self._gate_s()


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same requests three times."""

    recorded: Outcome
    modelled: Outcome
    """The recorded settings on the virtual clock."""
    changed: Outcome


def compare(recording: Recording, changes: Mapping[str, Any]) -> Comparison:
    """Run the requests of a recording under its own settings and under others, which are those of ``settings_of``.

    Raises ``RecordingError`` if sequences branch in it, a setting is none, or it is not consistent in itself.
    """
    try:
        lives = lives_of(recording)
        return Comparison(
            recorded_outcome(recording, lives), WhatIf(recording, lives, {}).run(),
            WhatIf(recording, lives, changes).run(),
        )
    except RecordingError:
        raise
    except Exception as error:  # whatever forged events lead to
        raise RecordingError(f"its requests cannot be run ({type(error).__name__})") from error


def changed_order(one: Outcome, other: Outcome) -> int:
    """Return how many sequences end in another place of the order, among those that end in both."""
    both = set(one.finished) & set(other.finished)
    orders = [[number for number in outcome.finished if number in both] for outcome in (one, other)]
    return sum(first != second for first, second in zip(*orders, strict=True))
