"""Int8 products on matrix units: emulated tiles against integers in NumPy, and the machine code for the processor."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kernels.test_matmul import on_another_processor
from kernels.test_matmul_int8 import expected, rows_of, weight_of
from pagedcore.models.fingerprint import kv_format
from pagedcore_kernels.cpu.matmul import amx, packed, packed_int8
from pagedcore_kernels.cpu.matmul.packed import MATRIX_UNIT_CHUNK_STEPS
from pagedcore_kernels.cpu.matmul.packed_int8 import (
    FEWEST_TILE_ROWS,
    MOST_INPUTS,
    NEVER,
    PackedInt8Matmul,
    form_of_int8_product,
)
from pagedcore_kernels.cpu.matmul.tiles import BYTE_MATRIX_UNITS, BYTES
from support import emulated_tiles
from support.doubles import ToyBackend

pytestmark = pytest.mark.skipif(form_of_int8_product(16) != BYTES, reason="no AVX-512 VNNI, which takes the rest")
#: Inputs of a chunk.
CHUNK = 4 * MATRIX_UNIT_CHUNK_STEPS
#: Outputs and inputs: one and several panels, whole or not; fewer inputs than a tile, tiles, chunks, each with a rest.
SHAPES = [(3, 1), (64, 48), (63, 64), (130, 80), (65, CHUNK), (70, CHUNK + 27), (1, 2 * CHUNK + 64 + 16)]


@pytest.fixture(scope="module")
def machine() -> Iterator[emulated_tiles.EmulatedTiles]:
    """Tiles that all tests of this module share, with the kernels made of them."""
    tiles = emulated_tiles.EmulatedTiles()
    with pytest.MonkeyPatch.context() as patch:
        emulated_tiles.use(tiles, patch)
        packed_int8.fewest_tile_rows.cache_clear()
        yield tiles
    packed_int8.fewest_tile_rows.cache_clear()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(tiles: emulated_tiles.EmulatedTiles, shape: tuple[int, int]) -> None:
    """Every bit is that of integers in NumPy and of the vectors, for tiles of rows, one or more, whole or not."""
    weight, scales, bias = weight_of(*shape)
    product, vectors = (PackedInt8Matmul(weight, scales, bias, torch.float32, one) for one in (1, NEVER))
    assert torch.equal(product._panels, vectors._panels)
    for num_rows in (0, 1, 2, 15, 16, 17, 31, 32, 33, 49, 65):
        rows = rows_of(num_rows, shape[1])
        actual = product(rows)
        assert torch.equal(actual, expected(rows, weight, scales, bias))
        assert torch.equal(actual, vectors(rows))
    assert ("tdpbusd" in tiles.executed) == (shape[1] > 48)


def test_the_largest_sums_do_not_overflow(tiles: emulated_tiles.EmulatedTiles) -> None:
    """As many inputs as may be, all at the ends of the range, in each combination of signs; rows are never -128."""
    weight = torch.tensor([[127], [-128]], dtype=torch.int8).expand(2, MOST_INPUTS)
    product = PackedInt8Matmul(weight, torch.ones(2), None, torch.float32, tiles_from=1)
    rows = torch.tensor([[127.0], [-127.0], [3e38], [-3e38]]).expand(4, MOST_INPUTS).contiguous()
    values, _ = product._quantize(rows)
    assert values.view(torch.uint8).unique().tolist() == [1, 255]
    sums = np.array([[127 * 127, -127 * 128], [-127 * 127, 127 * 128]], np.int64) * MOST_INPUTS
    assert product(rows)[:2].tolist() == sums.astype(np.float32).tolist()


def test_no_company_changes_bits(tiles: emulated_tiles.EmulatedTiles) -> None:
    """Numbers of rows that take the other kernel, shares of rows of several threads, blocks that overlap."""
    weight, scales, bias = weight_of(70, 144)
    product, rows = PackedInt8Matmul(weight, scales, bias, torch.float32), rows_of(150, 144)
    assert product._tiles_from == FEWEST_TILE_ROWS
    whole = expected(rows, weight, scales, bias)
    for begin, end in [(0, 1), (3, 18), (3, 19), (100, 133), (50, 150), (0, 150)]:
        tiles.executed.clear()
        assert torch.equal(product(rows[begin:end]), whole[begin:end])
        assert ("tdpbusd" in tiles.executed) == (end - begin >= FEWEST_TILE_ROWS)
    torch.set_num_threads(3)
    assert torch.equal(product(rows), whole)


def test_a_group_of_rows_after_another(tiles: emulated_tiles.EmulatedTiles) -> None:
    """More rows than share a chunk: the registers are configured anew for the rows that are left."""
    weight, scales, bias = weight_of(20, 80)
    rows = rows_of(packed._MATRIX_UNIT_GROUP_ROWS + 5, 80)
    product = PackedInt8Matmul(weight, scales, bias, torch.float32)
    torch.set_num_threads(1)
    assert torch.equal(product(rows), expected(rows, weight, scales, bias))


def test_a_broken_row_breaks_no_other(tiles: emulated_tiles.EmulatedTiles) -> None:
    """A row with NaN or an infinity is NaN."""
    weight, scales, bias = weight_of(70, 64)
    product, rows = PackedInt8Matmul(weight, scales, bias, torch.float32), rows_of(20, 64)
    whole = product(rows)
    rows[1, 5], rows[17, 63] = torch.nan, -torch.inf
    broken = product(rows)
    assert broken[[1, 17]].isnan().all()
    kept = [row for row in range(20) if row not in (1, 17)]
    assert torch.equal(broken[kept], whole[kept])


def test_kernels_are_compared_before_use(
    tiles: emulated_tiles.EmulatedTiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Matrix units that give one other bit are not used, one warning says so, and the numbers are right."""
    weight, scales, bias = weight_of(64, 128)
    rows = rows_of(40, 128)
    as_it_is = emulated_tiles.EmulatedTiles._tdpbusd

    def with_a_wrong_bit(self: emulated_tiles.EmulatedTiles, sums: int, first: int, second: int) -> None:
        as_it_is(self, sums, first, second)
        self._registers.tiles[sums, 8, 0] ^= 1

    monkeypatch.setattr(emulated_tiles.EmulatedTiles, "_tdpbusd", with_a_wrong_bit)
    packed_int8.fewest_tile_rows.cache_clear()
    with caplog.at_level(logging.WARNING, "pagedcore"):
        for _ in range(2):
            product = PackedInt8Matmul(weight, scales, bias, torch.float32)
            assert torch.equal(product(rows), expected(rows, weight, scales, bias))
    assert product._tiles_from == NEVER
    assert [record.message for record in caplog.records if "AMX" in record.message] == [
        "int8 products of torch.float32 rows differ between matrix units (AMX) and vectors (AVX-512 VNNI) on this "
        "processor; vectors compute all of them. Please report it."
    ]  # fmt: skip
    monkeypatch.setattr(packed_int8, "fewest_tile_rows", lambda dtype: NEVER)
    assert "not used" in packed_int8.describe_int8_products()
    monkeypatch.undo()
    assert tiles.executed["tdpbusd"]
    packed_int8.fewest_tile_rows.cache_clear()


def test_kv_is_trusted_whichever_kernel_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits are equal, so KV computed with matrix units for int8 is of use to a process that was refused them."""
    before = kv_format(ToyBackend(), 4)
    monkeypatch.setattr(packed_int8, "may_use_tiles", lambda form: True)
    assert kv_format(ToyBackend(), 4) == before


def test_the_processor_and_the_system_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The instruction set of the form is asked for, then the system."""
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(amx, "has_instructions", lambda *names: asked.append(names) is None)
    for is_permitted in (True, False):
        monkeypatch.setattr(amx, "_is_permitted", lambda is_permitted=is_permitted: is_permitted)
        assert amx.may_use_tiles(BYTE_MATRIX_UNITS) == is_permitted
    assert asked == [("amx-tile", "amx-int8")] * 2
    monkeypatch.setattr(amx, "has_instructions", lambda *names: "amx-int8" not in names)
    monkeypatch.setattr(amx, "_is_permitted", lambda: True)
    assert not amx.may_use_tiles(BYTE_MATRIX_UNITS)
    assert amx.may_use_tiles(amx.MATRIX_UNITS)


#: Compiles the kernel as a Sapphire Rapids would, without running it, and prints the machine code.
ASSEMBLY = """
import torch
from pagedcore_kernels.cpu.matmul import packed
from pagedcore_kernels.cpu.matmul.tiles import BYTE_MATRIX_UNITS

packed.compile_kernel = lambda function: __import__("numba").cfunc("void(voidptr)", error_model="numpy")(function)
print(packed.matmul_kernel(BYTE_MATRIX_UNITS, torch.bfloat16)._library.get_asm_str())
"""


@pytest.mark.slow
def test_machine_code_for_such_a_processor() -> None:
    """LLVM makes the tile instructions: sums in registers 0 to 3, rows in the next, signed weights in those left.

    In this notation the operands stand in reverse: weights (signed), rows (unsigned), sums.
    """
    made = on_another_processor("sapphirerapids", added=("amx-tile", "amx-int8"), program=ASSEMBLY)
    products = set(re.findall(r"tdpbusd\s+%tmm(\d), %tmm(\d), %tmm(\d)", made))
    two_tiles_of_rows = {(str(6 + j % 2), str(4 + i), str(2 * j + i)) for j in range(2) for i in range(2)}
    one_tile_of_rows = {(str(5 + j % 3), "4", str(j)) for j in range(4)}
    assert products == two_tiles_of_rows | one_tile_of_rows
    for pattern in (
        r"ldtilecfg\s+.*\(%", r"tilerelease", r"tilezero\s+%tmm[0-3]", r"tileloadd\s+.*, %tmm[0-7]",
        r"tilestored\s+%tmm[0-3], ", r"vpdpbusd\s",
    ):  # fmt: skip
        assert re.search(pattern, made), pattern
    assert not re.search(r"tilestored\s+%tmm[4-7]|tdpbssd|tdpbf16ps", made)
