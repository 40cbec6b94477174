"""Who may import whom: downward only, counting imports inside functions and under TYPE_CHECKING."""

from __future__ import annotations

import ast

import pytest

import pagedcore
from architecture.sources import SOURCES, Source

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "limits", "clock"),
    ("memory",),
    ("config", "ports"),
    ("pagedcore_kernels", "normalisers"),
    ("sampling_params", "outputs", "stats", "demo_model"),
    ("request", "validation"),
    ("text", "cache", "beam_search"),
    ("answers", "intake", "scheduling"),
    ("plugins", "execution"),
    ("assembly", "kv_memory", "outcomes", "contests", "request_book", "offline", "engine", "history", "turns",
     "parking", "session", "session_book", "session_file"),
    ("stream", "whole_answer", "health"),
    ("outbox",),
    ("engine_thread",),
    ("long_prompts",),
    ("async_session",),
    ("async_engine",),
    ("bench", "observability", "sizing"),
    ("cli",),
    ("__main__",),
)
"""Lowest first. A part may import the parts of lower layers; a part of several modules may import itself."""
RANKS = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
ENGINE = LAYERS[9]
"""The engine is one thing in several files, which know each other."""
KERNELS_MAY_IMPORT = {"errors", "ports"}
ADAPTERS = {"pagedcore_asyncgen", "pagedcore_bentoml", "pagedcore_langchain"}
PUBLIC_MODULES = {"pagedcore.errors", "pagedcore.observability.metrics", "pagedcore.plugins.hookspecs"}
"""What adapters may import besides the public names: errors to raise and catch, metrics, the mark of a plugin."""
OPTIONAL_FRAMEWORKS = {"bentoml", "langchain", "langchain_core", "starlette", "fastapi", "uvicorn", "openai"}


def imported_parts(source: Source) -> set[str]:
    """The parts of this project that a file imports, its own left out."""
    parts = set()
    for module, name in source.imports():
        package, _, rest = module.partition(".")
        if package == "pagedcore":
            parts.add(rest.partition(".")[0] or (name if name in RANKS else "pagedcore"))
        elif package.startswith("pagedcore_"):
            parts.add(package)
    return parts - {source.part}


def in_core(source: Source) -> bool:
    return source.package not in ADAPTERS and source.module != "pagedcore"


def test_every_part_has_a_layer() -> None:
    """A new module or folder has to be given its place in LAYERS, and one that is gone loses it."""
    assert {source.part for source in SOURCES if in_core(source)} == set(RANKS)


def test_imports_go_downward() -> None:
    """A file imports only parts of lower layers, its own part, and, within the engine, the engine."""
    upward = [
        f"{source.module} imports {part}"
        for source in SOURCES if in_core(source)
        for part in imported_parts(source) - {"pagedcore"}
        if RANKS[part] >= RANKS[source.part] and not (part in ENGINE and source.part in ENGINE)
    ]
    assert upward == []


def test_only_the_version_is_imported_from_the_package_itself() -> None:
    """Inside the core a name comes from the module that owns it; the commands are users like any other."""
    for source in SOURCES:
        names = {name for module, name in source.imports() if module == "pagedcore" and name not in RANKS}
        if in_core(source) and source.part != "cli":
            assert names <= {"__version__"}, source.module


def test_kernels_know_nothing_of_the_engine() -> None:
    """The kernels import errors and ports of pagedcore and nothing else of it."""
    for source in SOURCES:
        if source.package == "pagedcore_kernels":
            assert imported_parts(source) <= KERNELS_MAY_IMPORT, source.module


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


@pytest.mark.parametrize("part", ["scheduling", "cache", "text", "intake", "engine", "assembly"])
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
