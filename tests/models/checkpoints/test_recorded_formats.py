"""Layers that the formats' own libraries packed and unpacked, recorded: compressed-tensors 0.20.0, AutoGPTQ, AutoAWQ,
bitsandbytes 0.50.2.

Scales are float32 where the library allows, so that what it unpacked is exact.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pagedcore.models.checkpoints.quantized import stored_format
from pagedcore.models.checkpoints.tensor_files import TensorFiles
from pagedcore_kernels.cpu.matmul.packed_int8 import form_of_int8_product
from support.quantized_checkpoints import numbers_of

RECORDED: Final = json.loads(Path(__file__).with_name("recorded_formats.json").read_text())


def tensor_of(dtype: str, shape: list[int], octets: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(octets), dtype=getattr(torch, dtype)).view(shape)


@pytest.mark.skipif(form_of_int8_product(16) is None, reason="no such vectors")
@pytest.mark.parametrize("kind", RECORDED)
def test_a_layer_is_what_its_library_unpacks(kind: str, tmp_path: Path) -> None:
    """Every number of a layer is the library's, to the last bit, under the configuration that it wrote.

    Of int8 bitsandbytes multiplies by a rounded 127th, and is one rounding away.
    """
    recorded: dict[str, Any] = RECORDED[kind]
    tensors = {f"layer.{name}": tensor_of(*values) for name, values in recorded["tensors"].items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": recorded["config"]}))
    stored = stored_format(str(tmp_path))
    assert stored is not None
    weight = stored.weight(TensorFiles(tmp_path), "layer", (32, 32), torch.float32)
    assert weight is not None
    numbers = numbers_of(weight.read())
    if kind == "bnb-int8":
        assert np.allclose(numbers[0], recorded["first_row"], rtol=2**-22, atol=0)
        return
    assert numbers[0].tolist() == recorded["first_row"]
    assert hashlib.sha256((numbers + 0.0).numpy().tobytes()).hexdigest() == recorded["sha256"]
    if stored.scheme != "w8a8":
        assert np.allclose(weight.product(None)(torch.eye(32)), numbers.T, atol=1e-7)
