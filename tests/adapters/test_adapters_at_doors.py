"""Adapters at every door: named in Python, over HTTP and in LangChain; loaded over HTTP by the admin key alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache

from adapters.bentoml.asgi_caller import JSON_TYPE, App
from adapters.doors import ASYNC_ENGINE, GENERATOR, HTTP, LANGCHAIN, LetterTokenizer, Question, by_chat, house, letters
from pagedcore import AsyncEngine
from pagedcore.errors import AdaptersBusy, InvalidConfig, UnknownAdapter
from pagedcore_openai import ApiKeys, openai_app
from support.adapters import AdaptedBackend, adapted_answer, write_adapter
from support.engine_builders import make_engine

DOORS = (*ASYNC_ENGINE, *GENERATOR, *LANGCHAIN, *HTTP)
PROMPT, IDS, FOUR = "abcd", [19, 20, 21, 22], {"max_tokens": 4}
ONE, ADMIN = "key-of-tenant-one", "key-of-the-operator"


class Endless(AdaptedBackend):
    """It never ends by itself."""

    eos_token_ids = frozenset()


@pytest.mark.parametrize("door", DOORS, ids=lambda one: one.__name__)
async def test_every_door_takes_the_name_of_an_adapter(door: Any, tmp_path: Path) -> None:
    """The tokens are that adapter's, and an unknown name is refused by its class."""
    places = {name: write_adapter(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 2))}
    async with house(Endless(), adapters=places, adapter_memory=1000) as opened:
        for name, seed in ((None, 0), ("a", 1), ("b", 2)):
            options = {} if name is None else {"lora": name}
            found = await door(opened, Question(PROMPT, FOUR, options))
            # Why "u": a chat has the role before its text.
            text = ("u" if door is by_chat else "") + PROMPT
            assert [one % 26 for one in found] == [one % 26 for one in answer_of(text, seed)]
        with pytest.raises(Exception, match="lora") as refused:
            await door(opened, Question(PROMPT, FOUR, {"lora": "x"}))
        assert "UnknownAdapter" in repr(refused.value) or "lora" in str(refused.value)
        assert opened.is_idle()


def answer_of(text: str, seed: int) -> list[int]:
    """The tokens behind a text under an adapter."""
    return adapted_answer(LetterTokenizer().encode(text), 4, seed)


@asynccontextmanager
async def served(tmp_path: Path, **options: Any) -> AsyncIterator[App]:
    """OpenAI's door alone, with one adapter and a root that has another one."""
    write_adapter(tmp_path / "root" / "new", 3)
    write_adapter(tmp_path / "elsewhere", 4)
    engine = make_engine(Endless(), tokenizer=LetterTokenizer(), adapters={"a": write_adapter(tmp_path / "a", 1)},
                         adapter_memory=1000, num_kv_blocks=64)
    with AsyncEngine(engine, stream_interval_s=0.0) as running:
        asgi: Any = openai_app(running, name="base", **options)
        yield App(asgi, asgi, running)  # type: ignore[arg-type]


def with_key(key: str) -> list[tuple[bytes, bytes]]:
    return [*JSON_TYPE, (b"authorization", f"Bearer {key}".encode())]


async def text_of(app: App, model: str, **more: Any) -> Any:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, **more}
    exchange = await app.call("/v1/completions", body)
    return json.loads(exchange.text) if exchange.status == 200 else (exchange.status, exchange.error["code"])


async def test_a_model_s_name_may_have_an_adapter_behind_a_colon_or_be_one(tmp_path: Path) -> None:
    """Both answer with it, and say the name that was asked for; what is not loaded is no model."""
    async with served(tmp_path) as app:
        texts = {model: await text_of(app, model) for model in ("base", "base:a", "a")}
        assert {told["model"] for told in texts.values()} == texts.keys()
        found = {model: letters(told["choices"][0]["text"]) for model, told in texts.items()}
        assert found["base:a"] == found["a"] != found["base"]
        assert (await text_of(app, "base", lora="a"))["choices"] == texts["a"]["choices"]
        assert await text_of(app, "base:a", lora="b") == (400, "invalid_value")
        for name in ("base:b", "b", ":a", "base:", "a:base"):
            assert await text_of(app, name) == (404, "model_not_found")
        listed = json.loads((await app.call("/v1/models")).text)["data"]
        assert [(one["id"], one.get("parent")) for one in listed] == [("base", None), ("a", "base")]
        for name in ("a", "base:a"):
            shown = json.loads((await app.call(f"/v1/models/{name}")).text)
            assert (shown["id"], shown["parent"]) == (name, "base")
        exchange = await app.call("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "new"})
        assert exchange.status == 404


async def test_only_the_admin_loads_and_only_below_a_root(tmp_path: Path) -> None:
    """Neither a tenant, nor a path that leads elsewhere, a link among them, nor a name that is a path."""
    root = tmp_path / "root"
    async with served(tmp_path, api_keys=ApiKeys([ONE], ADMIN), adapter_roots=[str(root)]) as app:
        (root / "link").symlink_to(tmp_path / "elsewhere")
        (root / "circle").symlink_to("circle")
        load = {"lora_name": "new", "lora_path": "new"}

        async def ask(path: str, key: str, body: Any) -> int:
            return (await app.call(path, body, headers=with_key(key))).status

        assert await ask("/v1/load_lora_adapter", ONE, load) == 403
        assert await ask("/v1/load_lora_adapter", "x", load) == 401
        for path in ("../elsewhere", str(tmp_path / "elsewhere"), "link", "", ".", "none", "new/../..", "a\0b", 7,
                     None, "circle", "circle/new", "a" * 300, "a/" * 5000, "a\ud800"):
            assert await ask("/v1/load_lora_adapter", ADMIN, {"lora_name": "x", "lora_path": path}) == 400
        for name in ("../x", "a:b", "", 7):
            assert await ask("/v1/load_lora_adapter", ADMIN, {"lora_name": name, "lora_path": "new"}) == 400
        assert app.engine.adapter_names == ("a",)
        assert await ask("/v1/load_lora_adapter", ADMIN, load) == 200
        assert await ask("/v1/load_lora_adapter", ADMIN, load) == 400
        assert await ask("/v1/load_lora_adapter", ADMIN, {**load, "load_inplace": True}) == 200
        assert await ask("/v1/load_lora_adapter", ADMIN, {"lora_name": "abs", "lora_path": str(root / "new")}) == 200
        assert app.engine.adapter_names == ("a", "new", "abs")
        assert await ask("/v1/unload_lora_adapter", ONE, {"lora_name": "new"}) == 403
        assert await ask("/v1/unload_lora_adapter", ADMIN, {"lora_name": "new"}) == 200
        assert await ask("/v1/unload_lora_adapter", ADMIN, {"lora_name": "new"}) == 400


async def test_roots_need_an_admin_key_and_have_to_be_there(tmp_path: Path) -> None:
    """An app without keys, or with tenants' alone, has no such routes."""
    for keys, root in ((None, tmp_path), (ApiKeys([ONE]), tmp_path), (ApiKeys([ONE], ADMIN), tmp_path / "none")):
        with pytest.raises(InvalidConfig, match="adapter_roots"):
            async with served(tmp_path, api_keys=keys, adapter_roots=[str(root)]):
                pass


async def test_an_adapter_is_loaded_while_streams_run_and_two_tasks_may_load_one_name(tmp_path: Path) -> None:
    """Streams go on meanwhile; a third read at a time is told to come later."""
    backend = Endless()
    engine = make_engine(backend, max_adapters=2, adapter_memory=1000, num_kv_blocks=64)
    with AsyncEngine(engine, stream_interval_s=0.0) as running:
        with pytest.raises(UnknownAdapter):
            running.submit(IDS, lora="a")
        backend.may_read.clear()
        loads = [asyncio.create_task(running.load_adapter("x", write_adapter(tmp_path / f"{seed}", seed)))
                 for seed in (1, 2)]
        output = await running.complete(IDS)
        while backend_reads(running):
            await asyncio.sleep(0.001)
        with pytest.raises(AdaptersBusy):
            await running.load_adapter("y", write_adapter(tmp_path / "3", 3))
        assert output.outputs[0].token_ids
        backend.may_read.set()
        shown = await asyncio.gather(*loads)
        (now,) = await running.adapters()
        assert now.digest in {one.digest for one in shown}
        assert running.identity_of("x").endswith(now.digest)
        await running.unload_adapter("x")
        assert running.adapter_names == ()


def backend_reads(running: AsyncEngine) -> int:
    """How many further reads may begin."""
    return running._adapter_registry._reads._value  # type: ignore[attr-defined]


async def test_langchain_caches_tell_adapters_apart_also_after_a_name_was_loaded_again(tmp_path: Path) -> None:
    """By the contents of what the name stands for, as a field and as a keyword of a call."""
    places = {name: write_adapter(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 2))}
    async with house(Endless(), adapters=places, adapter_memory=1000) as opened:
        for model in (opened.llm, opened.chat):
            cached = model.model_copy(update={"cache": InMemoryCache(), "max_tokens": 4})
            texts = [said(cached.invoke(PROMPT, **keywords)) for keywords in ({}, {"lora": "a"}, {"lora": "b"})]
            num_before = opened.figures()[4]
            assert said(cached.model_copy(update={"lora": "b"}).invoke(PROMPT)) == texts[2]
            assert said(cached.invoke(PROMPT, lora="b")) == texts[2]
            assert len(set(texts)) == 3
            assert opened.figures()[4] == num_before
            await opened.engine.load_adapter("b", write_adapter(tmp_path / "new", 9))
            cached.invoke(PROMPT, lora="b")
            assert opened.figures()[4] == num_before + 4
            await opened.engine.load_adapter("b", places["b"])


def said(answer: Any) -> str:
    """The text of a completion, or of a message."""
    return str(getattr(answer, "content", answer))
