"""Runs ``bentoml`` as a user does, in processes of its own that are gone when a test is over."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from architecture.sources import PACKAGE_PARENTS

START_LIMIT_S = 240.0


@dataclass(frozen=True)
class Served:
    """A server that answers."""

    url: str
    log: Path
    pid: int

    def tell_to_end(self) -> None:
        """Do what a supervisor does first."""
        os.kill(self.pid, signal.SIGTERM)

    def errors(self) -> list[str]:
        """Lines of the log that tell of an error."""
        return re.findall(r"^.*(?:\[ERROR\]|Traceback).*$", self.log.read_text(encoding="utf-8"), flags=re.MULTILINE)


def environment() -> dict[str, str]:
    """What the processes get: this checkout and what its tests share, no telemetry."""
    paths = os.pathsep.join(map(str, [*PACKAGE_PARENTS, Path(__file__).parents[2]]))
    return {**os.environ, "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore", "BENTOML_DO_NOT_TRACK": "True"}


def free_port() -> int:
    """A port that the system has just handed out and taken back."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def bentoml_serve(
    target: str, folder: Path, python: str = sys.executable, env: dict[str, str] | None = None
) -> Iterator[Served]:
    """Serve ``target`` from ``folder`` until the block is left, then end it as a supervisor would."""
    # Why again: another process may take the port in between, and BentoML chooses none by itself.
    for _ in range(4):
        process, served = _start(target, folder, python, env or environment())
        try:
            if _wait_until_ready(process, served):
                yield served
                return
        finally:
            _end(process)
            served.log.unlink()
    raise AssertionError("no port stayed free for the server")


def _start(target: str, folder: Path, python: str, env: dict[str, str]) -> tuple[subprocess.Popen[bytes], Served]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    with tempfile.NamedTemporaryFile("w", suffix=".log", delete=False) as log:
        command = [python, "-m", "bentoml", "serve", target, "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
    return process, Served(url, Path(log.name), process.pid)


def _wait_until_ready(process: subprocess.Popen[bytes], served: Served) -> bool:
    """Return whether it answers, ``False`` if its port was taken."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{served.url}/readyz", timeout=5.0).status_code == 200:
                return True
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    said = served.log.read_text(encoding="utf-8")
    if "Could not bind" in said:
        return False
    raise AssertionError(f"the server did not become ready:\n{said[-4000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    # Why: the workers have process groups of their own, so they are looked for before their parent is gone.
    workers = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.send_signal(signal.SIGTERM)
    _, left = psutil.wait_procs([*workers, psutil.Process(process.pid)] if workers else [], timeout=10.0)
    for worker in left:
        worker.kill()
    process.wait()
