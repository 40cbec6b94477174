"""How long a step takes: four costs, learned from the steps that were measured.

``StepTimes`` are the costs, plain numbers to keep; ``StepTimeModel`` learns them while an engine runs, and says how far
off its predictions were.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagedcore.errors import InvalidConfig, describe
from pagedcore.scheduler.plan import SchedulePlan

_FORGETTING: Final = 0.995
"""Weight of the past at each step: about the last 200 count."""
_DOUBT: Final = 0.8
"""Weight of the past at an outlier: several in a row mean that the machine has changed."""
_RATE: Final = 0.05
"""Weight of one more error in the spread: about the last 20 count."""
_FAR: Final = 4.0
"""An error of more than so many spreads is an outlier, and counts as one of so many spreads."""
_NUM_FIRST: Final = 16
"""Steps at the start that are taken as they are, because nothing is known to compare them with."""
_NUM_AT_ONCE: Final = 64
"""Steps at the start each of which corrects the costs; from then on every eighth does."""
Floats = npt.NDArray[np.float64]
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
    Invariant: memory and the time of a call do not grow with the number of steps.

    Args:
        times: the first guess.
        forgetting: weight of the past at each step; 1 learns from all steps alike.
    """

    def __init__(self, times: StepTimes = FIRST_GUESS, *, forgetting: float = _FORGETTING) -> None:
        self.times = times
        """The costs as they are known now."""
        self.num_observed = 0
        self.errors: deque[float] = deque(maxlen=256)
        """Of the latest predictions: actual over predicted seconds, minus 1."""
        self._forgetting, self._spread = forgetting, 1.0
        # Sums of products of (1, prefill tokens, decode rows, KV tokens, seconds), each step over its seconds.
        self._moments = np.zeros((5, 5))

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
        expected_s = max(self.predict(prefill_tokens, decode_rows, kv_tokens), _LEAST_S)
        error = seconds / expected_s - 1.0
        self.errors.append(error)
        most, weight = _FAR * self._spread, self._forgetting
        if self.num_observed <= _NUM_FIRST:
            expected_s = seconds
        elif abs(error) > most:
            error, weight = math.copysign(most, error), _DOUBT
            seconds = max(0.0, expected_s * (1.0 + error))
        self._spread = max(0.01, self._spread + _RATE * (min(abs(error), most) - self._spread))
        row = np.array((1.0, prefill_tokens, decode_rows, kv_tokens, seconds)) / expected_s
        self._moments *= weight
        self._moments += row[:, None] * row
        if self.num_observed <= _NUM_AT_ONCE or self.num_observed % 8 == 0:
            self._solve()

    def predict(self, prefill_tokens: float, decode_rows: float, kv_tokens: float) -> float:
        """Return the seconds that a step will take; arguments as ``observe``."""
        return self.times.seconds(prefill_tokens, decode_rows, kv_tokens)

    def interval(
        self, prefill_tokens: float, decode_rows: float, kv_tokens: float, share: float = 0.95
    ) -> tuple[float, float]:
        """Return bounds (low, high) in seconds that held for at least this share of the latest steps.

        Before 20 steps were observed the bounds are 0 and twice the prediction; the latter grows with the worst error.
        """
        seconds, errors = self.predict(prefill_tokens, decode_rows, kv_tokens), sorted(self.errors)
        if len(errors) < 20:
            return 0.0, seconds * (2.0 + max([0.0, *errors]))
        outside = int((1.0 - share) / 2 * len(errors))
        return seconds * (1.0 + errors[outside]), seconds * (1.0 + errors[-1 - outside])

    def snapshot(self) -> dict[str, Any]:
        """Copy what was learned as plain values."""
        return {
            "times": list(astuple(self.times)), "num_observed": self.num_observed, "errors": list(self.errors),
            "spread": self._spread, "moments": self._moments.tolist(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Let a new model be as it was copied."""
        self.times, self.num_observed = StepTimes(*state["times"]), state["num_observed"]
        self.errors.extend(state["errors"])
        self._spread, self._moments = state["spread"], np.array(state["moments"])

    def _solve(self) -> None:
        sums = self._moments
        # Why: columns differ by powers of ten; scaled, one small ridge is right for all of them.
        scale = np.sqrt(np.maximum(sums.diagonal()[:4], 1e-300))
        products, known = sums[:4, :4] / scale[:, None] / scale, np.array(astuple(self.times)) * scale
        products += 1e-6 * np.eye(4)
        right = sums[:4, 4] / scale + 1e-6 * known
        self.times = StepTimes(*(non_negative(products, right) / scale).tolist())


def non_negative(products: Floats, right: Floats) -> Floats:
    """Solve least squares for numbers that are not negative, from the sums of products ``products @ x = right``."""
    solved, kept = np.zeros(len(right)), list(range(len(right)))
    # Active sets: the most negative one becomes 0, and the others are solved for anew.
    while kept:
        solution = np.linalg.solve(products[np.ix_(kept, kept)], right[kept])
        if solution.min() >= 0.0:
            solved[kept] = solution
            break
        del kept[int(solution.argmin())]
    return solved


def work_of(plan: SchedulePlan) -> tuple[int, int, int]:
    """Return a step's prefill tokens, decode rows and KV tokens: the arguments of ``observe`` and ``predict``."""
    num_decode = sum([row.is_decode for row in plan.rows])
    return plan.num_tokens - num_decode, num_decode, sum([row.end for row in plan.rows])
