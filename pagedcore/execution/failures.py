"""Whose fault a failed forward is: a row's, the memory's, or the device's. Decides from the exception alone.

By names and words, because torch, its allocators and Numba's driver have no types of their own for all of it, and
because importing them takes seconds.
"""

from __future__ import annotations

from typing import Final

from pagedcore.errors import PagedcoreError, StepFailed

_NO_MEMORY: Final = ("out of memory", "can't allocate memory", "Cannot allocate memory", "OUT_OF_MEMORY")
_NO_DEVICE: Final = ("CUDA error", "CUDA_ERROR", "CUBLAS_STATUS", "CUDNN_STATUS")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was lacking, on the device or here; a smaller batch may fit."""
    is_by_type = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_by_type or any(words in str(error) for words in _NO_MEMORY)


def concerns_all_rows(error: Exception) -> bool:
    """Whether fewer rows are no remedy, or not this one: lack of memory, a lost device, a broken law of the engine.

    What a model returned of another shape or kind than its protocol says, which is ``StepFailed``, may be one row's.
    """
    is_of_device = any(words in str(error) for words in _NO_DEVICE)
    return is_of_device or is_out_of_memory(error) or (
        isinstance(error, PagedcoreError) and not isinstance(error, StepFailed)
    )
