"""A process that was forked from one with engines: it is refused at once, takes nothing away, and may make its own."""

from __future__ import annotations

import json

from support.apart import Apart

SCRIPT = """
import asyncio, json, os, sys, threading, time
from pathlib import Path
from pagedcore import AsyncEngine, Engine, SamplingParams
from pagedcore.errors import PagedcoreError

PARAMS = SamplingParams(temperature=0.0, max_tokens=16)
LONG = "What is 2 + 3? " * 2000
SETTINGS = {"num_kv_blocks": 64}


def ask(engine):
    (output,) = engine.generate(["What is 2 + 3?"], PARAMS, show_progress=False)
    return output.outputs[0].text


def outcome(work):
    try:
        return repr(work())
    except PagedcoreError as error:
        return type(error).__name__ + (" advice" if "after the fork" in str(error) else "")


async def stream(engine):
    return [delta async for delta in engine.generate("What is 2 + 3?", PARAMS)]


def tries(engine, threaded, reader, session):
    return {
        "parents engine": lambda: ask(engine),
        "session": lambda: session.ask("And 4 + 4?"),
        "park": lambda: session.park("disk"),
        "submit": lambda: threaded.submit("What is 2 + 3?", PARAMS).result(),
        "long submit": lambda: threaded.submit(LONG, PARAMS).result(),
        "stream": lambda: asyncio.run(stream(threaded)),
        "generate_sync": lambda: list(threaded.generate_sync("What is 2 + 3?", PARAMS)),
        "stream that was open": lambda: list(reader),
        "stats": lambda: threaded.stats(),
        "close": lambda: (threaded.close(), engine.close()),
        "own engine": lambda: ask(Engine.from_pretrained("demo", **SETTINGS)),
    }


def main():
    engine = Engine.from_pretrained("demo", **SETTINGS)
    threaded = AsyncEngine.from_pretrained("demo", **SETTINGS)
    expected = ask(engine)
    session = engine.session(PARAMS)
    session.ask("What is 2 + 3?")
    session.park("disk")
    (file,) = engine.sessions.parking.directory.files
    reader = threaded.generate_sync("Tell me about yourself.", SamplingParams(max_tokens=200, ignore_eos=True))
    next(reader)
    own_end, childs_end = os.pipe()
    # An exit with finalizers, and one without.
    for leave in (sys.exit, os._exit):
        child = os.fork()
        if not child:
            found = {name: outcome(work) for name, work in tries(engine, threaded, reader, session).items()}
            os.write(childs_end, (json.dumps(found) + "\\n").encode())
            leave(0)
        assert os.waitpid(child, 0)[1] == 0
    os.close(childs_end)
    children = [json.loads(line) for line in os.fdopen(own_end)]
    reader.close()
    found = {
        "children": children,
        "expected": repr(expected), "file": file.exists(), "parent": repr(ask(engine)),
        "parents session": session.parked.tier,
        "parents future": threaded.submit("What is 2 + 3?", PARAMS).result(60).outputs[0].text,
    }
    threaded.close()
    engine.close()
    found["file at the end"] = file.exists() or file.parent.exists()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
"""


def test_a_forked_child_is_refused_and_harms_nothing(apart: Apart) -> None:
    """Calls that need the parent's engine thread or its parked files raise ``ForkedProcess`` with advice, instead of
    waiting for a thread that does not exist; closing takes nothing away. An engine of the child's own works, as does
    its copy of the parent's ``Engine``. The parent has its files and its engines."""
    found = json.loads(apart.run(SCRIPT).splitlines()[-1])
    expected, children = found.pop("expected"), found.pop("children")
    assert len(children) == 2
    assert found.pop("parent") == expected
    assert repr(found.pop("parents future")) == expected
    assert found == {"file": True, "file at the end": False, "parents session": "disk"}
    for child in children:
        assert {child.pop(name) for name in ("own engine", "parents engine")} == {expected}
        assert child.pop("close") == "(None, None)"
        assert set(child.values()) == {"ForkedProcess advice"}, child
