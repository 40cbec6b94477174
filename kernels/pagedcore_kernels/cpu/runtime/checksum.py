"""A checksum of much memory on all threads, as fast as it can be read: against damage, not against forgery.

Of each chunk there are two sums of its 64-bit words: of the words, and of the words times an odd number that depends on
their place, so that a word in another place shows as much as another word. The sums of all chunks have a CRC.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

from pagedcore_kernels.cpu.runtime.kernel import Kernel, ParameterBlock, compile_kernel
from pagedcore_kernels.cpu.runtime.threads import Computing, num_threads
from pagedcore_kernels.cpu.simd import address_of, claim, load_int64, store_int64
from pagedcore_kernels.errors import InternalError

_CHUNK_BYTES = 2**21
"""Bytes that a thread reads at a time."""
MULTIPLE = 8
"""What the number of bytes is a multiple of."""


def checksum_of(memory: torch.Tensor) -> int:
    """Return 32 bits of all bytes of a contiguous tensor on the CPU, whose number is a multiple of ``MULTIPLE``.

    Raises:
        InternalError: the tensor is none of these.
    """
    if memory.device.type != "cpu" or not memory.is_contiguous() or memory.nbytes % MULTIPLE:
        raise InternalError(f"memory: {memory.nbytes} bytes, expected a multiple of {MULTIPLE}, without gaps")
    sums = torch.zeros(-(-memory.nbytes // _CHUNK_BYTES), 2, dtype=torch.int64)
    parameters = ParameterBlock(3)
    parameters.fill(memory.data_ptr(), memory.nbytes // MULTIPLE, sums.data_ptr())
    _kernel().run(parameters)
    return zlib.crc32(sums.numpy().tobytes(), memory.nbytes & 0xFFFFFFFF)


def begin_checksum(memory: torch.Tensor) -> Callable[[], int]:
    """Begin ``checksum_of`` beside what the caller does next, on a thread of its own and as many more as a kernel may
    have; return what waits for the result and returns it. Raises as there.
    """
    _kernel()  # Why: what compiles is the caller's thread.

    def add_up(most_threads: int) -> int:
        with Computing(most_threads):
            return checksum_of(memory)

    executor = ThreadPoolExecutor(1, "pagedcore checksum")
    try:
        future = executor.submit(add_up, num_threads())
    except RuntimeError:  # the system gives no thread
        result = checksum_of(memory)
        return lambda: result
    executor.shutdown(wait=False)
    return future.result


@cache
def _kernel() -> Kernel:
    words_at_once, word_bytes = _CHUNK_BYTES // MULTIPLE, MULTIPLE

    def add_up(parameters: Any) -> None:
        p = address_of(parameters)
        counter, words, num_words, sums = load_int64(p, 0), load_int64(p, 1), load_int64(p, 2), load_int64(p, 3)
        chunk = claim(counter)
        while chunk * words_at_once < num_words:
            first, plain, weighted = chunk * words_at_once, 0, 0
            begin = words + first * word_bytes
            for place in range(min(words_at_once, num_words - first)):
                word = load_int64(begin, place)
                plain += word
                weighted += word * (2 * place + 1)
            store_int64(sums, 2 * chunk, plain)
            store_int64(sums, 2 * chunk + 1, weighted)
            chunk = claim(counter)

    return compile_kernel(add_up)
