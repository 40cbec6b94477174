"""Brings the pages outside docs/ into the site, and makes links work both there and in the repository.

Pages link to files by their place in the repository. In the site, a link to a page leads to that page, and a link to
any other file becomes the name of the file.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:]+)(#[^)]*)?\)")


def _outside() -> dict[str, str]:
    """Pages outside docs/: place in the repository, place in the site."""
    benchmarks = sorted((ROOT / "benchmarks").glob("*.md"))
    pages = ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", *(f"benchmarks/{page.name}" for page in benchmarks)]
    return {"README.md": "index.md", "tests/README.md": "tests/index.md", **{page: page for page in pages}}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/."""
    for source, target in _outside().items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite links from places in the repository to places in the site."""
    here = page.file.src_uri
    sources = {target: source for source, target in _outside().items()}
    folder = posixpath.dirname(sources.get(here, f"docs/{here}"))

    def rewritten(link: re.Match[str]) -> str:
        words, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        found = _outside().get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(found) is not None:
            return f"[{words}]({posixpath.relpath(found, posixpath.dirname(here) or '.')}{anchor})"
        if not (ROOT / path).exists():
            return link[0]  # mkdocs warns of it
        return words if words.startswith("`") else f"`{words}`" if "/" in words else f"{words} (`{target}`)"

    markdown = re.sub(r"!\[([^\]]*)\]\(docs/([^)]+)\)", r"![\1](\2)", markdown) if here in sources else markdown
    return _LINK.sub(rewritten, markdown)
