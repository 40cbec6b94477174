"""Tokens to text where every token is a fixed piece of text, except at the start of the completion and in byte runs.

SentencePiece-like decoders with byte fallback, WordPiece, Metaspace and plain joining work this way. The pieces are
learnt from the tokenizer's own one-shot decoding, once per token id; only the byte run is reimplemented.
``detokenizer_choice`` decides whether a tokenizer is of this kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from pagedcore.errors import InternalError
from pagedcore.tokenizer.byte_detokenizer import Decode, split_unfinished

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT: Final = "\ufffd"


def byte_of_token(token: str) -> int | None:
    """Return the byte a byte-fallback token such as ``<0x0A>`` names, ``None`` for every other token."""
    match = _BYTE_TOKEN.fullmatch(token)
    return int(match[1], 16) if match else None


class PieceTable(dict[int, "str | int | None"]):
    """What each token id adds to text that precedes it: a piece, a byte (int), or nothing at all (``None``).

    Filled on first use, with two or three one-shot decodings per id. All completions and threads share it: filling an
    entry twice gives the same entry. ``anchor_id`` is a token of plain letters: what follows it is not at the start of
    the text.
    """

    def __init__(self, decode: Decode, vocabulary: Mapping[int, str], anchor_id: int) -> None:
        super().__init__()
        self.decode = decode
        self._anchor_id, self._anchor_text = anchor_id, decode([anchor_id])
        named = {token_id: byte_of_token(token) for token_id, token in vocabulary.items() if token[:3] == "<0x"}
        self._bytes = {token_id: byte for token_id, byte in named.items() if byte is not None}
        self._ids = {byte: token_id for token_id, byte in self._bytes.items()}
        letter_id = self._ids.get(ord("A"))
        if letter_id is None or decode([anchor_id, letter_id]) != self._anchor_text + "A":
            # Why: without byte fallback such tokens are text like all others.
            self._bytes, self._ids = {}, {}

    def __missing__(self, token_id: int) -> str | int | None:
        value = self[token_id] = self._bytes[token_id] if token_id in self._bytes else self._text_of(token_id)
        return value

    def _text_of(self, token_id: int) -> str | None:
        text = self.decode([self._anchor_id, token_id])
        if not text.startswith(self._anchor_text):
            raise InternalError(f"token {token_id} changes the text before it: this tokenizer is not made of pieces")
        if piece := text[len(self._anchor_text) :]:
            return piece
        lead, trail = self._ids.get(0xC3), self._ids.get(0xA9)
        if lead is None or trail is None:
            return None
        # Why: what is dropped before bytes are joined, as special tokens are, does not end a run of them.
        return None if self.decode([lead, token_id, trail]) == self.decode([lead, trail]) else ""


class PieceDetokenizer:
    """Decodes one completion, O(1) per token; only two things are held back, both because the one-shot decoding can
    still change them.

    A run of byte tokens: it becomes text if the whole of it is UTF-8 and one U+FFFD per byte if not, so nothing of it
    is certain before it ends or can no longer be UTF-8. And leading tokens that give no text: the first text of the
    completion may lose a space, so it is taken from the one-shot decoding of all tokens up to it.

    Invariant: ``_opening`` holds the completion's tokens until the first text was returned, then it is ``None``.
    Invariant: ``_run_ids`` is empty outside a byte run.
    """

    __slots__ = ("_is_broken", "_opening", "_pieces", "_run", "_run_ids", "_unfinished")

    def __init__(self, pieces: PieceTable) -> None:
        self._pieces = pieces
        self._opening: list[int] | None = []
        self._start_run()

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that has become certain."""
        out: list[str] = []
        for token_id in token_ids:
            piece = self._pieces[token_id]
            if piece is None:
                continue
            if isinstance(piece, int):
                out.append(self._push_byte(token_id, piece))
                continue
            if self._run_ids:
                out.append(self._end_run())
            out.append(piece if self._opening is None else self._settle([token_id], piece))
        return "".join(out)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes that one token adds to text before it, ``None`` for one without text."""
        piece = self._pieces[token_id]
        return bytes((piece,)) if isinstance(piece, int) else piece.encode() if piece else None

    def finish(self) -> str:
        """Return the last byte run, or the completion's only text if nothing was returned so far."""
        text = self._end_run()
        return text + (self._pieces.decode(self._opening) if self._opening else "")

    def _start_run(self) -> None:
        self._run_ids: list[int] = []
        self._run = bytearray()
        self._unfinished = b""
        self._is_broken = False

    def _push_byte(self, token_id: int, byte: int) -> str:
        self._run_ids.append(token_id)
        self._run.append(byte)
        if self._is_broken:
            return _REPLACEMENT
        certain, self._unfinished = split_unfinished(self._unfinished + bytes((byte,)))
        try:
            certain.decode()
        except UnicodeDecodeError:
            self._is_broken = True
            return self._settle(self._run_ids, _REPLACEMENT * len(self._run))
        return ""

    def _end_run(self) -> str:
        """Return the text of the run that was not returned yet, and leave the run."""
        run_ids, run, is_broken = self._run_ids, self._run, self._is_broken
        self._start_run()
        if is_broken:
            return ""
        try:
            return self._settle(run_ids, run.decode())
        except UnicodeDecodeError:  # it ends within a character
            return self._settle(run_ids, _REPLACEMENT * len(run))

    def _settle(self, token_ids: list[int], text: str) -> str:
        """Return the text of these tokens, as the one-shot decoding gives it if it is the first of the completion."""
        if self._opening is None:
            return text
        self._opening += token_ids
        if not text:
            return ""
        opening, self._opening = self._opening, None
        return self._pieces.decode(opening)
