"""The page on BentoML, followed from its service to its last command."""

from __future__ import annotations

import shlex
from pathlib import Path

import httpx
import pytest

pytest.importorskip("bentoml")

from adapters.bentoml.processes import bentoml_serve
from docs.pages import ROOT, blocks

PAGE = ROOT / "docs" / "bentoml.md"


def test_the_page_leads_to_endpoints_with_tenants(tmp_path: Path) -> None:
    """Its service starts as it stands, and its commands get what the page says: answers, and a 401 without a key."""
    (service,) = [block for block in blocks(PAGE, "python") if "salt_of" in block]
    (tmp_path / "service.py").write_text(service, encoding="utf-8")
    with bentoml_serve("service:LLM", tmp_path) as served:
        answers = []
        for command in blocks(PAGE, "sh")[0].splitlines():
            curl, address, *words = shlex.split(command)
            assert curl == "curl"
            options = dict(zip(words[::2], words[1::2], strict=True))
            headers = dict([options["-H"].split(": ")]) if "-H" in options else {}
            answers.append(httpx.post(f"{served.url}/{address.partition('/')[2]}", content=options["--json"],
                                      headers={"content-type": "application/json", **headers}, timeout=240.0))
    assert [answer.status_code for answer in answers] == [200, 200, 200, 401]
    assert [answer.text.strip() for answer in answers[:2]] == ["12 + 30 = 42.", "2 + 3 = 5."]
    assert answers[2].json()["outputs"][0]["text"].strip() == "2 + 3 = 5."
