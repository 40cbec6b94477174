"""Products of int8 rows with weights of 4 bits on matrix units: emulated tiles."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from kernels.test_matmul_grouped import rows_of, weight_of
from kernels.test_matmul_grouped_bytes import expected, product_of
from pagedcore_kernels.cpu.matmul import packed_grouped
from pagedcore_kernels.cpu.matmul.grouped_byte_blocks import CHUNK_UNITS
from pagedcore_kernels.cpu.matmul.grouped_tiles import UNIT
from pagedcore_kernels.cpu.matmul.packed_grouped import FEWEST_TILE_ROWS, NEVER, form_of_byte_groups
from pagedcore_kernels.cpu.matmul.tiles import GROUP_MATRIX_UNITS, HALF_MATRIX_UNITS
from support import emulated_tiles
from support.products import require_same_bits_in_any_company

pytestmark = pytest.mark.skipif(form_of_byte_groups(16) is None, reason="no such vectors")
CHUNK = CHUNK_UNITS * UNIT
#: Bits, kind of weight: outputs, inputs and groups. Groups of one tile, of chunks and a rest, and of half a tile.
CASES = [
    (4, "symmetric", (130, 128, 2)), (4, "zeros", (65, 96, 3)),
    pytest.param(4, "zeros", (63, 2 * (CHUNK + 64), 2), marks=pytest.mark.slow),
    (4, "least", (3, 2 * (CHUNK + 96), 2)), (8, "symmetric", (65, 2 * (CHUNK + 96), 2)),
]  # fmt: skip


@pytest.fixture(scope="module")
def machine() -> Iterator[emulated_tiles.EmulatedTiles]:
    """Tiles that all tests of this module share, with the kernels made of them."""
    tiles = emulated_tiles.EmulatedTiles()
    with pytest.MonkeyPatch.context() as patch:
        emulated_tiles.use_for_groups(tiles, patch)
        patch.setitem(FEWEST_TILE_ROWS, GROUP_MATRIX_UNITS, 2)
        patch.setitem(FEWEST_TILE_ROWS, HALF_MATRIX_UNITS, 2)
        packed_grouped.fewest_tile_rows.cache_clear()
        yield tiles
    packed_grouped.fewest_tile_rows.cache_clear()


@pytest.mark.parametrize(("bits", "kind", "shape"), CASES, ids=str)
def test_products(tiles: emulated_tiles.EmulatedTiles, bits: int, kind: str, shape: tuple[int, int, int]) -> None:
    """Every bit is that of integers in NumPy, for tiles of rows, one or more, whole or not."""
    weight = weight_of(bits, shape, kind)
    product = product_of(weight)
    for num_rows in (0, 1, 2, 17, 33, 65):
        tiles.executed.clear()
        rows = rows_of(num_rows, shape[1])
        assert torch.equal(product(rows), expected(rows, weight)), f"{num_rows} rows"
        assert ("tdpbssd" in tiles.executed) == (num_rows > 1)


def test_no_company_changes_bits(tiles: emulated_tiles.EmulatedTiles) -> None:
    """Any number of rows, at any place, on any number of threads."""
    require_same_bits_in_any_company(product_of(weight_of(4, (70, 192, 3), "symmetric")), rows_of(150, 192))


def test_kernels_are_compared_before_use(
    tiles: emulated_tiles.EmulatedTiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Matrix units that give one other bit are not used, one warning says so, and the numbers are right."""
    as_it_is = emulated_tiles.EmulatedTiles._tdpbssd

    def with_a_wrong_bit(self: emulated_tiles.EmulatedTiles, sums: int, first: int, second: int) -> None:
        as_it_is(self, sums, first, second)
        self._registers.tiles[sums, 0, 1] ^= 1

    monkeypatch.setattr(emulated_tiles.EmulatedTiles, "_tdpbssd", with_a_wrong_bit)
    packed_grouped.fewest_tile_rows.cache_clear()
    weight, rows = weight_of(4, (64, 128, 1), "symmetric"), rows_of(40, 128)
    with caplog.at_level(logging.WARNING, "pagedcore"):
        for _ in range(2):
            product = product_of(weight)
            assert torch.equal(product(rows), expected(rows, weight))
    assert product._tiles_from == NEVER
    assert [record.message for record in caplog.records if "AMX" in record.message] == [
        "w4a8 products of torch.float32 rows differ between matrix units (AMX) and vectors on this processor; vectors "
        "compute all of them. Please report it."
    ]  # fmt: skip
    assert "AMX gave other bits" in packed_grouped.describe_byte_groups()
    packed_grouped.fewest_tile_rows.cache_clear()
