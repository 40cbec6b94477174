"""The public surface, and what importing it costs."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

import pagedcore
from architecture.sources import PACKAGE_PARENTS, PACKAGES, ROOT

PUBLIC = ["AdapterInfo", "AsyncEngine", "Batch", "BatchRequest", "Chat", "ChatReply", "Classification",
          "CompletionOutput", "CompletionScore", "ContinuousBatcher", "Delta", "Embedding", "Engine", "EngineConfig",
          "Infill", "MemoryBudget", "PairScore", "Request", "RequestOutput", "SamplingParams", "Session",
          "SharedEngines", "StructuredOutput", "TokenLogprobs", "TokenText", "Usage", "engine_metrics",
          "engine_metrics_text", "expose"]
HEAVY = ("torch", "transformers", "bentoml", "langchain", "langchain_core", "numba", "numba.cuda", "tokenizers")
MAX_SHARE_OF_TORCH = 0.5


def run(code: str) -> str:
    """Run ``code`` in a fresh interpreter that finds only this checkout, and return what it printed."""
    env = {"PYTHONPATH": ":".join(map(str, PACKAGE_PARENTS)), "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def test_the_public_names_are_exactly_these() -> None:
    """What is exported is a decision, not an accident."""
    assert sorted(pagedcore.__all__) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_exists_and_is_documented(name: str) -> None:
    """A public name can be imported, has a docstring and is listed by ``dir``."""
    value = getattr(pagedcore, name)
    assert value.__doc__
    assert name in dir(pagedcore)


WITHOUT_POSIX = """
import os, sys
sys.modules["fcntl"] = None
del os.fork, os.register_at_fork
try:
    import {module}
except ImportError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("module", ["pagedcore", "pagedcore_kernels", "pagedcore.cli.main", "pagedcore_http.body"])
def test_another_system_is_told_in_one_sentence(module: str) -> None:
    """Without what POSIX has, as on Windows, an import says where pagedcore runs and what to do."""
    printed = run(WITHOUT_POSIX.format(module=module))
    assert printed.startswith("UnsupportedPlatform pagedcore does not run on this system. It is tested on Linux")
    assert printed.endswith("on Windows it runs inside WSL 2 or a Linux container.\n")


def test_an_unknown_name_is_an_attribute_error() -> None:
    """The lazy import does not turn a typing mistake into an import error."""
    with pytest.raises(AttributeError, match="Enginee"):
        _ = pagedcore.Enginee


def test_importing_everything_public_is_light_and_quick() -> None:
    """All public names together import no tensor library or compiler, and cost less than half of importing torch."""
    code = (
        "import json, sys, time; start = time.process_time(); import pagedcore\n"
        "for name in pagedcore.__all__: getattr(pagedcore, name)\n"
        "ours, modules, start = time.process_time() - start, sorted(sys.modules), time.process_time(); import torch\n"
        "print(json.dumps([ours / (time.process_time() - start), modules]))"
    )
    for _ in range(3):  # others may disturb a measurement, and rarely several
        share, modules = json.loads(run(code))
        assert not set(HEAVY) & set(modules)
        if share < MAX_SHARE_OF_TORCH:
            return
    assert share < MAX_SHARE_OF_TORCH


def test_importing_opens_no_socket_and_writes_no_file() -> None:
    """Importing every public name connects nowhere and opens no file for writing."""
    code = (
        "import sys\n"
        "def watch(event, args):\n"
        "    wrote = event == 'open' and isinstance(args[1], str) and set(args[1]) & set('wax+')\n"
        "    if wrote or event.startswith(('socket.', 'subprocess.')): print(event, args)\n"
        "sys.addaudithook(watch)\n"
        "import pagedcore\n"
        "for name in pagedcore.__all__: getattr(pagedcore, name)"
    )
    assert run(code) == ""


def test_help_does_not_import_torch() -> None:
    """The command line answers --help without loading what only an engine needs."""
    code = (
        "import sys; import pagedcore.cli.main as m; sys.argv = ['pagedcore', '--help']\n"
        "try: m.main()\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers', 'numba', 'numpy') if name in sys.modules])"
    )
    assert run(code).splitlines()[-1] == "[]"


@pytest.mark.parametrize("module", PACKAGES[1:])
def test_the_other_packages_can_be_imported(module: str) -> None:
    """Kernels and adapters are packages of their own, importable from a checkout."""
    assert importlib.import_module(module).__doc__
