"""GGUF files against llama.cpp's own Python library; run by ``make formats``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedcore.models.checkpoints.gguf import GGUF
from pagedcore.models.checkpoints.gguf_blocks import OTHER_TYPES, TYPES
from pagedcore.models.checkpoints.gguf_file import GGUFFile
from support.gguf_files import QUANTISED, Tensor, numbers_of_blocks, random_blocks, write_model

pytestmark = pytest.mark.formats


def library() -> Any:
    """The library, imported only where it is installed."""
    import gguf

    return gguf


def read(tensor: Tensor) -> torch.Tensor:
    kind = next(one for one in TYPES.values() if one.name == tensor.kind)
    rows = torch.frombuffer(bytearray(tensor.content), dtype=torch.uint8).view(tensor.shape[0], -1)
    return kind.weight(rows, "layer").numbers()


@pytest.mark.parametrize("name", QUANTISED)
def test_blocks_are_what_the_library_dequantises(name: str) -> None:
    """Every number of random blocks is the library's to the last bit."""
    kind = library().GGMLQuantizationType[name.upper()]
    for seed in range(4):
        tensor = random_blocks(np.random.default_rng(seed), name, (96, 1024))
        octets = np.frombuffer(tensor.content, np.uint8).reshape(96, -1)
        expected = library().quants.dequantize(octets, kind)
        assert np.array_equal(read(tensor).numpy(), expected)
        assert np.array_equal(numbers_of_blocks(tensor), expected)


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_what_the_library_quantises_is_near(name: str) -> None:
    """Trained numbers that the library can quantise come back within the step of the type."""
    kind = library().GGMLQuantizationType[name.upper()]
    numbers = np.random.default_rng(0).normal(0, 0.1, (64, 512)).astype(np.float32)
    tensor = Tensor(name, numbers.shape, library().quants.quantize(numbers, kind).tobytes())
    assert np.abs(read(tensor).numpy() - numbers).max() < {"8": 0.003, "5": 0.03, "4": 0.06}[name[1]]


def test_types_are_those_of_the_library() -> None:
    """Every type of the library is computed or refused by its name, with the library's sizes."""
    known = {kind.value: kind.name.lower() for kind in library().GGMLQuantizationType}
    assert known == {**{number: kind.name for number, kind in TYPES.items()}, **OTHER_TYPES}
    for number, kind in TYPES.items():
        assert (kind.size, kind.num_bytes) == library().GGML_QUANT_SIZES[number]


def test_the_library_reads_our_test_files(tmp_path: Path) -> None:
    """The files that the other tests write are GGUF to the library: the same metadata, tensors and bytes."""
    write_model(tmp_path / "model.gguf", metadata={"tokenizer.ggml.tokens": ["a", "ü"], "general.alignment": 32})
    reader, file = library().GGUFReader(tmp_path / "model.gguf"), GGUFFile(tmp_path / "model.gguf")
    assert {one.name: tuple(int(size) for size in one.shape[::-1]) for one in reader.tensors} == {
        name: entry.shape for name, entry in file.tensors.items()}
    for one in reader.tensors:
        assert one.data.tobytes() == file.rows(one.name).numpy().tobytes()
    for name, value in file.metadata.items():
        assert reader.fields[name].contents() == value


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    """A file of the library's writer has its metadata of every kind and its tensors, of blocks and of numbers."""
    writer = library().GGUFWriter(tmp_path / "model.gguf", "qwen2")
    given = {"context_length": 128, "embedding_length": 64, "block_count": 1, "feed_forward_length": 32,
             "head_count": 2, "head_count_kv": 1}
    for name, value in given.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_token_list(["a", "b"])
    writer.add_float64("own", 0.5)
    numbers = np.random.default_rng(0).normal(size=(48, 64)).astype(np.float32)
    kind = library().GGMLQuantizationType.Q8_0
    blocks = library().quants.quantize(numbers, kind)
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", numbers[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = GGUF(str(tmp_path / "model.gguf"))
    assert model.metadata["own"] == 0.5
    assert model.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
    assert (model.fields["hidden_size"], model.fields["rms_norm_eps"], model.fields["vocab_size"]) == (64, 1e-6, 48)
    assert np.array_equal(model.expect("model.norm.weight", (64,)).numpy(), numbers[0])
    stored = model.weight(model, "model.embed_tokens", (48, 64), torch.float32)
    assert stored is not None
    assert np.array_equal(stored.read().numbers().numpy(), library().quants.dequantize(blocks, kind))
