"""When sequences will start and end, in closed form: between two events the batch is constant, so time is steps x cost.

An event is a start, a prompt that is computed, or an end. Nothing is planned and no block is counted one by one: a
forecast costs a few operations for each sequence, however many steps it covers. What it leaves out (preemptions,
company of later arrivals, cached prefixes of others) is for its user to calibrate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from pagedcore.scheduler.step_time import StepTimes


@dataclass(slots=True, eq=False)
class Job:
    """What is left of one sequence."""

    number: int
    num_prefill: int
    """Positions to compute before its next token; 0: it decodes."""
    num_left: int
    """Tokens to come, one at least, before it ends or ``num_after`` counts."""
    num_known: int
    """Its tokens so far."""
    num_after: int = 0
    """Tokens to come once all so far are computed again, which a model with two kinds of angles does at a border."""

    def __lt__(self, other: Job) -> bool:
        """Order jobs that end in the same step."""
        return self.number < other.number


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a step may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_positions: int
    """Of the KV pool."""
    prefill_share: float = 1.0
    is_guaranteed: bool = False
    """Whether a sequence starts only if there is room for it, and for all that run, at their longest."""
    is_static: bool = False
    """Whether a batch starts only when the one before has ended."""


@dataclass(slots=True)
class Forecast:
    """One forecast, used once. Times are in seconds from ``now_s`` = 0 on.

    Args:
        times: what a step costs.
        bounds: of every step.
        usual_s: the least that a step takes once nothing waits any more, because others will have come; 0: none comes.
        now_s: when the first step begins.
        gated: numbers of those that wait for company.
        opens_s: when they may start if nobody else comes.
    """

    times: StepTimes
    bounds: Bounds
    usual_s: float = 0.0
    now_s: float = 0.0
    gated: frozenset[int] = frozenset()
    opens_s: float = 0.0
    start_s: dict[int, float] = field(default_factory=dict)
    """Of what waits, by number."""
    first_s: dict[int, float] = field(default_factory=dict)
    """When the next token of what has none of its present tokens pending comes: of every job that has a prefill."""
    end_s: dict[int, float] = field(default_factory=dict)
    num_operations: int = 0
    """Stretches of equal steps, and starts: what the time of a forecast is proportional to."""
    _num_steps: int = 0
    _num_read: int = 0
    _num_claimed: int = 0
    _waiting: deque[Job] = field(default_factory=deque)
    _prefilling: deque[Job] = field(default_factory=deque)
    _decoding: list[tuple[int, Job]] = field(default_factory=list)

    def run(self, running: Iterable[Job], waiting: Iterable[Job], last: int | None = None) -> Forecast:
        """Follow jobs, those that wait in the order of their starts, until ``last`` has ended, or all; return this."""
        for job in running:
            self._claim(job, 1)
            if job.num_prefill:
                self._prefilling.append(job)
            else:
                self._decoding.append((job.num_left, job))
                self._num_read += job.num_known
        heapify(self._decoding)
        self._waiting.extend(waiting)
        while (self._prefilling or self._decoding or self._waiting) and last not in self.end_s:
            self._start()
            self._advance()
        return self

    def _claim(self, job: Job, sign: int) -> None:
        if self.bounds.is_guaranteed:
            self._num_claimed += sign * (job.num_known + job.num_left + job.num_after)

    def _start(self) -> None:
        """Start what has room, as ``admission`` does: as long as there are rows, tokens and blocks."""
        bounds, prefilling, waiting = self.bounds, self._prefilling, self._waiting
        num_rows = len(self._decoding) + len(prefilling)
        if not waiting or num_rows >= bounds.max_num_seqs or (bounds.is_static and num_rows):
            return
        num_tokens = bounds.max_num_batched_tokens - len(self._decoding) - sum([one.num_prefill for one in prefilling])
        held = self._num_claimed or self._num_read + sum([one.num_known for one in prefilling])
        while waiting and num_rows < bounds.max_num_seqs and (num_tokens > 0 or bounds.is_static):
            job = waiting[0]
            if job.number in self.gated and self.now_s < self.opens_s:
                if num_rows:
                    return
                self.now_s = self.opens_s
            held += job.num_known + (job.num_left + job.num_after if bounds.is_guaranteed else 0)
            if num_rows and held > bounds.num_positions:
                return
            self.num_operations += 1
            self._claim(job, 1)
            prefilling.append(waiting.popleft())
            self.start_s[job.number] = self.now_s
            num_rows += 1
            num_tokens -= job.num_prefill

    def _advance(self) -> None:
        """Compute the steps up to the next event."""
        self.num_operations += 1
        decoding, prefilling, num_tokens, done = self._decoding, self._prefilling, 0, list[Job]()
        num_steps = decoding[0][0] - self._num_steps if decoding else 0
        if prefilling:
            room = self.bounds.max_num_batched_tokens - len(decoding)
            if decoding and self.bounds.prefill_share < 1.0:
                room = min(room, int(self.bounds.prefill_share * self.bounds.max_num_batched_tokens))
            room, head = max(1, room), prefilling[0]
            if head.num_prefill > room:
                whole = (head.num_prefill - 1) // room
                num_steps, num_tokens = min(num_steps or whole, whole), room
                head.num_prefill -= num_steps * room
            else:
                num_steps = 1
                while prefilling and prefilling[0].num_prefill <= room - num_tokens:
                    num_tokens += prefilling[0].num_prefill
                    done.append(prefilling.popleft())
                if prefilling:
                    prefilling[0].num_prefill -= room - num_tokens
                    num_tokens = room
        self._pass(num_steps, num_tokens, sum([one.num_known for one in done]))
        for job in done:
            self.first_s.setdefault(job.number, self.now_s)
            job.num_left -= 1
            job.num_known += 1
            heappush(decoding, (self._num_steps + job.num_left, job))
            self._num_read += job.num_known
        while decoding and decoding[0][0] <= self._num_steps:
            _, job = heappop(decoding)
            num_known = job.num_known + job.num_left
            self._num_read -= num_known
            if job.num_after:
                job.num_prefill, job.num_known, job.num_left, job.num_after = num_known, num_known, job.num_after, 0
                prefilling.append(job)
            else:
                self.end_s[job.number] = self.now_s
                self._claim(job, -1)

    def _pass(self, num_steps: int, num_tokens: int, num_read: int) -> None:
        """Let so many equal steps pass, with so many prompt tokens in each of them."""
        num_rows, times = len(self._decoding), self.times
        all_read = num_steps * self._num_read + num_rows * num_steps * (num_steps - 1) // 2
        seconds = num_steps * times.seconds(num_tokens, num_rows, 0) + times.kv_token_s * (all_read + num_read)
        self.now_s += seconds if self._waiting else max(seconds, num_steps * self.usual_s)
        self._num_steps += num_steps
        self._num_read += num_steps * num_rows
