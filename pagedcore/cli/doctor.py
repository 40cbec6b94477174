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
from pagedcore.cli.common import console, silence_transformers
from pagedcore.config.memory_budget import format_memory
from pagedcore.config.schemes import SCHEMES
from pagedcore.errors import InvalidConfig, ModelNotSupported, PagedcoreError

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
    verify: Annotated[bool, typer.Option(
        "--verify", help="Read all packed weights of the model and compare their SHA-256."
    )] = False,
    speculative_model: Annotated[
        str | None, typer.Option(help="A smaller model: whether it has the tokens to guess for the model.")
    ] = None,
) -> None:
    """Report the machine, the versions, the plugins and the choices of "auto", or how a model would be computed."""
    if model is not None:
        verified = verify_packed(model) if verify else {}
        guesses = whether_it_guesses(speculative_model, model) if speculative_model is not None else {}
        console().print(_facts(model, diagnosis(model) | verified | guesses))
        return
    if speculative_model is not None:
        raise InvalidConfig("speculative_model: there is no model that it would guess for. Name one.")
    if verify:
        raise InvalidConfig("verify: there is no model to verify. Name one that has packed weights.")
    from pagedcore.cli.plugins import records_table
    from pagedcore.execution.machine import this_machine
    from pagedcore.plugins.manager import create_plugin_manager

    machine, out = this_machine(), console()
    out.print(_facts("machine", machine_facts(machine)))
    out.print(_facts("versions", versions()))
    out.print(_facts('"auto" chooses', choices(machine)))
    out.print(records_table(create_plugin_manager(), title="plugins"))


def diagnosis(model: str) -> dict[str, str]:
    """Return how ``model`` would be loaded and computed, what it takes and what it refuses, or why it cannot run."""
    from pagedcore.models.loading import model_source

    silence_transformers()  # Why: remarks about a configuration would stand between the facts
    from pagedcore.models.diagnosis import diagnose

    source = model_source(model)
    try:
        facts = {"runs here": "yes", **diagnose(source), "memory": _memory_of(source)}
    except ModelNotSupported as error:
        return {"runs here": f"no. {error}"}
    refused = [] if facts["quantisation"] == "none" else ["quantization=, as the files are quantised"]
    return facts | _facts_of_chats(source, refused)


def verify_packed(model: str) -> dict[str, str]:
    """Return that a model's packed weights are those that were written.

    Raises:
        InvalidConfig: they are damaged, or there are none.
    """
    from pagedcore.models.checkpoints.packed_model import packed_file
    from pagedcore.models.loading import model_source

    if (packed := packed_file(model_source(model))) is None:
        raise InvalidConfig("verify: the model has no packed weights. Write them with pagedcore pack.")
    packed.verify()
    return {"packed weights": "undamaged: their SHA-256 is the one that was written with them"}


def whether_it_guesses(small: str, model: str) -> dict[str, str]:
    """Say whether a smaller model has the same tokens as a model, and what it takes."""
    from pagedcore.cli.size import size_model
    from pagedcore.config.engine_config import EngineConfig
    from pagedcore.models.loading import load_tokenizer, model_source
    from pagedcore.tokenizer.same_vocabulary import different_token, lists_tokens

    sources = model_source(small, "speculative_model"), model_source(model)
    one, other = (load_tokenizer(source, EngineConfig()) for source in sources)
    taken = format_memory(size_model(sources[0], concurrency=1).weight_bytes)
    if not (lists_tokens(one) and lists_tokens(other)):
        said = f"weights {taken}; tokens cannot be compared, so both need the same number of them"
    elif (token_id := different_token(one, other)) is None:
        said = f"weights {taken}; its tokens are the model's"
    else:
        said = f"refused: its token {token_id} is another one than the model's"
    return {"speculative_model": said}


def _memory_of(source: str) -> str:
    """Say what weights and KV take, and what is free."""
    from pagedcore.cli.size import size_model

    report = size_model(source, concurrency=1)
    kv, of_token = format_memory(report.kv_bytes), format_memory(report.bytes_per_token)
    return (f"weights {format_memory(report.weight_bytes)}, KV of a token {of_token}, of a sequence of "
            f"{report.context:,} tokens {kv}; {format_memory(report.memory)} are free here")


def _facts_of_chats(source: str, refused: list[str]) -> dict[str, str]:
    """Return the formats of tool calls and of reasoning by the chat template, and with ``refused`` what is refused."""
    from pagedcore.config.engine_config import EngineConfig
    from pagedcore.engine.builder import recognised_format
    from pagedcore.models.loading import load_tokenizer
    from pagedcore.plugins.manager import create_plugin_manager
    from pagedcore.protocols import RendersTools

    try:
        tokenizer = load_tokenizer(source, EngineConfig())
    except InvalidConfig as error:
        return {"chats": f"unknown. {error}", "refused": "; ".join(refused) or "nothing more is known"}
    registry, template = create_plugin_manager().registry, ""
    if isinstance(tokenizer, RendersTools):
        template = tokenizer.chat_template
    calls = recognised_format(registry.tool_parsers, template) if template else None
    reasoning = recognised_format(registry.reasoning_parsers, template) if template else None
    if tokenizer is None:
        refused = ["text and chats, as there is no tokenizer", *refused]
    elif not template:
        refused = ["chats, as there is no chat template", *refused]
    elif not (isinstance(tokenizer, RendersTools) and tokenizer.knows_tools):
        refused = ["tools, as the chat template does not know them", *refused]
    return {
        "tool calls": calls or "in no format that is known; they stay text", "reasoning": reasoning or "none is known",
        "refused": "; ".join(refused) or "nothing that the engine takes of other models",
    }


def machine_facts(machine: Machine) -> dict[str, str]:
    """Describe processor, memory, GPUs, whether an engine can compute on one, and whether kernels can be built."""
    from pagedcore.execution.devices import why_no_cuda
    from pagedcore_kernels.cpu.features import has_fused_vectors
    from pagedcore_kernels.cpu.matmul.packed_grouped import describe_byte_groups
    from pagedcore_kernels.cpu.matmul.packed_int8 import describe_int8_products
    from pagedcore_kernels.cuda.build.toolchain import EXTRA, missing_compiler_parts
    from pagedcore_kernels.cuda.build.wheel import installed_kernels

    missing = ", ".join(missing_compiler_parts())
    return {
        "processor": machine.cpu_name,
        "usable cores": str(machine.num_cores),
        "instruction sets": " ".join(machine.instruction_sets) or "none that matter",
        "number formats": ", ".join(machine.dtypes),
        "quantization": ", ".join(SCHEMES) if has_fused_vectors() else "needs an x86 processor with AVX2",
        "int8 products": describe_int8_products(),
        "w4a8 products": describe_byte_groups(),
        "memory": f"{machine.memory_bytes / 2**30:.1f} GiB",
        "GPUs": _gpus() or "none found",
        'device="cuda"': why_no_cuda() or _driver_fault() or "available; tested on an H200 alone",
        "CUDA kernels": "compiled ahead, in an installed wheel" if installed_kernels()
                        else f"cannot be built: {missing} not found; install pagedcore[{EXTRA}]" if missing
                        else "can be built here",
    }


def _driver_fault() -> str | None:
    """Say why this GPU's driver runs no kernel that is compiled here."""
    from pagedcore_kernels.cuda.driver import why_driver_too_old

    try:
        return why_driver_too_old()
    except PagedcoreError as error:
        return str(error)


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

    config = EngineConfig()
    shown = ("scheduling_policy", "max_num_seqs", "max_num_batched_tokens", "speculation")
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
