"""What watches an engine stands above it: a plain engine imports none of it, and says by name where it asks for it."""

from __future__ import annotations

import ast
import subprocess
import sys

from architecture.rooms import STOREYS, room_of
from architecture.sources import ROOT, SOURCES

DELEGATES = {
    "pagedcore.engine.builder": {"pagedcore.analysis.diagnosis.shadow", "pagedcore.analysis.quotes.promises"},
    "pagedcore.engine.engine": {
        "pagedcore.analysis.diagnosis.explanation", "pagedcore.analysis.quotes.quoting",
        "pagedcore.analysis.recorder.dumps",
    },
    "pagedcore.serving.async_engine": {"pagedcore.analysis.quotes.async_quoting"},
}
"""The modules below the analysis storey that call up into it, and what they name. It may only shrink."""


def test_calls_up_are_declared() -> None:
    """A module below names one of analysis as a text only where the list says so."""
    above = {*STOREYS["analysis"], *STOREYS["tools"]}
    found: dict[str, set[str]] = {}
    for source in SOURCES:
        room = room_of(source.module)
        if room is None or room in above:
            continue
        names = {node.value for node in ast.walk(source.tree) if isinstance(node, ast.Constant)
                 and isinstance(node.value, str) and node.value.startswith("pagedcore.") and " " not in node.value}
        if up := {name for name in names if room_of(name) in above}:
            found[source.module] = up
    assert found == DELEGATES


def test_a_plain_engine_imports_nothing_of_analysis() -> None:
    """It is built, completes, counts and is closed, on its own thread too, without a module of that storey; the first
    quote brings the first."""
    code = """
import asyncio, sys
from pagedcore import AsyncEngine, Engine, SamplingParams
from support.doubles import ToyBackend
def found(): return sum(name.startswith("pagedcore.analysis") for name in sys.modules)
async def main():
    async with AsyncEngine.from_pretrained(ToyBackend(), num_kv_blocks=8) as engine:
        await engine.complete([1, 2], SamplingParams(max_tokens=3))
        engine.stats(); engine.health()
asyncio.run(main())
with Engine.from_pretrained(ToyBackend(), num_kv_blocks=8) as engine:
    engine.generate([[1, 2]], SamplingParams(max_tokens=3), show_progress=False)
    engine.stats()
    print(found())
    engine.quote([1, 2])
    print(found() > 0)
"""
    folders = [str(ROOT), *(str(ROOT / folder) for folder in ("kernels", "tests"))]
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(folders), "PATH": ""},
                          check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["0", "True"]
