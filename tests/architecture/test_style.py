"""How the code reads, as numbers: short functions, short files, docstrings, and tests that state a law."""

from __future__ import annotations

import ast
import json
import statistics
from collections import Counter
from pathlib import Path

import pytest

from architecture.rooms import room_of
from architecture.sources import ROOT, SOURCES

MAX_CODE_LINES = 350
MAX_FUNCTION_LINES = 60
GIVEN = {"RefusedAtTheDoor": 2, "FieldNotSupported": 1, "PromptTooLong": 1, "TextTooLong": 1, "PromptEmpty": 1,
         "RequestTooLarge": 1, "TooManySequences": 1, "UnknownParameter": 1}
"""Where refusals take what was given, besides those whose names begin with "Invalid"."""
UNDESCRIBED = ("InvalidConfig", "InvalidLogits")
NAMESPACES = ("kernels", "adapters", "tests", "examples")


def lengths(kernels: bool) -> list[int]:
    return [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for source in SOURCES
        if (source.package == "pagedcore_kernels") is kernels
        for node in source.functions()
    ]


def weight() -> Counter[str]:
    """Return the lines of code of every room, and of every package besides."""
    return Counter({
        name: sum(source.num_code_lines for source in SOURCES if (room_of(source.module) or source.package) == name)
        for name in {room_of(source.module) or source.package for source in SOURCES}
    })


def test_functions_are_short() -> None:
    """Outside the kernels the median function has at most 9 lines and nine in ten have at most 30."""
    found = sorted(lengths(kernels=False))
    assert statistics.median(found) <= 9
    assert found[int(0.9 * len(found))] <= 30


def test_no_function_is_long() -> None:
    """No function outside the kernels exceeds 60 lines."""
    assert max(lengths(kernels=False)) <= MAX_FUNCTION_LINES


def test_no_file_is_long() -> None:
    """No shipped file exceeds 350 lines of code: comments and docstrings are no reason to cut one."""
    sizes = {source.module: source.num_code_lines for source in SOURCES}
    assert {module: size for module, size in sizes.items() if size > MAX_CODE_LINES} == {}


def test_weight_grows_on_purpose_only() -> None:
    """Every room has at most the lines of code that ``weight.json`` allows, and hardly fewer: who adds some changes the
    number, and says in the commit's message what for."""
    allowed = json.loads(Path(__file__).with_name("weight.json").read_text("utf-8"))
    now = weight()
    assert set(now) == set(allowed)
    assert {room: size for room, size in now.items() if not 0.97 * allowed[room] - 5 <= size <= allowed[room]} == {}


def test_public_names_have_docstrings() -> None:
    """Every module, and every public class, function and method in it, says what it is."""
    assert [source.module for source in SOURCES if source.text.strip() and not ast.get_docstring(source.tree)] == []
    assert [f"{source.module}.{name}" for source in SOURCES for name in _undocumented(source.tree)] == []


def test_attributes_are_documented_in_one_way() -> None:
    """By the string below them, and not by a comment that begins with a colon."""
    mark = "#" + ":"
    assert [source.module for source in SOURCES if mark in source.text] == []


def _undocumented(scope: ast.Module | ast.ClassDef) -> list[str]:
    missing = []
    for node in scope.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if not ast.get_docstring(node) and not _is_repeated(node):
                missing.append(node.name)
            if isinstance(node, ast.ClassDef):
                missing += _undocumented(node)
    return missing


def _is_repeated(node: ast.AST) -> bool:
    """Whether this says again what another definition documents: a setter, an overload, an override."""
    decorators = getattr(node, "decorator_list", [])
    return any(ast.unparse(decorator).endswith((".setter", "overload", "override")) for decorator in decorators)


def test_a_refusal_never_describes_a_phrase_of_its_own() -> None:
    """What a refusal was given is described, so that text is "a string of 12 characters"; a phrase that says what it
    was is marked as such, or it is told as if the caller had sent it."""
    described = []
    for source in SOURCES:
        for node in ast.walk(source.tree):
            name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            place = GIVEN.get(name, 1 if name.startswith("Invalid") and name not in UNDESCRIBED else None)
            if not isinstance(node, ast.Call) or place is None or len(node.args) <= place:
                continue
            given = node.args[place]
            is_phrase = isinstance(given, ast.JoinedStr) or (isinstance(given, ast.Constant) and bool(given.value)
                                                             and isinstance(given.value, str))
            if is_phrase and not any(keyword.arg == "is_described" for keyword in node.keywords):
                described.append(f"{source.module}:{node.lineno}")
    assert described == []


def test_every_test_states_its_law() -> None:
    """Every test has a docstring; read in order they are the specification."""
    silent = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert silent == []


@pytest.mark.parametrize("folder", NAMESPACES)
def test_no_folder_claims_a_name_of_others(folder: str) -> None:
    """``kernels`` and ``adapters`` are distributions of others: our folders of that name are no packages."""
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("word", ["TODO", "FIXME", "XXX", "NotImplementedError"])
def test_no_note_to_self_is_left(word: str) -> None:
    """Shipped code has no open ends marked for later."""
    assert [source.module for source in SOURCES if word in source.text] == []
