"""What a killed process has left is swept by the next one; what a living one has is left alone, whoever looks."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from pagedcore.sessions import locked_directory
from pagedcore.sessions.kv_file import KVDirectory, replace_file
from pagedcore.sessions.locked_directory import PARKED, PART, make_locked, release, sweep
from support.doubles import raising
from support.toy_sessions import ask, make

CHILD = """
import os, sys, threading, time
from pathlib import Path
from support.toy_sessions import PARAMS, ask, make
kv_dir, path = sys.argv[1], Path(sys.argv[2])
engine, other = make(disk_kv_dir=kv_dir), make()
sessions = [one.session(PARAMS) for one in (engine, engine, other)]
for session in sessions:
    ask(session, 1, 2, 3)
sessions[0].park("disk")
sessions[2].park("disk")
sessions[0].export(path)
stopped = threading.Semaphore(0)

def stop(handle):
    stopped.release()
    time.sleep(600)

os.fsync = stop
operations = sessions[1].park_operation("disk", None), sessions[1].export_operation(path, True)
for operation in operations:
    threading.Thread(target=next(operation)).start()
    stopped.acquire()
if not os.fork():
    time.sleep(600)
print("stopped", flush=True)
time.sleep(600)
"""


@contextmanager
def process(kv_dir: Path, path: Path, temporary: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with a parked and an exported session, which parks and exports others, and has forked a child."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(kv_dir), str(path)], stdout=subprocess.PIPE, text=True, process_group=0,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(temporary)},
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "stopped\n"
        yield child
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def test_a_killed_process_leaves_nothing_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it parks and exports, and while a child that it forked lives on: as long as the process lives other
    engines leave its files alone, and those that start after that remove them all, in ``disk_kv_dir``, beside exported
    files and among the temporary files. An exported file stays as it was, and what is not ours stays too."""
    kv_dir, temporary, path = tmp_path / "kv", tmp_path / "temporary", tmp_path / "exports" / "chat.json"
    for folder in (kv_dir, temporary, path.parent):
        folder.mkdir()
    (kv_dir / "notes").write_text("mine")
    (path.parent / ".pagedcore-notes.part").write_text("mine")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with process(kv_dir, path, temporary) as child:
        exported, left = path.read_bytes(), sorted(tmp_path.rglob("*"))
        assert len([file for file in left if file.match("pagedcore-parked-*/*.kv.safetensors")]) == 2
        assert len([file for file in left if file.match("pagedcore-parked-*/.pagedcore-*.part/file")]) == 1
        assert len([file for file in left if file.match("exports/.pagedcore-*.part/file")]) == 1
        make(disk_kv_dir=str(kv_dir)).import_session(path)
        make()
        assert sorted(tmp_path.rglob("*")) == left
        child.send_signal(signal.SIGKILL)
        child.wait()
        session = make(disk_kv_dir=str(kv_dir)).import_session(path)
        make()
        assert [file.name for file in kv_dir.iterdir()] == ["notes"]
        assert list(temporary.iterdir()) == []
        assert {file.name for file in path.parent.iterdir()} == {
            "chat.json", "chat.json.kv.safetensors", ".pagedcore-notes.part"
        }
        assert path.read_bytes() == exported
        ask(session, 4)


def unlocked(parent: Path, kind: tuple[str, str] = PARKED, name: str = "abcdefgh") -> Path:
    """What a killed process has left."""
    path = parent / f"{kind[0]}{name}{kind[1]}"
    path.mkdir(mode=0o700)
    (path / "file").write_text("a conversation")
    return path


def test_two_engines_of_one_process(tmp_path: Path) -> None:
    """Each engine has a directory of its own, which the start and the end of the other leave alone."""
    engines = [KVDirectory(str(tmp_path)) for _ in range(2)]
    files = [engine.name_file() for engine in engines]
    for file in files:
        file.write_text("KV")
    KVDirectory(str(tmp_path))
    assert all(file.exists() for file in files)
    engines[0].close()
    assert [file.exists() for file in files] == [False, True]
    engines[1].close()
    assert list(tmp_path.iterdir()) == []


def test_only_ours_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links are not followed; files, other names, open directories and those of other users stay."""
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    (outside / "file").write_text("mine")
    parent = tmp_path / "kv"
    parent.mkdir()
    (parent / "pagedcore-parked-linklink").symlink_to(outside)
    (parent / "pagedcore-parked-filefile").write_text("mine")
    for name in ("short", "toolongname", "ABCDEFGH", "abc.efgh"):
        unlocked(parent, name=name)
    unlocked(parent, name="readable").chmod(0o755)
    (unlocked(parent, name="linkedto") / "link").symlink_to(outside)
    unlocked(parent, PART)
    before = len(list(parent.iterdir()))
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        sweep(parent, PARKED)
    assert len(list(parent.iterdir())) == before
    sweep(parent, PARKED)
    assert len(list(parent.iterdir())) == before - 1
    assert (outside / "file").read_text() == "mine"
    sweep(tmp_path / "missing", PARKED)
    sweep(outside / "file", PARKED)


@pytest.mark.parametrize("error", [OSError(95, "Operation not supported"), OSError(37, "No locks available")])
def test_without_locks_nothing_is_swept(
    error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the file system has no locks, the log says so once an engine parks; nothing is swept there, and nothing
    that was made there is swept by a process that has locks again."""

    def refuse(*_: Any) -> None:
        raise error

    left = unlocked(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        directory = KVDirectory(str(tmp_path))
        file = directory.name_file()
        file.write_text("KV")
        assert left.exists()
    assert error.strerror in caplog.text
    other = KVDirectory(str(tmp_path))
    assert (file.exists(), left.exists()) == (True, False)
    directory.close()
    other.close()
    assert list(tmp_path.iterdir()) == []


def test_a_lack_of_memory_is_no_lack_of_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that could not be locked at one moment is made at the next, with a lock."""
    directory = KVDirectory(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", raising(OSError(errno.ENOMEM, "Cannot allocate memory")))
        with pytest.raises(OSError, match="Cannot allocate"):
            directory.name_file()
    assert list(tmp_path.iterdir()) == []
    assert "unlocked" not in str(directory.name_file())
    directory.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """What cannot be removed stays, and the engine starts."""
    unlocked(tmp_path)
    tmp_path.chmod(0o500)
    KVDirectory(str(tmp_path))
    tmp_path.chmod(0o700)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("before", ["os.open", "fcntl.flock", "pathlib.Path.stat"])
@pytest.mark.parametrize("is_ended", [True, False])
def test_a_sweep_at_any_moment_of_a_start(
    before: str, is_ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep by another engine before any line of a start, ended or under way, takes the new directory or leaves it;
    the engine that starts has one in the end that is there and that no sweep takes."""
    owner, _, name = before.rpartition(".")
    target = Path if owner == "pathlib.Path" else {"os": os, "fcntl": fcntl}[owner]
    real, held = getattr(target, name), list[int]()

    def first(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(target, name, real)
        if is_ended:
            sweep(tmp_path, PARKED)
        else:
            with_lock = os.open(next(tmp_path.iterdir()), os.O_RDONLY)
            with suppress(BlockingIOError):
                fcntl.flock(with_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held.append(with_lock)
        return real(*arguments, **named)

    monkeypatch.setattr(target, name, first)
    path, lock = make_locked(tmp_path, PARKED)
    assert path.is_dir()
    sweep(tmp_path, PARKED)
    assert path.is_dir()
    release(lock)
    release(lock)
    for handle in held:
        os.close(handle)
    sweep(tmp_path, PARKED)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "error"), [("flock", KeyboardInterrupt()), ("rename", OSError(1, "Not permitted"))])
def test_a_start_that_fails_leaves_no_handle(
    name: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt while it is locked, or a file system with neither locks nor renaming: no directory and no handle."""
    def fail(*_: Any) -> None:
        raise error if name == "flock" else OSError(37, "No locks available")

    def refuse(*_: Any) -> None:
        raise error

    held = set(locked_directory._held)
    monkeypatch.setattr(fcntl, "flock", fail)
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(type(error)):
        make_locked(tmp_path, PARKED)
    assert list(tmp_path.iterdir()) == []
    assert locked_directory._held == held


def test_starts_and_sweeps_on_many_threads(tmp_path: Path) -> None:
    """Eight engines start, park and end again and again while others sweep: no file is lost, and none is left."""
    lost, held = list[Path](), set(locked_directory._held)

    def live() -> None:
        for _ in range(40):
            directory = KVDirectory(str(tmp_path))
            file = directory.name_file()
            replace_file(file, lambda temporary: temporary.write_text("KV"))
            sweep(tmp_path, PARKED)
            if file.read_text() != "KV":
                lost.append(file)
            directory.close()

    threads = [threading.Thread(target=live) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not lost
    assert list(tmp_path.iterdir()) == []
    assert locked_directory._held <= held


def test_a_directory_that_was_removed_is_made_again(tmp_path: Path) -> None:
    """A cleaner of temporary files may take an engine's directory; the next file is in a new one."""
    held = set(locked_directory._held)
    directory = KVDirectory(str(tmp_path / "kv"))
    directory.name_file().parent.rmdir()
    (tmp_path / "kv").rmdir()
    assert directory.name_file().parent.is_dir()
    directory.close()
    assert list((tmp_path / "kv").iterdir()) == []
    assert locked_directory._held <= held
