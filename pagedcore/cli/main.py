"""The command ``pagedcore``: collects the subcommands and turns pagedcore's own errors into one line and exit code 1.

Imports no torch, so that help is instant; read ``demo.py`` for the command that shows most.
"""

from __future__ import annotations

import gc
import sys
from typing import Annotated

import typer

from pagedcore._version import __version__
from pagedcore.cli import (
    bench,
    chat,
    convert,
    demo,
    doctor,
    embed,
    generate,
    kernels,
    pack,
    plugins,
    replay,
    serve,
    simulate,
    size,
)
from pagedcore.cli.common import error_console
from pagedcore.errors import PagedcoreError

app = typer.Typer(
    name="pagedcore", help="Continuous batching inside your own Python process.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
)
COMMANDS = (
    demo.demo, generate.generate, chat.chat, embed.embed, serve.serve, size.size, convert.convert, pack.pack,
    plugins.plugins, doctor.doctor, simulate.simulate, replay.replay,
)
for command in COMMANDS:
    app.command()(command)
app.add_typer(bench.app, name="bench")
app.add_typer(kernels.app, name="kernels")


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"pagedcore {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True,
                                          help="Show the version and exit.")] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; the console script and ``python -m pagedcore`` start here."""
    try:
        app()
    except PagedcoreError as error:
        error_console().print(f"error: {error}", style="red", markup=False)
        sys.exit(1)
    finally:
        # Why: at its end Python looks for garbage among all that was imported, which takes up to a second.
        gc.freeze()
