"""Files of packed weights: what is written is mapped, and what is damaged or forged is refused before it is."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedcore.errors import InvalidConfig
from pagedcore.models.checkpoints.packed_file import ALIGNMENT, MAX_HEADER_BYTES, PackedFile, write_packed

TENSORS = {
    "a": torch.arange(5000, dtype=torch.int32), "b+c:panels": torch.rand(3, 4, 5).bfloat16(),
    "flag": torch.tensor([True, False]), "empty": torch.empty(0, 7), "one": torch.tensor(3.0),
}


def nothing(*_: Any) -> None:
    """In the place of what looks at a new file, or counts its tensors."""


def written(directory: Path) -> Path:
    path = directory / "model.packed"
    write_packed(path, {"word": "said"}, TENSORS, nothing, nothing)
    return path


def changed_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a header, and what vouches for it, as somebody who forges a file does."""
    content = path.read_bytes()
    length = int.from_bytes(content[16:24], "little")
    header = json.loads(content[64 : 64 + length])
    described = change(header) or json.dumps(header)
    described = described.encode().ljust(length)
    assert len(described) == length
    path.write_bytes(content[:24] + hashlib.sha256(described).digest() + content[56:64] + described
                     + content[64 + length :])


def test_what_is_written_is_mapped(tmp_path: Path) -> None:
    """Tensors come back, each at the beginning of a page, in memory that is no copy of the file and is shared."""
    packed = PackedFile(written(tmp_path))
    assert packed.header["word"] == "said"
    packed.map()
    packed.verify()
    for name, tensor in TENSORS.items():
        found = packed.tensor(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor)
        assert found.data_ptr() % ALIGNMENT == 0 or not found.numel()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    assert [line.split()[1] for line in maps if line.endswith(os.fspath(packed.path))] == ["r--s"]
    assert os.listdir(tmp_path) == ["model.packed"]


def test_a_mapped_file_is_replaced_and_never_changed(tmp_path: Path) -> None:
    """Who has mapped a file keeps it when another gets its name."""
    packed = PackedFile(path := written(tmp_path))
    packed.map()
    write_packed(path, {}, {"a": torch.zeros(9)}, nothing, nothing)
    assert torch.equal(packed.tensor("a"), TENSORS["a"])


@pytest.mark.parametrize("fails", ["check", "disk"])
def test_a_file_that_is_not_finished_leaves_the_one_before(fails: str, tmp_path: Path) -> None:
    """What the look at the new file raises is raised, as is what the disk does; nothing of the new file is left."""
    before = written(tmp_path).read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("no")

    hooks = (fail, nothing) if fails == "check" else (nothing, fail)
    with pytest.raises(OSError, match="no"):
        write_packed(tmp_path / "model.packed", {}, {"a": torch.zeros(9)}, *hooks)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


def map_whole(path: Path) -> None:
    packed = PackedFile(path)
    packed.map()
    packed.require_undamaged()


@pytest.mark.parametrize("place", [0, 20, 30, 70, -4096, -1])
def test_every_byte_is_looked_at(place: int, tmp_path: Path) -> None:
    """A byte that changes on disk, in the header or in a tensor, is a refusal at start."""
    content = bytearray((path := written(tmp_path)).read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(InvalidConfig, match="packed weights cannot be used"):
        map_whole(path)


@pytest.mark.parametrize("num_bytes", [0, 10, 64, 3000, ALIGNMENT, ALIGNMENT + 100, -ALIGNMENT])
def test_a_truncated_file_is_refused(num_bytes: int, tmp_path: Path) -> None:
    """Its size is looked at before it is mapped."""
    content = (path := written(tmp_path)).read_bytes()
    path.write_bytes(content[:num_bytes])
    with pytest.raises(InvalidConfig, match="packed weights cannot be used"):
        PackedFile(path)


def test_a_file_that_shrinks_before_it_is_mapped_is_refused(tmp_path: Path) -> None:
    """Memory behind the end of a file ends the process that reads it."""
    packed = PackedFile(path := written(tmp_path))
    os.truncate(path, path.stat().st_size - ALIGNMENT)
    with pytest.raises(InvalidConfig, match="another size"):
        packed.map()


def test_sha256_shows_what_a_checksum_may_not(tmp_path: Path) -> None:
    """Bytes that were changed together with the checksum are found by the longer look."""
    path = written(tmp_path)
    changed_header(path, lambda header: header.update(sha256=header["sha256"][::-1]))
    packed = PackedFile(path)
    packed.map()
    packed.require_undamaged()
    with pytest.raises(InvalidConfig, match="SHA-256"):
        packed.verify()


def entry(name: str, *value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["tensors"].update({name: list(value)})


@pytest.mark.parametrize("change", [
    entry("a", "I32", [5000], 1), entry("a", "I32", [5000], 2**62), entry("a", "I32", [5000], -4096),
    entry("a", "I32", [2**40, 2**40], 0), entry("a", "I32", [-1, -5000], 0), entry("a", "I32", [5000.0], 0),
    entry("a", "I32", [True], 0), entry("a", "F64", [1], 0), entry("a", ["I32"], [1], 0), entry("a", "I32", 5000, 0),
    entry("a", "I32", [5000]), entry("a", "I32", [1] * 9, 0), entry("b+c:panels", "I32", [60], 4096),
    lambda header: header.update(tensors=[]), lambda header: header.update(tensors={}),
    lambda header: header.update(tensors=None), lambda header: "[]", lambda header: '{"a": 1, "a": 2}',
    lambda header: '{"tensors": NaN}', lambda header: "[" * 4000, lambda header: "\x00",
])
def test_a_forged_header_is_refused(change: Callable[[dict[str, Any]], Any], tmp_path: Path) -> None:
    """Places outside of the file or one over the other, counts beyond all memory, formats that are none, no JSON."""
    path = written(tmp_path)
    changed_header(path, change)
    with pytest.raises(InvalidConfig, match="packed weights cannot be used"):
        PackedFile(path)


@pytest.mark.parametrize("length", [0, MAX_HEADER_BYTES + 1, 2**63])
def test_a_header_of_no_size_is_not_read(length: int, tmp_path: Path) -> None:
    """Nothing is allocated for a length that a file claims."""
    content = (path := written(tmp_path)).read_bytes()
    path.write_bytes(content[:16] + length.to_bytes(8, "little") + content[24:])
    with pytest.raises(InvalidConfig, match="header has"):
        PackedFile(path)


def test_no_other_tensor_is_there(tmp_path: Path) -> None:
    """A name that a file does not have, and a file that is not mapped, are refusals."""
    packed = PackedFile(written(tmp_path))
    with pytest.raises(InvalidConfig, match="no tensor 'a'"):
        packed.tensor("a")
    packed.map()
    with pytest.raises(InvalidConfig, match="no tensor 'z'"):
        packed.tensor("z")
