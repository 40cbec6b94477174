"""What a draft costs in the step that computes it, learned from steps in which all rows decode."""

from __future__ import annotations

from typing import Final

from pagedcore.scheduler.cost_model import Line
from pagedcore.scheduler.step_time import StepTimeModel

_MOST_FACTOR: Final = 2.0
"""A step that stood still counts as one that took so many times what was expected."""


class DraftCosts:
    """Seconds of steps in which all rows decode, by their tokens: one line for 1 row, 2, 3 or 4, 5 to 8, and so on.

    Why not the costs of all steps: where weights have to be read, a few rows cost what one does, and a prompt what its
    tokens do, so that no line is right for both.
    """

    def __init__(self, steps: StepTimeModel) -> None:
        """Begin with what is known of all steps, which ``steps`` goes on to learn."""
        self._steps = steps
        self._lines: dict[int, Line] = {}

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Learn that a step of so many rows and drafts, and nothing else, took so long."""
        line, count = self._lines.get(_size_of(num_rows)), num_rows + num_drafts
        if line is None:
            line = self._lines[_size_of(num_rows)] = self._first_line(num_rows, count, seconds)
        line.observe(count, min(seconds, _MOST_FACTOR * line.seconds(count)))

    def predict(self, num_rows: int, kv_tokens: int) -> tuple[float, float]:
        """Predict the seconds of a step of rows that decode, and of each draft that it computes beside them."""
        line = self._lines.get(_size_of(num_rows))
        if line is None:
            line = self._first_line(num_rows, num_rows, self._steps.predict(0, num_rows, kv_tokens))
        return max(line.seconds(num_rows), 1e-9), line.per_unit_s

    def _first_line(self, num_rows: int, count: int, seconds: float) -> Line:
        """Return what is thought when of one step with ``count`` tokens it is known how long it takes: a token more
        costs what one of a prompt does.
        """
        times = self._steps.times
        row_s = min(times.prefill_token_s + times.kv_token_s, seconds / count)
        return Line(seconds - count * row_s, row_s, first_counts=(num_rows, num_rows + 8))


def _size_of(num_rows: int) -> int:
    return (num_rows - 1).bit_length()
