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
    assert named <= targets


def test_the_changelog_knows_this_version() -> None:
    """The version of the package has an entry."""
    assert f"## {pagedcore.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
