"""What the BentoML door costs: 64 event streams over loopback HTTP against the bare engine's step loop.

    python benchmarks/bentoml_door.py [--rounds 9] [--model DIRECTORY | --model-size 80m]

``bentoml serve`` runs in processes of its own, and so does its client, ``bentoml_client.py``; on a machine of two cores
both take from what the engine has. Read ``door_measuring.py`` for how the sides are compared.
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

import psutil
from door_measuring import SETTINGS, WANTED, Run, model_of, parse, prompts, run_bare, show, take_turns

from pagedcore import Engine

SERVICE = """
import json, os
from pagedcore_bentoml import create_service

LLM = create_service(os.environ["DOOR_MODEL"], **json.loads(os.environ["DOOR_SETTINGS"]))
"""


class Door:
    """A server that answers, and its client."""

    def __init__(self, server: psutil.Process, client: subprocess.Popen[str]) -> None:
        self._server = server
        self._client = client

    def run(self) -> Run:
        """Have the client read every request's stream."""
        bodies = [{"prompt": prompt, "sampling": WANTED} for prompt in prompts()]
        before = self._server_cpu_s()
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        print(json.dumps(bodies), file=self._client.stdin, flush=True)
        wall_s, client_s, streams = json.loads(self._client.stdout.readline())
        used = {name: after - before[name] for name, after in self._server_cpu_s().items()}
        return Run([tuple(tokens) for tokens, _ in streams], wall_s, {**used, "client": client_s})

    def _server_cpu_s(self) -> dict[str, float]:
        """CPU seconds of the worker's event loop, and of all else: the engine's threads and BentoML's own processes."""
        processes = [self._server, *self._server.children(recursive=True)]
        total = sum(times.user + times.system for times in (process.cpu_times() for process in processes))
        # Why: not the one with most threads: with few for computing that is BentoML's supervisor.
        worker = next(one for one in processes if "_bentoml_impl.worker.service" in one.cmdline())
        loop = next(thread for thread in worker.threads() if thread.id == worker.pid)
        loop_s = loop.user_time + loop.system_time
        return {"server's event loop": loop_s, "server's other threads": total - loop_s}


@contextmanager
def served(model: str) -> Iterator[Door]:
    """Serve the model from a folder of its own until the block is left."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "service.py").write_text(SERVICE, encoding="utf-8")
        env = {**os.environ, "DOOR_MODEL": model, "DOOR_SETTINGS": json.dumps(SETTINGS), "BENTOML_HOME": folder,
               "BENTOML_DO_NOT_TRACK": "True", "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-m", "bentoml", "serve", "service:LLM", "--host", "127.0.0.1", "--port", port]
        log = Path(folder, "log")
        with (log.open("w", encoding="utf-8") as output,
              subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output) as server):
            try:
                _wait_until_ready(server, port, log)
                with subprocess.Popen([sys.executable, str(Path(__file__).with_name("bentoml_client.py")), port],
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
                    yield Door(psutil.Process(server.pid), client)
            finally:
                server.terminate()


def _wait_until_ready(server: subprocess.Popen[bytes], port: str, log: Path) -> None:
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz"):
                return
        except urllib.error.URLError:
            time.sleep(0.5)
    raise SystemExit(f"the server ended at its start:\n{log.read_text(encoding='utf-8')[-2000:]}")


def main() -> None:
    """Compare and print."""
    given, load = parse(__doc__), os.getloadavg()[0]
    with model_of(given) as model, Engine.from_pretrained(model, **SETTINGS) as engine, served(model) as door:
        ways = {"bare engine": lambda: run_bare(engine, prompts(), lambda answer: answer.token_ids),
                "BentoML streams": door.run}
        show("BentoML", given, take_turns(ways, given.rounds), load)


if __name__ == "__main__":
    main()
