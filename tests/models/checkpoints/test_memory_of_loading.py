"""What a process holds while a checkpoint is loaded: what stays, and one layer at a time besides."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedcore import Engine
from pagedcore.cli.size import size_model
from pagedcore.convert.conversion import convert
from pagedcore_kernels.cpu.features import has_fused_vectors
from support.families import config_of, tiny_model
from support.gguf_files import Tensor, metadata_of, name_in_file, write_gguf
from support.quantized_checkpoints import change_config, write_checkpoint

SIZES: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12,
                         "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 4096}
SMALL: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 64,
                         "num_attention_heads": 4, "num_key_value_heads": 2}
ITEMS = {"BF16": 2, "F8_E4M3": 1, "I32": 4, "U8": 1, "F32": 4}
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A kind of files, how they are loaded, and what a number of a linear layer or an expert takes then."""

    kind: str
    per_number: float
    family: str = "llama"
    quantization: str = "none"


#: By docs/quantization.md; scales for groups of 128 are float32, and so are their zero points.
CASES = {
    "w8a8": Case("numbers", 1.0, quantization="w8a8"), "w4a16": Case("numbers", 0.54, quantization="w4a16"),
    "w8a16, other modules": Case("numbers", 1.0, "helium", "w8a16"),
    "w8a8, experts": Case("numbers", 1.0, "qwen2_moe", "w8a8"), "fp8": Case("fp8", 2.0),
    "fp8 to w8a16": Case("fp8", 1.0, quantization="w8a16"), "gptq": Case("gptq", 0.57),
    "mxfp4": Case("mxfp4", 0.63, "gpt_oss"), "gguf": Case("gguf", 0.75),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": False,
             "checkpoint_format": "gptq_v2"},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": []},
}


def in_files(kind: str, name: str, shape: tuple[int, ...]) -> Shapes:
    """What files of a kind have for a tensor of a linear layer or of experts."""
    layer = name.rpartition(".")[0]
    if kind == "mxfp4" and ".experts." in name:
        count, inputs, outputs = shape
        return {f"{name}_blocks": ("U8", (count, outputs, inputs // 32, 16)),
                f"{name}_scales": ("U8", (count, outputs, inputs // 32))}
    if kind == "fp8":
        grid = tuple(-(-size // 128) for size in shape)
        return {name: ("F8_E4M3", shape), f"{layer}.weight_scale_inv": ("F32", grid)}
    if kind == "gptq":
        outputs, inputs = shape
        groups = inputs // 128
        return {f"{layer}.qweight": ("I32", (inputs // 8, outputs)), f"{layer}.scales": ("BF16", (groups, outputs)),
                f"{layer}.qzeros": ("I32", (groups, outputs // 8))}
    return {name: ("BF16", shape)}


def write(directory: Path, case: Case, sizes: Mapping[str, Any]) -> tuple[Path, int, int]:
    """Write a model of zeros, whose file has holes; return its path, numbers in layers and experts, and other bytes."""
    from transformers import AutoModelForCausalLM

    more = {"moe_intermediate_size": 704, "num_experts": 16} if case.family == "qwen2_moe" else {}
    more = {"num_local_experts": 16, "intermediate_size": 1408} if case.family == "gpt_oss" else more
    if sizes is SMALL:
        more = {name: min(value, 128) for name, value in more.items()}
    head = {"head_dim": sizes["hidden_size"] // sizes["num_attention_heads"]}
    config = config_of(case.family, **{**sizes, **head, **more, "tie_word_embeddings": False})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures, config.dtype = [type(model).__name__], "bfloat16"
    config.save_pretrained(directory)
    layers = {f"{name}.weight" for name, one in model.named_modules() if type(one) is torch.nn.Linear}
    numbers, others, shapes = 0, 0, {}
    for name, tensor in model.state_dict().items():
        is_layer = (name in layers or ".experts." in name) and not name.endswith("bias")
        is_stored = is_layer and name != "lm_head.weight" and (".experts." in name or case.kind != "mxfp4")
        # Why four: norms and biases may be computed in float32, and an embedding may be there twice.
        numbers, others = numbers + is_stored * tensor.numel(), others + (not is_stored) * 4 * tensor.numel()
        shapes |= in_files(case.kind, name, tuple(tensor.shape)) if is_stored else {name: ("BF16", tuple(tensor.shape))}
    if case.kind == "gguf":
        tensors = {name_in_file(name): Tensor("f32" if tensor.ndim == 1 else "q4_k", tuple(tensor.shape), b"")
                   for name, tensor in model.state_dict().items()}
        write_gguf(directory / "model.gguf", metadata_of(config), tensors)
        return directory / "model.gguf", numbers, others
    write_zeros(directory / "model.safetensors", shapes)
    if case.kind in CONFIGS:
        change_config(directory, quantization_config=CONFIGS[case.kind])
    return directory, numbers, others


def write_zeros(path: Path, shapes: Shapes) -> None:
    """Write a file of safetensors that has no content, which reads as zeros."""
    header, end = {}, 0
    for name, (kind, shape) in shapes.items():
        begin, end = end, end + math.prod(shape) * ITEMS[kind]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    described = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(described)) + described)
    os.truncate(path, 8 + len(described) + end)


CHILD = """
import gc, sys
from pagedcore import Engine
settings = {"num_kv_blocks": 8, "num_threads": 1, "dtype": "bfloat16", "quantization": sys.argv[3]}
Engine.from_pretrained(sys.argv[1], **settings).close()
gc.collect()
print("compiled", flush=True)
sys.stdin.readline()
engine = Engine.from_pretrained(sys.argv[2], **settings)
print("loaded", flush=True)
sys.stdin.readline()
"""


def private_bytes(pid: int) -> int:
    """What a process holds that is no page of a file."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


def growth_of_a_process(small: Path, large: Path, quantization: str) -> tuple[int, int]:
    """The most, and the bytes that are left, of private memory that loading a model takes in a process that has
    compiled what the kind needs. Looked at from here a few hundred times a second, as the process may not listen."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(small), str(large), quantization], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "compiled\n"
        before = most = private_bytes(process.pid)
        is_loaded = threading.Event()
        reader = threading.Thread(target=lambda: (process.stdout.readline(), is_loaded.set()))
        process.stdin.write("\n")
        process.stdin.flush()
        reader.start()
        while not is_loaded.wait(0.003):
            most = max(most, private_bytes(process.pid))
        left = private_bytes(process.pid)
        process.stdin.write("\n")
    assert process.returncode == 0
    return most - before, left - before


@pytest.mark.slow
@pytest.mark.skipif(not has_fused_vectors(), reason="no such vectors")
@pytest.mark.parametrize("name", CASES)
def test_loading_takes_what_stays_and_a_layer(name: str, tmp_path: Path) -> None:
    """Files are read a layer at a time: at no moment are there more private bytes than the packed weights, a tenth of
    them, and 64 MiB. A limit by RLIMIT_DATA could not show it: torch maps files privately and writable,
    which that counts as if they were copied."""
    case = CASES[name]
    small, large = tmp_path / "small", tmp_path / "large"
    small.mkdir()
    large.mkdir()
    warm, _, _ = write(small, case, SMALL)
    source, numbers, others = write(large, case, SIZES)
    most, left = growth_of_a_process(warm, source, case.quantization)
    packed = numbers * case.per_number + others
    assert left < 1.1 * packed + 48 * MIB
    assert most < 1.1 * packed + 64 * MIB
    if case.quantization != "none" and case.kind == "numbers":
        assert most < 0.8 * (source / "model.safetensors").stat().st_size


def test_a_file_that_cannot_be_mapped_is_lack_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every door says so, by Python's own error and without a path: under a limit torch cannot map what it may read."""
    tiny_model("llama").save_pretrained(tmp_path / "plain")
    write_checkpoint(tmp_path / "gptq", "gptq")

    def refuse(path: Any, **_: Any) -> Any:
        raise RuntimeError(f"unable to mmap 5 bytes from file <{path}>: Cannot allocate memory (12)")

    for module in ("models.checkpoints.quick_start", "models.families.supported_models"):
        monkeypatch.setattr(f"pagedcore.{module}.safe_open", refuse)
    monkeypatch.setattr("safetensors.safe_open", refuse)
    for name, door in (
        ("plain", Engine.from_pretrained), ("gptq", Engine.from_pretrained), ("gptq", size_model),
        ("plain", lambda path: convert(str(path), tmp_path / "out", quantization="w8a8")),
    ):
        with pytest.raises(MemoryError, match="Cannot allocate memory") as caught:
            door(tmp_path / name)
        assert str(tmp_path) not in str(caught.value)
