"""Panels of weights of few bits against NumPy's permutation of the same numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from pagedcore_kernels.cpu.matmul.grouped_packing import grouped_panels_of
from pagedcore_kernels.cpu.matmul.grouped_tiles import UNIT, WHOLE, WITH_LEAST, WITH_ZEROS
from pagedcore_kernels.cpu.matmul.tiles import PANEL

#: Outputs, inputs, groups: panels whole and not, inputs that are filled up, groups of more units than move at once.
SHAPES = [(1, 8, 1), (64, 128, 1), (63, 96, 6), (200, 256, 8), (130, 608, 2), (5, 13, 1), (65, 1200, 1)]


def of_panel(numbers: np.ndarray, panel: int) -> np.ndarray:
    """Return [PANEL, ...] of [outputs, ...], zeros where there are no more outputs."""
    part = numbers[panel * PANEL : (panel + 1) * PANEL]
    return np.concatenate([part, np.zeros((PANEL - len(part), *part.shape[1:]), dtype=part.dtype)])


def units(values: np.ndarray, bits: int) -> bytes:
    """Return the bytes of int8 [PANEL, UNIT], by the definition in ``grouped_tiles``."""
    if bits == 8:
        return values.T.tobytes()
    words = np.zeros(PANEL, dtype=np.uint32)
    for place in range(UNIT):
        words |= (values[:, place].astype(np.uint32) & 15) << np.uint32(4 * (place // 2) + 16 * (place % 2))
    return words.astype("<u4").tobytes()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", [WHOLE, WITH_ZEROS, WITH_LEAST])
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_panels_have_every_number(shape: tuple[int, int, int], halves: bool, kind: int, bits: int) -> None:
    """Scales, zero points or turned least weights, and values, group by group, with zeros for what is filled up."""
    num_outputs, num_inputs, num_groups = shape
    random = np.random.default_rng(num_outputs)
    values = random.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (num_outputs, num_inputs), dtype=np.int8)
    scales = random.normal(size=(num_outputs, num_groups)).astype(np.float16 if halves else np.float32)
    zeros = {WHOLE: None, WITH_ZEROS: random.integers(-8, 9, scales.shape, dtype=np.int8),
             WITH_LEAST: random.normal(size=scales.shape).astype(scales.dtype)}[kind]  # fmt: skip
    given = [None if array is None else torch.from_numpy(array) for array in (values, scales, zeros)]
    panels = grouped_panels_of(*given, bits, kind)  # type: ignore[arg-type]
    filled = np.pad(values, ((0, 0), (0, -num_inputs % UNIT)))
    size = filled.shape[1] // num_groups
    assert panels.shape[:2] == (-(-num_outputs // PANEL), num_groups)
    for panel, group in np.ndindex(*panels.shape[:2]):
        expected = of_panel(scales, panel)[:, group].tobytes()
        if zeros is not None:
            expected += of_panel(-zeros if kind == WITH_LEAST else zeros, panel)[:, group].tobytes()
        here = of_panel(filled, panel)[:, group * size : (group + 1) * size]
        expected += b"".join(units(here[:, start : start + UNIT], bits) for start in range(0, size, UNIT))
        assert panels[panel, group].numpy().tobytes() == expected


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_may_lie_anywhere(bits: int) -> None:
    """At an odd address, and with gaps between their numbers."""
    plain = torch.randint(-8, 8, (70, 16), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    memory = torch.zeros(plain.numel() + 3, dtype=torch.int8)
    memory[3:] = plain.flatten()
    spread = torch.zeros(70, 32, dtype=torch.int8)[:, ::2].copy_(plain)
    scales = torch.randn(140, 2)[::2]
    expected = grouped_panels_of(plain, scales.contiguous(), None, bits, WHOLE)
    for other in (memory[3:].view(70, 16), spread):
        assert torch.equal(grouped_panels_of(other, scales, None, bits, WHOLE), expected)


def test_several_threads_share_the_panels() -> None:
    """With any number of threads every panel is written once and completely."""
    values = torch.randint(-8, 8, (1000, 64), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    scales, before = torch.randn(1000, 2), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = grouped_panels_of(values, scales, None, 4, WHOLE)
        for count, _ in itertools.product((2, 5), range(3)):
            torch.set_num_threads(count)
            assert torch.equal(grouped_panels_of(values, scales, None, 4, WHOLE), expected)
    finally:
        torch.set_num_threads(before)
