"""What an API key may use of several models and their adapters: everything else is as if it were not served."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import adapters.bentoml.home  # noqa: F401  # Why first: BentoML reads its home when it is imported.

pytest.importorskip("bentoml")

from adapters.bentoml.asgi_caller import JSON_TYPE, App, Exchange
from adapters.doors import LetterTokenizer, letters
from adapters.test_adapters_at_doors import Endless
from pagedcore import AsyncEngine
from pagedcore.errors import InvalidConfig
from pagedcore_openai import ApiKeys, openai_app
from pagedcore_openai.server import keys_of_environment
from support.adapters import write_adapter
from support.engine_builders import make_engine

ALL, MATH, FR, ANY, NONE, ADMIN = (f"key-of-tenant-{name}" for name in ("all", "math", "fr", "any", "none", "admin"))
MODELS = {MATH: ["math", "chat:de"], FR: ["math:fr"], ANY: ["chat:*"], NONE: list[str]()}
PROMPT = {"prompt": "abcd", "max_tokens": 2, "temperature": 0}
HIDDEN = {MATH: ["chat", "fr", "math:fr", "chat:fr", "math:*"], FR: ["math", "chat", "de", "chat:fr"],
          ANY: ["math", "math:fr"], NONE: ["math", "chat", "fr", "chat:de"]}
DOORS: dict[str, dict[str, Any]] = {
    "/v1/completions": PROMPT,
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2},
    "/v1/responses": {"input": "abc", "max_output_tokens": 2}, "/v1/embeddings": {"input": "abc"},
    "/v1/rerank": {"query": "a", "documents": ["b"]}, "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/classify": {"input": "abc"}, "/tokenize": {"prompt": "abc"}, "/detokenize": {"tokens": [3]},
}


@asynccontextmanager
async def opened(tmp_path: Path, **settings: Any) -> AsyncIterator[App]:
    """The models "math" with the adapter fr, and "chat" with de and fr, which are others."""
    async with AsyncExitStack() as stack:
        engines = dict[str, AsyncEngine]()
        for seed, (name, own) in enumerate((("math", ["fr"]), ("chat", ["de", "fr"]))):
            places = {one: write_adapter(tmp_path / name / one, 10 * seed + place) for place, one in enumerate(own, 1)}
            engine = make_engine(Endless(), tokenizer=LetterTokenizer(), adapters=places, adapter_memory=1000,
                                 num_kv_blocks=64)
            engines[name] = await stack.enter_async_context(AsyncEngine(engine, stream_interval_s=0.0))
        keys = ApiKeys([ALL, *MODELS], ADMIN, models=MODELS)
        app: Any = openai_app(engines, api_keys=keys, page=True, recordings=True, adapter_roots=[str(tmp_path)],
                              weights_dir=tmp_path, **settings)
        yield App(app, app, engines["math"])  # type: ignore[arg-type]


async def ask(app: App, key: str, path: str, body: Any = b"GET") -> Exchange:
    return await app.call(path, body, headers=[*JSON_TYPE, (b"authorization", f"Bearer {key}".encode())])


async def test_what_a_key_may_not_use_is_not_found(tmp_path: Path) -> None:
    """At every door that names a model, with the very answer that a name of nobody's gets."""
    async with opened(tmp_path) as app:
        for path, (key, hidden) in product(DOORS, HIDDEN.items()):
            for name in hidden:
                found, nobody = [await ask(app, key, path, {**DOORS[path], "model": one})
                                 for one in (name, "n" * len(name))]
                assert (found.status, found.text) == (404, nobody.text), (path, key, name)
            assert (await ask(app, ALL, path, {**DOORS[path], "model": hidden[0]})).status != 404


async def test_rights_are_the_keys_where_salts_are_a_hooks(tmp_path: Path) -> None:
    """An app that tells tenants apart by ``salt_of`` gives each key what is its own all the same."""
    async with opened(tmp_path, salt_of=lambda request: "everybody's") as app:
        answers = [await ask(app, FR, "/v1/completions", {**PROMPT, "model": name}) for name in ("math:fr", "chat")]
        assert [one.status for one in answers] == [200, 404]


async def test_a_key_lists_and_uses_what_it_was_given(tmp_path: Path) -> None:
    """Models alone, with one adapter, or with all; an adapter's own name is that of the first that the key may use."""
    listed = {ALL: ["math", "fr", "chat", "de", "chat:fr"], MATH: ["math", "de"], FR: ["fr"],
              ANY: ["chat", "de", "fr"], NONE: [], ADMIN: ["math", "fr", "chat", "de", "chat:fr"]}
    async with opened(tmp_path) as app:
        texts = dict[tuple[str, str], str]()
        for key, names in listed.items():
            models = json.loads((await ask(app, key, "/v1/models")).text)["data"]
            assert [one["id"] for one in models] == names
            for name in names:
                assert (await ask(app, key, f"/v1/models/{name}")).status == 200
                answer = json.loads((await ask(app, key, "/v1/completions", {**PROMPT, "model": name})).text)
                texts[key, name] = letters(answer["choices"][0]["text"])
        assert texts[ANY, "fr"] == texts[ALL, "chat:fr"] != texts[ALL, "fr"] == texts[FR, "fr"]
        assert texts[MATH, "de"] == texts[ANY, "de"] == texts[ALL, "de"]
        # Rule: what is the only one may be left out, and the others do not count.
        without = [(await ask(app, key, "/v1/completions", PROMPT)).status for key in listed]
        assert without == [400, 200, 200, 200, 400, 400]
        assert (await ask(app, MATH, "/v1/models/chat")).status == 404


async def test_an_adapter_beside_the_model_is_looked_at_too(tmp_path: Path) -> None:
    """One that a key may not use is refused as one that is not loaded; one that it may use needs no right to the model
    alone.
    """
    async with opened(tmp_path) as app:
        async def said(key: str, model: str, lora: Any) -> tuple[int, str]:
            answer = await ask(app, key, "/v1/completions", {**PROMPT, "model": model, "lora": lora})
            return answer.status, answer.text.replace(str(lora), "")

        assert await said(MATH, "math", "fr") == await said(MATH, "math", "no")
        assert (await said(MATH, "math", "fr"))[0] == 400
        for key, model, lora, status in ((FR, "math", "fr", 200), (FR, "math", "no", 404), (FR, "chat", "fr", 404),
                                         (FR, "fr", "fr", 200), (FR, "fr", "no", 400), (MATH, "chat", "de", 200),
                                         (MATH, "chat", "fr", 404), (ANY, "chat", "fr", 200), (FR, "math", 7, 404),
                                         (MATH, "math", 7, 400), (NONE, "math", "fr", 404)):
            assert (await said(key, model, lora))[0] == status, (key, model, lora)


async def test_a_live_view_is_found_by_rights_and_admins_have_all(tmp_path: Path) -> None:
    """A tenant sees the view of what it may use, by an adapter's name too; verbs of admins are for admins, whatever the
    name.
    """
    async with opened(tmp_path) as app:
        for key, name, status in ((MATH, "chat", 404), (MATH, "math", 200), (FR, "fr", 200), (NONE, "math", 404)):
            view = app.begin(f"/live?model={name}", b"GET", headers=[(b"authorization", f"Bearer {key}".encode())])
            while not view.messages:
                view.arrived.clear()
                await view.arrived.wait()
            assert view.status == status
            await view.leave()
        for name in ("math", "chat", "none"):
            load = {"model": name, "lora_name": "new", "lora_path": "chat/de"}
            for path, body in (("/v1/load_lora_adapter", load), ("/v1/unload_lora_adapter", load),
                               (f"/sleep?model={name}", b""), (f"/wake_up?model={name}", b""),
                               (f"/is_sleeping?model={name}", b"GET"),
                               ("/update_weights", {"model": name, "weights": "w"}), ("/metrics", b"GET")):
                assert (await ask(app, MATH, path, body)).status in (403, 404)
        assert (await ask(app, ADMIN, "/v1/load_lora_adapter", {**load, "model": "chat"})).status == 200
        # Rule: a right to all adapters is one to those that come later.
        statuses = [(await ask(app, key, "/v1/completions", {**PROMPT, "model": "new"})).status for key in (ANY, MATH)]
        assert statuses == [200, 404]


async def test_names_of_keys_are_checked_at_the_start(tmp_path: Path) -> None:
    """What is not served is refused without being repeated, because it may be a key; so is a right of no key."""
    with pytest.raises(InvalidConfig, match="key 2 is given a name that is not served") as refused:
        ApiKeys([ALL, MATH], models={MATH: ["math", NONE]}).rights(["math"])
    assert NONE not in str(refused.value)
    for name in ("math:", ":fr", "chat:fr", ""):
        with pytest.raises(InvalidConfig, match="not served"):
            ApiKeys([MATH], models={MATH: [name]}).rights(["math"])
    for key in (NONE, ADMIN):
        with pytest.raises(InvalidConfig, match="not among those of tenants"):
            ApiKeys([MATH], ADMIN, models={key: ["math"]})
    text = f"{ALL}, {MATH} math  chat:de,{FR} math:fr "
    keys = keys_of_environment({"PAGEDCORE_API_KEYS": text})
    assert keys is not None
    assert sorted(map(sorted, keys.rights(["math", "chat"]).values()), key=len) == [
        [("math", "fr")], [("chat", "de"), ("math", None)]]
    with pytest.raises(InvalidConfig, match="there twice"):
        keys_of_environment({"PAGEDCORE_API_KEYS": f"{text},{ALL}"})
