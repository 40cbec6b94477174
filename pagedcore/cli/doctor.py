"""``pagedcore doctor``: what this machine can do, what is installed, what "auto" would choose, and how a model runs."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.table import Table

from pagedcore import __version__
from pagedcore.cli.common import console
from pagedcore.config.schemes import SCHEMES
from pagedcore.errors import ModelNotSupported

if TYPE_CHECKING:
    from pagedcore.execution.machine import Machine

_PACKAGES: Final = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "numba", "pluggy")


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            help='A model directory, a GGUF file, a hub id, or "demo", to ask about; no weights are read.'
        ),
    ] = None,
) -> None:
    """Report the machine, the versions, the plugins and the choices of "auto", or how a model would be computed."""
    if model is not None:
        console().print(_facts(model, diagnosis(model)))
        return
    from pagedcore.cli.plugins import records_table
    from pagedcore.execution.machine import this_machine
    from pagedcore.plugins.manager import create_plugin_manager

    machine, out = this_machine(), console()
    out.print(_facts("machine", machine_facts(machine)))
    out.print(_facts("versions", versions()))
    out.print(_facts('"auto" chooses', choices(machine)))
    out.print(records_table(create_plugin_manager(), title="plugins"))


def diagnosis(model: str) -> dict[str, str]:
    """Return how ``model`` would be loaded and computed, or why it cannot be."""
    from transformers.utils import logging

    from pagedcore.models.loading import model_source

    logging.set_verbosity_error()  # Why: remarks about a configuration would stand between the facts
    from pagedcore.models.diagnosis import diagnose

    try:
        return {"runs here": "yes", **diagnose(model_source(model))}
    except ModelNotSupported as error:
        return {"runs here": f"no. {error}"}


def machine_facts(machine: Machine) -> dict[str, str]:
    """Describe processor, memory, GPUs, whether an engine can compute on one, and whether kernels can be built."""
    from pagedcore.execution.devices import why_no_cuda
    from pagedcore_kernels.cpu.features import has_fused_vectors
    from pagedcore_kernels.cpu.matmul.packed_int8 import describe_int8_products
    from pagedcore_kernels.cuda.build.toolchain import EXTRA, missing_compiler_parts

    missing = ", ".join(missing_compiler_parts())
    return {
        "processor": machine.cpu_name,
        "usable cores": str(machine.num_cores),
        "instruction sets": " ".join(machine.instruction_sets) or "none that matter",
        "number formats": ", ".join(machine.dtypes),
        "quantization": ", ".join(SCHEMES) if has_fused_vectors() else "needs an x86 processor with AVX2",
        "int8 products": describe_int8_products(),
        "memory": f"{machine.memory_bytes / 2**30:.1f} GiB",
        "GPUs": _gpus() or "none found",
        'device="cuda"': why_no_cuda() or "available; tested on an H200 alone",
        "CUDA kernels": f"cannot be built: {missing} not found; install pagedcore[{EXTRA}]" if missing
                        else "can be built here",
    }


def versions() -> dict[str, str]:
    """Return the installed versions of what matters here; nothing is imported for it."""
    found = {"pagedcore": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def choices(machine: Machine) -> dict[str, str]:
    """Return what the default configuration chooses on this machine."""
    from pagedcore import EngineConfig
    from pagedcore.models.loading import DEFAULT_ATTENTION

    config, shown = EngineConfig(), ("scheduling_policy", "max_num_seqs", "max_num_batched_tokens")
    return {
        "device": "cpu",
        "dtype": machine.default_dtype,
        "attention_backend": DEFAULT_ATTENTION,
        **{name: str(getattr(config, name)) for name in shown},
    }


def _gpus() -> str:
    """Ask the driver's own tool, so that no library starts to use a GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "nvidia-smi does not answer"
    gpus = "; ".join(line.strip() for line in done.stdout.splitlines() if line.strip())
    return f'{gpus} (used with device="cuda")' if done.returncode == 0 and gpus else ""


def _facts(title: str, facts: dict[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in facts.items():
        table.add_row(name, value)
    return table
