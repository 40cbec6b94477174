"""The other documents refer only to what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pagedcore

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]


def test_files_named_in_documents_exist() -> None:
    """A path in backticks is a file of this repository."""
    for document in [*DOCUMENTS, *(ROOT / "docs").rglob("*.md")]:
        named = re.findall(r"`((?:pagedcore|kernels|tests|docs)/[\w./-]+\.\w+)`", document.read_text(encoding="utf-8"))
        assert [name for name in named if not (ROOT / name).exists()] == [], document.name


def test_make_targets_named_in_documents_exist() -> None:
    """A make target in a document is one of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for document in DOCUMENTS:
        for target in re.findall(r"^make (\w+)", document.read_text(encoding="utf-8"), flags=re.MULTILINE):
            assert f"\n{target}:" in makefile


def test_the_changelog_knows_this_version() -> None:
    """The version of the package has an entry."""
    assert f"## {pagedcore.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
