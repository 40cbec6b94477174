"""The text of one completion as it grows: a detokenizer followed by a stop matcher, one for each sequence.

Law: the concatenation of everything returned is the one-shot decoding of the pushed tokens, up to the first stop
string; nothing is taken back. Prompt tokens are never pushed, so prompt text is never returned. Stop *tokens* are
handled by ``Sequence.append_token``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pagedcore.protocols import Detokenizer
from pagedcore.tokenizer.stop_strings import StopMatcher


class TextDelta(NamedTuple):
    """What one push added to a completion's text."""

    text: str
    is_stopped: bool
    """Whether a stop string was found; it and everything after it are left out of the text."""


class IncrementalText:
    """Turns the tokens of one completion into text without stop strings, returned as soon as it is certain.

    Text that the first ``min_tokens`` tokens make certain is not searched for stop strings.

    Invariant: once stopped, no further text is returned.

    Args:
        detokenizer: a fresh one.
        stop: stop strings; may be empty.
        min_tokens: tokens before which stop strings are ignored.

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
        """Whether a stop string was found, by ``push`` or by ``finish``."""
        return self.matched_stop is not None

    @property
    def matched_stop(self) -> str | None:
        """The stop string that was found, if any."""
        return self._matcher.matched if self._matcher is not None else None

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take the next tokens of the completion and return the text that has become certain."""
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
        """Return the rest of the text when the completion has ended; call it once, however it ended.

        The rest may complete a stop string: then the text ends before it and ``is_stopped`` is true.
        """
        rest = self._detokenizer.finish()
        if self._matcher is None or self._num_unmatched:
            return rest
        return self._matcher.push(rest) + self._matcher.finish()
