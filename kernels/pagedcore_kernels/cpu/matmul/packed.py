"""Matrix products of float32 or bfloat16 rows with packed weights, on x86 processors with AVX2 or AVX-512.

Owns the arrangement of the weights and the kernel that reads each of them once per step from memory. A step of a few
dozen rows is bound by memory and by arithmetic at once, so while one slice of a panel is multiplied the next one is on
its way: each tile asks for a share of it. That is what makes it faster there than oneDNN, whose products it replaces.
Read ``tiles.py`` for the arithmetic, and ``amx.py`` for that of processors with matrix units.

Invariant: an output's bits depend on its row, its weights and its bias alone: not on the other rows, the row's place or
the number of threads.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from pagedcore_kernels.cpu.features import has_fused_vectors, has_instructions, has_wide_vectors, may_stream
from pagedcore_kernels.cpu.matmul.amx import (
    CONFIGURATION_WORDS,
    TILE_STEPS,
    configure_tiles,
    may_use_tiles,
    multiply_blocks,
    multiply_last_steps,
    release_tiles,
    rows_of_blocks,
)
from pagedcore_kernels.cpu.matmul.largest import bar_outputs, first_barred, keep_candidate
from pagedcore_kernels.cpu.matmul.packed_weight import PackedWeight
from pagedcore_kernels.cpu.matmul.packing import INPUT_BYTES, panels_of, rows_of, shape_of_panels
from pagedcore_kernels.cpu.matmul.product import PackedProduct
from pagedcore_kernels.cpu.matmul.tiles import (
    BYTE_MATRIX_UNITS,
    MATRIX_UNITS,
    PAIRS,
    PANEL,
    SINGLES,
    STEP_BYTES,
    SUM_BYTES,
    WIDENED_BYTES,
    WIDENED_PAIRS,
    is_of_bytes,
    multiply_tiles,
    row_step_bytes,
    store_scaled_sums,
    store_sums,
)
from pagedcore_kernels.cpu.runtime.kernel import Kernel, ParameterBlock, compile_kernel
from pagedcore_kernels.cpu.runtime.recorded_calls import Sizes, StepShape
from pagedcore_kernels.cpu.runtime.threads import num_threads
from pagedcore_kernels.cpu.simd import address_of, claim, drain_streams, load_int64, stack_floats, stack_int64
from pagedcore_kernels.errors import InternalError
from pagedcore_kernels.interface import RowRoom

CHUNK_STEPS = 256
"""Steps whose products are summed up from nothing before they are added to those of earlier ones. Part of the order of
additions: another number gives other bits."""
_SLICE_STEPS = 128
"""Steps of a chunk that are multiplied at once, part of no order: 32 KiB of a panel stay in the first cache level while
all rows of a group pass."""
MATRIX_UNIT_CHUNK_STEPS, _SINGLE_BLOCK_CHUNK_STEPS = 7 * TILE_STEPS, 28 * TILE_STEPS
"""The same with matrix units, whose sums go on from where they were, chunks or not: 28 KiB of a panel stay in the first
cache level until several blocks of rows have passed; a single block asks for memory further ahead."""
_GROUP_ROWS, _MATRIX_UNIT_GROUP_ROWS = 64, 512
"""Rows that pass while a slice stays, whose sums take 16 KiB; with matrix units, which are faster than a second cache
level brings weights, 128 KiB."""
_WIDE_SUMS, _WIDE_SUMS_OF_WIDENED, _NARROW_SUMS = 24, 16, 4
"""Vectors of sums in registers at once: with 32 registers of 512 bits, and with 16 of 256, two of which make a vector.
Widening takes registers of its own."""
_FEWEST_STREAMED_ROWS = 8
"""Fewest rows whose outputs are streamed, if any: those of few rows are few, and in a cache when they are read."""
_SHARE_ROWS = 64
"""Fewest rows of a work item, where a panel is cut into several."""
SIZE_WORDS = 5, 9
"""Words of the parameter block: the number of rows, and the first of the two of ``work_items``."""
NEVER = sys.maxsize
"""More rows than any product has, as the fewest ones of a kernel: another computes all."""
LAYOUT, LAYOUT_VERSION = "float", 1
"""Name and version of the arrangement that ``panels_of`` makes, for files that hold it: another arrangement is another
version."""


def form_of_product(dtype: torch.dtype, num_inputs: int) -> int | None:
    """Say how products of this number format and size are computed here; ``None``: they are not.

    Invariant: nothing that changes from call to call may decide this, for it decides the order of additions.
    """
    if not has_fused_vectors():
        return None
    if dtype == torch.float32:
        return SINGLES
    if dtype != torch.bfloat16 or num_inputs % 2:
        return None
    if num_inputs % (TILE_STEPS * 2) == 0 and may_use_tiles(MATRIX_UNITS):
        return MATRIX_UNITS
    return PAIRS if has_instructions("avx512bf16") else WIDENED_PAIRS


def can_multiply(dtype: torch.dtype, num_inputs: int) -> bool:
    """Whether products of this number format and size run here."""
    return form_of_product(dtype, num_inputs) is not None


def products_here() -> tuple[int | None, ...]:
    """Say how products run here: float32, bfloat16, and bfloat16 of matrix units; others add up in other orders."""
    formats = ((torch.float32, 2), (torch.bfloat16, 2), (torch.bfloat16, 2 * TILE_STEPS))
    return tuple(form_of_product(dtype, num_inputs) for dtype, num_inputs in formats)


class PackedMatmul(PackedProduct):
    """``rows @ weight.T + bias`` with a weight that was rearranged once.

    Args:
        weight: float32 or bfloat16 [out, in], any strides, or several such, one below the other; not kept.
        bias: [out] of the same format, or ``None``; not kept.
    """

    supports = staticmethod(can_multiply)

    def __init__(self, weight: torch.Tensor | Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        parts = [weight] if isinstance(weight, torch.Tensor) else weight
        first = parts[0]
        if not can_multiply(first.dtype, first.shape[1]):
            raise InternalError(f"weight: {first.dtype} of shape {tuple(first.shape)} cannot be packed here")
        num_outputs = sum(len(part) for part in parts)
        self._take(PackedWeight(LAYOUT, num_outputs, first.shape[1], {"panels": panels_of(parts)}), bias, first.dtype)

    def _take(self, packed: PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(packed)
        form = form_of_product(dtype, self._num_inputs)
        if form is None:
            raise InternalError(f"weight: {dtype} with {self._num_inputs} inputs cannot be multiplied here")
        self.weight = packed.tensor("panels", dtype, shape_of_panels(self._num_outputs, self._num_inputs, dtype))
        self._bias = torch.zeros(self._num_panels * PANEL, dtype=dtype)
        if bias is not None:
            self._bias[: self._num_outputs] = bias
        self._form, self._kernel = form, matmul_kernel(form, dtype)
        self._parameters = ParameterBlock(12)

    @property
    def memory(self) -> tuple[int, int]:
        """Address and bytes of the packed weight; no bytes if it is mapped."""
        return self.packed.memory(self.weight)

    def weight_rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the weights of some outputs, int64 [n], as [n, in] in their number format."""
        return rows_of(self.weight, outputs)

    @property
    def only_runs_kernels(self) -> bool:
        """Whether its calls can be recorded; see ``RecordableMatmul``."""
        return self._form != WIDENED_PAIRS

    def _run(self, rows: torch.Tensor, out: int, candidates: int, barred: int, workspace: RowRoom | None) -> None:
        num_rows = len(rows)
        if self._form == WIDENED_PAIRS:
            rows = rows.float()
        self._parameters.fill(
            rows.data_ptr(), self.weight.data_ptr(), self._bias.data_ptr(), out, num_rows, self._num_outputs,
            self._num_inputs, self._num_panels, *work_items(self._num_panels, num_rows), candidates, barred,
        )  # fmt: skip
        self._kernel.run(self._parameters, resize=(sizes_of_product, self._num_panels, SIZE_WORDS))


def sizes_of_product(shape: StepShape, num_panels: int, words: tuple[int, int], *, entry: int | None = None) -> Sizes:
    """Say what depends on the number of rows; ``words`` are those of their number and of the work items."""
    of_rows, of_items = words
    num_whole, num_shares = work_items(num_panels, shape.num_rows)
    return Sizes([(of_rows, shape.num_rows), (of_items, num_whole), (of_items + 1, num_shares)], entry=entry)


def sizes_of_products_by_rows(
    shape: StepShape, num_panels: int, words: tuple[int, int], tiles_from: int, vectors: int, tiles: int
) -> Sizes:
    """``sizes_of_product`` where the number of rows says the kernel too: one of two addresses."""
    return sizes_of_product(shape, num_panels, words, entry=vectors if shape.num_rows < tiles_from else tiles)


def work_items(num_panels: int, num_rows: int) -> tuple[int, int]:
    """Return how many panels are work items as they are, and how many shares of rows each of the last ones is cut into.

    Why the last ones: a thread that loses its core holds little then, and all threads end together.
    """
    most_shares = max(1, -(-num_rows // _SHARE_ROWS))
    num_cut = min(num_panels, num_threads()) if most_shares > 1 else 0
    return num_panels - num_cut, most_shares


def fewest_streamed_rows() -> int:
    """From how many rows on a product stores its outputs past the caches; never where the processor gains nothing."""
    return _FEWEST_STREAMED_ROWS if may_stream() else sys.maxsize


@cache
def matmul_kernel(form: int, dtype: torch.dtype) -> Kernel:
    """Compile the kernel that writes outputs of a number format, or take it from the cache; its parameters are those
    that ``PackedMatmul`` fills in, and three more that ``PackedInt8Matmul`` has.
    """
    is_bf16, is_scaled = int(dtype == torch.bfloat16), is_of_bytes(form)
    uses_matrix_units = int(form in (MATRIX_UNITS, BYTE_MATRIX_UNITS))
    weight_bytes = 1 if is_scaled else dtype.itemsize
    most_sums = _NARROW_SUMS
    if has_wide_vectors():
        most_sums = _WIDE_SUMS_OF_WIDENED if form in (WIDENED_PAIRS, WIDENED_BYTES) else _WIDE_SUMS
    panel_outputs, step_bytes, row_bytes_of_step, sum_bytes = PANEL, STEP_BYTES, row_step_bytes(form), SUM_BYTES
    chunk_steps, part_steps = CHUNK_STEPS, MATRIX_UNIT_CHUNK_STEPS if uses_matrix_units else _SLICE_STEPS
    single_block_chunk_steps = _SINGLE_BLOCK_CHUNK_STEPS
    group_rows = _MATRIX_UNIT_GROUP_ROWS if uses_matrix_units else _GROUP_ROWS
    num_sums, num_open_sums = group_rows * PANEL, PANEL if uses_matrix_units else group_rows * PANEL
    least_rows, num_words, first_streamed = _SHARE_ROWS, CONFIGURATION_WORDS, fewest_streamed_rows()
    item_bytes, input_bytes, tile_steps = dtype.itemsize, INPUT_BYTES, TILE_STEPS if uses_matrix_units else 1

    def matmul(parameters: Any) -> None:
        p = address_of(parameters)
        counter, rows, weight = load_int64(p, 0), load_int64(p, 1), load_int64(p, 2)
        bias, out, num_rows = load_int64(p, 3), load_int64(p, 4), load_int64(p, 5)
        num_outputs, num_steps = load_int64(p, 6), load_int64(p, 7) * weight_bytes // input_bytes
        num_panels, num_whole, num_shares = load_int64(p, 8), load_int64(p, 9), load_int64(p, 10)
        candidates, barred = load_int64(p, 11), load_int64(p, 12)
        row_bytes, panel_bytes = num_steps * row_bytes_of_step, num_steps * step_bytes
        num_whole_steps = num_steps // tile_steps * tile_steps
        share_rows = (num_rows + num_shares * least_rows - 1) // (num_shares * least_rows) * least_rows
        num_items = num_whole + (num_panels - num_whole) * num_shares
        sums, open_sums = stack_floats(num_sums), stack_floats(num_open_sums)
        configuration, configured_rows = stack_int64(num_words), 0
        outputs, is_streamed = stack_floats(panel_outputs), int(num_rows >= first_streamed and candidates == 0)
        next_item = claim(counter)
        while next_item < num_items:
            # Why: claimed ahead, the panel after this one is known, and its first slice can be asked for.
            item, next_item = next_item, claim(counter)
            after = next_item if next_item < num_whole else num_whole + (next_item - num_whole) // num_shares
            next_panel = weight + min(after, num_panels - 1) * panel_bytes
            panel, first_row, end_row = item, 0, num_rows
            if item >= num_whole:
                panel = num_whole + (item - num_whole) // num_shares
                first_row = (item - num_whole) % num_shares * share_rows
                end_row = min(first_row + share_rows, num_rows)
            while first_row < end_row:
                count = min(group_rows, end_row - first_row)
                # Rows from ``last`` on have their sums ``spare`` places further on: those of the last block.
                part, last, spare = part_steps, 0, 0
                if uses_matrix_units:
                    size = rows_of_blocks(count)
                    part = single_block_chunk_steps if size == count else part_steps
                    last, spare = count - size, (size - count % size) % size
                    if size != configured_rows:
                        configure_tiles(configuration, size)
                        configured_rows = size
                start = 0
                while start < num_whole_steps:
                    steps = min(part, num_whole_steps - start)
                    here = weight + panel * panel_bytes + start * step_bytes
                    ahead, ahead_bytes = here + steps * step_bytes, steps * step_bytes
                    if start + part >= num_whole_steps:
                        ahead, ahead_bytes = next_panel, min(part, num_steps) * step_bytes
                    source = rows + first_row * row_bytes + start * row_bytes_of_step
                    if uses_matrix_units:
                        is_first = int(start == 0)
                        multiply_blocks(
                            form, source, row_bytes, count, size, here, steps, sums, is_first, ahead, ahead_bytes
                        )
                    else:
                        is_first, goes_on = int(start < chunk_steps), start % chunk_steps
                        is_last = int((start + steps) % chunk_steps == 0 or start + steps == num_steps)
                        multiply_tiles(
                            form, most_sums, source, row_bytes, count, here, steps, sums, is_first, open_sums, goes_on,
                            is_last, ahead, ahead_bytes,
                        )  # fmt: skip
                    start += part
                if uses_matrix_units and is_scaled and num_whole_steps < num_steps:
                    source = rows + first_row * row_bytes + num_whole_steps * row_bytes_of_step
                    here = weight + panel * panel_bytes + num_whole_steps * step_bytes
                    rest = num_steps - num_whole_steps
                    is_first = int(num_whole_steps == 0)
                    multiply_last_steps(
                        most_sums, source, row_bytes, count, size, here, rest, sums, is_first, next_panel
                    )
                column, wanted = panel * panel_outputs, min(panel_outputs, num_outputs - panel * panel_outputs)
                pair = first_barred(barred, column) if candidates != 0 else 0
                for i in range(count):
                    target = out + ((first_row + i) * num_outputs + column) * item_bytes
                    if candidates != 0:
                        target = outputs
                    place = i + spare if i >= last else i
                    if is_scaled:
                        row_scale, of_outputs = load_int64(p, 13) + (first_row + i) * 4, load_int64(p, 14) + column * 4
                        offsets = load_int64(p, 15) + column * 4
                        store_scaled_sums(
                            is_bf16, sums + place * sum_bytes, row_scale, offsets, of_outputs, bias + column * 4,
                            target, wanted, is_streamed,
                        )  # fmt: skip
                    else:
                        addend = bias + column * item_bytes
                        store_sums(is_bf16, sums + place * sum_bytes, addend, target, wanted, is_streamed)
                    if candidates != 0:
                        candidate = candidates + (panel * num_rows + first_row + i) * 8
                        bar_outputs(is_bf16, barred, pair, first_row + i, column, outputs)
                        keep_candidate(is_bf16, outputs, wanted, column, candidate)
                first_row += count
        if uses_matrix_units:
            release_tiles()
        if is_streamed:
            drain_streams()

    return compile_kernel(matmul)
