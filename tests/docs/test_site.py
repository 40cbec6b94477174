"""The site: it builds without a warning, loads nothing from other hosts, and documents what is public."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pagedcore
from docs.pages import PAGES, ROOT, name_of

pytest.importorskip("mkdocs")
LOADED = re.compile(
    r"""<(?:link|script|img|iframe|source|object|embed)\b[^>]*?\b(?:href|src|data|srcset)=["']?([^"'\s>]+)"""
)
IN_STYLES = re.compile(r"""(?:url\(|@import\s+)["']?([^"')\s]+)""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of this checkout, built as ``make docs`` does; a warning is an error."""
    target = tmp_path_factory.mktemp("site")
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)], cwd=ROOT,
                          capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return target


def test_every_page_is_in_the_site(site: Path) -> None:
    """Each page of the repository has its page in the site; the README is the first one."""
    places = {"README.md": "index.md", "docs/decisions/README.md": "decisions/index.md",
              "tests/README.md": "tests/index.md"}
    names = (places.get(name_of(page), name_of(page).removeprefix("docs/")) for page in PAGES)
    assert [name for name in names if not (site / name).with_suffix(".html").is_file()] == []


def test_nothing_is_loaded_from_other_hosts(site: Path) -> None:
    """No page and no style sheet names a font, a script, a style or a picture of another host."""
    found = [name for page in site.rglob("*.html") for name in LOADED.findall(page.read_text(encoding="utf-8"))]
    found += [name for sheet in site.rglob("*.css") for name in IN_STYLES.findall(sheet.read_text(encoding="utf-8"))]
    assert len(found) > 100
    assert [name for name in found if re.match(r"(?:https?:)?//", name)] == []


def test_every_public_name_is_documented(site: Path) -> None:
    """Each name that ``pagedcore`` exports has its entry on a page of the API."""
    anchors = {anchor.rpartition(".")[2] for page in (site / "api").glob("*.html")
               for anchor in re.findall(r'id="(pagedcore\.[\w.]+)"', page.read_text(encoding="utf-8"))}
    assert set(pagedcore.__all__) - anchors == set()


def test_the_tests_install_what_builds_the_site() -> None:
    """The extra ``test`` brings ``docs``, so that these tests are not left out in CI."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    brought = re.findall(r"pagedcore\[([\w,]+)\]", " ".join(extras["test"]))
    assert "docs" in brought[0].split(",")
