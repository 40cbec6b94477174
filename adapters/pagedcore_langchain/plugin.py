"""What pagedcore's plugin manager loads: the adapter's names, without importing LangChain."""

from __future__ import annotations

from typing import Any

from pagedcore.plugins.hookspecs import hookimpl


@hookimpl
def pagedcore_register(registry: Any) -> None:
    """Add the LangChain models to the table of adapters."""
    registry.adapters.add("langchain", "pagedcore_langchain:create_chat", extra="langchain",
                          summary="a LangChain chat model")
    registry.adapters.add("langchain-llm", "pagedcore_langchain:create_llm", extra="langchain",
                          summary="a LangChain completion model")
    registry.adapters.add("langchain-embeddings", "pagedcore_langchain:create_embeddings", extra="langchain",
                          summary="LangChain embeddings")
    registry.adapters.add("langchain-rerank", "pagedcore_langchain:create_rerank", extra="langchain",
                          summary="a LangChain compressor that reranks documents")
