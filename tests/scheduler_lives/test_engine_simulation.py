"""Random lives of an engine with its async layer: every law, every completion, every caller's end, nothing left."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from pagedcore.kv_cache.host_cache import HostCache
from pagedcore.requests.request import Request
from pagedcore.serving import stream
from pagedcore.serving.engine_loop import EngineLoop, StreamFlusher
from pagedcore.serving.stream import Stream, StreamReader
from pagedcore.sessions.session import Session
from scheduler_lives.engine_simulator import EngineSimulation, hybrid_engine
from scheduler_lives.faults import NAMES
from scheduler_lives.laws import SimulationFailure
from scheduler_lives.simulator import Simulation, hybrid_life
from support.doubles import ToyBackend
from support.torture import first_seed, scaled

Patch = pytest.MonkeyPatch
Record = Callable[[str, object], None]
SEEDS = Path(__file__).parent / "seeds"
KINDS: dict[str, Callable[[int, bool], EngineSimulation | Simulation]] = {
    "engine": EngineSimulation, "scheduler": Simulation, "hybrid engine": hybrid_engine,
    "hybrid scheduler": hybrid_life,
}
EVENTFUL = (42, 31, 11, 14, 36, 19, 16, 69)
"""Lives in which together all faults and troubles occur; of the first hundred, seventy are needed for that."""


def live(kind: str, seed: int, has_faults: bool) -> int:
    """Run one seed and return its steps; a failing one is kept as a file, which ``make test`` replays."""
    simulation = KINDS[kind](seed, has_faults)
    try:
        simulation.run()
    except SimulationFailure:
        SEEDS.mkdir(exist_ok=True)
        name = f"{kind.replace(' ', '-')}-{seed}{'-faults' if has_faults else ''}.json"
        (SEEDS / name).write_text(json.dumps({"kind": kind, "seed": seed, "has_faults": has_faults}) + "\n")
        raise
    return simulation.num_steps


def live_all(kind: str, seeds: Iterable[int], has_faults: bool, record: Record) -> None:
    """Run seeds to the last one, whatever happens to others, and report how it went."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts["seeds"] += 1
        try:
            counts["steps"] += live(kind, seed, has_faults)
        except SimulationFailure as error:
            counts["violations"] += 1
            print(error)
    for name in ("seeds", "steps", "violations"):
        record(name, counts[name])
    assert not counts["violations"]


@pytest.mark.torture
@pytest.mark.parametrize("has_faults", [False, True])
def test_callers_get_what_they_would_get_alone(has_faults: bool, record_property: Record) -> None:
    """Streams, futures, sessions, cancels, lost readers, slow ones, a full queue, with faults and without: every
    completion is the oracle's, each request ends once, and an engine without callers is empty."""
    live_all("engine", range(first_seed(), first_seed() + scaled(10)), has_faults, record_property)


@pytest.mark.torture
@pytest.mark.parametrize("has_faults", [False, True])
def test_many_lives_of_a_scheduler(has_faults: bool, record_property: Record) -> None:
    """The scheduler alone takes a hundredth of the time; each law holds after every step of every seed."""
    live_all("scheduler", range(2000 + first_seed(), 2000 + first_seed() + scaled(40)), has_faults, record_property)


@pytest.mark.torture
@pytest.mark.parametrize("has_faults", [False, True])
def test_callers_of_an_engine_whose_model_keeps_states(has_faults: bool, record_property: Record) -> None:
    """Sessions, files, swaps, forks, beams, candidates, drafts, failing and torn steps: no row begins from another
    one's state."""
    live_all("hybrid engine", range(500 + first_seed(), 500 + first_seed() + scaled(7)), has_faults, record_property)


@pytest.mark.torture
@pytest.mark.parametrize("has_faults", [False, True])
def test_many_lives_of_a_scheduler_with_states(has_faults: bool, record_property: Record) -> None:
    """The same of the scheduler alone, under every policy, with readers and short contexts."""
    live_all("hybrid scheduler", range(first_seed(), first_seed() + scaled(40)), has_faults, record_property)


def test_lives_with_states_have_all_that_can_happen() -> None:
    """States are found, swapped both ways, evicted and lost to copies that fail, and drafts are right."""
    counts: Counter[str] = Counter()
    for seed in range(500, 520):
        stats = hybrid_engine(seed, has_faults=seed % 2 == 1).run().engine.stats()
        counts += Counter({name: getattr(stats, name) for name in (
            "num_cached_tokens", "num_accepted_tokens", "swapped_out_bytes", "swapped_in_bytes", "num_states_evicted",
            "num_failed_transfers")})
    assert len(counts) == 6


@pytest.mark.parametrize("has_faults", [False, True])
def test_callers_of_an_engine_with_batch_formation(has_faults: bool) -> None:
    """Gates, phases and shares of prefill leave no caller without its completion, and no request without its end."""
    for seed in range(300, 308):
        EngineSimulation(seed, has_faults, has_formation=True).run()


def test_callers_of_an_engine_with_a_short_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that pass the border in a turn or between two, are parked or forked, and beams, read no slot that was
    written by the other angles."""
    for seed in range(400, 412):
        monkeypatch.setattr(ToyBackend, "num_short_tokens", 5 + seed % 4)
        EngineSimulation(seed, has_faults=seed % 2 == 1).run()


def test_callers_of_an_engine_whose_model_has_windows() -> None:
    """Sessions, files, beams, candidates, drafts, failing and torn steps: no row reads another one's window block."""
    num_found = num_windows = 0
    for seed in range(600, 612):
        simulation = EngineSimulation(seed, has_faults=seed % 2 == 1, has_formation=seed % 3 == 0,
                                      has_drafts=seed % 5 < 2, has_windows=True).run()
        stats = simulation.engine.stats()
        num_found, num_windows = num_found + stats.num_cached_tokens, num_windows + (stats.num_windows > 0)
    assert num_found > 0
    assert num_windows > 6


def test_a_seed_leaves_the_same_trace_every_time() -> None:
    """Nothing but the seed decides, threads, time and the order of sets included."""
    for seed in range(4):
        first, second = (EngineSimulation(seed, has_faults=True).run().trace for _ in range(2))
        assert first
        assert "\n".join(first).encode() == "\n".join(second).encode()


@pytest.mark.parametrize("path", sorted(SEEDS.glob("*.json")), ids=lambda path: path.stem)
def test_a_seed_that_once_failed(path: Path) -> None:
    """What was found once is looked for ever after."""
    known = json.loads(path.read_text())
    KINDS[known["kind"]](known["seed"], known["has_faults"]).run()


def test_every_fault_and_every_trouble_occurs() -> None:
    """What is never reached is not tested: every fault fires, and every kind of end comes about."""
    ends = {"EngineOverloaded", "RequestTimeout", "EngineClosed", "cancelled", "leaves", "lost", "left", "forgets"}
    missing = {*NAMES, *ends, "preempted", "found"}
    # Why others too: after a change of what a seed means it takes longer, and is as true.
    for seed in (*EVENTFUL, *range(100)):
        simulation = EngineSimulation(seed, has_faults=True).run()
        stats = simulation.engine.stats()
        missing -= simulation.faults.fired.keys() | {word for line in simulation.trace for word in line.split()}
        missing -= {"preempted"} if stats.num_preemptions else set()
        missing -= {"found"} if stats.num_cached_tokens else set()
        if not missing:
            return
    assert missing == set()


# The suite itself on trial -----------------------------------------------------------------------------------------


def request_never_removed(patch: Patch) -> None:
    """A finished request stays in the engine's table."""
    patch.setattr(Request, "remove", lambda self: None)


def abort_forgotten(patch: Patch) -> None:
    """A reader that leaves is not noticed."""
    patch.setattr(StreamReader, "close", lambda self: self._finalizer.detach())
    patch.setattr(EngineLoop, "cancel_sink", lambda self, sink: None)


def delta_lost(patch: Patch) -> None:
    """What is pending when a completion ends is dropped."""
    patch.setattr(Stream, "end", lambda self, error=None, last=(), end=Stream.end: end(self, error, list(last)[:-1]))


def delta_twice(patch: Patch) -> None:
    """A delta is delivered twice."""
    patch.setattr(Stream, "put", lambda self, deltas, put=Stream.put: put(self, [*deltas, deltas[-1]]))


def reader_never_woken(patch: Patch) -> None:
    """Readers that sleep are not woken."""
    patch.setattr(stream, "_wake_all", lambda sleeping: None)


def sinks_kept(patch: Patch) -> None:
    """The flusher keeps the readers of requests that have ended."""
    patch.setattr(StreamFlusher, "take", lambda self, request: self._pending.pop(request, []))


def session_never_closed(patch: Patch) -> None:
    """Closing a session does nothing."""
    patch.setattr(Session, "close", lambda self: None)


def pins_kept(patch: Patch) -> None:
    """Blocks that are pinned on the host for a session stay so."""
    patch.setattr(HostCache, "free_pins", lambda self, sequence_id: None)


MUTANTS = [
    request_never_removed, abort_forgotten, delta_lost, delta_twice, reader_never_woken, sinks_kept,
    session_never_closed, pins_kept,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_defect_is_found(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """Each of these defects, put in by hand above the scheduler, is found within thirty seeds."""
    mutant(monkeypatch)
    with pytest.raises(SimulationFailure, match="again with"):  # noqa: PT012
        for seed in range(30):
            EngineSimulation(seed, has_faults=seed % 2 == 1).run()


@pytest.mark.torture
@pytest.mark.parametrize("has_faults", [False, True])
def test_callers_of_an_engine_with_drafts(has_faults: bool) -> None:
    """Drafts that are right, wrong, too few and too many change no completion, break no law and are forgotten."""
    num_accepted = 0
    for seed in range(500 + first_seed(), 500 + first_seed() + scaled(3)):
        life = EngineSimulation(seed, has_faults, has_formation=seed % 2 == 1, has_drafts=True).run()
        num_accepted += life.engine.stats().num_accepted_tokens
    assert num_accepted > 0
