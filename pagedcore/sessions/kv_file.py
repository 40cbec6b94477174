"""KV on disk: copies of whole blocks in a safetensors file of their own, each proven before it is used.

Owns the files and their checks. A file is written under another name and renamed when it is complete. Of a file that
is read, the leading blocks are used whose bytes are what a holder of the same key wrote for exactly these tokens; the
rest is computed again. Files are read and written on any thread; this module knows no pool and no block id.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import secrets
import shutil
import stat
import tempfile
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListOf
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedcore.errors import ForkedProcess
from pagedcore.kv_cache.block_hash import KEY_BYTES, BlockHasher
from pagedcore.sessions.locked_directory import PARKED, PART, make_locked, release, sweep

_log = logging.getLogger("pagedcore")

_HEADER_BYTES: Final = 4096
"""Upper bound of the header of these files."""
_NAME: Final = b"pagedcore kv 2"
_STATE: Final = b"pagedcore state 1"
_WINDOW: Final = b"pagedcore window 1"
_Bytes = npt.NDArray[np.uint8]
_NO_BYTES: Final = np.empty((0, 0), np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class KVCopy:
    """Copies of the blocks of a sequence's first positions, outside of every pool."""

    num_tokens: int
    blocks: _Bytes
    """Shape [N, block_bytes]; the last block may be partly filled."""
    state: _Bytes | None = None
    """Shape [state_bytes]: what recurrent layers keep behind these positions; ``None``: the model has none."""
    windows: _Bytes | None = None
    """Shape [M, window_bytes]: the window blocks of the last M blocks, which are read behind these positions; ``None``:
    there are none, and blocks have what layers with a window keep."""


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What a KV file must hold to be used: which tokens, in what form."""

    token_ids: tuple[int, ...]
    block_size: int
    block_bytes: int
    kv_format: str
    state_bytes: int = 0
    """Of the state behind the last token, without which the blocks are of no use; 0: the model keeps none."""
    window_bytes: int = 0
    """Of a window block; 0: layers with a window have no memory of their own."""
    window: int = 0
    """Positions that such layers read."""
    key: bytes = field(default=b"", repr=False)
    """Secret that authenticates the blocks; empty: a file proves no more than that it is undamaged."""

    @property
    def num_windows(self) -> int:
        """Window blocks that are read behind the last token."""
        num_tokens, size = len(self.token_ids), self.block_size
        first = max(0, num_tokens + 1 - self.window) // size
        return -(-num_tokens // size) - first if self.window_bytes else 0

    @property
    def whole(self) -> KVSpec:
        """The same in blocks that have what layers with a window keep."""
        return replace(self, block_bytes=self.block_bytes + self.window_bytes, window_bytes=0, window=0)

    def block_keys(self) -> list[bytes]:
        """Return a digest for each block, over its tokens and all before them."""
        hasher = BlockHasher(self.block_size, _NAME + self.kv_format.encode())
        root, keys = hasher.root({}), list[bytes]()
        num_full = len(self.token_ids) // self.block_size
        hasher.extend(keys, root, self.token_ids, num_full)
        if rest := self.token_ids[num_full * self.block_size :]:
            keys.append(hasher.key(keys[-1] if keys else root, rest))
        return keys


def write_kv(path: Path, kv: KVCopy, spec: KVSpec) -> None:
    """Write a file, whole or not at all. Raises ``OSError``; then no part of it is left behind."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    def save(temporary: Path) -> None:
        try:
            save_file(tensors, temporary, {"format": _NAME.decode()})
        except SafetensorError as error:
            # Why: safetensors reports a full disk as an error of the format.
            raise OSError(errno.EIO, str(error)) from error

    keys = spec.block_keys()
    digests = list(_checks(kv.blocks, keys, spec.key))
    tensors = {"blocks": np.ascontiguousarray(kv.blocks)}
    if kv.state is not None:
        tensors["state"] = np.ascontiguousarray(kv.state)
        digests.append(_check_of_state(kv.state, keys, spec.key))
    if kv.windows is not None:
        tensors["windows"] = np.ascontiguousarray(kv.windows)
        digests += _checks_of_windows(kv.windows, keys, spec.key)
    tensors["checks"] = np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, KEY_BYTES)
    replace_file(path, save)


def read_kv(path: Path, spec: KVSpec) -> KVCopy | None:
    """Return the leading blocks of a file that match ``spec``; ``None``: none does, or the file cannot be read."""
    try:
        return _read_proven(path, spec)
    except Exception as error:  # of whatever kind: no memory, no file, no such format; the same is computed again
        _log.warning("KV file: it could not be read (%s); its tokens are computed again", reason_of(error))
        return None


def _read_proven(path: Path, spec: KVSpec) -> KVCopy | None:
    keys = spec.block_keys()
    blocks, checks, state, windows = _read_blocks(path, len(keys), spec)
    found = enumerate(_checks(blocks, keys, spec.key))
    num_good = next((i for i, check in found if not hmac.compare_digest(check, checks[i].tobytes())), len(blocks))
    if state is not None:
        is_good = hmac.compare_digest(_check_of_state(state, keys, spec.key), checks[-1].tobytes())
        # Why all: a state is of use behind all blocks, and blocks are of none without it.
        num_good = num_good if is_good and num_good == len(keys) else 0
    if windows is not None:
        digests = zip(_checks_of_windows(windows, keys, spec.key), checks[len(blocks) :], strict=True)
        is_good = all(hmac.compare_digest(one, other.tobytes()) for one, other in digests)
        num_good = num_good if is_good and num_good == len(keys) else 0
    if num_good == 0 or num_good < len(blocks):
        _log.warning("KV file: %d of %d blocks can be used; the rest is computed again", num_good, len(keys))
    num_tokens = min(num_good * spec.block_size, len(spec.token_ids))
    return KVCopy(num_tokens, blocks[:num_good], state, windows) if num_good else None


def _read_blocks(
    path: Path, num_blocks: int, spec: KVSpec
) -> tuple[_Bytes, _Bytes, _Bytes | None, _Bytes | None]:
    """Return the blocks of a file, the digests of these and of what follows, the state and the window blocks; of any
    values, and none if they have another form.
    """
    from safetensors.numpy import load

    num_states, num_windows = 1 if spec.state_bytes else 0, spec.num_windows
    counts = ((num_blocks, spec.block_bytes), (num_states, spec.state_bytes), (num_windows, spec.window_bytes))
    most = sum(count * (size + KEY_BYTES) for count, size in counts) + _HEADER_BYTES
    # Why: read, not mapped; access to a mapped file that was truncated meanwhile ends the process.
    tensors = load(read_bounded(path, most))
    blocks, checks, state = tensors["blocks"], tensors["checks"], tensors["state"] if num_states else None
    windows = tensors["windows"] if spec.window_bytes else None
    count = len(blocks) if blocks.ndim else -1
    is_ours = (
        blocks.dtype == checks.dtype == np.uint8 and 0 < count <= num_blocks
        and blocks.shape == (count, spec.block_bytes)
        and checks.shape == (count + num_states + num_windows, KEY_BYTES)
        and (state is None or (state.dtype == np.uint8 and state.shape == (spec.state_bytes,)))
        and (windows is None or (windows.dtype == np.uint8 and windows.shape == (num_windows, spec.window_bytes)))
    )
    return (blocks, checks, state, windows) if is_ours else (_NO_BYTES, _NO_BYTES, None, None)


def reason_of(error: Exception) -> str:
    """Say what kind of error it is, without what it says."""
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__


def _checks(blocks: _Bytes, block_keys: ListOf[bytes], key: bytes) -> Iterator[bytes]:
    for block, block_key in zip(blocks, block_keys, strict=False):
        yield hmac.digest(key, block_key + block.tobytes(), "sha256")


def _check_of_state(state: _Bytes, block_keys: ListOf[bytes], key: bytes) -> bytes:
    return hmac.digest(key, _STATE + block_keys[-1] + state.tobytes(), "sha256")


def _checks_of_windows(windows: _Bytes, block_keys: ListOf[bytes], key: bytes) -> Iterator[bytes]:
    last = block_keys[len(block_keys) - len(windows) :]
    return (hmac.digest(key, _WINDOW + one + window.tobytes(), "sha256")
            for one, window in zip(last, windows, strict=True))


def read_bounded(path: Path, most: int) -> bytes:
    """Return the bytes of a plain file of at most ``most`` bytes. Raises ``OSError`` before anything is allocated."""
    # Safety: opening a pipe would wait for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a plain file")
        if status.st_size > most:
            raise OSError(errno.EFBIG, f"more than {most} bytes")
        return file.read(most)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a new file, then rename it: ``path`` is the complete old file or the complete new one.

    The file is readable by its owner only, and on the disk when this returns. Raises ``OSError``.
    """
    directory, lock = make_locked(path.parent, PART)
    try:
        temporary = directory / "file"
        temporary.touch(mode=0o600)
        write(temporary)
        # Why: safetensors replaces the file that it is given.
        temporary.chmod(0o600)
        _flush(temporary)
        os.replace(temporary, path)
    finally:
        try:
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            release(lock)
    _flush(path.parent)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class KVDirectory:
    """The files of one engine's parked KV, in a directory of its own that is locked while its process lives.

    Invariant: its files have names that cannot be guessed; ``remove`` and ``close`` leave none of them.
    """

    def __init__(self, path: str | None) -> None:
        """Name the parent of the directory, which is made with the first file; ``None``: that of temporary files.

        What processes that were killed have left there is removed.
        """
        self._parent: Final = path
        self._path: Path | None = None
        self._remove_all: Callable[[], object] | None = None
        self._process_id: Final = os.getpid()
        self.secret: Final = secrets.token_bytes(32)
        """Authenticates its files: what another program writes there is never used, nor what an earlier engine left."""
        self.files: set[Path] = set()
        """The files that were named and not removed."""
        with suppress(OSError):
            sweep(Path(path or tempfile.gettempdir()), PARKED)

    def require_process(self) -> None:
        """Raise ``ForkedProcess`` in a forked child, whose parent the files belong to."""
        if os.getpid() != self._process_id:
            raise ForkedProcess(self._process_id)

    def name_file(self) -> Path:
        """Return a path for a new file. Raises ``OSError`` if the directory cannot be made."""
        if self._path is None or not self._path.is_dir():
            parent = Path(self._parent or tempfile.gettempdir())
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._remove_all is not None:
                self._remove_all()
            self._path, lock = make_locked(parent, PARKED)
            self._remove_all = weakref.finalize(self, _remove_directory, self._path, lock, self._process_id)
        path = self._path / f"{secrets.token_hex(16)}.kv.safetensors"
        self.files.add(path)
        return path

    def remove(self, path: Path) -> None:
        """Remove a file if it exists; its writer removes it if it is being written now. A failure is only logged."""
        if os.getpid() != self._process_id:
            return
        # Safety: in this order. Whichever comes last of this line and the writer's look at the set removes the file.
        self.files.discard(path)
        try:
            path.unlink(missing_ok=True)
            if self._path is None:
                # Why: its writer may have kept the directory from being removed.
                path.parent.rmdir()
        except OSError as error:
            _log.warning("KV file: it could not be removed (%s)", error.strerror)

    def close(self) -> None:
        """Remove all files and the directory; a second call does nothing."""
        for path in list(self.files):
            self.remove(path)
        if self._remove_all is not None:
            self._path = None
            self._remove_all()


def _remove_directory(path: Path, lock: int, process_id: int) -> None:
    # Safety: a forked child that exits must not remove what its parent has parked.
    if os.getpid() == process_id:
        shutil.rmtree(path, ignore_errors=True)
        release(lock)
