"""``pagedcore simulate``: what a load would meet on one engine or several, without computing anything."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedcore.cli import common
from pagedcore.errors import InvalidConfig, show

if TYPE_CHECKING:
    from pagedcore.analysis.load_simulation.calibration import Calibration
    from pagedcore.analysis.load_simulation.results import SimulationResult, Summary, Targets
    from pagedcore.analysis.load_simulation.simulator import SimulatedEngine
    from pagedcore.analysis.load_simulation.workload import SimulatedRequest


def simulate(
    calibrate: Annotated[
        str | None, typer.Option(help="Measure what steps of this model cost here, and write it to --out.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The file that --calibrate writes.")] = Path("step_times.json"),
    seconds: Annotated[float, typer.Option(help="How long --calibrate measures.")] = 20.0,
    step_times: Annotated[Path | None, typer.Option(help="A file that --calibrate has written.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Arrivals: Azure's .csv or Mooncake's .jsonl.")] = None,
    speed: Annotated[float, typer.Option(help="How many times as fast the requests of --trace arrive.")] = 1.0,
    rate: Annotated[float | None, typer.Option(help="Instead of --trace: random requests per second.")] = None,
    burstiness: Annotated[float, typer.Option(help="0: regular arrivals, 1: Poisson, more: bursts.")] = 1.0,
    requests: Annotated[int, typer.Option(help="How many requests; of --trace, at most.")] = 1000,
    input_tokens: Annotated[int, typer.Option(help="Mean length of prompts.")] = 256,
    output_tokens: Annotated[int, typer.Option(help="Mean length of completions.")] = 128,
    length_spread: Annotated[float, typer.Option(help="Standard deviation of lengths over their mean.")] = 0.5,
    prefix_tokens: Annotated[int, typer.Option(help="Tokens before each prompt that it shares with others.")] = 0,
    prefixes: Annotated[int, typer.Option(help="How many different shared beginnings there are.")] = 1,
    tenant: Annotated[list[str] | None, typer.Option(help="NAME or NAME=WEIGHT, once for each tenant.")] = None,
    seed: Annotated[int, typer.Option(help="Of random requests.")] = 0,
    replicas: Annotated[int, typer.Option(help="How many engines.")] = 1,
    route: Annotated[str, typer.Option(help="round-robin, least-loaded or prefix-affinity.")] = "least-loaded",
    ttft_ms: Annotated[float | None, typer.Option(help="Target: milliseconds to the first token.")] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="Target: milliseconds between tokens, in the mean.")] = None,
    find_replicas: Annotated[bool, typer.Option(help="Find how many engines it takes to meet the targets.")] = False,
    share: Annotated[float, typer.Option(help="Share of the requests that have to meet them.")] = 0.99,
    max_replicas: Annotated[int, typer.Option(help="The most that --find-replicas tries.")] = 64,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw load and latencies; needs matplotlib.")] = None,
    policy: Annotated[str | None, typer.Option(help="Scheduling policy.")] = None,
    max_num_seqs: common.SeqsOption = None,
    blocks: common.BlocksOption = None,
    max_model_len: common.LengthOption = None,
    config: common.ConfigOption = None,
) -> None:
    """Simulate a load: the engine's own scheduler and block manager on a virtual clock, with measured step times."""
    settings = {"max_num_seqs": max_num_seqs, "num_kv_blocks": blocks, "max_model_len": max_model_len,
                "scheduling_policy": policy}
    if calibrate is not None:
        _calibrate(calibrate, out, seconds, seed, config, settings)
        return
    from tqdm import tqdm

    from pagedcore.analysis.load_simulation.report import new_figure
    from pagedcore.analysis.load_simulation.results import Targets
    from pagedcore.analysis.load_simulation.simulator import simulate as run

    if plot is not None:
        new_figure(1, 1)  # so that a picture that cannot be drawn is refused before anything is simulated
    calibration, engine = _engine(step_times, config, settings)
    load = _arrivals(trace, rate, speed, requests, burstiness=burstiness, input_tokens=input_tokens,
                     output_tokens=output_tokens, length_spread=length_spread, prefix_tokens=prefix_tokens,
                     num_prefixes=prefixes, seed=seed, tenants=tuple(map(_tenant, tenant or ())))
    targets = Targets(ttft_ms=ttft_ms, tpot_ms=tpot_ms)
    if find_replicas:
        result = _find(engine, load, targets, share=share, most=max_replicas, route=route)
    else:
        with tqdm(total=len(load), unit="request", disable=None) as bar:
            result = run(engine, load, replicas, route, bar.update)
    _show(calibration.model, route, result, targets, json_file, plot)


def _calibrate(
    model: str, out: Path, seconds: float, seed: int, config: Path | None, settings: dict[str, Any]
) -> None:
    from tqdm import tqdm

    from pagedcore.analysis.load_simulation.calibration import calibrate

    layout = "measuring: {percentage:3.0f}% |{bar}| {n:.0f} of {total:.0f} s"
    with common.open_engine(model, config, **settings) as engine, tqdm(
        total=seconds, disable=None, bar_format=layout,
    ) as bar:
        # Why: as a server does. Collecting garbage among all objects takes 0.2 s, which would count as a step.
        gc.collect()
        gc.freeze()
        found = calibrate(engine, Path(model).name, seconds=seconds, seed=seed, on_progress=bar.update)
    found.save(out)
    costs = found.times
    common.console().print(
        f"{found.num_steps} steps; a step takes {1e3 * costs.fixed_s:.3f} ms, "
        f"{1e6 * costs.prefill_token_s:.1f} us for each prompt token, {1e6 * costs.decode_row_s:.1f} us for each row "
        f"that decodes, {1e9 * costs.kv_token_s:.1f} ns for each position read; mean error {found.mean_error:.0%}."
    )


def _engine(
    step_times: Path | None, config: Path | None, settings: dict[str, Any]
) -> tuple[Calibration, SimulatedEngine]:
    from pagedcore.analysis.load_simulation.calibration import Calibration
    from pagedcore.config.engine_config import EngineConfig

    if step_times is None:
        raise InvalidConfig("step-times: got none, allowed is a file that has been measured once with "
                            "`pagedcore simulate --calibrate MODEL --out step_times.json`.")
    calibration = Calibration.load(step_times)
    given = {name: value for name, value in settings.items() if value is not None}
    chosen = EngineConfig(**given) if config is None else EngineConfig.from_file(config, None, **given)
    return calibration, calibration.engine(chosen)


def _arrivals(
    trace: Path | None, rate: float | None, speed: float, requests: int, **lengths: Any
) -> list[SimulatedRequest]:
    from pagedcore.analysis.load_simulation.traces import read_trace
    from pagedcore.analysis.load_simulation.workload import RandomLoad, faster

    if trace is not None and rate is None:
        return faster(read_trace(trace, requests), speed)
    if trace is None and rate is not None:
        return RandomLoad(rate=rate, num_requests=requests, **lengths).requests()
    raise InvalidConfig("arrivals: give either --trace FILE or --rate REQUESTS_PER_SECOND.")


def _tenant(text: str) -> tuple[str, float]:
    name, _, weight = text.partition("=")
    try:
        return name, float(weight or 1.0)
    except ValueError:
        raise InvalidConfig(f"tenant: got {show(text)}, allowed is NAME or NAME=WEIGHT.") from None


def _find(
    engine: SimulatedEngine, load: list[SimulatedRequest], targets: Targets, **search: Any
) -> SimulationResult:
    from tqdm import tqdm

    from pagedcore.analysis.load_simulation.report import as_search
    from pagedcore.analysis.load_simulation.simulator import find_replicas

    summaries: dict[int, Summary] = {}

    def note(number: int, summary: Summary) -> None:
        summaries[number] = summary
        bar.set_postfix(replicas=number, in_time=f"{summary.goodput_share:.1%}")
        bar.update()

    with tqdm(unit="simulation", disable=None) as bar:
        found, result = find_replicas(engine, load, targets, on_result=note, **search)
    common.console().print(as_search(summaries[number] for number in sorted(summaries)))
    common.console().print(f"{found} replicas: {summaries[found].goodput_share:.1%} of the requests in time.")
    return result


def _show(
    model: str, route: str, result: SimulationResult, targets: Targets, json_file: Path | None, plot: Path | None,
) -> None:
    from pagedcore.analysis.load_simulation import report

    title = f"{model}, {len(result.outcomes)} requests, {route}"
    common.console().print(report.as_table(title, result.summary(targets)))
    if json_file is not None:
        data = report.as_data(result, targets, model=model, route=route)
        json_file.write_text(json.dumps(data, sort_keys=True) + "\n", encoding="utf-8")
    if plot is not None:
        report.save_plot(plot, result, targets)
