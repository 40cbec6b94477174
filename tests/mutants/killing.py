"""Runs tests against one mutant: the product with one line changed, in a process of its own.

A server process imports the heavy libraries once; each mutant is a fork of it whose import system returns the changed
source of one file. The checkout is never written to, and no bytecode of a mutant is kept.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.metadata import entry_points
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Literal

ROOT = Path(__file__).parents[2]
#: Imported before the fork. None of them is ours, so that a mutant's module is always imported anew.
_HEAVY = [
    "torch", "numba", "transformers", "tokenizers", "safetensors.numpy", "hypothesis", "pytest", "starlette.requests",
    "langchain_core.language_models",
    *sorted(one.module for one in entry_points(group="pytest11") if not one.module.startswith("pagedcore")),
]
#: Where the packages of the checkout lie.
_SOURCES = (ROOT, ROOT / "kernels", ROOT / "adapters")
#: Seconds that a test may take before a mutant counts as one that hangs; the slowest killer takes a few.
_TEST_LIMIT_S = 60


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug: a text of one file that is replaced, and a test that has to find it."""

    bug: str
    path: str
    old: str
    new: str
    killer: str = ""
    """A test's node id without the leading ``tests/``."""

    def source(self) -> str:
        """Return the file with the bug. Raises ``ValueError`` unless ``old`` is there exactly once."""
        text = (ROOT / self.path).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.path} has {text.count(self.old)} times: {self.old}")
        return text.replace(self.old, self.new)

    @property
    def module(self) -> str:
        """The name of the module that is changed."""
        source = next(one for one in reversed(_SOURCES) if (ROOT / self.path).is_relative_to(one))
        return ".".join((ROOT / self.path).relative_to(source).with_suffix("").parts).removesuffix(".__init__")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a mutant."""

    verdict: Literal["killed", "survived", "hung", "broken"]
    """"broken": it or a test could not be imported, or the process ended; such a mutant proves nothing."""
    num_passed: int
    killer: str = ""
    """The test that failed."""
    reason: str = ""
    """The first line of its failure."""


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._module, self._source = mutant.module, mutant.source()
        self.is_used = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._module:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            self.is_used = True
            spec.loader = _Loader(name, spec.origin, self._source)
        return spec


class _Reports:
    """What pytest says of the tests that ran."""

    def __init__(self) -> None:
        self.num_passed = 0
        self.failed: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append((report.nodeid, str(getattr(report.longrepr, "reprcrash", report.longrepr))))
        elif report.when == "call" and report.passed:
            self.num_passed += 1


def run_tests(mutant: Mutant, tests: Sequence[str], *, limit_s: float = 600.0) -> Outcome:
    """Run tests against a mutant until one fails; ``tests`` are node ids or folders, below ``tests/``.

    Raises ``ValueError`` if the text that the mutant changes is not there.
    """
    mutant.source()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_HEAVY)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run_in_child, args=(mutant, list(tests), theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(limit_s) else Outcome("hung", 0, reason=f"more than {limit_s} s in all")
    except EOFError:
        return Outcome("broken", 0, reason="the process ended")
    finally:
        process.kill()
        process.join()


def _run_in_child(mutant: Mutant, tests: Sequence[str], result: Connection) -> None:
    import pytest

    # Why: this may be a worker's fork, and pytest must not take itself for that worker.
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    os.chdir(ROOT)
    # Why: what was imported before the fork is never garbage, and pytest looks for some at its end.
    gc.freeze()
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    loaded = [name for name in sys.modules if name.partition(".")[0].startswith("pagedcore")]
    finder, reports = _Finder(mutant), _Reports()
    sys.meta_path.insert(0, finder)
    # Why plain: pytest rewrites the asserts of what belongs to a plugin, ours among them, past the finder.
    options = ["-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--assert=plain", f"--timeout={_TEST_LIMIT_S}"]
    code = pytest.main([*options, *(f"tests/{test}" for test in tests)], plugins=[reports])
    result.send(_judge(int(code), reports, is_used=finder.is_used and not loaded))
    result.close()
    # Why: threads of a broken product may never end.
    os._exit(0)


def _judge(code: int, reports: _Reports, *, is_used: bool) -> Outcome:
    if not is_used:
        return Outcome("broken", reports.num_passed, reason="no test imported the mutant")
    if reports.failed:
        killer, reason = reports.failed[0]
        verdict: Literal["hung", "killed"] = "hung" if "Timeout (" in reason else "killed"
        return Outcome(verdict, reports.num_passed, killer, reason.strip().splitlines()[-1])
    is_sound = code == 0 and reports.num_passed > 0
    return Outcome("survived" if is_sound else "broken", reports.num_passed, reason=f"exit status {code}")
