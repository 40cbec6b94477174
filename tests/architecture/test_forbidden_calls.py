"""What no shipped file may do: read bytes that can run code, run strings, open sockets."""

from __future__ import annotations

import ast

import pytest

from architecture.sources import ROOT, SOURCES, Source

FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "socket", "code"}
FORBIDDEN_NAMES = {"eval", "exec", "__import__"}
FORBIDDEN_MEMBERS = {("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load"), ("numpy", "load"), ("os", "system")}
EXAMPLES = [Source(path.stem, path) for path in sorted((ROOT / "examples").rglob("*.py"))]


def violations(source: Source) -> list[str]:
    """Say everything forbidden that a file does, aliases resolved."""
    aliases = {}
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname or alias.name: alias.name for alias in node.names}
    for module, name in source.imports():
        if module.partition(".")[0] in FORBIDDEN_MODULES or (module, name) in FORBIDDEN_MEMBERS:
            found.append(f"imports {module} {name}".strip())
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            found += _bad_call(node, aliases)
    return found


def _bad_call(node: ast.Call, aliases: dict[str, str]) -> list[str]:
    bad = []
    if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_NAMES:
        bad.append(node.func.id)
    if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        owner = aliases.get(node.func.value.id, node.func.value.id)
        bad += [f"{owner}.{node.func.attr}"] if (owner, node.func.attr) in FORBIDDEN_MEMBERS else []
    for keyword in node.keywords:
        is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        if keyword.arg == "allow_pickle" or (keyword.arg in ("trust_remote_code", "shell") and is_true):
            bad.append(f"{keyword.arg}=True")
    return bad


def test_forbidden_calls() -> None:
    """No shipped file or example unpickles, evaluates strings, opens sockets or trusts code of a model."""
    assert {source.module: bad for source in [*SOURCES, *EXAMPLES] if (bad := violations(source))} == {}


@pytest.mark.parametrize("text", [
    "import pickle", "from marshal import loads", "import cloudpickle as safe", "eval('1')", "exec('x = 1')",
    "import torch as t\nt.load('x')", "from torch import load", "import numpy as np\nnp.load('x')",
    "from yaml import load", "f(allow_pickle=True)", "f(trust_remote_code=True)", "import os\nos.system('x')",
    "import subprocess\nsubprocess.run('x', shell=True)", "def f():\n    import socket",
])
def test_the_search_finds_each_of_them(text: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The search above finds every forbidden thing, also behind an alias and inside a function."""
    path = tmp_path / "made_up.py"
    path.write_text(text)
    assert violations(Source("made_up", path))


def test_harmless_namesakes_are_allowed(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Putting a model into evaluation mode and passing trust on from the operator is allowed."""
    path = tmp_path / "made_up.py"
    path.write_text("model.eval()\nf(trust_remote_code=trusted)\nf(trust_remote_code=False)\njson.load(file)")
    assert violations(Source("made_up", path)) == []


COLLECTOR = {"callbacks", "collect", "disable", "enable", "freeze", "set_debug", "set_threshold", "unfreeze"}


def test_the_garbage_collector_is_the_hosts() -> None:
    """Only a program and the servers, which have the process to themselves, touch Python's garbage collector."""
    users = {source.module for source in SOURCES for node in ast.walk(source.tree)
             if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
             and (node.value.id, node.attr) in {("gc", name) for name in COLLECTOR}}
    assert users == {"pagedcore.cli.main", "pagedcore.cli.simulate", "pagedcore_http.present_objects"}


def uses_torch_cuda(source: Source) -> bool:
    """Whether a file names ``torch.cuda``, or imports it."""
    is_imported = any(f"{module}.{name}".startswith("torch.cuda") for module, name in source.imports())
    return is_imported or any(
        isinstance(node, ast.Attribute) and node.attr == "cuda" and isinstance(node.value, ast.Name)
        and node.value.id == "torch" for node in ast.walk(source.tree))


def test_a_gpu_is_behind_few_files() -> None:
    """Streams, graphs, events and memory of a GPU are ``Device``'s; a launch asks for torch's current stream."""
    assert {source.module for source in SOURCES if uses_torch_cuda(source)} == {
        "pagedcore.execution.devices", "pagedcore.execution.cuda_graphs", "pagedcore.execution.cuda_kv_pool",
        "pagedcore.execution.cuda_streams", "pagedcore_kernels.cuda.driver"}
