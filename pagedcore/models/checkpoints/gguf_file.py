"""What a GGUF file says of itself, and its tensors' bytes: metadata and directory read and checked, tensors mapped.

Owns the container, versions 2 and 3; what metadata mean is ``gguf.py``'s matter, and what blocks are
``gguf_blocks.py``'s. Every count and length is compared with what is left of the file before anything of its size is
made, and no tensor is read here.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

import torch

from pagedcore.errors import InvalidConfig
from pagedcore.models.checkpoints.gguf_blocks import OTHER_TYPES, TYPES, BlockType
from pagedcore.models.checkpoints.model_path import part_of
from pagedcore.models.linears.stored_weight import refusal

_MAGIC: Final = b"GGUF"
_NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of metadata: ``struct``'s letter, or what is read piece by piece."""
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES, _MOST_ELEMENTS, _MOST_DIMENSIONS, _MOST_PARTS = 2**16, 2**22, 4, 1024
"""Most metadata and tensors of a file, elements of all its arrays, dimensions of a tensor, and files of a model."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies."""

    kind: BlockType
    shape: tuple[int, ...]
    """Inputs last, as torch has it; files have it the other way round."""
    begin: int
    end: int
    part: int = 0
    """Number of the file, counted from 0."""

    @property
    def row_bytes(self) -> int:
        """Bytes of what the last dimension counts."""
        return self.shape[-1] // self.kind.size * self.kind.num_bytes


class GGUFFile:
    """Metadata and tensors by name of one file, or of all parts of a model, of which the path is the first one's.

    Metadata are those of the first part; others have tensors only.

    Raises:
        InvalidConfig: a file is damaged, or larger in some count than any model is, or a part is missing or another.
        ModelNotSupported: a tensor has a type that is not known here.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.metadata, self.tensors, content = _read(path)
        self._contents = [content]
        count = self.metadata.get("split.count", 0)
        if count in (0, 1):
            return
        if type(count) is not int or not 1 < count <= _MOST_PARTS:
            _damaged("split.count", count, f"at most {_MOST_PARTS}")
        for number in range(1, count):
            self._add(path, number, count)
        if (total := self.metadata.get("split.tensors.count", len(self.tensors))) != len(self.tensors):
            _damaged("split.tensors.count", total, f"{len(self.tensors)}, which all parts have")

    def _add(self, path: str | os.PathLike[str], number: int, count: int) -> None:
        """Take the tensors of a further part."""
        part = part_of(path, number + 1, count)
        if part is None or self.metadata.get("split.no", 0) != 0:
            raise InvalidConfig(
                f"model: its GGUF file is one of {count} parts, or is not called as such. Name the first one, whose "
                f"name ends in -00001-of-{count:05d}.gguf."
            )
        if not part.is_file():
            raise InvalidConfig(f"model: {part.name[-80:]} is missing beside the first of its {count} GGUF files.")
        metadata, tensors, content = _read(part)
        said = tuple(metadata.get(f"split.{name}") for name in ("no", "count"))
        if said != (number, count):
            _damaged(f"split.no and split.count of part {number + 1}", said, (number, count))
        for name, entry in tensors.items():
            _require_new(name, self.tensors)
            self.tensors[name] = replace(entry, part=number)
        self._contents.append(content)

    def rows(self, name: str) -> torch.Tensor:
        """Return a tensor's bytes, uint8 [rows, bytes of a row], mapped."""
        entry = self.tensors[name]
        return self._contents[entry.part][entry.begin : entry.end].view(-1, entry.row_bytes)


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, TensorEntry], torch.Tensor]:
    """Return metadata, directory and mapped bytes of one file."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                _damaged("its size", size, "24 bytes and more")
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as content:
                metadata, tensors = _Reader(content, size).read()
    except OSError as error:
        raise InvalidConfig(f"model: its file cannot be read ({error.strerror}).") from error
    return metadata, tensors, torch.from_file(os.fspath(path), shared=False, size=size, dtype=torch.uint8)


class _Reader:
    """Reads metadata and directory from their beginning to their end."""

    def __init__(self, content: mmap.mmap, size: int) -> None:
        self._content, self._size, self._place, self._num_elements = content, size, 0, 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
        if (magic := bytes(self._content[:4])) != _MAGIC:
            _damaged("its magic number", magic, _MAGIC)
        self._place = 4
        version = self._number("I")
        if version not in (2, 3):
            # Why: numbers of the other order of bytes look like this one.
            raise refusal(f"it is GGUF of version {version}, supported are 2 and 3, little-endian")
        num_tensors, num_metadata = self._count("tensors", 24), self._count("metadata", 13)
        metadata: dict[str, Any] = {}
        for _ in range(num_metadata):
            _require_new(name := self._string("a key"), metadata)
            metadata[name] = self._value(self._number("I"), name)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 2**16 or alignment & (alignment - 1):
            _damaged("general.alignment", alignment, "a power of 2 from 8 to 65536")
        return metadata, self._directory(num_tensors, alignment)

    def _directory(self, count: int, alignment: int) -> dict[str, TensorEntry]:
        found: dict[str, tuple[BlockType, tuple[int, ...], int]] = {}
        for _ in range(count):
            _require_new(name := self._string("a tensor's name"), found)
            num_dimensions = self._number("I")
            if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
                _damaged(f"the dimensions of {name[:80]}", num_dimensions, f"1 to {_MOST_DIMENSIONS}")
            shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
            kind, offset = TYPES.get(number := self._number("I")), self._number("Q")
            if kind is None:
                raise refusal(f"{name[:80]} is of the type {OTHER_TYPES.get(number, number)} of ggml")
            found[name] = kind, shape, offset
        start = -(-self._place // alignment) * alignment
        entries = {name: self._entry(name, *one, start, alignment) for name, one in found.items()}
        end = 0
        for name, entry in sorted(entries.items(), key=lambda one: one[1].begin):
            if entry.begin < end:
                _damaged(f"the offset of {name[:80]}", entry.begin - start, "behind the tensor before")
            end = entry.end
        return entries

    def _entry(
        self, name: str, kind: BlockType, shape: tuple[int, ...], offset: int, start: int, alignment: int
    ) -> TensorEntry:
        if min(shape) < 1 or shape[-1] % kind.size:
            _damaged(f"the shape of {name[:80]}", list(shape), f"whole blocks of {kind.size}")
        if offset % alignment:
            _damaged(f"the offset of {name[:80]}", offset, f"a multiple of {alignment}")
        begin = start + offset
        end = begin + math.prod(shape) // kind.size * kind.num_bytes
        if end > self._size:
            _damaged(f"the end of {name[:80]}", end, f"{self._size} bytes, the file's size")
        return TensorEntry(kind, shape, begin, end)

    def _take(self, size: int, what: str) -> int:
        """Step over so many bytes and return where they begin."""
        if size > (left := self._size - self._place):
            _damaged(f"the length of {what}", size, f"{left} bytes, what is left of the file")
        self._place += size
        return self._place - size

    def _number(self, letter: str) -> Any:
        begin = self._take(struct.calcsize(f"<{letter}"), "a number")
        return struct.unpack_from(f"<{letter}", self._content, begin)[0]

    def _count(self, what: str, least_bytes: int) -> int:
        """Read a number of things that take so many bytes each."""
        count: int = self._number("Q")
        if count > (most := min(_MOST_ENTRIES, (self._size - self._place) // least_bytes)):
            _damaged(f"the number of {what}", count, f"at most {most}")
        return count

    def _string(self, what: str) -> str:
        size = self._number("Q")
        begin = self._take(size, what)
        try:
            return self._content[begin : begin + size].decode()
        except UnicodeDecodeError:
            _damaged(what, f"at byte {begin}", "UTF-8")

    def _value(self, kind: int, name: str) -> Any:
        if kind == _STRING:
            return self._string(name[:80])
        if kind == _ARRAY:
            return self._array(name[:80])
        if kind not in _NUMBERS:
            _damaged(f"the type of {name[:80]}", kind, "0 to 12")
        return self._number(_NUMBERS[kind])

    def _array(self, name: str) -> list[Any]:
        kind, count = self._number("I"), self._number("Q")
        if kind != _STRING and kind not in _NUMBERS:
            _damaged(f"the type of elements of {name}", kind, "a number or a string")
        letter = _NUMBERS.get(kind, "Q")  # Shape: a string takes its length at least.
        self._num_elements += count
        if self._num_elements > _MOST_ELEMENTS:
            _damaged(f"the elements up to {name}", self._num_elements, f"at most {_MOST_ELEMENTS}")
        begin = self._take(count * struct.calcsize(f"<{letter}"), name)
        if kind != _STRING:
            return list(struct.unpack_from(f"<{count}{letter}", self._content, begin))
        self._place = begin
        return [self._string(name) for _ in range(count)]


def _require_new(name: str, known: dict[str, Any]) -> None:
    if name in known:
        _damaged("a name", name[:80], "names that differ")


def _damaged(what: str, value: object, limit: object) -> NoReturn:
    raise InvalidConfig(f"model: its GGUF file is damaged: {what} is {value!r}, allowed is {limit}.")
