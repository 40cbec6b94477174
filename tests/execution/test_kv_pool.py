from __future__ import annotations

import mmap
import sys

import psutil
import pytest
import torch

from pagedcore.errors import InvalidConfig
from pagedcore.execution import kv_pool
from pagedcore.execution.kv_pool import KVPool
from pagedcore_kernels.layout import KVLayout, LayerShape

LAYOUT = KVLayout(16, torch.float32, (LayerShape(2, 16, 16),) * 3)


def test_a_pool_has_the_bytes_it_says() -> None:
    """The tensor is the size of all blocks of the layout."""
    storage = KVPool(LAYOUT, 5)
    assert storage.pool.nbytes == storage.num_bytes == 5 * 3 * 2 * 2 * 16 * 16 * 4


@pytest.mark.parametrize("num_blocks", [0, -1, 2**50])
def test_pools_that_cannot_be_had_are_refused(num_blocks: int) -> None:
    """No block at all, and more than any machine has, end in a message with the number."""
    with pytest.raises(InvalidConfig, match=rf"got {num_blocks}"):
        KVPool(LAYOUT, num_blocks)


def test_host_memory_is_there_before_a_transfer_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole slab is populated when it is allocated; the pool, which may never be filled, is not."""
    populated: list[tuple[int, int]] = []
    monkeypatch.setattr(kv_pool, "populate", lambda memory: populated.append((memory.data_ptr(), memory.nbytes)))
    storage = KVPool(LAYOUT, 5)
    assert populated == []
    storage.allocate_host(7)
    slab = storage._require_host()
    assert populated == [(slab.data_ptr(), slab.nbytes)]


def test_a_copy_that_breaks_off_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is under way after it, so that a step that it breaks off can be undone at once: it is reported as failed,
    and the next one as usual."""
    pool = KVPool(LAYOUT, 4)
    pool.allocate_host(4)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kv_pool, "_copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.start_swap_out(1, [(0, 0)])
    pool.start_swap_out(2, [(0, 0)])
    assert pool.poll_transfers(wait=True) == [(1, False), (2, True)]


def test_a_pool_takes_its_memory_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """One huge page a call, each once, in the order of the blocks, whole pages of the blocks asked for only."""
    pieces: list[tuple[int, int]] = []
    monkeypatch.setattr(kv_pool, "populate", lambda memory: pieces.append((memory.data_ptr(), memory.nbytes)))
    storage = KVPool(LAYOUT, 1000)
    page, first = 2**21, storage.pool.data_ptr()
    blocks_of_3_pages = -(-3 * page // storage.block_bytes)
    assert [storage.populate(blocks_of_3_pages) for _ in range(4)] == [True, True, False, False]
    assert pieces == [(first + number * page, page) for number in range(3)]
    assert not storage.populate(10)
    assert len(pieces) == 3
    while storage.populate(10**9):
        pass
    assert len(pieces) == storage.num_bytes // page, "and nothing beyond the pool"


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux for memory")
def test_memory_that_was_taken_early_is_there() -> None:
    """The kernel counts the pages as this process's before anything is written; contents stay."""
    storage = KVPool(LAYOUT, 4000)
    # Why: torch's own memory may be some that another test used and freed.
    fresh = torch.frombuffer(mmap.mmap(-1, storage.num_bytes), dtype=storage.pool.dtype)
    storage.pool = fresh.view(storage.pool.shape)
    storage.pool[:100].fill_(7)
    before = psutil.Process().memory_info().rss
    while storage.populate(4000):
        pass
    assert psutil.Process().memory_info().rss - before > storage.num_bytes // 2
    assert bool((storage.pool[:100] == 7).all())


def test_a_closed_pool_takes_no_memory() -> None:
    """A call after the end touches nothing."""
    storage = KVPool(LAYOUT, 500)
    storage.close()
    storage.populate(500)
    assert storage.pool.numel() == 0
