"""``PagedCoreRerank``: LangChain's compressor of documents, which keeps those that are relevant to a query."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import PositiveInt
from typing_extensions import override

from pagedcore_langchain.errors import also_langchains
from pagedcore_langchain.on_engine import OnEngine, run_here


class PagedCoreRerank(OnEngine, BaseDocumentCompressor):
    """Orders documents by their relevance to a query, as ``AsyncEngine.rerank``, and keeps the best.

    Each document that is kept is a copy with ``relevance_score`` among its metadata. Errors are as with
    ``ChatPagedCore``; one is a document without text.
    """

    top_n: PositiveInt | None = 3
    """How many are kept; ``None``: all."""
    instruction: str | None = None
    """What the model is told to look for."""
    prompt_name: str | None = None
    """The one of the directory's instructions that is used; "": none."""

    @override
    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Return the most relevant documents, best first."""
        return run_here(self.acompress_documents(documents, query, callbacks))

    @override
    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Return the most relevant documents, best first."""
        given = list(documents)
        with also_langchains():
            engine = await self.host.ready()
            found = await engine.rerank(
                query, [one.page_content for one in given], top_n=self.top_n, instruction=self.instruction,
                prompt_name=self.prompt_name, **self.limits)
        return [given[one.index].model_copy(update={
            "metadata": {**given[one.index].metadata, "relevance_score": one.score}}) for one in found]
