"""Matrix products of float rows with weights of 4 or 8 bits that have a scale for each group of inputs ("weight only").

A weight is ``scale * (value - zero)``, ``scale * value - least``, or ``scale`` times what a codebook says of a value.
Rows stay what they are, float32 or bfloat16. Few rows are bound by the memory that weights take, so they are unpacked
in registers; of many rows 64 share what the first few have unpacked. Read ``grouped_tiles.py`` for the arithmetic, and
``grouped_blocks.py`` for that of processors with matrix units. Or each group of a row becomes int8 with a scale of its
own ("W4A8"): read ``grouped_bytes.py``.

Sums of int8 are exact, so the number of rows may choose between vectors and matrix units: ``grouped_byte_blocks.py``.

Invariant: an output's bits depend on its row, its weights and its bias alone. In float32, and with rows in int8, they
do not depend on the instructions that the processor has either; in bfloat16 there are three orders of additions, as in
``packed.py``.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch

from pagedcore_kernels.cpu.features import has_fused_vectors, has_instructions, has_sums_of_four, has_wide_vectors
from pagedcore_kernels.cpu.matmul.amx import (
    CONFIGURATION_WORDS,
    HALF_TILE_STEPS,
    TILE_STEPS,
    configure_tiles,
    may_use_tiles,
    release_tiles,
    rows_of_blocks,
    steps_of_tile,
)
from pagedcore_kernels.cpu.matmul.grouped_blocks import fill_with_ones, multiply_blocks_of_chunk
from pagedcore_kernels.cpu.matmul.grouped_byte_blocks import CHUNK_UNITS, multiply_byte_blocks_of_chunk
from pagedcore_kernels.cpu.matmul.grouped_bytes import MIDDLE, multiply_byte_tiles
from pagedcore_kernels.cpu.matmul.grouped_packing import grouped_panels_of
from pagedcore_kernels.cpu.matmul.grouped_rows import GROUP_WORDS, RowGroupQuantizer
from pagedcore_kernels.cpu.matmul.grouped_tiles import (
    BUFFER_BYTES,
    CHUNK_STEPS,
    KIND_OF_CODEBOOK,
    UNIT,
    WHOLE,
    WITH_LEAST,
    WITH_ZEROS,
    ask_for_header,
    clear_sums,
    header_bytes,
    inputs_of_step,
    multiply_tiles_of_chunk,
    scale_bytes,
    unit_bytes,
)
from pagedcore_kernels.cpu.matmul.largest import bar_outputs, first_barred, keep_candidate
from pagedcore_kernels.cpu.matmul.packed import (
    NEVER,
    fewest_streamed_rows,
    sizes_of_products_by_rows,
    work_items,
)
from pagedcore_kernels.cpu.matmul.packed_weight import Fact, PackedWeight
from pagedcore_kernels.cpu.matmul.product import PackedProduct
from pagedcore_kernels.cpu.matmul.tiles import (
    BYTES,
    GROUP_MATRIX_UNITS,
    HALF_MATRIX_UNITS,
    MATRIX_UNITS,
    PAIRS,
    PANEL,
    SINGLES,
    SUM_BYTES,
    WIDENED_BYTES,
    is_of_bytes,
    store_sums,
)
from pagedcore_kernels.cpu.runtime.kernel import Kernel, ParameterBlock, compile_kernel
from pagedcore_kernels.cpu.simd import LANES, address_of, claim, drain_streams, load_int64, stack_floats, stack_int64
from pagedcore_kernels.errors import InternalError
from pagedcore_kernels.interface import RowRoom

_log = logging.getLogger("pagedcore")
LAYOUT, LAYOUT_VERSION = "grouped", 1
"""Name and version of the arrangement that ``grouped_panels_of`` makes, for files that hold it: another arrangement is
another version."""
_KINDS = {"whole": WHOLE, "zeros": WITH_ZEROS, "least": WITH_LEAST} | KIND_OF_CODEBOOK
"""What values stand for, by name."""
_INT8_ROWS = "int8"
_ROWS = "float", _INT8_ROWS
"""What rows are multiplied as; for int8 values of 4 bits are from 0 to 15."""
_GROUP_ROWS = 64
"""Rows that share a chunk of unpacked weights, whose sums take 16 KiB."""
_SHARE_ROWS = 64
"""Fewest rows of a work item, where a panel is cut into several; that of ``work_items``."""
_WIDE_SUMS, _WIDE_SUMS_OF_BYTES, _WIDE_SUMS_OF_WORDS, _NARROW_SUMS = 16, 24, 8, 4
_AHEAD_BYTES = 8192
"""How far ahead of its use memory is asked for."""
_TILE_INPUTS = 2 * TILE_STEPS
"""Inputs that an instruction of matrix units takes."""
_SIZE_WORDS = 5, 10
"""Words of the parameter block: the number of rows, and the first of the two of ``work_items``."""
MOST_BYTE_GROUP_INPUTS = {4: 2**20, 8: 2**16}
"""Most inputs of a group where rows are int8, by bits: 127 * 16 and 127 * 255 times as many are below 2**31."""
FEWEST_TILE_ROWS = {GROUP_MATRIX_UNITS: 8, HALF_MATRIX_UNITS: 12}
"""Fewest rows in int8 that matrix units multiply. At 6, 8 and 12 rows vectors took 0.9, 1.0 to 1.1, and 1.2 to 1.3 of
their time with groups of 128 inputs; 0.8, 0.9, and 1.0 to 1.1 with groups of 32 (a Xeon)."""
_OF_SCALES = torch.float32, torch.float16
_RANGES = {4: (-8, 7, 8), 8: (-128, 127, 127)}
"""Least and largest value, by bits; zero points may be one more than a value of 4 bits."""


def form_of_grouped_product(dtype: torch.dtype, group_inputs: int = 0) -> int | None:
    """Say how products are computed here whose groups have so many inputs; ``None``: they are not."""
    if not has_fused_vectors() or dtype not in (torch.float32, torch.bfloat16):
        return None
    fills_tiles = group_inputs > 0 and group_inputs % _TILE_INPUTS == 0
    if dtype == torch.bfloat16 and fills_tiles and may_use_tiles(MATRIX_UNITS):
        return MATRIX_UNITS
    return PAIRS if dtype == torch.bfloat16 and has_instructions("avx512bf16", "avx512bw") else SINGLES


def form_of_byte_groups(group_inputs: int, bits: int = 4) -> int | None:
    """Say how products of rows in int8 are computed here whose groups have so many inputs; ``None``: they are not."""
    if not has_fused_vectors() or not 0 < group_inputs <= MOST_BYTE_GROUP_INPUTS[bits]:
        return None
    return BYTES if has_sums_of_four() else WIDENED_BYTES


def tiles_of_byte_groups(group_inputs: int) -> int | None:
    """Say how matrix units multiply rows in int8 whose groups have so many inputs; ``None``: they do not."""
    for form, steps in (GROUP_MATRIX_UNITS, TILE_STEPS), (HALF_MATRIX_UNITS, HALF_TILE_STEPS):
        if group_inputs % (4 * steps) == 0:
            return form if may_use_tiles(form) else None
    return None


@cache
def fewest_tile_rows(form: int, bits: int, values: int, halves: int, dtype: torch.dtype) -> int:
    """Return how many rows in int8 matrix units multiply in a form at least; ``NEVER`` if none.

    They are first compared with vectors: if one bit differs they are not used, and a warning is logged.
    """
    if _tiles_agree(form, bits, values, halves, dtype):
        return FEWEST_TILE_ROWS[form]
    _log.warning("w4a8 products of %s rows differ between matrix units (AMX) and vectors on this processor; vectors "
                 "compute all of them. Please report it.", dtype)  # fmt: skip
    return NEVER


def describe_byte_groups() -> str:
    """Say in words what multiplies weights in groups by rows in int8 here."""
    form = form_of_byte_groups(UNIT)
    if form is None:
        return "needs an x86 processor with AVX2"
    vectors = "AVX2" if form != BYTES else "AVX-512 VNNI" if has_wide_vectors() else "AVX-VNNI"
    if not may_use_tiles(GROUP_MATRIX_UNITS):
        return vectors
    formats = torch.float32, torch.bfloat16
    if NEVER in (fewest_tile_rows(GROUP_MATRIX_UNITS, 4, WHOLE, 0, dtype) for dtype in formats):
        return f"{vectors}; AMX gave other bits and is not used, please report it"
    rows = " or ".join(map(str, FEWEST_TILE_ROWS.values()))
    return f"AMX from {rows} rows on, compared here with {vectors}: the same bits"


def _tiles_agree(form: int, bits: int, values: int, halves: int, dtype: torch.dtype) -> bool:
    """Compare matrix units with vectors: panels whole or not, several chunks, blocks of one tile of rows and two."""
    generator, size, of_scales = torch.Generator().manual_seed(0), 4 * steps_of_tile(form), _OF_SCALES[halves]
    for num_outputs, num_inputs, num_groups in (64, 3 * size, 3), (70, 22 * size, 2):
        least = 0 if values == WITH_LEAST and bits == 4 else -(2 ** (bits - 1))
        shape = num_outputs, num_inputs
        numbers = torch.randint(least, least + 2**bits, shape, generator=generator, dtype=torch.int8)
        scales = torch.randn(num_outputs, num_groups, generator=generator).to(of_scales)
        zeros = {WITH_LEAST: scales.flip(0), WITH_ZEROS: numbers[:, :num_groups]}.get(values)
        rows = torch.randn(65, num_inputs, generator=generator).to(dtype)
        tiles, vectors = (
            PackedGroupedMatmul(numbers, scales, zeros, bits, None, dtype, quantizes_rows=True, tiles_from=one)
            for one in (1, NEVER)
        )
        if not all(torch.equal(tiles(rows[-count:]), vectors(rows[-count:])) for count in (1, 8, 17, 33, 65)):
            return False
    return True


def packed_bytes(
    num_outputs: int, num_inputs: int, num_groups: int, bits: int, *, has_least: bool = False, has_zeros: bool = False,
    halves: bool = False,
) -> int:
    """Return the bytes of a packed weight, with least weights or zero points if it has them.

    ``halves``: scales and least weights are float16.
    """
    values = WITH_LEAST if has_least else WITH_ZEROS if has_zeros else WHOLE
    num_units, header = -(-num_inputs // UNIT), header_bytes(values, halves)
    return -(-num_outputs // PANEL) * (num_groups * header + num_units * unit_bytes(bits))


class PackedGroupedMatmul(PackedProduct):
    """``rows @ (scales * (values - zeros)).T + bias`` with a weight that was rearranged once.

    Args:
        values: int8 [out, in]; with 4 bits from -8 to 7, which are packed into half a byte each. Not kept.
        scales: float32 or float16 [out, groups], of any sign; packed in this format, and group ``g`` is inputs
            ``g * in / groups`` and up. Not kept.
        zeros: int8 [out, groups] in the numbers of the values, or ``None`` for zeros; with 4 bits from -8 to 8. Formats
            that count values from 0 to 15 subtract 8 from both. Or [out, groups] in the format of the scales, which is
            subtracted from ``scales * values`` instead; values of 4 bits are from 0 to 15 then. Not kept.
        bits: 4 or 8.
        bias: [out], or ``None``; rounded to ``dtype``; not kept.
        dtype: of rows and outputs, float32 or bfloat16.
        codebook: of ``CODEBOOKS``, by name: number ``values & 15`` of it is in the place of each value of 4 bits,
            rounded to bfloat16 where the processor multiplies pairs of these. "": values are numbers.
        quantizes_rows: each group of a row becomes int8; with no codebook, and no zero points that are int8 of 8 bits.
        tiles_from: fewest rows in int8 that matrix units multiply; ``None``: as ``fewest_tile_rows`` says.

    A group has a multiple of 8 inputs; only where there is one group for each output may ``in`` be any number.

    Raises:
        InternalError: an argument has another type, shape or range, or the processor has no such vectors.
    """

    def __init__(
        self, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int,
        bias: torch.Tensor | None, dtype: torch.dtype, codebook: str = "", *, quantizes_rows: bool = False,
        tiles_from: int | None = None,
    ) -> None:  # fmt: skip
        if form_of_grouped_product(dtype) is None:
            raise InternalError(f"rows: {dtype} cannot be multiplied here by weights of few bits")
        _check(values, scales, zeros, bits, bias)
        if codebook and (codebook not in KIND_OF_CODEBOOK or bits != 4 or zeros is not None):
            raise InternalError(f"codebook: got {codebook!r} for {bits} bits, {'no ' * (zeros is None)}zero points")
        if quantizes_rows and bits == 4 and _kind_of(zeros) != WITH_LEAST:
            values = values + MIDDLE
        panels = grouped_panels_of(values, scales, zeros, bits, _kind_of(zeros), has_steps=quantizes_rows)
        kind = KIND_OF_CODEBOOK.get(codebook, _kind_of(zeros))
        name = next(name for name, one in _KINDS.items() if one == kind)
        facts: dict[str, Fact] = {
            "groups": scales.shape[1], "bits": bits, "halves": _is_half(scales), "values": name,
            "rows": _ROWS[quantizes_rows],
        }  # fmt: skip
        num_outputs, num_inputs = values.shape
        self._take(PackedWeight(LAYOUT, num_outputs, num_inputs, {"panels": panels}, facts), bias, dtype, tiles_from)

    def _take(
        self, packed: PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype, tiles_from: int | None = None
    ) -> None:
        super().__init__(packed)
        num_groups, bits = packed.facts.get("groups"), int(packed.fact("bits", *_RANGES))
        kind, halves = _KINDS[str(packed.fact("values", *_KINDS))], int(packed.fact("halves", 0, 1))
        self._padding = -self._num_inputs % UNIT
        padded = self._num_inputs + self._padding
        if type(num_groups) is not int or not 0 < num_groups <= padded or padded % (num_groups * UNIT):
            raise InternalError(f"grouped weight: {self._num_inputs} inputs are in {num_groups!r} groups")
        is_of_codebook, quantizes_rows = kind in KIND_OF_CODEBOOK.values(), packed.fact("rows", *_ROWS) == _INT8_ROWS
        if (num_groups > 1 and self._padding) or (is_of_codebook and bits != 4):
            raise InternalError(f"grouped weight: {self._num_inputs} inputs of {bits} bits in {num_groups} groups")
        size = padded // num_groups
        form = form_of_byte_groups(size, bits) if quantizes_rows else form_of_grouped_product(dtype, size)
        if form is None or (quantizes_rows and (is_of_codebook or (bits == 8 and kind == WITH_ZEROS))):
            raise InternalError(f"quantizes_rows: got {quantizes_rows} for {bits} bits in groups of {size}")
        group_bytes = header_bytes(kind, halves) + size // UNIT * unit_bytes(bits)
        self._panels = packed.tensor("panels", torch.uint8, (self._num_panels, num_groups, group_bytes))
        self.weight = torch.empty(0, dtype=dtype)
        self._bias = torch.zeros(self._num_panels * PANEL, dtype=dtype)
        if bias is not None:
            self._bias[: self._num_outputs] = bias
        self._is_widened = dtype == torch.bfloat16 and form == SINGLES
        self._sizes = num_groups, size // UNIT
        self._quantize = RowGroupQuantizer(dtype, num_groups, size) if quantizes_rows else None
        self._is_int8_by_output = not quantizes_rows and bits == 8 and num_groups == 1 and kind == WHOLE and not halves
        self._kernel = _kernel(form, bits, kind, halves, dtype)
        tiles = tiles_of_byte_groups(size) if quantizes_rows else None
        self._tiles_from, self._tiles_kernel = NEVER, self._kernel
        if tiles is not None and tiles_from != NEVER:
            self._tiles_from = fewest_tile_rows(tiles, bits, kind, halves, dtype) if tiles_from is None else tiles_from
            self._tiles_kernel = _kernel(tiles, bits, kind, halves, dtype)
        self._parameters = ParameterBlock(14)

    @property
    def memory(self) -> tuple[int, int]:
        """Address and bytes of the packed weight, its scales and zero points included; no bytes if it is mapped."""
        return self.packed.memory(self._panels)

    def weight_rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the weights of some outputs, int64 [n], as float32 [n, in]: ``float(value) * scale``.

        Raises:
            InternalError: they are not int8 with a scale for each output and no zero points.
        """
        if not self._is_int8_by_output:
            raise InternalError("rows are shown of int8 with one scale for each output only")
        panel, lane = outputs // PANEL, outputs % PANEL
        panels, header = self._panels[:, 0], scale_bytes(False)
        scales = panels[:, :header].view(torch.float32)
        # Shape: values are [panels, inputs, PANEL]
        values = panels[:, header:].view(torch.int8).view(self._num_panels, -1, PANEL)
        return values[panel, :, lane][:, : self._num_inputs].float() * scales[panel, lane, None]

    @property
    def only_runs_kernels(self) -> bool:
        """Whether its calls can be recorded; see ``RecordableMatmul``."""
        return not (self._padding or self._is_widened)

    def _run(self, rows: torch.Tensor, out: int, candidates: int, barred: int, workspace: RowRoom | None) -> None:
        num_rows = len(rows)
        if self._padding:
            rows = torch.nn.functional.pad(rows, (0, self._padding))
        if self._is_widened:
            rows = rows.float()
        known = rows
        if self._quantize is not None:
            rows, known = self._quantize(rows, workspace)
        self._parameters.fill(
            rows.data_ptr(), self._panels.data_ptr(), self._bias.data_ptr(), out, num_rows, self._num_outputs,
            *self._sizes, self._num_panels, *work_items(self._num_panels, num_rows), candidates, barred,
            known.data_ptr(),
        )  # fmt: skip
        kernel = self._kernel if num_rows < self._tiles_from else self._tiles_kernel
        kernels = self._tiles_from, self._kernel.address, self._tiles_kernel.address
        kernel.run(self._parameters, resize=(sizes_of_products_by_rows, self._num_panels, _SIZE_WORDS, *kernels))


def _check(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int, bias: torch.Tensor | None
) -> None:
    """Refuse what the kernel would read beyond its end, or what a weight of so few bits cannot hold."""
    if bits not in _RANGES:
        raise InternalError(f"bits: got {bits}, expected 4 or 8")
    is_float = _kind_of(zeros) == WITH_LEAST
    least, largest, largest_zero = (0, 15, 0) if is_float and bits == 4 else _RANGES[bits]
    if values.ndim != 2 or values.dtype != torch.int8 or not values.numel() or not _within(values, least, largest):
        raise InternalError(f"values: {values.dtype} of shape {tuple(values.shape)}, expected int8 [out, in] "
                            f"from {least} to {largest}")  # fmt: skip
    num_outputs, num_inputs = values.shape
    num_groups = scales.shape[1] if scales.ndim == 2 else 0
    is_known = scales.dtype in (torch.float32, torch.float16)
    if not is_known or len(scales) != num_outputs or not 0 < num_groups <= num_inputs:
        raise InternalError(f"scales: {scales.dtype} of shape {tuple(scales.shape)}, expected float32 "
                            f"or float16 [{num_outputs}, groups]")  # fmt: skip
    if num_groups > 1 and num_inputs % (num_groups * UNIT):
        raise InternalError(f"values: {num_inputs} inputs are not {num_groups} groups of a multiple of {UNIT}")
    if zeros is not None and (
        zeros.dtype not in (torch.int8, scales.dtype) or zeros.shape != scales.shape
        or not (is_float or _within(zeros, least, largest_zero))
    ):
        raise InternalError(f"zeros: {zeros.dtype} of shape {tuple(zeros.shape)}, expected int8 {tuple(scales.shape)} "
                            f"from {least} to {largest_zero}, or {scales.dtype}")  # fmt: skip
    if bias is not None and bias.shape != (num_outputs,):
        raise InternalError(f"bias: shape {tuple(bias.shape)}, expected [{num_outputs}]")


def _kind_of(zeros: torch.Tensor | None) -> int:
    return WHOLE if zeros is None else WITH_LEAST if zeros.is_floating_point() else WITH_ZEROS


def _is_half(scales: torch.Tensor) -> int:
    return _OF_SCALES.index(scales.dtype)


def _within(values: torch.Tensor, least: int, largest: int) -> bool:
    return bool(values.min() >= least) and bool(values.max() <= largest)


@cache
def _kernel(form: int, bits: int, values: int, halves: int, dtype: torch.dtype) -> Kernel:
    """Compile the kernel, or take it from the cache; its parameters are those that ``__call__`` fills in."""
    is_bf16, is_wide, item_bytes = int(dtype == torch.bfloat16), int(has_wide_vectors()), dtype.itemsize
    most_sums = {BYTES: _WIDE_SUMS_OF_BYTES, WIDENED_BYTES: _WIDE_SUMS_OF_WORDS}.get(form, _WIDE_SUMS)
    most_sums = most_sums if is_wide else _NARROW_SUMS
    bytes_of_unit, row_unit_bytes = unit_bytes(bits), UNIT // inputs_of_step(form) * 4
    has_bytes, known_bytes = int(is_of_bytes(form)), 4 * GROUP_WORDS
    has_byte_units, tile_steps = int(form in FEWEST_TILE_ROWS), steps_of_tile(form)
    uses_matrix_units = int(form == MATRIX_UNITS or has_byte_units)
    # Why a whole group: sums of int8 are exact.
    chunk_units = MOST_BYTE_GROUP_INPUTS[4] if has_bytes else CHUNK_STEPS * inputs_of_step(form) // UNIT
    chunk_units = CHUNK_UNITS if has_byte_units else chunk_units
    bytes_of_header = header_bytes(values, halves)
    panel_outputs, sum_bytes, least_rows, group_rows = PANEL, SUM_BYTES, _SHARE_ROWS, _GROUP_ROWS
    num_sums, num_weights = _GROUP_ROWS * PANEL, BUFFER_BYTES // 4
    ahead_bytes, num_words = _AHEAD_BYTES, CONFIGURATION_WORDS
    num_products = num_sums if uses_matrix_units else 1
    has_ones = int(form == MATRIX_UNITS and values == WITH_LEAST)
    first_streamed = fewest_streamed_rows()
    num_inputs, num_ones = (_GROUP_ROWS * LANES, LANES * LANES) if has_ones else (1, 1)

    def matmul(parameters: Any) -> None:
        p = address_of(parameters)
        counter, rows, weight = load_int64(p, 0), load_int64(p, 1), load_int64(p, 2)
        bias, out, num_rows = load_int64(p, 3), load_int64(p, 4), load_int64(p, 5)
        num_outputs, num_groups, num_units = load_int64(p, 6), load_int64(p, 7), load_int64(p, 8)
        num_panels, num_whole, num_shares = load_int64(p, 9), load_int64(p, 10), load_int64(p, 11)
        candidates, barred, known = load_int64(p, 12), load_int64(p, 13), load_int64(p, 14)
        row_bytes, group_bytes = num_groups * num_units * row_unit_bytes, bytes_of_header + num_units * bytes_of_unit
        panel_bytes = num_groups * group_bytes
        share_rows = (num_rows + num_shares * least_rows - 1) // (num_shares * least_rows) * least_rows
        num_items = num_whole + (num_panels - num_whole) * num_shares
        sums, buffer, products = stack_floats(num_sums), stack_floats(num_weights), stack_floats(num_products)
        of_inputs, ones = stack_floats(num_inputs), stack_floats(num_ones)
        configuration, configured_rows = stack_int64(num_words), 0
        outputs, is_streamed = stack_floats(panel_outputs), int(num_rows >= first_streamed and candidates == 0)
        if has_ones:
            fill_with_ones(ones)
        next_item = claim(counter)
        while next_item < num_items:
            # Why: claimed ahead, the panel after this one is known, and its beginning can be asked for.
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
                begin, source = weight + panel * panel_bytes, rows + first_row * row_bytes
                # Rows from ``last`` on have their sums ``spare`` places further on, as in ``packed.py``.
                size, last, spare = count, 0, 0
                if uses_matrix_units:
                    size = rows_of_blocks(count)
                    last, spare = count - size, (size - count % size) % size
                    if size != configured_rows:
                        configure_tiles(configuration, size, tile_steps)
                        configured_rows = size
                clear_sums(sums, count + spare)
                for number in range(num_groups):
                    group, unit = begin + number * group_bytes, 0
                    here = group + bytes_of_header
                    ask_for_header(bytes_of_header, group + ahead_bytes)
                    while unit < num_units:
                        units, ahead = min(chunk_units, num_units - unit), here + ahead_bytes
                        if ahead >= begin + panel_bytes:
                            ahead = next_panel + (ahead - begin - panel_bytes)
                        of_group = known + (first_row * num_groups + number) * known_bytes
                        if has_byte_units:
                            multiply_byte_blocks_of_chunk(
                                form, bits, values, halves, source, row_bytes, count, size, of_group,
                                num_groups * known_bytes, here, group, units, int(unit == 0),
                                int(unit + units == num_units), sums, ahead, buffer, products,
                            )
                        elif uses_matrix_units:
                            multiply_blocks_of_chunk(
                                bits, values, halves, source, row_bytes, count, size, here, group, units, sums, ahead,
                                buffer, products, of_inputs, ones,
                            )
                        elif has_bytes:
                            multiply_byte_tiles(
                                form, bits, values, halves, most_sums, is_wide, source, row_bytes, count, of_group,
                                num_groups * known_bytes, here, group, units, sums, ahead,
                            )
                        else:
                            multiply_tiles_of_chunk(
                                form, bits, values, halves, most_sums, is_wide, source, row_bytes, count, here, group,
                                units, sums, ahead, buffer,
                            )
                        source, unit, here = source + units * row_unit_bytes, unit + units, here + units * bytes_of_unit
                column, wanted = panel * panel_outputs, min(panel_outputs, num_outputs - panel * panel_outputs)
                pair = first_barred(barred, column) if candidates != 0 else 0
                for i in range(count):
                    target = out + ((first_row + i) * num_outputs + column) * item_bytes
                    if candidates != 0:
                        target = outputs
                    place = i + spare if i >= last else i
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
