"""What the BentoML door costs: 64 event streams over loopback HTTP against a bare engine's step loop.

    python benchmarks/bentoml_door.py [--rounds 9] [--model DIRECTORY | --model-size 80m]

``bentoml serve`` runs in processes of its own, and so does its client, ``bentoml_client.py``; on a machine of two cores
both take from what the engine has. The bare engine is a second one in the server's process without observers, and it
steps on the thread of the first while that has nothing to do: from one process to the next the same engine's speed
differs by two per cent. Read ``door_measuring.py`` for how the sides are compared.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from door_measuring import WANTED, Run, model_of, parse, prompts, show, take_turns

SERVICE = """
import os
from functools import cache

import bentoml
from door_measuring import SETTINGS, prompts, run_bare

from pagedcore import Engine
from pagedcore_bentoml import PagedCoreRunner, create_service

MODEL = os.environ["DOOR_MODEL"]

@cache
def bare_engine():
    return Engine.from_pretrained(MODEL, **SETTINGS)

class Measured(PagedCoreRunner):
    @bentoml.api
    async def bare(self) -> dict:
        run = await self.engine.call(lambda _: run_bare(bare_engine(), prompts(), lambda answer: answer.token_ids))
        return {"answers": run.answers, "wall_s": run.wall_s, "cpu_s": run.cpu_s}

LLM = create_service(MODEL, runner=Measured, **SETTINGS)
"""


class Door:
    """A server that answers, and its client."""

    def __init__(self, server: psutil.Process, port: str, client: subprocess.Popen[str]) -> None:
        self._server = server
        self.port = port
        self._client = client

    def run_bare(self) -> Run:
        """Have the server's second engine answer, with nothing around it."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/bare", b"{}",
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            run = json.load(response)
        return Run([tuple(tokens) for tokens in run["answers"]], run["wall_s"], run["cpu_s"])

    def run(self) -> Run:
        """Have the client read every request's stream."""
        bodies = [self.body_of(prompt) for prompt in prompts()]
        before = self._server_cpu_s()
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        print(json.dumps(bodies), file=self._client.stdin, flush=True)
        wall_s, client_s, streams = json.loads(self._client.stdout.readline())
        used = {name: after - before[name] for name, after in self._server_cpu_s().items()}
        return Run([tuple(tokens) for tokens, _ in streams], wall_s, {**used, "client": client_s})

    def body_of(self, prompt: str) -> dict[str, Any]:
        """Write a request."""
        return {"prompt": prompt, "sampling": WANTED}

    def _server_cpu_s(self) -> dict[str, float]:
        """CPU seconds of the worker's event loop, and of all else: the engine's threads and BentoML's own processes."""
        processes = [self._server, *self._server.children(recursive=True)]
        total = sum(times.user + times.system for times in (process.cpu_times() for process in processes))
        worker = self.worker_of(processes)
        loop = next(thread for thread in worker.threads() if thread.id == worker.pid)
        loop_s = loop.user_time + loop.system_time
        return {"server's event loop": loop_s, "server's other threads": total - loop_s}


    def worker_of(self, processes: list[psutil.Process]) -> psutil.Process:
        """Return the process whose main thread runs the event loop."""
        # Why: not the one with most threads: with few for computing that is BentoML's supervisor.
        return next(one for one in processes if "_bentoml_impl.worker.service" in one.cmdline())


@contextmanager
def served(model: str, service: str = SERVICE, environment: dict[str, str] | None = None) -> Iterator[Door]:
    """Serve the model from a folder of its own until the block is left."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "service.py").write_text(service, encoding="utf-8")
        paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, **(environment or {}), "DOOR_MODEL": model, "BENTOML_HOME": folder,
               "BENTOML_DO_NOT_TRACK": "True", "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-m", "bentoml", "serve", "service:LLM", "--host", "127.0.0.1", "--port", port]
        log = Path(folder, "log")
        with (log.open("w", encoding="utf-8") as output,
              subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output) as server):
            try:
                wait_until_ready(server, f"http://127.0.0.1:{port}/readyz", log)
                with subprocess.Popen([sys.executable, str(Path(__file__).with_name("bentoml_client.py")), port],
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
                    yield Door(psutil.Process(server.pid), port, client)
            finally:
                server.terminate()


def wait_until_ready(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait until a page of the server is there."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(url):
                return
        except urllib.error.URLError:
            time.sleep(0.5)
    raise SystemExit(f"the server ended at its start:\n{log.read_text(encoding='utf-8')[-2000:]}")


def main() -> None:
    """Compare and print."""
    given, load = parse(__doc__), os.getloadavg()[0]
    with model_of(given) as model, served(model) as door:
        ways = {"bare engine": door.run_bare, "BentoML streams": door.run}
        show("BentoML", given, take_turns(ways, given.rounds), load)


if __name__ == "__main__":
    main()
