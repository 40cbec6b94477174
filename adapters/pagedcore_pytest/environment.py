"""What an answer follows from besides its prompt: the model, the kernels, the processor, versions."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from pagedcore import AsyncEngine
from pagedcore.execution.machine import this_machine
from pagedcore_kernels.cpu.matmul.packed import products_here

Environment = dict[str, Any]


def environment_of(engine: AsyncEngine) -> Environment:
    """Return the facts of an engine and its machine, as JSON has them; it waits for the step in flight."""
    stats, model = engine.stats(60.0), engine.send(lambda inner: inner.sessions.fingerprint).result()
    return {
        "model": f"{model.architecture}, configuration {model.config[:12]}, weights {model.weights[:12]}",
        "number format": stats.dtype,
        "kernels": f"{stats.attention_backend}, products {products_here()}",
        "CPU features": " ".join(this_machine().instruction_sets),
        "pagedcore": metadata_version("pagedcore"),
        "torch": metadata_version("torch"),
    }


def metadata_version(name: str) -> str:
    """Return the version of an installed distribution."""
    return metadata.version(name)
