"""One engine on a virtual clock: its scheduler and block manager as they are, and a formula where the model would run.

Steps in which the same sequences decode, and nothing else can happen, are planned once and committed together; the test
that switches this off gets the same times to the last bit.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence as ListOf
from dataclasses import astuple, dataclass, field
from itertools import takewhile
from typing import Any, Final

from pagedcore.analysis.load_simulation.costs import LoadTimes, prompt_work_of
from pagedcore.analysis.load_simulation.workload import SimulatedRequest
from pagedcore.config.engine_config import EngineConfig
from pagedcore.engine.builder import build_components
from pagedcore.engine.kv_memory import DEFAULT_MEMORY_SHARE
from pagedcore.errors import EngineOverloaded, InternalError, InvalidConfig, RequestTooLarge
from pagedcore.kv_cache.host_cache import Transfer
from pagedcore.kv_cache.windowed_blocks import WindowedBlocks
from pagedcore.protocols import FloatArray, RaggedRows
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler.plan import NewToken, ScheduledRow, SchedulePlan
from pagedcore.scheduler.step_recipe import run_step
from pagedcore.scheduler.step_time import StepTimes
from pagedcore.sequence import Sequence

_PARAMS: Final = SamplingParams(temperature=0.0, ignore_eos=True)
_STATE_BYTES: Final = 2
_GENERATED: Final = 2**50
"""Generated tokens have ids from here on, by sequence, so that no prompt shares them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedModel:
    """What the scheduler has to know of a model: a ``ModelBackend`` that has no weights and computes nothing."""

    max_model_len: int
    block_size: int
    is_schedule_invariant: bool = True
    vocab_size: int = 1
    eos_token_ids: frozenset[int] = frozenset()
    kv_bytes_per_token: int = 1
    """Of all layers but those with a window."""
    window: int = 0
    """Positions that its layers with a window read, which give up what has left it; 0: it has none."""
    window_bytes_per_token: int = 1
    """Of layers with a window. Where the pool is given in blocks, no bytes matter."""
    num_states: int = 0
    """State blocks that there is memory for, of a model with recurrent layers; 0: it has none."""

    @property
    def cache_store(self) -> Any:
        """Something, because engines can copy blocks; no block is ever copied here."""
        return self

    @property
    def windows(self) -> SimulatedModel:
        """Return what says how its layers with a window are kept, and keeps nothing."""
        return self

    @property
    def store(self) -> Any:
        """As ``cache_store``, of window blocks."""
        return self

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes that a window block would have."""
        return block_size * self.window_bytes_per_token

    def use(self, num_windows: int) -> None:
        """Do nothing."""

    @property
    def state_bytes(self) -> int:
        """Return the bytes that a state would have: any number, as only states share their memory."""
        return _STATE_BYTES if self.num_states else 0

    @property
    def state_store(self) -> None:
        """Nothing: no state is ever moved here."""

    def allocate_states(self, num_states: int) -> None:
        """Do nothing."""

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Do nothing: there are no bytes."""

    def forward(self, batch: RaggedRows) -> FloatArray:
        """Raise ``InternalError``."""
        raise InternalError("a simulated model computes nothing")

    def free_kv_bytes(self) -> int:
        """Return more bytes than any pool has; with states, those of which an engine takes memory for these."""
        if not self.num_states:
            return 2**62
        return math.ceil((self.num_states + 0.5) * _STATE_BYTES / DEFAULT_MEMORY_SHARE)

    def kv_block_bytes(self, block_size: int) -> int:
        """Return the bytes that a block would have, with all layers."""
        return block_size * self.kv_bytes_per_token + (self.block_bytes(block_size) if self.window else 0)

    def release_kv(self) -> None:
        """Do nothing."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of one request; times in seconds since the first arrival's origin."""

    arrival_s: float
    replica: int
    num_input: int
    num_output: int
    tenant: str = ""
    accepted_s: float = 0.0
    """When the engine took it: at once if it was idle, else at the end of the step in which it arrived."""
    started_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_cached: int = 0
    """Prompt tokens that were found in the cache when it started last."""
    num_preemptions: int = 0
    refusal: str = ""
    """Why it was not completed: "queue full", "too long", "waited too long"; empty if it was."""

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the arrival to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds from one token to the next; 0 for a completion of one token."""
        if self.finished_s is None or self.first_token_s is None:
            return None
        return (self.finished_s - self.first_token_s) / max(1, self.num_output - 1)


@dataclass(slots=True)
class Timeline:
    """One number of every step in each array."""

    end_s: array[float] = field(default_factory=lambda: array("d"))
    num_rows: array[int] = field(default_factory=lambda: array("q"))
    num_waiting: array[int] = field(default_factory=lambda: array("q"))
    interval_s: array[float] = field(default_factory=lambda: array("d"))
    """Times between two tokens of one sequence, each with the number of sequences it was the same for; not by step."""
    interval_count: array[int] = field(default_factory=lambda: array("q"))


class Replica:
    """One simulated engine.

    Invariant: ``now_s`` is the end of the last step or of the acceptance of what arrived since, whichever is later.
    """

    def __init__(self, number: int, model: SimulatedModel, config: EngineConfig, times: StepTimes) -> None:
        """Build the scheduler that an engine with this configuration has.

        Raises ``InvalidConfig`` as ``Engine.from_pretrained`` does, for a host tier, whose transfers take no time here,
        and for a model with states whose pool is not given in blocks.
        """
        if config.host_kv_memory is not None:
            raise InvalidConfig("host_kv_memory: a simulated engine has none; leave it.")
        if model.num_states and config.num_kv_blocks is None:
            raise InvalidConfig("num_kv_blocks: got None, needed is a number for a simulated model with states, whose "
                                "bytes are not known.")
        components = build_components(model, config=config)
        config = components.config
        self.number, self.now_s, self.timeline = number, 0.0, Timeline()
        self.scheduler = components.scheduler
        is_static = not self.scheduler.queues.is_dynamic
        # Why not with these: single decode steps leave some on their way, and steps together would leave none.
        leaves_behind = model.num_states or components.memory.windows.num_windows
        self.jumps = (config.phases == "mixed" and config.eviction_policy != "fifo" and is_static
                      and not leaves_behind)
        """Whether equal steps are committed together."""
        self.busy_s = self.position_seconds = 0.0
        """Seconds of steps, and their sum over all positions whose keys and values a step has read."""
        self.most_blocks = self.most_windows = 0
        """The most blocks and window blocks that sequences have held at once, those of the step in flight included."""
        self._blocks = components.kv_cache.device
        self.num_positions = self._blocks.num_blocks * self._blocks.block_size
        self._config, self._max_model_len = config, components.info.max_model_len
        self._times = times if isinstance(times, LoadTimes) else LoadTimes(*astuple(times))
        # Why: who waits may start before those that run do end, under other policies.
        self._is_plain = config.scheduling_policy in ("fcfs", "static") and config.queue_timeout_s is None
        self._open: dict[int, Outcome] = {}
        self._latest_s: dict[int, float] = {}
        self._num_added = 0
        self._is_after_prompts = False

    @property
    def num_open(self) -> int:
        """Requests that wait or run."""
        return len(self._open)

    def num_cached_tokens(self, request: SimulatedRequest) -> int:
        """Return how many tokens of a request's prompt are in the cache now."""
        return self.scheduler.kv_cache.match(self._sequence(request)).num_tokens

    def add_request(self, request: SimulatedRequest) -> Outcome:
        """Let a request arrive; arrivals come in order, and after ``run_until`` their time. It may be refused."""
        self._num_added += 1
        outcome = Outcome(arrival_s=request.arrival_s, replica=self.number, num_input=request.num_input,
                          num_output=request.num_output, tenant=request.options.tenant)
        if not self._open:
            self.now_s = max(self.now_s, request.arrival_s)
        outcome.accepted_s = max(self.now_s, request.arrival_s)
        if outcome.num_input + outcome.num_output > self._max_model_len:
            outcome.refusal = "too long"
            return outcome
        try:
            self.scheduler.add_sequences(self._sequence(request))
            self._open[self._num_added] = outcome
            self.now_s += self._times.request_s
        except RequestTooLarge:
            outcome.refusal = "too long"
        except EngineOverloaded:
            outcome.refusal = "queue full"
        return outcome

    def run_until(self, until_s: float) -> None:
        """Run steps that begin before ``until_s``, as long as there is work."""
        while self._open and self.now_s < until_s:
            self._expire()
            if self._sleeps(until_s):
                continue
            if self.jumps and (num_steps := self._num_equal_steps()):
                self._jump(num_steps, until_s)
                continue
            run_step(self.scheduler, self)

    def _sequence(self, request: SimulatedRequest) -> Sequence:
        number, hasher = self._num_added, self._blocks.hasher
        own = {} if self._config.enable_prefix_caching else {"request": str(number).encode()}
        return Sequence(
            number, request.token_ids(), _PARAMS, max_tokens=request.num_output, seed=0, options=request.options,
            arrival=number, arrival_s=max(self.now_s, request.arrival_s),
            cache_root=hasher.root({"salt": request.options.salt, **own}),
        )

    def _expire(self) -> None:
        limit_s = self._config.queue_timeout_s
        if limit_s is not None:
            late = takewhile(lambda one: self._open[one.sequence_id].accepted_s < self.now_s - limit_s,
                             self.scheduler.waiting.never_started())
            for sequence in list(late):
                self._open[sequence.sequence_id].refusal = "waited too long"
                self.scheduler.finish_sequence(sequence, "error")
                self._close(sequence)

    def _sleeps(self, until_s: float) -> bool:
        """Return whether there is nothing to do, after sleeping until the gate opens if all wait for it."""
        if not self.scheduler.is_gated or (gated_s := self.scheduler.gated_s(self.now_s)) <= 0.0:
            return not self._open
        self.now_s = min(until_s, self.now_s + gated_s)
        return True

    def now(self) -> float:
        """Return the virtual time."""
        return self.now_s

    def move_blocks(self) -> None:
        """Do nothing: there is no host tier."""

    def make_room(self, plan: SchedulePlan, transfers: ListOf[Transfer]) -> None:
        """Do nothing: what is freed goes nowhere."""

    def compute(self, plan: SchedulePlan, copies: object, begun_s: float) -> None:
        """Let the time of the step pass."""
        for sequence in plan.admitted:
            if (outcome := self._open[sequence.sequence_id]).started_s is None:
                outcome.started_s = begun_s
        self._note_blocks()
        self._pass(*plan.work, len(plan.rows), *prompt_work_of(plan))

    def tokens(self, plan: SchedulePlan, sampled: None) -> dict[int, int | None]:
        """Return tokens that no prompt has."""
        return _tokens(plan)

    def publish(self, plan: SchedulePlan, news: ListOf[NewToken]) -> None:
        """Note the times of tokens and ends."""
        self._note_tokens([new.sequence.sequence_id for new in news])
        self._note_ends(news)

    def _note_blocks(self) -> None:
        self.most_blocks = max(self.most_blocks, self._blocks.num_used_blocks)
        if isinstance(self._blocks, WindowedBlocks):
            self.most_windows = max(self.most_windows, self._blocks.windows.num_used)

    def _pass(
        self, prefill: int, decode: int, kv: int, num_rows: int, chunks: int = 0, pairs: int = 0,
    ) -> None:
        """Let the time of a step pass."""
        seconds, line = self._times.seconds(prefill, decode, kv), self.timeline
        seconds += self._times.prompt_seconds(chunks, pairs, self._is_after_prompts)
        self._is_after_prompts = chunks > 0
        self.now_s += seconds
        self.busy_s += seconds
        self.position_seconds += seconds * kv
        line.end_s.append(self.now_s)
        line.num_rows.append(num_rows)
        line.num_waiting.append(len(self.scheduler.waiting))

    def _note_tokens(self, numbers: ListOf[int]) -> None:
        """Note that each of these sequences got a token now."""
        latest_s, now_s = self._latest_s, self.now_s
        before = Counter(map(latest_s.get, numbers))
        for time_s, count in before.items():
            if time_s is not None:
                self.timeline.interval_s.append(now_s - time_s)
                self.timeline.interval_count.append(count)
        if None in before:
            for number in numbers:
                if number not in latest_s:
                    self._open[number].first_token_s = now_s
        latest_s.update(dict.fromkeys(numbers, now_s))

    def _note_ends(self, news: ListOf[NewToken]) -> None:
        for new in news:
            if new.finish_reason is not None:
                self._open[new.sequence.sequence_id].finished_s = self.now_s
                self._close(new.sequence)

    def _close(self, sequence: Sequence) -> None:
        outcome = self._open.pop(sequence.sequence_id)
        outcome.num_cached, outcome.num_preemptions = sequence.num_cached_tokens or 0, sequence.num_preemptions
        self._latest_s.pop(sequence.sequence_id, None)
        self.scheduler.remove_sequence(sequence)

    def _num_equal_steps(self) -> int:
        """Return for how many steps every running sequence will compute one token, and nothing else can happen."""
        running, scheduler = self.scheduler.running.sequences, self.scheduler
        if not running or len(running) > self._config.max_num_batched_tokens:
            return 0
        if len(scheduler.waiting) and not (self._is_plain and len(running) >= self._config.max_num_seqs):
            return 0
        for one in running:
            if one.num_computed_tokens != len(one.token_ids) - 1 or one.num_computed_tokens < one.num_prompt_tokens:
                return 0
        count = min([one.num_prompt_tokens + one.max_tokens - len(one.token_ids) for one in running])
        needed = self._blocks.num_blocks_needed
        num_blocks = sum([needed(one.sequence_id, len(one.token_ids) + count - 1) for one in running])
        return count if num_blocks <= self._blocks.num_available_blocks else 0

    def _jump(self, num_steps: int, until_s: float) -> None:
        """Compute steps in which every running sequence gets one token, up to the end of the first of them."""
        running, line = list(self.scheduler.running.sequences), self.timeline
        num_rows, num_kv, steps = len(running), sum([len(one.token_ids) for one in running]), 0
        numbers = [one.sequence_id for one in running]
        while steps < num_steps and self.now_s < until_s:
            before_s = self.now_s
            self._pass(0, num_rows, num_kv + steps * num_rows, num_rows)
            self.scheduler.costs.steps.observe(0, num_rows, num_kv + steps * num_rows, self.now_s - before_s)
            if steps:
                line.interval_s.append(self.now_s - before_s)
                line.interval_count.append(num_rows)
            else:
                self._note_tokens(numbers)
            steps += 1
        self._latest_s.update(dict.fromkeys(numbers, self.now_s))
        rows = []
        for one in running:
            start = len(one.token_ids) - 1
            one.token_ids += [_GENERATED + one.sequence_id] * (steps - 1)
            needed = self._blocks.num_blocks_needed(one.sequence_id, start + steps)
            rows.append(ScheduledRow(one, start, steps, needed))
        plan = SchedulePlan(tuple(rows))
        self.scheduler.reserve(plan)
        self._note_blocks()
        self._note_ends(self.scheduler.commit(plan, _tokens(plan)))


def _tokens(plan: SchedulePlan) -> dict[int, int | None]:
    numbers = [row.sequence.sequence_id for row in plan.rows]
    return {number: _GENERATED + number for number in numbers}


IDLE: Final = math.inf
"""For ``Replica.run_until``: until nothing is left to do."""
