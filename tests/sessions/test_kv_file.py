"""KV files: whole or not at all, and used block by block as far as they are proven."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from pagedcore.sessions.kv_file import KVCopy, KVDirectory, KVSpec, read_bounded, read_kv, replace_file, write_kv

Tensors = dict[str, Any]
TOKENS = tuple(range(10))


def spec(tokens: tuple[int, ...] = TOKENS, block_size: int = 4, block_bytes: int = 24, kv_format: str = "a") -> KVSpec:
    """What a file is to hold."""
    return KVSpec(tokens, block_size, block_bytes, kv_format)


def copy_of(num_blocks: int = 3) -> KVCopy:
    """Three blocks of noise, the last one partly filled."""
    blocks = np.random.default_rng(0).integers(0, 256, (num_blocks, 24), dtype=np.uint8)
    return KVCopy(len(TOKENS), blocks)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A KV file."""
    write_kv(tmp_path / "kv", copy_of(), spec())
    return tmp_path / "kv"


def test_what_was_written_is_read(path: Path) -> None:
    """All blocks come back as they were, and the file is its owner's alone."""
    kv = read_kv(path, spec())
    assert kv is not None
    assert kv.num_tokens == 10
    assert np.array_equal(kv.blocks, copy_of().blocks)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("other", "num_tokens"), [
    (spec(kv_format="b"), 0), (spec((9, *TOKENS[1:])), 0), (spec((*TOKENS[:4], 9, *TOKENS[5:])), 4),
    (spec((*TOKENS[:9], 0)), 8), (spec(block_bytes=25), 0), (spec(TOKENS[:9]), 8), (spec(TOKENS[:8]), 0),
    (spec((*TOKENS, 10, 11)), 8), (spec(block_size=5), 0),
])
def test_only_blocks_of_the_very_tokens_are_used(path: Path, other: KVSpec, num_tokens: int) -> None:
    """A block is used only if it and all before it hold these tokens in this form; more blocks than asked for is not
    the file that was asked for."""
    kv = read_kv(path, other)
    assert (kv.num_tokens if kv is not None else 0) == num_tokens


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7), cut=st.booleans())
@settings(max_examples=150)
def test_damage_is_never_read(tmp_path_factory: pytest.TempPathFactory, place: int, bit: int, cut: bool) -> None:
    """Whatever byte is flipped, or wherever the file ends, the blocks that are read are the leading ones, unharmed."""
    path = tmp_path_factory.getbasetemp() / "damaged.kv"
    write_kv(path, copy_of(), spec())
    content = bytearray(path.read_bytes())
    place %= len(content)
    if cut:
        del content[place:]
    else:
        content[place] ^= 1 << bit
    path.write_bytes(content)
    kv = read_kv(path, spec())
    if kv is not None:
        assert np.array_equal(kv.blocks, copy_of().blocks[: len(kv.blocks)])
        assert kv.num_tokens == min(4 * len(kv.blocks), 10)


WINDOWED = KVSpec(TOKENS, 4, 24, "a", window_bytes=16, window=4)


def of_windows(change: Callable[[Tensors], object], path: Path) -> KVCopy | None:
    """What is read of a file with two window blocks after something was done to its parts."""
    windows = np.random.default_rng(1).integers(0, 256, (WINDOWED.num_windows, 16), dtype=np.uint8)
    write_kv(path, replace(copy_of(), windows=windows), WINDOWED)
    parts = load_file(path)
    change(parts)
    save_file({name: np.ascontiguousarray(part) for name, part in parts.items()}, path)
    return read_kv(path, WINDOWED)


@pytest.mark.parametrize("change", [
    lambda parts: parts.update(windows=parts["windows"][::-1]),
    lambda parts: parts.update(windows=parts["windows"][::-1], checks=parts["checks"][[0, 1, 2, 4, 3]]),
    lambda parts: parts.update(windows=parts["windows"][:1], checks=parts["checks"][:4]),
    lambda parts: parts.update(
        windows=np.resize(parts["windows"], (3, 16)), checks=np.resize(parts["checks"], (6, 32))),
    lambda parts: parts.update(blocks=parts["blocks"][:2], checks=parts["checks"][[0, 1, 3, 4]]),
    lambda parts: parts.update(windows=parts["windows"].ravel()),
    lambda parts: parts.update(windows=parts["windows"].view(np.int8)),
    lambda parts: parts.pop("windows"),
])
def test_window_blocks_are_used_whole_or_not_at_all(change: Callable[[Tensors], object], tmp_path: Path) -> None:
    """Swapped, with their digests too, cut off, repeated, of another form or behind fewer blocks: nothing is read."""
    assert WINDOWED.num_windows == 2
    assert of_windows(lambda parts: None, tmp_path / "kv") is not None
    assert of_windows(change, tmp_path / "kv") is None


def test_a_file_is_whole_or_the_old_one(tmp_path: Path) -> None:
    """While a file is written, and after that failed, its name still leads to what was there before."""
    path = tmp_path / "file"
    path.write_text("old")

    def fail(temporary: Path) -> None:
        temporary.write_text("new")
        assert path.read_text() == "old"
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        replace_file(path, fail)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    replace_file(path, lambda temporary: temporary.write_text("new"))
    assert (path.read_text(), len(list(tmp_path.iterdir()))) == ("new", 1)


def test_reading_is_bounded(tmp_path: Path) -> None:
    """A file that is too large is refused by its size, and one that is a directory by its kind."""
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bounded(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_bounded(tmp_path / "file", 4)
    with pytest.raises(OSError, match=r"directory|plain"):
        read_bounded(tmp_path, 5)


def test_a_directory_leaves_nothing_behind(tmp_path: Path) -> None:
    """Names are made on one thread and written on others; what was not removed goes when the directory is closed."""
    directory = KVDirectory(str(tmp_path / "made" / "here"))
    paths = [directory.name_file() for _ in range(8)]
    assert paths[0].parent.stat().st_mode & 0o777 == 0o700
    threads = [threading.Thread(target=write_kv, args=(path, copy_of(), spec())) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {path.name for path in paths[0].parent.iterdir()} == {path.name for path in paths}
    directory.remove(paths[0])
    directory.remove(paths[0])
    assert len(directory.files) == 7
    directory.close()
    directory.close()
    assert list((tmp_path / "made" / "here").iterdir()) == []


def test_a_private_directory_is_made_and_removed() -> None:
    """Without a path the first file makes a directory that only its owner may look into."""
    directory = KVDirectory(None)
    path = directory.name_file().parent
    assert path.stat().st_mode & 0o777 == 0o700
    directory.close()
    assert not path.exists()
