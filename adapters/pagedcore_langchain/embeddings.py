"""``PagedCoreEmbeddings``: LangChain's embeddings on an engine, which may be the one of a chat model."""

from __future__ import annotations

from langchain_core.embeddings import Embeddings
from typing_extensions import override

from pagedcore_langchain.errors import also_langchains
from pagedcore_langchain.on_engine import OnEngine, run_here

_QUERY, _DOCUMENTS = ("query",), ("document", "passage", "corpus")
"""What sentence-transformers calls the prompts of the two."""


class PagedCoreEmbeddings(OnEngine, Embeddings):
    """Vectors of texts, in the same steps as the completions of other models on the engine.

    Texts are put behind the model's prompts for queries and documents, if its directory has such. Not given,
    ``pooling``, ``normalize`` and ``dimensions`` are as for ``AsyncEngine.embed``. Errors are as with
    ``ChatPagedCore``.
    """

    pooling: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    query_prompt: str | None = None
    """The name of the prompt that is put before a query; ``None``: "query", if there is such; "": none."""
    document_prompt: str | None = None
    """The same for documents; ``None``: "document", "passage" or "corpus"."""

    @override
    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return the vectors of documents."""
        return run_here(self.aembed_documents(texts))

    @override
    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a query."""
        return run_here(self.aembed_query(text))

    @override
    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return the vectors of documents."""
        return await self._embed(texts, self.document_prompt, _DOCUMENTS)

    @override
    async def aembed_query(self, text: str) -> list[float]:
        """Return the vector of a query."""
        (vector,) = await self._embed([text], self.query_prompt, _QUERY)
        return vector

    async def _embed(self, texts: list[str], prompt: str | None, names: tuple[str, ...]) -> list[list[float]]:
        with also_langchains():
            engine = await self.host.ready()
            if prompt is None:
                prompt = next((name for name in names if name in engine.embedding_prompts), None)
            found = await engine.embed(
                texts, pooling=self.pooling, normalize=self.normalize, dimensions=self.dimensions,  # type: ignore[arg-type]
                prompt_name=prompt, **self.limits)
        return [one.vector.tolist() for one in found]
