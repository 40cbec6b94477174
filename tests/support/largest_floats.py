"""How large the tensors are that torch makes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestFloats(TorchDispatchMode):
    """Counts the elements of the largest float tensor that any operation makes in memory."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, list | tuple) else (result,):
            if isinstance(one, torch.Tensor) and one.is_floating_point() and one.device.type == "cpu":
                self.largest = max(self.largest, one.numel())
        return result
