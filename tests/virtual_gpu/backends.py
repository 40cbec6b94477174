"""What computes attention on virtual GPUs: the kernels that ship, or the reference, queued as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch

from pagedcore.engine.engine import Engine
from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.protocols import RaggedRows
from pagedcore_kernels.cpu.sampling.samplers import GreedyPicker, TokenSampler
from pagedcore_kernels.cuda.build.images import KernelImage
from pagedcore_kernels.cuda.build.library import KernelLibrary
from pagedcore_kernels.layout import TokenMajorLayout
from pagedcore_kernels.reference import ReferenceAttention
from virtual_gpu.driver_api import DriverApi
from virtual_gpu.machine import Item, Machine, in_use
from virtual_gpu.tensors import DeviceTensor, new


class QueuedChooser:
    """The CPU's sampler in the place of a GPU's: it is queued."""

    def __init__(self, vocab_size: int) -> None:
        self._sample, self._pick = TokenSampler(vocab_size), GreedyPicker(vocab_size)

    def __call__(self, logits: torch.Tensor, rows: Any) -> torch.Tensor:
        inside = _inside(logits)
        assert inside.dtype == torch.float32
        rows = None if rows is None else rows.copy()
        index = logits.device.index
        out = new(index, (len(logits),), (1,), torch.int64)
        place = out.inner

        def choose() -> None:
            # Why a copy: the CPU's sampler changes what it draws from, a GPU's leaves it alone.
            array = inside.numpy().copy()
            place.copy_(torch.from_numpy(self._pick(array) if rows is None else self._sample(array, rows)))

        in_use().stream(index).enqueue(Item(choose, "choose"))
        return out


class QueuedReference:
    """The reference in the place of a GPU's kernels: its launches are queued, its results are a CPU's."""

    name = "queued"
    layout_type = TokenMajorLayout
    devices = ("cuda",)

    def __init__(self, layout: TokenMajorLayout, pool: torch.Tensor) -> None:
        self.layout, self.pool = layout, pool
        self._reference = ReferenceAttention(layout, _inside(pool))
        self._step = Step(self._reference)

    @staticmethod
    def preferred_block_size(dtype: torch.dtype) -> int:
        return 16

    def new_token_chooser(self, vocab_size: int) -> QueuedChooser:
        return QueuedChooser(vocab_size)

    def plan(self, batch: RaggedRows) -> None:
        self._step = Step(self._planned(batch))

    def _planned(self, batch: RaggedRows) -> ReferenceAttention:
        # Why a copy: what is queued has the plan of its own step.
        reference = copy.copy(self._reference)
        reference.plan(batch)
        return reference

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        step, inside = self._step, (_inside(key), _inside(value))
        self._enqueue("write", lambda: step.reference.write_kv(layer, *inside))

    def attend(
        self, layer: int, query: torch.Tensor, *, sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None, **more: Any,
    ) -> torch.Tensor:
        step, inside = self._step, _inside(query)
        more |= {name: _inside(one) for name, one in (("sinks", sinks), ("slopes", slopes)) if one is not None}
        shape = (*query.shape[:2], self.layout.layers[layer].value_head_size)
        out = new(self.pool.index, shape, torch.empty(shape, device="meta").stride(), query.dtype)
        place = out.inner
        self._enqueue("attend", lambda: place.copy_(step.reference.attend(layer, inside, **more)))
        return out

    def _enqueue(self, name: str, run: Callable[[], object]) -> None:
        in_use().stream(self.pool.index).enqueue(Item(run, name))


@dataclass
class Step:
    """What launches read: the plan of one step, or of the last that was put into a frame."""

    reference: ReferenceAttention


class Frame:
    """A plan, and room for numbers that go along."""

    def __init__(self, step: Step, most_rows: int, device: torch.device) -> None:
        self.step, self._numbers = step, torch.empty(3 * most_rows, dtype=torch.int32, device=device)

    def send(self, numbers: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        staged = torch.empty(sum(map(len, numbers)), dtype=torch.int32, pin_memory=True)
        staged.numpy()[:] = np.concatenate(numbers)
        self._numbers[: len(staged)].copy_(staged, non_blocking=True)
        return list(self._numbers[: len(staged)].split(list(map(len, numbers))))


class FramedReference(QueuedReference):
    """The same, of which decode steps can be recorded: a plan gets into its frame when its turn comes."""

    def new_frame(self, most_rows: int, most_blocks: int) -> Frame:
        return Frame(Step(self._reference), most_rows, self.pool.device)

    def plan_in(
        self, frame: Frame, batch: RaggedRows, numbers: Sequence[npt.NDArray[Any]]
    ) -> tuple[int, list[torch.Tensor]]:
        self._step, reference = frame.step, self._planned(batch)
        self._enqueue("upload", lambda: setattr(frame.step, "reference", reference))
        return id(frame), frame.send(numbers)

    def follow_stream(self) -> None:
        """Launches ask for the stream themselves."""


def _inside(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DeviceTensor):
        raise RuntimeError("a kernel was given an address of the host")
    return tensor.inner


class VirtualBackends:
    """Registers the reference as attention backends of GPUs."""

    @hookimpl
    def pagedcore_register(self, registry: Any) -> None:
        registry.attention.add("queued", "virtual_gpu.backends:QueuedReference")
        registry.attention.add("framed", "virtual_gpu.backends:FramedReference")


@contextmanager
def shipped_kernels(machine: Machine, version: int = 13000) -> Iterator[DriverApi]:
    """Let the CUDA backend's own driver launch on a machine; a kernel's image is its PTX."""
    from kernels.cuda.simulated_driver import compiled

    api = DriverApi(machine, version)

    def find(library: KernelLibrary, name: str, arch: str) -> KernelImage:
        source, ptx = compiled(name, arch)
        image = f"{name}\n{ptx}".encode()
        made_by = {"nvidia-nvjitlink": "13.0.88"}
        return KernelImage(name, arch, name, source.threads, source.shared_bytes, 32, made_by, image)

    with patch("pagedcore_kernels.cuda.driver._bindings", lambda: api), patch.object(KernelLibrary, "find", find):
        yield api


def on_gpu(model: Any, *, attention: str = "framed", device: str = "cuda", **settings: Any) -> Engine:
    """A small engine on a virtual GPU, with the reference for its attention."""
    small: dict[str, Any] = {"max_num_batched_tokens": 7, "max_num_seqs": 3, "num_kv_blocks": 24, "block_size": 4}
    return Engine.from_pretrained(
        model, device=device, attention_backend=attention, plugins=[VirtualBackends()], **{**small, **settings})
