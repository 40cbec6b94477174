"""Models in several GGUF files: read as one, and refused when a part is missing or is another's."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedcore.errors import InvalidConfig
from pagedcore.models.checkpoints.gguf_file import GGUFFile
from pagedcore.models.loading import model_source
from pagedcore_kernels.cpu.matmul.packed_grouped import form_of_grouped_product
from support.gguf_files import Tensor, floats, write_gguf, write_model
from support.scores import scores_of

COUNT = 3


def name_of(part: int) -> str:
    """The name that a part has, counted from 0."""
    return f"model-{part + 1:05d}-of-{COUNT:05d}.gguf"


def write_parts(directory: Path, **changes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Write three files as llama-gguf-split does, with other metadata in some; return their tensors."""
    tensors = {f"t{number}": floats("f32", np.full((2, 4), number)) for number in range(7)}
    shares = (list(tensors)[:3], list(tensors)[3:5], list(tensors)[5:])
    for part, names in enumerate(shares):
        own = {"general.architecture": "llama", "a": 5} if part == 0 else {}
        said = {"split.no": part, "split.count": COUNT, "split.tensors.count": len(tensors)}
        metadata = {**own, **said, **changes.get(f"part_{part}", {})}
        write_gguf(directory / name_of(part), metadata, {name: tensors[name] for name in names})
    return tensors


def test_parts_are_one_model(tmp_path: Path) -> None:
    """Every tensor is found in its file, metadata are the first one's, and the directory stands for the first part."""
    tensors = write_parts(tmp_path)
    assert model_source(tmp_path) == str(tmp_path / name_of(0))
    file = GGUFFile(model_source(tmp_path))
    assert file.metadata["a"] == 5
    assert {name: file.rows(name).numpy().tobytes() for name in file.tensors} == {
        name: tensor.content for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", ["mmproj-F16.gguf", "mmproj-model-f16.gguf", "gemma-3-4b-it-mmproj-f16.gguf",
                                  "Qwen2.5-VL.mmproj-Q8_0.gguf"])
def test_a_projector_beside_a_model_is_left_out(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A directory as people download it stands for its language model, and one line says so; alone it is what it is."""
    write_parts(tmp_path)
    (tmp_path / name).write_bytes(b"GGUF")
    with caplog.at_level("INFO", "pagedcore"):
        assert model_source(tmp_path) == str(tmp_path / name_of(0))
    assert ["mmproj" in message for message in caplog.messages] == [True]
    (tmp_path / "alone").mkdir()
    shutil.copy(tmp_path / name, tmp_path / "alone" / name)
    assert model_source(tmp_path / "alone") == str(tmp_path / "alone" / name)
    (tmp_path / "my-mmprojector.gguf").write_bytes(b"GGUF")
    with pytest.raises(InvalidConfig, match="2 GGUF files"):
        model_source(tmp_path)


@pytest.mark.skipif(form_of_grouped_product(torch.float32) is None, reason="no such vectors")
def test_a_model_in_parts_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every log-probability of a directory with two parts is that of the one file, to the last bit."""
    written: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr("support.gguf_files.write_gguf", lambda path, *contents: written.extend(contents))
        write_model(tmp_path, num_hidden_layers=1)
    metadata, tensors = written
    write_gguf(tmp_path / "whole.gguf", metadata, tensors)
    (tmp_path / "parts").mkdir()
    for part, names in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        said = {**(metadata if part == 0 else {}), "split.no": part, "split.count": 2}
        share = {name: tensors[name] for name in names}
        write_gguf(tmp_path / "parts" / f"m-{part + 1:05d}-of-00002.gguf", said, share)
    wanted, actual = (scores_of(tmp_path / name) for name in ("whole.gguf", "parts"))
    assert np.array_equal(actual, wanted)


def test_two_models_in_parts_are_two(tmp_path: Path) -> None:
    """A directory with the parts of two is no name of one; parts without a first one are not left out in silence."""
    write_parts(tmp_path)
    shutil.copy(tmp_path / name_of(0), tmp_path / "other.gguf")
    with pytest.raises(InvalidConfig, match="has 2 GGUF files"):
        model_source(tmp_path)
    (tmp_path / "other.gguf").unlink()
    (tmp_path / name_of(0)).unlink()
    with pytest.raises(InvalidConfig, match="has 2 GGUF files"):
        model_source(tmp_path)


@pytest.mark.parametrize(("changes", "message"), [
    ({"part_1": {"split.no": 2}}, r"split.no and split.count of part 2 is \(2, 3\), allowed is \(1, 3\)"),
    ({"part_2": {"split.count": 4}}, r"split.count of part 3 is \(2, 4\)"),
    ({"part_2": {"split.count": None}}, r"split.count of part 3 is \(2, None\)"),
    ({"part_0": {"split.tensors.count": 8}}, "split.tensors.count is 8, allowed is 7, which all parts have"),
    ({"part_0": {"split.count": 4}}, "one of 4 parts.*ends in -00001-of-00004.gguf"),
    ({"part_0": {"split.count": 10**9}}, "split.count is 1000000000, allowed is at most 1024"),
    ({"part_0": {"split.count": "3"}}, "split.count is '3'"), ({"part_0": {"split.no": 1}}, "Name the first one"),
])  # fmt: skip
def test_parts_that_are_not_of_one_model_are_refused(
    changes: dict[str, Mapping[str, Any]], message: str, tmp_path: Path
) -> None:
    """Each part says which it is, and of how many."""
    write_parts(tmp_path, **changes)
    with pytest.raises(InvalidConfig, match=message):
        GGUFFile(tmp_path / name_of(0))


def test_a_part_that_is_missing_or_named_is_said(tmp_path: Path) -> None:
    """The error has the name of the file, and no path; the second part is no model."""
    write_parts(tmp_path)
    with pytest.raises(InvalidConfig, match=r"one of 3 parts.*Name the first one"):
        GGUFFile(tmp_path / name_of(1))
    shutil.copy(tmp_path / name_of(0), tmp_path / name_of(1))
    with pytest.raises(InvalidConfig, match=r"of part 2 is \(0, 3\)"):
        GGUFFile(tmp_path / name_of(0))
    (tmp_path / name_of(2)).unlink()
    (tmp_path / name_of(1)).unlink()
    with pytest.raises(InvalidConfig, match=name_of(1)) as error:
        GGUFFile(tmp_path / name_of(0))
    assert str(tmp_path) not in str(error.value)
