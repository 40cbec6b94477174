"""LangChain's compressor of documents: the best of them, by the engine's scores, beside everything else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("langchain_core")

from langchain_core.documents import Document

from pagedcore import AsyncEngine, expose
from pagedcore.errors import InvalidRequest
from pagedcore_langchain import PagedCoreRerank
from support.rerankers import write_reranker

QUERY = "what is quick ?"
TEXTS = ["the lazy dog", "a", "ok , yes ?"]
DOCUMENTS = [Document(text, metadata={"place": place}) for place, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reranker with an instruction of its own."""
    path = tmp_path_factory.mktemp("reranker")
    write_reranker(path, prompts={"prompts": {"strict": "the dog"}})
    return path


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[AsyncEngine]:
    """It on an engine."""
    with AsyncEngine.from_pretrained(str(directory), num_kv_blocks=64) as engine:
        yield engine


async def test_the_best_documents_come_first_with_their_scores(engine: AsyncEngine) -> None:
    """From a program with an event loop and from one without; the documents that were given are as they were."""
    wanted = await engine.rerank(QUERY, [one.page_content for one in DOCUMENTS], instruction="the fox")
    rerank = expose("langchain-rerank", model=engine, top_n=2, instruction="the fox")
    for found in (await rerank.acompress_documents(DOCUMENTS, QUERY),
                  await asyncio.to_thread(rerank.compress_documents, DOCUMENTS, QUERY)):
        assert [one.metadata for one in found] == [
            {"place": one.index, "relevance_score": one.score} for one in wanted[:2]]
        assert [one.page_content for one in found] == [DOCUMENTS[one.index].page_content for one in wanted[:2]]
    assert all(one.metadata.keys() == {"place"} for one in DOCUMENTS)
    assert await rerank.acompress_documents([], QUERY) == []


def test_it_has_an_engine_of_its_own(directory: Path) -> None:
    """With the options of requests, and the directory's own instructions; it is closed by its owner."""
    rerank = PagedCoreRerank(model=str(directory), engine_settings={"num_kv_blocks": 64}, top_n=None,
                             prompt_name="strict", cache_salt="mine", timeout=30)
    try:
        assert len(rerank.compress_documents(DOCUMENTS, QUERY)) == 3
        assert "mine" not in repr(rerank)
        with pytest.raises(InvalidRequest, match="document"):
            rerank.compress_documents([Document("")], QUERY)
    finally:
        rerank.close()
    with pytest.raises(ValueError, match="model: not given"):
        PagedCoreRerank()
    with pytest.raises(ValueError, match="top_n"):
        PagedCoreRerank(model="demo", top_n=0)
