"""Programs in processes of their own, without the seconds that their imports take: each is a fork of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

_NURSERY = """
import gc, json, os, sys
from kernels.runtime import kernels_for_tests, test_team
from pagedcore_kernels.cpu.runtime import team_loop
from support import engine_builders, toy_sessions
compiled = [kernels_for_tests.count_kernel(), kernels_for_tests.hold_kernel(), team_loop.helper_loop(),
            team_loop.run_loop(), team_loop.wake_loop(), team_loop.run_all_loop()]
gc.freeze()  # five full collections are the longest part of a process's end
for line in sys.stdin:
    words, own = json.loads(line), os.fork()
    if own == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in enumerate(words[:2], start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(own, 0)[1]), flush=True)
else:
    os._exit(0)
sys.argv[1:] = words[3:]
exec(compile(words[2], "<program>", "exec"))
"""
"""Runs each program that it reads in a fork of itself, which has imported and compiled what takes seconds, has no
threads, and ends as any process does."""


class Apart:
    """Where programs run that say how processes end, that may crash, or that fork.

    Not for programs that need another environment, or that tell what they import.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nursery = subprocess.Popen(
            [sys.executable, "-c", _NURSERY], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )

    def run(self, code: str, *words: str) -> str:
        """Run a program, which has to end well and to say nothing on stderr; return its stdout."""
        status, out, err = self.outcome(code, *words)
        assert (status, err) == (0, ""), f"status {status} after {out[-1000:]}: {err}"
        return out

    def outcome(self, code: str, *words: str) -> tuple[int, str, str]:
        """Return exit status (the negative number of a signal), stdout and stderr of a program."""
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        paths = [self._folder / name for name in ("out", "err")]
        for path in paths:
            path.unlink(missing_ok=True)
        self._nursery.stdin.write(json.dumps([*map(str, paths), code, *words]) + "\n")
        self._nursery.stdin.flush()
        status = int(self._nursery.stdout.readline())
        out, err = (path.read_text() for path in paths)
        return status, out, err

    def close(self) -> None:
        """End."""
        self._nursery.communicate()
