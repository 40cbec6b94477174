"""The pages of the documentation: the README, everything under docs/, and what belongs to them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
GUIDES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
"""Pages whose snippets and commands are run."""
PAGES = [*GUIDES, *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "tests/README.md")),
         *sorted((ROOT / "benchmarks").glob("*.md"))]
"""All pages; links, files and commands that they name exist."""


def name_of(page: Path) -> str:
    """The page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def commands(page: Path) -> Iterator[str]:
    """Every line of the page's shell blocks, without its comment."""
    for block in blocks(page, "bash"):
        yield from (line.partition("  #")[0].strip() for line in block.splitlines() if line.strip())


def links(page: Path) -> list[str]:
    """Targets of links and pictures within the repository."""
    return [target.partition("#")[0] for target in re.findall(r"\]\(([^)#:]+(?:#[^):]*)?)\)", page.read_text("utf-8"))]
