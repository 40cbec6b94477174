"""How clients of others are run against the door, in environments of their own, and what they send is recorded."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from adapters.openai.loopback import serving
from architecture.sources import ROOT
from pagedcore import AsyncEngine
from pagedcore_openai import ApiKeys, openai_app

KEY = "a-key-of-thirty-two-characters!!"
RECORDED = Path(__file__).parent / "recorded"
CLIENTS = ROOT / "tests" / "interop"


class Recorder:
    """An ASGI app around the door that notes what is posted to it."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.seen: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Note the body and pass it on."""
        body = b""

        async def noting() -> Any:
            nonlocal body
            message = await receive()
            body += message.get("body", b"")
            if message["type"] == "http.request" and not message.get("more_body") and body:
                call = {"path": scope["path"], "body": json.loads(body)}
                if all(_without_limit(call) != _without_limit(one) for one in self.seen):
                    self.seen.append(call)
            return message

        await self.app(scope, noting, send)


def _without_limit(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call without its number of tokens, in which one that is to be cut off differs from others."""
    limits = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    return {**call, "body": {name: value for name, value in call["body"].items() if name not in limits}}


def run_client(name: str, engine: AsyncEngine, *words: str) -> None:
    """Run a client's script in its environment against the door, and record what it sends if asked to.

    ``GET /v1/models`` is answered when the engine is idle, so that a client can wait for it.
    """
    command = command_of(name)
    recorder = Recorder(WhenIdle(openai_app(engine, name="demo", api_keys=ApiKeys([KEY])), engine))
    with serving(recorder) as url:
        environment = {"PATH": os.environ.get("PATH", ""), "HOME": words[-1], "OPENAI_API_KEY": KEY, "NO_PROXY": "*",
                       "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, f"{url}/v1", *words], env=environment, check=True, timeout=900)
    if os.environ.get("PAGEDCORE_RECORD"):
        seen = sorted(recorder.seen, key=lambda call: (call["path"], json.dumps(call)))
        (RECORDED / f"{name}.json").write_text("[\n" + ",\n".join(map(json.dumps, seen)) + "\n]\n", "utf-8")


def command_of(name: str) -> list[str | Path]:
    """Return what runs a client's script: its Python, or node where the client is a folder."""
    home = ROOT / "build" / f"interop-{name}"
    if (CLIENTS / name).is_dir():
        assert (home / "node_modules").is_dir(), f"make interop-{name} makes the environment"
        # Why a copy: node looks for packages beside the script.
        return ["node", shutil.copy(CLIENTS / name / "client.mjs", home)]
    assert (home / "bin" / "python").is_file(), f"make interop-{name} makes the environment"
    return [home / "bin" / "python", CLIENTS / f"{name.replace('-', '_')}_client.py"]


class WhenIdle:
    """An ASGI app around the door that answers ``GET /v1/models`` when no request is in the engine."""

    def __init__(self, app: Any, engine: AsyncEngine) -> None:
        self.app = app
        self.engine = engine

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Wait, and pass the call on."""
        if scope.get("path") == "/v1/models":
            async with asyncio.timeout(30.0):
                while (stats := self.engine.stats()).num_running + stats.num_waiting:
                    await asyncio.sleep(0.01)
        await self.app(scope, receive, send)


def told_by(name: str, engine: AsyncEngine, folder: Path) -> Any:
    """Run a client; return what its script wrote of its results."""
    run_client(name, engine, KEY, str(folder / "results.json"))
    return json.loads((folder / "results.json").read_text("utf-8"))
