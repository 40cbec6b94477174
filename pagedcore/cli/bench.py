"""``pagedcore bench batching``: no, static and continuous batching on the same model and kernels."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedcore.cli import common
from pagedcore.errors import InvalidConfig

if TYPE_CHECKING:
    from pagedcore.bench.throughput import Measurement
    from pagedcore.bench.workloads import Workload
    from pagedcore.requests.stats import EngineStats

_MAX_WAITING = 4096
"""All requests of a workload arrive at once, so the queue has to hold them."""
_NUM_SLOTS = 16
"""Fewer than a server has, so that a workload fills them many times over."""

app = typer.Typer(help="Measure what batching is worth on this machine.", no_args_is_help=True)


@app.command()
@app.command("throughput", hidden=True)
def batching(
    model: common.ModelOption = "demo",
    random_weights: Annotated[
        str | None, typer.Option(help="Instead of --model: random weights in the shape tiny or qwen05b.")
    ] = None,
    workload: Annotated[str, typer.Option(help="heavy-tailed, uniform, ragged, w1, w2 or w3.")] = "heavy-tailed",
    prompts_json: Annotated[
        Path | None, typer.Option(help="Instead of --workload: a JSON list of prompts as token ids.")
    ] = None,
    output_tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt of --prompts-json.")] = 64,
    modes: Annotated[
        str, typer.Option("--modes", "--policies", help="none, static, continuous; or names of scheduling policies.")
    ] = "none,static,continuous",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw who sat in which row when, as .png or .svg; needs matplotlib.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write table and picture as one page; needs matplotlib.")] = None,
    dtype: common.DtypeOption = None,
    kv_cache_dtype: common.KVDtypeOption = None,
    quantization: common.QuantizationOption = None,
    max_num_seqs: common.SeqsOption = None,
    blocks: common.BlocksOption = None,
    max_model_len: common.LengthOption = None,
    attention_backend: common.BackendOption = None,
    config: common.ConfigOption = None,
) -> None:
    """Run the same requests one at a time, in static batches and continuously, on the same kernels, and compare."""
    from pagedcore.analysis.load_simulation.report import new_figure
    from pagedcore.bench import report, workloads
    from pagedcore.execution.machine import this_machine

    workloads.require_name(workload)
    if plot is not None or html is not None:
        new_figure(1, 1)  # so that a picture that cannot be drawn is refused before anything is measured
    number_format = this_machine().default_dtype if dtype in (None, "auto") else dtype
    chosen, measurements, stats = _measure(
        modes.split(","), _width(max_num_seqs, config), config,
        lambda: model if random_weights is None else workloads.random_model(random_weights, number_format),
        lambda most: (workloads.make_workload(workload, most) if prompts_json is None
                      else workloads.load_prompts(prompts_json, output_tokens, most)),
        dtype=dtype, kv_cache_dtype=kv_cache_dtype, quantization=quantization, num_kv_blocks=blocks,
        max_model_len=max_model_len, attention_backend=attention_backend,
    )
    common.console().print(report.as_table(chosen, measurements))
    context = {"model": random_weights or Path(model).name, "dtype": stats.dtype, "quantization": quantization,
               "attention_backend": stats.attention_backend}
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_data(chosen, measurements, **context)), encoding="utf-8")
    if plot is not None:
        report.save_plot(plot, chosen, measurements)
    if html is not None:
        report.save_page(html, chosen, measurements)


def _measure(
    modes: list[str], width: int, config: Path | None, make_model: Callable[[], Any],
    make_workload: Callable[[int], Workload], **settings: Any,
) -> tuple[Workload, list[Measurement], EngineStats]:
    """Measure each way of batching on an engine of its own; ``make_workload`` gets the longest context in tokens."""
    from rich.progress import Progress

    from pagedcore.bench.throughput import MODES, measure

    measurements = []
    for mode in modes:
        of_mode = {"max_num_seqs": width, "scheduling_policy": mode, **MODES.get(mode, {})}
        with common.open_engine(
            make_model(), config, max_num_waiting=_MAX_WAITING, **settings, **of_mode,
        ) as engine, Progress(console=common.error_console(), transient=True) as progress:
            chosen = make_workload(engine.stats().max_model_len)
            if len(chosen.prompts) > _MAX_WAITING:
                raise InvalidConfig(f"prompts: got {len(chosen.prompts)}, allowed is up to {_MAX_WAITING}.")
            task = progress.add_task(mode, total=chosen.num_output_tokens)
            measurements.append(measure(engine, chosen, mode, partial(progress.advance, task), width))
            stats = engine.stats()
    return chosen, measurements, stats


def _width(max_num_seqs: int | None, config: Path | None) -> int:
    from pagedcore.config.engine_config import EngineConfig

    if max_num_seqs is not None or config is None:
        return max_num_seqs or _NUM_SLOTS
    return EngineConfig.from_file(config, {"max_num_seqs": _NUM_SLOTS}).max_num_seqs
