"""Choosing tokens from logits on all threads: greedily, by temperature, top-k, top-p and min-p, or reporting.

Owns the objects that launch the kernels of ``kernels.py``, each compiled when it is first used. Penalties
and masks are not known here: ``pagedcore/execution/sampler.py`` applies them first.

Invariant: what comes out for a row depends on that row and its own parameters alone: not on its neighbours, its place
in the batch or the number of threads.
"""

from __future__ import annotations

from ctypes import addressof, c_char
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagedcore_kernels.cpu.runtime.kernel import Kernel, ParameterBlock
from pagedcore_kernels.cpu.runtime.threads import num_threads
from pagedcore_kernels.cpu.sampling.kernels import (
    SAMPLING_ROW,
    greedy_bfloat16_kernel,
    greedy_kernel,
    logprob_kernel,
    memory_layout,
    sampling_kernel,
    widening_kernel,
)
from pagedcore_kernels.cpu.simd import LOG2_E
from pagedcore_kernels.errors import InternalError

_LARGEST_SCALE: Final = 1e30
"""A temperature so low that its inverse is beyond this leaves the largest logits only."""
_LOGITS_PER_THREAD: Final = 2**16
"""Fewer logits than this are read by one thread before another has woken up."""

_KEPT_BYTES: Final = 2**25
"""So much memory for logits is kept from a step to the next; the system clears new memory before it is written."""
_NO_BYTES: Final = c_char * 0

Logits = npt.NDArray[np.float32]


class GreedyPicker:
    """The most likely token of each row, the lowest id of equal ones."""

    def __init__(self, vocab_size: int) -> None:
        self._launcher = _Launcher(vocab_size, num_results=1)

    def __call__(self, logits: Logits | npt.NDArray[np.int16]) -> npt.NDArray[np.int64]:
        """Return [S] token ids of ``logits`` [S, vocab_size], C-contiguous; -1 where a row is not valid.

        A row is not valid if a logit is NaN or plus infinity, or none is finite. Logits are float32, or the bits of
        bfloat16 as int16.
        """
        token_ids = np.empty(len(logits), np.int64)
        is_short = logits.dtype == np.int16
        kernel, kind = (greedy_bfloat16_kernel(), np.int16) if is_short else (greedy_kernel(), np.float32)
        self._launcher.run(kernel, logits, len(logits), _address(token_ids), kind=kind)
        return token_ids


class LogitWidener:
    """Logits in float32, of those in bfloat16."""

    def __init__(self, vocab_size: int) -> None:
        self._launcher = _Launcher(vocab_size, num_results=1)
        self._kept: Logits = np.empty((0, vocab_size), np.float32)

    def __call__(self, bits: npt.NDArray[np.int16]) -> Logits:
        """Return [S, vocab_size], to be written; the next call may write over it.

        Args:
            bits: of bfloat16, [S, vocab_size], C-contiguous.
        """
        room: Logits = self._kept[: len(bits)]
        if len(room) < len(bits):
            room = np.empty((len(bits), self._kept.shape[1]), np.float32)
            if room.nbytes <= _KEPT_BYTES:
                self._kept = room
        self._launcher.run(widening_kernel(), bits, len(bits), room.ctypes.data, kind=np.int16)
        return room


class TokenSampler:
    """One token for each row, drawn with the row's own parameters and random number.

    Kept are the ``top_k`` most likely tokens; of these the fewest most likely that reach ``top_p`` of their
    probability; of these the ones at least ``min_p`` times as likely as the most likely. Equal logits are kept in order
    of their ids. Drawn is the first id at which the cumulative probability of the kept ones exceeds a number u from 0
    to 1 that is a function of seed and position: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014) as a hash.
    """

    def __init__(self, vocab_size: int) -> None:
        self._launcher = _Launcher(vocab_size, num_results=2)

    def __call__(self, logits: Logits, rows: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return [S] token ids; -1 where a row of logits is not valid, as from ``GreedyPicker``.

        Args:
            logits: [S, vocab_size], C-contiguous; may be changed. A row that ``leaves_drawable`` has the logits that
                were drawn from afterwards, divided by the temperature, and minus infinity elsewhere; if it is greedy
                it stays as it is.
            rows: [S] of ``SAMPLING_ROW``, made by ``sampling_rows``.
        """
        if rows.dtype != SAMPLING_ROW or rows.shape != logits.shape[:1]:
            raise InternalError(f"sampling rows: got shape {rows.shape}, expected one for each of {len(logits)} rows")
        token_ids = np.empty(len(logits), np.int64)
        self._launcher.run(sampling_kernel(), logits, len(logits), _address(token_ids), _address(rows))
        return token_ids


def sampling_rows(
    temperatures: npt.ArrayLike,
    top_k: npt.ArrayLike,
    top_p: npt.ArrayLike,
    min_p: npt.ArrayLike,
    seeds: npt.ArrayLike,
    positions: npt.ArrayLike,
) -> npt.NDArray[Any]:
    """Pack what ``TokenSampler`` needs of each row; all arguments are [S].

    Args:
        temperatures: 0 is greedy.
        top_k: 0 keeps all.
        top_p: 1 keeps all.
        min_p: 0 keeps all.
        seeds: below 2**63.
        positions: of the token to be drawn, in its sequence.
    """
    heat = np.asarray(temperatures, np.float64)
    rows = np.empty(len(heat), SAMPLING_ROW)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        rows["scale"] = np.where(heat > 0, np.minimum(LOG2_E / heat, _LARGEST_SCALE), 0.0)
        rows["min_p_offset"] = np.log(min_p) * heat
    rows["top_k"], rows["top_p"], rows["seed"], rows["position"] = top_k, top_p, seeds, positions
    rows["leaves_drawable"] = False
    return rows


class LogprobReporter:
    """Log-probabilities of whole rows: what to subtract from a logit, and the most likely tokens."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._launcher = _Launcher(vocab_size, num_results=5)

    def __call__(
        self, logits: Logits, row_numbers: npt.NDArray[np.int64], count: int
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Summarise some rows of ``logits`` [S, vocab_size], C-contiguous; nothing is changed.

        Args:
            logits: of the whole step.
            row_numbers: [P], which rows.
            count: how many of the largest logits to report, the whole vocabulary at most.

        Returns:
            [P] logarithms of the sums of exponentials, NaN where a row is not valid; [P, count] ids of the largest
            logits, best first and the lowest id first of equal ones; [P, count] logits. Past the last finite logit
            the id is -1 and the logit minus infinity.
        """
        shape = len(row_numbers), min(count, self._vocab_size)
        if shape[0] and not 0 <= row_numbers.min() <= row_numbers.max() < len(logits):
            raise InternalError(f"row numbers go beyond the {len(logits)} rows of logits")
        normalisers, ids, values = np.empty(shape[0]), np.empty(shape, np.int64), np.empty(shape, np.float32)
        ids.fill(-1)
        values.fill(-np.inf)
        results = _address(normalisers), _address(ids), _address(values), shape[1], row_numbers.ctypes.data
        self._launcher.run(logprob_kernel(), logits, shape[0], *results)
        return normalisers, ids, values


def _address(own: npt.NDArray[Any]) -> int:
    # Why so: a view by the array's own ``ctypes`` takes four times as long. The array is writable, and may be empty.
    return addressof(_NO_BYTES.from_buffer(own.data))


class _Launcher:
    """Runs kernels over rows of one vocabulary, and owns their parameters and their threads' memory.

    Invariant: a thread uses the part of the memory whose number it took from ``_counter``.
    """

    _NUM_COMMON = 7

    def __init__(self, vocab_size: int, num_results: int) -> None:
        self._vocab_size = vocab_size
        self._parameters = ParameterBlock(self._NUM_COMMON + num_results)
        self._part_bytes, self._maxima_offset = memory_layout(vocab_size)
        self._memory, self._memory_address = np.empty(0, np.uint8), 0
        self._counter = np.zeros(1, np.int64)
        # Why kept: a view by ctypes takes as long as a small kernel.
        self._counter_address = self._counter.ctypes.data

    def run(
        self, kernel: Kernel, logits: npt.NDArray[Any], num_pieces: int, *results: int, kind: npt.DTypeLike = np.float32
    ) -> None:
        """Run ``kernel`` over ``num_pieces`` rows of ``logits`` [S, vocab_size], C-contiguous, of the type ``kind``."""
        # Safety: the kernel reads raw memory.
        if logits.shape[1:] != (self._vocab_size,) or logits.dtype != kind or not logits.flags.c_contiguous:
            raise InternalError(
                f"logits: {logits.dtype} of shape {logits.shape}, expected {np.dtype(kind)} rows in one piece"
            )
        enough = -(-num_pieces * self._vocab_size // _LOGITS_PER_THREAD)
        threads = max(1, min(num_threads(), num_pieces, enough))
        if self._memory.size < threads * self._part_bytes:
            self._memory = np.empty(threads * self._part_bytes, np.uint8)
            self._memory_address = self._memory.ctypes.data
        self._counter[0] = 0
        self._parameters.fill(
            logits.ctypes.data, num_pieces, self._vocab_size, self._memory_address, self._part_bytes,
            self._maxima_offset, self._counter_address, *results,
        )  # fmt: skip
        kernel.run(self._parameters, threads)
