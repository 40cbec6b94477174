"""Compares a door of this checkout with the same door of another one, in pairs that alternate.

    python benchmarks/door_pairs.py --base CHECKOUT --door asyncgen|langchain|bentoml|openai [--pairs 40]

Each checkout runs in a process of its own, by this interpreter and with the packages installed here, and answers the
64 requests of ``door_measuring`` on the demo model when it is told to; the other one waits meanwhile. The door is that
checkout's own benchmark of it. Prints the median of the ratios (time of the base by time of this checkout, so that more
than 1 is faster than the base) and its interval of 95 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from guest import pairs, summary
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
NUM_WARM = 3
CHILD = """
import asyncio, json, sys, time
from contextlib import ExitStack
from pathlib import Path

import pagedcore
from door_measuring import NUM_TOKENS, SETTINGS
from pagedcore import AsyncEngine, expose

root, name = sys.argv[1:]
assert Path(pagedcore.__file__).is_relative_to(root), f"{pagedcore.__file__} is not of {root}"
with ExitStack() as stack:
    if name == "asyncgen":
        from asyncgen_door import run_door
        generate = stack.enter_context(expose("async-generator", model="demo", **SETTINGS))
        once = lambda: asyncio.run(run_door(generate))
    elif name == "langchain":
        from langchain_door import run_door
        from pagedcore_langchain import ChatPagedCore
        engine = stack.enter_context(AsyncEngine.from_pretrained("demo", **SETTINGS))
        chat = ChatPagedCore.from_engine(engine, max_tokens=NUM_TOKENS, sampling={"ignore_eos": True})
        once = lambda: run_door(engine, chat.batch, time.thread_time)
    else:
        from importlib import import_module
        served = import_module(f"{name}_door").served
        once = stack.enter_context(served("demo")).run
    print("ready", flush=True)
    for _ in sys.stdin:
        run = once()
        print(json.dumps([run.wall_s, [str(answer) for answer in run.answers]]), flush=True)
"""


class Checkout:
    """A process that serves with the code of one checkout."""

    def __init__(self, root: Path, door: str) -> None:
        places = [str(root / folder) for folder in ("", "kernels", "adapters", "benchmarks")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(root), door], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment, cwd=root,
        )
        if self._read() != "ready":
            raise SystemExit(f"{root} did not start")
        for _ in range(NUM_WARM):
            self.run()

    def run(self) -> tuple[float, list[str]]:
        """Answer all requests once; return the seconds and the completions."""
        assert self._process.stdin is not None
        print("go", file=self._process.stdin, flush=True)
        wall_s, completions = json.loads(self._read())
        return wall_s, completions

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        """Let the process end by itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--door", choices=["asyncgen", "langchain", "bentoml", "openai"], required=True)
    parser.add_argument("--pairs", type=int, default=40)
    given = parser.parse_args()
    with ExitStack() as stack:
        base, own = (Checkout(root, given.door) for root in (given.base.resolve(), ROOT))
        for side in (base, own):
            stack.callback(side.close)
        completions = own.run()[1]
        progress = stack.enter_context(tqdm(total=2 * given.pairs, unit="run", disable=None))

        def seconds_of(side: Checkout) -> float:
            seconds, got = side.run()
            if got != completions:
                raise SystemExit("the two checkouts give different completions")
            progress.update()
            return seconds

        ratios = pairs(given.pairs, lambda: seconds_of(base), lambda: seconds_of(own))
    print(f"{given.door}: of the base: {summary(ratios)}")


if __name__ == "__main__":
    main()
