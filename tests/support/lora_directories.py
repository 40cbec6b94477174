"""Writes adapters as PEFT saves them, and merges them into a model's own weights in float64."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

Matrices = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""By the name of a layer: lora_A [rank, in] and lora_B [out, rank]."""


def linear_sizes(model: Any) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of the linear layers of a model but the output layer, by name."""
    head = model.get_output_embeddings()
    found = {}
    for name, module in model.named_modules():
        if module is not head and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"):
            outputs, inputs = module.weight.shape if isinstance(module, nn.Linear) else module.weight.shape[::-1]
            found[name] = inputs, outputs
    return found


def random_matrices(
    sizes: Mapping[str, tuple[int, int]], rank: int, seed: int, dtype: torch.dtype = torch.float32,
    ranks: Mapping[str, int] | None = None,
) -> Matrices:
    """Return matrices that change every output by about as much as it is."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, (inputs, outputs) in sizes.items():
        own = next((one for end, one in (ranks or {}).items() if name.endswith(end)), rank)
        first = torch.randn(own, inputs, generator=generator) * inputs**-0.5
        second = torch.randn(outputs, own, generator=generator) * own**-0.5
        found[name] = first.to(dtype), second.to(dtype)
    return found


def write_adapter(directory: Path, matrices: Matrices, rank: int = 8, **settings: Any) -> Path:
    """Write the two files of an adapter."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    targets = sorted({name.split(".")[-1] for name in matrices})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none",
              "target_modules": targets, **settings}  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))
    tensors = {f"base_model.model.{name}.lora_{kind}.weight": one.contiguous()
               for name, both in matrices.items() for kind, one in zip("AB", both, strict=True)}
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def merged(model: Any, matrices: Matrices, config: Mapping[str, Any]) -> Any:
    """Add an adapter to the model's weights in place, computed in float64; return the model."""
    modules = dict(model.named_modules())
    for name, (first, second) in matrices.items():
        alpha = next((one for key, one in config.get("alpha_pattern", {}).items() if re.search(rf"{key}$", name)),
                     config["lora_alpha"])  # fmt: skip
        scale = alpha / (math.sqrt(len(first)) if config.get("use_rslora") else len(first))
        weight = modules[name].weight
        update = scale * second.double() @ first.double()
        update = update if isinstance(modules[name], nn.Linear) else update.T
        with torch.no_grad():
            weight.copy_(weight.double() + update)
    return model
