"""How many drafts are worth a row: what is likely from how the latest ones did, against what a row costs.

Pure numbers, so that whoever plans a step, predicts or replays one decides in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from typing import Final, NamedTuple

_FORGETTING: Final = 0.9
"""Weight of the past at each step with drafts: about the last ten count."""
_FIRST_WEIGHT: Final = 2.0
"""The first guess counts like so many steps."""
_FIRST_PAUSE: Final = 8
_LONGEST_PAUSE: Final = 64
"""Tokens from a step with drafts until they are tried again although they seem worth nothing: twice as many each time
that none was right."""


class Chances(NamedTuple):
    """How likely drafts are right, each from 0 to 1."""

    first: float
    further: float
    """Of one whose predecessor was right. It is higher: where a text begins to repeat itself, it goes on."""
    each_s: float = 0.0
    """What it takes to make one of them."""


NO_CHANCES: Final = Chances(0.0, 0.0)
_LEAST_LIKELY: Final = 0.02
"""A draft with a smaller chance is not looked at."""
_FIRST_GUESS: Final = Chances(0.25, 0.6)
"""Of the streams of ``benchmarks/speculation.py`` all kinds together have more; but those that repeat much show it
soon, and those that repeat little would lose by drafts until they have shown it."""
_LONG_MATCH_GUESS: Final = Chances(0.7, 0.8)


@dataclass(slots=True)
class Record:
    """How the drafts of one sequence did.

    Invariant: what it says depends on what was observed and on the number of tokens asked for alone, so a plan that is
    made again is the same.
    """

    guess: Chances = _FIRST_GUESS
    """What is said before any did."""
    num_first_right: float = field(init=False)
    num_first: float = field(init=False, default=_FIRST_WEIGHT)
    num_further_right: float = field(init=False)
    num_further: float = field(init=False, default=_FIRST_WEIGHT)
    pause: int = field(init=False, default=_FIRST_PAUSE)
    tried_again_at: int = field(init=False, default=0)
    """With so many tokens the first guess is taken again, if it is higher."""

    def __post_init__(self) -> None:
        self.num_first_right = _FIRST_WEIGHT * self.guess.first
        self.num_further_right = _FIRST_WEIGHT * self.guess.further

    def observe(self, num_tokens: int, num_offered: int, num_kept: int) -> None:
        """Learn how the drafts of a step did.

        Args:
            num_tokens: of the sequence after the step.
            num_offered: drafts of the step, at least 1.
            num_kept: those that were right, up to the first that was not.
        """
        is_right = num_kept > 0
        self.num_first_right = _FORGETTING * self.num_first_right + is_right
        self.num_first = _FORGETTING * self.num_first + 1
        if is_right:
            # Why: behind the first wrong one nothing is known.
            self.num_further_right = _FORGETTING * self.num_further_right + num_kept - 1
            self.num_further = _FORGETTING * self.num_further + min(num_offered - 1, num_kept)
        self.pause = _FIRST_PAUSE if is_right else min(_LONGEST_PAUSE, 2 * self.pause)
        self.tried_again_at = num_tokens + self.pause

    def chances(self, num_tokens: int, *, is_long_match: bool = False) -> Chances:
        """Say how likely drafts are right.

        Args:
            num_tokens: of the sequence now.
            is_long_match: whether they go on with a text that is the same for long.
        """
        first, further = self.num_first_right / self.num_first, self.num_further_right / max(self.num_further, 1e-9)
        least = NO_CHANCES
        if is_long_match:
            least = _LONG_MATCH_GUESS
        elif num_tokens >= self.tried_again_at:
            least = self.guess
        return Chances(max(first, least.first), max(further, least.further))


def share_out(
    chances: Sequence[Chances], rooms: Sequence[int], room: int, *, num_sampled: int, seconds: Sequence[float],
    again_s: float = 0.0,
) -> list[int]:
    """Return how many drafts each sequence should have, so that the tokens of the step per second are most.

    Drafts are worth their rows while the chances that they are kept are more than what the rows cost in tokens: in a
    full batch, where a row costs about what a token does, none is.

    Args:
        chances: of each sequence.
        rooms: the most that each may have.
        room: the most of all together.
        num_sampled: tokens that the step draws without drafts.
        seconds: what it takes without drafts, with one, and so on, up to ``room`` or as many as are of use.
        again_s: what a token takes that has to be computed again, if all tokens of a row are whose drafts were not all
            right.
    """
    counts, order = [0] * len(chances), list[int]()
    tokens, spent, best, num_best = float(num_sampled), 0.0, num_sampled / seconds[0], 0
    # Why: each draft is less likely than the one before it, so the likeliest of all that come next is the best.
    heap = [(-one.first, place) for place, one in enumerate(chances) if rooms[place] > 0]
    heapify(heap)
    while heap and len(order) < min(room, len(seconds) - 1):
        likely, place = -heap[0][0], heap[0][1]
        if likely < _LEAST_LIKELY:
            break
        order.append(place)
        # Why: if this is the first draft that is wrong, the token before it and the right ones are computed again.
        wrong = (likely / chances[place].further if counts[place] else 1.0) - likely
        counts[place] += 1
        tokens, spent = tokens + likely, spent + chances[place].each_s + again_s * counts[place] * wrong
        # Why not the first that is worth nothing: one that needs another tile of rows pays for those behind it.
        if (rate := tokens / (seconds[len(order)] + spent)) > best:
            best, num_best = rate, len(order)
        heapreplace(heap, (0.0 if counts[place] >= rooms[place] else -likely * chances[place].further, place))
    for place in order[num_best:]:
        counts[place] -= 1
    return counts
