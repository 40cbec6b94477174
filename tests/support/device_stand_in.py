"""A GPU that is the CPU: everything an engine does for ``device="cuda"`` happens, with tensors in ordinary memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pagedcore.execution import devices
from pagedcore.execution.cuda_kv_pool import CudaKVPool
from pagedcore.execution.devices import Device
from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.protocols import RaggedRows
from pagedcore_kernels.layout import BlockLayout, TokenMajorLayout
from pagedcore_kernels.reference import ReferenceAttention

CPU = torch.device("cpu")


class LateCopies:
    """Copies that are made only after so many questions about their end, as late as a GPU's may be."""

    def __init__(self, num_questions: int = 2) -> None:
        self.num_questions = num_questions
        self.started = 0

    def start(self, copy: Callable[[], None]) -> LateTicket:
        self.started += 1
        return LateTicket(copy, self.num_questions)


class LateTicket:
    """One lot of copies; see ``LateCopies``."""

    def __init__(self, copy: Callable[[], None], num_questions: int) -> None:
        self._copy = copy
        self._questions_left = num_questions
        self.is_done = False

    def query(self) -> bool:
        self._questions_left -= 1
        if self._questions_left < 0 and not self.is_done:
            self.synchronize()
        return self.is_done

    def synchronize(self) -> None:
        if not self.is_done:
            with torch.inference_mode():  # as the thread that starts copies may be
                self._copy()
        self.is_done = True


def late_storage(layout: BlockLayout, num_blocks: int) -> CudaKVPool:
    """A device's storage whose transfers end late."""
    return CudaKVPool(
        layout, num_blocks, CPU, outgoing=LateCopies(), incoming=LateCopies(), pin=lambda slab: lambda: None
    )


class TokenMajorReference(ReferenceAttention):
    """The reference over a GPU's layout, which the CPU's backends never make."""

    name = "stand-in"
    layout_type = TokenMajorLayout


class FramedReference(TokenMajorReference):
    """The same, of which decode steps can be recorded."""

    def new_frame(self) -> int:
        return 1

    def plan_in(self, frame: int, batch: RaggedRows) -> int:
        self.plan(batch)
        return frame

    def follow_stream(self) -> None:
        """Nothing is launched."""


class StandInBackends:
    """Registers the attention backends that compute on the stand-in."""

    @hookimpl
    def pagedcore_register(self, registry: Any) -> None:
        registry.attention.add("stand-in", "support.device_stand_in:TokenMajorReference")
        registry.attention.add("framed", "support.device_stand_in:FramedReference")
        registry.attention.add("simulated", "kernels.cuda.simulated_driver:SimulatedAttention")


class Repeats:
    """Records by keeping the function: to repeat it is to call it again, into the same result."""

    def __init__(self) -> None:
        self.num_recorded = self.num_repeated = 0
        self.fails = False

    def record(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        self.num_recorded += 1
        result = torch.full_like(compute(), torch.nan)

        def repeat() -> None:
            self.num_repeated += 1
            result.copy_(compute())

        return repeat, result


def use_stand_in(monkeypatch: pytest.MonkeyPatch, graphs: Any = None) -> None:
    """Let ``device="cuda"`` mean the stand-in, which records steps if it has something to do so."""
    gpu = Device("cuda", CPU, "stand-in", "bfloat16", lambda: 2**30, late_storage, "stand-in", graphs)
    monkeypatch.setattr(devices, "_cuda_device", lambda name: gpu)
