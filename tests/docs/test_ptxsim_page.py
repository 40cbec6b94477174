"""The page about the PTX interpreter says what happens when its example is run."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path

import pytest

import pagedcore_ptxsim as ptxsim

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "ptxsim.md").read_text(encoding="utf-8")


def test_the_example_prints_what_the_page_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The snippet runs as it stands, and its output is the text beside it."""
    (snippet,), (shown,) = (re.findall(rf"```{kind}\n(.*?)```", PAGE, flags=re.DOTALL) for kind in ("python", "text"))
    (tmp_path / "snippet.py").write_text(snippet, encoding="utf-8")
    runpy.run_path(str(tmp_path / "snippet.py"), run_name="__main__")
    assert capsys.readouterr().out == shown


def test_the_page_knows_every_fault_and_option() -> None:
    """Each public fault and each parameter of ``launch`` is on the page."""
    faults = [name for name in ptxsim.__all__ if isinstance(getattr(ptxsim, name), type)
              and issubclass(getattr(ptxsim, name), ptxsim.PtxFault) and name != "PtxFault"]
    parameters = list(inspect.signature(ptxsim.launch).parameters)
    assert [name for name in [*faults, *parameters] if name not in PAGE] == []
