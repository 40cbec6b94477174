"""``pagedcore size``: what a model takes, and what fits, before anything is loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from pagedcore.cli.common import DtypeOption, console

if TYPE_CHECKING:
    from pagedcore.cli.size_report import SizeReport


def size(
    model: Annotated[str, typer.Argument(help='A model directory, a hub id, or "demo"; no weights are read.')],
    context: Annotated[
        int | None, typer.Option(help="Tokens of each sequence, prompt and answer; else the most the model can.")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(help="Sequences at once; else the engine's default.")] = None,
    dtype: DtypeOption = "auto",
    memory: Annotated[
        str | None, typer.Option(help='For weights and KV, such as "2GiB"; else what is free on this machine.')
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object; sizes in bytes.")] = False,
) -> None:
    """Say how much memory a model takes for so many sequences, and what fits."""
    from transformers.utils import logging

    from pagedcore.cli.size_report import size_model

    logging.set_verbosity_error()  # Why: remarks about a configuration would stand between the figures
    report = size_model(model, context=context, concurrency=concurrency, dtype=dtype, memory=memory)
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
        return
    out = console()
    out.print(report_table(report, is_given=memory is not None))
    out.print(report.advice, soft_wrap=True)
    if report.num_sequences_that_fit:
        settings = ", ".join(f"{name}={value!r}" for name, value in report.settings.items())
        out.print(f"Engine.from_pretrained(..., {settings})", markup=False, soft_wrap=True)


def report_table(report: SizeReport, *, is_given: bool) -> Table:
    """Lay out the sum, from one token to all sequences, and what fits."""
    from pagedcore.config.memory_budget import format_memory

    plan = report.blueprint
    table = Table("what", "bytes", "how", title=f"{report.model}, {report.dtype}", title_justify="left")
    table.columns[1].justify = "right"

    def row(what: str, num_bytes: int, how: str) -> None:
        table.add_row(what, f"{num_bytes:,}", how)

    row("KV of a token", report.bytes_per_token, token_sum(report))
    row("a block", report.block_bytes, f"{report.block_size} tokens, {report.padding_bytes:,} bytes of it padding")
    row("a sequence", report.blocks_per_sequence * report.block_bytes,
        f"{report.context:,} tokens in {report.blocks_per_sequence:,} blocks")
    row("all sequences", report.kv_bytes, f"{report.concurrency:,} sequences, {report.num_blocks:,} blocks, "
        f"{format_memory(report.kv_bytes)}: what an engine allocates")
    row("without padding", report.concurrency * report.context * report.bytes_per_token,
        f"{report.concurrency:,} x {report.context:,} tokens, as the formula counts")
    row("weights, about", plan.weight_bytes,
        f"{plan.num_parameters:,} parameters, {format_memory(plan.weight_bytes)}")
    row("memory", report.memory, f"{format_memory(report.memory)} {'given' if is_given else 'free on this machine'}")
    row("room for KV", report.num_blocks_that_fit * report.block_bytes, f"{report.num_blocks_that_fit:,} blocks: "
        f"{report.num_sequences_that_fit:,} sequences of {report.context:,} tokens at once")
    return table


def token_sum(report: SizeReport) -> str:
    """Write the sum over the layers; 2 stands for K and V, where their heads have one size."""
    terms = []
    for layer, num_layers in report.layers.items():
        key, value = layer.key_head_size, layer.value_head_size
        heads = f"{num_layers} layers x {layer.num_kv_heads} KV heads"
        terms.append(f"2 x {heads} x {key}" if key == value else f"{heads} x ({key} + {value})")
    total = terms[0] if len(terms) == 1 else f"({' + '.join(terms)})"
    return f"{total} x {report.itemsize} bytes"
