"""The text of one completion as it grows: a detokenizer followed by a matcher of stop strings, one for each sequence.

Law: the concatenation of everything returned is the one-shot decoding of the pushed tokens, up to the first stop
string; nothing is taken back. Prompt tokens are never pushed, so prompt text is never returned. Stop *tokens* are
handled by ``Sequence.append_token``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pagedcore.errors import InvalidStop
from pagedcore.protocols import Detokenizer


class StopMatcher:
    """Matches several stop strings in the text of one completion.

    The match that ends first wins; of several that end together the longest, so that all of them are cut. The order
    of the stop strings does not matter. What is held back is exactly what some continuation would still remove.
    Limits on number and length of stop strings bound the cost of a push (``config/limits.py``).

    Invariant: the text held back is a proper prefix of a stop string.

    Raises:
        InvalidStop: a stop string is empty.
    """

    __slots__ = ("_held", "_prefixes", "_stops", "matched")

    def __init__(self, stop: Sequence[str]) -> None:
        if "" in stop:
            raise InvalidStop("stop", "", "strings of at least one character")
        # Why: a stop string that contains another one, not at its end, never ends first; holding text back for it would
        # hold back text that no continuation removes.
        self._stops = [text for text in dict.fromkeys(stop) if not any(other in text[:-1] for other in stop)]
        prefixes = {text[:length] for text in self._stops for length in range(1, len(text))}
        self._prefixes = tuple(sorted(prefixes, key=len, reverse=True))
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    def push(self, text: str) -> str:
        """Return the text that can be returned: all before a match, or all that cannot become part of one."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self.matched, self._held = text[start:end], ""
            return text[:start]
        # Why: nearly all text ends with no prefix at all, which this one call finds out.
        ends_in_prefix = text.endswith(self._prefixes)
        self._held = next(filter(text.endswith, self._prefixes)) if ends_in_prefix else ""
        return text.removesuffix(self._held)

    def finish(self) -> str:
        """Return what was held back, at the end of a text in which no stop string was completed."""
        held, self._held = self._held, ""
        return held


class TextDelta(NamedTuple):
    """What one push added to a completion's text."""

    text: str
    is_stopped: bool
    """Whether a stop string was found; it and everything after it are left out of the text."""


class IncrementalText:
    """Turns the tokens of one completion into text without stop strings, returned as soon as it is certain.

    It takes a fresh detokenizer. Text that the first ``min_tokens`` tokens make certain is not searched for ``stop``.
    Raises ``InvalidStop`` as ``StopMatcher``.

    Invariant: once stopped, no further text is returned.
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
