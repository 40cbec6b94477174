"""What the OpenAI door costs: 64 streams of text completions over loopback HTTP against a bare engine's step loop.

    python benchmarks/openai_door.py [--rounds 9] [--model DIRECTORY | --model-size 80m]

The app runs under the server and the settings of ``pagedcore serve``, in a process of its own, and so does its client,
``bentoml_client.py``. The bare engine is a second one in the server's process, as ``bentoml_door.py`` has it. Read
``door_measuring.py`` for how the sides are compared.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from bentoml_door import Door, wait_until_ready
from door_measuring import WANTED, model_of, parse, show, take_turns

SERVER = """
import sys
from functools import cache

import uvicorn
from door_measuring import SETTINGS, prompts, run_bare
from starlette.responses import JSONResponse
from starlette.routing import Route

from pagedcore import Engine
from pagedcore_openai import create
from pagedcore_openai.bounded_server import BoundedServer
from pagedcore_openai.connections import connections_within_handles

model, port = sys.argv[1:]
app = create(model, name="model", **SETTINGS)

@cache
def bare_engine():
    return Engine.from_pretrained(model, **SETTINGS)

async def bare(request):
    engine = app.service.models["model"].engine
    run = await engine.call(lambda _: run_bare(bare_engine(), prompts(), lambda answer: answer.token_ids))
    return JSONResponse({"answers": run.answers, "wall_s": run.wall_s, "cpu_s": run.cpu_s})

app.router.routes.append(Route("/bare", bare, methods=["POST"]))
config = uvicorn.Config(app, host="127.0.0.1", port=int(port), log_level="warning", access_log=False,
                        server_header=False, ws="none")
BoundedServer(config, lambda: None, connections_within_handles()).run([config.bind_socket()])
"""


class OpenAIDoor(Door):
    """A server that answers under ``/v1/completions``, and its client."""

    def body_of(self, prompt: str) -> dict[str, Any]:
        """Write a request."""
        return {"prompt": prompt, "temperature": 0, "stream": True, "return_token_ids": True, **WANTED}

    def worker_of(self, processes: list[psutil.Process]) -> psutil.Process:
        """Return the only process."""
        return processes[0]


@contextmanager
def served(model: str) -> Iterator[OpenAIDoor]:
    """Serve the model until the block is left."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    here = Path(__file__).parent
    paths = os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": paths, "DOOR_PATH": "/v1/completions"}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with (log.open("w", encoding="utf-8") as output,
              subprocess.Popen([sys.executable, "-c", SERVER, model, port], env=env, stdout=output, stderr=output,
                               ) as server):
            try:
                wait_until_ready(server, f"http://127.0.0.1:{port}/health", log)
                with subprocess.Popen([sys.executable, str(here / "bentoml_client.py"), port], env=env,
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
                    yield OpenAIDoor(psutil.Process(server.pid), port, client)
            finally:
                server.terminate()


def main() -> None:
    """Compare and print."""
    given, load = parse(__doc__), os.getloadavg()[0]
    with model_of(given) as model, served(model) as door:
        ways = {"bare engine": door.run_bare, "OpenAI streams": door.run}
        show("OpenAI", given, take_turns(ways, given.rounds), load)


if __name__ == "__main__":
    main()
