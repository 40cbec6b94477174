"""From what a caller wrote to something the scheduler can run: the one door that every adapter goes through.

Tokenises, validates completely and resolves defaults, without touching the engine's state: it is safe to call from
any thread, and whatever it refuses was never taken. Next: ``engine.Engine.add_request``.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any, cast

from pagedcore.errors import InvalidPrompt, TooManySequences
from pagedcore.outputs import TokenText
from pagedcore.protocols import ChatMessage, Tokenizer
from pagedcore.requests import validation
from pagedcore.sampling_params import SamplingParams

Prompt = str | SequenceOf[int] | SequenceOf[ChatMessage]
"""Text, token ids, or chat messages (mappings with "role" and "content")."""


@dataclass(frozen=True, slots=True)
class ProcessedRequest:
    """A request that passed the door: everything resolved, nothing allocated."""

    token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int]
    priority: int = 0
    cache_salt: bytes = b""
    """Requests share blocks with others of the same salt only."""


@dataclass(frozen=True, slots=True)
class InputProcessor:
    """The engine's validator, with the bounds of one model and one KV pool."""

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    """Positions of the model, as configured."""
    num_pool_tokens: int
    """Positions that the whole KV pool can hold."""
    max_num_waiting: int
    """Sequences that may wait; a request has to fit the queue when it is empty."""
    eos_token_ids: frozenset[int]

    def prepare(
        self, prompt: Prompt, params: SamplingParams | None, priority: int = 0, cache_salt: str | bytes | None = None
    ) -> ProcessedRequest:
        """Check and resolve a new request.

        Raises:
            InvalidRequest: the subclass names the input, the value and the limit.
        """
        params = params if params is not None else SamplingParams()
        validation.validate_priority(priority)
        salt = validation.validate_salt(cache_salt)
        return replace(self._resolve(self._token_ids(prompt), 0, params, priority), cache_salt=salt)

    def prepare_continuation(self, prompt: Prompt, known_token_ids: list[int], params: SamplingParams,
                             priority: int) -> ProcessedRequest:
        """Check and resolve a further turn after ``known_token_ids``; only the new tokens are in the result."""
        token_ids = self._continuation_ids(prompt, known_token_ids)
        return self._resolve(token_ids, len(known_token_ids), params, priority)

    def token_text(self, token_id: int) -> TokenText:
        """Say what a token stands for.

        Raises:
            InvalidRequest: it is not in the vocabulary.
        """
        validation.validate_prompt_ids([token_id], self.vocab_size, 2)
        if self.tokenizer is None:
            return TokenText("", None)
        if (token_text := getattr(self.tokenizer, "token_text", None)) is not None:
            return cast("TokenText", token_text(token_id))
        # Why: a tokenizer of the user's own need not have more than its protocol says.
        text = self.tokenizer.decode([token_id])
        return TokenText(text, text.encode() if text and "\ufffd" not in text else None)

    def _resolve(self, token_ids: list[int], num_known: int, params: SamplingParams, priority: int) -> ProcessedRequest:
        validation.check_params_for_model(params, self.vocab_size)
        if params.num_initial_sequences > self.max_num_waiting:
            what = "n" if params.n == params.num_initial_sequences else "best_of"
            limit = f"up to max_num_waiting ({self.max_num_waiting})"
            raise TooManySequences(what, params.num_initial_sequences, limit)
        validation.validate_prompt_ids(token_ids, self.vocab_size, self.max_model_len - num_known)
        num_prompt = num_known + len(token_ids)
        longest = self.max_model_len
        if params.max_tokens is None:
            longest = max(min(longest, self.num_pool_tokens), num_prompt + 1)
        max_tokens = validation.resolve_max_tokens(params, num_prompt, longest)
        validation.check_fits_pool(num_prompt, max_tokens, params.num_sequences, self.num_pool_tokens)
        stops = self.eos_token_ids.union(params.stop_token_ids)
        return ProcessedRequest(list(token_ids), params, max_tokens, stops, priority)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            validation.validate_text(prompt, self.max_model_len)
            return self._require_tokenizer("text").encode(prompt)
        if _is_chat(prompt):
            messages = validation.validate_chat(prompt, self.max_model_len)
            return self._require_tokenizer("chat messages").encode_chat(messages)
        return prompt  # type: ignore[return-value]  # Why: whatever is left is refused by validate_prompt_ids

    def _continuation_ids(self, prompt: Prompt, known_token_ids: list[int]) -> list[int]:
        if isinstance(prompt, str):
            validation.validate_text(prompt, self.max_model_len)
            return self._require_tokenizer("text").encode(prompt, add_special_tokens=False)
        if _is_chat(prompt):
            messages = validation.validate_chat(prompt, self.max_model_len)
            return self._require_tokenizer("chat messages").encode_chat_turn(messages, known_token_ids)
        return self._token_ids(prompt)

    def _require_tokenizer(self, kind: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidPrompt("prompt", kind, "token ids", "This engine has no tokenizer; pass tokenizer=... or ids.")
        return self.tokenizer


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and not isinstance(prompt[0], int)
