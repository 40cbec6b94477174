"""Other weights for a model that is served: for admins, by names of one directory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import adapters.bentoml.home  # noqa: F401  # Why first: BentoML reads its home when it is imported.

pytest.importorskip("bentoml")
pytest.importorskip("uvicorn")

from adapters.bentoml.asgi_caller import JSON_TYPE, App
from pagedcore import AsyncEngine
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.errors import InvalidConfig
from pagedcore_openai import ApiKeys, openai_app
from pagedcore_openai.server import ADMIN_VARIABLE, KEYS_VARIABLE, serve

ONE, ADMIN = "key-of-tenant-one", "key-of-the-operator"
PATH = "/v1/update_weights"
ASKED = {"prompt": "What is 2 + 3?", "max_tokens": 4, "temperature": 0}


def with_key(key: str) -> list[tuple[bytes, bytes]]:
    return [*JSON_TYPE, (b"authorization", f"Bearer {key}".encode())]


@asynccontextmanager
async def opened(weights_dir: Path | None) -> AsyncIterator[App]:
    with AsyncEngine.from_pretrained("demo") as engine:
        asgi: Any = openai_app(engine, api_keys=ApiKeys([ONE], ADMIN), weights_dir=weights_dir)
        yield App(asgi, asgi, engine)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a good version, a damaged one, and one outside of it with a link to it."""
    root = tmp_path / "versions"
    for place in (root / "7", root / "damaged", tmp_path / "outside"):
        place.mkdir(parents=True)
        for path in DEMO_MODEL_DIR.iterdir():
            if path.suffix == ".json":
                shutil.copy(path, place)
        tensors = load_file(DEMO_MODEL_DIR / "model.safetensors")
        if place.name == "damaged":
            tensors["model.norm.weight"].fill_(float("nan"))
        save_file(tensors, place / "model.safetensors", {"format": "pt"})
    os.symlink(tmp_path / "outside", root / "link")
    os.symlink("circle", root / "circle")
    return root


async def test_admins_load_by_name_and_answers_say_so(folder: Path) -> None:
    """Nobody else does, and no name leads anywhere else; what is refused leaves the weights."""
    async with opened(None) as app:
        assert (await app.call(PATH, {"weights": "7"}, headers=with_key(ADMIN))).status == 404
    async with opened(folder) as app:
        assert (await app.call(PATH, {"weights": "7"}, headers=with_key(ONE))).status == 403
        for name in ("../outside", "link", "circle", ".", "", "8", "7/config.json", 7, None):
            assert (await app.call(PATH, {"weights": name}, headers=with_key(ADMIN))).status == 400, name
        for further in ({"mode": "now"}, {"in_place": 1}, {"version": "a b"}, {"weights": "damaged"}):
            exchange = await app.call(PATH, {"weights": "7", **further}, headers=with_key(ADMIN))
            assert exchange.status == 400, further
            assert str(folder) not in exchange.text
        before = await app.call("/v1/completions", ASKED, headers=with_key(ONE))
        assert "system_fingerprint" not in before.text
        told = json.loads((await app.call(PATH, {"weights": "7", "mode": "keep"}, headers=with_key(ADMIN))).text)
        assert (told["version"], app.engine.weights.number) == ("7", told["number"])
        answer = json.loads((await app.call("/v1/completions", ASKED, headers=with_key(ONE))).text)
        assert answer["system_fingerprint"] == f"7#{told['number']}"
        assert answer["choices"][0]["text"] == json.loads(before.text)["choices"][0]["text"]


def test_a_server_without_an_admin_key_loads_no_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tenant would decide what all others get."""
    monkeypatch.setenv(KEYS_VARIABLE, ONE)
    monkeypatch.delenv(ADMIN_VARIABLE, raising=False)
    with pytest.raises(InvalidConfig, match="weights_dir"):
        serve({"demo": "demo"}, port=0, weights_dir=str(tmp_path))
