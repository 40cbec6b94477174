"""Who may import whom: downward only, counting imports inside functions and under TYPE_CHECKING."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

import pagedcore
from architecture.rooms import ORDER, ROOM_OF, circles, imported_modules, room_of
from architecture.sources import ROOT, SOURCES, Source

ADAPTERS = {"pagedcore_asyncgen", "pagedcore_bentoml", "pagedcore_http", "pagedcore_langchain", "pagedcore_openai",
            "pagedcore_otel", "pagedcore_pytest", "pagedcore_ray", "pagedcore_trl"}
PUBLIC_MODULES = {
    "pagedcore.errors", "pagedcore.execution.machine", "pagedcore.lazy_names", "pagedcore.metrics.live",
    "pagedcore.metrics.recorder", "pagedcore.plugins.hookspecs", "pagedcore.request_options",
    "pagedcore.tool_calls.chat_format", "pagedcore.tool_calls.events",
}
"""What adapters may import besides the public names: errors, lazy imports, the machine's facts, metrics, the mark of a
plugin, options of a request, and how chats are read."""
MAY_PROBE = {
    "pagedcore.models.attention.layers", "pagedcore.models.families.model_facts",
    "pagedcore.models.families.supported_models", "pagedcore.models.linears.packed_experts",
    "pagedcore.models.linears.packed_linear", "pagedcore.tokenizer.chat_template", "pagedcore.tokenizer.plain_values",
    "pagedcore.tokenizer.template_operations", "pagedcore.tokenizer.template_sandbox",
    "pagedcore.tokenizer.tokenizer", "pagedcore.plugins.manager",
}
"""Modules that look at objects of transformers, torch or jinja2, at messages of any type, or at a plugin's name."""
OPTIONAL_FRAMEWORKS = {"bentoml", "langchain", "langchain_core", "starlette", "fastapi", "uvicorn", "openai", "ray",
                       "opentelemetry"}


def in_core(source: Source) -> bool:
    return source.package not in ADAPTERS and source.module != "pagedcore"


def test_every_file_has_a_room() -> None:
    """A new module or folder has to be given its room, and one that is gone loses it."""
    ours = {source.module for source in SOURCES if source.package == "pagedcore"} - {"pagedcore", "pagedcore.analysis"}
    assert not [module for module in ours if room_of(module) is None]
    assert {f"pagedcore.{part}" for part in ROOM_OF} <= ours


def test_imports_go_downward() -> None:
    """A file imports only its own room and rooms before it."""
    upward = {
        (room, other)
        for source in SOURCES if (room := room_of(source.module)) is not None
        for module in imported_modules(source)
        if (other := room_of(module)) is not None and ORDER.index(other) > ORDER.index(room)
    }
    assert upward == set()


def test_no_files_import_each_other() -> None:
    """No chain of imports leads back to where it began, inside of a room or out of it."""
    assert circles() == []


def test_only_the_version_is_imported_from_the_package_itself() -> None:
    """Inside the core a name comes from the module that owns it; commands and measurements are users like any other."""
    for source in SOURCES:
        names = {name for module, name in source.imports() if module == "pagedcore" and name not in ROOM_OF}
        if in_core(source) and source.part not in ("cli", "bench"):
            assert names <= {"__version__"}, source.module


def test_kernels_know_nothing_of_the_engine() -> None:
    """The core imports the kernels, and they import nothing of the core."""
    for source in SOURCES:
        if source.package == "pagedcore_kernels":
            assert not [module for module, _ in source.imports() if module.split(".")[0] == "pagedcore"], source.module


def test_adapters_use_public_names_only() -> None:
    """An adapter imports from ``pagedcore`` what anybody could, and no module inside it."""
    for source in SOURCES:
        if source.package in ADAPTERS:
            for module, name in source.imports():
                if module.partition(".")[0] == "pagedcore" and module not in PUBLIC_MODULES:
                    assert module == "pagedcore", f"{source.module} imports {module}"
                    assert name in pagedcore.__all__, name


def test_the_core_imports_no_serving_framework() -> None:
    """No file of the core names a framework that adapters are for."""
    for source in filter(in_core, SOURCES):
        assert not OPTIONAL_FRAMEWORKS & {module.partition(".")[0] for module, _ in source.imports()}, source.module


def test_abilities_are_declared() -> None:
    """What a model, tokenizer or attention factory may offer is a protocol: only modules that read objects of other
    libraries ask whether something has an attribute.
    """
    probing = {source.module for source in SOURCES if source.package == "pagedcore" and any(_probes(source.tree))}
    assert probing == MAY_PROBE


def _probes(tree: ast.AST) -> Iterator[ast.Call]:
    """Every ``getattr`` or ``hasattr`` with a name that is written out."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(), *_]):
                yield node


@pytest.mark.parametrize("part", ["scheduler", "kv_cache", "tokenizer", "requests", "engine"])
def test_deciding_parts_never_import_transformers(part: str) -> None:
    """Only model and tokenizer loading name transformers; the tokenizer does so inside a function."""
    for source in SOURCES:
        if source.part == part:
            top_level = {node.partition(".")[0] for node in _top_level_modules(source)}
            assert not top_level & {"transformers", "numba"}, source.module


def _top_level_modules(source: Source) -> set[str]:
    modules = set()
    for node in source.tree.body:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules.add(node.module or "")
    return modules


def test_tests_import_no_benchmark() -> None:
    """What both need stands in ``tests/support``; a test of a benchmark loads it as a script, by name."""
    scripts = {file.stem for file in (ROOT / "benchmarks").glob("*.py")}
    assert {"quotes", "guest"} <= scripts
    for file in (ROOT / "tests").rglob("*.py"):
        tree, found = ast.parse(file.read_text(encoding="utf-8")), set[str]()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
        assert not found & (scripts | {"benchmarks"}), file
