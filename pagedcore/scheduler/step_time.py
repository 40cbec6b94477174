"""How long a step takes: four costs, learned from the steps that were measured.

``StepTimes`` are the costs, plain numbers to keep; ``StepTimeModel`` learns them while an engine runs. A scheduler has
one (``CostModel.steps``), and whoever asks what steps cost asks that one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as ListOf
from dataclasses import astuple, dataclass, fields
from typing import Any, Final

from pagedcore.errors import InvalidConfig, describe

_FORGETTING: Final = 0.998
"""Weight of the past at each step: about the last 500 say what steps cost, and the level what is different just now.
Twice to ten times as many make quotes no narrower, and need as many times longer to know a machine that has changed."""
_DOUBT: Final = 0.8
"""Weight of the past at an outlier: several in a row mean that the machine has changed."""
_RATE: Final = 0.05
"""Weight of one more error in the spread: about the last 20 count."""
_LEVEL_RATE: Final = 1.0 / 30.0
"""Weight of one more step in how slow steps are just now."""
_MOST_LEVEL: Final = 4.0
"""A step that stood still for a second says nothing of the next ones: it counts as one of so many times its cost."""
_FAR: Final = 4.0
"""An error of more than so many spreads is an outlier, and counts as one of so many spreads."""
_NUM_FIRST: Final = 16
"""Steps at the start that are taken as they are, because nothing is known to compare them with, and each of which
corrects the costs."""
_SOLVED_EVERY: Final = 32
"""From then on the costs are corrected after so many steps, because to solve for them takes longer than to learn."""
_RIDGE: Final = 1e-6
"""Share of what is known in what is solved for: it decides where the steps do not."""
_LEAST_S: Final = 1e-9
_MOST_S: Final = 1e5


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The costs of a step in seconds.

    Raises:
        InvalidConfig: a cost is not a finite number, or is negative.
    """

    fixed_s: float
    prefill_token_s: float
    """For each token of prompts and of what is computed again."""
    decode_row_s: float
    """For each sequence that computes the token it has just generated."""
    kv_token_s: float
    """For each position whose keys and values a row reads: of all rows together, the position that each one reaches."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise InvalidConfig(f"{one.name}: got {describe(value)}, allowed is a number of seconds, 0 or more.")

    def seconds(self, prefill_tokens: float, decode_rows: float, kv_tokens: float) -> float:
        """Predict the seconds of a step."""
        return (self.fixed_s + self.prefill_token_s * prefill_tokens + self.decode_row_s * decode_rows
                + self.kv_token_s * kv_tokens)


FIRST_GUESS: Final = StepTimes(2e-3, 2e-4, 2e-4, 0.0)
"""Suits a small model on a CPU."""


class StepTimeModel:
    """Learns ``StepTimes`` online: non-negative least squares of the relative errors, with forgetting.

    An outlier counts as a moderate error; errors that stay are no outliers for long. Costs that the latest steps do not
    tell apart stay what they were, so that an hour of decoding does not wipe out what a prompt costs.

    Invariant: no cost is negative, and so no prediction is.
    Invariant: the costs depend on observations alone, never on the time of asking.
    Invariant: memory and the time of a call do not grow with the number of steps.

    Args:
        times: the first guess.
    """

    def __init__(self, times: StepTimes = FIRST_GUESS) -> None:
        self.times = times
        """The costs as they are known now."""
        self.num_observed = 0
        self.level = 1.0
        """How slow the latest steps were: about the last thirty, over what they cost usually."""
        self._spread = 1.0
        # Sums of the products of all pairs of (1, prefill tokens, decode rows, KV tokens, seconds) but the last pair,
        # each step over its seconds.
        self._sums = (0.0,) * 14

    def observe(self, prefill_tokens: int, decode_rows: int, kv_tokens: int, seconds: float) -> None:
        """Learn that a step took so long; one that took no time, on a clock that stands still, or a day is left out.

        Args:
            prefill_tokens: those of all its chunks.
            decode_rows: sequences that computed the token they had just generated.
            kv_tokens: sum over all rows of the position that the row reaches.
            seconds: what the step took.
        """
        if not _LEAST_S <= seconds <= _MOST_S:
            return
        self.num_observed += 1
        expected_s = max(self.times.seconds(prefill_tokens, decode_rows, kv_tokens), _LEAST_S)
        error, kept = seconds / expected_s - 1.0, _FORGETTING
        far, most = abs(error), _FAR * self._spread
        if self.num_observed <= _NUM_FIRST:
            expected_s = seconds
        else:
            ratio = min(_MOST_LEVEL, max(1.0 / _MOST_LEVEL, seconds / expected_s))
            self.level += _LEVEL_RATE * (ratio - self.level)
            if far > most:
                seconds, kept = expected_s * max(0.0, 1.0 + math.copysign(most, error)), _DOUBT
        self._spread = max(0.01, self._spread + _RATE * (min(far, most) - self._spread))
        # Why plain numbers: this is part of every step, and takes a fifth of the time of an outer product in NumPy.
        one = 1.0 / (expected_s * expected_s)
        by_p, by_d, by_k = one * prefill_tokens, one * decode_rows, one * kv_tokens
        oo, op, od, ok, os, pp, pd, pk, ps, dd, dk, ds, kk, ks = self._sums
        self._sums = (
            kept * oo + one, kept * op + by_p, kept * od + by_d, kept * ok + by_k, kept * os + one * seconds,
            kept * pp + by_p * prefill_tokens, kept * pd + by_p * decode_rows, kept * pk + by_p * kv_tokens,
            kept * ps + by_p * seconds, kept * dd + by_d * decode_rows, kept * dk + by_d * kv_tokens,
            kept * ds + by_d * seconds, kept * kk + by_k * kv_tokens, kept * ks + by_k * seconds,
        )
        if self.num_observed <= _NUM_FIRST or self.num_observed % _SOLVED_EVERY == 0:
            self._solve()

    def predict(self, prefill_tokens: float, decode_rows: float, kv_tokens: float) -> float:
        """Return the seconds that a step will take; arguments as ``observe``."""
        return self.times.seconds(prefill_tokens, decode_rows, kv_tokens)

    def times_now(self) -> StepTimes:
        """Return the costs as they are just now: all of them as much slower as the latest steps were."""
        level, times = self.level, self.times
        return StepTimes(level * times.fixed_s, level * times.prefill_token_s, level * times.decode_row_s,
                         level * times.kv_token_s)

    def snapshot(self) -> dict[str, Any]:
        """Copy what was learned as plain values."""
        return {"times": list(astuple(self.times)), "num_observed": self.num_observed, "level": self.level,
                "spread": self._spread, "sums": list(self._sums)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Be as it was copied."""
        self.times, self.num_observed = StepTimes(*state["times"]), state["num_observed"]
        self.level, self._spread, self._sums = state["level"], state["spread"], tuple(state["sums"])

    def _solve(self) -> None:
        oo, op, od, ok, os, pp, pd, pk, ps, dd, dk, ds, kk, ks = self._sums
        products, right = ((oo, op, od, ok), (op, pp, pd, pk), (od, pd, dd, dk), (ok, pk, dk, kk)), (os, ps, ds, ks)
        # Why: columns differ by powers of ten; scaled, one small ridge is right for all of them.
        scale = [math.sqrt(max(products[place][place], 1e-300)) for place in range(4)]
        known = astuple(self.times)
        scaled = [[products[row][place] / (scale[row] * scale[place]) + _RIDGE * (row == place) for place in range(4)]
                  for row in range(4)]
        aims = [one / a + _RIDGE * was * a for one, was, a in zip(right, known, scale, strict=True)]
        self.times = StepTimes(*[one / a for one, a in zip(non_negative(scaled, aims), scale, strict=True)])


def non_negative(products: ListOf[ListOf[float]], right: ListOf[float]) -> list[float]:
    """Solve least squares for numbers that are not negative, from the sums of products ``products @ x = right``."""
    solved, kept = [0.0] * len(right), list(range(len(right)))
    # Active sets: the most negative one becomes 0, and the others are solved for anew.
    while kept:
        solution = _solution([[*[products[row][place] for place in kept], right[row]] for row in kept])
        if min(solution) >= 0.0:
            for place, one in zip(kept, solution, strict=True):
                solved[place] = one
            break
        del kept[solution.index(min(solution))]
    return solved


def _solution(rows: list[list[float]]) -> list[float]:
    """Solve linear equations, each with its right side behind; no pivots, as for sums of products none are needed."""
    num = len(rows)
    for place, pivot in enumerate(rows):
        for row in rows[place + 1 :]:
            factor = row[place] / pivot[place]
            for column in range(place + 1, num + 1):
                row[column] -= factor * pivot[column]
    solution = [0.0] * num
    for place in range(num - 1, -1, -1):
        row = rows[place]
        solution[place] = (row[num] - sum([row[one] * solution[one] for one in range(place + 1, num)])) / row[place]
    return solution
