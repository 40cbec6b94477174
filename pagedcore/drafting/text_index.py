"""Finds where a text has gone on before from where it is now: the longest repetition among the latest places.

Hash chains as in LZ77 (RFC 1951, section 4): a table has the latest position behind each pair of tokens, and each
position the one before it in the same row of the table. What is found is compared token by token, so that hashes which
collide, on purpose too, cost a candidate and never a wrong match.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

MOST_TOKENS: Final = 65_536
"""Tokens of one text that are indexed, the latest; of a longer one the earlier half is left out now and then."""
NUM_CANDIDATES: Final = 8
"""Places that one search looks at."""
LONGEST_MATCH: Final = 32
"""Tokens that are compared before each of them."""
_LEAST_ROWS: Final = 64
_FEW: Final = 32
_SMALL_SHARE: Final = 8
"""More than so few tokens, and more than one of so many, are not added one by one: all are indexed in one go."""
_FACTORS: Final = 0x9E3779B1, 0x85EBCA77
_MASK: Final = 0xFFFFFFFF


class Match(NamedTuple):
    """A place in a text, and how many tokens before it are the same as those that were looked for."""

    position: int
    length: int


NO_MATCH: Final = Match(0, 0)


class TextIndex:
    """The places of one growing text behind each pair of tokens. The text is its owner's, who gives it each time.

    Invariant: memory is at most 12 bytes for each token indexed, and 512.
    Invariant: indexing takes time in proportion to the number of tokens, whatever they are; a search compares at most
        ``LONGEST_MATCH`` tokens at ``NUM_CANDIDATES`` places.
    """

    __slots__ = ("_before", "_first", "_latest")

    def __init__(self) -> None:
        # Position p is behind the tokens p - 2 and p - 1. Of the positions from _first on, place p - _first of _before
        # has the previous one in the same row of _latest; what is below _first is none.
        self._first = 2
        self._before, self._latest = array("i"), array("i", [-1]) * _LEAST_ROWS

    @property
    def num_bytes(self) -> int:
        """Memory of its tables."""
        return self._before.itemsize * (len(self._before) + len(self._latest))

    def extend(self, tokens: Sequence[int]) -> None:
        """Index what a text has grown by; one that has become shorter is indexed again. Tokens are 32-bit integers."""
        num_new = len(tokens) + 1 - self._first - len(self._before)
        is_much = num_new > max(_FEW, len(self._before) // _SMALL_SHARE)
        if num_new < 0 or is_much or len(self._before) + num_new > len(self._latest) or len(self._before) > MOST_TOKENS:
            self._index(tokens)
            return
        for position in range(len(tokens) + 1 - num_new, len(tokens) + 1):
            row = self._row(tokens[position - 2], tokens[position - 1])
            self._before.append(self._latest[row])
            self._latest[row] = position

    def find(self, tokens: Sequence[int], tail: Sequence[int], guess: int = 0) -> Match:
        """Return where the text has what ``tail`` ends with: the longest match of at least two tokens.

        Args:
            tokens: the text that was indexed.
            tail: its own end, which is not found as a repetition of itself, or another text.
            guess: a place to look at too, which is taken before others that are as long; of these, the latest.
        """
        best = NO_MATCH
        if len(tail) < 2:
            return best
        if 0 < guess < len(tokens) and (length := num_common(tokens, guess, tail)) > 1:
            best = Match(guess, length)
        position = self._latest[self._row(tail[-2], tail[-1])]
        for _ in range(NUM_CANDIDATES):
            if position < self._first or best.length == LONGEST_MATCH:
                break
            # Why: behind the last token there is nothing that could be repeated.
            if position < len(tokens) and (length := num_common(tokens, position, tail)) > max(best.length, 1):
                best = Match(position, length)
            position = self._before[position - self._first]
        return best

    def _row(self, one: int, two: int) -> int:
        mixed = (one * _FACTORS[0] + two * _FACTORS[1]) & _MASK
        return (mixed >> 16 ^ mixed) & (len(self._latest) - 1)

    def _index(self, tokens: Sequence[int]) -> None:
        """Index the latest tokens in one go."""
        num_left_out = max(0, len(tokens) - MOST_TOKENS // 2) if len(tokens) > MOST_TOKENS else 0
        text = np.array(tokens[num_left_out:], np.int64)
        self._first, count = num_left_out + 2, max(0, len(text) - 1)
        num_rows = max(_LEAST_ROWS, 1 << count.bit_length())
        mixed = (text[:-1] * _FACTORS[0] + text[1:] * _FACTORS[1]) & _MASK
        rows = (mixed >> 16 ^ mixed) & (num_rows - 1)
        order = np.argsort(rows, kind="stable")
        sorted_rows = rows[order]
        is_same = np.zeros(count, bool)
        is_same[1:] = sorted_rows[1:] == sorted_rows[:-1]
        before, latest = np.full(count, -1, np.int32), np.full(num_rows, -1, np.int32)
        before[order[1:]] = np.where(is_same[1:], order[:-1] + self._first, -1)
        is_last = np.ones(count, bool)
        is_last[:-1] = ~is_same[1:]
        latest[sorted_rows[is_last]] = order[is_last] + self._first
        self._before, self._latest = array("i", before.tobytes()), array("i", latest.tobytes())


def num_common(tokens: Sequence[int], position: int, tail: Sequence[int]) -> int:
    """Count the tokens before a position that are the same as at the end of ``tail``, at most ``LONGEST_MATCH``."""
    most = min(LONGEST_MATCH, position, len(tail))
    for count in range(1, most + 1):
        if tokens[position - count] != tail[-count]:
            return count - 1
    return most
