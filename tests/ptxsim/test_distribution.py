"""The interpreter is a distribution of its own: it needs NumPy alone, and pagedcore does not need it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from architecture.sources import ROOT, SOURCES

hatchling = pytest.importorskip("hatchling.builders.wheel")
PROJECT = ROOT / "kernels" / "pagedcore_ptxsim"


def test_it_imports_numpy_and_nothing_else() -> None:
    """Each module imports the standard library, NumPy and its own package."""
    allowed = {*sys.stdlib_module_names, "numpy", "pagedcore_ptxsim"}
    own = [source for source in SOURCES if source.package == "pagedcore_ptxsim"]
    assert len(own) > 30
    for source in own:
        assert {module.partition(".")[0] for module, _ in source.imports()} <= allowed, source.module


def test_no_other_package_imports_it() -> None:
    """What pagedcore's wheel has works without the interpreter."""
    for source in SOURCES:
        if source.package != "pagedcore_ptxsim":
            assert "pagedcore_ptxsim" not in {module.partition(".")[0] for module, _ in source.imports()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of the interpreter."""
    target = tmp_path_factory.mktemp("ptxsim_wheel")
    return Path(next(hatchling.WheelBuilder(str(PROJECT)).build(directory=str(target), versions=["standard"])))


def test_its_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    """Every module is inside, with types and licence, under one name."""
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {f"pagedcore_ptxsim/{path.relative_to(PROJECT)}" for path in PROJECT.rglob("*.py")}
    info = {name for name in names if ".dist-info/" in name}
    assert names - info == modules | {"pagedcore_ptxsim/py.typed"}
    assert any(name.endswith("licenses/LICENSE") for name in info)
    assert (PROJECT / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_its_wheel_works_alone(wheel: Path, tmp_path: Path) -> None:
    """Unpacked beside NumPy and no other package, the command lists and runs a kernel."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    for path in Path(np.__file__).parents[1].glob("numpy*"):
        (tmp_path / path.name).symlink_to(path)
    kernel = Path(__file__).with_name("pipeline.ptx")
    for words in ([], ["pipe", "--block", "64", "--shared", "4096", "bf16[4,16,16]=random", "bf16[4,8,16]=random",
                       "f32[16,8]", "4"]):
        # -S: no site-packages, so that only what was unpacked is there.
        done = subprocess.run([sys.executable, "-S", "-m", "pagedcore_ptxsim", str(kernel), *words], cwd=tmp_path,
                              env={"PYTHONPATH": str(tmp_path)}, check=True, capture_output=True, text=True)
        assert done.stdout.startswith("pipeline")
