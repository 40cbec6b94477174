"""The flight recorder: notes what goes into a scheduler and what it decides, in a ring of two segments.

Every call that changes a scheduler passes through a tap here, which keeps its arguments and its result as small plain
values. A segment begins with a copy of the scheduler's state, so that it needs nothing before it; when one is full, the
one before the last is dropped. So a dump has the last half to whole ring of steps, and the state they started from.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from pagedcore.analysis.recorder.state import State, settings_of
from pagedcore.errors import ForkedProcess, InternalError, PagedcoreError
from pagedcore.kv_cache.host_cache import Transfer
from pagedcore.protocols import Clock
from pagedcore.requests.candidate_groups import Branch, CandidateGroup, CandidateGroups
from pagedcore.requests.request import Request
from pagedcore.scheduler.plan import NewToken, SchedulePlan
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.sequence import Sequence

MAX_STEPS: Final = 8192
"""Plans of the whole ring, and bytes of it, as estimated."""
MAX_BYTES: Final = 64 * 2**20

_WITH_TOKENS: Final = frozenset({"add_sequences", "take_back", "add_branch", "restart", "park", "fetch"})
"""Verbs whose sequences may have changed outside of the scheduler."""
ADAPTER_VERBS: Final = ("add_adapter", "remove_adapter", "pin_adapter", "begin_load", "end_load", "take_out")
"""Of ``AdapterSlots``; numbers of adapters are no numbers of sequences."""
_EVENT_BYTES: Final = 200

Event = tuple[float, str, tuple[Any, ...], Any]
"""When it happened, the verb, its arguments, what was decided."""


@dataclass(slots=True, eq=False)
class Segment:
    """A state, and everything that happened from there on."""

    settings: State
    state: State
    is_continuous: bool
    """Whether it begins exactly where the segment before it ends."""
    events: list[Event] = field(default_factory=list)
    num_steps: int = 0
    num_bytes: int = 0


class FlightRecorder:
    """Records one scheduler, for one thread at a time.

    Invariant: there are at most two segments, of at most half the steps and bytes each, save for one verb's.
    """

    def __init__(self, scheduler: Scheduler, clock: Clock, *, max_steps: int = MAX_STEPS, max_bytes: int = MAX_BYTES
                 ) -> None:
        self.segments: list[Segment] = []
        self.weights: list[Any] = [0, "", ""]
        """Number, label and identity of those that steps are computed with from here on."""
        self._scheduler, self._clock = scheduler, clock
        self._max_steps, self._max_bytes = max_steps // 2, max_bytes // 2
        self._known: set[int] = set()
        self._in_session: set[int] = set()
        self._owners: dict[int, str] = {}
        self._groups: CandidateGroups | None = None
        self._needs_base, self._is_continuous, self._is_inside = True, False, False
        self._process_id = os.getpid()
        for owner, names in (
            (scheduler, ("add_sequences", "finish_sequence", "restart", "take_back", "add_branch", "cancel_branch",
                         "remove_sequence", "begin_step", "schedule", "make_room", "reserve", "rollback", "commit",
                         "accept", "settle", "foresee", "recall", "read")),
            (scheduler.moves, ("complete_transfer", "time_out_transfer", "take_due", "park", "fetch", "free_on_host")),
            (scheduler.waiting, ("open_gate", "count_as_new")),
            (scheduler.adapters, ADAPTER_VERBS),
        ):
            for name in names:
                setattr(owner, name, partial(self._call, name, getattr(owner, name)))
        for owner, count in ((scheduler, lambda _: 1), (scheduler.waiting, int)):
            setattr(owner, "require_room", partial(self._ask, owner.require_room, count))  # noqa: B010  (as above)
        steps = scheduler.costs.steps
        setattr(steps, "observe", partial(self._observe, steps.observe))  # noqa: B010  (as above)

    def require_owner(self) -> None:
        """Raise ``ForkedProcess`` in a fork, whose parent writes its own recordings."""
        if os.getpid() != self._process_id:
            raise ForkedProcess(self._process_id)

    def begin_anew(self) -> None:
        """Begin another segment before the next step, because blocks change in a way that is not recorded."""
        self._needs_base, self._is_continuous = True, False

    def begin_anew_after(self, owner: object, name: str) -> None:
        """Begin another segment after every call of a method that changes blocks by another way than the scheduler."""
        method = getattr(owner, name)

        def call(*given: Any) -> Any:
            try:
                return method(*given)
            finally:
                self.begin_anew()

        setattr(owner, name, call)

    def watch_beams(self, groups: CandidateGroups) -> None:
        """Note which beams every round of a search chooses: what they continue, and as which sequences."""
        self._groups, choose = groups, groups.choose_beams

        def noting(group: CandidateGroup, next_tokens: dict[int, int | None]) -> list[Branch]:
            parents, num_computed = group.candidates, len(group.continuations_of)
            branches = choose(group, next_tokens)
            if num_computed == len(parents) and group.search is not None:
                self._note("beams", ([one.sequence_id for one in parents], _survivors(group, parents, branches)), None)
            return branches

        setattr(groups, "choose_beams", noting)  # noqa: B010  (as the other taps)

    def note_request(self, request: Request) -> None:
        """Note which sequences a request has, and when it arrived."""
        numbers = [one.sequence_id for one in request.sequences]
        self._owners.update(dict.fromkeys(numbers, request.request_id))
        self._note("request", (request.request_id, numbers), None)

    def note_weights(self, weights: list[Any]) -> None:
        """Note that all steps from here on are computed with other weights."""
        self.weights = weights
        self._note("weights", tuple(weights), None)

    def _call(self, name: str, method: Callable[..., Any], *given: Any, **options: Any) -> Any:
        if self._is_inside:
            # Why: the verb that calls this one is recorded, and a replay makes the same call.
            return method(*given, **options)
        # Why not a full one before sequences are added: a further turn has changed its sequence by then.
        first = "begin_step" if self._scheduler.queues.is_dynamic else "schedule"
        may_begin = name == first or (name == "add_sequences" and self._needs_base)
        if may_begin and (self._needs_base or self._is_full):
            # Why not now: an engine that plans a step while another one is on its way ends that one first.
            self._scheduler.must_rest = not self._scheduler.has_landed
            if self._scheduler.has_landed:
                self._begin_segment()
        if self._needs_base:
            return method(*given, **options)
        given = tuple([list(one) if isinstance(one, Iterator) else one for one in given])
        num_bytes, unknown = self.segments[-1].num_bytes, self._unknown(given) if name == "add_sequences" else set()
        arguments = self._arguments_of(name, given, options)
        self._is_inside = True
        try:
            result = method(*given, **options)
        except PagedcoreError as error:
            # Why only these: a refusal has changed nothing, but a plan that cannot be made is what is looked for.
            if isinstance(error, InternalError):
                self._note(name, arguments, {"raised": type(error).__name__})
            elif name == "add_sequences":
                self.segments[-1].num_bytes = num_bytes
                self._known -= unknown
                self._note_refusal(error, len(given))
            raise
        except BaseException:
            self.begin_anew()
            raise
        finally:
            self._is_inside = False
        self._note(name, arguments, decision_of(name, result))
        return result

    def _ask(self, method: Callable[[int], None], count: Callable[[int], int], asked: int) -> None:
        """Let somebody ask for room before there is a sequence; only a refusal is an event."""
        if self._is_inside:
            return method(asked)
        self._is_inside = True
        try:
            return method(asked)
        except PagedcoreError as error:
            self._note_refusal(error, count(asked))
            raise
        finally:
            self._is_inside = False

    def _observe(self, observe: Callable[..., None], *given: Any) -> None:
        observe(*given)
        self._note("observe", given, None)

    def _note_refusal(self, error: PagedcoreError, num_sequences: int) -> None:
        """Note how many sequences were turned away, by error."""
        if self._needs_base:
            return
        segment, counts = self.segments[-1], dict[str, int]()
        if segment.events and segment.events[-1][1] == "refused":
            # Why together: callers may try as often as they like between two steps, and memory is bounded by steps.
            (counts,) = segment.events.pop()[2]
            segment.num_bytes -= _EVENT_BYTES
        name = type(error).__name__
        self._note("refused", ({**counts, name: counts.get(name, 0) + num_sequences},), None)

    def _unknown(self, given: Iterable[Any]) -> set[int]:
        return {one.sequence_id for one in given if isinstance(one, Sequence)} - self._known

    @property
    def _is_full(self) -> bool:
        last = self.segments[-1] if self.segments else None
        return last is not None and (last.num_steps >= self._max_steps or last.num_bytes >= self._max_bytes)

    def _begin_segment(self) -> None:
        state, is_full = self._scheduler.snapshot(), self._is_full
        numbers = {one["plain"]["sequence_id"] for one in state["sequences"]}
        for one in state["sequences"]:
            # Why: what the last segment ends with is compared with what this one begins with.
            self._note_session(one["plain"]["sequence_id"], is_marked=one["plain"]["is_in_session"])
        self._owners = {number: self._owners[number] for number in sorted(numbers & self._owners.keys())}
        state["requests"] = [[owner, [number]] for number, owner in self._owners.items()]
        state["beams"] = self._open_beams(numbers)
        state["weights"] = self.weights
        segment = Segment(settings_of(self._scheduler), state, self._is_continuous and is_full)
        copied = state["sequences"], state["device"]["tokens"], state["host"]["tokens"]
        segment.num_bytes = _EVENT_BYTES * sum(map(len, (*copied, *(beams for _, beams in state["beams"]))))
        self.segments = [*self.segments[-1:], segment]
        self._known, self._in_session = numbers, set()
        self._needs_base, self._is_continuous = False, True

    def _open_beams(self, live: set[int]) -> list[list[Any]]:
        """Return the beams of each open search, in its order, and descriptions of those that wait for the others."""
        groups = self._groups.by_request.values() if self._groups is not None else ()
        return [
            [[one.sequence_id for one in group.candidates],
             [one.snapshot() for one in group.candidates if one.sequence_id not in live]]
            for group in groups if group.search is not None
        ]

    def _arguments_of(self, name: str, given: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        if name in ("commit", "foresee"):
            for row in given[0].rows:
                self._note_session(row.sequence.sequence_id, is_marked=row.sequence.is_in_session)
            return self._sampled(given[1]) if name == "commit" else (sorted(given[1]),)
        if name in ("accept", "read"):
            return self._sampled(given[0])[1:]
        plain = [self._plain(name, one) for one in given if not isinstance(one, SchedulePlan)]
        return (*plain, dict(options)) if options else tuple(plain)

    def _plain(self, name: str, value: Any) -> Any:
        if isinstance(value, Sequence):
            number = value.sequence_id
            if name not in _WITH_TOKENS and (number in self._known or name == "count_as_new"):
                self._note_session(number, is_marked=value.is_in_session)
                return number
            self._known.add(number)
            described = value.snapshot()
            self.segments[-1].num_bytes += 8 * described["num_tokens"]
            return described
        return [self._plain(name, one) for one in value] if isinstance(value, list | tuple) else value

    def _note_session(self, number: int, *, is_marked: bool) -> None:
        # Why noted late: a session marks its sequence when the scheduler has it already.
        if is_marked and number not in self._in_session:
            self._in_session.add(number)
            self._note("in_session", (number,), None)

    @staticmethod
    def _sampled(sampled: Mapping[int, int | None]) -> tuple[Any, ...]:
        kept = {number: token for number, token in sampled.items() if token is not None}
        return array("q", sampled), array("q", kept), array("q", kept.values())

    def _note(self, name: str, arguments: tuple[Any, ...], decision: Any) -> None:
        if self._needs_base:
            return
        segment = self.segments[-1]
        segment.events.append((self._clock.now(), name, arguments, decision))
        segment.num_steps += name in ("commit", "foresee")
        segment.num_bytes += _EVENT_BYTES
        if name == "schedule" and isinstance(decision, tuple):
            segment.num_bytes += 8 * len(decision[0])
        elif name == "beams":
            segment.num_bytes += 24 * (len(arguments[0]) + len(arguments[1]))
        elif name in ("commit", "accept", "read"):
            segment.num_bytes += 24 * len(arguments[0])


def decision_of(name: str, result: Any) -> Any:
    """Return what a verb decided as small plain values, the same for a recording and for a replay of it."""
    match result:
        case SchedulePlan():
            return _plan(result)
        case list() if name in ("commit", "accept", "read"):
            return [[new.sequence.sequence_id, new.finish_reason] for new in result if _has_ended(new)]
        case list():
            return [_transfer(one) if isinstance(one, Transfer) else one for one in result]
        case tuple():
            return [list(pair) for pair in result]
    return result


def _survivors(group: CandidateGroup, parents: list[Sequence], branches: list[Branch]) -> list[list[int]]:
    """Return (place of the parent, sequence) of each beam of the next round; none if the search is done."""
    if group.is_decided:
        return []
    places = {one.sequence_id: place for place, one in enumerate(parents)}
    parent_of = {beam.sequence_id: parent.sequence_id for beam, parent in branches}
    numbers = [one.sequence_id for one in group.candidates]
    return [[places[parent_of.get(number, number)], number] for number in numbers]


def _has_ended(new: NewToken) -> bool:
    return new.finish_reason is not None


def _transfer(one: Transfer) -> list[Any]:
    states = [[[move.source, move.destination] for move in one.state_moves]] if one.state_moves else []
    return [one.transfer_id, one.direction.value, one.sequence_id, [list(pair) for pair in one.pairs], *states]


def _plan(plan: SchedulePlan) -> tuple[array[int], dict[str, Any]]:
    """Return (sequence, start, tokens, new blocks) of all rows behind each other, and all that a plain step lacks."""
    rows = array("q", [
        number for row in plan.rows
        for number in (row.sequence.sequence_id, row.start, row.num_tokens, row.num_new_blocks)
    ])
    rest: dict[str, Any] = {}
    if plan.admitted:
        rest["admitted"] = _ids(plan.admitted)
        rest["matches"] = [[row.sequence.sequence_id, *_match(row.match)] for row in plan.rows if row.match.num_tokens]
    if plan.moves_blocks:
        rest["preempted"] = [
            [one.sequence.sequence_id, one.kind.value, one.estimated_s, one.num_left_tokens] for one in plan.preempted
        ]
        rest["freed"] = _ids(plan.freed)
        rest["loaded"] = [[one.sequence.sequence_id, *_match(one.match)] for one in plan.swap_ins]
    if plan.num_drafts:
        rest["drafts"] = [[row.sequence.sequence_id, len(row.drafts)] for row in plan.rows if row.drafts]
    if plan.awaiting:
        rest["awaiting"] = list(plan.awaiting)
    if plan.num_stalled_rows or plan.num_deferred or plan.stopped_by:
        rest["waits"] = [plan.num_stalled_rows, plan.num_deferred, plan.stopped_by]
    return rows, rest


def _match(match: Any) -> list[Any]:
    tail = None if match.tail is None else list(match.tail)
    states = [match.host_state] if match.host_state >= 0 else []
    return [list(match.device_blocks), tail, list(match.host_blocks), match.num_tokens, *states]


def _ids(sequences: Iterable[Sequence]) -> list[int]:
    return [one.sequence_id for one in sequences]
