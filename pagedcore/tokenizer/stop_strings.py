"""Finds stop strings in text that arrives in pieces and says which text can go out.

An Aho-Corasick automaton (Aho and Corasick, CACM 18(6), 1975) with its failure links resolved, over characters. It
knows nothing of tokens; ``text_stream`` puts it behind a detokenizer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from pagedcore.errors import InvalidStop

_ROOT: Final = 0


def _reachable(stop: Sequence[str]) -> list[str]:
    """Drop stop strings that contain another one which ends earlier: that one always ends the answer before them.

    Why: without them, what the automaton holds back is exactly what some continuation would remove, and a state that
    is not a whole stop string has none at its end either.
    """
    stops = list(dict.fromkeys(stop))
    return [text for text in stops if not any(other in text[:-1] for other in stops)]


class _Automaton:
    """States are the prefixes of the stop strings; the current state is the longest of them that the text ends with.

    Attributes:
        moves: per state, the next state of each character; a missing character leads to the root.
        depth: per state, its length in characters: what has to be held back.
        is_whole: per state, whether it is a stop string.
    """

    __slots__ = ("depth", "is_whole", "moves")

    def __init__(self, stops: list[str]) -> None:
        self.moves: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.is_whole = [False]
        for text in stops:
            self._insert(text)
        self._resolve_failures()

    def _insert(self, text: str) -> None:
        state = _ROOT
        for char in text:
            if char not in self.moves[state]:
                self.moves[state][char] = len(self.moves)
                self.moves.append({})
                self.depth.append(self.depth[state] + 1)
                self.is_whole.append(False)
            state = self.moves[state][char]
        self.is_whole[state] = True

    def _resolve_failures(self) -> None:
        """Give each state the moves of its longest proper suffix that is a state too, where it has none of its own.

        Breadth first, so that the suffix, being shorter, has all its moves already.
        """
        failure = [_ROOT] * len(self.moves)
        queue = deque(self.moves[_ROOT].values())
        while queue:
            state = queue.popleft()
            fallback = failure[state]
            for char, child in self.moves[state].items():
                failure[child] = self.moves[fallback].get(char, _ROOT)
                queue.append(child)
            self.moves[state] = self.moves[fallback] | self.moves[state]


class StopMatcher:
    """Matches several stop strings in one answer, in time linear in its text.

    The match that ends first wins; of several that end together the longest, so that all of them are cut. The order
    of the stop strings does not matter. What is held back is exactly what some continuation would still remove.

    Invariant: the text held back is a proper prefix of a stop string.

    Raises:
        InvalidStop: a stop string is empty.
    """

    __slots__ = ("_automaton", "_first", "_held", "_state", "matched")

    def __init__(self, stop: Sequence[str]) -> None:
        if "" in stop:
            raise InvalidStop("stop", "", "strings of at least one character")
        self._automaton = _Automaton(_reachable(stop))
        self._first = frozenset(self._automaton.moves[_ROOT])
        self._state = _ROOT
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    def push(self, text: str) -> str:
        """Return the text that can go out: all before a match, or all that cannot become part of one."""
        if self.matched is not None:
            return ""
        state = self._state
        if state == _ROOT and self._first.isdisjoint(text):
            return text
        moves, is_whole = self._automaton.moves, self._automaton.is_whole
        pending = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            state = moves[state].get(char, _ROOT)
            if is_whole[state]:
                return self._end_before(pending[:end], self._automaton.depth[state])
        safe = len(pending) - self._automaton.depth[state]
        self._state, self._held = state, pending[safe:]
        return pending[:safe]

    def finish(self) -> str:
        """Return what was held back: the text has ended and no stop string was completed."""
        held, self._held, self._state = self._held, "", _ROOT
        return held

    def _end_before(self, text: str, length: int) -> str:
        self.matched = text[-length:]
        self._held = ""
        return text[:-length]
