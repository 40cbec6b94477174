"""``pagedcore convert``: a model's weights quantised once, in a directory of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagedcore.cli.common import DtypeOption, console, error_console


def convert(
    model: Annotated[str, typer.Argument(help='A model directory, a GGUF file, or "demo".')],
    quantization: Annotated[str, typer.Option(help="w8a8, w8a16, w4a16 or auto-int8; see the documentation.")],
    out: Annotated[Path, typer.Option(help="Directory to write, which is not there yet.")],
    dtype: DtypeOption = None,
    calibration: Annotated[Path | None, typer.Option(
        help="Prompts that stand for the model's use, one a line, text or .jsonl: w8a8 loses less then."
    )] = None,
) -> None:
    """Write a model with quantised weights, which loads like any other and computes the same as with --quantization.

    With --calibration, outliers of activations are moved into weights first, as far as the model allows.
    """
    from rich.progress import Progress
    from transformers.utils import logging

    from pagedcore.models.model_path import gguf_in, is_gguf
    from pagedcore.models.quantization.convert import convert as write_converted
    from pagedcore.models.quantization.gguf import GGUF

    logging.disable_progress_bar()
    if model != "demo" and is_gguf(source := gguf_in(model)) and GGUF(source).scheme != "none":
        error_console().print("the file's weights are quantised already: they are rounded a second time")
    with Progress(console=error_console(), transient=True) as progress:
        task = progress.add_task("converting", total=None)
        unsmoothed = write_converted(
            model, out, quantization=quantization, dtype=dtype or "auto", calibration=calibration,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    console().print(f"{out}: {quantization}, {sum(path.stat().st_size for path in out.iterdir()):,} bytes")
    if calibration is not None:
        kinds = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in unsmoothed))
        left = f"not smoothed, without a norm right before them: {kinds}"
        console().print(left if kinds else "all products smoothed")
