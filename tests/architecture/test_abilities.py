"""What an engine can do beyond completing prompts are rooms and packages that can be taken out."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator

from architecture.rooms import imported_modules
from architecture.sources import SOURCES, Source

NEEDED_BY: dict[str, set[str]] = {
    "pagedcore.structured": {"pagedcore.engine.builder"},
    "pagedcore.tool_calls": {
        "pagedcore.engine.builder", "pagedcore.engine.engine", "pagedcore.serving.async_calls",
        "pagedcore_bentoml", "pagedcore_langchain", "pagedcore_openai",
    },
    "pagedcore.metrics": {"pagedcore_bentoml", "pagedcore_openai"},
    "pagedcore.analysis": {"pagedcore.bench.report"}, "pagedcore.bench": set(), "pagedcore.convert": set(),
    "pagedcore_asyncgen": set(), "pagedcore_bentoml": set(), "pagedcore_langchain": set(), "pagedcore_otel": set(),
    "pagedcore_ptxsim": set(), "pagedcore_pytest": set(), "pagedcore_ray": set(), "pagedcore_trl": set(),
    "pagedcore_http": {"pagedcore_bentoml", "pagedcore_openai"},
    "pagedcore_openai": {"pagedcore_bentoml", "pagedcore_pytest", "pagedcore_ray"},
}
"""By ability, what cannot be imported without it: adapters, and modules of the core. The latter may only get fewer."""
WITHOUT = """
import importlib, json, sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{one}.") for one in gone):
            raise ModuleNotFoundError(name)

gone, modules = json.load(sys.stdin)
sys.meta_path.insert(0, Refuses())
for name in modules:
    importlib.import_module(name)
from pagedcore import Engine
with Engine.from_pretrained("demo", num_kv_blocks=64) as engine:
    print(engine.chat([{"role": "user", "content": "What is 2 + 3?"}]).content)
"""


def is_of(module: str, ability: str) -> bool:
    return f"{module}.".startswith(f"{ability}.")


def is_needed(user: str) -> bool:
    """Whether a module is one of the core and no ability itself."""
    return is_of(user, "pagedcore") and not any(is_of(user, ability) for ability in NEEDED_BY)


def imported_at_once(source: Source) -> Iterator[str]:
    """Yield the modules that are imported with a file: not those of its functions and of ``TYPE_CHECKING``."""
    tree = ast.Module([], [])
    todo: list[ast.stmt] = [*source.tree.body]
    for node in todo:
        match node:
            case ast.Import() | ast.ImportFrom():
                tree.body.append(node)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                todo += node.orelse
            case ast.If() | ast.Try() | ast.With() | ast.ClassDef():
                todo += node.body
    one = Source(source.module, source.path)
    one.__dict__["tree"] = tree
    return imported_modules(one)


def test_who_needs_an_ability_is_written_down() -> None:
    """An import of an ability, by which the core could no longer be had without it, is seen here."""
    found: dict[str, set[str]] = {name: set() for name in NEEDED_BY}
    imports = {source: {*imported_at_once(source)} for source in SOURCES}
    for ability in found:
        found[ability] = {
            source.module if source.package == "pagedcore" else source.package
            for source, modules in imports.items()
            if not is_of(source.module, ability) and any(is_of(module, ability) for module in modules)
        }
    assert found == NEEDED_BY


def test_the_rest_answers_without_what_it_does_not_need() -> None:
    """All modules of the core are imported, and an engine answers, where every ability that none of them needs is
    gone, and so is every adapter."""
    gone = [name for name, users in NEEDED_BY.items() if not any(is_needed(user) for user in users)]
    rest = [source.module for source in SOURCES if source.package == "pagedcore"
            and not source.module.endswith("__main__") and not any(is_of(source.module, one) for one in gone)]
    done = subprocess.run([sys.executable, "-c", WITHOUT], input=json.dumps([gone, rest]), capture_output=True,
                          text=True, check=False)
    assert done.stdout.split() == ["2", "+", "3", "=", "5."], done.stderr
