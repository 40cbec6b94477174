"""``pagedcore kernels``: compile kernels ahead of time, for CPUs into Numba's cache, for GPUs into files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from pagedcore._version import __version__
from pagedcore.cli.common import (
    ConfigOption,
    DtypeOption,
    KVDtypeOption,
    QuantizationOption,
    console,
    error_console,
    open_engine,
)
from pagedcore.errors import InvalidConfig

if TYPE_CHECKING:
    from pagedcore import Engine

app = typer.Typer(help="Compile kernels ahead of time.", no_args_is_help=True)


@app.command()
def build(
    arch: Annotated[list[str], typer.Option(help="Architecture, such as sm_90; may be given several times.")],
    out: Annotated[Path, typer.Option(help="Directory for the compiled kernels.")] = Path("pagedcore-kernels"),
    only: Annotated[
        list[str] | None, typer.Option(help="Only kernels whose name starts so, such as decode-bf16-bf16-128.")
    ] = None,
    wheel: Annotated[bool, typer.Option("--wheel", help="Write a wheel of them too, for pip to install.")] = False,
) -> None:
    """Write a directory of compiled CUDA kernels that a machine with a GPU and without a compiler can run.

    Beside them it writes RESOURCES.md: the registers and memory that each of them needs.
    """
    from pagedcore_kernels.cuda.build.compiler import parse_arch
    from pagedcore_kernels.cuda.build.images import ImageStore
    from pagedcore_kernels.cuda.build.library import build_image
    from pagedcore_kernels.cuda.build.resources import RESOURCES_FILE, resource_table
    from pagedcore_kernels.cuda.build.variants import shipped_names
    from pagedcore_kernels.cuda.build.wheel import write_wheel

    starts = tuple(only or [""])
    wanted = [(name, each) for each in arch for name in shipped_names(parse_arch(each)) if name.startswith(starts)]
    if not wanted:
        raise InvalidConfig(f"--only: got {', '.join(only or [])}, allowed is how the name of a kernel starts.")
    store, images, files = ImageStore(out), [], []
    with error_console().status("compiling ...") as status:
        for name, each in wanted:
            status.update(f"compiling {name} for {each} ...")
            image = store.read(name, each) or build_image(name, each)
            images.append(image)
            files.append(store.write(image))
            console().print(f"{files[-1].name}  {image.registers} registers", soft_wrap=True)
    (out / RESOURCES_FILE).write_text(resource_table(images), encoding="utf-8")
    if wheel:
        console().print(write_wheel(out, __version__, files).name, soft_wrap=True)
    console().print(f"{len(wanted)} kernels in {out}")


class _Progress:
    """A line that says at each refresh which kernel is compiled and how many have been."""

    def __rich__(self) -> Text:
        from pagedcore_kernels.cpu.runtime.compiled import compiled_entries, present_kernel

        return Text(f"{len(compiled_entries())} kernels ready, {present_kernel() or 'computing'} ...")


@app.command()
def warm(
    model: Annotated[str, typer.Argument(help='A model directory, a GGUF file, a hub id, or "demo".')] = "demo",
    dtype: DtypeOption = None,
    kv_cache_dtype: KVDtypeOption = None,
    quantization: QuantizationOption = None,
    config: ConfigOption = None,
) -> None:
    """Compile all kernels that a model uses on this kind of processor, into Numba's cache.

    Give the settings that the model will run with. The cache is where NUMBA_CACHE_DIR says, else beside the code.
    """
    from pagedcore_kernels.cpu.runtime.compiled import compiled_entries

    with error_console().status(_Progress()):
        engine = open_engine(model, config, dtype=dtype, kv_cache_dtype=kv_cache_dtype, quantization=quantization)
        with engine:
            compute_in_all_ways(engine)
    entries = compiled_entries()
    num_cached = sum(entry.was_cached for entry in entries)
    found = [entry.cache_directory for entry in entries if entry.cache_directory is not None]
    where = os.path.commonpath(found) if found else "nowhere: set NUMBA_CACHE_DIR"
    num_compiled = len(entries) - num_cached
    console().print(f"{num_compiled} kernels compiled, {num_cached} were cached, in {where}", soft_wrap=True)


def compute_in_all_ways(engine: Engine) -> None:
    """Complete a few prompts of token 0 so that the engine meets every kernel that a request may ask it for.

    Greedy, sampled and with log-probabilities; alone and in company; beginnings of prompts and single tokens.
    """
    from pagedcore.sampling_params import SamplingParams

    greedy = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0)
    reported = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0, logprobs=2, prompt_logprobs=2)
    sampled = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01,
                             logprobs=2, repetition_penalty=1.1, presence_penalty=0.5, n=2)
    for way in (greedy, reported, sampled):
        engine.generate([[0, 0]], way, show_progress=False)
    engine.generate([[0] * 40, [0] * 80, [0, 0]], [greedy, reported, sampled], show_progress=False)
