"""The text of one answer as it grows: a detokenizer with a stop matcher behind it. The engine keeps one per sequence.

Law: the concatenation of everything returned is the one-shot decoding of the pushed tokens, up to the first stop
string; nothing is taken back. Prompt tokens are never pushed, so prompt text is never emitted. Stop *tokens* are the
engine's business, see ``Sequence.append_token``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pagedcore.protocols import Detokenizer
from pagedcore.tokenizer.stop_strings import StopMatcher


class TextDelta(NamedTuple):
    """What one push added to an answer's text."""

    text: str
    is_stopped: bool
    """Whether a stop string was found; it and everything after it is left out of the text."""


class TextStream:
    """Tokens in, certain text out, stop strings left out.

    Text that the first ``min_tokens`` tokens make certain is never part of a match.

    Invariant: once stopped, no further text is returned.

    Args:
        detokenizer: a fresh one.
        stop: stop strings; none: text passes through.
        min_tokens: tokens before which no stop string is looked for.

    Raises:
        InvalidStop: a stop string is empty.
    """

    __slots__ = ("_detokenizer", "_matcher", "_num_unmatched")

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop) if stop else None
        self._num_unmatched = min_tokens if stop else 0

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found, be it by ``push`` or by ``finish``."""
        return self.matched_stop is not None

    @property
    def matched_stop(self) -> str | None:
        """The stop string that was found."""
        return self._matcher.matched if self._matcher is not None else None

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take the next tokens of the answer and return the text that can go out."""
        matcher = self._matcher
        if matcher is None:
            return TextDelta(self._detokenizer.push(token_ids), False)
        free = ""
        if self._num_unmatched:
            first, token_ids = token_ids[: self._num_unmatched], token_ids[self._num_unmatched :]
            self._num_unmatched -= len(first)
            free = self._detokenizer.push(first)
        text = free + matcher.push(self._detokenizer.push(token_ids))
        return TextDelta(text, matcher.matched is not None)

    def finish(self) -> str:
        """Return the rest of the text of an answer that has ended; call it once, however the answer ended.

        The rest may complete a stop string: then it ends before that, and ``is_stopped`` says so.
        """
        matcher = self._matcher
        if matcher is None:
            return self._detokenizer.finish()
        rest = self._detokenizer.finish()
        if self._num_unmatched:
            return rest
        text = matcher.push(rest)
        return text + matcher.finish()
