"""``/v1/rerank``, ``/v1/score`` and ``/v1/classify``, as vLLM has them: how relevant documents are, and classes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

from pagedcore import Classification, PairScore
from pagedcore.errors import InvalidPrompt
from pagedcore_http.events import encode
from pagedcore_http.json_pieces import map_in_pieces
from pagedcore_openai import fields as known
from pagedcore_openai.pooled import MAX_TEXTS, PooledCall, TextsCall


class RerankCall(PooledCall):
    """A query and documents, which come back in the order of their relevance."""

    form = known.RERANK
    verb = "rerank"
    prefix: ClassVar[str] = "rerank"
    names: ClassVar = {"document": "documents", "pair": "documents"}

    def read(self, fields: Mapping[str, Any]) -> None:
        """Read the query and the documents: texts, or objects that have one."""
        self._query = known.required(fields, "query", "text")
        given = known.required(fields, "documents", "a list of texts")
        if not isinstance(given, list) or not 1 <= len(given) <= MAX_TEXTS:
            raise InvalidPrompt("documents", len(given) if isinstance(given, list) else given,
                                f"a list of 1 to {MAX_TEXTS} texts")
        self._documents = [_text_of(one, place) for place, one in enumerate(given)]
        # Rule: of vLLM, 0 asks for all.
        self._top_n = None if type(top_n := fields.get("top_n")) is int and top_n == 0 else top_n
        self._shows = known.flag(fields, "return_documents", default=True)
        self._is_raw = not known.flag(fields, "use_activation", default=True)
        self._asked = _asked(fields)

    async def whole(self) -> str:
        """Rerank and return the response as JSON."""
        found = await self.engine.rerank(
            self._query, self._documents, top_n=self._top_n, **self._asked, **self.limits)
        entries = await map_in_pieces(self._written, found, at_once=16)
        rest = encode({"id": self.id, "model": self.served.name, "usage": _usage(found)})
        return f'{rest[:-1]},"results":[{",".join(entries)}]}}'

    def _written(self, one: PairScore) -> str:
        shown = {"document": {"text": self._documents[one.index]}} if self._shows else {}
        return encode({"index": one.index, **shown, "relevance_score": one.logit if self._is_raw else one.score})


class ScoreCall(PooledCall):
    """Pairs of texts: one and several, or as many of each."""

    form = known.SCORE
    verb = "score_pairs"
    prefix: ClassVar[str] = "score"
    names: ClassVar = {"query": "text_1", "document": "text_2", "pair": "text_2", "pairs": "text_2"}

    def read(self, fields: Mapping[str, Any]) -> None:
        """Read the pairs."""
        first, second = (known.required(fields, name, "text, or a list of texts") for name in ("text_1", "text_2"))
        firsts, seconds = _texts("text_1", first), _texts("text_2", second)
        if len(firsts) not in (1, len(seconds)):
            raise InvalidPrompt("text_1", len(firsts), f"one text, or as many as text_2 has ({len(seconds)})")
        self._pairs = list(zip(firsts * (len(seconds) if len(firsts) == 1 else 1), seconds, strict=True))
        self._is_raw = not known.flag(fields, "use_activation", default=True)
        self._asked = _asked(fields)

    async def whole(self) -> str:
        """Score and return the response as JSON."""
        found = await self.engine.score_pairs(self._pairs, **self._asked, **self.limits)
        entries = await map_in_pieces(self._written, found, at_once=64)
        return _listed(self, entries, _usage(found))

    def _written(self, one: PairScore) -> str:
        return encode({"index": one.index, "object": "score", "score": one.logit if self._is_raw else one.score})


class ClassifyCall(TextsCall):
    """Texts, or token ids, whose classes are asked for."""

    form = known.CLASSIFY
    verb = "classify"
    prefix: ClassVar[str] = "classify"

    def read(self, fields: Mapping[str, Any]) -> None:
        """Read the texts, and in which form their classes are wanted."""
        super().read(fields)
        self._is_raw = not known.flag(fields, "use_activation", default=True)

    async def whole(self) -> str:
        """Classify and return the response as JSON."""
        found = await self.engine.classify(self._texts, **self.limits)
        entries = await map_in_pieces(self._written, [*enumerate(found)], at_once=16)
        return _listed(self, entries, _usage(found))

    def _written(self, placed: tuple[int, Classification]) -> str:
        place, one = placed
        probs = one.logits if self._is_raw else one.probs
        return encode({"index": place, "label": one.label, "probs": probs, "num_classes": one.num_classes})


def _asked(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: fields[name] for name in ("instruction", "prompt_name") if name in fields}


def _text_of(document: Any, place: int) -> str:
    """Return the text of a document, as Jina's and Cohere's clients write it."""
    text = document.get("text") if isinstance(document, dict) and document.keys() == {"text"} else document
    if not isinstance(text, str):
        raise InvalidPrompt(f"documents[{place}]", document, "text, or an object that has nothing but a text")
    return text


def _texts(name: str, given: Any) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not 1 <= len(texts) <= MAX_TEXTS:
        raise InvalidPrompt(name, len(texts) if isinstance(texts, list) else texts,
                            f"text, or a list of 1 to {MAX_TEXTS} texts")
    for place, one in enumerate(texts):
        if not isinstance(one, str):
            raise InvalidPrompt(f"{name}[{place}]", one, "text")
    return texts


def _usage(found: list[Any]) -> dict[str, int]:
    count = sum(one.num_prompt_tokens for one in found)
    return {"prompt_tokens": count, "total_tokens": count}


def _listed(call: PooledCall, entries: list[str], usage: dict[str, int]) -> str:
    head = encode({"id": call.id, "object": "list", "created": int(time.time()), "model": call.served.name,
                   "usage": usage})
    return f'{head[:-1]},"data":[{",".join(entries)}]}}'
