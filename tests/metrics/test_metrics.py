"""The metrics say what was run: parsed with prometheus-client's own parser and compared with the engine's answers."""

from __future__ import annotations

import math
import subprocess
import sys
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagedcore import AsyncEngine, SamplingParams, engine_metrics, engine_metrics_text
from pagedcore.engine.builder import build_components
from pagedcore.engine.engine import Engine
from pagedcore.errors import EngineClosed, MissingDependency
from pagedcore.metrics.definitions import REQUEST_HISTOGRAMS, SCALARS, Distribution, one_two_five
from pagedcore.metrics.recorder import EngineMetrics
from pagedcore.outputs import CompletionOutput, RequestMetrics, RequestOutput
from support.doubles import FakeClock, FlakyBackend, ToyBackend, toy_answer
from support.engine_builders import make_engine, run

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def params(max_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)  # type: ignore[arg-type]


def parse(text: str) -> Values:
    """Every sample by name and labels, the model's name left out."""
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k != "model_name"))): sample.value
        for family in text_string_to_metric_families(text) for sample in family.samples
    }


def value(values: Values, name: str, **labels: str) -> float:
    return values[f"pagedcore_{name}", tuple(sorted(labels.items()))]


def read(engine: Engine | AsyncEngine) -> Values:
    return parse(engine_metrics_text(engine))


class TickingBackend(ToyBackend):
    """A toy whose every step takes a second of a clock that is made up."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()

    def forward(self, batch):  # type: ignore[no-untyped-def]
        self.clock.advance(1.0)
        return super().forward(batch)


def test_counters_are_what_was_run() -> None:
    """Tokens, steps, rows and finished requests add up to the answers that were given."""
    with make_engine() as engine:
        engine_metrics(engine)
        outputs = engine.generate([[1, 2, 3], [4, 5]], params(6), show_progress=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == [toy_answer([1, 2, 3], 6),
                                                                             toy_answer([4, 5], 6)]
        values, stats = read(engine), engine.stats()
    assert value(values, "prompt_tokens_total") == 5
    assert value(values, "generation_tokens_total") == 12
    assert value(values, "steps_total") == stats.num_steps
    assert value(values, "step_rows_total") == stats.num_rows
    assert value(values, "computed_tokens_total") == stats.num_computed_tokens == 5 + 12 - 2
    assert value(values, "requests_finished_total", finish_reason="length") == 2
    assert value(values, "request_generation_tokens_sum") == 12
    assert value(values, "request_prompt_tokens_count") == 2
    assert value(values, "iteration_tokens_sum") == stats.num_computed_tokens
    assert value(values, "iteration_tokens_count") == stats.num_steps


def test_gauges_are_the_present() -> None:
    """What runs, waits and is in use is as it is now, even if no step has come since."""
    with make_engine(max_num_seqs=1) as engine:
        engine_metrics(engine)
        first, second = engine.add_request([1] * 5, params(9)), engine.add_request([2], params(9))
        engine.step()
        values = read(engine)
        assert (value(values, "requests_running"), value(values, "requests_waiting")) == (1, 1)
        assert value(values, "kv_blocks_used") == engine.stats().num_blocks_used == 2
        assert value(values, "kv_cache_usage_ratio") == 2 / 16
        first.abort(), second.abort()
        values = read(engine)
        gauges = ("requests_running", "requests_waiting", "kv_cache_usage_ratio")
        assert [value(values, name) for name in gauges] == [0, 0, 0]


def test_intervals_follow_the_clock() -> None:
    """Queue, prefill, decode and the rest are the differences of the moments, to the second."""
    backend = TickingBackend()
    engine = Engine(build_components(backend, num_kv_blocks=16, block_size=4, max_num_seqs=1, max_num_batched_tokens=4),
                    clock=backend.clock)
    with engine:
        engine_metrics(engine)
        engine.add_request([1] * 8, params(4))  # two steps of prompt, then three: arrives 0, first token 2, ends 5
        engine.add_request([2], params(2))      # waits for five steps, first token 6, ends 7
        run(engine)
        values = read(engine)
    sums = {"time_to_first_token": 2 + 6, "e2e_request_latency": 5 + 7, "request_queue_time": 0 + 5,
            "request_prefill_time": 2 + 1, "request_decode_time": 3 + 1, "request_inference_time": 5 + 2,
            "inter_token_latency": 3 + 1}
    assert {name: value(values, f"{name}_seconds_sum") for name in sums} == sums
    assert value(values, "inter_token_latency_seconds_count") == 3 + 1
    assert value(values, "inter_token_latency_seconds_bucket", le="1.0") == 4
    assert value(values, "inter_token_latency_seconds_bucket", le="0.5") == 0


def test_the_pause_between_steps_is_seen_while_somebody_waits_for_a_token() -> None:
    """A slow step counts for those that ran before it; an idle engine's silence does not count."""
    clock = FakeClock()
    metrics = EngineMetrics(clock)
    with make_engine(plugins=[metrics]) as engine:
        engine.add_request([1], params(3))
        for pause in (5.0, 0.25, 2.0):
            clock.advance(pause)
            engine.step()
        clock.advance(1000.0)
        engine.add_request([2], params(1))
        engine.step()
    values = parse(metrics.text())
    assert value(values, "step_interval_seconds_count") == 2
    assert value(values, "step_interval_seconds_sum") == 2.25


def test_nobody_pauses_who_has_not_begun() -> None:
    """While the only slot is free and a request waits for it, no running request waits for its next token."""
    clock = FakeClock()
    metrics = EngineMetrics(clock)
    with make_engine(plugins=[metrics], max_num_seqs=1) as engine:
        for token in (1, 2):
            engine.add_request([token], params(2))
        for _ in range(4):
            engine.step()
            clock.advance(0.01)
    assert value(parse(metrics.text()), "step_interval_seconds_count") == 2


def test_the_silence_after_an_abort_is_no_pause() -> None:
    """Once a scrape has seen that no request runs, the time until the next step is no pause between tokens."""
    clock = FakeClock()
    metrics = EngineMetrics(clock)
    with make_engine(plugins=[metrics]) as engine:
        request = engine.add_request([1], params(3))
        engine.step()
        request.abort()
        metrics.refresh(engine.stats())
        clock.advance(1000.0)
        engine.generate([[2]], params(1), show_progress=False)
    assert value(parse(metrics.text()), "step_interval_seconds_count") == 0


def test_a_scrape_that_comes_late_says_nothing_of_who_runs_now() -> None:
    """That no request ran before the last step is no reason to leave out the pause after it."""
    clock = FakeClock()
    metrics = EngineMetrics(clock)
    with make_engine(plugins=[metrics]) as engine:
        before = engine.stats()
        engine.add_request([1], params(2))
        engine.step()
        metrics.refresh(before)
        engine.step()
    assert value(parse(metrics.text()), "step_interval_seconds_count") == 1


def test_the_engine_is_asked_for_everything_now_and_then_and_at_the_end() -> None:
    """Not at every step, and never so seldom that a scrape which the engine has no time for shows old numbers."""
    clock, asked_after = FakeClock(), []
    metrics = EngineMetrics(clock)
    with make_engine(plugins=[metrics]) as engine:
        read_stats = engine.stats
        engine.stats = lambda: (asked_after.append(engine._outputs.counters.num_steps), read_stats())[1]  # type: ignore[method-assign]
        engine.add_request([1], params(9))
        while engine.has_pending_requests():
            engine.step()
            clock.advance(0.06)
    assert asked_after == [1, 5, 9]
    assert value(parse(metrics.text()), "generation_tokens_total") == 9


def test_preemption_recomputes_without_new_prompt_tokens() -> None:
    """Under memory pressure more positions are computed, but prompts and answers count once."""
    with make_engine(num_kv_blocks=8, max_num_seqs=4) as engine:
        engine_metrics(engine)
        engine.generate([[i] * 6 for i in range(1, 5)], params(12), show_progress=False)
        values, stats = read(engine), engine.stats()
    assert value(values, "preemptions_total") == stats.num_preemptions > 0
    assert value(values, "prompt_tokens_total") == value(values, "request_prompt_tokens_sum") == 24
    assert value(values, "generation_tokens_total") == value(values, "request_generation_tokens_sum") == 48
    assert value(values, "computed_tokens_total") > 24 + 48 - 4


def test_aborted_and_failed_requests_are_told_apart() -> None:
    """Every request is counted once, by how it ended; what it never reached is not made up."""
    with make_engine(FlakyBackend(raise_on_step=3), max_num_seqs=1, max_num_waiting=8) as engine:
        engine_metrics(engine)
        engine.add_request([1], params(2))
        failing = engine.add_request([2], params(4))
        waiting = engine.add_request([3], params(4))
        waiting.abort()
        run(engine)
        assert failing.output().outputs[0].finish_reason == "error"
        values = read(engine)
    ended = {reason: value(values, "requests_finished_total", finish_reason=reason)
             for reason in ("stop", "length", "abort", "error")}
    assert ended == {"stop": 0, "length": 1, "abort": 1, "error": 1}
    assert value(values, "e2e_request_latency_seconds_count") == 3
    assert value(values, "time_to_first_token_seconds_count") == 1
    assert value(values, "request_queue_time_seconds_count") == 2


def test_several_answers_are_one_request() -> None:
    """With ``n`` answers the prompt counts once, the tokens of all count, and so do the pauses of each."""
    metrics = EngineMetrics()
    with make_engine(plugins=[metrics]):
        lengths, reasons = (5, 5, 3), ("length", "stop", "error")
        answers = [CompletionOutput(i, "", (1,) * length, reason)  # type: ignore[arg-type]
                   for i, (length, reason) in enumerate(zip(lengths, reasons, strict=True))]
        moments = RequestMetrics(0.0, 1.0, 2.0, 4.0)
        metrics.pagedcore_request_finished(RequestOutput("r", (1, 2), answers, True, 0, moments))
    values = parse(metrics.text())
    assert value(values, "requests_finished_total", finish_reason="error") == 1
    assert value(values, "requests_finished_total", finish_reason="length") == 0
    assert value(values, "request_prompt_tokens_sum") == 2
    assert value(values, "request_generation_tokens_sum") == 13
    assert value(values, "request_max_generation_tokens_sum") == 5
    assert value(values, "request_answers_sum") == 3
    assert value(values, "inter_token_latency_seconds_count") == 4 + 4 + 2
    assert value(values, "inter_token_latency_seconds_bucket", le="0.5") == 10


def test_the_vllm_names_say_the_same() -> None:
    """Every alias has the value of the metric it repeats, and none is there when not wanted."""
    with make_engine() as engine:
        engine_metrics(engine)
        engine.generate([[1, 2, 3]], params(6), show_progress=False)
        values = read(engine)
        assert "vllm" not in engine_metrics_text(engine, vllm_names=False)
    for one in SCALARS:
        ending = "_total" if one.kind == "counter" else ""
        if one.vllm_name:
            assert values[f"vllm:{one.vllm_name}{ending}", ()] == value(values, one.name + ending), one.name
    for histogram in REQUEST_HISTOGRAMS:
        for ending in ("_sum", "_count"):
            assert values[f"vllm:{histogram.vllm_name}{ending}", ()] == value(values, histogram.name + ending)
    assert values["vllm:request_success_total", (("finished_reason", "length"),)] == 1


@pytest.mark.parametrize("name", [
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total",
    "prompt_tokens_total", "generation_tokens_total", "request_success_total", "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum", "request_inference_time_seconds_sum",
    "request_prompt_tokens_bucket", "request_generation_tokens_bucket", "request_max_num_generation_tokens_sum",
    "request_params_n_sum", "iteration_tokens_total_bucket", "cache_config_info",
])
def test_the_names_that_dashboards_ask_for_are_there(name: str) -> None:
    """Each of vLLM's metric names that has an equal here is exported, to the letter."""
    with make_engine() as engine:
        assert f"vllm:{name}" in {found for found, _ in read(engine)}


def test_histograms_are_well_formed() -> None:
    """Buckets are cumulative, end with +Inf, and +Inf is the count."""
    with make_engine(num_kv_blocks=64) as engine:
        engine_metrics(engine)
        engine.generate([[i] * i for i in range(1, 9)], [params(i) for i in range(1, 9)], show_progress=False)
        text = engine_metrics_text(engine)
    families = [family for family in text_string_to_metric_families(text) if family.type == "histogram"]
    assert len(families) == 2 * len(REQUEST_HISTOGRAMS) + 3
    for family in families:
        counts = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
        (count,) = [sample.value for sample in family.samples if sample.name == f"{family.name}_count"]
        assert counts == sorted(counts), family.name
        assert counts[-1] == count, family.name


def test_a_value_on_a_bound_is_in_its_bucket() -> None:
    """Upper bounds are inclusive, as Prometheus says, and nothing is too large to be counted."""
    distribution = Distribution((1.0, 2.0))
    for observed in (1.0, 1.5, 2.0, 3.0):
        distribution.observe(observed)
    distribution.observe(2.0, weight=3)
    assert (distribution.counts, distribution.total) == ([1, 5, 1], 13.5)


def test_bounds_are_one_two_five() -> None:
    """Token buckets go 1-2-5 per decade up to the first that holds the longest context."""
    assert one_two_five(0, 300.0) == (1, 2, 5, 10, 20, 50, 100, 200, 500)
    assert one_two_five(-4, 500.0)[:4] == (0.0001, 0.0002, 0.0005, 0.001)
    assert math.isclose(one_two_five(-4, 500.0)[-1], 500.0)


def test_an_async_engine_is_read_from_any_thread_while_it_runs() -> None:
    """Scrapes during the work never see a counter go back, and the last one sees everything."""
    with AsyncEngine(make_engine(num_kv_blocks=64, max_num_waiting=64)) as engine:
        assert engine_metrics(engine) is engine_metrics(engine)
        workers = [threading.Thread(target=lambda i=i: list(engine.generate_sync([i], params(30)))) for i in range(12)]
        for worker in workers:
            worker.start()
        seen = [value(read(engine), "generation_tokens_total") for _ in range(8)]
        for worker in workers:
            worker.join()
        values = read(engine)
    assert seen == sorted(seen)
    assert value(values, "generation_tokens_total") == 12 * 30
    assert value(values, "requests_finished_total", finish_reason="length") == 12
    assert value(values, "inter_token_latency_seconds_count") == 12 * 29


def test_a_closed_engine_shows_its_last_numbers() -> None:
    """A scrape after the end is no error, unless nothing was ever recorded."""
    engine = AsyncEngine(make_engine())
    engine_metrics(engine)
    list(engine.generate_sync([1], params(4)))
    engine.close()
    assert value(read(engine), "generation_tokens_total") == 4
    other = AsyncEngine(make_engine())
    other.close()
    with pytest.raises(EngineClosed):
        engine_metrics_text(other)


def test_engines_are_kept_apart() -> None:
    """Two engines of one process have registries of their own."""
    with make_engine() as first, make_engine() as second:
        engine_metrics(first), engine_metrics(second)
        first.generate([[1]], params(3), show_progress=False)
        assert value(read(first), "generation_tokens_total") == 3
        assert value(read(second), "generation_tokens_total") == 0


def test_without_metrics_nothing_is_recorded_and_nothing_imported() -> None:
    """An engine without metrics has no observers, and the package does not need prometheus-client."""
    with make_engine() as engine:
        assert not engine.hooks.observes_steps
    code = "import sys, pagedcore; pagedcore.engine_metrics; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def test_a_missing_prometheus_client_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the optional package, recording works and showing says what to install."""
    monkeypatch.delitem(sys.modules, "pagedcore.metrics.prometheus", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with make_engine() as engine:
        engine_metrics(engine)
        engine.generate([[1]], params(2), show_progress=False)
        with pytest.raises(MissingDependency, match=r"pagedcore\[metrics\]"):
            engine_metrics_text(engine)
