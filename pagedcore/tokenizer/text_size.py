"""How much text there is, counted in bounded work before anything is made of it."""

from __future__ import annotations

from typing import Final

from pagedcore.errors import InvalidText, TextTooLong

_ENCODED_AT_ONCE: Final = 4096


def count_text_bytes(what: str, text: object, room: int) -> int:
    """Return the size of text. Raises ``InvalidText`` for what is no ``str`` or no UTF-8, ``TextTooLong`` for more than
    there is room for."""
    if not isinstance(text, str):
        raise InvalidText(what, text, "a string")
    # Why: a character is at least a byte, so this bounds the work of counting exactly.
    num_bytes = len(text) if len(text) > room or text.isascii() else _count_utf8_bytes(what, text)
    if num_bytes > room:
        raise TextTooLong(what, text, f"at most {max(room, 0)} bytes of UTF-8",
                          "It could not fit the context, however it is tokenised.")
    return num_bytes


def _count_utf8_bytes(what: str, text: str) -> int:
    num_bytes = 0
    try:
        for start in range(0, len(text), _ENCODED_AT_ONCE):
            num_bytes += len(text[start : start + _ENCODED_AT_ONCE].encode())
        return num_bytes
    except UnicodeEncodeError:
        pass
    # Safety: raised out here, because the codec's own error holds the text; it must not become the context of this one.
    raise InvalidText(what, text, "text that UTF-8 can encode", "It holds a lone surrogate.")
