"""What the commands share: the options that choose and size an engine, and the two consoles."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from pagedcore.config.schemes import SCHEMES, listed

if TYPE_CHECKING:
    from pagedcore import Engine, Request

ModelOption = Annotated[
    str, typer.Option(
        "--model", "-m", help='A model directory, a GGUF file, a hub id, or "demo", which comes with pagedcore.'
    )
]
DtypeOption = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")]
KVDtypeOption = Annotated[str | None, typer.Option(help="auto, which is that of the weights, int8 or e4m3.")]
QuantizationOption = Annotated[
    str | None, typer.Option(help=f"Weights of linear layers: none, {listed(SCHEMES)}.")
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="Settings of the engine, TOML or JSON; options given here win.")
]
SeqsOption = Annotated[int | None, typer.Option("--max-num-seqs", help="Most sequences computed in one step.")]
BlocksOption = Annotated[
    int | None, typer.Option("--blocks", help="KV blocks of the pool; few of them force preemptions.")
]
LengthOption = Annotated[int | None, typer.Option("--max-model-len", help="Longest prompt and completion, in tokens.")]
TemperatureOption = Annotated[float | None, typer.Option(help="0 is greedy; not given: the model's own, or 0.")]
TopPOption = Annotated[float | None, typer.Option(help="Sample within this share of probability.")]
TemplateOption = Annotated[
    Path | None, typer.Option("--chat-template", help="A file with a chat template, instead of the model's own.")
]
BackendOption = Annotated[
    str | None, typer.Option("--attention-backend", help="See `pagedcore plugins --table attention`.")
]


AdapterOption = Annotated[
    list[str] | None, typer.Option("--adapter", help="NAME=DIRECTORY of a LoRA adapter; repeatable.")
]


def adapters_of(given: list[str] | None) -> dict[str, str] | None:
    """Return the directories of adapters by name; ``None`` if none was given. Raises ``InvalidConfig``."""
    from pagedcore.errors import InvalidConfig

    pairs = [text.partition("=") for text in given or ()]
    if not all(name and mark and path for name, mark, path in pairs):
        raise InvalidConfig("--adapter: needed is NAME=DIRECTORY.")
    found = {name: path for name, _, path in pairs}
    if len(found) < len(pairs):
        raise InvalidConfig("--adapter: two adapters have the same name; give each one of its own.")
    return found or None


def only_adapter(adapters: Mapping[str, str] | None) -> str | None:
    """Return the name of the one adapter of a command that computes with one. Raises ``InvalidConfig`` for several."""
    from pagedcore.errors import InvalidConfig

    if adapters is not None and len(adapters) > 1:
        raise InvalidConfig(f"--adapter: got {len(adapters)}, allowed is one here.")
    return next(iter(adapters), None) if adapters is not None else None


def template_of(path: Path | None) -> str | None:
    """Return the text of a file with a chat template. Raises ``InvalidConfig`` if it cannot be read."""
    from pagedcore.config.limits import MAX_TEMPLATE_LENGTH
    from pagedcore.errors import InvalidConfig

    if path is None:
        return None
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_TEMPLATE_LENGTH + 1)
    except (OSError, UnicodeError) as error:
        raise InvalidConfig(f"--chat-template: the file cannot be read ({type(error).__name__}).") from None


def read_text(path: Path, option: str) -> str:
    """Return the text of a file, or with - of standard input. Raises ``InvalidConfig`` if it cannot be read."""
    from pagedcore.errors import InvalidConfig

    try:
        return (sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()).decode("utf-8-sig")
    except OSError as error:
        raise InvalidConfig(f"{option}: cannot be read ({type(error).__name__}).") from None
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"{option}: is no UTF-8 text, byte {error.start} for one. Convert it.") from None


def read_lines(path: Path, option: str) -> list[tuple[int, str]]:
    """Return the lines of a file that have more than blanks, with their numbers from 1. Raises as ``read_text``."""
    # Why not splitlines: a text may have a form feed, or JSON a separator of Unicode, in the middle.
    lines = enumerate(read_text(path, option).split("\n"), start=1)
    return [(number, line.removesuffix("\r")) for number, line in lines if line.strip()]


def silence_transformers() -> None:
    """Have transformers say errors alone, without importing it, which takes long and may not be needed."""
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.set_verbosity_error()
    else:
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"


def console() -> Console:
    """Return a console on standard output."""
    return Console(highlight=False)


def error_console() -> Console:
    """Return a console on standard error, for everything that is not a completion."""
    return Console(stderr=True, highlight=False)


def chosen(**options: Any) -> dict[str, Any]:
    """Return the options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def open_engine(
    model: Any, config: Path | None = None, defaults: Mapping[str, Any] | None = None, **settings: Any
) -> Engine:
    """Build an engine while saying so: with ``settings``, or where these are ``None`` with those of the file
    ``config``, or where it has none with ``defaults``.
    """
    given = chosen(**settings)
    with error_console().status(f"loading {model if isinstance(model, str) else 'the model'} ..."):
        from pagedcore import Engine, EngineConfig

        hide_bars_of(model)
        if config is not None:
            return Engine.from_pretrained(model, config=EngineConfig.from_file(config, defaults, **given))
        return Engine.from_pretrained(model, **{**(defaults or {}), **given})


def hide_bars_of(model: Any) -> None:
    """Switch off the progress bars that loading a model would show beside a status line."""
    # Why only then: the library takes half a second, and models in directories show no bar.
    if isinstance(model, str) and model != "demo" and not Path(model).is_dir():
        from transformers.utils import logging

        logging.disable_progress_bar()


def stream_completion(engine: Engine, request: Request) -> None:
    """Step until ``request`` is done, writing its text to standard output as it comes; raise its error, if any."""
    while not request.is_done:
        for delta in engine.step():
            sys.stdout.write(delta.text)
            sys.stdout.flush()
    sys.stdout.write("\n")
    if request.error is not None:
        raise request.error
