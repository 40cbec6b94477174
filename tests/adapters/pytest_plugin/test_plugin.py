"""The plugin in pytest itself: its entry point, its fixtures, their names, and its page, run as a user would."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("openai")
pytest.importorskip("langchain_core")

from adapters.pytest_plugin.inner import PLUGIN, run_pytest
from architecture.sources import ROOT
from docs.pages import blocks

PAGE = ROOT / "docs" / "pytest.md"
LIGHT = """
import sys

def test_nothing_is_imported():
    heavy = {"pagedcore", "pagedcore_kernels", "torch", "numpy", "numba", "starlette", "uvicorn", "langchain_core"}
    assert heavy & {name.partition(".")[0] for name in sys.modules} == set()
    assert {name for name in sys.modules if name.startswith("pagedcore")} == {
        "pagedcore_pytest", "pagedcore_pytest.plugin", "pagedcore_pytest.current", "pagedcore_pytest.short_names"}
"""
NAMES = """
def test_the_other_plugin_has_its_name(llm, request):
    assert llm == "theirs"

def test_a_conftest_replaces(chat_model):
    assert chat_model == "mine"
"""
OTHER = """
import pytest

@pytest.fixture(name="llm")
def anything():
    return "theirs"

def pytest_addoption(parser):
    parser.addoption("--update-goldens", action="store_true")
"""


def entry_point(folder: Path) -> Path:
    """Make a folder that looks like an installed distribution with the entry points of ``pyproject.toml``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    info = folder / "like_installed-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: like-installed\nVersion: 0\n", "utf-8")
    lines = [f"{name} = {module}\n" for name, module in project["entry-points"]["pytest11"].items()]
    (info / "entry_points.txt").write_text("[pytest11]\n" + "".join(lines), "utf-8")
    return folder


def test_the_entry_point_imports_nothing_before_a_fixture_is_used(tmp_path: Path) -> None:
    """Loaded by its entry point, in a test without its fixtures, the plugin has imported pytest and itself. Where
    another plugin has a fixture's name or the option, that one stays, and the name is said; a conftest.py replaces
    silently."""
    (tmp_path / "test_light.py").write_text(LIGHT + NAMES, "utf-8")
    (tmp_path / "conftest.py").write_text(
        "import pytest\n\n@pytest.fixture\ndef chat_model():\n    return 'mine'\n", "utf-8")
    (tmp_path / "other_plugin.py").write_text(OTHER, "utf-8")
    both = ["-p", "other_plugin", "-p", "pagedcore"]
    long_names = ["-o", "pagedcore_short_names=false", "--update-goldens", "-k", "light or other"]
    said = run_pytest(tmp_path, both, [*both, *long_names], paths=(tmp_path, entry_point(tmp_path / "installed")))
    assert [line for line in said.splitlines() if line.startswith("exit")] == ["exit 0", "exit 0"], said
    warnings = re.findall(r"the fixture '(\w+)' is the one of the plugin '(\w+)'; that of pagedcore is '(\w+)'", said)
    assert warnings == [("llm", "other_plugin", "pagedcore_llm")]


def page_files() -> dict[str, str]:
    """The page's files by name; a block without one is a test file of its own."""
    found = {}
    for number, text in enumerate(blocks(PAGE, "py")):
        name = re.match(r"# (\w+\.py)\n", text)
        found[name[1] if name else f"test_block_{number}.py"] = text
    return found


def test_the_page_is_run(tmp_path: Path) -> None:
    """Every file of the page as it stands: without a recorded answer the golden test fails and says so; recorded, they
    pass, in the other order. The engine's threads end with each run."""
    files = page_files()
    assert len(files) == 4
    for name, text in files.items():
        (tmp_path / name).write_text(text, "utf-8")
    (tmp_path / "conftest.py").write_text(
        "import threading\n\ndef pytest_unconfigure():\n"
        "    print('threads', [one.name for one in threading.enumerate()\n"
        "                      if one.name in ('pagedcore-engine', 'pagedcore-pytest-openai')])\n"
        "def pytest_collection_modifyitems(config, items):\n    items.reverse() if config.option.verbose else None\n",
        "utf-8")
    model = ["-p", PLUGIN]
    runs = [*model, "-k", "total"], [*model, "--update-goldens"], [*model, "-v"]
    said = run_pytest(tmp_path, *runs, paths=(tmp_path,))
    assert re.findall(r"^exit (\d)", said, re.MULTILINE) == ["1", "0", "0"], said
    assert "has no golden answer 'total of three'. Record it with: pytest --update-goldens" in said
    assert said.count("threads []") == 3
    assert (tmp_path / "__goldens__" / "test_with_a_model.json").is_file()


def test_the_pages_message_is_the_real_one() -> None:
    """The failure that the page shows has the lines that a failure has."""
    (shown, *_), code = blocks(PAGE, "text"), (ROOT / "adapters/pagedcore_pytest/goldens.py").read_text("utf-8")
    for part in ("the answer changed at token", "(the first is token 0).", "log-probability", "when recorded",
                 "expected answer: ", "answer now:      ", "prompt:          ", "It was recorded elsewhere",
                 "If the new answer is right, record it with: "):
        assert part in shown
        assert part in code
