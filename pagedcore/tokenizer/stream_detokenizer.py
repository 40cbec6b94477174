"""Tokens to text for tokenizers that are neither byte tables nor pieces, by decoding a window of the last tokens.

``DecodeStream`` of the tokenizers library and ``decode_window``, for tokenizers without a Rust backend, have the same
rule. It is not exact for every tokenizer, so ``detokenizer_choice`` tries it first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pagedcore.errors import InternalError
from pagedcore.tokenizer.byte_detokenizer import Decode

Stepper = Callable[[int], str | None]
"""Takes the next token id; returns the text that has become certain."""


def decode_stream(backend: Any) -> Stepper:
    """Start a ``DecodeStream`` of a ``tokenizers.Tokenizer``."""
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=True)

    def step(token_id: int) -> str | None:
        try:
            text: str | None = stream.step(backend, token_id)
            return text
        except Exception:  # Why: the library raises the bare type.
            pass
        # Safety: raised outside the handler, because the library's message quotes the completion.
        raise _text_changed()

    return step


def decode_at_end() -> Stepper:
    """Return nothing for any token, for tokenizers whose text is certain only at the end."""
    return lambda token_id: None


def decode_window(decode: Decode) -> Stepper:
    """Start the rule of ``DecodeStream`` over any one-shot decoding.

    The window holds the tokens of the text returned last and those since. What the window's decoding adds to that
    text is returned, unless it ends with U+FFFD, because a further token might complete a character. A window of more
    than 16 tokens is decoded again when it has grown by a sixteenth.
    """
    window: list[int] = []
    returned, num_returned, next_length = "", 0, 0

    def step(token_id: int) -> str | None:
        nonlocal window, returned, num_returned, next_length
        window.append(token_id)
        # Why: a caller can bias a completion to bytes of no character; each would be decoded as often as others follow.
        if len(window) < next_length:
            return None
        text, before = decode(window), returned
        next_length = 0
        if len(text) <= len(before) or text.endswith("\ufffd"):
            next_length = len(window) + len(window) // 16
            return None
        if not text.startswith(before):
            raise _text_changed()
        window = window[num_returned:]
        returned, num_returned = decode(window), len(window)
        return text[len(before) :]

    return step


class StreamDetokenizer:
    """Decodes one completion step by step and compares with the one-shot decoding at the end: exact or an error."""

    __slots__ = ("_decode", "_returned", "_step", "_token_ids")

    def __init__(self, decode: Decode, new_stepper: Callable[[], Stepper]) -> None:
        self._decode, self._step = decode, new_stepper()
        self._token_ids: list[int] = []
        self._returned: list[str] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that has become certain.

        Raises:
            InternalError: these tokens change text that was already returned.
        """
        self._token_ids += token_ids
        text = "".join([self._step(token_id) or "" for token_id in token_ids])
        self._returned.append(text)
        return text

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of one token's own decoding, ``None`` if that is empty or not whole characters."""
        text = self._decode([token_id])
        return text.encode() if text and "\ufffd" not in text else None

    def finish(self) -> str:
        """Return what was held back.

        Raises:
            InternalError: what was returned is not the start of the one-shot decoding.
        """
        text, returned = self._decode(self._token_ids), "".join(self._returned)
        if not text.startswith(returned):
            raise _text_changed()
        return text[len(returned) :]


def _text_changed() -> InternalError:
    return InternalError("detokenizer: the tokenizer's decoding changed text that was already returned")
