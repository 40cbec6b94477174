"""The load simulator decides what an engine decides: compared request by request with an engine on the same clock."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

from pagedcore.analysis.load_simulation import report
from pagedcore.analysis.load_simulation.calibration import Calibration, facts_of
from pagedcore.analysis.load_simulation.costs import LoadTimes
from pagedcore.analysis.load_simulation.replica import Replica, SimulatedModel
from pagedcore.analysis.load_simulation.results import Targets
from pagedcore.analysis.load_simulation.simulator import ROUTES, SimulatedEngine, find_replicas, simulate
from pagedcore.analysis.load_simulation.workload import RandomLoad, SimulatedRequest, own_segment
from pagedcore.config.engine_config import EngineConfig
from pagedcore.engine.builder import build_components
from pagedcore.engine.engine import Engine
from pagedcore.errors import InvalidConfig
from pagedcore.kv_cache.windowed_blocks import WindowedBlocks
from pagedcore.models.transformers_model import TransformersModel
from pagedcore.protocols import FloatArray, RaggedRows
from pagedcore.request_options import RequestOptions
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler import chunk_ends
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.scheduler.stats import SchedulerStats
from pagedcore.scheduler.step_time import StepTimes
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from support.doubles import FakeClock, KeepsToyStates, KeepsToyWindows, ToyBackend, ToyWindowed, ToyWindowLayers
from support.engine_builders import make_engine
from support.families import tiny_model

TIMES = StepTimes(0.004, 0.0005, 0.0005, 1e-5)
"""Prompt and generated tokens cost the same, so that the stand-in below can tell a step's time from its arrays."""
SMALL = {"num_kv_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 8, "max_num_waiting": 40}
SETTINGS: list[dict[str, Any]] = [
    {"scheduling_policy": "fair"}, {"scheduling_policy": "shortest-first"}, {},
    {"num_kv_blocks": 10}, {"num_kv_blocks": 10, "preemption": "recompute"}, {"scheduling_policy": "static"},
    {"eviction_policy": "fifo", "num_kv_blocks": 10}, {"phases": "separate"}, {"prefill_share": 0.3},
    {"admission": "guaranteed", "enable_prefix_caching": False}, {"min_batch_size": 3, "max_wait_ms": 40},
    {"scheduling_policy": "priority"}, {"queue_timeout_s": 0.05}, {"max_num_waiting": 3},
    {"max_num_batched_tokens": 4}, {"max_num_seqs": 1},
]


def engine_of(num_states: int = 0, **settings: Any) -> SimulatedEngine:
    model = SimulatedModel(max_model_len=4096, block_size=4, num_states=num_states)
    return SimulatedEngine(times=TIMES, model=model, config=EngineConfig(**SMALL | settings))


def load(rate: float = 30.0, num_requests: int = 30, **more: Any) -> list[SimulatedRequest]:
    return RandomLoad(rate=rate, num_requests=num_requests, input_tokens=9, output_tokens=12, prefix_tokens=8,
                      num_prefixes=3, seed=5, **more).requests()


class _TimedBackend(ToyBackend):
    """A toy model whose forwards take the time that the simulator has for their steps."""

    max_model_len = 4096

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def forward(self, batch: RaggedRows) -> FloatArray:
        self._clock.sleep(TIMES.seconds(int(batch.query_start[-1]), 0, int(batch.kv_lens.sum())))
        return super().forward(batch)


class _TimedWindowed(KeepsToyWindows, _TimedBackend):
    """The same with windows."""


class _TimedHybrid(KeepsToyStates, _TimedBackend):
    """The same with states, and with memory for so many of them."""

    def __init__(self, clock: FakeClock, most_states: int) -> None:
        super().__init__(clock)
        self._most_states = most_states

    def free_kv_bytes(self) -> int:
        """Of which three tenths are for states."""
        return math.ceil((self._most_states + 0.5) * self.state_bytes / 0.3)

    def kv_block_bytes(self, block_size: int) -> int:
        """As much as tokens take."""
        return block_size * self.kv_bytes_per_token

    def release_kv(self) -> None:
        """Nothing is to be freed."""


def toy_prompt(request: SimulatedRequest, number: int) -> list[int]:
    """The same lengths and shared beginnings in the toy's vocabulary; a request's own tokens begin with its number."""
    (prefix, prefix_size), (_, own_size) = request.prompt
    return [prefix] * prefix_size + [3 + number % 27, 3 + number // 27, *[30] * own_size][:own_size]


def on_an_engine(requests: list[SimulatedRequest], **settings: Any) -> list[tuple[float | None, float | None]]:
    """When each request has its first and its last token on an engine whose clock only its forwards advance."""
    config = EngineConfig(**SMALL | {"block_size": 4, "speculation": "off"} | settings)
    clock = FakeClock()
    return times_on(Engine(build_components(_TimedBackend(clock), config=config), clock), clock, requests)


def times_on(
    engine: Engine, clock: FakeClock, requests: list[SimulatedRequest]
) -> list[tuple[float | None, float | None]]:
    start_s, waiting, handles = clock.now(), list(enumerate(requests)), []
    while waiting or engine.has_pending_requests():
        while waiting and start_s + waiting[0][1].arrival_s <= clock.now() + 1e-12:
            number, request = waiting.pop(0)
            params = SamplingParams(max_tokens=request.num_output, ignore_eos=True, temperature=0.0)
            handles.append(engine.add_request(toy_prompt(request, number), params))
        if engine.has_pending_requests():
            engine.step_pending()
            until_s = start_s + waiting[0][1].arrival_s - clock.now() if waiting else 1.0
            clock.sleep(max(0.0, min(engine.gated_s + 1e-9, until_s)) if engine.gated_s else 0.0)
        else:
            clock.sleep(start_s + waiting[0][1].arrival_s - clock.now())
    metrics = [handle.output().metrics for handle in handles]
    return [(one.first_token_s and one.first_token_s - start_s, one.finished_s and one.finished_s - start_s)
            for one in metrics]


def times_of(replica: Replica, requests: list[SimulatedRequest]) -> Any:
    """When each request has its first and its last token in a simulation, for comparison."""
    outcomes = []
    for request in requests:
        replica.run_until(request.arrival_s)
        outcomes.append(replica.add_request(request))
    replica.run_until(math.inf)
    return [(pytest.approx(one.first_token_s), pytest.approx(one.finished_s)) for one in outcomes]


def require_equal(replica: Replica, real: Engine, *names: str) -> SchedulerStats:
    """The numbers of a simulation are an engine's."""
    counted, found = real.scheduler.stats(), replica.scheduler.stats()
    for name in (*names, "num_blocks", "num_cached_tokens", "num_looked_up_tokens", "num_blocks_cached",
                 "num_preemptions"):
        assert getattr(found, name) == getattr(counted, name), name
    done, made = real.scheduler.counters, replica.scheduler.counters
    assert made.num_prefill_tokens + made.num_decode_tokens == done.num_prefill_tokens + done.num_decode_tokens
    return found


@pytest.mark.parametrize("settings", SETTINGS[:11], ids=str)
def test_every_request_has_its_tokens_when_an_engine_gives_them(settings: dict[str, Any]) -> None:
    """First and last tokens come when they come on an engine with this configuration, preemptions and all."""
    largest = 4 * settings.get("num_kv_blocks", 24)
    requests = [one for one in load() if one.prompt[1][1] > 1 and one.num_input + one.num_output <= largest]
    wanted = on_an_engine(requests, **settings)
    found = simulate(engine_of(**settings), requests).outcomes
    for outcome, (first_s, last_s) in zip(found, wanted, strict=True):
        assert outcome.first_token_s == pytest.approx(first_s)
        assert outcome.finished_s == pytest.approx(last_s)


@pytest.mark.parametrize(("num_states", "settings"), [
    (16, {}), (10, {}), (16, {"num_kv_blocks": 14}), (16, {"scheduling_policy": "cache-aware"}),
])
def test_a_model_with_states_does_what_an_engine_of_it_does(
    num_states: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a state is lacking a prefix is computed again, and with fewer states fewer sequences run: times, tokens
    that were computed and found, and states that are kept and were evicted are those of an engine."""
    monkeypatch.setattr(chunk_ends, "LEAST_SAVED", 8)
    largest, clock = 4 * settings.get("num_kv_blocks", 24), FakeClock()
    requests = [one for one in load() if one.prompt[1][1] > 1 and one.num_input + one.num_output <= largest]
    config = EngineConfig(**SMALL | {"block_size": 4, "speculation": "off"} | settings)
    real = Engine(build_components(_TimedHybrid(clock, num_states), config=config), clock)
    wanted = times_on(real, clock, requests)
    replica = engine_of(num_states=num_states, **settings).replicas(1)[0]
    assert times_of(replica, requests) == wanted
    found = require_equal(replica, real, "num_states", "num_states_kept", "num_states_evicted")
    assert found.num_states == num_states
    assert found.num_cached_tokens > 0


def most_held(engine: Engine) -> list[int]:
    """The most blocks and window blocks that sequences hold in a forward from now on."""
    backend, device, most = engine.components.runner.backend, engine.scheduler.kv_cache.device, [0, 0]
    assert isinstance(device, WindowedBlocks)
    forward = backend.forward

    def watched(batch: RaggedRows) -> Any:
        most[:] = max(most[0], device.num_used_blocks), max(most[1], device.windows.num_used)
        return forward(batch)

    backend.forward = watched  # type: ignore[method-assign]
    return most


WINDOW_COUNTS = ("num_windows", "num_windows_used", "num_windows_kept", "num_windows_evicted")


@pytest.mark.parametrize("settings", [
    {}, {"num_kv_blocks": 16}, {"num_kv_blocks": 30, "max_num_seqs": 8, "max_num_batched_tokens": 32},
    {"num_kv_blocks": None, "kv_cache_memory": 2200}, {"num_kv_blocks": None, "kv_cache_memory": 4000},
], ids=str)
def test_a_model_with_windows_does_what_an_engine_of_it_does(settings: dict[str, Any]) -> None:
    """What a sequence has left is given up in the same step, and chunks are cut where window blocks end: times, tokens
    that were computed and found, what is kept and was evicted, and the most that is held are those of an engine."""
    clock = FakeClock()
    config = EngineConfig(**SMALL | {"block_size": 4, "speculation": "off"} | settings)
    real = Engine(build_components(_TimedWindowed(clock), config=config), clock)
    largest, most = 4 * real.stats().num_blocks, most_held(real)
    requests = [one for one in load() if one.prompt[1][1] > 1 and one.num_input + one.num_output <= largest]
    wanted = times_on(real, clock, requests)
    model = SimulatedModel(max_model_len=4096, block_size=4, window=ToyWindowLayers.window, kv_bytes_per_token=16,
                           window_bytes_per_token=16)
    replica = replace(engine_of(**settings), model=model).replicas(1)[0]
    assert times_of(replica, requests) == wanted
    found = require_equal(replica, real, *WINDOW_COUNTS)
    assert [replica.most_blocks, replica.most_windows] == most
    assert min(found.num_windows, found.num_windows_evicted) > 0


@pytest.mark.parametrize("pool", [{"num_kv_blocks": 30}, {"kv_cache_memory": 2200}, {"kv_cache_memory": 5000}], ids=str)
def test_a_calibration_has_the_pool_of_an_engine_with_windows(pool: dict[str, Any], tmp_path: Path) -> None:
    """From its file come as many blocks of both kinds as the engine had, and with other settings as many as it would
    have."""
    settings: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 400}
    with make_engine(ToyWindowed(), **{"num_kv_blocks": None} | settings | pool) as calibrated:
        Calibration(model="toy", times=LoadTimes(*astuple(TIMES)), num_steps=0, mean_error=0.0, **facts_of(calibrated)
                    ).save(tmp_path / "times.json")
    for most in (4, 2):
        settings["max_num_seqs"] = most
        simulated = Calibration.load(tmp_path / "times.json").engine(EngineConfig(**settings)).replicas(1)[0]
        found = simulated.scheduler.stats()
        with make_engine(ToyWindowed(), **{"num_kv_blocks": None} | settings | pool) as real:
            assert (found.num_blocks, found.num_windows) == (real.stats().num_blocks, real.stats().num_windows)
        assert found.num_windows > 0


@pytest.mark.parametrize(("kind", "overrides"), [
    ("gemma3_text", {"num_hidden_layers": 3, "sliding_window": 40, "layer_types": [
        "sliding_attention", "sliding_attention", "full_attention"]}),
    ("gpt_oss", {"num_hidden_layers": 2, "sliding_window": 24}),
])
def test_the_peaks_of_real_models_with_windows_are_foreseen(kind: str, overrides: dict[str, Any]) -> None:
    """Of requests that come at once, the most blocks and window blocks that a step holds, and what was computed again
    and evicted, are what a simulation of the calibrated engine says."""
    model = tiny_model(kind, max_position_embeddings=1024, **overrides)
    settings = {"max_num_seqs": 3, "max_num_batched_tokens": 48, "num_threads": 1, "speculation": "off",
                "max_num_waiting": 40, "num_kv_blocks": 24}
    backend = TransformersModel(model, NumbaCpuAttention, runs_self_test=False)
    with Engine.from_pretrained(backend, **settings) as real:
        most, requests = most_held(real), [replace(one, arrival_s=0.0) for one in RandomLoad(
            rate=1.0, num_requests=12, input_tokens=90, output_tokens=20, prefix_tokens=64, num_prefixes=2, seed=3
        ).requests()]
        for number, one in enumerate(requests):
            (prefix, prefix_size), (_, own_size) = one.prompt
            prompt = [3 + prefix] * prefix_size + [5 + number] + [4] * (own_size - 1)
            real.add_request(prompt, SamplingParams(max_tokens=one.num_output, ignore_eos=True, temperature=0.0))
        while real.has_pending_requests():
            real.step()
        known = Calibration(model=kind, times=LoadTimes(*astuple(TIMES)), num_steps=0, mean_error=0.0, **facts_of(real))
        replica = known.engine(EngineConfig(**settings)).replicas(1)[0]
        times_of(replica, requests)
        found = require_equal(replica, real, *WINDOW_COUNTS)
        assert [replica.most_blocks, replica.most_windows] == most
        assert min(found.num_windows, found.num_windows_evicted) > 0


def test_a_simulated_model_with_states_needs_a_number_of_blocks() -> None:
    """Its bytes are not known, so a budget of bytes is refused."""
    with pytest.raises(InvalidConfig, match="num_kv_blocks: got None"):
        engine_of(num_states=8, num_kv_blocks=None, kv_cache_memory="1MiB").replicas(1)


@pytest.mark.parametrize("rate", [5.0, 60.0])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_equal_steps_committed_together_change_nothing(settings: dict[str, Any], rate: float) -> None:
    """Planned one by one, the steps end at the same times to the last bit, and every outcome is the same."""
    slow, fast = engine_of(**settings), engine_of(**settings)
    replicas = slow.replicas(1) + fast.replicas(1)
    replicas[0].jumps = False
    outcomes: list[list[Any]] = [[], []]
    for request in load(rate):
        for replica, known in zip(replicas, outcomes, strict=True):
            replica.run_until(request.arrival_s)
            known.append(replica.add_request(request))
    for replica in replicas:
        replica.run_until(1e9)
    one, other = replicas
    assert outcomes[0] == outcomes[1]
    assert (one.timeline.end_s, one.timeline.num_rows) == (other.timeline.end_s, other.timeline.num_rows)
    assert _intervals(one) == _intervals(other)
    assert (one.busy_s, one.position_seconds) == (other.busy_s, other.position_seconds)


def _intervals(replica: Any) -> Counter[float]:
    found: Counter[float] = Counter()
    for seconds, count in zip(replica.timeline.interval_s, replica.timeline.interval_count, strict=True):
        found[seconds] += count
    return found


def test_one_request_takes_the_sum_of_its_steps() -> None:
    """A prompt of 10 tokens in chunks of 8 and 2, then two tokens more: four steps whose times are known by hand."""
    outcome, = simulate(engine_of(), [SimulatedRequest(1.0, (own_segment(0, 10),), 3)]).outcomes
    prompt_s = TIMES.seconds(8, 0, 8) + TIMES.seconds(2, 0, 10)
    assert outcome.ttft_s == pytest.approx(prompt_s)
    assert outcome.finished_s == pytest.approx(1.0 + prompt_s + TIMES.seconds(0, 1, 11) + TIMES.seconds(0, 1, 12))


def test_chunks_pairs_and_requests_cost_what_they_cost() -> None:
    """A prompt in chunks of 8 and 2 attends 36 and 19 pairs, and a request that comes meanwhile delays what follows."""
    times = LoadTimes(*astuple(TIMES), chunk_s=0.01, pair_s=0.001, request_s=0.1)
    requests = [SimulatedRequest(1.0, (own_segment(0, 10),), 2), SimulatedRequest(1.11, (own_segment(1, 4000),), 90)]
    outcome, refused = simulate(replace(engine_of(), times=times), requests).outcomes
    first_s = 0.1 + TIMES.seconds(8, 0, 8) + 0.01 + 0.036 + TIMES.seconds(2, 0, 10) + 0.01 + 0.019
    assert outcome.ttft_s == pytest.approx(first_s)
    assert outcome.finished_s == pytest.approx(1.0 + first_s + TIMES.seconds(0, 1, 11))
    assert refused.refusal == "too long"


@pytest.mark.parametrize("jumps", [True, False])
def test_only_the_first_step_after_prompts_takes_longer(jumps: bool) -> None:
    """A prompt in two chunks and three tokens more: of the five steps the third takes longer."""
    times = LoadTimes(*astuple(TIMES), after_prompts_s=0.1)
    replica, = replace(engine_of(), times=times).replicas(1)
    replica.jumps = jumps
    outcome = replica.add_request(SimulatedRequest(0.0, (own_segment(0, 10),), 4))
    replica.run_until(math.inf)
    steps_s = [TIMES.seconds(8, 0, 8), TIMES.seconds(2, 0, 10), 0.1 + TIMES.seconds(0, 1, 11)]
    assert outcome.finished_s == pytest.approx(sum(steps_s) + TIMES.seconds(0, 1, 12) + TIMES.seconds(0, 1, 13))
    assert list(replica.timeline.end_s)[2] == pytest.approx(sum(steps_s))


def test_a_request_that_comes_during_a_step_delays_the_next() -> None:
    """The second request is taken after the step in which it came, and both wait for that."""
    times = LoadTimes(*astuple(TIMES), request_s=0.1)
    requests = [SimulatedRequest(1.0, (own_segment(0, 8),), 2), SimulatedRequest(1.101, (own_segment(1, 4),), 1)]
    one, other = simulate(replace(engine_of(), times=times), requests).outcomes
    first_s = 0.1 + TIMES.seconds(8, 0, 8)
    assert (one.ttft_s, other.accepted_s) == (pytest.approx(first_s), pytest.approx(1.0 + first_s))
    assert one.finished_s == other.finished_s == pytest.approx(1.0 + first_s + 0.1 + TIMES.seconds(4, 1, 13))


def test_tenants_get_their_shares_and_a_crowd_pushes_no_other_out() -> None:
    """Under "fair", while all have requests, tokens go by weight; under "fcfs" a tenant waits behind a crowd."""
    crowd, small = RequestOptions(tenant="crowd", weight=2.0), RequestOptions(tenant="small")
    requests = [SimulatedRequest(0.0, (own_segment(number, 8),), 12, crowd) for number in range(32)]
    requests += [SimulatedRequest(0.0, (own_segment(32 + number, 8),), 12, small) for number in range(8)]

    def starts(policy: str) -> dict[str, list[float]]:
        outcomes = simulate(engine_of(scheduling_policy=policy), requests).outcomes
        return {name: sorted(one.started_s for one in outcomes if one.tenant == name and one.started_s is not None)
                for name in ("crowd", "small")}

    fair, fcfs = starts("fair"), starts("fcfs")
    assert fcfs["small"][0] >= fcfs["crowd"][-1]
    half_s = fair["small"][-1]
    assert 13 <= sum(one <= half_s for one in fair["crowd"]) <= 19  # 2:1 of 8
    summary = simulate(engine_of(scheduling_policy="fair"), requests).summary(Targets())
    assert {name: one.num_completed for name, one in summary.tenants.items()} == {"crowd": 32, "small": 8}
    assert "tenant crowd" in str(_columns(report.as_table("x", summary)))
    assert simulate(engine_of(), load()).summary(Targets()).tenants == {}


def _columns(table: Any) -> list[list[str]]:
    return [list(column.cells) for column in table.columns]


def test_what_cannot_be_served_is_refused_and_counted() -> None:
    """A prompt beyond the context or the pool, a full queue and a long wait each have their reason."""
    requests = [SimulatedRequest(0.0, (own_segment(0, 5000),), 1), SimulatedRequest(0.0, (own_segment(1, 200),), 1)]
    requests += [SimulatedRequest(0.0, (own_segment(2 + number, 8),), 40) for number in range(10)]
    summary = simulate(engine_of(max_num_seqs=1, max_num_waiting=2, queue_timeout_s=0.1), requests).summary(Targets())
    assert summary.refusals == {"queue full": 8, "too long": 2, "waited too long": 1}
    assert summary.num_completed == 1
    assert summary.goodput_share == pytest.approx(1 / 12)


def test_a_host_tier_is_refused() -> None:
    """Transfers have no time here, so a configuration that needs them is refused before anything runs."""
    with pytest.raises(InvalidConfig, match="host_kv_memory"):
        simulate(engine_of(host_kv_memory="1MiB"), load())


@pytest.mark.parametrize("route", ROUTES)
def test_the_same_load_gives_the_same_bytes(route: str) -> None:
    """Everything that a simulation reports is a function of load, configuration, costs and seed."""
    first, second = (json.dumps(report.as_data(simulate(engine_of(), load(), 3, route), Targets(ttft_ms=50)))
                     for _ in range(2))
    assert first == second
    assert first != json.dumps(report.as_data(simulate(engine_of(), load(rate=29), 3, route), Targets(ttft_ms=50)))


def test_round_robin_goes_round() -> None:
    """Requests go to one replica after the other."""
    assert [one.replica for one in simulate(engine_of(), load(), 3, "round-robin").outcomes] == [0, 1, 2] * 10


def test_least_loaded_avoids_a_busy_replica() -> None:
    """Beside a replica with one long request, short ones that come one at a time all go to the other one."""
    requests = [SimulatedRequest(0.0, (own_segment(0, 8),), 80)]
    requests += [SimulatedRequest(0.04 * number, (own_segment(number, 8),), 2) for number in range(1, 8)]
    assert [one.replica for one in simulate(engine_of(), requests, 2).outcomes] == [0] + [1] * 7


def test_prefix_affinity_finds_more_in_the_cache() -> None:
    """Requests with a shared beginning meet on the replica that has it: more of their prompts is cached."""
    shares = {route: simulate(engine_of(num_kv_blocks=40), load(rate=15, num_requests=90), 3, route).summary(
        Targets()).cached_share for route in ("round-robin", "prefix-affinity")}
    assert shares["prefix-affinity"] > shares["round-robin"] + 0.02


def test_prefix_affinity_does_not_pile_up() -> None:
    """If all prompts begin alike, other replicas still take requests when the one that has the beginning is loaded."""
    requests = RandomLoad(rate=200, num_requests=60, input_tokens=4, output_tokens=12, prefix_tokens=12).requests()
    replicas = Counter(one.replica for one in simulate(engine_of(), requests, 3, "prefix-affinity").outcomes)
    assert min(replicas[number] for number in range(3)) >= 10


def test_the_smallest_number_of_replicas_is_found() -> None:
    """The answer is the first number, counted up from one, with which the share of requests is in time."""
    targets, requests = Targets(ttft_ms=40, tpot_ms=30), load(rate=60)
    met = [simulate(engine_of(), requests, number).summary(targets).goodput_share for number in range(1, 6)]
    tried: list[int] = []
    found, result = find_replicas(engine_of(), requests, targets, share=0.9,
                                  on_result=lambda number, summary: tried.append(number))
    assert found == 1 + next(index for index, share in enumerate(met) if share >= 0.9)
    assert found > 2
    assert result.summary(targets).goodput_share == met[found - 1]
    assert len(tried) == len(set(tried)) <= 8


def test_too_few_replicas_allowed_is_an_error_with_numbers() -> None:
    """If the largest number does not suffice, the error says what it reached and what was asked for."""
    with pytest.raises(InvalidConfig, match=r"max_replicas: with 3, 0.0% of the requests .* 99.0% are asked for"):
        find_replicas(engine_of(), load(), Targets(ttft_ms=1e-3), most=3)


@pytest.mark.parametrize(("arguments", "name"), [
    ({"num_replicas": 0}, "replicas"), ({"num_replicas": 1025}, "replicas"), ({"route": "fastest"}, "route"),
])
def test_other_arguments_are_refused(arguments: dict[str, Any], name: str) -> None:
    """A number of replicas or a route that there is not is named before anything runs."""
    with pytest.raises(InvalidConfig, match=f"{name}: got"):
        simulate(engine_of(), load(), **arguments)


def test_few_steps_are_planned_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 32 running, at most a third of the steps is planned by itself: that is what makes simulations fast."""
    plans, schedule = [], Scheduler.schedule
    monkeypatch.setattr(Scheduler, "schedule", lambda self, most=None: plans.append(1) or schedule(self, most))
    engine = SimulatedEngine(times=TIMES, model=SimulatedModel(max_model_len=4096, block_size=32),
                             config=EngineConfig(num_kv_blocks=2048))
    requests = RandomLoad(rate=30.0, num_requests=120, input_tokens=100, output_tokens=200).requests()
    summary = simulate(engine, requests).summary(Targets())
    assert summary.slot_utilisation > 0.6
    assert len(plans) < summary.num_steps / 3
