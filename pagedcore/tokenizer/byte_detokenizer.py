"""Tokens to text where every token is a fixed string of bytes: the byte alphabet and the table.

It never asks the tokenizer anything once its table is built. Tokenizers of other kinds are in ``piece_detokenizer``
and ``window_detokenizer``; ``detokenizer_choice`` decides which one is exact for a given tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Final

from pagedcore.tokenizer.utf8 import Utf8Decoder

#: The one-shot decoding of a tokenizer: token ids to text, special tokens left out.
Decode = Callable[[Sequence[int]], str]


def _byte_of_character() -> dict[int, int]:
    """Map the code points of the byte-level alphabet to their bytes, and all others below 256 to a non-byte.

    The alphabet is that of GPT-2: printable Latin-1 characters stand for themselves, the other 68 bytes are numbered
    from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return (
        {byte: byte for byte in printable}
        | dict.fromkeys(hidden, 0xFFFF)
        | {0x100 + index: byte for index, byte in enumerate(hidden)}
    )


_BYTE_OF_CHARACTER: Final = _byte_of_character()


def token_bytes(token: str) -> bytes:
    """Return the bytes a byte-level vocabulary entry stands for; one outside the alphabet stands for its own UTF-8."""
    try:
        return token.translate(_BYTE_OF_CHARACTER).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def byte_table(vocabulary: Mapping[int, str], skipped_ids: Container[int]) -> dict[int, bytes]:
    """Build the table of one tokenizer: token id to bytes; ids that give no text are left out."""
    return {token_id: token_bytes(token) for token_id, token in vocabulary.items() if token_id not in skipped_ids}


class ByteLevelDetokenizer:
    """Decodes one answer; the cost of a push is linear in the bytes pushed.

    Each invalid byte sequence gives one U+FFFD per maximal subpart (Unicode 16, section 3.9), which is also what the
    one-shot decoding of ``tokenizers`` gives.

    Invariant: the bytes not yet returned are the unfinished beginning of one character, at most three bytes.
    """

    __slots__ = ("_bytes_of", "_decoder")

    def __init__(self, table: Mapping[int, bytes]) -> None:
        self._bytes_of = table.get
        self._decoder = Utf8Decoder("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the characters these tokens complete; ids outside the table give no text."""
        bytes_of = self._bytes_of
        return self._decoder.push(b"".join([bytes_of(token_id, b"") for token_id in token_ids]))

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of one token, ``None`` for one without text."""
        return self._bytes_of(token_id)

    def finish(self) -> str:
        """Return U+FFFD if the answer ends within a character, else nothing."""
        return self._decoder.finish()
