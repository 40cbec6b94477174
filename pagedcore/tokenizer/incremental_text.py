"""The text of one completion as it grows: a detokenizer followed by a matcher of stop strings, one for each sequence.

Law: the concatenation of everything returned is the one-shot decoding of the pushed tokens, up to the first stop
string; nothing is taken back. Prompt tokens are never pushed, so prompt text is never returned. Stop *tokens* are
handled by ``Sequence.append_token``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from pagedcore.errors import InvalidStop
from pagedcore.protocols import DecodesTokens, Detokenizer
from pagedcore.sampling_params import SamplingParams


class StopMatcher:
    """Matches several stop strings in the text of one completion.

    The match that ends first wins; of several that end together the longest, so that all of them are cut. The order
    of the stop strings does not matter. What is held back is exactly what some continuation would still remove.
    Limits on number and length of stop strings bound the cost of a push (``config/limits.py``).

    With ``keeps`` the match itself is returned too.

    Invariant: the text held back is a proper prefix of a stop string.

    Raises:
        InvalidStop: a stop string is empty.
    """

    __slots__ = ("_held", "_keeps", "_prefixes", "_stops", "matched")

    def __init__(self, stop: Sequence[str], *, keeps: bool = False) -> None:
        if "" in stop:
            raise InvalidStop("stop", "", "strings of at least one character")
        # Why: a stop string that contains another one, not at its end, never ends first; holding text back for it would
        # hold back text that no continuation removes.
        self._stops = [text for text in dict.fromkeys(stop) if not any(other in text[:-1] for other in stop)]
        prefixes = {text[:length] for text in self._stops for length in range(1, len(text))}
        self._prefixes = tuple(sorted(prefixes, key=len, reverse=True))
        self._held, self._keeps = "", keeps
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
            return text[: end if self._keeps else start]
        # Why: nearly all text ends with no prefix at all, which this one call finds out.
        ends_in_prefix = text.endswith(self._prefixes)
        self._held = next(filter(text.endswith, self._prefixes)) if ends_in_prefix else ""
        return text.removesuffix(self._held)

    def finish(self) -> str:
        """Return what was held back, at the end of a text in which no stop string was completed."""
        held, self._held = self._held, ""
        return held


class UnsearchedSpan:
    """What is between two markers at the beginning of a completion: text in which no stop string is looked for.

    Args:
        detokenizer: of the completion.
        begin: a text, or the id of a token; empty: the completion begins in it. Whitespace may come before.
        end: a text, or the id of a token.
    """

    __slots__ = ("_begin", "_detokenizer", "_end", "_tail", "is_inside")

    def __init__(self, detokenizer: Detokenizer, begin: str | int, end: str | int) -> None:
        self._detokenizer, self._begin, self._end = detokenizer, begin, end
        self._tail = ""
        self.is_inside = begin == ""
        """Whether the span has begun."""

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Take a token; return text of the span, and once it has ended, or is none, the text behind it."""
        text = self._tail + self._detokenizer.push((token_id,))
        if not self.is_inside:
            blank = text[: len(text) - len(text.lstrip())]
            if token_id == self._begin:
                self.is_inside = True
            elif isinstance(self._begin, str) and text.startswith(blank + self._begin):
                self.is_inside = True
                return self._searched(text, len(blank) + len(self._begin))
            elif text == blank or (isinstance(self._begin, str) and self._begin.startswith(text[len(blank) :])):
                self._tail = text
                return "", None
            else:
                return "", text
        return ("", text) if token_id == self._end else self._searched(text, 0)

    def finish(self) -> tuple[str, str]:
        """Return what was held back: of the span, and outside of it."""
        rest, self._tail = self._tail + self._detokenizer.finish(), ""
        return (rest, "") if self.is_inside else ("", rest)

    def _searched(self, text: str, place: int) -> tuple[str, str | None]:
        """Look for the end from a place on; hold back what may be its beginning."""
        if not isinstance(self._end, str):
            self._tail = ""
            return text, None
        found = text.find(self._end, place)
        if found >= 0:
            past = found + len(self._end)
            return text[:past], text[past:]
        held = next((n for n in range(min(len(self._end) - 1, len(text) - place), 0, -1)
                     if text.endswith(self._end[:n])), 0)
        self._tail = text[len(text) - held :]
        return text[: len(text) - held], None


@runtime_checkable
class ShowsSpecialTokens(Protocol):
    """A tokenizer that can write special tokens into the text of completions."""

    def new_full_detokenizer(self) -> Detokenizer:
        """Start an incremental decoding that leaves nothing out."""


class _WithoutEnds:
    """A decoding in which some tokens, with which a completion ends, are no text."""

    def __init__(self, detokenizer: Detokenizer, hidden: frozenset[int]) -> None:
        self._detokenizer, self._hidden = detokenizer, hidden
        self.finish = detokenizer.finish

    def push(self, token_ids: Sequence[int]) -> str:
        return self._detokenizer.push([one for one in token_ids if one not in self._hidden])


def new_text(
    tokenizer: DecodesTokens, params: SamplingParams, ends: frozenset[int] = frozenset()
) -> IncrementalText:
    """Start the text of a completion as its parameters ask for it.

    ``ends`` are what ends it besides the model's own end tokens: those that the parameters do not name, which a gap has
    that is filled, are no text, whatever the tokenizer says.
    """
    detokenizer: Detokenizer
    if not params.skip_special_tokens and isinstance(tokenizer, ShowsSpecialTokens):
        detokenizer = tokenizer.new_full_detokenizer()
    else:
        detokenizer = tokenizer.new_detokenizer()
        if hidden := ends.difference(params.stop_token_ids):
            detokenizer = _WithoutEnds(detokenizer, hidden)
    return IncrementalText(detokenizer, params.stop, params.min_tokens, params.stop_outside,
                           keeps_stop=params.include_stop_str_in_output)


class TextDelta(NamedTuple):
    """What one push added to a completion's text."""

    text: str
    is_stopped: bool
    """Whether a stop string was found; it and everything after it are left out of the text."""


class IncrementalText:
    """Turns the tokens of one completion into text without stop strings, returned as soon as it is certain.

    It takes a fresh detokenizer. Text that the first ``min_tokens`` tokens make certain is not searched for ``stop``,
    nor what is between the two markers of ``outside``. Raises ``InvalidStop`` as ``StopMatcher``.

    With ``keeps_stop`` the text has the one that was found. Invariant: once stopped, no further text is returned.
    """

    __slots__ = ("_detokenizer", "_matcher", "_num_unmatched", "_span")

    def __init__(
        self, detokenizer: Detokenizer, stop: tuple[str, ...] = (), min_tokens: int = 0,
        outside: tuple[str | int, str | int] | None = None, *, keeps_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop, keeps=keeps_stop) if stop else None
        self._span = UnsearchedSpan(detokenizer, *outside) if stop and outside is not None else None
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
            # Why join, here and below: it refuses what is no text, which a user's own detokenizer may return.
            return TextDelta("".join((self._detokenizer.push(token_ids),)), False)
        free = behind = ""
        if self._span is not None:
            free, behind, token_ids = self._push_span(self._span, token_ids)
        if self._num_unmatched:
            first, token_ids = token_ids[: self._num_unmatched], token_ids[self._num_unmatched :]
            self._num_unmatched -= len(first)
            free, behind = free + behind + self._detokenizer.push(first), ""
        text = free + matcher.push(behind + self._detokenizer.push(token_ids))
        return TextDelta(text, matcher.matched is not None)

    def _push_span(self, span: UnsearchedSpan, token_ids: Sequence[int]) -> tuple[str, str, Sequence[int]]:
        """Return text of the span, text behind it, and the tokens that are left."""
        parts = list[str]()
        for place, token_id in enumerate(token_ids):
            text, behind = span.push(token_id)
            parts.append(text)
            self._num_unmatched = max(0, self._num_unmatched - 1)
            if behind is not None:
                self._span = None
                return "".join(parts), behind, token_ids[place + 1 :]
        return "".join(parts), "", ()

    def finish(self) -> str:
        """Return the rest of the text when the completion has ended; call it once, however it ended.

        The rest may complete a stop string: then the text ends before it and ``is_stopped`` is true.
        """
        free, rest = ("", self._detokenizer.finish()) if self._span is None else self._span.finish()
        if self._matcher is None or self._num_unmatched:
            return "".join((free, rest))
        return free + self._matcher.push(rest) + self._matcher.finish()
