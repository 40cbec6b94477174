"""Runs the command line: in this process where output matters, as a process of its own where exit codes do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
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
    return _run("-m", "pagedcore", *words, given=given)


ONE_AFTER_THE_OTHER = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from pagedcore.cli.main import main
for words in json.load(sys.stdin):
    sys.argv, code = ["pagedcore", *words], 0
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as end:
            code = end.code
    print(json.dumps((code, out.getvalue(), err.getvalue())))
"""


def run_all(commands: Iterable[Sequence[str]]) -> Iterator[subprocess.CompletedProcess[str]]:
    """Run command lines as ``run`` does, all in one process because its start takes longer than they do."""
    commands = list(commands)
    done = _run("-c", ONE_AFTER_THE_OTHER, given=json.dumps(commands).encode())
    assert done.returncode == 0, done.stderr
    for words, line in zip(commands, done.stdout.splitlines(), strict=True):
        yield subprocess.CompletedProcess(words, *json.loads(line))


def _run(*arguments: str, given: bytes) -> subprocess.CompletedProcess[str]:
    search_path = ":".join(str(ROOT / folder) for folder in ("", "kernels", "adapters"))
    env = {"PYTHONPATH": search_path, "COLUMNS": "200", "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run([sys.executable, *arguments], env=env, input=given, capture_output=True, timeout=120,
                          check=False)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())
