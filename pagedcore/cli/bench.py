"""``pagedcore bench throughput``: static against continuous batching on the same model and kernels."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from pagedcore.cli import common
from pagedcore.errors import InvalidConfig

_MAX_WAITING = 4096
"""All requests of a workload arrive at once, so the queue has to hold them."""

app = typer.Typer(help="Measure what batching is worth on this machine.", no_args_is_help=True)


@app.command()
def throughput(
    model: common.ModelOption = "demo",
    random_weights: Annotated[
        str | None, typer.Option(help="Instead of --model: random weights in the shape tiny or qwen05b.")
    ] = None,
    workload: Annotated[str, typer.Option(help="ragged, w1, w2 or w3.")] = "ragged",
    prompts_json: Annotated[
        Path | None, typer.Option(help="Instead of --workload: a JSON list of prompts as token ids.")
    ] = None,
    output_tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt of --prompts-json.")] = 64,
    policies: Annotated[str, typer.Option(help="Scheduling policies to compare.")] = "static,fcfs",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the slots at work in each step; needs matplotlib.")] = None,
    dtype: common.DtypeOption = None,
    kv_cache_dtype: common.KVDtypeOption = None,
    quantization: common.QuantizationOption = None,
    max_num_seqs: common.SeqsOption = None,
    blocks: common.BlocksOption = None,
    max_model_len: common.LengthOption = None,
    attention_backend: common.BackendOption = None,
    config: common.ConfigOption = None,
) -> None:
    """Run 64 ragged requests, or another workload, under each policy and compare."""
    from rich.progress import Progress

    from pagedcore.bench import report, workloads
    from pagedcore.bench.throughput import measure
    from pagedcore.execution.machine import this_machine

    workloads.require_name(workload)
    number_format = this_machine().default_dtype if dtype in (None, "auto") else dtype
    measurements = []
    for policy in policies.split(","):
        with common.open_engine(
            model if random_weights is None else workloads.random_model(random_weights, number_format), config,
            dtype=dtype, kv_cache_dtype=kv_cache_dtype, quantization=quantization, num_kv_blocks=blocks,
            max_model_len=max_model_len, max_num_seqs=max_num_seqs,
            max_num_waiting=_MAX_WAITING, attention_backend=attention_backend, scheduling_policy=policy,
        ) as engine, Progress(console=common.error_console(), transient=True) as progress:
            max_len = engine.stats().max_model_len
            chosen = (workloads.make_workload(workload, max_len) if prompts_json is None
                      else workloads.load_prompts(prompts_json, output_tokens, max_len))
            if len(chosen.prompts) > _MAX_WAITING:
                raise InvalidConfig(f"prompts: got {len(chosen.prompts)}, allowed is up to {_MAX_WAITING}.")
            task = progress.add_task(policy, total=chosen.num_output_tokens)
            measurements.append(measure(engine, chosen, policy, partial(progress.advance, task)))
            stats = engine.stats()
    common.console().print(report.as_table(chosen, measurements))
    context = {"model": random_weights or Path(model).name, "dtype": stats.dtype, "quantization": quantization,
               "attention_backend": stats.attention_backend}
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_data(chosen, measurements, **context)), encoding="utf-8")
    if plot is not None:
        report.save_plot(plot, chosen, measurements)
