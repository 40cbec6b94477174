"""At every door a request that does not say otherwise has the model's own parameters, and one that does has its own."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from adapters.doors import ASYNC_ENGINE, GENERATOR, HTTP, LANGCHAIN, Ask, EndlessBackend, House, Question, house
from pagedcore.demo_model import DEMO_MODEL_DIR
from support.accepted import note_accepted
from support.runner import invoke

OPENAI: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 2},
    "/v1/responses": {"input": "ab", "max_output_tokens": 2},
}


class OwnParameters(EndlessBackend):
    """A model that comes with parameters."""

    generation_config = {"temperature": 0.5, "top_k": 7}  # noqa: RUF012


def by_openai(path: str) -> Ask:
    async def ask(house: House, question: Question) -> list[int]:
        exchange = await house.openai.call(path, {**OPENAI[path], **question.sampling})
        assert exchange.status == 200
        if path == "/v1/responses":
            body = json.loads(exchange.text)
            assert body["temperature"] == question.sampling.get("temperature", 0.5)
        return []

    return ask


def test_doors_leave_to_the_model_what_nobody_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the model's own, OpenAI's temperature is 1, and that of the others 0."""
    seen: list[Any] = []
    note_accepted(monkeypatch, lambda processed: seen.append(processed.params))
    doors = *ASYNC_ENGINE, *GENERATOR, *LANGCHAIN, *HTTP

    async def ask_everywhere(backend: Any, sampling: dict[str, Any]) -> set[tuple[float, int]]:
        seen.clear()
        async with house(backend) as opened:
            for door in doors:
                await door(opened, Question("ab", {"max_tokens": 2, **sampling}))
            for path in OPENAI if isinstance(backend, OwnParameters) else ():
                await by_openai(path)(opened, Question("ab", sampling))
        # Why: services ask their engine for one token before they open.
        return {(params.temperature, params.top_k) for params in seen if params.max_tokens == 2}

    assert asyncio.run(ask_everywhere(OwnParameters(), {})) == {(0.5, 7)}
    assert asyncio.run(ask_everywhere(OwnParameters(), {"temperature": 0.0})) == {(0.0, 7)}
    assert asyncio.run(ask_everywhere(EndlessBackend(), {})) == {(0.0, 0)}


def test_commands_leave_it_to_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``generate`` says only what its options say."""
    shutil.copytree(DEMO_MODEL_DIR, tmp_path / "model", ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": 2, "temperature": 0.5, "top_k": 7}')
    seen: list[Any] = []
    note_accepted(monkeypatch, lambda processed: seen.append(processed.params))
    for words in ((), ("--temperature", "0")):
        invoke("generate", "1", "--model", str(tmp_path / "model"), "--max-tokens", "2", *words)
    assert [(params.temperature, params.top_k) for params in seen] == [(0.5, 7), (0.0, 7)]
