"""``/embed`` and ``/rerank`` of a BentoML service: the engine's own numbers, tenants, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bentoml
import pytest

import adapters.bentoml.home  # noqa: F401  # Why first: BentoML reads its home when it is imported.

pytest.importorskip("bentoml")

from adapters.bentoml.asgi_caller import serving
from pagedcore import AsyncEngine
from pagedcore_bentoml import PagedCoreRunner
from support.rerankers import write_reranker

TEXTS = ["the quick brown fox", "naïve café"]
QUERY, DOCUMENTS = "what is quick ?", ["the lazy dog", "a", "naïve café is ok , yes ?"]


class ByHeader(PagedCoreRunner):
    """Tells tenants apart by a header."""

    def salt_of(self, ctx: bentoml.Context | None) -> str:
        """Return it."""
        return "nobody" if ctx is None else ctx.request.headers["x-tenant"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    """A reranker, whose states are vectors too where a call says how."""
    directory: Path = tmp_path_factory.getbasetemp() / "bentoml-reranker"
    write_reranker(directory)
    with AsyncEngine.from_pretrained(str(directory), num_kv_blocks=128, block_size=4, dtype="float32") as engine:
        yield engine


async def test_documents_are_ordered_by_the_engine(engine: AsyncEngine) -> None:
    """With its scores, in JSON and in Python; tenants share no cached query."""
    wanted = await engine.rerank(QUERY, DOCUMENTS)
    async with serving(engine, base=ByHeader) as app:
        body, tenant = {"query": QUERY, "documents": DOCUMENTS}, [(b"x-tenant", b"one")]
        first, again = [json.loads((await app.call("/rerank", body, headers=tenant)).text) for _ in range(2)]
        other = json.loads((await app.call("/rerank", body, headers=[(b"x-tenant", b"two")])).text)
        for found in (first, again, other):
            assert found["results"] == [{"index": one.index, "score": one.score} for one in wanted]
        counts = [found["usage"]["num_cached_tokens"] for found in (first, again, other)]
        assert counts[0] == counts[2] < counts[1]
        best = await app.call("/rerank", {**body, "top_n": 1}, headers=tenant)
        assert [one["index"] for one in json.loads(best.text)["results"]] == [wanted[0].index]
        for field, value in (("documents", []), ("documents", [1]), ("documents", ["a"] * 2049), ("query", 5),
                             ("top_n", 0), ("top_n", True), ("priority", "x"), ("dokuments", [])):
            refused = await app.call("/rerank", {**body, field: value}, headers=tenant)
            assert refused.status == 400, (field, value)


async def test_texts_become_the_engines_vectors() -> None:
    """All digits of them, one text or several; what the model or a limit refuses is a 400."""
    with AsyncEngine.from_pretrained("demo", num_kv_blocks=64) as engine:
        wanted = [one.vector.tolist() for one in await engine.embed(TEXTS, pooling="mean")]
        async with serving(engine) as app:
            found: Any = json.loads((await app.call("/embed", {"texts": TEXTS, "pooling": "mean"})).text)
            assert found["embeddings"] == wanted
            assert found["usage"]["num_output_tokens"] == 0 < found["usage"]["num_prompt_tokens"]
            alone = json.loads((await app.call("/embed", {"texts": TEXTS[0], "pooling": "mean"})).text)
            assert alone["embeddings"] == wanted[:1]
            assert (await app.runner.embed(TEXTS[1], pooling="mean")).embeddings == wanted[1:]
            for field, value in (("texts", []), ("texts", [None]), ("texts", ["a"] * 2049), ("pooling", "max"),
                                 ("normalize", 1), ("dimensions", 0), ("timeout_s", "x"), ("request_id", 5)):
                refused = await app.call("/embed", {"texts": TEXTS, "pooling": "mean", field: value})
                assert refused.status == 400, (field, value)
