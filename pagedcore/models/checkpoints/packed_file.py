"""The file of a model's packed weights: its header, checked before anything is mapped, and its tensors, mapped.

Owns the format. A file begins with a magic number, the length of the header and its SHA-256; then come the header, as
JSON, and tensors, each at a multiple of ``ALIGNMENT``. What they mean, ``packed_model.py`` knows. The file is mapped
for reading and shared, so that all processes have one copy of it, in the system's page cache; who writes one writes it
beside and gives it its name at the end, so that a file that is mapped never changes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import mmap
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from pagedcore.config.strict_json import load_json
from pagedcore.errors import InvalidConfig
from pagedcore_kernels.cpu.runtime.checksum import begin_checksum, checksum_of

ALIGNMENT: Final = 4096
"""Bytes: tensors begin with a page."""
MAX_HEADER_BYTES: Final = 2**26
"""Bytes of a header: those of ten thousand experts are a tenth of it."""
_MAGIC: Final = b"pagedcore packed"
_PREFIX_BYTES: Final = 64
_DTYPES: Final = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I8": torch.int8, "U8": torch.uint8,
    "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool,
}  # fmt: skip
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
_CHECKSUM, _SHA256 = "checksum", "sha256"
_HASHED_AT_ONCE: Final = 2**24

Header = dict[str, Any]


class PackedFile:
    """A file of packed weights whose header is what it should be; its tensors are not mapped yet."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            InvalidConfig: the file cannot be read, is damaged, or is none of these.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self._size = os.fstat(file.fileno()).st_size
                self.header, self._start = _read_header(file.read(_PREFIX_BYTES), file.read, self._size)
        except OSError as error:
            raise _refusal(f"it cannot be read ({error.strerror})") from error
        self._entries = _read_entries(self.header.get("tensors"), self._size - self._start)
        self._memory: torch.Tensor | None = None
        self._checksum: Callable[[], int] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def map(self) -> None:
        """Map the file, and begin to read all of it once, beside what the caller does until ``require_undamaged``.

        Raises:
            InvalidConfig: it is another file now.
        """
        memory = _map(self.path, self._size)[self._start :]
        self._memory, self._checksum = memory, begin_checksum(memory)

    def require_undamaged(self) -> None:
        """Wait for the checksum of the mapped file and compare it.

        Raises:
            InvalidConfig: it is another than the header's, or the file is not mapped.
        """
        if self._checksum is None or self._checksum() != self.header.get(_CHECKSUM):
            raise _refusal("it is damaged: its checksum is another. Delete it, or write it once more")

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in the mapped memory, which nobody may write to.

        Raises:
            InvalidConfig: there is none of that name, or the file is not mapped.
        """
        if (entry := self._entries.get(name)) is None or self._memory is None:
            raise _refusal(f"it has no tensor {name[:80]!r}")
        return self._memory[entry.begin : entry.begin + entry.num_bytes].view(entry.dtype).view(entry.shape)

    def verify(self) -> None:
        """Compare the SHA-256 of all tensors with the header's.

        Raises:
            InvalidConfig: it is another, or the file cannot be read.
        """
        hasher = hashlib.sha256()
        try:
            with self.path.open("rb") as file:
                file.seek(self._start)
                while part := file.read(_HASHED_AT_ONCE):
                    hasher.update(part)
        except OSError as error:
            raise _refusal(f"it cannot be read ({error.strerror})") from error
        if hasher.hexdigest() != self.header.get(_SHA256):
            raise _refusal("it is damaged: its SHA-256 is another. Delete it, or write it once more")


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Where the tensor is, from the end of the header on."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_packed(
    path: Path, facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], check: Callable[[Path], None],
    on_progress: Callable[[int, int], None],
) -> None:
    """Write a file beside ``path``, have it checked, and give it that name.

    Args:
        path: another file of this name is replaced; whoever has it mapped keeps it as it was.
        facts: what the header says beside.
        tensors: by name.
        check: called with the new file before it has its name; what it raises, is raised, and nothing is left.
        on_progress: called with the number of tensors written and of all.

    Raises:
        OSError: it cannot be written.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        _write(beside, facts, tensors, on_progress)
        check(beside)
        beside.replace(path)
    finally:
        with suppress(FileNotFoundError):
            beside.unlink()


def _write(
    path: Path, facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], on_progress: Callable[[int, int], None]
) -> None:
    entries, end = dict[str, Any](), 0
    for name, tensor in tensors.items():
        entries[name] = [_NAMES[tensor.dtype], list(tensor.shape), end]
        end += tensor.nbytes + -tensor.nbytes % ALIGNMENT
    # Why these: the header's length is known before what they will say.
    header = {**facts, "tensors": entries, _SHA256: "0" * 64, _CHECKSUM: 2**32 - 1}
    start = -(-(_PREFIX_BYTES + len(json.dumps(header))) // ALIGNMENT) * ALIGNMENT
    hasher = hashlib.sha256()
    with path.open("xb") as file:
        file.seek(start)
        for number, tensor in enumerate(tensors.values(), 1):
            content = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data
            padding = bytes(-tensor.nbytes % ALIGNMENT)
            for part in (content, padding):
                file.write(part)
                hasher.update(part)
            on_progress(number, len(tensors))
        file.flush()
        header[_SHA256], header[_CHECKSUM] = hasher.hexdigest(), checksum_of(_map(path, start + end)[start:])
        described = json.dumps(header).encode().ljust(start - _PREFIX_BYTES)
        file.seek(0)
        file.write(_MAGIC + len(described).to_bytes(8, "little") + hashlib.sha256(described).digest())
        file.seek(_PREFIX_BYTES)
        file.write(described)
        file.flush()
        os.fsync(file.fileno())


def _map(path: Path, size: int) -> torch.Tensor:
    """Return a file's bytes as uint8, mapped for reading and shared; a write to them ends the process."""
    try:
        with path.open("rb") as file:
            # Safety: to read beyond the end of a mapped file ends the process.
            if os.fstat(file.fileno()).st_size != size:
                raise _refusal("it has another size than before")
            mapping = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except OSError as error:
        raise _refusal(f"it cannot be mapped ({error.strerror})") from error
    # Why by address: torch warns of memory that is read-only; it is read alone here.
    memory: Any = (ctypes.c_uint8 * size).from_address(_address_of(mapping))
    memory.mapping = mapping
    return torch.frombuffer(memory, dtype=torch.uint8)


def _address_of(mapping: mmap.mmap) -> int:
    import numpy as np

    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


def _read_header(prefix: bytes, read: Callable[[int], bytes], size: int) -> tuple[Header, int]:
    if len(prefix) < _PREFIX_BYTES or not prefix.startswith(_MAGIC):
        raise _refusal("it is no file of packed weights")
    length = int.from_bytes(prefix[len(_MAGIC) : len(_MAGIC) + 8], "little")
    if not 0 < length <= min(MAX_HEADER_BYTES, size - _PREFIX_BYTES):
        raise _refusal(f"its header has {length} bytes, allowed are {MAX_HEADER_BYTES} and no more than the file has")
    described, start = read(length), _PREFIX_BYTES + length
    if hashlib.sha256(described).digest() != prefix[len(_MAGIC) + 8 : len(_MAGIC) + 40]:
        raise _refusal("its header is damaged")
    try:
        header = load_json(described.decode())
    except (ValueError, RecursionError) as error:
        raise _refusal("its header is no JSON") from error
    if not isinstance(header, dict) or start % ALIGNMENT or (size - start) % ALIGNMENT:
        raise _refusal("its header is no object, or its tensors do not begin and end with a page")
    return header, start


def _read_entries(given: Any, num_bytes: int) -> dict[str, _Entry]:
    """Return where tensors are: inside of the file, at multiples of a page, and none over another."""
    if not isinstance(given, dict) or not given:
        raise _refusal("its header names no tensors")
    entries = {name: _read_entry(name, entry, num_bytes) for name, entry in given.items()}
    end = 0
    for entry in sorted(entries.values(), key=lambda one: (one.begin, one.num_bytes)):
        if entry.begin < end:
            raise _refusal("its tensors lie one over the other")
        end = entry.begin + entry.num_bytes
    return entries


def _read_entry(name: str, given: Any, num_bytes: int) -> _Entry:
    is_entry = isinstance(given, list) and len(given) == 3 and isinstance(given[1], list) and len(given[1]) <= 8
    sizes = [*given[1], given[2]] if is_entry else [-1]
    is_entry = is_entry and isinstance(given[0], str) and given[0] in _DTYPES
    if not is_entry or any(type(one) is not int or one < 0 for one in sizes):
        raise _refusal(f"{name[:80]!r} has no number format, shape and place")
    entry = _Entry(_DTYPES[given[0]], tuple(given[1]), given[2])
    if entry.begin % ALIGNMENT or entry.begin + entry.num_bytes > num_bytes:
        raise _refusal(f"{name[:80]!r} is at {entry.begin} with {entry.num_bytes} bytes, and its file has {num_bytes}")
    return entry


def _refusal(reason: str) -> InvalidConfig:
    return InvalidConfig(f"model: its file of packed weights cannot be used: {reason}.")
