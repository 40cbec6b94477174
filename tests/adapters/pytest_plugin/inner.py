"""Runs pytest in a process of its own, with this plugin, xdist if asked for, and no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from architecture.sources import PACKAGE_PARENTS

PLUGIN = "pagedcore_pytest.plugin"


def run_code(folder: Path, code: str, *paths: Path) -> str:
    """Run Python in a folder and return what it prints; a failure shows that."""
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1",
                   "PYTHONPATH": os.pathsep.join(map(str, [*paths, *PACKAGE_PARENTS]))}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def run_pytest(folder: Path, *runs: list[str], paths: tuple[Path, ...] = ()) -> str:
    """Run pytest once for each list of arguments, all in one process, and return what it prints."""
    code = (f"import pytest, sys\nfor words in {list(runs)!r}:\n"
            f"    print('exit', int(pytest.main([*words, '-rA', '-p', 'no:cacheprovider'])))\n")
    return run_code(folder, code, *paths)
