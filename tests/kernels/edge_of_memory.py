"""Arrays that end where readable memory ends: as a program, kernels over them, which an overrun ends by a signal.

The tests run it apart: what it is there to notice ends a process.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.attention_cases import Rows, Shape, Tokens, random_tables, run
from kernels.state_cases import (
    Case,
    Convolution,
    DeltaRule,
    LinearRecurrence,
    Mamba1,
    Mamba2,
    Recurrence,
    StateRows,
)
from pagedcore_kernels import step_plan as plan_module
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from pagedcore_kernels.cpu.matmul.packed import PackedMatmul
from pagedcore_kernels.cpu.matmul.packed_grouped import PackedGroupedMatmul
from pagedcore_kernels.cpu.matmul.packed_int8 import PackedInt8Matmul
from pagedcore_kernels.cpu.recurrence.states import RecurrentStates

GUARD_BYTES = 1 << 22
"""Bytes behind an array that no kernel may touch."""
LENGTHS = [(1, 70), (37, 37), (5, 41), (1, 1), (1, 200), (2, 3)]
NUM_BLOCKS = 32
SHAPES = [
    Shape(3, 2, 32, 16, 16, torch.bfloat16), Shape(3, 2, 24, 20, 16, torch.float32),
    Shape(3, 2, 24, 20, 16, torch.bfloat16, is_int8=True),
]
"""The last two are compiled by other tests too; their vectors are not whole."""
PRODUCTS = [(rows, *shape) for rows in (1, 15, 17, 33, 70) for shape in ((70, 64), (64, 288), (130, 34))]
"""Rows, outputs and inputs; inputs of whole tiles and others."""
INT8_PRODUCTS = [(rows, *shape) for rows in (1, 15, 17, 70) for shape in ((70, 64), (64, 2080), (130, 48))]
GROUPED_PRODUCTS = [(rows, *shape) for rows in (1, 4, 5, 70) for shape in ((70, 64, 2), (64, 320, 1), (130, 13, 1))]
"""Rows, outputs, inputs and groups."""
GROUPED_KINDS = [(4, False), (8, False), (4, True)]
"""Bits of weights, and whether rows become int8."""
RECURRENCES = [
    Convolution(torch.bfloat16, 20, 3, "gates"), DeltaRule(torch.float32), DeltaRule(torch.float32, 1, 3, 24, 20),
    DeltaRule(torch.bfloat16, per_channel=True), Mamba2(torch.float32), Mamba1(torch.float32, 37, 5),
    LinearRecurrence(torch.bfloat16, 37),
]  # fmt: skip
"""Compiled by other tests too."""
_libc = ctypes.CDLL(None, use_errno=True)


def before_the_edge(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Copy an array to memory that ends with it."""
    num_bytes = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, num_bytes + GUARD_BYTES)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if _libc.mprotect(ctypes.c_void_p(start + num_bytes), ctypes.c_size_t(GUARD_BYTES), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = np.frombuffer(memory, array.dtype, array.size, num_bytes - array.nbytes).reshape(array.shape)
    copy[...] = array
    return copy


class EdgeTiles(plan_module.QueryTiles):
    """Query tiles whose arrays end where memory ends."""

    def __init__(self, rows: Any, starts: Any) -> None:
        super().__init__(before_the_edge(rows), before_the_edge(starts))


def attend(shape: Shape, window: int) -> torch.Tensor:
    """Attend over rows that lie at the end of memory, as does all that the host hands to the kernel."""
    rows = Rows(LENGTHS, random_tables(LENGTHS, shape.block_size, NUM_BLOCKS, seed=1), shape.block_size)
    for name in ("block_tables", "query_start", "kv_lens", "slot_mapping"):
        setattr(rows, name, before_the_edge(getattr(rows, name)))
    pool = torch.from_numpy(before_the_edge(shape.layout.allocate(NUM_BLOCKS).fill_(0xFF).numpy()))
    sequences = [Tokens.random(shape, length, seed=number) for number, (_, length) in enumerate(LENGTHS)]
    return run(NumbaCpuAttention(shape.layout, pool), rows, sequences, shape, window=window)


def tensor_before_the_edge(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to memory that ends with it."""
    return torch.from_numpy(before_the_edge(tensor.view(torch.uint8).numpy())).view(tensor.dtype)


class EdgeMatmul(PackedMatmul):
    """A product whose weight and bias end where memory ends."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__(weight, bias)
        self.weight, self._bias = tensor_before_the_edge(self.weight), tensor_before_the_edge(self._bias)


class EdgeRows(torch.Tensor):
    """Rows from which an array is made that ends where memory ends."""

    def new_empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:  # type: ignore[override]
        """Return room for numbers of the same format, or of another one."""
        return tensor_before_the_edge(torch.zeros(*shape, dtype=dtype or self.dtype))


def multiply(num_rows: int, num_outputs: int, num_inputs: int) -> torch.Tensor:
    """Multiply bfloat16 rows; nothing that the kernel has to do with has readable memory behind it."""
    generator = torch.Generator().manual_seed(1)
    weight, rows = (torch.randn(size, num_inputs, generator=generator).bfloat16() for size in (num_outputs, num_rows))
    product = EdgeMatmul(weight, weight[:, 0])(tensor_before_the_edge(rows).as_subclass(EdgeRows))
    assert torch.equal(product, PackedMatmul(weight, weight[:, 0])(rows))
    return product


class EdgeInt8Matmul(PackedInt8Matmul):
    """A product all of whose arrays end where memory ends."""

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__(weight, scales, bias, torch.bfloat16)
        for name in ("_panels", "_scales", "_corrections", "_bias"):
            setattr(self, name, tensor_before_the_edge(getattr(self, name)))


def multiply_int8(num_rows: int, num_outputs: int, num_inputs: int) -> torch.Tensor:
    """Do the same with int8."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-127, 128, (num_outputs, num_inputs), generator=generator, dtype=torch.int8)
    rows, scales = torch.randn(num_rows, num_inputs, generator=generator).bfloat16(), torch.rand(num_outputs)
    product = EdgeInt8Matmul(weight, scales, scales)(tensor_before_the_edge(rows).as_subclass(EdgeRows))
    assert torch.equal(product, PackedInt8Matmul(weight, scales, scales, torch.bfloat16)(rows))
    return product


class EdgeRoom:
    """Room that ends where memory ends."""

    def take(self, purpose: str, num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return it; see ``RowRoom``."""
        return tensor_before_the_edge(torch.zeros(num_rows, size, dtype=dtype))


class EdgeGroupedMatmul(PackedGroupedMatmul):
    """A product all of whose arrays end where memory ends."""

    def __init__(self, *arguments: Any, **options: bool) -> None:
        super().__init__(*arguments, **options)
        self._panels, self._bias = tensor_before_the_edge(self._panels), tensor_before_the_edge(self._bias)


def multiply_grouped(
    bits: int, num_rows: int, num_outputs: int, num_inputs: int, num_groups: int, *, quantizes_rows: bool = False
) -> torch.Tensor:
    """Do the same with weights of few bits, and rows that stay floats or become int8."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(-8, 8, (num_outputs, num_inputs), generator=generator, dtype=torch.int8)
    rows = torch.randn(num_rows, num_inputs, generator=generator).bfloat16()
    scales = torch.rand(num_outputs, num_groups)
    given = (values, scales, values[:, :num_groups], bits, scales[:, 0], torch.bfloat16)
    room = EdgeRoom()
    out = room.take("outputs", num_rows, num_outputs, rows.dtype)
    EdgeGroupedMatmul(*given, quantizes_rows=quantizes_rows).multiply_to(out, tensor_before_the_edge(rows), room)
    assert torch.equal(out, PackedGroupedMatmul(*given, quantizes_rows=quantizes_rows)(rows))
    return out


def advance(recurrence: Recurrence) -> torch.Tensor:
    """Compute a step of three rows; everything that the kernel is given ends where memory ends."""
    case = Case(recurrence, (5, 1, 9))
    apart, states = torch.cat(case.whole(padding=0)), case.states()[:3].clone()
    given = {name: torch.cat([one[name] for one in case.sequences]) for name in case.sequences[0]} | case.weights
    case.pool = tensor_before_the_edge(case.pool[:3])
    backend = RecurrentStates(recurrence.layout, case.pool)
    backend._zeros, backend._signs = (tensor_before_the_edge(one) for one in (backend._zeros, backend._signs))
    backend._arrays.keep = lambda name, array: kept.setdefault(name, before_the_edge(array)).ctypes.data  # type: ignore[method-assign]
    kept: dict[str, npt.NDArray[Any]] = {}
    backend.plan(StateRows([5, 1, 9], [-1, -1, -1], [0, 1, 2]))
    out = tensor_before_the_edge(apart)
    # Why layer 2: its part is the last one of a state.
    recurrence.call(backend, 2, 0, {name: tensor_before_the_edge(x) for name, x in given.items()}, out)
    assert torch.equal(out, apart)
    assert torch.equal(recurrence.layout.view(case.pool, 2, 0), states)
    return out


def main(what: str) -> None:
    """``what`` is "attention", "products", "int8 products", "grouped products" or "recurrences"."""
    if what == "recurrences":
        print(*(advance(one).shape for one in RECURRENCES))
    elif what == "grouped products":
        print(*(multiply_grouped(bits, *sizes, quantizes_rows=quantizes_rows).shape
                for bits, quantizes_rows in GROUPED_KINDS for sizes in GROUPED_PRODUCTS))  # fmt: skip
    elif what == "int8 products":
        print(*(multiply_int8(*sizes).shape for sizes in INT8_PRODUCTS))
    elif what == "products":
        print(*(multiply(*sizes).shape for sizes in PRODUCTS))
    else:
        assert what == "attention"
        plan_module.QueryTiles = EdgeTiles  # type: ignore[misc]
        for one in SHAPES:
            print(*(attend(one, window).shape for window in (0, 20)))
