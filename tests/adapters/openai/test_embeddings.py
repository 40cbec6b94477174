"""``/v1/embeddings``: what the official client sends and reads, and every way in which it is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import adapters.bentoml.home  # noqa: F401  # Why first: BentoML reads its home when it is imported.

pytest.importorskip("openai")
pytest.importorskip("bentoml")

import openai
from openai import OpenAI

from adapters.openai.loopback import serving
from adapters.openai.test_door import JSON_TYPE, ONE, TWO, opened, with_key
from pagedcore import AsyncEngine
from pagedcore_openai import ApiKeys, create, openai_app
from support.embedders import write_embedder

TEXTS = ["What is 2 + 3?", "What is 9 - 5?", "a"]
PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    """The demo model."""
    with AsyncEngine.from_pretrained("demo", num_kv_blocks=256) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: AsyncEngine) -> Iterator[OpenAI]:
    """The official client."""
    with serving(openai_app(engine, name="demo")) as url, OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_the_client_reads_the_engines_vectors(client: OpenAI, engine: AsyncEngine) -> None:
    """As numbers and in base64, which the client asks for by itself; of a text, of several, of token ids; with fewer
    dimensions. They have the bytes of the engine's own."""
    wanted = await engine.embed(TEXTS)
    ids = [engine.encode(text) for text in TEXTS]
    for given in (TEXTS, ids):
        for encoding in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            found: Any = client.embeddings.create(model="demo", input=given, user="me", **encoding)  # type: ignore[arg-type]
            assert [one.index for one in found.data] == [0, 1, 2]
            if encoding.get("encoding_format") == "float" or not encoding:
                vectors = np.array([one.embedding for one in found.data], np.float32)
                assert vectors.tobytes() == np.array(wanted).tobytes()
            else:
                assert all(isinstance(one.embedding, str) for one in found.data)
            assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))
    (short,) = client.embeddings.create(model="demo", input=TEXTS[0], dimensions=8).data
    (own,) = await engine.embed(TEXTS[0], dimensions=8)
    assert np.array(short.embedding, np.float32).tobytes() == own.vector.tobytes()


@pytest.mark.parametrize(("fields", "param"), [
    ({"input": ""}, "input"), ({"input": []}, "input"), ({"input": [1, -1]}, "input"), ({"input": [["a"]]}, "input[0]"),
    ({"input": ["a"] * 2049}, "input"), ({}, "input"), ({"input": "a", "dimensions": 10**6}, "dimensions"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format"), ({"input": "a", "pooling": "cls"}, "pooling"),
    ({"input": "a", "prompt_name": "query"}, "prompt_name"), ({"input": "a" * 10**5}, "input"),
    ({"input": "a", "truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
    ({"input": "a", "dimension": 4}, "dimension"),
])
def test_what_cannot_be_embedded_names_its_field(fields: dict[str, Any], param: str, client: OpenAI) -> None:
    """With 400, and the name that the body has for it."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/embeddings", body={"model": "demo", **fields}, cast_to=object)
    assert refused.value.param == param


async def test_texts_of_a_key_are_its_own() -> None:
    """A key is needed, as for completions."""
    body = {"input": list(range(1, 13)), "model": "pagedcore"}
    async with opened(api_keys=ApiKeys([ONE, TWO])) as app:
        assert (await app.call(PATH, body, headers=JSON_TYPE)).status == 401
        for key in (ONE, TWO, ONE):
            exchange = await app.call(PATH, body, headers=with_key(key))
            assert exchange.status == 200, exchange.text
            assert json.loads(exchange.text)["usage"]["prompt_tokens"] == 12


def test_a_model_that_embeds_only_is_served(tmp_path: Any) -> None:
    """It starts, embeds, and says of completions that it has none."""
    write_embedder(tmp_path)
    with serving(create(str(tmp_path), name="own", num_kv_blocks=64)) as url, OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        (one,) = client.embeddings.create(model="own", input="the quick").data
        assert len(one.embedding) == 64
        with pytest.raises(openai.BadRequestError, match="without an output layer"):
            client.completions.create(model="own", prompt="the quick")
