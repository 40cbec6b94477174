"""The cost of preempting: seconds of moving blocks, of computing them again, of letting a sequence wait.

Begins with measurements at the start and learns from every step (``step_time``) and transfer (``fixed + blocks *
per_block`` seconds), which the engine and ``kv_transfers`` measure.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from typing import Any, Final

from pagedcore.kv_cache.host_cache import Direction
from pagedcore.scheduler.step_time import StepTimeModel

_FORGETTING: Final = 0.98
"""Weight of the past at each observation: about the last 50 count."""
_LOSS_RATE: Final = 0.2
"""Weight of one more observed loss of a shrunk sequence: about the last 5 count."""


@dataclass(slots=True)
class Line:
    """``fixed + count * per_unit`` seconds, learned from observations.

    Invariant: both coefficients stay non-negative. Source: recursive least squares with exponential forgetting
    (Haykin, Adaptive Filter Theory), two parameters.
    """

    fixed_s: float
    per_unit_s: float
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def __post_init__(self) -> None:
        # Why: the first guess counts like two observations, so that one odd measurement does not replace it.
        for count, seconds in [(count, self.seconds(count)) for count in (1.0, 64.0)]:
            self.observe(count, seconds)

    def seconds(self, count: float) -> float:
        """Predict the seconds of ``count`` units."""
        return self.fixed_s + count * self.per_unit_s

    def observe(self, count: float, seconds: float) -> None:
        """Learn that ``count`` units took this long."""
        added = (1.0, count, count * count, seconds, count * seconds)
        self._sums = [_FORGETTING * old + new for old, new in zip(self._sums, added, strict=True)]
        weight, x, xx, y, xy = self._sums
        spread = weight * xx - x * x
        slope = (weight * xy - x * y) / spread if spread > 1e-9 * weight * xx else 0.0
        # Why: with counts that hardly differ only the mean is known; what is fixed is then what the slope leaves.
        self.per_unit_s = max(slope if slope > 0 else self.per_unit_s * 0.99, 0.0)
        self.fixed_s = max((y - self.per_unit_s * x) / weight, 0.0)

    def snapshot(self) -> list[float]:
        """Copy coefficients and sums."""
        return [self.fixed_s, self.per_unit_s, *self._sums]

    def restore(self, state: ListOf[float]) -> None:
        """Be as it was copied."""
        self.fixed_s, self.per_unit_s, *self._sums = state


@dataclass(slots=True)
class CostModel:
    """Estimates for one engine. Before anything was measured, the guesses suit a small model on a CPU.

    Invariant: an estimate depends on observations alone, never on the time of asking.
    """

    steps: StepTimeModel = field(default_factory=StepTimeModel)
    """Seconds of a step: the one model that policies, quotes and these estimates read."""
    moves: dict[Direction, Line] = field(default_factory=lambda: {way: Line(2e-5, 5e-5) for way in Direction})
    """Seconds of a transfer by blocks, each way; ``units`` says how many blocks states count as."""
    loss_share: float = 0.5
    """Share of a shrunk sequence's cached rest that is evicted before it runs again, 0 to 1."""
    num_estimates: int = 0
    sum_relative_error: float = 0.0
    state_weight: float = 0.0
    """As how many blocks a state counts in a transfer, where the model keeps some."""

    def units(self, num_blocks: int, num_states: int) -> float:
        """Return as how many blocks these count in a transfer."""
        return num_blocks + num_states * self.state_weight if num_states else num_blocks

    def swap_s(self, num_out: int, num_in: int) -> float:
        """Seconds of moving so many blocks of a sequence to the host and so many back, and its state if there is one.
        """
        out, back = self.moves[Direction.OUT], self.moves[Direction.IN]
        return out.seconds(self.units(num_out, 1)) + back.seconds(self.units(num_in, 1))

    def compute_s(self, num_tokens: int) -> float:
        """Seconds of computing tokens in steps that take place anyway; each is one more position that is read."""
        times = self.steps.times
        return num_tokens * self.steps.level * (times.prefill_token_s + times.kv_token_s)

    def shrink_s(self, num_lost: int, num_left: int) -> float:
        """Seconds of computing again what is freed of a sequence's end, and what others evict of the rest."""
        return self.compute_s(num_lost) + self.loss_share * self.compute_s(num_left)

    def loading_saves_s(self, num_blocks: int, num_tokens: int) -> float:
        """Seconds that moving so many blocks to the device, and a state if there is one, takes less than computing so
        many tokens; negative if it takes longer.
        """
        return self.compute_s(num_tokens) - self.moves[Direction.IN].seconds(self.units(num_blocks, 1))

    def observe_loss(self, share: float) -> None:
        """Learn what share of a shrunk sequence's rest was evicted before it ran again; it depends on the load."""
        self.loss_share += _LOSS_RATE * (share - self.loss_share)

    def wait_s(self, num_steps: int, num_running: int, block_size: int) -> float:
        """Seconds lost when one of ``num_running`` sequences stalls for ``num_steps`` steps.

        A stalled row does not share the fixed part of a step; and while no block is available, on average one more row
        stalls every ``block_size / num_running`` steps.
        """
        num_stalled = 1 + num_steps * num_running / (2 * block_size)
        return self.steps.level * self.steps.times.fixed_s / num_running * num_steps * num_stalled

    def score(self, estimated_s: float, actual_s: float) -> None:
        """Note how far off an estimate was."""
        self.num_estimates += 1
        self.sum_relative_error += abs(estimated_s - actual_s) / max(estimated_s, actual_s, 1e-9)

    def snapshot(self) -> dict[str, Any]:
        """Copy what was learned as plain values."""
        return {
            "steps": self.steps.snapshot(), "moves": {way.value: line.snapshot() for way, line in self.moves.items()},
            "loss_share": self.loss_share,
            "num_estimates": self.num_estimates, "sum_relative_error": self.sum_relative_error,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Be as it was copied."""
        self.steps.restore(state["steps"])
        for way, line in self.moves.items():
            line.restore(state["moves"][way.value])
        self.loss_share, self.num_estimates = state["loss_share"], state["num_estimates"]
        self.sum_relative_error = state["sum_relative_error"]

    @property
    def mean_relative_error(self) -> float:
        """Mean of |estimate - actual| over the larger of the two, 0 to 1; 0 before anything was scored."""
        return self.sum_relative_error / self.num_estimates if self.num_estimates else 0.0
