"""The demo model with other weights, as a trainer would have made them."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from pagedcore.demo_model import DEMO_MODEL_DIR

Tensors = dict[str, torch.Tensor]


def changed_weights(seed: int = 0) -> Tensors:
    """Return the demo model's weights with noise."""
    generator = torch.Generator().manual_seed(seed)
    return {name: (one.float() + 0.05 * torch.randn(one.shape, generator=generator)).to(one.dtype)
            for name, one in load_file(DEMO_MODEL_DIR / "model.safetensors").items()}


def write_demo(folder: Path, weights: Tensors) -> Path:
    """Write a directory of the demo model with these weights."""
    for path in DEMO_MODEL_DIR.iterdir():
        if path.suffix == ".json":
            shutil.copy(path, folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
