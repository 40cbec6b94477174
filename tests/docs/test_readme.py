"""Every command and every snippet of the README is run, so that none of them can become wrong unnoticed."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from support.runner import invoke

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
SNIPPETS = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [
    line.partition("  #")[0].strip()
    for language, text in BLOCKS if language == "bash"
    for line in text.splitlines() if line.strip()
]
LINKS = re.findall(r"\]\(([^)#:]+)\)", README)
FILES = re.findall(r"`((?:pagedcore|kernels|examples|docs)/[\w./]+)`", README)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def test_the_readme_has_what_it_should() -> None:
    """The extraction below finds snippets and commands; an empty list would prove nothing."""
    assert len(SNIPPETS) >= 3
    assert {command.split()[0] for command in COMMANDS} == {"make", "pip", "pagedcore", "echo"}


@pytest.mark.parametrize("text", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippet_runs(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python snippet runs as it stands and prints something."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "snippet.py").write_text(text, encoding="utf-8")
    runpy.run_path(str(tmp_path / "snippet.py"), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith(("pagedcore", "echo"))])
def test_command_runs(command: str) -> None:
    """A command line runs as it stands and prints something."""
    given, pipe, rest = command.partition(" | ")
    name, *words = shlex.split(rest if pipe else command)
    assert name == "pagedcore"
    assert invoke(*words, given=shlex.split(given)[1] + "\n" if pipe else None).strip()


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make")])
def test_make_target_exists(command: str) -> None:
    """A make target of the README is one; what it does is done by the tests themselves."""
    done = subprocess.run(["make", "-n", *command.split()[1:]], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip()


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("pip")])
def test_pip_line_names_what_exists(command: str) -> None:
    """A pip line refers to an existing constraints file and to existing extras."""
    words = shlex.split(command)
    assert (ROOT / words[words.index("-c") + 1]).is_file()
    assert set(re.findall(r"\[(\w+)\]", command)) <= set(EXTRAS)


def test_every_stamp_of_the_makefile_is_an_extra() -> None:
    """``make`` installs the extra its stamp is named after, so each has to exist."""
    stamps = set(re.findall(r"\.stamp-(\w+)", (ROOT / "Makefile").read_text(encoding="utf-8")))
    assert stamps
    assert stamps <= set(EXTRAS)


def test_links_and_files_exist() -> None:
    """Every file the README points to is there."""
    assert LINKS
    assert FILES
    assert [name for name in LINKS + FILES if not (ROOT / name).exists()] == []
