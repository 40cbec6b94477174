"""Every command and every snippet of the documentation is run, so that none of them can become wrong unnoticed."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import tomllib
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from docs.pages import GUIDES, PAGES, README, ROOT, blocks, commands, links, name_of
from pagedcore.analysis.load_simulation import calibration
from support.runner import invoke

SNIPPETS = [pytest.param(text, id=f"{name_of(page)}-{number}")
            for page in GUIDES if page.name != "ptxsim.md"  # its snippet and what it prints have a test of their own
            for number, text in enumerate(blocks(page, "python"))]
COMMANDS = sorted({command for page in PAGES for command in commands(page)})
FILES = re.compile(r"`((?:pagedcore|kernels|adapters|examples|tests|docs|benchmarks)/[\w./-]+\.\w+)`")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def starting_with(*programs: str) -> list[str]:
    return [command for command in COMMANDS if command.split()[0] in programs]


def test_the_pages_have_what_they_should() -> None:
    """The extraction finds snippets, commands and links; a command of no known kind would be checked by nothing."""
    assert len(SNIPPETS) >= 15
    assert len(blocks(README, "python")[0].splitlines()) <= 10
    assert {command.split()[0] for command in COMMANDS} == {"make", "pip", "pagedcore", "echo", "python"}
    assert all(links(page) for page in (README, ROOT / "docs" / "architecture.md"))


def test_the_readmes_first_screen_has_it_all() -> None:
    """Two commands, a snippet, the way of a request, the chart and the way to all other pages come first."""
    screen = README.read_text(encoding="utf-8").partition("\n## ")[0]
    assert len(screen.splitlines()) <= 35
    assert {"make demo", "make test"} <= set(commands(README))
    wanted = ["docs/architecture.md", "docs/request.svg", "docs/peers.svg", "make demo", "make test", "```python"]
    assert [words for words in wanted if words not in screen] == []


def test_the_readmes_table_has_every_page_once() -> None:
    """A reader finds each page of docs/ in one row of the table, and in one only."""
    table = README.read_text(encoding="utf-8").partition("\n## Documentation\n")[2]
    named = sorted(re.findall(r"\]\((docs/[\w-]+\.md)\)", table))
    assert named == sorted(name_of(page) for page in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("text", SNIPPETS)
def test_snippet_runs(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python snippet runs as it stands and prints something."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "snippet.py").write_text(text, encoding="utf-8")
    runpy.run_path(str(tmp_path / "snippet.py"), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", starting_with("pagedcore", "echo"))
def test_command_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command line runs as it stands, in a directory with a file of prompts, and prints something."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("What is 2 + 3?\nWhat is the capital of France?\n")
    given, pipe, rest = command.partition(" | ")
    name, *words = shlex.split(rest if pipe else command)
    assert name == "pagedcore"
    # Why: of a busy machine's four seconds fewer steps may be left than a fit needs.
    ticks = count()
    monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: next(ticks) * 2e-3))
    assert invoke(*words, given=shlex.split(given)[1] + "\n" if pipe else None).strip()


@pytest.mark.parametrize("command", starting_with("make"))
def test_make_target_exists(command: str) -> None:
    """A make target of a page is one; what it does is done by the tests themselves."""
    done = subprocess.run(["make", "-n", *command.split()[1:]], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip()


@pytest.mark.parametrize("command", starting_with("pip"))
def test_pip_line_names_what_exists(command: str) -> None:
    """A pip line refers to an existing constraints file and to existing extras."""
    words = shlex.split(command)
    assert (ROOT / words[words.index("-c") + 1]).is_file()
    assert set(re.findall(r"\[(\w+)\]", command)) <= set(EXTRAS)


@pytest.mark.parametrize("command", starting_with("python"))
def test_script_exists_and_has_the_options(command: str) -> None:
    """A script of a page is one of the repository, and its text has each option of the command."""
    script, *words = shlex.split(command)[1:]
    text = (ROOT / script).read_text(encoding="utf-8")
    assert [word for word in words if word.startswith("--") and f'"{word}"' not in text] == []


def test_extras_named_in_pages_exist() -> None:
    """``pip install pagedcore[...]`` names extras of pyproject.toml."""
    named = {extra for page in PAGES for extra in re.findall(r"pagedcore\[(\w+)\]", page.read_text(encoding="utf-8"))}
    assert named
    assert named <= set(EXTRAS)


def test_every_stamp_of_the_makefile_is_an_extra() -> None:
    """``make`` installs the extra its stamp is named after, so each has to exist."""
    stamps = set(re.findall(r"\.stamp-([\w-]+)", (ROOT / "Makefile").read_text(encoding="utf-8")))
    assert stamps
    assert stamps <= set(EXTRAS)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_files_exist(page: Path) -> None:
    """Every file that a page links to or names by its path is there."""
    named = FILES.findall(page.read_text(encoding="utf-8"))
    assert [name for name in links(page) if not (page.parent / name).exists()] == []
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    """Following links from the README leads to each page."""
    found, open_ = {README}, [README]
    while open_:
        page = open_.pop()
        new = {(page.parent / name).resolve() for name in links(page) if name.endswith(".md")} - found
        found |= new
        open_ += new
    assert [name_of(page) for page in PAGES if page not in found and "api" not in page.parts] == []
