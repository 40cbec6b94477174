"""``/rerank``, ``/score`` and ``/classify``: bodies of vLLM, Jina and Cohere, and how they are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import adapters.bentoml.home  # noqa: F401  # Why first: BentoML reads its home when it is imported.

pytest.importorskip("starlette")

from starlette.testclient import TestClient

from adapters.openai.test_door import ONE, TWO
from pagedcore import AsyncEngine
from pagedcore_openai import ApiKeys, openai_app
from support.classifiers import LABELS, write_classifier
from support.rerankers import write_reranker

QUERY = "what is quick ?"
DOCUMENTS = ["the lazy dog", "a", "naïve café is ok , yes ?"]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, AsyncEngine]]:
    """A reranker and a classifier."""
    for name, write in (("reranker", write_reranker), ("classifier", write_classifier)):
        write(tmp_path_factory.getbasetemp() / name)
    settings: Any = {"num_kv_blocks": 128, "block_size": 4, "dtype": "float32"}
    with (AsyncEngine.from_pretrained(str(tmp_path_factory.getbasetemp() / "reranker"), **settings) as one,
          AsyncEngine.from_pretrained(str(tmp_path_factory.getbasetemp() / "classifier"), **settings) as other):
        yield {"reranker": one, "classifier": other}


@pytest.fixture(scope="module")
def client(engines: dict[str, AsyncEngine]) -> Iterator[TestClient]:
    """Both behind one door."""
    with TestClient(openai_app(engines), raise_server_exceptions=False) as client:
        yield client


async def test_documents_come_back_in_the_order_of_their_relevance(
    client: TestClient, engines: dict[str, AsyncEngine]
) -> None:
    """As vLLM, Jina and Cohere write it, on all their paths; the scores are the engine's."""
    wanted = await engines["reranker"].rerank(QUERY, DOCUMENTS)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        found = client.post(path, json={"model": "reranker", "query": QUERY, "documents": DOCUMENTS, "user": "me",
                                        "max_tokens_per_query": 0, "top_n": 0}).json()
        assert found["results"] == [{"index": one.index, "document": {"text": DOCUMENTS[one.index]},
                                     "relevance_score": one.score} for one in wanted]
        assert found["usage"]["total_tokens"] == sum(one.num_prompt_tokens for one in wanted)
        assert (found["model"], found["id"][:7]) == ("reranker", "rerank-")
    short = client.post("/rerank", json={
        "model": "reranker", "query": QUERY, "documents": [{"text": one} for one in DOCUMENTS], "top_n": 1,
        "return_documents": False, "use_activation": False, "instruction": "find naïve things"}).json()["results"]
    (own,) = await engines["reranker"].rerank(QUERY, DOCUMENTS, top_n=1, instruction="find naïve things")
    assert short == [{"index": own.index, "relevance_score": own.logit}]


async def test_pairs_are_scored_in_their_order(client: TestClient, engines: dict[str, AsyncEngine]) -> None:
    """One text and several, or as many of each."""
    wanted = [one.score for one in await engines["reranker"].score_pairs([(QUERY, one) for one in DOCUMENTS])]
    for first in (QUERY, [QUERY], [QUERY] * 3):
        found = client.post("/v1/score", json={"model": "reranker", "text_1": first, "text_2": DOCUMENTS}).json()
        assert [one["score"] for one in found["data"]] == wanted
        assert [one["index"] for one in found["data"]] == [0, 1, 2]
    assert found["object"] == "list"
    one = client.post("/score", json={"model": "reranker", "text_1": QUERY, "text_2": "a"}).json()["data"]
    assert one == [{"index": 0, "object": "score", "score": wanted[1]}]


async def test_texts_are_classified(client: TestClient, engines: dict[str, AsyncEngine]) -> None:
    """Text, several, and token ids; with and without what makes probabilities."""
    wanted = await engines["classifier"].classify(DOCUMENTS)
    ids = [engines["classifier"].input_processor.tokens_of_text(one) for one in DOCUMENTS]
    for given in (DOCUMENTS, ids):
        found = client.post("/classify", json={"model": "classifier", "input": given}).json()
        assert found["data"] == [{"index": place, "label": one.label, "probs": [*one.probs], "num_classes": 3}
                                 for place, one in enumerate(wanted)]
    raw = client.post("/v1/classify", json={"model": "classifier", "input": "a", "use_activation": False}).json()
    assert raw["data"][0]["probs"] == [*wanted[1].logits]
    assert raw["data"][0]["label"] in LABELS


_R = {"model": "reranker", "query": "a", "documents": ["a"]}
_S, _C = {"model": "reranker", "text_1": "a", "text_2": "b"}, {"model": "classifier", "input": "a"}


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/rerank", {**_R, "documents": []}, "documents"), ("/rerank", {**_R, "documents": "a"}, "documents"),
    ("/rerank", {**_R, "documents": ["a"] * 2049}, "documents"), ("/rerank", {**_R, "documents": [5]}, "documents[0]"),
    ("/rerank", {**_R, "documents": [{"text": "a", "image": "b"}]}, "documents[0]"),
    ("/rerank", {**_R, "documents": ["a", ""]}, "documents"),
    ("/rerank", {**_R, "documents": ["a " * 300]}, "documents"),
    ("/rerank", {**_R, "query": ""}, "query"), ("/rerank", {**_R, "query": ["a"]}, "query"),
    ("/rerank", {**_R, "query": None}, "query"), ("/rerank", {**_R, "query": "a" * 10**5}, "query"),
    ("/rerank", {**_R, "query": "\ud800"}, "query"),
    ("/rerank", {**_R, "top_n": -1}, "top_n"), ("/rerank", {**_R, "top_n": 1e400}, "body"),
    ("/rerank", {**_R, "top_n": 1.0}, "top_n"), ("/rerank", {**_R, "top_n": 10**40}, "top_n"),
    ("/rerank", {**_R, "top_n": False}, "top_n"), ("/rerank", {**_R, "return_documents": 1}, "return_documents"),
    ("/rerank", {**_R, "max_tokens_per_doc": 4}, "max_tokens_per_doc"), ("/rerank", {**_R, "topn": 4}, "topn"),
    ("/rerank", {**_R, "instruction": 5}, "instruction"), ("/rerank", {**_R, "model": "classifier"}, "model"),
    ("/rerank", {**_R, "timeout_s": -1}, "timeout_s"), ("/rerank", {**_R, "priority": 5}, "priority"),
    ("/rerank", {**_R, "cache_salt": ""}, "cache_salt"),
    ("/score", {**_S, "text_1": ["a"] * 2, "text_2": ["b"] * 3}, "text_1"),
    ("/score", {**_S, "text_1": [1]}, "text_1[0]"),
    ("/score", {**_S, "text_2": []}, "text_2"), ("/score", {**_S, "text_2": None}, "text_2"),
    ("/score", {**_S, "text_2": {"content": []}}, "text_2"), ("/score", {**_S, "text_1": ""}, "text_1"),
    ("/score", {**_S, "use_activation": "no"}, "use_activation"),
    ("/classify", {**_C, "input": []}, "input"), ("/classify", {**_C, "input": [[]]}, "input"),
    ("/classify", {**_C, "input": [10**30]}, "input"), ("/classify", {**_C, "input": [True]}, "input"),
    ("/classify", {**_C, "input": None}, "input"), ("/classify", {**_C, "model": "reranker"}, "model"),
    ("/classify", {**_C, "instruction": "a"}, "instruction"),
])
def test_hostile_bodies_name_their_field(path: str, body: dict[str, Any], param: str, client: TestClient) -> None:
    """With 400 and the name that the body has for it; the same calls are answered after them."""
    content = json.dumps(body).encode("utf8", "surrogatepass")
    refused = client.post(path, content=content, headers={"content-type": "application/json"})
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param
    assert len(refused.text) < 1000


def test_a_model_that_nobody_serves_is_a_404(client: TestClient) -> None:
    """On each of the paths."""
    for path, body in (("/rerank", _R), ("/score", _S), ("/classify", _C)):
        assert client.post(path, json={**body, "model": "x"}).status_code == 404
        assert client.post(path, json=body).status_code == 200


def test_keys_share_no_cache_and_no_room(engines: dict[str, AsyncEngine]) -> None:
    """A key is needed, and another key's query is computed anew."""
    engine = engines["reranker"]
    body = {"query": "what is quick and lazy ?", "documents": ["the dog"], "model": "reranker"}
    with TestClient(openai_app(engine, name="reranker", api_keys=ApiKeys([ONE, TWO]))) as client:
        assert client.post("/rerank", json=body).status_code == 401
        known = []
        for key in (ONE, TWO, ONE):
            before = engine.stats().num_cached_tokens
            assert client.post("/rerank", json=body, headers={"authorization": f"Bearer {key}"}).status_code == 200
            known.append(engine.stats().num_cached_tokens - before)
        assert known[:2] == [0, 0]
        assert known[2] > 0
    assert engine.stats().num_running == engine.stats().num_waiting == 0


def test_a_model_that_generates_reranks_nothing_and_says_so(tmp_path: Path) -> None:
    """With the field that names it."""
    with AsyncEngine.from_pretrained("demo", num_kv_blocks=64) as engine, TestClient(openai_app(engine)) as client:
        for path, body in (("/rerank", _R), ("/classify", _C)):
            refused = client.post(path, json={name: one for name, one in body.items() if name != "model"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
