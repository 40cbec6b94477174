"""Tokens to text for byte-level tokenizers, where every token is a fixed string of bytes.

The tokenizer itself is not needed once the table is built. ``detokenizer_choice`` decides whether it is exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Final

Decode = Callable[[Sequence[int]], str]
"""The one-shot decoding of a tokenizer: token ids to text, special tokens left out."""
_UNFINISHED: Final = re.compile(
    rb"(?:[\xC2-\xDF]"
    rb"|\xE0[\xA0-\xBF]?|[\xE1-\xEC\xEE\xEF][\x80-\xBF]?|\xED[\x80-\x9F]?"
    rb"|\xF0(?:[\x90-\xBF][\x80-\xBF]?)?|[\xF1-\xF3][\x80-\xBF]{0,2}|\xF4(?:[\x80-\x8F][\x80-\xBF]?)?)\Z"
)
"""The proper beginnings of all well-formed sequences (Unicode 16, table 3-7) at the end of the bytes.
Why: the incremental decoder of ``codecs`` also waits after ED A0, which nothing can complete."""
_PRINTABLE: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""The alphabet of GPT-2: printable Latin-1 characters stand for themselves, the other 68 bytes are numbered from U+0100
on, in order. Other code points below 256 are mapped to a non-byte."""
_HIDDEN: Final = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF_CHARACTER: Final = (
    dict.fromkeys(_HIDDEN, 0xFFFF) | {byte: byte for byte in _PRINTABLE} | dict(enumerate(_HIDDEN, 0x100))
)


def token_bytes(token: str) -> bytes:
    """Return the bytes a byte-level vocabulary entry stands for; one outside the alphabet stands for its own UTF-8."""
    try:
        return token.translate(_BYTE_OF_CHARACTER).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def byte_table(vocabulary: Mapping[int, str], skipped_ids: Container[int]) -> dict[int, bytes]:
    """Build the table of one tokenizer: token id to bytes; ids that give no text are left out."""
    return {token_id: token_bytes(token) for token_id, token in vocabulary.items() if token_id not in skipped_ids}


def split_unfinished(data: bytes) -> tuple[bytes, bytes]:
    """Split the bytes before the unfinished character at their end, if there is one: at most three bytes."""
    unfinished = _UNFINISHED.search(data, max(0, len(data) - 3)) if data and data[-1] >= 0x80 else None
    return (data, b"") if unfinished is None else (data[: unfinished.start()], unfinished[0])


class ByteLevelDetokenizer:
    """Decodes one completion; the cost of a push is linear in the bytes pushed.

    Each invalid byte sequence gives one U+FFFD per maximal subpart (Unicode 16, section 3.9), which is also what the
    one-shot decoding of ``tokenizers`` gives.

    Invariant: ``_pending``, the bytes not yet returned, is the unfinished beginning of one character, or empty.
    """

    __slots__ = ("_bytes_of", "_pending")

    def __init__(self, table: Mapping[int, bytes]) -> None:
        self._bytes_of = table.get
        self._pending = b""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the characters these tokens complete; ids outside the table give no text."""
        bytes_of = self._bytes_of
        data = self._pending + b"".join([bytes_of(token_id, b"") for token_id in token_ids])
        certain, self._pending = split_unfinished(data)
        return certain.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of one token, ``None`` for one without text."""
        return self._bytes_of(token_id)

    def finish(self) -> str:
        """Return U+FFFD if the completion ends within a character, else nothing."""
        pending, self._pending = self._pending, b""
        return pending.decode("utf-8", "replace")
