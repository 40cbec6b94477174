"""What an engine says of a request that has not come: when it would start and end."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListOf
from typing import Final

from pagedcore.analysis.quotes.quote_book import Moments, QuoteBook
from pagedcore.analysis.recorder.state import (
    ReplayedSequence,
    State,
    build_scheduler,
    restore,
    sequence_of,
    settings_of,
)
from pagedcore.engine.engine import Engine
from pagedcore.kv_cache.host_cache import Transfer
from pagedcore.outputs import Quote
from pagedcore.request_options import OptionKeywords, read_options
from pagedcore.requests.input_processor import ProcessedRequest, Prompt
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler.plan import NewToken, SchedulePlan
from pagedcore.scheduler.policies import Policy
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.scheduler.step_recipe import run_step
from pagedcore.scheduler.step_time import StepTimes

MAX_DRY_STEPS: Final = 100_000
"""Steps of a dry run; a request that takes more is quoted by the formula."""


def quote(engine: Engine, prompt: Prompt, params: SamplingParams | None, options: OptionKeywords, *, exact: bool
          ) -> Quote:
    """As ``Engine.quote``."""
    processed = engine.input_processor.process(prompt, params, read_options(options, "exact"))
    return prepare_quote(engine, processed, exact=exact)()


def prepare_quote(engine: Engine, processed: ProcessedRequest, *, exact: bool = False) -> Callable[[], Quote]:
    """Look at the present, and return what makes the quote on any thread. Raises ``EngineInUse``."""
    with engine.exclusive():
        book = begin_quotes(engine)
        sequences = engine.requests.sequences_of_quote(processed)
        found = book.quote(sequences)
        if not exact:
            return lambda: found
        run = DryRun(engine.scheduler, book, [one.snapshot() for one in sequences], engine.clock.now())
    return lambda: found if (raw := run.moments()) is None else book.quote_of(raw, sequences[0], is_exact=True)


def begin_quotes(engine: Engine) -> QuoteBook:
    """Learn from now on what quotes need, and return what was learnt."""
    for one in engine.observers:
        if isinstance(one, QuoteBook):
            return one
    book = QuoteBook(engine.scheduler)
    engine.add_observer(book)
    return book


class DryRun:
    """A copy of a scheduler that runs to the end of one request on a virtual clock; transfers take no time in it."""

    def __init__(self, scheduler: Scheduler, book: QuoteBook, sequences: list[State], now_s: float) -> None:
        """Copy the present; not the blocks' bytes, and no token of a prompt that is not a key of a cached block."""
        self._policy: Policy = scheduler.rules.policy
        self._settings, self._state, self._new = settings_of(scheduler), scheduler.snapshot(), sequences
        self._times: StepTimes = book.model.times
        self._now_s = self._begin_s = now_s
        live = (*scheduler.waiting, *scheduler.running)
        self._ends = {one.sequence_id: len(one.token_ids) + book.tokens_left(one) for one in live}
        new = [sequence_of(one) for one in sequences]
        self._ends |= {one.sequence_id: len(one.token_ids) + book.tokens_left(one) for one in new}

    def moments(self) -> Moments | None:
        """Run; return start, first token and end in seconds from the copy on, ``None`` if that takes too long."""
        settings = {**self._settings, "max_num_waiting": self._settings["max_num_waiting"] + len(self._new)}
        scheduler = build_scheduler(settings, lambda *_: self._policy)
        restore(self._state, scheduler)
        new, starts, firsts = [sequence_of(one) for one in self._new], dict[int, float](), dict[int, float]()
        scheduler.add_sequences(*new)
        for _ in range(MAX_DRY_STEPS):
            started_s = self._step(scheduler)
            for one in new:
                if one.num_computed_tokens or one.status.value != "waiting":
                    starts.setdefault(one.sequence_id, started_s)
                if one.num_output_tokens:
                    firsts.setdefault(one.sequence_id, self._now_s)
            if self._now_s == started_s and scheduler.is_gated:
                self._now_s += scheduler.gated_s(self._now_s)
            if all(one.finish_reason is not None for one in new):
                begin_s = self._begin_s
                return min(starts.values()) - begin_s, min(firsts.values()) - begin_s, self._now_s - begin_s
        return None

    def _step(self, scheduler: Scheduler) -> float:
        self._scheduler, started_s = scheduler, self._now_s
        run_step(scheduler, self)
        return started_s

    def now(self) -> float:
        """Return the virtual time."""
        return self._now_s

    def move_blocks(self) -> None:
        """Let every transfer end at once."""
        self._scheduler.moves.take_due()
        for number in list(self._scheduler.kv_cache.host.in_flight):
            self._scheduler.moves.complete_transfer(number, 0.0, is_ok=True)

    def make_room(self, plan: SchedulePlan, transfers: ListOf[Transfer]) -> None:
        """As ``move_blocks``."""
        self.move_blocks()

    def compute(self, plan: SchedulePlan, copies: object, begun_s: float) -> None:
        """Let the time of the step pass."""
        self._now_s += self._times.seconds(*plan.work)

    def tokens(self, plan: SchedulePlan, sampled: None) -> dict[int, int | None]:
        """Give each row any token, and end those that have as many as they are thought to get."""
        tokens: dict[int, int | None] = {}
        for row in plan.rows:
            one = row.sequence
            tokens[one.sequence_id] = 0
            if isinstance(one, ReplayedSequence) and len(one.token_ids) + 1 >= self._ends[one.sequence_id]:
                one.next_end = "length" if row.num_sampled else None
            if one.prompt_logprobs is not None:
                one.prompt_logprobs += [None] * len(row.scored_positions)  # type: ignore[list-item]
        return tokens

    def publish(self, plan: SchedulePlan, news: ListOf[NewToken]) -> None:
        """Do nothing."""
