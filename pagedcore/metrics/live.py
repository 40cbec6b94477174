"""What the rows of a batch do, while a view is open: an observer of steps, and the looks that the view takes at it.

    rows = LiveRows()
    await engine.call(rows.attach)                  # of an AsyncEngine; then about ten times a second:
    look = await engine.call(lambda _: rows.look())
    await engine.call(rows.detach)                  # an engine without views does no work for them

Owns the stretches: times in which one sequence did one thing. Attaching, looking and detaching happen on the engine's
thread; a ``Look`` is plain data for any thread. Neither holds text or token ids.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pagedcore.engine.engine import Engine
from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.plugins.manager import PluginManager
from pagedcore.requests.request import Request
from pagedcore.requests.stats import EngineStats, StepStats
from pagedcore.scheduler.plan import ScheduledRow
from pagedcore.sequence import Sequence, SequenceStatus

MAX_KEPT: Final = 4096
"""Most stretches, and most tenants' progress, that are kept between two looks; older stretches are dropped."""
MAX_TTFTS: Final = 64
"""Most times to a first token that are kept of one tenant between two looks."""


class Stretch(NamedTuple):
    """Steps in which one sequence did one thing without a pause; times are seconds of the engine's clock."""

    sequence_id: int
    request_id: str
    salt: bytes
    """Of the request's tenant; a secret."""
    kind: str
    """"prefill", "recompute" (what a preemption has lost) or "decode"."""
    start_s: float
    end_s: float
    num_tokens: int
    """Positions computed."""
    ending: str = ""
    """Why the sequence left its row: "preempted" or a finish reason; empty if it did not."""
    num_blocks: int = 0
    """Blocks that the sequence holds, if it runs."""


class Waiting(NamedTuple):
    """A sequence that waits."""

    sequence_id: int
    request_id: str
    salt: bytes
    reason: str
    """As in ``StepStats.waits``."""
    waited_s: float
    """Since the request arrived."""
    num_prompt_tokens: int
    is_preempted: bool


@dataclass(slots=True)
class Progress:
    """What a tenant's sequences did since the last look."""

    num_sampled: int = 0
    """Tokens generated."""
    num_intervals: int = 0
    intervals_s: float = 0.0
    """From each of these tokens to the next, summed."""
    ttfts_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TTFTS))
    """From the arrival of each request to its first token."""


@dataclass(frozen=True, slots=True)
class Look:
    """What happened since the look before, and how it stands."""

    now_s: float
    stats: EngineStats
    ended: list[Stretch]
    running: list[Stretch]
    """The present stretch of every sequence that runs; the same one appears longer in the next look."""
    waiting: list[Waiting]
    """In the order of the queue."""
    progress: dict[bytes, Progress]
    """By salt."""

    @property
    def is_quiet(self) -> bool:
        """Whether nothing waits, runs or has ended."""
        return not (self.ended or self.running or self.waiting)


@dataclass(slots=True)
class _Track:
    """One sequence that runs."""

    sequence: Sequence
    request: Request
    num_preemptions: int
    kind: str = ""
    start_s: float = 0.0
    end_s: float = 0.0
    num_tokens: int = 0
    step: int = -1
    """The last step that computed it."""
    sampled_s: float | None = None

    def stretch(self, ending: str = "", num_blocks: int = 0) -> Stretch:
        return Stretch(self.sequence.sequence_id, self.request.request_id, self.request.options.salt, self.kind,
                       self.start_s, self.end_s, self.num_tokens, ending, num_blocks)


class LiveRows:
    """Follows the rows of one engine from ``attach`` to ``detach``.

    Invariant: while it is not attached, the engine does no work for it.
    Invariant: what it keeps is bounded by the running sequences and ``MAX_KEPT``, however late the next look comes.
    """

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        """``wake`` is called on the engine's thread by the first step after a quiet look."""
        self._wake = wake
        self._engine: Engine | None = None
        self._remove: Callable[[], None] | None = None
        self._tracks: dict[int, _Track] = {}
        self._ended: deque[Stretch] = deque(maxlen=MAX_KEPT)
        self._progress: dict[bytes, Progress] = {}
        self._step, self._step_end_s = 0, 0.0
        self._stopped_by, self._num_deferred, self._capped = "", 0, tuple[int, ...]()
        self._awaiting = frozenset[int]()
        self._was_quiet = False

    def attach(self, engine: Engine) -> None:
        """Begin to observe the engine's steps."""
        manager = PluginManager()
        manager.add(self, "live rows")
        self._engine, self._step_end_s = engine, engine.requests.clock.now()
        self._remove = engine.hooks.add(manager)

    def detach(self, _: Engine | None = None) -> None:
        """End it and forget everything; a second call, or one without ``attach``, does nothing."""
        remove, self._remove, self._engine = self._remove, None, None
        self._tracks.clear()
        if remove is not None:
            remove()

    @hookimpl
    def pagedcore_step(self, stats: StepStats) -> None:
        """Lengthen the stretches of the step's rows, and end those of sequences that run no more."""
        if (engine := self._engine) is None:
            return
        now_s = engine.requests.clock.now()
        for sequence in stats.plan.admitted:
            # Why: one of a static batch may run before it is computed for the first time.
            self._track_of(sequence, engine)
        for row in stats.plan.rows:
            if (track := self._track_of(row.sequence, engine)) is not None:
                self._note(track, row, stats.num_steps, now_s)
        self._sweep()
        self._step, self._step_end_s = stats.num_steps, now_s
        plan = stats.plan
        self._stopped_by, self._num_deferred, self._capped = plan.stopped_by, plan.num_deferred, plan.capped
        self._awaiting = frozenset(plan.awaiting)
        if self._was_quiet:
            self._was_quiet = False
            self._wake()

    def look(self) -> Look:
        """Take what happened since the last look."""
        engine = self._engine
        if engine is None:
            raise RuntimeError("live rows are not attached to an engine")
        self._sweep()
        num_blocks_of = engine.scheduler.kv_cache.device.num_blocks_of
        running = [one.stretch(num_blocks=num_blocks_of(number)) for number, one in self._tracks.items()]
        now_s, ended, progress = engine.requests.clock.now(), list(self._ended), self._progress
        self._ended.clear()
        self._progress = {}
        look = Look(now_s, engine.stats(), ended, running, list(self._waiting(engine, now_s)), progress)
        self._was_quiet = look.is_quiet
        return look

    def _track_of(self, sequence: Sequence, engine: Engine) -> _Track | None:
        number = sequence.sequence_id
        if number not in self._tracks:
            # Why: a candidate that ended in its first step is known no more.
            if (pending := engine.requests.outputs.by_sequence.get(number)) is None:
                return None
            at_s = self._step_end_s
            self._tracks[number] = _Track(sequence, pending.request, sequence.num_preemptions, "prefill", at_s, at_s)
        return self._tracks[number]

    def _note(self, track: _Track, row: ScheduledRow, step: int, now_s: float) -> None:
        kind = "decode" if row.is_decode else "recompute" if row.sequence.num_preemptions else "prefill"
        if (track.kind, track.step) != (kind, self._step):
            if track.num_tokens:
                self._ended.append(track.stretch())
            # Why: before an idle engine's step there is no other one whose end is its beginning.
            first_s = track.request.metrics.first_scheduled_s or 0.0
            track.kind, track.num_tokens, track.start_s = kind, 0, max(self._step_end_s, min(first_s, now_s))
        track.end_s, track.step = now_s, step
        track.num_tokens += row.num_tokens
        if row.num_sampled:
            # Why: of several tokens of a step, each is one; and a step may have ended before the last of them.
            self._count(track, now_s, len(row.sequence.token_ids) - row.known_end if row.drafts else 1)

    def _count(self, track: _Track, now_s: float, num_sampled: int) -> None:
        salt, metrics = track.request.options.salt, track.request.metrics
        if salt not in self._progress and len(self._progress) >= MAX_KEPT:
            return
        progress = self._progress.setdefault(salt, Progress())
        progress.num_sampled += num_sampled
        if track.sampled_s is not None:
            progress.num_intervals += num_sampled
            progress.intervals_s += now_s - track.sampled_s
        elif (metrics.first_token_s or 0.0) > self._step_end_s and metrics.ttft_s is not None:
            progress.ttfts_s.append(metrics.ttft_s)
        track.sampled_s = now_s

    def _sweep(self) -> None:
        gone = [one for one in self._tracks.values() if one.sequence.status is not SequenceStatus.RUNNING]
        for one in gone:
            del self._tracks[one.sequence.sequence_id]
            is_preempted = one.sequence.num_preemptions > one.num_preemptions
            self._ended.append(one.stretch("preempted" if is_preempted else one.sequence.finish_reason or "stop"))

    def _waiting(self, engine: Engine, now_s: float) -> Iterator[Waiting]:
        for sequence, reason in self._reasons(engine):
            if (pending := engine.requests.outputs.by_sequence.get(sequence.sequence_id)) is not None:
                request = pending.request
                yield Waiting(sequence.sequence_id, request.request_id, request.options.salt, reason,
                              now_s - request.metrics.arrival_s, sequence.num_prompt_tokens,
                              sequence.num_preemptions > 0)

    def _reasons(self, engine: Engine) -> Iterator[tuple[Sequence, str]]:
        """Yield what waits, with the reasons that ``StepStats.waits`` counts."""
        waiting, host, num_deferred = engine.scheduler.waiting, engine.scheduler.kv_cache.host, self._num_deferred
        for sequence in waiting.sequences:
            if sequence.sequence_id in waiting.gated:
                reason = "company"
            elif host.in_flight and host.is_moving(sequence.sequence_id):
                reason = "transfer"
            elif sequence.sequence_id in self._capped:
                reason = "tenant"
            elif sequence.sequence_id in self._awaiting:
                reason = "adapter"
            elif num_deferred:
                # Why the first ones: what admission passed over and did not start it has deferred.
                num_deferred -= 1
                reason = "prefix"
            else:
                reason = self._stopped_by if self._stopped_by not in ("", "adapter") else "new"
            yield sequence, reason
