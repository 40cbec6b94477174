"""``pagedcore pack``: a model's weights as this machine's CPU computes with them, in a file that starts map."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagedcore.cli.common import DtypeOption, console, error_console


def pack(
    model: Annotated[str, typer.Argument(help='A model directory, a GGUF file, or "demo" with --out.')],
    out: Annotated[Path | None, typer.Option(
        help="Directory to write, which is not there yet, for a model without its other weights; by default packed "
        "weights lie beside these."
    )] = None,
    dtype: DtypeOption = None,
) -> None:
    """Write a model's packed weights, which engines on processors like this one map at once and share."""
    path = write_with_progress(model, out, dtype)
    console().print(f"{path}: {path.stat().st_size:,} bytes")


def write_with_progress(model: str, out: Path | None, dtype: str | None) -> Path:
    """Pack, arguments as of the command, and show how far it is; return the file."""
    from rich.progress import Progress
    from transformers.utils import logging

    from pagedcore.convert.packing import pack as write_packed
    from pagedcore.plugins.manager import create_plugin_manager

    logging.disable_progress_bar()
    registry = create_plugin_manager().registry
    with Progress(console=error_console(), transient=True) as progress:
        task = progress.add_task("packing", total=None)
        return write_packed(
            model, out, registry.load, dtype=dtype or "auto",
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
