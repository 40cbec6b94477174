"""A bento is built from a folder with one line of code, and served from where it was put."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from adapters.bentoml.processes import bentoml_serve, environment
from pagedcore.demo_model.questions import demo_questions, is_correct

SERVICE = 'from pagedcore_bentoml import create_service\n\nLLM = create_service("demo", num_kv_blocks=64)\n'
PYPROJECT = '[tool.bentoml.build]\nservice = "service:LLM"\ninclude = ["*.py"]\n'


@pytest.mark.slow
def test_a_built_bento_is_served(tmp_path: Path) -> None:
    """``bentoml build`` and then ``bentoml serve`` of the result answer a question."""
    (tmp_path / "service.py").write_text(SERVICE, encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
    built = subprocess.run([sys.executable, "-m", "bentoml", "build", "-o", "tag"], cwd=tmp_path, env=environment(),
                           check=True, capture_output=True, text=True)
    tag = built.stdout.strip().splitlines()[-1].removeprefix("__tag__:")
    listed = subprocess.run([sys.executable, "-m", "bentoml", "list", "-o", "json"], env=environment(), check=True,
                            capture_output=True, text=True)
    assert tag in [bento["tag"] for bento in json.loads(listed.stdout)]
    question = demo_questions(1, seed=2)[0]
    with bentoml_serve(tag, tmp_path) as served:
        body = {"prompt": question.prompt, "sampling": {"max_tokens": 64}}
        answer = httpx.post(f"{served.url}/generate", json=body, timeout=240.0).json()
    assert is_correct(question, answer["outputs"][0]["text"])
