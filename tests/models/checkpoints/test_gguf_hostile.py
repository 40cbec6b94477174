"""GGUF files that somebody has damaged, or made to do damage: refused by a typed error before memory is taken."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcore.errors import InvalidConfig, ModelNotSupported, PagedcoreError
from pagedcore.models.checkpoints.gguf_file import GGUFFile
from support.gguf_files import floats, write_gguf

HUGE = 2**63
WORDS = ["x", "", "▁y"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with metadata of every kind and three tensors."""
    path = tmp_path_factory.mktemp("gguf") / "sound.gguf"
    tensors = {name: floats("f32", np.ones((2, 12))) for name in ("first", "second", "third")}
    write_gguf(path, {"a": 1, "b": "text", "c": WORDS, "d": [1.0, 2.0], "e": True, "f": [3]}, tensors)
    return path.read_bytes()


def read(content: bytes, path: Path) -> GGUFFile:
    path.write_bytes(content)
    return GGUFFile(path)


def test_a_sound_file_is_read(sound: bytes, tmp_path: Path) -> None:
    """Metadata of every kind, and tensors with inputs last."""
    file = read(sound, tmp_path / "x.gguf")
    assert file.metadata == {"a": 1, "b": "text", "c": WORDS, "d": [1.0, 2.0], "e": True, "f": [3]}
    assert {name: entry.shape for name, entry in file.tensors.items()} == dict.fromkeys(
        ("first", "second", "third"), (2, 12))
    assert file.rows("second").shape == (2, 48)


def head(num_tensors: int, num_metadata: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_metadata)


def text(value: bytes, size: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if size is None else size) + value


def entry(name: bytes = b"t", *, shape: tuple[int, ...] = (32,), kind: int = 8, offset: int = 0,
          dimensions: int | None = None) -> bytes:
    count = len(shape) if dimensions is None else dimensions
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", count, *shape, kind, offset)


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return text(b"k") + struct.pack("<IIQ", 9, kind, count) + content


ROOM = bytes(4096)
CASES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "its size is 0, allowed is 24 bytes"),
    "another magic": (b"GGML" + ROOM, "magic number is b'GGML'"),
    "tensors": (head(HUGE, 0) + ROOM, f"number of tensors is {HUGE}, allowed is at most"),
    "metadata": (head(0, HUGE) + ROOM, f"number of metadata is {HUGE}, allowed is at most"),
    "a key": (head(0, 1) + text(b"k", HUGE) + ROOM, f"length of a key is {HUGE}, allowed is .* what is left"),
    "a text": (head(0, 1) + text(b"k") + struct.pack("<IQ", 8, HUGE) + ROOM, f"length of k is {HUGE}"),
    "no text": (head(0, 1) + text(b"\xff\xfe") + ROOM, "a key is 'at byte 32', allowed is UTF-8"),
    "a kind": (head(0, 1) + text(b"k") + struct.pack("<I", 13) + ROOM, "type of k is 13"),
    "an array": (head(0, 1) + array(4, HUGE) + ROOM, "elements up to k is"),
    "a long array": (head(0, 1) + array(12, 2**20) + ROOM, f"length of k is {2**23}, allowed is"),
    "an array of texts": (head(0, 1) + array(8, 2**20) + ROOM, f"length of k is {2**23}, allowed is"),
    "an array of arrays": (head(0, 1) + array(9, 1, array(9, 1)) + ROOM, "type of elements of k is 9"),
    "a key twice": (head(0, 2) + 2 * (text(b"k") + struct.pack("<II", 4, 1)) + ROOM, "a name is 'k'"),
    "an alignment": (head(0, 1) + text(b"general.alignment") + struct.pack("<II", 4, 24) + ROOM, "alignment is 24"),
    "no alignment": (head(0, 1) + text(b"general.alignment") + struct.pack("<II", 4, 0) + ROOM, "alignment is 0"),
    "a tensor twice": (head(2, 0) + 2 * entry() + ROOM, "a name is 't'"),
    "dimensions": (head(1, 0) + entry(dimensions=2**32 - 1) + ROOM, "dimensions of t is 4294967295, allowed is 1 to 4"),
    "no dimensions": (head(1, 0) + entry(shape=()) + ROOM, "dimensions of t is 0"),
    "a shape": (head(1, 0) + entry(shape=(0,)) + ROOM, r"shape of t is \[0\]"),
    "half a block": (head(1, 0) + entry(shape=(33,)) + ROOM, r"shape of t is \[33\], allowed is whole blocks of 32"),
    "an overflow": (head(1, 0) + entry(shape=(2**32, 2**32, 2**32, 2**32)) + ROOM, "end of t is .*, the file's size"),
    "an offset": (head(1, 0) + entry(offset=2**64 - 32) + ROOM, "end of t is"),
    "an odd offset": (head(1, 0) + entry(offset=8) + ROOM, "offset of t is 8, allowed is a multiple of 32"),
    "a lap": (head(2, 0) + entry(b"s", offset=0) + entry(offset=32) + ROOM, "offset of t is 32, allowed is behind"),
    "a short file": (head(1, 0) + entry(shape=(32, 1000)) + ROOM, "end of t is"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_file_that_contradicts_itself_is_refused(case: str, tmp_path: Path) -> None:
    """Every count, length and offset is compared with the file before anything of that size is made; the error names
    it with its value and limit."""
    content, message = CASES[case]
    (tmp_path / "x.gguf").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidConfig, match=f"model: its GGUF file is damaged: .*{message}"):
            GGUFFile(tmp_path / "x.gguf")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_other_versions_are_refused(version: int, tmp_path: Path) -> None:
    """Version 1 has other counts; a file of a big-endian machine shows its version turned round."""
    with pytest.raises(ModelNotSupported, match=f"GGUF of version {version}, supported are 2 and 3"):
        read(head(0, 0, version) + ROOM, tmp_path / "x.gguf")


@settings(max_examples=150)
@given(data=st.data())
def test_no_change_of_bytes_ends_in_another_error(
    sound: bytes, tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    """Bytes changed, cut off or repeated: the file is read, with tensors inside of it, or refused by a typed error."""
    content = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.one_of(st.sampled_from([0, 1, 9, 127, 255]), st.integers(0, 255)))
    content = content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))]
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    try:
        file = read(bytes(content), path)
    except PagedcoreError:
        return
    for name, one in file.tensors.items():
        assert file.rows(name).nbytes == one.end - one.begin
