"""What tokenizers of tests share that write a letter for every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class _Pieces:
    """Decodes piece by piece what a function decodes at once."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.push = decode

    def finish(self) -> str:
        """Return nothing: no text is held back."""
        return ""


class WritesLetters:
    """The half of a tokenizer that turns tokens into text."""

    eos_token_ids: frozenset[int] = frozenset()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return a letter for each token."""
        return "".join(chr(97 + token_id) for token_id in token_ids)

    def new_detokenizer(self) -> _Pieces:
        """Return what does the same, piece by piece."""
        return _Pieces(self.decode)
