"""What drafts cost in the step that computes them, learned from steps in which all rows decode."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from pagedcore.scheduler.step_time import StepTimeModel

_RATE: Final = 0.1
"""Weight of one more step with about as many tokens: about the last ten count."""
_MOST_FACTOR: Final = 2.0
"""A step that stood still counts as one that took so many times what was expected."""
_LEAST_S: Final = 1e-9
_LIFETIME: Final = 1000
"""After so many steps with as many rows it is no longer known how long one takes that did not come again."""


@dataclass(slots=True)
class _Steps:
    """Steps with about the same number of tokens, from ``first`` to ``last``."""

    first: int
    last: int
    seconds: float
    number: int
    """Of the latest one."""
    weight: float = 1.0


@dataclass(slots=True)
class _Size:
    """Steps with about the same number of rows."""

    num_observed: int = 0
    found: dict[int, _Steps] = field(default_factory=dict)

    def alive(self) -> list[_Steps]:
        """Return what is known, by the number of tokens."""
        newest = self.num_observed - _LIFETIME
        return sorted([one for one in self.found.values() if one.number > newest], key=lambda one: one.first)


class DraftCosts:
    """Seconds of steps in which all rows decode, by their tokens, for 1 row, 2, 3 or 4, 5 to 8, and so on.

    Why not the costs of all steps: those are a line, and this has corners. Where weights have to be read, a few rows
    cost what one does; and products take rows by sixteen, so that of 32 rows one more can cost a fifth of the step, and
    the next ones nothing.

    Invariant: memory is bounded by the number of tokens in a step.
    """

    def __init__(self, steps: StepTimeModel) -> None:
        """Begin with what is known of all steps, which ``steps`` goes on to learn."""
        self._steps = steps
        self._sizes: dict[int, _Size] = {}

    @property
    def again_s(self) -> float:
        """Seconds of a token that is computed once more, beside those of a step that takes place anyway."""
        times = self._steps.times_now()
        return times.prefill_token_s + times.kv_token_s

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Learn that a step of so many rows and drafts, and nothing else, took so long."""
        size, (first, last) = self._sizes.setdefault(_size_of(num_rows), _Size()), _alike(num_rows + num_drafts)
        # Why: on a clock that stands still a step takes no time.
        size.num_observed, seconds = size.num_observed + 1, max(seconds, _LEAST_S)
        known = size.found.get(first)
        if known is None or known.number <= size.num_observed - _LIFETIME:
            size.found[first] = _Steps(first, last, seconds, size.num_observed)
            return
        rate = max(_RATE, 1.0 / (known.weight + 1.0))
        known.seconds += rate * (min(seconds, _MOST_FACTOR * known.seconds) - known.seconds)
        known.number, known.weight = size.num_observed, known.weight + 1.0

    def predict(self, num_rows: int, kv_tokens: int, most: int) -> list[float]:
        """Predict the seconds of a step of rows that decode with no draft, with 1, and so on: [most + 1].

        Behind what is known a draft is thought to cost what a token of a prompt does, or what those that are known did,
        up to what is known of more drafts. So what may be worth it is tried, and known then.
        """
        times, size = self._steps.times, self._sizes.get(_size_of(num_rows))
        row_s = times.prefill_token_s + times.kv_token_s
        known = size.alive() if size is not None else []
        if not known or known[0].first > num_rows:
            first_s = max(_LEAST_S, self._steps.predict(0, num_rows, kv_tokens))
            if known:
                saved_s = row_s * (known[0].first - num_rows)
                first_s = max(known[0].seconds / 2, known[0].seconds - saved_s)
            known = [_Steps(num_rows, num_rows, first_s, 0), *known]
        tokens = np.arange(num_rows, num_rows + most + 1)
        firsts, lasts = np.array([one.first for one in known]), np.array([one.last for one in known])
        seconds = np.maximum.accumulate(np.array([one.seconds for one in known]))
        row_s = max(row_s, float(seconds[-1] - seconds[0]) / max(1, known[-1].last - known[0].first))
        place = np.searchsorted(firsts, tokens, side="right") - 1
        behind = row_s * (tokens - lasts[place]).clip(0)
        predicted: list[float] = np.minimum(seconds[place] + behind, np.append(seconds, np.inf)[place + 1]).tolist()
        return predicted


def _size_of(num_rows: int) -> int:
    return (num_rows - 1).bit_length()


def _alike(tokens: int) -> tuple[int, int]:
    """Return the least and the largest number of tokens that count as the same: none are on both sides of sixteen."""
    width = 1 if tokens <= 8 else 2 if tokens <= 16 else 4 if tokens <= 32 else 8
    last = -(-tokens // width) * width
    return last - width + 1, last
