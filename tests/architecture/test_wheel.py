"""What is shipped: the wheel has our packages and the demo model, and no name of others."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from architecture.sources import PACKAGE_PARENTS, PACKAGES, ROOT, SEPARATE_PACKAGES, SOURCES

hatchling = pytest.importorskip("hatchling.builders.wheel")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of this checkout."""
    target = tmp_path_factory.mktemp("wheel")
    return Path(next(hatchling.WheelBuilder(str(ROOT)).build(directory=str(target), versions=["standard"])))


def test_the_wheel_has_only_our_top_levels(wheel: Path) -> None:
    """Nothing is installed under a name that belongs to another distribution."""
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    packages = {top for top in tops if not top.endswith(".dist-info")}
    assert packages == set(PACKAGES)
    assert not packages & set(SEPARATE_PACKAGES)


def test_the_wheel_has_the_demo_model_and_its_licence(wheel: Path) -> None:
    """The demo needs no network: weights, configuration and tokenizer are inside, and so are types and licence."""
    names = set(zipfile.ZipFile(wheel).namelist())
    for file in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "questions.json"):
        assert f"pagedcore/demo_model/{file}" in names
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_has_the_page(wheel: Path) -> None:
    """Every file of the page of ``pagedcore serve`` is shipped, as it is here."""
    parent = ROOT / "adapters"
    files = [path for path in (parent / "pagedcore_openai" / "static").iterdir() if path.is_file()]
    assert {"index.html", "page.css", "main.js"} <= {path.name for path in files}
    with zipfile.ZipFile(wheel) as shipped:
        assert all(shipped.read(str(path.relative_to(parent))) == path.read_bytes() for path in files)


def test_the_wheel_has_no_leftovers(wheel: Path) -> None:
    """No cache, compiled code or test is shipped."""
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if "__pycache__" in name or name.endswith((".pyc", ".nbi", ".nbc"))]
    assert not [name for name in names if "/test" in name]


def test_the_wheel_has_every_source_file(wheel: Path) -> None:
    """No folder of ours has a name that git or the wheel leaves out, and every folder with code is a package."""
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {
        str(source.path.relative_to(parent)) for parent in PACKAGE_PARENTS for source in SOURCES
        if source.package in PACKAGES and source.path.is_relative_to(parent / source.package)
    }
    assert shipped - names == set()
    assert {f"{Path(name).parent}/__init__.py" for name in shipped} - names == set()


def test_the_wheel_works_from_elsewhere(wheel: Path, tmp_path: Path) -> None:
    """Unpacked far from the checkout, the packages are found and the command line answers."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    env = {"PYTHONPATH": str(tmp_path), "PATH": "", "COLUMNS": "120"}
    done = subprocess.run([sys.executable, "-m", "pagedcore", "plugins", "--table", "schedulers"], env=env,
                          cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "fcfs" in done.stdout
