"""Updates of products by pairs of thin matrices, of which every row names its own or none: ``y += (x A) scale B``.

Owns the arrangement of such a pair, the tables that kernels read, and two kernels for all pairs of a step. Which rows
have which pair stands in a table of the step, and where a pair is in a table of the product, both at places that stay,
so that a recorded step holds for any rows. Read ``low_rank_tiles.py`` for the arithmetic.

Invariant: an updated row's bits depend on its own inputs, its output as it was, and its pair: not on the other rows,
their pairs, or the number of threads. A row without a pair is not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pagedcore_kernels.cpu.features import has_wide_vectors
from pagedcore_kernels.cpu.matmul.low_rank_tiles import (
    RANKS,
    UPDATE_PANEL,
    add_update,
    ask_ahead,
    expand_tile,
    shrink_tile,
)
from pagedcore_kernels.cpu.runtime.kernel import Kernel, ParameterBlock, compile_kernel
from pagedcore_kernels.cpu.runtime.recorded_calls import Sizes, StepShape
from pagedcore_kernels.cpu.runtime.threads import num_threads
from pagedcore_kernels.cpu.simd import (
    LANES,
    LINE,
    address_of,
    claim,
    load_float32,
    load_int64,
    stack_floats,
    stack_int64,
    store_float32,
    store_int64,
)
from pagedcore_kernels.errors import InternalError

MOST_PARTS: Final = 3
"""Ranges of a product's outputs with a pair of their own: queries, keys and values."""
_PAIR_WORDS, _PART_WORDS = 5, 5
PLACE_WORDS: Final = _PAIR_WORDS + MOST_PARTS * _PART_WORDS
"""Words that say where a pair is: rank, address of the first matrix, whether it is bfloat16, address of scales, number
of parts; then of each part: first rank, rank, first output, outputs, address of its second matrix."""
_GROUP_WORDS = 4
"""Words of a group of rows with one pair: slot, address of the rows' numbers, how many, and the first one's place."""
_GROUP_ROWS = 32
"""Most rows of a group: those of a long prompt are several work items."""
_ITEMS_PER_THREAD = 4
_AHEAD_BYTES = 4096
"""Bytes of the next work item's matrix that are asked for before this one is computed."""
_SHARES_WORD = 7
"""Word of either parameter block that has the number of work items wanted."""


class UpdatePart(NamedTuple):
    """What updates a range of outputs: ``y[begin:end] += scale * (x @ first.T) @ second.T``."""

    begin: int
    end: int
    first: torch.Tensor
    """[rank, in], float32 or bfloat16."""
    second: torch.Tensor
    """[end - begin, rank], float32 or bfloat16."""
    scale: float


class LowRankPair:
    """The parts that update one product, arranged for the kernels.

    First matrices are one below the other, in blocks of ``RANKS`` ranks: sixteen inputs of each rank, then the next
    sixteen, so that a tile reads one stream. Second ones are in panels of outputs, rank by rank. Zeros fill both up.
    """

    def __init__(self, parts: Sequence[UpdatePart], memory: torch.Tensor) -> None:
        """Copy the parts' matrices into ``memory``, uint8 [``pair_bytes``] at a cache line, which is kept; numbers are
        in float32 there, unless every matrix is bfloat16.
        """
        is_bf16 = all(one.dtype == torch.bfloat16 for part in parts for one in (part.first, part.second))
        dtype = torch.bfloat16 if is_bf16 else torch.float32
        ranks, sizes = [len(part.first) for part in parts], [part.end - part.begin for part in parts]
        num_inputs, total = parts[0].first.shape[1], sum(ranks)
        self._num_inputs, self._dtype = num_inputs, dtype
        self._parts = [(rank, part.begin, part.end) for rank, part in zip(ranks, parts, strict=True)]
        bounds = _bounds(num_inputs, list(zip(ranks, sizes, strict=True)), dtype.itemsize)
        if len(memory) != bounds[-1] or memory.data_ptr() % LINE:
            raise InternalError(f"update: {len(memory)} bytes of memory, expected {bounds[-1]} at a cache line")
        whole = memory.zero_()
        pieces = [whole[begin:end] for begin, end in pairwise(bounds)]
        first, self._scales, self._panels = pieces[0].view(dtype), pieces[1].view(torch.float32), pieces[2:]
        padded = torch.zeros(_up(total, RANKS), _up(num_inputs, LANES), dtype=dtype)
        padded[:total, :num_inputs] = torch.cat([part.first.to(dtype) for part in parts])
        self._first = first[: padded.numel()].view(-1, padded.shape[1] // LANES, RANKS, LANES)
        self._first.copy_(padded.view(-1, RANKS, padded.shape[1] // LANES, LANES).transpose(1, 2))
        self._scales[:total] = torch.tensor([part.scale for part, rank in zip(parts, ranks, strict=True)
                                             for _ in range(rank)])  # fmt: skip
        for piece, part, rank, size in zip(self._panels, parts, ranks, sizes, strict=True):
            panels = piece.view(dtype)[: _up(size, UPDATE_PANEL) * rank].view(-1, rank, UPDATE_PANEL)
            num_whole = size // UPDATE_PANEL
            second = part.second.to(dtype)
            panels[:num_whole] = second[: num_whole * UPDATE_PANEL].view(num_whole, UPDATE_PANEL, rank).transpose(1, 2)
            if rest := size % UPDATE_PANEL:
                panels[num_whole, :, :rest] = second[num_whole * UPDATE_PANEL :].T

    def words(self, num_inputs: int, num_outputs: int) -> list[int]:
        """Say where it is, for a product of these sizes; it has to be kept as long as the words are.

        Raises:
            InternalError: it is not for such a product.
        """
        # Safety: the kernels read and write raw memory by these words.
        is_inside = all(0 <= begin < end <= num_outputs for _, begin, end in self._parts)
        if self._num_inputs != num_inputs or not is_inside or len(self._parts) > MOST_PARTS:
            raise InternalError(f"update: {self._num_inputs} inputs and outputs {self._parts}, the product has "
                                f"{num_inputs} and {num_outputs}")
        words = [len(self._first) * RANKS, self._first.data_ptr(), int(self._dtype == torch.bfloat16),
                 self._scales.data_ptr(), len(self._parts)]  # fmt: skip
        first_rank = 0
        for (rank, begin, end), panels in zip(self._parts, self._panels, strict=True):
            words += [first_rank, rank, begin, end - begin, panels.data_ptr()]
            first_rank += rank
        return words + [0] * (PLACE_WORDS - len(words))


def pair_bytes(num_inputs: int, parts: Sequence[tuple[int, int]], item_bytes: int) -> int:
    """Return the bytes of a pair whose parts have these ranks and outputs, in elements of so many bytes."""
    return _bounds(num_inputs, parts, item_bytes)[-1]


def shrunk_width(max_rank: int) -> int:
    """Return the width of the room for rows whose pairs have parts of at most this rank."""
    return _up(MOST_PARTS * max_rank, RANKS)


def _bounds(num_inputs: int, parts: Sequence[tuple[int, int]], item_bytes: int) -> list[int]:
    """Return where the first matrices, the scales and each second matrix begin in a pair's memory, and its end."""
    rank = _up(sum(rank for rank, _ in parts), RANKS)
    sizes = [rank * _up(num_inputs, LANES) * item_bytes, rank * 4]
    sizes += [rank * _up(num_outputs, UPDATE_PANEL) * item_bytes for rank, num_outputs in parts]
    return [0, *accumulate(_up(size, LINE) for size in sizes)]


def _up(number: int, step: int) -> int:
    """Return the next multiple of ``step``."""
    return -(-number // step) * step


@dataclass(frozen=True, slots=True)
class StepUpdates:
    """Which rows of a step have which slot, as kernels read it, and their room."""

    num_rows: int
    table: torch.Tensor
    """int64: number of groups, the groups, the rows' numbers."""
    shrunk: torch.Tensor
    """float32 [T, ranks]: room for the rows times the first matrices."""

    @staticmethod
    def table_words(num_rows: int) -> int:
        """Words that the table of so many rows takes at most."""
        return 1 + (_GROUP_WORDS + 1) * num_rows

    def fill(self, slots: npt.NDArray[np.int32]) -> None:
        """Write the table of rows with these slots [T], 0 for none."""
        words, room = self.table.numpy().reshape(-1), self.table_words(len(slots))
        # Safety: the kernels write to as many rows of room as there are, and read rows by these numbers.
        if len(slots) != self.num_rows or room > len(words) or len(slots) > len(self.shrunk):
            raise InternalError(f"updates: {len(slots)} slots for {self.num_rows} rows")
        with_slot = np.flatnonzero(slots)
        rows = with_slot[np.argsort(slots[with_slot], kind="stable")]
        numbers = words[room - len(slots) : room]
        numbers[: len(rows)] = rows
        of_rows, address, count = slots[rows], numbers.ctypes.data, 0
        bounds = [0, *(np.flatnonzero(np.diff(of_rows)) + 1).tolist(), len(rows)]
        for begin, end in pairwise(bounds):
            for first in range(begin, end, _GROUP_ROWS):
                group = of_rows[first], address + 8 * first, min(_GROUP_ROWS, end - first), first
                words[1 + _GROUP_WORDS * count : 1 + _GROUP_WORDS * (count + 1)] = group
                count += 1
        words[0] = count


class LowRankUpdate:
    """Adds to the outputs of one product what the pairs of its rows make of their inputs."""

    def __init__(self, num_inputs: int, num_outputs: int, dtype: torch.dtype, places: npt.NDArray[np.int64]) -> None:
        """Compile the kernels.

        Args:
            num_inputs: of the product.
            num_outputs: of the product.
            dtype: of rows and outputs.
            places: [slots, PLACE_WORDS], contiguous, ``LowRankPair.words`` of each slot, or zeros; kept and read.
        """
        self._sizes, self._dtype, self._places = (num_inputs, num_outputs), dtype, places
        is_bf16 = int(dtype == torch.bfloat16)
        self._kernels = _shrink_kernel(is_bf16), _expand_kernel(is_bf16)
        self._blocks = ParameterBlock(7), ParameterBlock(7)

    def add_to(self, out: torch.Tensor, rows: torch.Tensor, step: StepUpdates) -> None:
        """Update ``out`` [T, out] for ``rows`` [T, in], both contiguous, in place."""
        for name, tensor, size in zip(("rows", "out"), (rows, out), self._sizes, strict=True):
            # Safety: kernels read and write raw memory.
            is_right = tensor.dtype == self._dtype and tuple(tensor.shape) == (step.num_rows, size)
            if not is_right or not tensor.is_contiguous():
                raise InternalError(f"{name}: {tensor.dtype} of shape {tuple(tensor.shape)}, expected {self._dtype} "
                                    f"{(step.num_rows, size)}")
        for kernel, block, tensor, size in zip(self._kernels, self._blocks, (rows, out), self._sizes, strict=True):
            block.fill(
                tensor.data_ptr(), size, step.table.data_ptr(), self._places.ctypes.data, step.shrunk.data_ptr(),
                4 * step.shrunk.shape[1], _work_items(),
            )  # fmt: skip
            kernel.run(block, resize=(_sizes_of_update,))


def _work_items() -> int:
    return _ITEMS_PER_THREAD * num_threads()


def _sizes_of_update(shape: StepShape) -> Sizes:
    return Sizes([(_SHARES_WORD, _work_items())])


@lru_cache
def _shrink_kernel(is_row_bf16: int) -> Kernel:
    """``shrunk[place, r] = scale * rows @ first.T`` of every row with a pair."""
    row_item, place_bytes, group_words = 2 if is_row_bf16 else 4, 8 * PLACE_WORDS, _GROUP_WORDS
    tall, wide, lanes, ahead_bytes = 4 if has_wide_vectors() else 2, RANKS, LANES, _AHEAD_BYTES
    half, num_sums = tall // 2, tall * RANKS

    def shrink(parameters: Any) -> None:
        p = address_of(parameters)
        counter, rows, num_inputs, table = load_int64(p, 0), load_int64(p, 1), load_int64(p, 2), load_int64(p, 3)
        places, shrunk, stride, wanted = load_int64(p, 4), load_int64(p, 5), load_int64(p, 6), load_int64(p, 7)
        sums, addresses = stack_floats(num_sums), stack_int64(tall)
        num_groups = load_int64(table, 0)
        num_shares = max(1, wanted // max(1, num_groups))
        num_items = num_groups * num_shares
        next_item = claim(counter)
        while next_item < num_items:
            # Why: claimed ahead, the matrix after this one is known, and its first lines can be asked for.
            item, next_item = next_item, claim(counter)
            group = table + 8 * (1 + group_words * (item // num_shares))
            share = item % num_shares
            after = places + load_int64(table, 1 + group_words * (min(next_item, num_items - 1) // num_shares)
                                        ) * place_bytes
            place = places + load_int64(group, 0) * place_bytes
            numbers, num_rows, first_row = load_int64(group, 1), load_int64(group, 2), load_int64(group, 3)
            rank, first, is_bf16, scales = (
                load_int64(place, 0), load_int64(place, 1), load_int64(place, 2), load_int64(place, 3))  # fmt: skip
            num_blocks = rank // wide
            block_bytes = (num_inputs + lanes - 1) // lanes * lanes * wide * (2 if is_bf16 else 4)
            if next_item // num_shares != item // num_shares and load_int64(after, 0) != 0:
                ask_ahead(load_int64(after, 1), ahead_bytes)
            for block in range(share * num_blocks // num_shares, (share + 1) * num_blocks // num_shares):
                matrix = first + block * block_bytes
                row = 0
                while row < num_rows:
                    left = num_rows - row
                    height = tall if left >= tall else half if left >= half else 1
                    for i in range(height):
                        store_int64(addresses, i, rows + load_int64(numbers, row + i) * num_inputs * row_item)
                    if is_bf16:
                        if height == tall:
                            shrink_tile(is_row_bf16, 1, tall, addresses, matrix, num_inputs, sums)
                        elif height == half:
                            shrink_tile(is_row_bf16, 1, half, addresses, matrix, num_inputs, sums)
                        else:
                            shrink_tile(is_row_bf16, 1, 1, addresses, matrix, num_inputs, sums)
                    elif height == tall:
                        shrink_tile(is_row_bf16, 0, tall, addresses, matrix, num_inputs, sums)
                    elif height == half:
                        shrink_tile(is_row_bf16, 0, half, addresses, matrix, num_inputs, sums)
                    else:
                        shrink_tile(is_row_bf16, 0, 1, addresses, matrix, num_inputs, sums)
                    for i in range(height):
                        target = shrunk + (first_row + row + i) * stride
                        for j in range(wide):
                            scaled = load_float32(sums, i * wide + j) * load_float32(scales, block * wide + j)
                            store_float32(target, block * wide + j, scaled)
                    row += height

    return compile_kernel(shrink)


@lru_cache
def _expand_kernel(is_out_bf16: int) -> Kernel:
    """``out += shrunk @ second.T`` of every row with a pair."""
    out_item, place_bytes, group_words = 2 if is_out_bf16 else 4, 8 * PLACE_WORDS, _GROUP_WORDS
    panel_outputs, pair_words, part_words, lanes = UPDATE_PANEL, _PAIR_WORDS, _PART_WORDS, LANES
    tall, ahead_bytes = 4 if has_wide_vectors() else 2, _AHEAD_BYTES
    half, num_sums = tall // 2, tall * UPDATE_PANEL

    def expand(parameters: Any) -> None:
        p = address_of(parameters)
        counter, out, num_outputs, table = load_int64(p, 0), load_int64(p, 1), load_int64(p, 2), load_int64(p, 3)
        places, shrunk, stride, wanted = load_int64(p, 4), load_int64(p, 5), load_int64(p, 6), load_int64(p, 7)
        sums = stack_floats(num_sums)
        num_groups = load_int64(table, 0)
        num_shares = max(1, wanted // max(1, num_groups))
        num_items = num_groups * num_shares
        next_item = claim(counter)
        while next_item < num_items:
            item, next_item = next_item, claim(counter)
            group = table + 8 * (1 + group_words * (item // num_shares))
            share = item % num_shares
            after = places + load_int64(table, 1 + group_words * (min(next_item, num_items - 1) // num_shares)
                                        ) * place_bytes
            if next_item // num_shares != item // num_shares and load_int64(after, 0) != 0:
                ask_ahead(load_int64(after, pair_words + 4), ahead_bytes)
            place = places + load_int64(group, 0) * place_bytes
            numbers, num_rows, first_row = load_int64(group, 1), load_int64(group, 2), load_int64(group, 3)
            is_bf16, num_parts, num_panels = load_int64(place, 2), load_int64(place, 4), 0
            for part in range(num_parts):
                size = load_int64(place, pair_words + part * part_words + 3)
                num_panels += (size + panel_outputs - 1) // panel_outputs
            first_panel, end_panel = share * num_panels // num_shares, (share + 1) * num_panels // num_shares
            before = 0
            for part in range(num_parts):
                word = pair_words + part * part_words
                first_rank, rank = load_int64(place, word), load_int64(place, word + 1)
                begin, size, second = (
                    load_int64(place, word + 2), load_int64(place, word + 3), load_int64(place, word + 4))  # fmt: skip
                panels_here = (size + panel_outputs - 1) // panel_outputs
                panel_bytes = rank * panel_outputs * (2 if is_bf16 else 4)
                for panel in range(max(0, first_panel - before), min(panels_here, end_panel - before)):
                    weights, column = second + panel * panel_bytes, panel * panel_outputs
                    count = min(panel_outputs, size - column)
                    row = 0
                    while row < num_rows:
                        left = num_rows - row
                        height = tall if left >= tall else half if left >= half else 1
                        source = shrunk + (first_row + row) * stride + first_rank * 4
                        if is_bf16:
                            if height == tall:
                                expand_tile(1, tall, source, stride, weights, rank, sums)
                            elif height == half:
                                expand_tile(1, half, source, stride, weights, rank, sums)
                            else:
                                expand_tile(1, 1, source, stride, weights, rank, sums)
                        elif height == tall:
                            expand_tile(0, tall, source, stride, weights, rank, sums)
                        elif height == half:
                            expand_tile(0, half, source, stride, weights, rank, sums)
                        else:
                            expand_tile(0, 1, source, stride, weights, rank, sums)
                        for i in range(height):
                            number = load_int64(numbers, row + i)
                            target = out + (number * num_outputs + begin + column) * out_item
                            addend, vectors = sums + i * panel_outputs * 4, count // lanes
                            add_update(is_out_bf16, lanes, target, addend, vectors)
                            done = vectors * lanes
                            add_update(is_out_bf16, 1, target + done * out_item, addend + done * 4, count - done)
                        row += height
                before += panels_here

    return compile_kernel(expand)
