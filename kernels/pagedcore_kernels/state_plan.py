"""Which state every row of a step begins from and where its next one goes, checked once on the host.

Owns the range checks that stand between a ragged batch and code that trusts it with raw addresses. Read
``cpu/recurrence/states.py`` next for who uses it.
"""

from __future__ import annotations

import numpy as np

from pagedcore_kernels.errors import InternalError
from pagedcore_kernels.interface import Int64Array, RaggedRows


class StatePlan:
    """One ragged batch, checked against the pool of states it will be computed in.

    Invariant: every state but -1 lies in the pool; one that is written is read by no row and written by no other.
    """

    def __init__(self, batch: RaggedRows, num_states: int) -> None:
        if batch.state_reads is None or batch.state_writes is None:
            raise InternalError("ragged batch: it has no states, expected state_reads and state_writes of every row.")
        self.num_tokens = len(batch.token_ids)
        """T, padding included."""
        self.query_start: Int64Array = np.ascontiguousarray(batch.query_start, np.int64)
        self.query_lens: Int64Array = self.query_start[1:] - self.query_start[:-1]
        """Shape [R]; tokens of each row."""
        self.reads: Int64Array = np.ascontiguousarray(batch.state_reads, np.int64)
        self.writes: Int64Array = np.ascontiguousarray(batch.state_writes, np.int64)
        self._check_rows()
        self._check_states(num_states)

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.reads)

    @property
    def num_computed(self) -> int:
        """Tokens that belong to a row; the rest is padding."""
        return int(self.query_start[-1])

    def _check_rows(self) -> None:
        starts = self.query_start
        if len(starts) != self.num_rows + 1 or len(self.writes) != self.num_rows:
            raise InternalError(
                f"ragged batch: {len(starts)} query_start, {self.num_rows} state_reads and {len(self.writes)} "
                "state_writes, expected R + 1, R and R."
            )
        if starts[0] != 0 or starts[-1] > self.num_tokens or (self.query_lens < 0).any():
            raise InternalError(
                f"query_start: goes from {starts[0]} to {starts[-1]}, expected 0 to at most {self.num_tokens} "
                "without a step back."
            )

    def _check_states(self, num_states: int) -> None:
        for name, states in (("state_reads", self.reads), ("state_writes", self.writes)):
            if len(states) and (states.min() < -1 or states.max() >= num_states):
                raise InternalError(
                    f"{name}: states from {states.min()} to {states.max()}, expected -1 to {num_states - 1}."
                )
        # Why no NumPy: of the rows of a step, sets are known in a tenth of the time.
        written = [state for state in self.writes.tolist() if state >= 0]
        if len(set(written)) < len(written) or not set(written).isdisjoint(self.reads.tolist()):
            raise InternalError(
                f"state_writes: {self.writes.tolist()}, expected no state twice and none of state_reads "
                f"{self.reads.tolist()}."
            )
        if (self.writes[self.query_lens == 0] >= 0).any():
            raise InternalError("state_writes: a row without tokens has a state to write, expected -1.")
