"""The examples of the page on embeddings that take a model of their own run, and retrieval finds what is there."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

pytest.importorskip("langchain_core")

from docs.pages import ROOT, blocks
from support.classifiers import write_classifier
from support.rerankers import write_reranker

EXAMPLES = blocks(ROOT / "docs" / "embeddings.md", "py")
SETUP = 'from pagedcore import Engine\ndocuments = ["a", "the dog", "quick"]\n'


@pytest.mark.parametrize("example", EXAMPLES, ids=["rerank", "classify", "retrieval"])
def test_an_example_runs(
    example: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the smallest model of its kind in the place of the path that it names."""
    write_reranker(tmp_path / "reranker")
    write_classifier(tmp_path / "classifier")
    monkeypatch.chdir(tmp_path)
    assert "path/of/a/" in example
    own = (SETUP if "import" not in example else "") + example.replace("path/of/a/", f"{tmp_path}/")
    (tmp_path / "example.py").write_text(own, encoding="utf-8")
    runpy.run_path(str(tmp_path / "example.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.strip()
    if "langchain" in example:
        best, _, answer = printed.partition("\n")
        # Why not which: the reranker's weights are random.
        assert len(ast.literal_eval(best)) == 2
        assert answer.strip()
