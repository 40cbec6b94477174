"""The child process that tries a grammar: what it has, what ends it, and what holds where there is none."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llguidance
import pytest

from architecture.sources import PACKAGE_PARENTS
from pagedcore.config import limits
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.errors import GrammarsBusy, InvalidGrammar
from pagedcore.structured import grammars as compiling
from pagedcore.structured import trial, trial_child
from pagedcore.structured.grammar_source import source_of
from pagedcore.structured.grammars import Grammars
from pagedcore.structured.trial import interpreter, try_grammar
from pagedcore.structured_output import StructuredOutput
from pagedcore.tokenizer.tokenizer import HFTokenizer

LONG = r'start: A <|im_end|> <[2000]>' + "\n" + r'A: "b" | /((a*\w(\w|d)\s){3,}){1000}/ & /c+a(\sL\pL)+/'
"""Short, and for minutes and gigabytes: whether two expressions match the same text."""
ENDLESS = 2**40
"""Bytes: so many that only time ends a trial."""
MIDDLING = {"regex": "a?" * 400}
"""Not small, and compiled in some milliseconds."""
LARGE = {"grammars": [{"lark_grammar": "start: /" + "a?" * 2000 + "/"}]}
"""Larger than a grammar may be; it takes about 10 MiB."""


def request(grammar: Any, num_bytes: int = limits.MAX_TRIAL_BYTES) -> dict[str, Any]:
    """What the child is asked."""
    return {"grammar": json.dumps(grammar), "limits": compiling._LIMITS, "vocab_size": 2048,
            "special": {2: "<|im_end|>"}, "num_bytes": num_bytes, "stack_bytes": 2**28}


def lark(text: str) -> dict[str, Any]:
    return {"grammars": [{"lark_grammar": text}]}


@pytest.fixture
def grammars(monkeypatch: pytest.MonkeyPatch) -> Grammars:
    """Those of the demo model; a busy machine has time enough for a trial."""
    monkeypatch.setattr(limits, "MAX_COMPILING_S", 120.0)
    return Grammars(HFTokenizer.from_directory(DEMO_MODEL_DIR), 2048, frozenset({2}))


class Begins(subprocess.Popen[bytes]):
    """A child whose time begins when it has begun: how long that takes is the machine's."""

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[bytes, bytes]:
        """Send the input, wait for the first output, and do the rest as ever."""
        if input is not None:
            assert self.stdin is not None
            self.stdin.write(input)
            self.stdin.flush()
            select.select([self.stdout], [], [], 60)
        return super().communicate(None, timeout)


def children() -> set[int]:
    """The processes that this one has started and not waited for."""
    while True:
        # Why: a thread may end meanwhile, and its children are another's then.
        with contextlib.suppress(OSError):
            return {int(pid) for task in Path("/proc/self/task").iterdir()
                    for pid in (task / "children").read_text().split()}


def until(holds: Callable[[], Any]) -> Any:
    """Wait until a function returns something true, and return it."""
    end = time.monotonic() + 30
    while not (found := holds()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return found


def test_what_ends_in_time_and_memory_passes() -> None:
    """What is compiled passes, and so does what the library refuses: it will be refused again."""
    for text in ("start: /a?b?/", "start: (", "start: <|im_end|> <[2047]>"):
        assert try_grammar(request(lark(text)), 30) is None
    assert try_grammar(request(LARGE), 30) is None


def test_what_takes_too_much_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what it takes too much of."""
    assert try_grammar(request(LARGE, 2**22), 60) == "compiling takes too much memory"
    monkeypatch.setattr(trial.subprocess, "Popen", Begins)
    assert try_grammar(request(lark(LONG), ENDLESS), 0.5) == "compiling takes over 0.5 s"


def test_a_grammar_that_is_not_small_is_tried_and_then_compiled(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly once, and one that is small not at all; what is too much in the child is never compiled here."""
    tried, before = list[Any](), children()

    def noted(*args: Any) -> str | None:
        tried.append(args)
        return try_grammar(*args)

    monkeypatch.setattr(compiling, "try_grammar", noted)
    for small in ({"regex": "(a?b?c?)+"}, {"json_object": True}, {"choice": ["a", "b"]}):
        grammars.compile(StructuredOutput(**small))
    assert not tried
    assert grammars.compile(StructuredOutput(**MIDDLING)) is not None
    assert len(tried) == 1
    monkeypatch.setattr(limits, "MAX_TRIAL_BYTES", 2**22)
    with pytest.raises(InvalidGrammar, match=r"lark: .* compiling takes too much memory"):
        grammars.compile(StructuredOutput(lark=LONG))
    assert len(tried) == 2
    assert children() <= before


def _handles(process: Path) -> set[str]:
    """What the file descriptors of a process of ``/proc`` stand for."""
    found = set()
    for one in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(one))
    return found


def test_the_child_has_the_library_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither this process's handles, not even a listening socket that children inherit, nor its environment, its
    directory, its terminal, torch, or the package."""
    monkeypatch.setenv("PYTHONSTARTUP", "/secret")
    before = children()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.set_inheritable(True)

        def attempt() -> None:
            # Why: it is killed below, at whatever it is then.
            with contextlib.suppress(ChildProcessError):
                try_grammar(request(lark(LONG), ENDLESS), 120)

        thread = threading.Thread(target=attempt)
        thread.start()
        process = Path("/proc", str(until(lambda: children() - before).pop()))
        until(lambda: "trial_child" in (process / "cmdline").read_text())
        maps = until(lambda: text if "llguidance" in (text := (process / "maps").read_text()) else "")
        # The loader closes the library's file only after it has mapped it, and Python one of a module after reading it.
        kinds = {"pipe", "/dev/null", "anon_inode"}
        until(lambda: {one.partition(":")[0] for one in _handles(process)} <= kinds)
        environment = (process / "environ").read_text().split("\0")
        assert {one.partition("=")[0] for one in environment} <= {"MALLOC_ARENA_MAX", "LD_LIBRARY_PATH", "LC_CTYPE", ""}
        assert os.readlink(process / "cwd") == "/"
        # Why not all names of a path: the checkout may be in a folder of any name.
        installed = {line.partition("site-packages/")[2].partition("/")[0] for line in maps.splitlines()}
        assert "llguidance" in installed
        assert not {"torch", "numpy", "pagedcore"} & installed
        assert os.getsid(int(process.name)) == int(process.name)
        os.kill(int(process.name), signal.SIGKILL)
        thread.join()
    assert not process.exists()


_HOST = r"""
import json, os, sys, threading, time
from pathlib import Path
from pagedcore.structured.trial import try_grammar
asked, pids = json.loads(sys.stdin.readline()), []
threading.Thread(target=try_grammar, args=(asked, 600), daemon=True).start()
while not pids:
    try:
        pids = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    except OSError:  # a thread has ended meanwhile
        pass
child = Path("/proc", pids[0])
def has_begun():
    # A process that is about to become another program has no command line at all.
    return "\0-I\0" in (child / "cmdline").read_text() and "llguidance" in (child / "maps").read_text()
while sys.argv[1] != "at once" and not has_begun():
    time.sleep(0.005)
sibling = os.fork() if sys.argv[1] in ("killed", "at once") else 1
if not sibling:
    time.sleep(600)
print(*pids, sibling, flush=True)
if sibling != 1:
    os.kill(os.getpid(), 9)
if sys.argv[1] == "replaced":
    os.execv("/bin/cat", ["cat"])
"""


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("how", ["at once", "killed", "exits", "replaced"])
def test_the_child_ends_with_its_parent(how: str) -> None:
    """Killed while another child has its pipes, at its end while the grammar is tried, or become another program."""
    environment = {"PYTHONPATH": ":".join(map(str, PACKAGE_PARENTS)), "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen([sys.executable, "-c", _HOST, how], env=environment, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as host:
        assert host.stdin is not None
        assert host.stdout is not None
        print(json.dumps(request(lark(LONG), ENDLESS)), file=host.stdin, flush=True)
        child, sibling = map(int, host.stdout.readline().split())
        try:
            until(lambda: has_ended(child))
        finally:
            if sibling != 1:
                os.kill(sibling, signal.SIGKILL)
            host.kill()


def test_the_child_ends_when_nobody_reads_what_it_says() -> None:
    """Also where its parent lives on: a host that was restarted in place, say."""
    library = str(Path(llguidance.__file__).parents[1])
    command = [sys.executable, "-I", "-S", trial_child.__file__, str(os.getpid()), library]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(request(lark(LONG), ENDLESS)).encode() + b"\n")
        child.stdin.flush()
        assert child.stdout.readline() == trial_child.READY
        child.stdout.close()
        try:
            assert child.wait(30) == 1
        finally:
            child.kill()


def test_a_host_that_takes_every_exit_status_away_learns_the_outcome() -> None:
    """One that ignores SIGCHLD: the kernel keeps no status then."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert try_grammar(request(lark("start: /a/")), 30) is None
        assert try_grammar(request(LARGE, 2**22), 30) == "compiling takes too much memory"
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A program with Python in it, whose installation has no interpreter that could be started."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\ntouch " + str(tmp_path / "started"))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(sys, "base_exec_prefix", str(tmp_path))
    yield tmp_path
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("name", ["python", "python3", "python3.11", "python3.13t"])
def test_only_what_is_called_python_is_started(embedded: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host runs under another name, or was frozen into, is never started; an installation's own Python is."""
    assert interpreter() is None
    monkeypatch.setattr(sys, "executable", None)
    assert interpreter() is None
    own = embedded / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    own.parent.mkdir()
    (embedded / "program").rename(own)
    assert interpreter() == str(own)
    monkeypatch.setattr(sys, "executable", str(own.rename(own.with_name(name))))
    assert interpreter() == sys.executable
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert interpreter() is None


@pytest.mark.parametrize("program", [None, "exit 1", "echo it is not Python", "exec /bin/false"])
def test_without_a_child_only_small_grammars_are_compiled(
    grammars: Grammars, embedded: Path, program: str | None
) -> None:
    """The refusal says so, with what was given and the stricter limit; small ones are compiled as ever."""
    if program:
        (embedded / "bin").mkdir()
        path = embedded / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
        path.write_text(f"#!/bin/sh\n{program}\n")
        path.chmod(0o755)
    size, limit = source_of(StructuredOutput(**MIDDLING)).size, limits.MAX_UNTRIED_GRAMMAR_SIZE
    said = f"it expands to {size}, allowed is at most {limit} where no child process can be started"
    with pytest.raises(InvalidGrammar, match=said):
        grammars.compile(StructuredOutput(**MIDDLING))
    assert grammars.compile(StructuredOutput(regex="a?b?")) is not None


def test_a_child_that_does_not_begin_in_time_is_no_fault_of_the_grammar(
    embedded: Path, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is busy: the caller may try again."""
    monkeypatch.setattr(compiling, "try_grammar", lambda asked, _: try_grammar(asked, 0.2))
    (embedded / "bin").mkdir()
    path = embedded / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    path.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    path.chmod(0o755)
    with pytest.raises(GrammarsBusy, match="no child process started in time"):
        grammars.compile(StructuredOutput(**MIDDLING))


def test_a_system_that_starts_no_process_is_one_without_a_child(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on processes, or a sandbox: as above."""

    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError("no process")

    monkeypatch.setattr(trial.subprocess, "Popen", refuse)
    with pytest.raises(InvalidGrammar, match="where no child process can be started"):
        grammars.compile(StructuredOutput(**MIDDLING))
