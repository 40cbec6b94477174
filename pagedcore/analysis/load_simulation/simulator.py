"""A load on replicas: which request goes where, what comes of it, and how many replicas it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from itertools import count
from typing import Final

from pagedcore.analysis.load_simulation.replica import Replica, SimulatedModel
from pagedcore.analysis.load_simulation.results import SimulationResult, Summary, Targets
from pagedcore.analysis.load_simulation.workload import SimulatedRequest
from pagedcore.config import field_rules as rules
from pagedcore.config.engine_config import EngineConfig
from pagedcore.errors import InvalidConfig
from pagedcore.scheduler.step_time import StepTimes

MAX_REPLICAS: Final = 1024
_SPARE_LOAD: Final = 4
"""Requests by which a replica with the prefix may be ahead of the least loaded one, beside twice its load."""

Route = Callable[[ListOf[Replica], SimulatedRequest], Replica]
"""Chooses the replica of a request; called in the order of the arrivals, with every replica at that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngine:
    """What every replica is: a configuration, and what the model and the machine behind it cost."""

    times: StepTimes
    model: SimulatedModel
    config: EngineConfig

    def replicas(self, num_replicas: int) -> list[Replica]:
        """Build so many idle engines. Raises ``InvalidConfig`` as ``Replica``, and for a number out of range."""
        rules.integer(1, MAX_REPLICAS).check("replicas", num_replicas, rules.invalid_setting)
        return [Replica(number, self.model, self.config, self.times) for number in range(num_replicas)]


def round_robin() -> Route:
    """One after the other."""
    turns = count()
    return lambda replicas, request: replicas[next(turns) % len(replicas)]


def least_loaded() -> Route:
    """The one with the fewest requests that wait or run; the first of these."""
    return lambda replicas, request: min(replicas, key=lambda one: one.num_open)


def prefix_affinity() -> Route:
    """The one with the longest beginning of the prompt in its cache, unless it has far more load than another."""
    def choose(replicas: ListOf[Replica], request: SimulatedRequest) -> Replica:
        least = min(one.num_open for one in replicas)
        near = [one for one in replicas if one.num_open <= 2 * least + _SPARE_LOAD]
        return max(near, key=lambda one: (one.num_cached_tokens(request), -one.num_open))
    return choose


ROUTES: Final[dict[str, Callable[[], Route]]] = {
    "round-robin": round_robin, "least-loaded": least_loaded, "prefix-affinity": prefix_affinity,
}


def simulate(
    engine: SimulatedEngine, requests: Iterable[SimulatedRequest], num_replicas: int = 1,
    route: str = "least-loaded", on_progress: Callable[[int], object] = lambda count: None,
) -> SimulationResult:
    """Let requests arrive at replicas, and run until all have ended.

    Args:
        engine: what every replica is.
        requests: in the order of their arrivals.
        num_replicas: how many there are.
        route: a name in ``ROUTES``.
        on_progress: called with the number of requests that have arrived since the last call.

    Raises:
        InvalidConfig: there is no such route, the number of replicas is out of range, or as ``Replica``.
    """
    rules.one_of(*ROUTES).check("route", route, rules.invalid_setting)
    replicas, choose, outcomes = engine.replicas(num_replicas), ROUTES[route](), []
    for request in requests:
        for replica in replicas:
            replica.run_until(request.arrival_s)
        outcomes.append(choose(replicas, request).add_request(request))
        on_progress(1)
    for replica in replicas:
        replica.run_until(math.inf)
    return SimulationResult(outcomes, replicas, engine.config.max_num_seqs)


def find_replicas(
    engine: SimulatedEngine, requests: ListOf[SimulatedRequest], targets: Targets, *, share: float = 0.99,
    most: int = 64, route: str = "least-loaded",
    on_result: Callable[[int, Summary], object] = lambda num_replicas, summary: None,
) -> tuple[int, SimulationResult]:
    """Find the smallest number of replicas with which this share of the requests meets the targets.

    It assumes that more replicas do not make fewer requests meet them: the number is doubled, then halved in between.

    Args:
        engine: what every replica is.
        requests: in the order of their arrivals.
        targets: what a request has to meet; a refused one does not.
        share: above 0, at most 1.
        most: the largest number that is tried.
        route: as for ``simulate``.
        on_result: called with each number that was tried, and what came of it.

    Raises:
        InvalidConfig: even ``most`` do not suffice, or as ``simulate``.
    """
    rules.number(0, 1, above_low=True).check("share", share, rules.invalid_setting)
    rules.integer(1, MAX_REPLICAS).check("max_replicas", most, rules.invalid_setting)
    results: dict[int, SimulationResult] = {}

    def suffices(number: int) -> bool:
        results[number] = simulate(engine, requests, number, route)
        summary = results[number].summary(targets)
        on_result(number, summary)
        return summary.goodput_share >= share

    too_few, enough = 0, 1
    while not suffices(enough):
        if enough == most:
            reached = results[most].summary(targets).goodput_share
            raise InvalidConfig(f"max_replicas: with {most}, {reached:.1%} of the requests meet the targets, and "
                                f"{share:.1%} are asked for; allow more, or other targets.")
        too_few, enough = enough, min(2 * enough, most)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if suffices(middle) else (middle, enough)
    return enough, results[enough]
