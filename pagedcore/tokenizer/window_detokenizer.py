"""Tokens to text for any decoder at all: decode a window of the last tokens again and return what no probe changes.

Exact or loud: ``finish`` compares with the one-shot decoding of the whole answer. Each push costs one decoding of the
window per probe (about a hundred microseconds), so this is the last resort of ``detokenizer_choice``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pagedcore.errors import InternalError
from pagedcore.tokenizer.byte_detokenizer import Decode

#: Tokens a window may have before it is cut; bounds the cost of a push.
_MAX_WINDOW: Final = 64
#: Tokens kept before the cut, so that decoders that look back still see what they looked at.
_CONTEXT: Final = 16


def _common_prefix(first: str, second: str) -> str:
    if second.startswith(first):
        return first
    return first[: next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(second))]


class WindowDetokenizer:
    """Decodes one answer with nothing but the tokenizer's one-shot decoding.

    Text is certain if it stands at the start of the decoding of the window alone and followed by each probe, and no
    U+FFFD ends it (a longer continuation might complete a character). The window is cut where all of its text is
    certain; without such a place it grows.

    Invariant: ``_certain`` is what of the window's text was returned; all text before the window was.

    Args:
        decode: the tokenizer's one-shot decoding.
        probes: token ids that may follow; none: nothing is certain before ``finish``.
    """

    __slots__ = ("_certain", "_decode", "_probes", "_returned", "_token_ids", "_window_start")

    def __init__(self, decode: Decode, probes: Sequence[int]) -> None:
        self._decode = decode
        self._probes = probes
        self._token_ids: list[int] = []
        self._window_start = 0
        self._certain = ""
        self._returned: list[str] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that has become certain.

        Raises:
            InternalError: these tokens change text that no probe had changed.
        """
        self._token_ids += token_ids
        if not self._probes:
            return ""
        window = self._token_ids[self._window_start :]
        text = self._decode(window)
        certain = text
        for probe in self._probes:
            certain = _common_prefix(certain, self._decode([*window, probe]))
        return self._return(certain.rstrip("\ufffd"), text)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of one token's own decoding, ``None`` where that is nothing or no whole characters."""
        text = self._decode([token_id])
        return text.encode() if text and "\ufffd" not in text else None

    def finish(self) -> str:
        """Return what was held back.

        Raises:
            InternalError: what was returned is not the start of the one-shot decoding.
        """
        text, returned = self._decode(self._token_ids), "".join(self._returned)
        if not text.startswith(returned):
            raise InternalError("detokenizer: the tokenizer's decoding changed text that was already returned")
        return text[len(returned) :]

    def _return(self, certain: str, text: str) -> str:
        if len(certain) <= len(self._certain):
            return ""
        if not certain.startswith(self._certain):
            raise InternalError("detokenizer: the tokenizer's decoding changed text that was already returned")
        delta = certain[len(self._certain) :]
        self._certain = certain
        self._returned.append(delta)
        if certain == text:
            self._cut()
        return delta

    def _cut(self) -> None:
        if len(self._token_ids) - self._window_start > _MAX_WINDOW:
            self._window_start = len(self._token_ids) - _CONTEXT
            self._certain = self._decode(self._token_ids[self._window_start :])
