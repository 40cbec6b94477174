"""Loads on a virtual clock: a real engine over a model that computes nothing and takes the times of recorded steps.

Each step takes ``TIMES``, times the ratio of actual to fitted time of one recorded step after the other. Lengths are
log-normal; ``benchmarks/quotes.py`` and the tests of quotes and promises serve such loads.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from pagedcore import Engine, SamplingParams
from pagedcore.engine.builder import build_components
from pagedcore.errors import EngineOverloaded, InvalidRequest
from pagedcore.outputs import Interval, Quote
from pagedcore.requests.request import Request
from pagedcore.requests.stats import EngineStats
from pagedcore.scheduler.step_time import StepTimes

NOISE: Final = Path(__file__).parents[2] / "benchmarks" / "step_noise.json"
TIMES: Final = StepTimes(2e-3, 5e-5, 1e-4, 1e-7)
EOS: Final = 0
MOST_TOKENS: Final = 1023
SETTINGS: Final = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "num_kv_blocks": 1200, "block_size": 16,
                   "enable_prefix_caching": False, "speculation": "off"}


class VirtualClock:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        """Return the time in seconds."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Let it pass."""
        self.now_s += seconds


class PacedModel:
    """A ``ModelBackend`` that computes nothing. All tokens of a sequence are the number of tokens it ends with."""

    vocab_size, max_model_len, eos_token_ids = MOST_TOKENS + 1, MOST_TOKENS + 1, frozenset({EOS})
    block_size, kv_bytes_per_token, is_schedule_invariant = 16, 1, True

    def __init__(self, clock: VirtualClock, noise: Iterator[float], times: StepTimes = TIMES) -> None:
        self._clock, self._noise, self._times = clock, noise, times
        self._logits = np.zeros((0, self.vocab_size), dtype=np.float32)

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Do nothing."""

    def forward(self, batch: Any) -> Any:
        """Let the time pass; say what comes next: the same token, or the end."""
        sizes = np.diff(batch.query_start)
        num_decode = int((sizes == 1).sum())
        seconds = self._times.seconds(int(sizes.sum()) - num_decode, num_decode, int(batch.kv_lens.sum()))
        self._clock.sleep(seconds * next(self._noise))
        rows = np.asarray(batch.logits_rows)
        tokens, positions = batch.token_ids[rows], batch.positions[rows]
        logits = np.zeros((len(rows), self.vocab_size), dtype=np.float32)
        logits[np.arange(len(rows)), np.where(positions + 2 >= tokens, EOS, tokens)] = 1.0
        return logits


@dataclass(frozen=True)
class Asked:
    """One request of a load."""

    arrival_s: float
    num_prompt: int
    num_output: int
    deadline_s: float

    def prompt(self) -> list[int]:
        """Return the prompt, which says when the completion ends."""
        return [self.num_prompt + self.num_output] * self.num_prompt


def load_of(rate: float, num: int, seed: int) -> list[Asked]:
    """Draw requests; each has two to five times what it needs in a full batch."""
    rng, now_s, asked = random.Random(seed), 0.0, list[Asked]()
    for _ in range(num):
        now_s += rng.expovariate(rate)
        num_prompt, num_output = (min(400, max(2, round(rng.lognormvariate(4.0, 0.5)))) for _ in range(2))
        alone_s = num_output * TIMES.seconds(0, 16, 16 * 100) + num_prompt * TIMES.prefill_token_s
        asked.append(Asked(now_s, num_prompt, num_output, alone_s * rng.uniform(2, 5)))
    return asked


def paced_engine(seed: int, noise_of: str = "cpu", **settings: Any) -> tuple[Engine, VirtualClock]:
    """Return an engine over a paced model whose noise begins at a place that the seed says."""
    clock, noise = VirtualClock(), json.loads(NOISE.read_text())[noise_of]
    start = random.Random(seed).randrange(len(noise))
    model = PacedModel(clock, islice(cycle(noise), start, None))
    return Engine(build_components(model, **{**SETTINGS, **settings}), clock=clock), clock


@dataclass
class Served:
    """What came of one request."""

    asked: Asked
    request: Request | None
    quote: Quote | None
    error: Exception | None = None

    def moments(self) -> tuple[float, ...]:
        """Return start, first token and end in seconds from the arrival on."""
        assert self.request is not None
        times = self.request.metrics
        first_s, token_s, end_s = times.first_scheduled_s, times.first_token_s, times.finished_s
        return tuple((one or math.nan) - times.arrival_s for one in (first_s, token_s, end_s))


def serve(
    engine: Engine, clock: VirtualClock, load: list[Asked], params_of: Callable[[Asked], SamplingParams], *,
    quotes: bool = False, deadlines: bool = False,
) -> list[Served]:
    """Let requests come, and run until all have ended."""
    served, coming = list[Served](), iter(load)
    following = next(coming, None)
    while following is not None or engine.has_pending_requests():
        if following is not None and not engine.has_pending_requests():
            clock.now_s = max(clock.now_s, following.arrival_s)
        while following is not None and following.arrival_s <= clock.now_s:
            params, options = params_of(following), {"deadline_s": following.deadline_s} if deadlines else {}
            quote = engine.quote(following.prompt(), params, **options) if quotes else None
            try:
                one = Served(following, engine.add_request(following.prompt(), params, **options), quote)
            except (EngineOverloaded, InvalidRequest) as error:
                one = Served(following, None, quote, error)
            served.append(one)
            following = next(coming, None)
        for pending in engine.step_pending():
            if pending.request.is_done:
                pending.request.remove()
    return served


def known(asked: Asked) -> SamplingParams:
    """Ask for exactly so many tokens."""
    return SamplingParams(max_tokens=asked.num_output, ignore_eos=True, temperature=0.0)


def learnt(asked: Asked) -> SamplingParams:
    """Ask for as many tokens as any completion has at most."""
    return SamplingParams(max_tokens=400, temperature=0.0)


def bounded(asked: Asked) -> SamplingParams:
    """Ask for half as much again as it will be."""
    return SamplingParams(max_tokens=-(-3 * asked.num_output // 2), temperature=0.0)


def capacity(num: int = 400) -> float:
    """Return how many requests a second the engine serves when there is no end of them."""
    engine, clock = paced_engine(0, max_num_waiting=num)
    serve(engine, clock, [Asked(0.0, *(one.num_prompt, one.num_output, 1.0)) for one in load_of(1.0, num, 0)], known)
    return num / clock.now_s


def share_held(served: list[Served], name: str, place: int) -> tuple[float, float]:
    """Return the share of quotes whose interval of one moment held, and the median of width over value."""
    pairs: list[tuple[Interval, float]] = [
        (getattr(one.quote, name), one.moments()[place]) for one in served if one.request is not None
    ]
    held = [interval.low <= moment_s <= interval.high for interval, moment_s in pairs]
    widths = [(interval.high - interval.low) / max(interval.likely, 1e-9) for interval, _ in pairs]
    return sum(held) / len(held), statistics.median(widths)


def quotes_table(load: float, num: int, seed: int = 1, noise_of: str = "cpu") -> list[list[str]]:
    """Quote every request of a load; the first quarter is left out, from which the engine learns."""
    rate, rows = load * capacity(), list[list[str]]()
    for name, params_of in (("known", known), ("learnt", learnt)):
        engine, clock = paced_engine(seed, noise_of)
        served = serve(engine, clock, load_of(rate, num, seed), params_of, quotes=True)[num // 4:]
        for place, moment in enumerate(("start", "first_token", "end")):
            held, width = share_held(served, moment, place)
            rows.append([f"lengths {name}", moment, f"{held:.1%}", f"{width:.2f}"])
    return rows


def promises_of(
    load: float, num: int, seed: int, params_of: Callable[[Asked], SamplingParams], **options: Any
) -> EngineStats:
    """Serve requests with deadlines under the policy "deadline" with options; return the engine's statistics."""
    engine, clock = paced_engine(seed, scheduling_policy="deadline", policy_options=options)
    serve(engine, clock, load_of(load * capacity(), num, seed), params_of, deadlines=True)
    return engine.stats()
