"""Bytes to characters as they come: the decoder under all detokenizers that join bytes. It knows nothing of tokens."""

from __future__ import annotations

import re
from typing import Final

#: The proper beginnings of all well-formed sequences (Unicode 16, table 3-7) at the end of the bytes.
#: Why: the incremental decoder of ``codecs`` also waits after ED A0, which nothing can complete.
_UNFINISHED: Final = re.compile(
    rb"(?:[\xC2-\xDF]"
    rb"|\xE0[\xA0-\xBF]?|[\xE1-\xEC\xEE\xEF][\x80-\xBF]?|\xED[\x80-\x9F]?"
    rb"|\xF0(?:[\x90-\xBF][\x80-\xBF]?)?|[\xF1-\xF3][\x80-\xBF]{0,2}|\xF4(?:[\x80-\x8F][\x80-\xBF]?)?)\Z"
)


class Utf8Decoder:
    """Incremental UTF-8: returns each character with its last byte, and what is not UTF-8 as soon as that is certain.

    Invariant: ``_pending`` is a proper beginning of a well-formed sequence, at most three bytes, or empty.

    Args:
        errors: "replace" (one U+FFFD per maximal subpart, as ``bytes.decode``) or "strict".
    """

    __slots__ = ("_errors", "_pending")

    def __init__(self, errors: str) -> None:
        self._errors = errors
        self._pending = b""

    @property
    def is_unfinished(self) -> bool:
        """Whether the bytes so far end within a character."""
        return bool(self._pending)

    def push(self, data: bytes) -> str:
        """Return the characters that are certain.

        Raises:
            UnicodeDecodeError: with ``errors="strict"``, for bytes that nothing can complete.
        """
        if self._pending:
            data = self._pending + data
            self._pending = b""
        if data and data[-1] >= 0x80:
            unfinished = _UNFINISHED.search(data, max(0, len(data) - 3))
            if unfinished is not None:
                self._pending = unfinished[0]
                data = data[: unfinished.start()]
        return data.decode("utf-8", self._errors)

    def finish(self) -> str:
        """Return U+FFFD for an unfinished character, or nothing.

        Raises:
            UnicodeDecodeError: with ``errors="strict"``, if a character is unfinished.
        """
        pending, self._pending = self._pending, b""
        return pending.decode("utf-8", self._errors)
