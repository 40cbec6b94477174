"""``pagedcore kernels``: compile the CUDA kernels ahead of time, on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagedcore.cli.common import console, error_console
from pagedcore.errors import InvalidConfig

app = typer.Typer(help="Compile the kernels for GPUs ahead of time.", no_args_is_help=True)


@app.command()
def build(
    arch: Annotated[list[str], typer.Option(help="Architecture, such as sm_90; may be given several times.")],
    out: Annotated[Path, typer.Option(help="Directory for the compiled kernels.")] = Path("pagedcore-kernels"),
    only: Annotated[
        list[str] | None, typer.Option(help="Only kernels whose name starts so, such as decode-bf16-bf16-128.")
    ] = None,
) -> None:
    """Write a directory of compiled kernels that a machine with a GPU and without a compiler can run.

    Beside them it writes RESOURCES.md: the registers and memory that each of them needs.
    """
    from pagedcore_kernels.cuda.build.compiler import parse_arch
    from pagedcore_kernels.cuda.build.images import ImageStore
    from pagedcore_kernels.cuda.build.library import build_image
    from pagedcore_kernels.cuda.build.resources import RESOURCES_FILE, resource_table
    from pagedcore_kernels.cuda.build.variants import shipped_names

    starts = tuple(only or [""])
    wanted = [(name, each) for each in arch for name in shipped_names(parse_arch(each)) if name.startswith(starts)]
    if not wanted:
        raise InvalidConfig(f"--only: got {', '.join(only or [])}, allowed is how the name of a kernel starts.")
    store, images = ImageStore(out), []
    with error_console().status("compiling ...") as status:
        for name, each in wanted:
            status.update(f"compiling {name} for {each} ...")
            image = store.read(name, each) or build_image(name, each)
            images.append(image)
            console().print(f"{store.write(image).name}  {image.registers} registers", soft_wrap=True)
    (out / RESOURCES_FILE).write_text(resource_table(images), encoding="utf-8")
    console().print(f"{len(wanted)} kernels in {out}")
