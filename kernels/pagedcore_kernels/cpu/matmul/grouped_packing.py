"""Rearranges weights of 4 or 8 bits, their scales and zero points into panels, on all threads.

Read ``grouped_tiles.py`` for what a unit of packed weights is.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from numba import njit

from pagedcore_kernels.cpu.matmul.grouped_tiles import UNIT, header_bytes, scale_bytes, unit_bytes
from pagedcore_kernels.cpu.matmul.tiles import PANEL
from pagedcore_kernels.cpu.runtime.huge_pages import empty_in_huge_pages
from pagedcore_kernels.cpu.runtime.kernel import Kernel, ParameterBlock, compile_kernel
from pagedcore_kernels.cpu.simd import address_of, claim, load_int8, load_int64, store_int8, store_int32

_UNITS_AT_ONCE = 32
"""Units that are moved at a time: four cache lines of an output's values."""


def grouped_panels_of(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int, kind: int, *,
    has_steps: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return uint8 [panels, groups, scales, zero points or least weights, units of a group].

    Args:
        values: int8 [out, in], of which a panel's rest is filled up with zeros, as are inputs to a whole ``UNIT``.
        scales: float32 or float16 [out, groups].
        zeros: int8, or the format of the scales, [out, groups].
        bits: 4 or 8.
        kind: of ``grouped_tiles``, what values stand for.
        has_steps: values of 8 bits are steps of four inputs, as ``grouped_bytes.py`` has them.
    """
    if padding := -values.shape[1] % UNIT:
        values = torch.nn.functional.pad(values, (0, padding))
    values = values.contiguous()
    (num_outputs, num_inputs), num_groups = values.shape, scales.shape[1]
    halves, num_units = int(scales.dtype == torch.float16), num_inputs // num_groups // UNIT
    header, of_scales = header_bytes(kind, halves), scale_bytes(halves)
    shape = -(-num_outputs // PANEL), num_groups, header + num_units * unit_bytes(bits)
    panels = empty_in_huge_pages(shape, torch.uint8)
    if num_outputs % PANEL:
        panels[-1].zero_()
    parameters = ParameterBlock(7)
    parameters.fill(values.data_ptr(), panels.data_ptr(), num_outputs, num_groups, num_units, header)
    _kernel(bits, int(has_steps)).run(parameters)
    panels[:, :, :of_scales] = _by_panel(scales)
    if zeros is not None:
        panels[:, :, of_scales:header] = _by_panel(-zeros if zeros.is_floating_point() else zeros)
    return panels


def _by_panel(numbers: torch.Tensor) -> torch.Tensor:
    """Return the bytes of [outputs, groups] as uint8 [panels, groups, bytes], filled up with zeros."""
    filled = torch.nn.functional.pad(numbers, (0, 0, 0, -len(numbers) % PANEL))
    return filled.view(-1, PANEL, numbers.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)


@cache
def _kernel(bits: int, has_steps: int) -> Kernel:
    panel_outputs, units_at_once, unit_inputs = PANEL, _UNITS_AT_ONCE, UNIT
    bytes_of_unit, is_half_a_byte = unit_bytes(bits), int(bits == 4)

    def pack(parameters: Any) -> None:
        p = address_of(parameters)
        counter, values, panels = load_int64(p, 0), load_int64(p, 1), load_int64(p, 2)
        num_outputs, num_groups, num_units = load_int64(p, 3), load_int64(p, 4), load_int64(p, 5)
        header = load_int64(p, 6)
        row_bytes, group_bytes = num_groups * num_units * unit_inputs, header + num_units * bytes_of_unit
        panel = claim(counter)
        while panel * panel_outputs < num_outputs:
            rows = values + panel * panel_outputs * row_bytes
            num_rows = min(panel_outputs, num_outputs - panel * panel_outputs)
            for group in range(num_groups):
                units = panels + (panel * num_groups + group) * group_bytes + header
                for start in range(0, num_units, units_at_once):
                    count, target = min(units_at_once, num_units - start), units + start * bytes_of_unit
                    for row in range(num_rows):
                        source = rows + row * row_bytes + (group * num_units + start) * unit_inputs
                        if is_half_a_byte:
                            _move_nibbles(source, target, row, count)
                        elif has_steps:
                            _move_steps(source, target, row, count)
                        else:
                            _move_bytes(source, target, row, count)
            panel = claim(counter)

    return compile_kernel(pack)


@njit(inline="always")
def _move_nibbles(source: int, target: int, row: int, num_units: int) -> None:
    """Pack a row's values, 4 bits each, into the place of the row in each unit."""
    for unit in range(num_units):
        # Two inputs meet in a byte, then the four bytes that have two.
        nibbles = load_int64(source, unit) & 0x0F0F0F0F0F0F0F0F
        pairs = nibbles | nibbles >> 12
        low = pairs & 0xFF | pairs >> 24 & 0xFF00
        high = pairs << 8 & 0xFF0000 | pairs >> 16 & 0xFF000000
        store_int32(target, unit * PANEL + row, low | high)


@njit(inline="always")
def _move_bytes(source: int, target: int, row: int, num_units: int) -> None:
    """Put a row's values, a byte each, side by side with those of the panel's other rows."""
    for place in range(num_units * UNIT):
        store_int8(target, place * PANEL + row, load_int8(source, place))


@njit(inline="always")
def _move_steps(source: int, target: int, row: int, num_units: int) -> None:
    """Put a row's values into the row's lane of each step, in the order of ``grouped_rows.ORDER_OF_UNIT``."""
    for unit in range(num_units):
        for place in range(UNIT):
            lane = ((unit * UNIT + place) // 4 * PANEL + row) * 4 + place % 4
            store_int8(target, lane, load_int8(source, unit * UNIT + place // 2 + 4 * (place % 2)))
