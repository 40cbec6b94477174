"""The kernels that choose tokens from rows of logits, compiled when first asked for.

Every kernel takes the same first words: logits, number of pieces of work, vocabulary, memory of the threads, bytes of a
thread's part, where in it the maxima are, the counter that hands out parts, then results. A piece of work is a
row; ``logit_search.py`` says how it is searched. Read ``samplers.py`` for who launches them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np

from pagedcore_kernels.cpu.runtime.kernel import Kernel, compile_kernel
from pagedcore_kernels.cpu.sampling.logit_search import (
    MAX_CANDIDATES,
    Memory,
    collect_largest,
    draw,
    gather,
    gather_largest,
    keep_heaviest,
    leave_drawable,
    short_view,
)
from pagedcore_kernels.cpu.sampling.logit_vectors import CHUNK, load_float64, store_float64, widen_chunks
from pagedcore_kernels.cpu.sampling.logit_views import (
    BLOCK,
    NOTHING,
    Integer,
    Number,
    View,
    compiled,
    find_first,
    find_first_of_bfloat16,
    find_maxima,
    find_maxima_of_bfloat16,
    pad_last_chunk,
    weigh,
)
from pagedcore_kernels.cpu.simd import (
    LOG2_E,
    address_of,
    claim,
    load_bfloat16,
    load_int64,
    store_float32,
    store_int64,
)

SAMPLING_ROW: Final = np.dtype(
    [("scale", "f8"), ("min_p_offset", "f8"), ("top_p", "f8"), ("top_k", "i8"), ("seed", "i8"), ("position", "i8"),
     ("leaves_drawable", "i8")]
)
"""How one row is sampled: log2(e) / temperature or 0 for greedy; log(min_p) * temperature; as their names say; and
whether the row is left as what was drawn from."""

_FIRST_GUESS, _SECOND_GUESS = 64, 1024
"""How many of the largest logits are tried for a nucleus before it is searched for in the whole row."""
_ROW_BYTES: Final = SAMPLING_ROW.itemsize
_COUNT: Final = np.float32(0.0)

# A thread's memory: candidates' ids (or a block of widened logits), their logits, the padded last chunk, weights,
# maxima of chunks.
_VALUES_OFFSET: Final = 8 * MAX_CANDIDATES
_LAST_OFFSET: Final = _VALUES_OFFSET + 4 * MAX_CANDIDATES
_WEIGHTS_OFFSET: Final = _LAST_OFFSET + 4 * CHUNK


def memory_layout(vocab_size: int) -> tuple[int, int]:
    """Bytes of one thread's memory, whole cache lines, and where in it the maxima are."""
    num_chunks = -(-vocab_size // CHUNK)
    num_weights = max(CHUNK, -(-num_chunks // BLOCK) + 1)
    maxima_offset = _WEIGHTS_OFFSET + 8 * num_weights
    return -(-(maxima_offset + 4 * (num_chunks + CHUNK)) // 64) * 64, maxima_offset


@compiled
def _own_memory(p: Integer) -> Memory:
    part = load_int64(p, 4) + claim(load_int64(p, 7)) * load_int64(p, 5)
    return part, part + _VALUES_OFFSET, part + _LAST_OFFSET, part + _WEIGHTS_OFFSET, part + load_int64(p, 6)


@compiled
def _open_row(p: Integer, row: Integer, memory: Memory) -> tuple[View, Number, bool]:
    vocab_size = load_int64(p, 3)
    view = pad_last_chunk(load_int64(p, 1) + 4 * row * vocab_size, vocab_size, memory[2])
    largest, is_valid = find_maxima(view, memory[4])
    return view, largest, is_valid


@lru_cache
def greedy_kernel() -> Kernel:
    """Result: token ids."""

    def pick_greedily(parameters: Any) -> None:
        p = address_of(parameters)
        memory = _own_memory(p)
        while True:
            row = claim(load_int64(p, 0))
            if row >= load_int64(p, 2):
                break
            view, largest, is_valid = _open_row(p, row, memory)
            store_int64(load_int64(p, 8), row, find_first(view, memory[4], largest) if is_valid else -1)

    return compile_kernel(pick_greedily)


@lru_cache
def greedy_bfloat16_kernel() -> Kernel:
    """Result: token ids, of logits in bfloat16. A block of them at a time is widened, in the first level of cache."""

    def pick_greedily(parameters: Any) -> None:
        p = address_of(parameters)
        room, _, _, _, maxima = _own_memory(p)
        vocab_size = load_int64(p, 3)
        while True:
            row = claim(load_int64(p, 0))
            if row >= load_int64(p, 2):
                break
            address = load_int64(p, 1) + 2 * row * vocab_size
            token = -1
            largest, is_valid = find_maxima_of_bfloat16(address, vocab_size, room, maxima)
            if is_valid:
                token = find_first_of_bfloat16(address, vocab_size, room, maxima, largest)
            store_int64(load_int64(p, 8), row, token)

    return compile_kernel(pick_greedily)


@lru_cache
def widening_kernel() -> Kernel:
    """Result: rows of float32, of logits in bfloat16."""

    def widen_rows(parameters: Any) -> None:
        p = address_of(parameters)
        vocab_size = load_int64(p, 3)
        num_whole = vocab_size // CHUNK
        while True:
            row = claim(load_int64(p, 0))
            if row >= load_int64(p, 2):
                break
            source, target = load_int64(p, 1) + 2 * row * vocab_size, load_int64(p, 8) + 4 * row * vocab_size
            widen_chunks(source, num_whole, target)
            for i in range(num_whole * CHUNK, vocab_size):
                store_float32(target, i, load_bfloat16(source, i))

    return compile_kernel(widen_rows)


@lru_cache
def sampling_kernel() -> Kernel:
    """Results: token ids; then the address of rows of ``SAMPLING_ROW``."""

    def sample_tokens(parameters: Any) -> None:
        p = address_of(parameters)
        memory = _own_memory(p)
        while True:
            row = claim(load_int64(p, 0))
            if row >= load_int64(p, 2):
                break
            view, largest, is_valid = _open_row(p, row, memory)
            token = -1
            if is_valid:
                token = _sample_row(view, largest, load_int64(p, 3), load_int64(p, 9) + row * _ROW_BYTES, memory)
            store_int64(load_int64(p, 8), row, token)

    return compile_kernel(sample_tokens)


@compiled
def _sample_row(view: View, largest: Number, vocab_size: Integer, row: Integer, memory: Memory) -> Integer:
    ids, _, _, weights, maxima = memory
    scale, top_p, top_k = np.float32(load_float64(row, 0)), load_float64(row, 2), load_int64(row, 3)
    if scale == 0.0:
        return find_first(view, maxima, largest)
    low = np.float32(largest + load_float64(row, 1))
    kept, target = view, np.inf
    if 0 < top_k < vocab_size:
        kept = short_view(view, memory, gather_largest(view, maxima, largest, top_k, memory))
        cut = keep_heaviest(kept, memory, largest, _COUNT, np.float64(top_k))
        low = max(low, cut)
        target = top_p * weigh(kept, largest, scale, cut)
    elif top_p < 1.0:
        target = top_p * weigh(view, largest, scale, NOTHING)
        kept = _guess_nucleus(view, largest, scale, target, memory)
    elif low > NOTHING:
        kept = short_view(view, memory, gather(view, maxima, low, memory))
    if top_p < 1.0:
        low = max(low, keep_heaviest(kept, memory, largest, scale, target))
    index = draw(kept, largest, scale, low, _uniform(load_int64(row, 4), load_int64(row, 5)), weights)
    token = index if kept[0] == view[0] else load_int64(ids, index)
    if load_int64(row, 6) != 0:
        leave_drawable(view, vocab_size, kept, ids, largest, scale, low)
    return token


@compiled
def _guess_nucleus(view: View, largest: Number, scale: Number, target: Number, memory: Memory) -> View:
    """A view that holds the largest logits up to a weight of ``target``: a short one if that is quickly found."""
    for guess in (_FIRST_GUESS, _SECOND_GUESS):
        count = gather_largest(view, memory[4], largest, guess, memory)
        if count < 0:
            break
        guessed = short_view(view, memory, count)
        if weigh(guessed, largest, scale, NOTHING) >= target:
            return guessed
    return view


@compiled
def _mix(word: Integer) -> Integer:
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@compiled
def _uniform(seed: Integer, position: Integer) -> Number:
    """A number of 53 bits from 0 to 1, 1 excluded."""
    mixed = _mix(np.uint64(position) + np.uint64(0x632BE59BD9B4E019))
    return np.float64(_mix(np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + mixed) >> np.uint64(11)) * 2.0**-53


@lru_cache
def logprob_kernel() -> Kernel:
    """Results: normalisers, ids, logits; then how many of these two per row, and the address of the rows' numbers."""

    def report_logprobs(parameters: Any) -> None:
        p = address_of(parameters)
        memory = _own_memory(p)
        count = load_int64(p, 11)
        while True:
            row = claim(load_int64(p, 0))
            if row >= load_int64(p, 2):
                break
            view, largest, is_valid = _open_row(p, load_int64(load_int64(p, 12), row), memory)
            normaliser = np.nan
            if is_valid:
                normaliser = largest + np.log(weigh(view, largest, np.float32(LOG2_E), NOTHING))
            store_float64(load_int64(p, 8), row, normaliser)
            if is_valid and count > 0:
                places = load_int64(p, 9) + 8 * row * count, load_int64(p, 10) + 4 * row * count
                collect_largest(view, memory, largest, count, places)

    return compile_kernel(report_logprobs)
