"""Checks prompts, and the parameters that depend on the prompt or the model, for every entry point.

It allocates nothing in proportion to what it refuses, and knows no engine. Checks that need no model are in
``sampling_params.py``; ``input_processor.py`` calls these in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any, Final

from pagedcore.config.field_rules import integer, seconds
from pagedcore.config.limits import MAX_PARKING_S, MAX_RETURNED_LOGITS_BYTES, MAX_TEXT_BYTES_PER_TOKEN
from pagedcore.errors import (
    InvalidMaxTokens,
    InvalidMinTokens,
    InvalidPrompt,
    InvalidRequest,
    InvalidSampling,
    InvalidToken,
    PromptEmpty,
    PromptTooLong,
    RequestStateError,
    RequestTooLarge,
    TooManySequences,
    describe,
)
from pagedcore.request_options import TIMEOUT
from pagedcore.sampling_params import SamplingParams, validate_params
from pagedcore.tokenizer.text_size import count_text_bytes

_IDS_AT_ONCE = 16_384

validate_ttl: Final = partial(seconds(0, MAX_PARKING_S, above_low=True).or_none().check, "ttl_s")
"""Checks for how many seconds parked KV is kept, and returns it. Raises ``InvalidRequest``."""
validate_timeout: Final = partial(TIMEOUT.check, "timeout_s")
"""Checks a time limit in seconds, and returns it. Raises ``InvalidRequest``."""


def pair_with_params(prompts: Any, params: Any) -> list[tuple[Any, Any]]:
    """Return each prompt of a batch with its parameters, which are one for all, or an iterable with one for each.

    Raises:
        InvalidRequest: the prompts are not iterable, or there is another number of parameters.
    """
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise InvalidRequest("prompts", prompts, "a list of prompts", "For one prompt pass [prompt].")
    prompts = list(prompts)
    if isinstance(params, str | bytes | Mapping) or not isinstance(params, Iterable):
        return [(prompt, params) for prompt in prompts]
    params = list(params)
    if len(params) != len(prompts):
        raise InvalidRequest("params", len(params), f"one SamplingParams, or one per prompt ({len(prompts)})")
    return list(zip(prompts, params, strict=True))


def validate_prompt_ids(token_ids: object, vocab_size: int, max_model_len: int) -> list[int]:
    """Check a prompt of token ids and return it as a new list.

    Raises:
        InvalidPrompt: not a list or tuple, or an element is not exactly an ``int``.
        PromptEmpty: no token.
        PromptTooLong: more than ``max_model_len - 1`` tokens; the completion needs a position.
        InvalidToken: an id is not from 0 to ``vocab_size - 1``.
    """
    if not isinstance(token_ids, list | tuple):
        raise InvalidPrompt("prompt", token_ids, "text, a list of token ids, or a list of chat messages",
                            "Arrays and tensors have tolist().")
    if not token_ids:
        raise PromptEmpty("prompt", 0, "at least 1 token")
    if len(token_ids) > max_model_len - 1:
        raise PromptTooLong("prompt", len(token_ids), f"at most {max(max_model_len - 1, 0)} tokens",
                            f"The context of {max_model_len} positions must keep one for the completion.")
    ids = list(token_ids)
    # Why: in pieces, because a caller's event loop cannot run during any one of these calls.
    for start in range(0, len(ids), _IDS_AT_ONCE):
        some = ids[start : start + _IDS_AT_ONCE]
        if set(map(type, some)) != {int}:
            wrong = next(token_id for token_id in some if type(token_id) is not int)
            raise InvalidPrompt(
                "prompt", f"a list with {describe(wrong)}",
                "text, a list of token ids (Python integers, no booleans or NumPy scalars), or a list of chat messages "
                "(mappings with a role and a content)",
                "Several texts are several prompts." if isinstance(wrong, str) else "", is_described=True,
            )
        _require_in_vocabulary("prompt", (min(some), max(some)), vocab_size)
    return ids


def _require_in_vocabulary(what: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidToken(what, token_id, f"token ids from 0 to {vocab_size - 1}")


def validate_text(text: object, max_model_len: int, what: str = "text") -> str:
    """Return text. Raises ``InvalidText`` if it is no ``str`` or not encodable, ``TextTooLong`` if it could not fit."""
    count_text_bytes(what, text, MAX_TEXT_BYTES_PER_TOKEN * max_model_len)
    return text  # type: ignore[return-value]  # Why: the line above refuses what is no str


def resolve_max_tokens(params: SamplingParams, num_prompt_tokens: int, max_model_len: int) -> int:
    """Return how many tokens the completion may have: without ``max_tokens`` the rest of the context.

    Raises:
        InvalidMaxTokens: the context has less room than asked for; nothing is clamped silently.
        InvalidMinTokens: ``min_tokens`` is more than the result.
    """
    room = max_model_len - num_prompt_tokens
    max_tokens = params.max_tokens if params.max_tokens is not None else room
    if not 1 <= max_tokens <= room:
        raise InvalidMaxTokens("max_tokens", max_tokens, f"1 to {max(room, 0)}",
                               f"The prompt takes {num_prompt_tokens} of {max_model_len} positions.")
    if params.min_tokens > max_tokens:
        raise InvalidMinTokens("min_tokens", params.min_tokens, f"0 to max_tokens, {max_tokens} here")
    return max_tokens


def check_params_for_model(params: SamplingParams, vocab_size: int) -> None:
    """Check the parameters that name tokens against one model's vocabulary.

    Raises:
        InvalidToken: a stop, biased, allowed, forced, suppressed or bad token is not in the vocabulary.
        InvalidSampling: ``top_k`` is more than the vocabulary.
        TooManySequences: ``beam_width`` is more than the vocabulary.
    """
    if params.top_k > vocab_size:
        raise InvalidSampling("top_k", params.top_k, f"0 (off) or 1 to {vocab_size}, the vocabulary")
    if params.beam_width > vocab_size:
        raise TooManySequences("beam_width", params.beam_width, f"1 (off) to {vocab_size}, the vocabulary")
    _require_in_vocabulary("stop_token_ids", params.stop_token_ids, vocab_size)
    _require_in_vocabulary("logit_bias", params.logit_bias or (), vocab_size)
    _require_in_vocabulary("suppress_tokens", params.suppress_tokens, vocab_size)
    _require_in_vocabulary("begin_suppress_tokens", params.begin_suppress_tokens, vocab_size)
    _require_in_vocabulary("forced_eos_token_id", params.forced_eos_token_id or (), vocab_size)
    _require_in_vocabulary("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _require_in_vocabulary("bad_words_ids", chain.from_iterable(params.bad_words_ids), vocab_size)


def check_returned_logits(params: SamplingParams, max_tokens: int, vocab_size: int) -> None:
    """Raise ``RequestTooLarge`` if the logits of a request that asks for them take more memory than one may."""
    cost = 4 * params.num_sequences * max_tokens * vocab_size
    if cost > MAX_RETURNED_LOGITS_BYTES:
        raise RequestTooLarge(
            "return_logits", cost, f"at most {MAX_RETURNED_LOGITS_BYTES} bytes",
            f"It is 4 x sequences x tokens x vocabulary = 4 x {params.num_sequences} x {max_tokens} x {vocab_size}: "
            "lower max_tokens, or n or best_of.",
        )


def check_fits_pool(num_prompt_tokens: int, max_tokens: int, num_sequences: int, pool_tokens: int) -> None:
    """Raise ``RequestTooLarge`` if a request does not fit a KV pool of its own when its sequences share nothing."""
    cost = num_sequences * (num_prompt_tokens + max_tokens)
    if cost > pool_tokens:
        raise RequestTooLarge(
            "request", cost, f"at most {pool_tokens} tokens in the KV pool",
            f"It is sequences x (prompt + max_tokens) = {num_sequences} x ({num_prompt_tokens} + {max_tokens}): "
            "lower max_tokens, or n, best_of or beam_width, or give the engine more kv_cache_memory.",
        )


def index_of_completion(index: int | None, num_completions: int) -> int:
    """Return which of a request's completions is continued.

    Raises:
        RequestStateError: there are several, and none is named.
        InvalidRequest: there is none of this index.
    """
    if index is None and num_completions > 1:
        raise RequestStateError("extend", "one with several completions", "continued from one of them",
                                f"Give an index from 0 to {num_completions - 1}.")
    return 0 if index is None else integer(0, num_completions - 1).check("index", index)


def require_one_completion(params: SamplingParams | None) -> None:
    """Raise ``TooManySequences`` unless parameters ask for one completion, which a session can continue."""
    num_sequences = validate_params(params).num_sequences
    if num_sequences != 1:
        raise TooManySequences(
            "n, best_of or beam_width", num_sequences, "1 in a session",
            "Fork the session to try several continuations.",
        )
