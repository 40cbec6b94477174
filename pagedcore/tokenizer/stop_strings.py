"""Finds stop strings in text that arrives in pieces and decides which text can be returned.

It knows nothing of tokens; ``incremental_text`` puts it behind a detokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedcore.errors import InvalidStop


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
