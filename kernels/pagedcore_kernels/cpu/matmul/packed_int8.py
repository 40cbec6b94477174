"""Matrix products of float rows with int8 weights: rows in int8 too, each with a scale, and exact int32 sums ("W8A8").

The weight is symmetric with one scale for each output; a row's scale follows from the row, see ``quantize_rows``. An
output is ``float(sum) * row scale * output scale + bias``, each operation rounded in float32, in this order.

Invariant: an output's bits depend on its row, its weights and its bias alone, and not on the instructions that the
processor has: an int32 sum of up to ``MOST_INPUTS`` products cannot overflow. So the number of rows may choose between
vectors and matrix units, which take the same rows, weights and corrections.
"""

from __future__ import annotations

import logging
from functools import cache

import torch

from pagedcore_kernels.cpu.features import has_fused_vectors, has_sums_of_four, has_wide_vectors
from pagedcore_kernels.cpu.matmul.amx import may_use_tiles
from pagedcore_kernels.cpu.matmul.packed import NEVER, SIZE_WORDS, matmul_kernel, sizes_of_products_by_rows, work_items
from pagedcore_kernels.cpu.matmul.packed_weight import PackedWeight
from pagedcore_kernels.cpu.matmul.packing import panels_of, rows_of, shape_of_panels, sums_of
from pagedcore_kernels.cpu.matmul.product import PackedProduct
from pagedcore_kernels.cpu.matmul.quantize_rows import ROW_MULTIPLE, UNSIGNED_OFFSET, RowQuantizer
from pagedcore_kernels.cpu.matmul.tiles import BYTE_MATRIX_UNITS, BYTES, PANEL, WIDENED_BYTES
from pagedcore_kernels.cpu.runtime.kernel import ParameterBlock
from pagedcore_kernels.errors import InternalError
from pagedcore_kernels.interface import RowRoom

MOST_INPUTS = 2**16
"""Most inputs of a product: 128 * 127 times as many is below 2**31, and so is 128 * 255 with rows as uint8."""
FEWEST_TILE_ROWS = 8
"""Fewest rows that matrix units multiply: at 8 they took 0.94 of the time of vectors, at 16 0.79, at 6 1.12 (a Xeon).
"""
LAYOUT, LAYOUT_VERSION = "int8", 1
"""Name and version of the arrangement of panels, scales and corrections, for files that hold it: another arrangement is
another version."""
_COMPARED = ((64, 48, (1, 8, 17)), (130, 2000, (1, 8, 9, 16, 17, 32, 33, 70, 600)))
"""What the two kernels are compared by: outputs, inputs, and numbers of rows. One panel and several, fewer steps than a
tile, several chunks and a rest; one tile of rows and two, blocks that overlap, more than one group."""

_log = logging.getLogger("pagedcore")


def form_of_int8_product(num_inputs: int) -> int | None:
    """Say how int8 products of this size are computed here; ``None``: they are not."""
    if not has_fused_vectors() or not 0 < num_inputs <= MOST_INPUTS:
        return None
    return BYTES if has_sums_of_four() else WIDENED_BYTES


@cache
def fewest_tile_rows(dtype: torch.dtype) -> int:
    """Return how many rows of a number format matrix units multiply here at least; ``NEVER`` if none.

    Where there are such units, they are first compared with vectors: if one bit differs they are not used, and a
    warning is logged.
    """
    # Why VNNI too: vectors multiply the last inputs, and fewer rows, in the same form of rows.
    if form_of_int8_product(1) != BYTES or not may_use_tiles(BYTE_MATRIX_UNITS):
        return NEVER
    if _tiles_agree(dtype):
        return FEWEST_TILE_ROWS
    _log.warning("int8 products of %s rows differ between matrix units (AMX) and vectors (AVX-512 VNNI) on this "
                 "processor; vectors compute all of them. Please report it.", dtype)  # fmt: skip
    return NEVER


def describe_int8_products() -> str:
    """Say in words what multiplies int8 here."""
    form = form_of_int8_product(1)
    if form != BYTES:
        return "needs an x86 processor with AVX2" if form is None else "AVX2"
    if not may_use_tiles(BYTE_MATRIX_UNITS):
        return "AVX-512 VNNI" if has_wide_vectors() else "AVX-VNNI"
    if NEVER in (fewest_tile_rows(torch.float32), fewest_tile_rows(torch.bfloat16)):
        return "AVX-512 VNNI; AMX gave other bits and is not used, please report it"
    return f"AMX from {FEWEST_TILE_ROWS} rows on, compared here with AVX-512 VNNI: the same bits"


def _tiles_agree(dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    for num_outputs, num_inputs, numbers_of_rows in _COMPARED:
        weight = torch.randint(-128, 128, (num_outputs, num_inputs), generator=generator, dtype=torch.int8)
        weight[0], weight[1] = 127, -128
        rows = torch.randn(max(numbers_of_rows), num_inputs, generator=generator).to(dtype)
        rows[-1] = 1.0
        scales = torch.rand(num_outputs, generator=generator)
        tiles, vectors = (PackedInt8Matmul(weight, scales, scales, dtype, tiles_from) for tiles_from in (1, NEVER))
        if not all(torch.equal(tiles(rows[-count:]), vectors(rows[-count:])) for count in numbers_of_rows):
            return False
    return True


def packed_bytes(num_outputs: int, num_inputs: int) -> int:
    """Return the bytes of a packed weight, its scales, corrections and bias."""
    return -(-num_outputs // PANEL) * PANEL * (num_inputs + -num_inputs % ROW_MULTIPLE + 4 + 4 + 4)


class PackedInt8Matmul(PackedProduct):
    """``rows @ (weight * scales).T + bias`` with a weight that was rearranged once.

    Args:
        weight: int8 [out, in], any strides; not kept.
        scales: float32 [out]; not kept.
        bias: [out], or ``None``; not kept.
        dtype: of rows and outputs, float32 or bfloat16.
        tiles_from: fewest rows that matrix units multiply; ``None``: as ``fewest_tile_rows`` says.
    """

    def __init__(
        self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype,
        tiles_from: int | None = None,
    ) -> None:  # fmt: skip
        num_outputs, num_inputs = weight.shape
        form = form_of_int8_product(num_inputs)
        if form is None or weight.dtype != torch.int8:
            raise InternalError(f"weight: {weight.dtype} of shape {tuple(weight.shape)} cannot be packed here")
        if padding := -num_inputs % ROW_MULTIPLE:
            weight = torch.nn.functional.pad(weight, (0, padding))
        # Why: the sum over rows as uint8 is too large by the offset times the sum of the weights.
        corrections = (_offset_of(form) * sums_of(weight)).int()
        tensors = {"panels": panels_of([weight]), "scales": _filled(scales.float()),
                   "corrections": _filled(corrections)}  # fmt: skip
        self._take(PackedWeight(LAYOUT, num_outputs, num_inputs, tensors), bias, dtype, tiles_from)

    def _take(
        self, packed: PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype, tiles_from: int | None = None
    ) -> None:
        super().__init__(packed)
        form = form_of_int8_product(self._num_inputs)
        if form is None or dtype not in (torch.float32, torch.bfloat16):
            raise InternalError(f"rows: {dtype} with {self._num_inputs} inputs cannot be multiplied here by int8")
        self._padding, filled = -self._num_inputs % ROW_MULTIPLE, (self._num_panels * PANEL,)
        shape = shape_of_panels(self._num_outputs, self._num_inputs + self._padding, torch.int8)
        self._panels = packed.tensor("panels", torch.int8, shape)
        self._scales = packed.tensor("scales", torch.float32, filled)
        self._corrections = packed.tensor("corrections", torch.int32, filled)
        self.weight = torch.empty(0, dtype=dtype)
        self._bias = torch.zeros(filled) if bias is None else _filled(bias.float())
        offset = _offset_of(form)
        self._tiles_from = NEVER if form != BYTES else fewest_tile_rows(dtype) if tiles_from is None else tiles_from
        self._quantize, self._kernel = RowQuantizer(dtype, offset), matmul_kernel(form, dtype)
        self._tiles_kernel = self._kernel if self._tiles_from == NEVER else matmul_kernel(BYTE_MATRIX_UNITS, dtype)
        self._parameters = ParameterBlock(15)

    @property
    def memory(self) -> tuple[int, int]:
        """Address and bytes of the packed weight; no bytes if it is mapped."""
        return self.packed.memory(self._panels)

    def weight_rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the weights of some outputs, int64 [n], as float32 [n, in]: ``float(value) * scale``."""
        return rows_of(self._panels, outputs)[:, : self._num_inputs].float() * self._scales[outputs, None]

    @property
    def only_runs_kernels(self) -> bool:
        """Whether its calls can be recorded; see ``RecordableMatmul``."""
        return not self._padding

    def _run(self, rows: torch.Tensor, out: int, candidates: int, barred: int, workspace: RowRoom | None) -> None:
        num_rows = len(rows)
        if self._padding:
            rows = torch.nn.functional.pad(rows, (0, self._padding))
        values, scales = self._quantize(rows, workspace)
        self._parameters.fill(
            values.data_ptr(), self._panels.data_ptr(), self._bias.data_ptr(), out, num_rows, self._num_outputs,
            self._num_inputs + self._padding, self._num_panels, *work_items(self._num_panels, num_rows),
            candidates, barred, scales.data_ptr(), self._scales.data_ptr(), self._corrections.data_ptr(),
        )  # fmt: skip
        kernel = self._kernel if num_rows < self._tiles_from else self._tiles_kernel
        kernels = self._tiles_from, self._kernel.address, self._tiles_kernel.address
        kernel.run(self._parameters, resize=(sizes_of_products_by_rows, self._num_panels, SIZE_WORDS, *kernels))


def _filled(values: torch.Tensor) -> torch.Tensor:
    """Fill up to whole panels with zeros."""
    return torch.nn.functional.pad(values, (0, -len(values) % PANEL))


def _offset_of(form: int) -> int:
    """Return what vectors add to each value of a row."""
    return UNSIGNED_OFFSET if form == BYTES else 0
