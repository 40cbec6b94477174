"""``PagedCoreEmbeddings``: LangChain's embeddings on an engine, which may be the one of a chat model."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

from langchain_core.embeddings import Embeddings
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, SecretBytes, SecretStr, model_validator
from typing_extensions import override

from pagedcore import AsyncEngine, EngineConfig
from pagedcore.errors import InvalidConfig
from pagedcore_langchain.background import BACKGROUND
from pagedcore_langchain.errors import also_langchains
from pagedcore_langchain.host import EngineHost
from pagedcore_langchain.options import reveal_secret

T = TypeVar("T")
_QUERY, _DOCUMENTS = ("query",), ("document", "passage", "corpus")
"""What sentence-transformers calls the prompts of the two."""


class PagedCoreEmbeddings(BaseModel, Embeddings):
    """Vectors of texts, in the same steps as the completions of other models on the engine.

    Texts are put behind the model's prompts for queries and documents, if its directory has such. Not given,
    ``pooling``, ``normalize`` and ``dimensions`` are as for ``AsyncEngine.embed``. Errors are as with
    ``ChatPagedCore``.
    """

    # Safety: a refused salt must not be repeated.
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, hide_input_in_errors=True)

    model: str = "pagedcore"
    """``"demo"``, a directory or a hub id; with an engine of your own, the name to report."""
    engine_settings: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Fields of ``EngineConfig`` for the engine that this builds."""
    pooling: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    query_prompt: str | None = None
    """The name of the prompt that is put before a query; ``None``: "query", if there is such; "": none."""
    document_prompt: str | None = None
    """The same for documents; ``None``: "document", "passage" or "corpus"."""
    timeout: PositiveFloat | None = None
    """Longest time for a call, in seconds; then ``RequestTimeout``."""
    priority: int = 0
    cache_salt: SecretStr | SecretBytes | None = Field(default=None, exclude=True, repr=False)
    """Texts with different salts share no cached blocks. Give each tenant its own."""
    tenant: str = ""
    weight: float = 1.0
    deadline_s: PositiveFloat | None = None
    host: EngineHost = Field(default=None, exclude=True, repr=False)  # type: ignore[assignment]  # Why: set below.

    @model_validator(mode="after")
    def _make_host(self) -> Self:
        if self.host is None:
            if "model" not in self.model_fields_set:
                raise InvalidConfig('model: not given; name one, such as "demo", a directory or a hub id, or give an '
                                    "engine of your own with from_engine.")
            self.host = EngineHost(self.model, self.engine_settings)
            self.model_fields_set.discard("host")
        return self

    @classmethod
    def from_engine(cls, engine: AsyncEngine, **fields: Any) -> Self:
        """Build it on an engine that its owner shares and closes, such as ``chat.engine``."""
        return cls(host=EngineHost(None, {}, engine), **fields)

    @classmethod
    def around(cls, model: Any, settings: dict[str, Any]) -> Self:
        """Build the engine now; names in ``settings`` that are no fields of this class go to the engine."""
        if isinstance(model, AsyncEngine):
            return cls.from_engine(model, **settings)
        own = {name: value for name, value in settings.items() if name in cls.model_fields}
        rest = {name: value for name, value in settings.items() if name not in own}
        EngineConfig.require_names(rest, cls.model_fields)
        name = model if isinstance(model, str) else type(model).__name__
        host = EngineHost(model, rest | own.pop("engine_settings", {}))
        made = cls(**{"model": name, "host": host, **own})
        _ = host.engine
        return made

    @property
    def engine(self) -> AsyncEngine:
        """The engine, built now if it is not there yet. Raises ``InvalidConfig`` as ``from_pretrained``."""
        return self.host.engine

    def close(self) -> None:
        """Close the engine, unless it was handed over."""
        self.host.close()

    @override
    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return the vectors of documents."""
        return _run(self.aembed_documents(texts))

    @override
    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a query."""
        return _run(self.aembed_query(text))

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
                prompt_name=prompt, timeout_s=self.timeout, priority=self.priority, tenant=self.tenant,
                weight=self.weight, deadline_s=self.deadline_s, cache_salt=reveal_secret(self.cache_salt),
            )
        return [one.vector.tolist() for one in found]


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    if not BACKGROUND.is_here:
        return BACKGROUND.run(coroutine)
    # Why: a callback that runs on the background's own loop would wait for itself.
    with ThreadPoolExecutor(1) as other:
        return other.submit(asyncio.run, coroutine).result()
