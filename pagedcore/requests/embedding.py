"""From texts to requests whose hidden states become vectors, and from their outputs to what callers get.

Owns what is checked of an embedding: the one way in, for every door. A text goes through the engine as a request does
that has no completion. Read ``pooling.py`` for the vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pagedcore.config.field_rules import BOOLEAN, integer, one_of
from pagedcore.embedding_defaults import POOLINGS
from pagedcore.errors import InvalidPrompt, InvalidRequest, InvalidText, PromptTooLong, RequestFailed, describe_name
from pagedcore.outputs import Embedding, RequestOutput
from pagedcore.request_options import RequestOptions
from pagedcore.requests import validation
from pagedcore.requests.input_processor import InputProcessor, ProcessedRequest
from pagedcore.requests.pooling import TextReader
from pagedcore.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedcore.protocols import FloatArray

Text = str | list[int]
"""Text, or the token ids of one, which are taken as they are: without a prompt, and with no token appended."""
KEYWORDS: Final = ("pooling", "normalize", "dimensions", "prompt_name")
_PARAMS: Final = SamplingParams(max_tokens=1, ignore_eos=True)
"""A text takes as many steps as a completion of one token."""


def read_request(
    inputs: InputProcessor, token_ids: list[int], options: RequestOptions, reader: Callable[[], TextReader]
) -> ProcessedRequest:
    """Return a request of checked tokens that generates nothing, and whose hidden states a reader of its own takes."""
    return ProcessedRequest(token_ids, _PARAMS, options, 1, frozenset(), has_candidates=False,
                            context=inputs.context(), new_reader=reader)


def last_state(inputs: InputProcessor, token_ids: list[int], options: RequestOptions) -> ProcessedRequest:
    """Return a request that asks for the last hidden state of checked tokens."""
    return read_request(inputs, token_ids, options, partial(TextReader, len(token_ids) - 1, None, False))


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """Validated: how texts become vectors of one model."""

    inputs: InputProcessor
    pools_all: bool
    """Whether the mean of all positions is taken, and not the last one."""
    normalize: bool
    dimensions: int | None
    prompt: str
    """What is put before each text."""
    num_skipped: int
    """Tokens at the beginning of a text that are not pooled."""

    @classmethod
    def of(
        cls, inputs: InputProcessor, pooling: str | None = None, normalize: bool | None = None,
        dimensions: int | None = None, prompt_name: str | None = None,
    ) -> TextEncoder:
        """Check what a caller asks for; ``None`` is what the model's directory says. Arguments as ``Engine.embed``.

        Raises:
            InvalidRequest: a value is out of range, or this model makes no vectors.
        """
        defaults = inputs.embeddings
        if defaults.refusal or not inputs.hidden_size:
            reason = defaults.refusal or "its backend returns no hidden states"
            raise InvalidRequest("model", f"one that makes no embeddings: {reason}", "another model", is_described=True)
        pooling = one_of(*POOLINGS).or_none().check("pooling", pooling) or defaults.pooling
        if pooling not in POOLINGS:
            raise InvalidRequest("pooling", f"{describe_name(pooling)}, as the model's directory says",
                                 f"one of {', '.join(POOLINGS)}", is_described=True)
        normalize = BOOLEAN.or_none().check("normalize", normalize)
        prompt = prompt_named(defaults.prompts, defaults.default_prompt, prompt_name)
        skips = bool(prompt) and pooling == "mean" and not defaults.pools_prompt
        return cls(
            inputs, pooling == "mean", defaults.normalize if normalize is None else normalize,
            integer(1, inputs.hidden_size).or_none().check("dimensions", dimensions), prompt,
            _num_tokens_of_prompt(inputs, prompt) if skips else 0,
        )

    def process(self, text: Text, options: RequestOptions) -> ProcessedRequest:
        """Tokenise and validate one text; callable from any thread.

        Raises:
            InvalidRequest: the text is empty, too long, or neither text nor token ids; or an option is refused.
            TextFailed: the tokenizer failed on it.
        """
        inputs, token_ids = self.inputs, self._tokens(text)
        inputs.check_options(options)
        most = inputs.longest_text(inputs.embeddings.max_tokens)
        if len(token_ids) > most:
            raise PromptTooLong("text", len(token_ids), f"at most {most} tokens")
        ids = validation.validate_prompt_ids(token_ids, inputs.vocab_size, inputs.max_model_len + 1)
        first = min(self.num_skipped, len(ids) - 1) if self.pools_all else len(ids) - 1
        return read_request(inputs, ids, options, partial(TextReader, first, self.dimensions, self.normalize))

    def _tokens(self, text: Any) -> Any:
        if not isinstance(text, str):
            if not isinstance(text, list | tuple):
                raise InvalidPrompt("text", text, "text, or a list of token ids")
            return text
        if not text:
            raise InvalidText("text", text, "text of at least 1 character")
        return self.inputs.tokens_of_text(self.prompt + text)


def _num_tokens_of_prompt(inputs: InputProcessor, prompt: str) -> int:
    """Return how many tokens a text begins with because of its prompt, as sentence-transformers counts them."""
    whole, bare = inputs.tokens_of_text(prompt), inputs.tokens_of_text(prompt, adds_special_tokens=False)
    # Why: a token that the tokenizer appends stands behind the text, not behind the prompt.
    return len(whole) - (whole[-1:] != bare[-1:])


def prompt_named(prompts: Mapping[str, str], default: str | None, name: str | None) -> str:
    """Return the one of a directory's prompts that a caller names, or else the usual one; "" for none.

    Raises:
        InvalidRequest: there is none of that name.
    """
    chosen = default if name is None else name
    if chosen is None or (chosen == "" and name is not None):
        return ""
    if not isinstance(chosen, str) or chosen not in prompts:
        known = ", ".join(map(describe_name, prompts)) or "none, as the model's directory has no prompts"
        raise InvalidRequest("prompt_name", describe_name(chosen), known, is_described=True)
    return prompts[chosen]


def texts_of(texts: Any, name: str = "texts") -> list[Any]:
    """Return the texts of a call as a list; one text, or the token ids of one, is one. ``name`` is the argument's.

    Raises:
        InvalidPrompt: it is neither a text nor an iterable.
    """
    if isinstance(texts, str):
        return [texts]
    if not isinstance(texts, Iterable):
        raise InvalidPrompt(name, texts, "text, token ids, or several of them")
    given = list(texts)
    return [given] if given and type(given[0]) is int else given


def options_at(options: RequestOptions, place: int) -> RequestOptions:
    """Return the options of the text at a place of a call: its label is the call's with the place behind it.

    Raises:
        InvalidRequest: the label is too long then.
    """
    # Why: labels are unique among the requests of a salt.
    return options if not place or options.request_id is None else replace(
        options, request_id=f"{options.request_id}-{place}")


def embedding_of(output: RequestOutput) -> Embedding:
    """Return the vector of a request that has ended.

    Raises:
        RequestFailed: it failed; or it was aborted.
    """
    return Embedding(vector_of(output), len(output.prompt_token_ids), output.num_cached_tokens, output.metrics)


def vector_of(output: RequestOutput) -> FloatArray:
    """Return what the reader of a request that has ended made. Raises as ``embedding_of``."""
    output.raise_for_error()
    if output.vector is None:
        raise RequestFailed("the request was aborted before its text was computed")
    return output.vector
