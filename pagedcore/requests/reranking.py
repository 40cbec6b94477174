"""From a query and documents to requests whose last hidden state says how relevant each is, and back to scores.

A pair is one text, as the model's chat template writes it, or as its tokenizer joins two. What comes before the
documents is the same for all of them, so that the prefix cache has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pagedcore.config.field_rules import integer
from pagedcore.errors import InvalidPrompt, InvalidRequest, InvalidText
from pagedcore.outputs import PairScore, RequestOutput
from pagedcore.protocols import ChatMessage, EncodesPairs, RendersTools
from pagedcore.request_options import RequestOptions
from pagedcore.requests import validation
from pagedcore.requests.classification import checked_state
from pagedcore.requests.embedding import prompt_named, vector_of
from pagedcore.requests.input_processor import InputProcessor, ProcessedRequest
from pagedcore.text_head import TextHead, activated
from pagedcore.tokenizer.chat import Chat

KEYWORDS: Final = ("instruction", "prompt_name")
_PROBE: Final = ("pagedcore-probe-query", "pagedcore-probe-document", "pagedcore-probe-instruction")
"""Contents that no template writes by itself."""
_ROLES: Final = ("query", "document", "system")
"""What templates of rerankers call them, as those of sentence-transformers do."""


@dataclass(frozen=True, slots=True)
class PairScorer:
    """Validated: how pairs become texts of one model."""

    inputs: InputProcessor
    head: TextHead
    uses_template: bool
    instruction: str

    @classmethod
    def of(cls, inputs: InputProcessor, instruction: str | None = None, prompt_name: str | None = None) -> PairScorer:
        """Check what a caller asks for. Arguments as ``Engine.rerank``.

        Raises:
            InvalidRequest: a value is refused, or this model reranks nothing.
        """
        pairs, head = inputs.pairs, inputs.head
        if pairs.refusal or head is None or not inputs.hidden_size:
            reason = pairs.refusal or "its backend returns no hidden states"
            raise InvalidRequest("model", f"one that reranks nothing: {reason}", "another model", is_described=True)
        if instruction is not None:
            if prompt_name is not None:
                raise InvalidRequest("prompt_name", prompt_name, "None beside an instruction")
            _require_text("instruction", instruction, inputs)
        asked = instruction or prompt_named(pairs.prompts, pairs.default_prompt, prompt_name)
        uses_template = pairs.uses_template
        if uses_template is None:
            uses_template = isinstance(inputs.tokenizer, RendersTools) and bool(inputs.tokenizer.chat_template)
        scorer = cls(inputs, head, uses_template, asked)
        if uses_template:
            scorer._require_roles()
        return scorer

    def process(self, pair: Any, options: RequestOptions) -> ProcessedRequest:
        """Tokenise and validate one pair of query and document; callable from any thread.

        Raises:
            InvalidRequest: one of them is empty, or no text, or both are too long; or an option is refused.
            TextFailed: the tokenizer failed on it.
        """
        inputs = self.inputs
        inputs.check_options(options)
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise InvalidPrompt("pair", pair, "a query and a document")
        query, document = pair
        _require_text("query", query, inputs)
        _require_text("document", document, inputs)
        ids = self._tokens(query, document)
        return checked_state(inputs, self.head, ids, options, "document", inputs.pairs.max_tokens)

    def result_of(self, output: RequestOutput) -> PairScore:
        """Return the score of a request that has ended, the first of a call. Raises ``RequestFailed``."""
        logits = self.head.logits(vector_of(output))
        (score,) = activated(self.inputs.pairs.activation, logits)
        return PairScore(0, score, logits[0], len(output.prompt_token_ids), output.num_cached_tokens, output.metrics)

    def _tokens(self, query: str, document: str) -> list[int]:
        if self.uses_template:
            return self.inputs.tokens_of_chat(self._chat(query, document, self.instruction))
        tokenizer = self.inputs.tokenizer
        if not isinstance(tokenizer, EncodesPairs):
            raise InvalidRequest("model", "one without a tokenizer of pairs", "one with its tokenizer",
                                 is_described=True)
        return self.inputs.tokens_of(lambda: tokenizer.encode_pair(self.instruction + query, document))

    def _chat(self, query: str, document: str, instruction: str) -> Chat:
        contents = (instruction, query, document) if instruction else (query, document)
        roles = (_ROLES[2], *_ROLES[:2])[-len(contents):]
        messages: list[ChatMessage] = [{"role": role, "content": content}
                                       for role, content in zip(roles, contents, strict=True)]
        arguments = self.inputs.pairs.template_arguments
        others = {name: value for name, value in arguments.items() if name != "add_generation_prompt"}
        return Chat(messages, template_arguments=others,
                    add_generation_prompt=bool(arguments.get("add_generation_prompt", False)))

    def _require_roles(self) -> None:
        """Raise ``InvalidRequest`` for a template that leaves out a part of the pair, or the instruction."""
        if isinstance(self.inputs.tokenizer, RendersTools):
            written = self._probe(_PROBE[2] if self.instruction else "")
            if all(one in written for one in _PROBE[:2]):
                if self.instruction and _PROBE[2] not in written:
                    raise InvalidRequest("instruction", "one", "None with this model, whose chat template has no role "
                                         "system", is_described=True)
                return
        raise InvalidRequest(
            "model", "one that reranks nothing: its chat template does not write the roles query and document",
            "one whose template does", "Build the engine with chat_template=...", is_described=True)

    def _probe(self, instruction: str) -> str:
        try:
            return self.inputs.render(self._chat(_PROBE[0], _PROBE[1], instruction))
        except InvalidPrompt:
            return ""


def _require_text(name: str, text: object, inputs: InputProcessor) -> None:
    if not isinstance(text, str):
        raise InvalidPrompt(name, text, "text")
    if not text:
        raise InvalidText(name, text, "text of at least 1 character")
    validation.validate_text(text, inputs.max_model_len, name)


def pairs_of(query: str, documents: Any) -> list[tuple[str, str]]:
    """Return the pairs of a call; one text is one document. Raises ``InvalidPrompt`` if they are no iterable."""
    if isinstance(documents, str):
        return [(query, documents)]
    if not isinstance(documents, Iterable) or isinstance(documents, Mapping):
        raise InvalidPrompt("documents", documents, "text, or several of them")
    return [(query, one) for one in documents]


def pair_list(pairs: Any) -> list[tuple[str, str]]:
    """Return the pairs of a call as a list. Raises ``InvalidPrompt`` if they are no iterable."""
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        raise InvalidPrompt("pairs", pairs, "several pairs of a query and a document")
    return list(pairs)


def numbered(scores: list[PairScore]) -> list[PairScore]:
    """Return the scores of a call with their places in it."""
    return [replace(one, index=place) for place, one in enumerate(scores)]


def ranked(scores: Iterable[PairScore], top_n: int | None) -> list[PairScore]:
    """Return the best scores, best first, equal ones in the order of the call."""
    return sorted(scores, key=lambda one: (-one.score, one.index))[:top_n]


def check_top_n(top_n: object) -> int | None:
    """Return how many scores are wanted; ``None``: all. Raises ``InvalidRequest``."""
    return integer(1, 2**31 - 1).or_none().check("top_n", top_n)
