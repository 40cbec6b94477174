"""Texts that get no completion: inputs and outputs of ``/embed`` and ``/rerank``, and their calls of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import BaseModel, WithJsonSchema, create_model

from pagedcore import AsyncEngine, Embedding, PairScore
from pagedcore.errors import InvalidPrompt
from pagedcore_bentoml.calls import Call
from pagedcore_bentoml.wire import EndpointInput, EndpointOutput, TokenUsage, option_fields
from pagedcore_http.json_pieces import map_in_pieces, with_list

MAX_TEXTS: Final = 2048
"""Texts of one call; the engine has 64 of them at a time."""
_FLOATS_AT_ONCE: Final = 16
_EMBED: Final = ("pooling", "normalize", "dimensions", "prompt_name")
_RERANK: Final = ("top_n", "instruction", "prompt_name")

_Texts = Annotated[Any, WithJsonSchema({
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    "description": "Text, or a list of texts.",
})]  # fmt: skip
_Text = Annotated[Any, WithJsonSchema({"type": "string"})]
_Flag = Annotated[Any, WithJsonSchema({"type": "boolean", "description": "Whether vectors have length 1."})]
_Number = Annotated[Any, WithJsonSchema({"type": "integer"})]

EmbedInput: Final = create_model(
    "EmbedInput", __base__=EndpointInput, __module__=__name__, __doc__="Texts whose vectors are wanted.",
    texts=(_Texts, ...), **option_fields(), pooling=(_Text, None), normalize=(_Flag, None), dimensions=(_Number, None),
    prompt_name=(_Text, None),
)
RerankInput: Final = create_model(
    "RerankInput", __base__=EndpointInput, __module__=__name__, __doc__="A query, and documents to be ordered.",
    query=(_Text, ...), documents=(_Texts, ...), **option_fields(), top_n=(_Number, None), instruction=(_Text, None),
    prompt_name=(_Text, None),
)


class Vectors(EndpointOutput):
    """The vectors of texts, in their order."""

    embeddings: list[list[float]]
    usage: TokenUsage

    async def json_in_pieces(self) -> str:
        """Return the JSON of ``model_dump_json``."""
        rows = await map_in_pieces(_numbers, self.embeddings, _FLOATS_AT_ONCE)
        return f'{{"embeddings":[{",".join(rows)}],"usage":{self.usage.model_dump_json()}}}'


class Ranked(BaseModel):
    """One document: its place in the call, and how relevant it is."""

    index: int
    score: float


class Ranking(EndpointOutput):
    """Documents by their relevance, best first."""

    usage: TokenUsage
    results: list[Ranked]

    async def json_in_pieces(self) -> str:
        """Return the JSON of ``model_dump_json``."""
        text = self.model_dump_json(exclude={"results"})
        return await with_list(text, "results", self.results, Ranked.model_dump_json)


async def embed(engine: AsyncEngine, asked: Mapping[str, Any], call: Call) -> Vectors:
    """Turn texts into vectors; cancelling this aborts what is left. Raises as ``AsyncEngine.embed``."""
    texts = _list_of("texts", asked["texts"])
    found = await engine.embed(
        texts, timeout_s=call.timeout_s, wait_for_room=False, **{name: asked[name] for name in _EMBED}, **call.options)
    vectors = await map_in_pieces(lambda one: one.vector.tolist(), found, _FLOATS_AT_ONCE)
    return Vectors(embeddings=vectors, usage=_usage(found))


async def rerank(engine: AsyncEngine, asked: Mapping[str, Any], call: Call) -> Ranking:
    """Order documents; cancelling this aborts what is left. Raises as ``AsyncEngine.rerank``."""
    documents = _list_of("documents", asked["documents"])
    found = await engine.rerank(
        asked["query"], documents, timeout_s=call.timeout_s, wait_for_room=False,
        **{name: asked[name] for name in _RERANK}, **call.options)
    return Ranking(results=[Ranked(index=one.index, score=one.score) for one in found], usage=_usage(found))


def _list_of(name: str, given: Any) -> list[Any]:
    """Return the texts of a call. Raises ``InvalidPrompt``."""
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not 1 <= len(texts) <= MAX_TEXTS:
        raise InvalidPrompt(name, len(texts) if isinstance(texts, list) else texts,
                            f"text, or a list of 1 to {MAX_TEXTS} texts")
    return texts


def _usage(found: Sequence[Embedding | PairScore]) -> TokenUsage:
    return TokenUsage(
        num_prompt_tokens=sum([one.num_prompt_tokens for one in found]),
        num_cached_tokens=sum([one.num_cached_tokens for one in found]), num_output_tokens=0)


def _numbers(vector: list[float]) -> str:
    return f"[{','.join(map(repr, vector))}]"
