"""The other documents refer only to what exists."""

from __future__ import annotations

import re

import pagedcore
from docs.pages import PAGES, ROOT


def test_make_targets_named_in_text_exist() -> None:
    """A make target in backticks is one of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {target for page in PAGES for target in re.findall(r"`make ([\w-]+)", page.read_text(encoding="utf-8"))}
    assert {"test", "docs", "architecture"} <= named
    targets = {target for line in re.findall(r"^([\w -]+):", makefile, re.MULTILINE) for target in line.split()}
    targets |= {f"interop-{client.stem}" for client in (ROOT / "tests" / "interop").glob("*.txt")}
    assert named <= targets


def test_the_changelog_knows_this_version() -> None:
    """The version of the package has an entry."""
    assert f"## {pagedcore.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_cells_of_the_architecture_are_short() -> None:
    """A cell of its tables has less than 300 characters: what is longer is a paragraph."""
    rows = [line for line in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines()
            if line.startswith("|")]
    assert len(rows) > 40
    assert [cell.strip()[:60] for row in rows for cell in row.split("|") if len(cell.strip()) >= 300] == []


def test_the_doubles_of_the_page_on_tests_are_in_their_files() -> None:
    """Each name in the first column of its tables stands in a file of the second one."""
    page = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| (`[^|]+) \|", page, flags=re.MULTILINE)
    for names, files in rows:
        text = "".join((ROOT / file).read_text(encoding="utf-8") for file in re.findall(r"`([^`]+)`", files))
        assert [name for name in re.findall(r"`(\w+)`", names) if name not in text] == []
    assert len(rows) > 15
