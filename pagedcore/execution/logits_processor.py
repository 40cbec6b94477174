"""Calls the logits processor of one request. It is a caller's own code, and its failure is that request's alone."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from pagedcore.errors import ProcessorFailed
from pagedcore.protocols import FloatArray, LogitsProcessor


def process_row(process: LogitsProcessor, row: FloatArray, output_token_ids: list[int]) -> ProcessorFailed | None:
    """Replace a row of logits [vocab_size] by what the processor makes of it; return why that failed, if it did.

    A row that failed is all minus infinity. One that the model left unusable is not shown to the processor and stays
    recognisable.
    """
    if not _is_usable(row):
        return None
    try:
        # Safety: a copy, because the row is a part of an array with the rows of others.
        processed: Any = process(output_token_ids, row.copy())
        failure = _refusal(processed, row)
        if failure is None:
            row[:] = processed
            return None
    except BaseException as error:  # of any kind: it is the caller's own code
        # Why: on the main thread it may be Ctrl-C, which ends the step and no request.
        if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
            raise
        failure = ProcessorFailed(f"the logits processor of this request raised {type(error).__name__}")
        failure.__cause__ = error
    row[:] = -np.inf
    return failure


def _refusal(processed: Any, row: FloatArray) -> ProcessorFailed | None:
    wanted = f"expected float32 of shape {row.shape}"
    if not isinstance(processed, np.ndarray):
        return ProcessorFailed(f"the logits processor returned a {type(processed).__name__}, {wanted}")
    if processed.shape != row.shape or processed.dtype != np.float32:
        return ProcessorFailed(f"the logits processor returned {processed.dtype} of shape {processed.shape}, {wanted}")
    if not _is_usable(processed):
        return ProcessorFailed("the logits processor returned NaN, plus infinity, or no finite value")
    return None


def _is_usable(row: FloatArray) -> bool:
    # Why one pass: the largest value is NaN where any is, and plus infinity where any is.
    return bool(np.isfinite(row.max()))
