"""Directories that are locked as long as their process lives, so that a later process can sweep what a killed one left.

The lock is an flock on the directory itself: the system releases it when the process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from pagedcore.errors import is_passing

_log = logging.getLogger("pagedcore")

PARKED: Final = ("pagedcore-parked-", "")
"""Beginning and end of the names of directories with parked KV."""
PART: Final = (".pagedcore-", ".part")
"""Those of directories in which a file is written before it is complete."""
_held: Final = set[int]()


def make_locked(parent: Path, kind: tuple[str, str]) -> tuple[Path, int]:
    """Make a directory that only its owner may use and no process sweeps; return it and the handle for ``release``.

    Where directories cannot be locked its name is one that is never swept. Raises ``OSError``.
    """
    while True:
        path = Path(tempfile.mkdtemp(prefix=kind[0], suffix=kind[1], dir=parent))
        try:
            return _lock(path)
        except (FileNotFoundError, BlockingIOError):
            # Why: another process has swept it before it was locked.
            continue
        except BaseException:
            path.rmdir()
            raise


def _lock(path: Path) -> tuple[Path, int]:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _held.add(handle)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.stat()
        except (FileNotFoundError, BlockingIOError):
            raise
        except OSError as error:
            if is_passing(error):
                raise
            _log.warning("directories cannot be locked here (%s): files of a killed process stay", error.strerror)
            path = path.rename(path.with_name(f"{path.name}-unlocked"))
        return path, handle
    except BaseException:
        release(handle)
        raise


def release(handle: int) -> None:
    """Give up a lock; a second call does nothing, nor does one in a forked child, whose parent keeps it."""
    if handle in _held:
        # Safety: in this order. The next handle with this number must not be closed in a forked child.
        _held.discard(handle)
        os.close(handle)


def sweep(parent: Path, kind: tuple[str, str]) -> None:
    """Remove the directories of one kind in ``parent`` that are this user's and that no living process has locked.

    Symbolic links are not followed, and nothing else is touched. What cannot be read or removed stays.
    """
    pattern = re.compile(f"{re.escape(kind[0])}[a-z0-9_]{{8}}{re.escape(kind[1])}")
    with suppress(OSError):
        for name in filter(pattern.fullmatch, os.listdir(parent)):
            with suppress(OSError):
                _remove_unlocked(parent / name)


def _remove_unlocked(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            if path.exists():
                _log.warning("parked KV: a directory of a process that has ended could not be removed")
    finally:
        os.close(handle)


def _forget_parent() -> None:
    # Why: a child that outlives its parent must not keep the parent's files from being swept.
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_forget_parent)
