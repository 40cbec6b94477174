"""Guesses at the next tokens of each sequence: text that has followed before what it ends with now.

The text is the sequence's own, prompt and completion, and earlier completions behind the same cache root. A guess need
not be right: whoever uses it computes it, draws the token itself, and keeps the guess while the two are equal.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Final

from pagedcore.drafting.completions import Completions
from pagedcore.drafting.offers import NO_CHANCES, Chances, Record
from pagedcore.drafting.text_index import LONGEST_MATCH, NO_MATCH, Match, TextIndex

SOURCES: Final = ("text", "completions")
"""A sequence's own tokens, and earlier completions behind its root."""
_LONG_MATCH: Final = 8
"""A match of so many tokens says more than how the latest drafts did."""
_POOR: Final = 0.1
_SEARCHED_EVERY: Final = 4
"""Tokens between two searches for a sequence whose first drafts are right more rarely than ``_POOR``."""
_OWN: Final = 0
"""Where no ``KeptText.number`` is: the sequence's own text."""


class _Track:
    """What is known of one sequence."""

    __slots__ = ("found", "index", "lag", "num_prompt_tokens", "record", "root", "source")

    def __init__(self, root: bytes, num_prompt_tokens: int) -> None:
        self.root, self.num_prompt_tokens, self.index, self.record = root, num_prompt_tokens, TextIndex(), Record()
        # The latest search: with how many tokens, and the match, in the text of this number.
        self.found, self.source = (0, NO_MATCH), _OWN
        # How far the match is from the sequence's own end. A text that is repeated with a change goes on there.
        self.lag = 0


class Drafts:
    """Drafts of the sequences that decode, on the thread of whoever plans their steps.

    Invariant: memory is at most 12 bytes for each of the latest ``MOST_TOKENS`` tokens of a sequence that has begun,
        and 16 for each of ``MOST_KEPT_TOKENS`` earlier ones. A sequence that never has drafts has none indexed.
    Invariant: the time of a call grows with the tokens that are new since the last one, not with those that were there.
    Invariant: for the same tokens, the same drafts, until something is observed, ended or begun.

    Args:
        sources: some of ``SOURCES``.
    """

    def __init__(self, sources: Collection[str] = SOURCES) -> None:
        self._sources = frozenset(sources)
        self._completions = Completions()
        self._tracks: dict[int, _Track] = {}

    def begin(self, sequence_id: int, root: bytes, token_ids: Sequence[int]) -> None:
        """Note that a sequence begins to decode; one that has begun continues with what is known of it.

        Args:
            sequence_id: the sequence.
            root: its cache root: model, salt, and whatever else keeps sequences apart.
            token_ids: its tokens up to now. What follows is its completion.
        """
        if sequence_id not in self._tracks:
            self._tracks[sequence_id] = _Track(root, len(token_ids))

    def chances(self, sequence_id: int, token_ids: Sequence[int]) -> Chances:
        """Return how likely drafts of a sequence would be right now; 0 if there are none."""
        track, num_tokens = self._tracks.get(sequence_id), len(token_ids)
        if track is None:
            return NO_CHANCES
        # Why: where drafts are hardly ever right, most searches are spared, and a long match is still found soon.
        if num_tokens % _SEARCHED_EVERY and track.record.chances(num_tokens).first < _POOR:
            return NO_CHANCES
        match = self._find(track, token_ids)
        if match is NO_MATCH:
            return NO_CHANCES
        return track.record.chances(num_tokens, is_long_match=match.length >= _LONG_MATCH)

    def propose(self, sequence_id: int, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Return at most ``most`` tokens that may follow a sequence's tokens."""
        track = self._tracks.get(sequence_id)
        match = self._find(track, token_ids) if track is not None else NO_MATCH
        if track is None or match is NO_MATCH or most <= 0:
            return ()
        start, end = match.position, match.position + most
        if track.source == _OWN:
            found = token_ids[start:end]
            # Why: text that repeats itself goes on with what is being proposed.
            return tuple([found[place % len(found)] for place in range(most)])
        kept = next((text.tokens[start:end] for text in self._completions.texts(track.root)
                     if text.number == track.source), ())
        # Why: a negative one ends a kept completion.
        return tuple(takewhile((0).__le__, kept))

    def observe(self, sequence_id: int, num_tokens: int, num_offered: int, num_kept: int) -> None:
        """Learn that of so many drafts of a sequence so many were kept; it has ``num_tokens`` tokens now."""
        track = self._tracks.get(sequence_id)
        if track is not None and num_offered > 0:
            track.record.observe(num_tokens, num_offered, num_kept)

    def forget(self, sequence_id: int, token_ids: Sequence[int], keep: bool) -> None:
        """Note that a sequence has ended; ``keep``: so that its completion may be repeated behind the same root."""
        track = self._tracks.pop(sequence_id, None)
        if keep and track is not None and "completions" in self._sources:
            self._completions.add(track.root, token_ids, track.num_prompt_tokens)

    def _find(self, track: _Track, token_ids: Sequence[int]) -> Match:
        """Return the longest match of the sequence's end; ``track.source`` says in which text."""
        num_tokens, best = track.found
        if num_tokens == len(token_ids):
            return best
        num_tokens, best, source = len(token_ids), NO_MATCH, track.source
        guess, tail = num_tokens + track.lag, token_ids[-LONGEST_MATCH:]
        if "text" in self._sources:
            track.index.extend(token_ids)
            best = track.index.find(token_ids, tail, guess if source == _OWN else 0)
            track.source = _OWN
        for kept in self._completions.texts(track.root):
            if best.length == LONGEST_MATCH:
                break
            kept.index.extend(kept.tokens)
            match = kept.index.find(kept.tokens, tail, guess if source == kept.number else 0)
            if match.length > best.length:
                best, track.source = match, kept.number
        if best is not NO_MATCH:
            track.lag = best.position - num_tokens
        track.found = num_tokens, best
        return best
