"""What arrives when: requests as lengths and shared beginnings, drawn at random or read by ``traces``."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from pagedcore.config import field_rules as rules
from pagedcore.config.field_rules import invalid_setting
from pagedcore.request_options import NO_OPTIONS, RequestOptions

MAX_REQUESTS: Final = 1_000_000
MAX_TOKENS: Final = 2**20
"""Of one prompt or one completion."""
_OWN: Final = 2**40
"""Segment ids from here on are given to contents that no other request has."""
_RULES: Final[dict[str, rules.FieldRule[Any]]] = {
    "rate": rules.number(0, 1e6, above_low=True),
    "burstiness": rules.number(0, 100),
    "length_spread": rules.number(0, 10),
    "num_requests": rules.integer(1, MAX_REQUESTS), "input_tokens": rules.integer(1, MAX_TOKENS),
    "output_tokens": rules.integer(1, MAX_TOKENS), "prefix_tokens": rules.integer(0, MAX_TOKENS),
    "num_prefixes": rules.integer(1, MAX_REQUESTS), "seed": rules.integer(0, 2**63 - 1),
}
_TENANTS: Final = 1024


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request: when it arrives, what its prompt shares with others, how many tokens it generates."""

    arrival_s: float
    prompt: tuple[tuple[int, int], ...]
    """Segments (id, number of tokens). Prompts that begin with the same segments share their KV blocks."""
    num_output: int
    options: RequestOptions = NO_OPTIONS
    """Tenant, weight and whatever else policies look at."""

    @property
    def num_input(self) -> int:
        """Tokens of the prompt."""
        return sum([size for _, size in self.prompt])

    def token_ids(self) -> list[int]:
        """Return the prompt as tokens, the same ones for the same segments."""
        return [segment for segment, size in self.prompt for _ in range(size)]


def own_segment(index: int, num_tokens: int) -> tuple[int, int]:
    """Return a segment that no other request has; ``index`` is the request's number."""
    return _OWN + index, num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLoad:
    """Requests drawn at random, the same ones for the same seed.

    Raises:
        InvalidConfig: a field is out of its range; ``InvalidRequest``: a tenant or its weight is.
    """

    rate: float
    """Requests per second."""
    num_requests: int = 1000
    burstiness: float = 1.0
    """Standard deviation of the intervals between arrivals over their mean; intervals follow a gamma distribution. 0:
    regular; 1: a Poisson process; more: bursts."""
    input_tokens: int = 256
    """Mean length of prompts, a shared prefix left out."""
    output_tokens: int = 128
    """Mean length of completions."""
    length_spread: float = 0.5
    """Standard deviation of both lengths over their mean; they follow a log-normal distribution. 0: all are equal."""
    prefix_tokens: int = 0
    """Tokens at the beginning of each prompt that it shares with others."""
    num_prefixes: int = 1
    """How many different shared beginnings there are; each is as likely as the others."""
    tenants: tuple[tuple[str, float], ...] = ()
    """Names and weights, up to 1024; each request is one tenant's, and each is as likely as the others."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            rule.check(name, getattr(self, name), invalid_setting)
        rules.integer(0, _TENANTS).check("tenants", len(self.tenants), invalid_setting)
        self._options()

    def requests(self) -> list[SimulatedRequest]:
        """Draw the requests, in the order of their arrivals; the first one arrives after the first interval."""
        rng, now_s, drawn = random.Random(self.seed), 0.0, []
        options = self._options()
        for index in range(self.num_requests):
            now_s += self._interval_s(rng)
            prefix = ((rng.randrange(self.num_prefixes), self.prefix_tokens),) if self.prefix_tokens else ()
            prompt = (*prefix, own_segment(index, self._length(rng, self.input_tokens)))
            length = self._length(rng, self.output_tokens)
            drawn.append(SimulatedRequest(now_s, prompt, length, rng.choice(options) if options else NO_OPTIONS))
        return drawn

    def _options(self) -> list[RequestOptions]:
        return [RequestOptions(tenant=name, weight=weight) for name, weight in self.tenants]

    def _interval_s(self, rng: random.Random) -> float:
        if self.burstiness == 0.0:
            return 1.0 / self.rate
        shape = self.burstiness**-2
        return rng.gammavariate(shape, 1.0 / (shape * self.rate))

    def _length(self, rng: random.Random, mean: int) -> int:
        if self.length_spread == 0.0:
            return mean
        variance = math.log1p(self.length_spread**2)
        drawn = rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))
        return min(MAX_TOKENS, max(1, round(drawn)))


def faster(requests: Iterable[SimulatedRequest], factor: float) -> list[SimulatedRequest]:
    """Return the same requests with arrivals that come ``factor`` times as fast."""
    rules.number(0, 1e6, above_low=True).check("speed", factor, invalid_setting)
    return [replace(one, arrival_s=one.arrival_s / factor) for one in requests]
