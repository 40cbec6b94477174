"""Rearranges the rows of weight matrices into panels, on all threads; read ``tiles.py`` for what a panel is.

Loading a model is bound by this and by the memory that it touches for the first time: every byte of a weight is read
once, straight from a mapped file if it is there, and written once, into huge pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from pagedcore_kernels.cpu.matmul.tiles import PANEL, STEP_BYTES
from pagedcore_kernels.cpu.runtime.huge_pages import empty_in_huge_pages
from pagedcore_kernels.cpu.runtime.kernel import Kernel, ParameterBlock, compile_kernel
from pagedcore_kernels.cpu.simd import (
    address_of,
    claim,
    load_float32,
    load_int8,
    load_int64,
    store_float32,
    store_int64,
)

INPUT_BYTES = 4
"""Bytes of a row's inputs in a step."""
_STEPS_AT_ONCE = 64
"""Steps that are moved at a time: four cache lines of a row, and 16 KiB of a panel."""
_ITEM_BYTES = 2**21
"""Bytes that a thread writes at a time at least: of a huge page that two threads touch first, the kernel clears two."""


def panels_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the panels of weights [out, in], one below the other: [panels, steps, PANEL, inputs of a step].

    Args:
        parts: of one number format and one ``in``, whose bytes are a multiple of 4.

    Outputs that fill up the last panel have weights of zero.
    """
    first, num_outputs = parts[0], sum(len(part) for part in parts)
    panels = empty_in_huge_pages(shape_of_panels(num_outputs, first.shape[1], first.dtype), first.dtype)
    if num_outputs % PANEL:
        panels[-1].zero_()
    output = 0
    for part in parts:
        rows = part.contiguous()
        parameters, at_once = ParameterBlock(6), -(-_ITEM_BYTES // max(1, panels[0].nbytes)) * PANEL
        parameters.fill(rows.data_ptr(), panels.data_ptr(), output, len(rows), panels.shape[1], at_once)
        _kernel().run(parameters)
        output += len(rows)
    return panels


def shape_of_panels(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return the shape of the panels of a weight [out, in]."""
    inputs = INPUT_BYTES // dtype.itemsize
    return -(-num_outputs // PANEL), num_inputs // inputs, PANEL, inputs


def rows_of(panels: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """Return the weights of some outputs, int64 [n], as [n, in]: what ``panels_of`` was given."""
    words = panels.view(torch.int32)[..., 0]
    return words[outputs // PANEL, :, outputs % PANEL].view(panels.dtype)


def sums_of(weight: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row of int8 [out, in], int64 [out]; torch takes ten times as long."""
    rows, sums = weight.contiguous(), torch.empty(len(weight), dtype=torch.int64)
    parameters, at_once = ParameterBlock(5), -(-_ITEM_BYTES // max(1, rows.shape[1]))
    parameters.fill(rows.data_ptr(), sums.data_ptr(), len(rows), rows.shape[1], at_once)
    _sums_kernel().run(parameters)
    return sums


@cache
def _sums_kernel() -> Kernel:
    def add_up(parameters: Any) -> None:
        p = address_of(parameters)
        counter, rows, sums = load_int64(p, 0), load_int64(p, 1), load_int64(p, 2)
        num_rows, num_inputs, rows_at_once = load_int64(p, 3), load_int64(p, 4), load_int64(p, 5)
        first = claim(counter) * rows_at_once
        while first < num_rows:
            for row in range(first, min(first + rows_at_once, num_rows)):
                total = 0
                for place in range(num_inputs):
                    total += load_int8(rows + row * num_inputs, place)
                store_int64(sums, row, total)
            first = claim(counter) * rows_at_once

    return compile_kernel(add_up)


@cache
def _kernel() -> Kernel:
    panel_outputs, steps_at_once = PANEL, _STEPS_AT_ONCE
    step_bytes, input_bytes = STEP_BYTES, INPUT_BYTES

    def pack(parameters: Any) -> None:
        p = address_of(parameters)
        counter, rows, panels = load_int64(p, 0), load_int64(p, 1), load_int64(p, 2)
        first_output, num_rows, num_steps = load_int64(p, 3), load_int64(p, 4), load_int64(p, 5)
        rows_at_once = load_int64(p, 6)
        first = claim(counter) * rows_at_once
        while first < num_rows:
            end = min(first + rows_at_once, num_rows)
            while first < end:
                # Rows that share a panel are written together, some steps at a time.
                panel, lane = (first_output + first) // panel_outputs, (first_output + first) % panel_outputs
                count = min(panel_outputs - lane, end - first)
                target = panels + panel * num_steps * step_bytes + lane * input_bytes
                for start in range(0, num_steps, steps_at_once):
                    for row in range(count):
                        source = rows + ((first + row) * num_steps + start) * input_bytes
                        place = target + start * step_bytes + row * input_bytes
                        for step in range(min(steps_at_once, num_steps - start)):
                            store_float32(place + step * step_bytes, 0, load_float32(source, step))
                first += count
            first = claim(counter) * rows_at_once

    return compile_kernel(pack)
