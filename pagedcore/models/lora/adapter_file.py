"""The tensors of an adapter's one safetensors file: what its head says, compared with its size, and then their numbers.

Owns the reading. The file is opened once and read, never mapped, so that whoever changes or truncates it afterwards
changes nothing; a head is believed only as far as it describes every byte of the file exactly once.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeGuard

import torch

from pagedcore.errors import InvalidAdapter
from pagedcore.models.lora.adapter_config import CONFIG, invalid, refused, shown

WEIGHTS: Final = "adapter_model.safetensors"
_FORMATS: Final[Mapping[str, torch.dtype]] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_MAX_CONFIG_BYTES: Final = 2**18
_MAX_HEAD_BYTES: Final = 2**25
"""PEFT writes 150 bytes for a tensor: 220,000 of them, as large mixtures have with two for each matrix of an expert."""
_MAX_MARKS: Final[Mapping[bytes, int]] = {b"{": 2**18, b"[": 2**19, b",": 2**21}
"""How often what begins or divides values may be there; a tensor has 1, 2 and 5 of them."""
_MAX_WEIGHTS_BYTES: Final = 2**36
_PICKLE: Final = "adapter_model.bin"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What the head says of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, int]
    begin: int
    """Where it is in the file."""

    @property
    def num_bytes(self) -> int:
        """Bytes of it there."""
        return math.prod(self.shape) * self.dtype.itemsize


class AdapterFile:
    """One open file of an adapter's tensors, by name."""

    def __init__(self, descriptor: int) -> None:
        """Read its head.

        Raises:
            InvalidAdapter: it is damaged, or has other tensors than matrices of floating numbers.
        """
        self._descriptor = descriptor
        size = os.fstat(descriptor).st_size
        head_size = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if not 2 <= head_size <= min(_MAX_HEAD_BYTES, size - 8):
            raise invalid(WEIGHTS, head_size, f"a head of 2 to {_MAX_HEAD_BYTES} bytes that is within the file")
        text = os.pread(descriptor, head_size, 8)
        for mark, most in _MAX_MARKS.items():
            # Safety: counted first, because a value takes thirty times the bytes of its text.
            if (count := text.count(mark)) > most:
                raise invalid(f"{WEIGHTS}, its head", count, f"at most {most} of {mark.decode()}")
        try:
            head = json.loads(text, object_pairs_hook=_without_repeats)
            self.tensors: Mapping[str, StoredTensor] = {
                name: _tensor(name, one, 8 + head_size) for name, one in head.items() if name != "__metadata__"}
        except (ValueError, RecursionError, AttributeError) as error:
            if isinstance(error, InvalidAdapter):
                raise
            raise refused(WEIGHTS, "a damaged head", "a head of safetensors") from None
        end = 8 + head_size
        for name, one in sorted(self.tensors.items(), key=lambda item: item[1].begin):
            if one.begin != end:
                raise invalid(shown(name), one.begin, f"its begin at byte {end}, where the one before ends")
            end += one.num_bytes
        if end != size:
            raise invalid(WEIGHTS, size, f"{end} bytes, as its head says")

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor's numbers in memory of their own.

        Raises:
            InvalidAdapter: some are not finite, or the file has become shorter.
        """
        stored = self.tensors[name]
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        bytes_of: Any = tensor.view(torch.uint8).numpy().reshape(-1)
        done = 0
        while done < len(bytes_of):
            count = os.preadv(self._descriptor, [bytes_of[done:]], stored.begin + done)
            if not count:
                raise refused(WEIGHTS, "a file that has become shorter", "one that stays as it is")
            done += count
        if not tensor.isfinite().all():
            raise refused(shown(name), "a tensor with numbers that are not finite", "finite numbers")
        return tensor


@contextmanager
def adapter_file(directory: Path) -> Iterator[AdapterFile]:
    """Open the tensors of an adapter.

    Raises:
        InvalidAdapter: there is no such file, or it is too large or damaged.
    """
    if not (directory / WEIGHTS).exists() and (directory / _PICKLE).exists():
        raise refused("directory", f"weights in {_PICKLE}", WEIGHTS,
                      "Reading the other format can run code; save the adapter again with a present PEFT.")
    descriptor = _opened(directory, WEIGHTS, _MAX_WEIGHTS_BYTES)
    try:
        yield AdapterFile(descriptor)
    finally:
        os.close(descriptor)


def config_bytes(directory: Path) -> bytes:
    """Return what ``adapter_config.json`` holds.

    Raises:
        InvalidAdapter: there is no such file, or it is too large.
    """
    descriptor = _opened(directory, CONFIG, _MAX_CONFIG_BYTES)
    try:
        return os.pread(descriptor, _MAX_CONFIG_BYTES, 0)
    finally:
        os.close(descriptor)


def _opened(directory: Path, name: str, most_bytes: int) -> int:
    """Open a file of the directory, or of the hub's cache that it is a part of."""
    path, own = directory / name, Path(os.path.realpath(directory))
    homes = [own, own.parent.parent / "blobs"] if own.parent.name == "snapshots" else [own]
    # Safety: whoever may write to the directory shall not have files read that only this process may read.
    # Why not the method of a path: it raises an error of its own for links in a circle.
    place = Path(os.path.realpath(path))
    if not any(place.is_relative_to(home) for home in homes):
        raise refused(name, "a link out of its directory", "a file in it")
    try:
        # Why not to block: a pipe has no end that opens it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise refused("directory", f"none with {name}", f"one with {CONFIG} and {WEIGHTS}") from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size > most_bytes:
        os.close(descriptor)
        raise invalid(name, found.st_size, f"a file of at most {most_bytes} bytes")
    return descriptor


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise refused(WEIGHTS, "a name that is there twice", "each name once")
    return found


def _tensor(name: str, fields: Any, begin: int) -> StoredTensor:
    what = shown(name)
    if not isinstance(fields, dict):
        raise invalid(what, fields, "a description of a tensor")
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _FORMATS:
        raise invalid(what, dtype, f"a tensor in {', '.join(_FORMATS)}")
    if not _is_pair(shape, 1) or not _is_pair(offsets, 0):
        raise refused(what, "a tensor of another shape", "a matrix")
    found = StoredTensor(_FORMATS[dtype], (shape[0], shape[1]), begin + offsets[0])
    if offsets[1] - offsets[0] != found.num_bytes:
        raise invalid(what, offsets[1] - offsets[0], f"{found.num_bytes} bytes, as its shape says")
    return found


def _is_pair(numbers: Any, least: int) -> TypeGuard[list[int]]:
    """Whether it is a list of two whole numbers that fit."""
    return isinstance(numbers, list) and len(numbers) == 2 and all(
        type(one) is int and least <= one < 2**40 for one in numbers)
