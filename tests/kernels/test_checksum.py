"""The checksum of much memory, against NumPy."""

from __future__ import annotations

import threading
import zlib

import numpy as np
import pytest
import torch

from pagedcore_kernels.cpu.runtime.checksum import begin_checksum, checksum_of
from pagedcore_kernels.errors import InternalError

CHUNK = 2**21


def by_numpy(content: bytes) -> int:
    """Of each chunk the sums of words, and of words times odd numbers, modulo 2**64; then a CRC."""
    sums = []
    for begin in range(0, len(content), CHUNK):
        words = np.frombuffer(content[begin : begin + CHUNK], np.uint64)
        odd = 2 * np.arange(len(words), dtype=np.uint64) + np.uint64(1)
        sums += [words.sum(dtype=np.uint64), (words * odd).sum(dtype=np.uint64)]
    return zlib.crc32(np.array(sums, np.uint64).tobytes(), len(content))


@pytest.mark.parametrize("num_bytes", [8, 4096, CHUNK, 2 * CHUNK + 4096])
def test_sums_are_numpys(num_bytes: int) -> None:
    """Whole chunks and a rest, of all bytes."""
    memory = torch.randint(0, 256, (num_bytes,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    assert checksum_of(memory) == by_numpy(memory.numpy().tobytes())


@pytest.mark.parametrize("damage", ["bit", "page", "order"])
def test_damage_shows(damage: str) -> None:
    """A bit that flips, a page of zeros, two words in each other's place."""
    memory = torch.randint(0, 256, (CHUNK + 8192,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    before = checksum_of(memory)
    if damage == "bit":
        memory[CHUNK + 17] ^= 64
    elif damage == "page":
        memory[4096:8192] = 0
    else:
        memory[:16] = memory[:16].roll(8)
    assert checksum_of(memory) != before


def test_other_memory_is_refused() -> None:
    """What is no multiple of a word, or has gaps, is not read."""
    for memory in (torch.zeros(12, dtype=torch.uint8), torch.zeros(16, 16, dtype=torch.uint8).t()[:8]):
        with pytest.raises(InternalError):
            checksum_of(memory)


@pytest.mark.parametrize("has_threads", [True, False])
def test_it_is_the_same_beside_other_work(has_threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a thread of its own, or at once where the system gives none; asked again, it is the same."""
    memory = torch.arange(2**19)
    if not has_threads:
        monkeypatch.setattr(threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("no thread")))
    wait = begin_checksum(memory)
    assert wait() == wait() == checksum_of(memory)
