"""The stream that one engine computes on, and its order with the streams of whoever calls it.

Two engines of one process compute beside each other, and a caller may make its calls under any stream, with any GPU
current. Owns that both are the caller's again after a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


class EngineStream:
    """One stream of one GPU.

    Invariant: what is computed in ``current`` comes behind what the calling thread's stream was given before, and
    before what it is given afterwards.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def current(self) -> Iterator[None]:
        """Let a block compute here; the calling thread has its own GPU and stream again afterwards."""
        callers = torch.cuda.current_stream(self.device)
        if callers == self._stream:
            yield
            return
        self._stream.wait_stream(callers)
        try:
            with torch.cuda.stream(self._stream):
                yield
        except BaseException:
            # Why: a GPU that has failed orders nothing, and what it failed of is to be told.
            with suppress(RuntimeError):
                callers.wait_stream(self._stream)
            raise
        callers.wait_stream(self._stream)
