"""What became of each sequence of a recording, and what its steps cost: what other settings are compared with."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Final

from pagedcore.analysis.recorder.recording import Recording
from pagedcore.analysis.replay.decisions import begin
from pagedcore.config.speculation import MOST_DRAFTS
from pagedcore.outputs import FinishReason
from pagedcore.scheduler.cost_model import CostModel
from pagedcore.scheduler.step_time import StepTimeModel, StepTimes

_MOST_TYPICAL: Final = 20.0

Place = tuple[int, int]
"""The numbers of a segment and of an event in it; what comes before has happened."""
EVERYTHING: Final[Place] = (2**31, 0)


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
    drafts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By the tokens that it had: how many drafts its row was given, and how many of them were right."""

    def drafts_at(self, num_tokens: int) -> tuple[int, int]:
        """Return how many drafts a row behind so many tokens has, and how many are right: those of the recorded row
        that had drafts for the same tokens."""
        for start in range(num_tokens, max(-1, num_tokens - MOST_DRAFTS - 1), -1):
            if (found := self.drafts.get(start)) is not None:
                offered, kept = found
                num_gone = num_tokens - start
                return (offered - num_gone, kept - num_gone) if num_gone <= kept else (0, 0)
        return 0, 0


@dataclass(slots=True)
class Outcome:
    """What became of the requests under some settings."""

    num_steps: int = 0
    seconds: float = 0.0
    num_preemptions: int = 0
    num_refused: int = 0
    """Sequences that were turned away: in the recording, and those that the pool or the queue is too small for."""
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


def described_in(values: Any) -> list[Mapping[str, Any]]:
    """Return the descriptions of sequences among the arguments of an event."""
    found: list[Mapping[str, Any]] = []
    for one in values:
        if isinstance(one, dict) and "plain" in one:
            found.append(one)
        elif isinstance(one, list):
            found += described_in(one)
    return found


def events_between(recording: Recording, since: Place, until: Place) -> Iterator[tuple[float, str, list[Any], Any]]:
    """Yield the events of a recording from one place up to another."""
    for number, segment in enumerate(recording.segments):
        for place, event in enumerate(segment["events"]):
            if since <= (number, place) < until:
                yield event


def recorded_outcome(recording: Recording, until: Place = EVERYTHING) -> Outcome:
    """Return what the recording itself shows up to a place."""
    events = list(events_between(recording, (0, 0), until))
    outcome = Outcome(seconds=events[-1][0] - events[0][0] if events else 0.0, num_refused=num_refused_in(events))
    for _, verb, _, decision in events:
        outcome.num_steps += verb in ("commit", "foresee")
        if verb == "schedule" and isinstance(decision, list):
            outcome.num_preemptions += len(decision[1].get("preempted", ()))
    lives = lives_of(recording, until)
    outcome.waits_s = {one.number: one.start_s - one.arrival_s for one in lives if one.start_s is not None}
    ended = sorted([(one.end_s, place, one.number) for place, one in enumerate(lives) if one.end_s is not None])
    outcome.finished = [number for _, _, number in ended]
    return outcome


def num_refused_in(events: Iterable[tuple[float, str, list[Any], Any]]) -> int:
    """Count the sequences that were turned away at the door."""
    return sum([sum(given[0].values()) for _, verb, given, _ in events if verb == "refused"])


def lives_of(recording: Recording, until: Place = EVERYTHING) -> list[Life]:
    """Return the turns of all sequences up to a place, in the order of their arrivals."""
    lives, open_lives = list[Life](), dict[int, Life]()

    def arrive(described: Mapping[str, Any], now_s: float) -> None:
        number = described["plain"]["sequence_id"]
        _, row = recording.rows[described["row"]]
        open_lives[number] = Life(number, described, row, now_s, described["num_tokens"])
        lives.append(open_lives[number])

    for place, segment in enumerate(recording.segments[: until[0] + 1]):
        first_s = segment["events"][0][0] if segment["events"] else 0.0
        queued = {*segment["state"]["waiting"], *segment["state"]["running"]}
        for described in segment["state"]["sequences"]:
            number = described["plain"]["sequence_id"]
            if number in open_lives:
                # Why: a row has the tokens up to the end of its own segment only.
                open_lives[number].row = recording.rows[described["row"]][1]
            elif number in queued:
                arrive(described, first_s)
        for now_s, verb, given, decision in events_between(recording, (place, 0), min(until, (place + 1, 0))):
            if verb in ("add_sequences", "add_branch"):
                for described in given[: 1 if verb == "add_branch" else None]:
                    arrive(described, now_s)
            for described in described_in(given):
                if (life := open_lives.get(described["plain"]["sequence_id"])) is not None:
                    life.row, life.length = recording.rows[described["row"]][1], described["num_tokens"]
            _follow(open_lives, now_s, verb, given, decision)
    return lives


def _note_right(lives: Mapping[int, Life], numbers: Iterable[int]) -> None:
    """Note that one more draft of the latest row of each of these sequences was right."""
    for number in numbers:
        if number in lives and (drafts := lives[number].drafts):
            offered, kept = drafts[start := max(drafts)]
            drafts[start] = offered, kept + 1


def _follow(lives: dict[int, Life], now_s: float, verb: str, given: list[Any], decision: Any) -> None:
    if verb == "schedule" and isinstance(decision, list):
        for number in decision[1].get("admitted", ()):
            if number in lives and lives[number].start_s is None:
                lives[number].start_s = now_s
        for number, count in decision[1].get("drafts", ()):
            if number in lives:
                lives[number].drafts[lives[number].length] = count, 0
    elif verb in ("commit", "accept", "read"):
        for number in given[-1]:
            if number in lives:
                lives[number].length += 1
        if verb == "accept":
            _note_right(lives, given[0])
        for number, reason in decision:
            _end(lives, number, reason, now_s)
    elif verb in ("finish_sequence", "cancel_branch"):
        number = given[0]["plain"]["sequence_id"] if isinstance(given[0], dict) else given[0]
        _end(lives, number, given[1] if verb == "finish_sequence" else "abort", now_s)


def _end(lives: dict[int, Life], number: int, reason: FinishReason, now_s: float) -> None:
    if (life := lives.pop(number, None)) is not None:
        life.end, life.end_s = reason, now_s


def learnt_costs(recording: Recording) -> CostModel:
    """Return the cost model that the recording begins with, taught by the recorded steps."""
    scheduler, _ = begin(recording.segments[0])
    steps = [given for segment in recording.segments for _, verb, given, _ in segment["events"] if verb == "observe"]
    typical_s = median(seconds for *_, seconds in steps) if steps else 0.0
    scheduler.costs.steps = StepTimeModel(StepTimes(typical_s, 0.0, 0.0, 0.0))
    for prefill_tokens, decode_rows, kv_tokens, seconds in steps:
        # Why not all: a step in which kernels were compiled says nothing of others.
        if seconds <= _MOST_TYPICAL * typical_s:
            scheduler.costs.steps.observe(prefill_tokens, decode_rows, kv_tokens, seconds)
    return scheduler.costs
