"""Recording what a function launches on a GPU, as a CUDA graph that is launched as a whole.

A launch costs the host some ten microseconds, and a step of a large model has a thousand of them; a graph costs as
much as one. Owns the memory that recorded steps share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class CudaGraphs:
    """Records on one device; all recordings share their memory, so that one is repeated at a time.

    Invariant: nothing is computed while a function is recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def record(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Record a function that launches, allocates and waits for nothing.

        Returns:
            What launches all of it again, and the tensor that ``compute`` returned, which each launch fills.

        Raises:
            RuntimeError: it does what cannot be recorded, such as waiting for the device.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.current_stream(self._device).synchronize()
        with torch.cuda.device(self._device), torch.cuda.graph(
            graph, pool=self._pool, capture_error_mode="thread_local"
        ):
            result = compute()
        return graph.replay, result
