"""Gather and scatter of scattered blocks, executed by the PTX interpreter, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.cuda.simulated_driver import SimulatedDriver
from pagedcore.errors import InternalError
from pagedcore_kernels.cuda.attention.staging import BlockStaging
from pagedcore_kernels.cuda.build.toolchain import missing_compiler_parts

pytestmark = pytest.mark.skipif(bool(missing_compiler_parts()), reason="needs pagedcore[cuda] to compile kernels")

SIZES = [16, 4096, 16384 + 3 * 4096 + 64]
"""One vector; part of a slice; a whole slice, and one that ends in the middle of its last round."""


def memory(num_blocks: int, block_bytes: int, seed: int) -> torch.Tensor:
    """Random blocks."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8))


@pytest.mark.parametrize("arch", [
    pytest.param("sm_80", marks=pytest.mark.kernels), "sm_90", pytest.param("sm_100", marks=pytest.mark.kernels),
])
@pytest.mark.parametrize("block_bytes", SIZES)
@pytest.mark.parametrize("max_ctas", [3, 100])
def test_blocks_travel_whole(arch: str, block_bytes: int, max_ctas: int) -> None:
    """A slab has the named blocks in their order, and scattered again they are where they were named; nothing else.

    Blocks may be gathered twice; a negative number moves nothing; surplus rows of the slab keep their bytes.
    """
    pool, slab = memory(9, block_bytes, 1), memory(7, block_bytes, 2)
    staging = BlockStaging(pool, SimulatedDriver(arch, check_races=True), max_ctas)
    wanted, before = slab.clone(), pool.clone()
    wanted[[0, 1, 3, 4]] = pool[[8, 2, 2, 0]]
    staging.gather([8, 2, -1, 2, 0], slab)
    assert torch.equal(slab, wanted)
    assert torch.equal(pool, before)
    before[[5, 7, 1]] = slab[[0, 1, 3]]
    staging.scatter(slab, [5, 7, -1, 1])
    assert torch.equal(pool, before)
    assert torch.equal(slab, wanted)


def test_one_launch_moves_many_blocks_on_few_ctas() -> None:
    """However many blocks there are, a transfer is one launch of at most so many CTAs; no block is no launch."""
    driver = SimulatedDriver()
    staging = BlockStaging(memory(40, 4096, 1), driver, 16)
    slab = torch.zeros(40, 4096, dtype=torch.uint8)
    staging.gather(np.arange(40)[::-1], slab)
    staging.scatter(slab, np.arange(40))
    staging.gather([], slab)
    assert driver.launched == [("gather", 16), ("scatter", 16)]
    assert torch.equal(staging._pool, memory(40, 4096, 1).flip(0))


def test_transfers_that_reach_beyond_memory_are_refused() -> None:
    """Numbers out of range, blocks written twice, and slabs of another shape never reach the GPU."""
    driver = SimulatedDriver()
    pool, slab = memory(4, 64, 1), torch.zeros(2, 64, dtype=torch.uint8)
    staging = BlockStaging(pool, driver)
    for block_ids, target in (([4], slab), ([0, 1, 2], slab), ([0], slab[:, :32]), ([0], slab.to(torch.int16)),
                              ([0], torch.zeros(2, 128, dtype=torch.uint8)[:, :64])):
        with pytest.raises(InternalError, match="block staging"):
            staging.gather(block_ids, target)
    with pytest.raises(InternalError, match="twice"):
        staging.scatter(slab, [1, 1])
    for bad in (pool[:, :32], pool.to(torch.int32), memory(2, 24, 0)):
        with pytest.raises(InternalError, match="KV pool"):
            BlockStaging(bad, driver)
    with pytest.raises(InternalError, match="max_ctas"):
        BlockStaging(pool, driver, 0)
    assert driver.launched == []
