"""``pagedcore convert``: a model's weights quantised once, in a directory of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from pagedcore.cli.common import DtypeOption, console, error_console
from pagedcore.config.schemes import SCHEMES
from pagedcore.errors import InvalidConfig

_SCHEMES = "; ".join(f"{name}: {scheme.summary}" for name, scheme in SCHEMES.items())


class Packed(StrEnum):
    """Where packed weights go."""

    BESIDE = "beside"
    ONLY = "only"


def convert(
    model: Annotated[str, typer.Argument(help='A model directory, a GGUF file, or "demo".')],
    quantization: Annotated[str, typer.Option(help=_SCHEMES)],
    out: Annotated[Path, typer.Option(help="Directory to write, which is not there yet.")],
    dtype: DtypeOption = None,
    calibration: Annotated[Path | None, typer.Option(
        help="Prompts that stand for the model's use, one a line, text or .jsonl, where rows are quantised."
    )] = None,
    keep_output_layer: Annotated[bool, typer.Option(
        "--keep-output-layer", help="Leave the output layer and the embedding unquantised, as other engines need it."
    )] = False,
    packed: Annotated[Packed | None, typer.Option(
        help="Write packed weights too, as pagedcore pack does: beside the others, or these only."
    )] = None,
) -> None:
    """Write a model with quantised weights, which loads like any other and computes the same as with --quantization.

    With --calibration, w8a8 moves outliers of activations into weights first, as far as the model allows, and auto-int8
    chooses by activations of these prompts.
    """
    from rich.progress import Progress
    from transformers.utils import logging

    from pagedcore.cli.pack import write_with_progress
    from pagedcore.convert.conversion import convert as write_converted
    from pagedcore.convert.conversion import require_new

    logging.disable_progress_bar()
    if model != "demo" and _is_rounded(model):
        error_console().print("the file's weights are quantised already: they are rounded a second time")
    require_new(out)
    with _portable(out, packed) as portable:
        with Progress(console=error_console(), transient=True) as progress:
            task = progress.add_task("converting", total=None)
            unsmoothed = write_converted(
                model, portable, quantization=quantization, dtype=dtype or "auto", calibration=calibration,
                keep_output_layer=keep_output_layer,
                on_progress=lambda done, total: progress.update(task, completed=done, total=total),
            )
        if packed is not None:
            write_with_progress(str(portable), out if packed is Packed.ONLY else None, dtype)
    console().print(f"{out}: {quantization}, {sum(path.stat().st_size for path in out.iterdir()):,} bytes")
    if calibration is not None and not SCHEMES[quantization].is_chosen:
        _print_unsmoothed(unsmoothed)


def _is_rounded(model: str) -> bool:
    """Whether the weights of a model are quantised in a way that ``convert`` takes: in a GGUF file, or as FP8."""
    from pagedcore.models.checkpoints.fp8 import FP8
    from pagedcore.models.checkpoints.model_path import gguf_in, is_gguf
    from pagedcore.models.checkpoints.quantized import stored_format

    source = gguf_in(model)
    # Why: what is no file here is refused, and not looked for elsewhere.
    stored = stored_format(source) if is_gguf(source) or Path(source).is_dir() else None
    return stored is not None and (isinstance(stored, FP8) or stored.scheme != "none")


@contextmanager
def _portable(out: Path, packed: Packed | None) -> Iterator[Path]:
    """Yield the directory to convert to: ``out``, or one beside it that goes away at the end."""
    if packed is not Packed.ONLY:
        yield out
        return
    try:
        unfinished = TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent)
    except OSError as error:
        raise InvalidConfig(f"out: it cannot be written ({error.strerror}).") from error
    with unfinished as directory:
        yield Path(directory) / "portable"


def _print_unsmoothed(names: tuple[str, ...]) -> None:
    """Say what a calibration set did not smooth, and why."""
    of_experts = [name for name in names if ".experts." in name]
    kinds = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names if name not in of_experts))
    if kinds:
        console().print(f"not smoothed, without a norm right before them: {kinds}")
    if of_experts:
        console().print(f"not smoothed, as no token of the prompts chose their expert: {len(of_experts)} down_proj")
    if not names:
        console().print("all products smoothed")
