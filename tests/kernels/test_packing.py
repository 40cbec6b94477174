"""Panels of weights against torch's permutation of the same numbers."""

from __future__ import annotations

import itertools

import pytest
import torch

from pagedcore_kernels.cpu.features import has_fused_vectors
from pagedcore_kernels.cpu.matmul import packing
from pagedcore_kernels.cpu.matmul.packing import panels_of, sums_of
from pagedcore_kernels.cpu.matmul.tiles import PANEL

pytestmark = pytest.mark.skipif(not has_fused_vectors(), reason="no packed products here")
DTYPES = [torch.float32, torch.bfloat16, torch.int8]
#: Outputs of the parts, and steps: one panel and several, parts that end inside of one, steps by 64 and a rest.
SHAPES = [((1,), 1), ((64,), 64), ((63,), 65), ((200,), 130), ((64, 128), 10), ((30, 70, 1, 99), 67)]


def weight(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of which few are equal, every bit of a byte in use."""
    generator = torch.Generator().manual_seed(num_outputs)
    size = num_outputs * num_inputs * dtype.itemsize
    numbers = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return numbers.view(dtype).view(num_outputs, num_inputs)


def permuted(whole: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the panels as torch permutes them."""
    filled = torch.zeros(-(-len(whole) // PANEL) * PANEL, whole.shape[1], dtype=whole.dtype)
    filled[: len(whole)] = whole
    return filled.view(torch.uint8).view(-1, PANEL, filled.nbytes // len(filled) // 4, 4).transpose(1, 2)


@pytest.mark.parametrize("item_bytes", [1, packing._ITEM_BYTES])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_panels_have_every_byte_of_the_parts(
    dtype: torch.dtype, shape: tuple[tuple[int, ...], int], item_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts lie one below the other, bit by bit, NaN too, and zeros fill up the last panel, however work is shared."""
    monkeypatch.setattr(packing, "_ITEM_BYTES", item_bytes)
    sizes, num_steps = shape
    parts = [weight(size, num_steps * 4 // dtype.itemsize, dtype) for size in sizes]
    panels = panels_of(parts)
    assert panels.dtype == dtype
    assert panels.shape == (-(-sum(sizes) // PANEL), num_steps, PANEL, 4 // dtype.itemsize)
    expected = permuted(torch.cat([part.view(torch.uint8) for part in parts]).view(dtype))
    assert torch.equal(panels.view(torch.uint8), expected)


@pytest.mark.parametrize("offset", range(1, 4))
def test_weights_may_lie_anywhere(offset: int) -> None:
    """A weight that a file has at an odd address, and one with gaps between its numbers, are packed as any other."""
    plain = weight(70, 12, torch.int8)
    memory = torch.zeros(plain.numel() + offset, dtype=torch.int8)
    memory[offset:] = plain.flatten()
    spread = torch.zeros(70, 24, dtype=torch.int8)[:, ::2].copy_(plain)
    for other in (memory[offset:].view(70, 12), spread):
        assert torch.equal(panels_of([other]), panels_of([plain]))


@pytest.mark.parametrize("item_bytes", [1, packing._ITEM_BYTES])
@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (70, 129), (0, 8), (5, 0)], ids=str)
def test_sums_are_those_of_torch(shape: tuple[int, int], item_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every row once, of weights with gaps too."""
    monkeypatch.setattr(packing, "_ITEM_BYTES", item_bytes)
    numbers = weight(*shape, torch.int8)
    spread = torch.zeros(shape[0], 2 * shape[1], dtype=torch.int8)[:, ::2].copy_(numbers)
    for given in (numbers, spread, torch.full(shape, -128, dtype=torch.int8)):
        assert torch.equal(sums_of(given), given.sum(1, dtype=torch.int64))


def test_several_threads_share_the_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """With any number of threads every panel is written once and completely."""
    monkeypatch.setattr(packing, "_ITEM_BYTES", 1)
    before, expected = torch.get_num_threads(), permuted(weight(1000, 64, torch.float32))
    try:
        for count, _ in itertools.product((1, 2, 5), range(3)):
            torch.set_num_threads(count)
            assert torch.equal(panels_of([weight(1000, 64, torch.float32)]).view(torch.uint8), expected)
    finally:
        torch.set_num_threads(before)
