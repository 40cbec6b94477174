"""Runs the command line: in this process where output matters, as a process of its own where exit codes do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from pagedcore.cli.main import app

ROOT = Path(__file__).resolve().parents[2]


def try_invoke(*words: str, given: str | None = None) -> Result:
    """Run a command in this process and return its output and exit code."""
    return CliRunner().invoke(app, list(words), input=given, catch_exceptions=False, env={"COLUMNS": "200"})


def invoke(*words: str, given: str | None = None) -> str:
    """Run a command that succeeds and return what it printed."""
    result = try_invoke(*words, given=given)
    assert result.exit_code == 0, result.output
    return result.stdout


def run(*words: str, given: bytes = b"") -> subprocess.CompletedProcess[str]:
    """Run the command line as its own process, without a network, on an input of UTF-8 or not."""
    search_path = ":".join(str(ROOT / folder) for folder in ("", "kernels", "adapters"))
    env = {"PYTHONPATH": search_path, "COLUMNS": "200", "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run([sys.executable, "-m", "pagedcore", *words], env=env, input=given, capture_output=True,
                          timeout=120, check=False)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())
