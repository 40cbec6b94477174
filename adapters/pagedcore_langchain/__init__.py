"""LangChain models on a pagedcore engine: batches, chains, threads and tasks share one continuous batch.

    from pagedcore_langchain import ChatPagedCore

    chat = ChatPagedCore(model="demo", max_tokens=64)
    print(chat.invoke("What is 2 + 3?").content)

Uses only public names of pagedcore. LangChain is imported when a model class is first used. Read ``settings.py`` for
what both models have in common, then ``chat.py``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pagedcore_langchain.chat import ChatPagedCore
    from pagedcore_langchain.embeddings import PagedCoreEmbeddings
    from pagedcore_langchain.llm import PagedCoreLLM
    from pagedcore_langchain.rerank import PagedCoreRerank

__all__ = ["ChatPagedCore", "PagedCoreEmbeddings", "PagedCoreLLM", "PagedCoreRerank", "create_chat",
           "create_embeddings", "create_llm", "create_rerank"]

_HOMES: Final = {"ChatPagedCore": "pagedcore_langchain.chat", "PagedCoreLLM": "pagedcore_langchain.llm",
                 "PagedCoreEmbeddings": "pagedcore_langchain.embeddings",
                 "PagedCoreRerank": "pagedcore_langchain.rerank"}


def create_chat(model: Any, **settings: Any) -> ChatPagedCore:
    """Build a chat model around a model, or around an ``AsyncEngine``, which its owner closes.

    Args:
        model: what ``AsyncEngine.from_pretrained`` takes, or an ``AsyncEngine``.
        **settings: fields of ``ChatPagedCore``; all other names go to the engine.

    Raises:
        MissingDependency: LangChain is not installed.
        InvalidConfig: as from ``AsyncEngine.from_pretrained``.
    """
    chat: ChatPagedCore = _find("ChatPagedCore").around(model, settings)
    return chat


def create_llm(model: Any, **settings: Any) -> PagedCoreLLM:
    """Build a completion model; as ``create_chat``, with the fields of ``PagedCoreLLM``."""
    llm: PagedCoreLLM = _find("PagedCoreLLM").around(model, settings)
    return llm


def create_embeddings(model: Any, **settings: Any) -> PagedCoreEmbeddings:
    """Build embeddings; as ``create_chat``, with the fields of ``PagedCoreEmbeddings``."""
    embeddings: PagedCoreEmbeddings = _find("PagedCoreEmbeddings").around(model, settings)
    return embeddings


def create_rerank(model: Any, **settings: Any) -> PagedCoreRerank:
    """Build a compressor of documents; as ``create_chat``, with the fields of ``PagedCoreRerank``."""
    rerank: PagedCoreRerank = _find("PagedCoreRerank").around(model, settings)
    return rerank


def __getattr__(name: str) -> Any:
    """Import a model class on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'pagedcore_langchain' has no attribute {name!r}")
    globals()[name] = value = _find(name)
    return value


def _find(name: str) -> Any:
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("langchain_core", "pydantic"):
            raise
        from pagedcore.errors import MissingDependency

        raise MissingDependency(f"pagedcore_langchain needs {error.name}. Install pagedcore[langchain].") from error
