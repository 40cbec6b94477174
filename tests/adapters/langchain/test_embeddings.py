"""LangChain's embeddings: its own standard suites, one engine that chats and embeds, and prompts of the model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from langchain_core.embeddings import Embeddings
from langchain_core.exceptions import ModelInvalidRequestError
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import EmbeddingsIntegrationTests
from langchain_tests.unit_tests import EmbeddingsUnitTests

from pagedcore import AsyncEngine, expose
from pagedcore.errors import InvalidRequest
from pagedcore_langchain import ChatPagedCore, PagedCoreEmbeddings
from pagedcore_langchain.host import EngineHost
from support.embedders import write_embedder


class Declared:
    """What the suites ask about embeddings, answered for these."""

    engine: ClassVar[AsyncEngine]

    @pytest.fixture(autouse=True)
    def _take_engine(self, demo_engine: AsyncEngine) -> None:
        Declared.engine = demo_engine

    @property
    def embeddings_class(self) -> type[Embeddings]:
        """The class under test."""
        return PagedCoreEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        """What it is made with."""
        return {"host": EngineHost(None, {}, Declared.engine)}


class TestUnit(Declared, EmbeddingsUnitTests):
    """LangChain's suite without calls."""


class TestIntegration(Declared, EmbeddingsIntegrationTests):
    """LangChain's suite of calls."""


async def test_one_engine_chats_and_embeds(engine: AsyncEngine) -> None:
    """Documents are found by what they mean to the model; the vectors are the engine's; chats on the same engine go on,
    from a program with an event loop and from one without."""
    chat = ChatPagedCore.from_engine(engine, max_tokens=24)
    embeddings = expose("langchain-embeddings", model=chat.engine, dimensions=16)
    texts = ["2 + 3 is 5", "9 - 5 is 4", "3 + 3 is 6"]
    store = InMemoryVectorStore(embeddings)
    answer, _ = await asyncio.gather(chat.ainvoke("What is 2 + 3?"), store.aadd_texts(texts))
    assert answer.text == (await chat.ainvoke("What is 2 + 3?")).text
    (found,) = store.similarity_search("2 + 3 is 5", k=1)
    assert found.page_content == texts[0]
    own = np.array(await engine.embed(texts, dimensions=16), np.float64)
    assert np.array_equal(np.array(await embeddings.aembed_documents(texts)), own)
    assert np.array_equal(np.array(await asyncio.to_thread(embeddings.embed_documents, texts)), own)


def test_queries_and_documents_have_the_models_prompts(tmp_path: Path) -> None:
    """By the names of sentence-transformers, or those that are chosen."""
    write_embedder(tmp_path, prompts={"query": "find: ", "passage": "", "other": "other: "})
    embeddings = PagedCoreEmbeddings(model=str(tmp_path), engine_settings={"num_kv_blocks": 64})
    try:
        engine, other = embeddings.engine, PagedCoreEmbeddings.from_engine(embeddings.engine, query_prompt="other")
        assert dict(engine.embedding_prompts) == {"query": "find: ", "passage": "", "other": "other: "}
        query, bare, chosen = (engine.input_processor.tokens_of_text(text)
                               for text in ("find: the fox", "the fox", "other: the fox"))
        wanted = [one.vector.tolist() for one in asyncio.run(engine.embed([query, bare, chosen]))]
        assert embeddings.embed_query("the fox") == wanted[0]
        assert embeddings.embed_documents(["the fox"]) == [wanted[1]]
        assert other.embed_query("the fox") == wanted[2]
    finally:
        embeddings.close()


async def test_refusals_are_langchains_too(engine: AsyncEngine) -> None:
    """What the engine refuses is an error of both; a model has to be named."""
    with pytest.raises(InvalidRequest) as refused:
        await PagedCoreEmbeddings.from_engine(engine, pooling="max").aembed_query("a")
    assert isinstance(refused.value, ModelInvalidRequestError)
    with pytest.raises(ValueError, match="model: not given"):
        PagedCoreEmbeddings()
