"""KV blocks on a GPU: transfers that end later than they start, on a virtual one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from pagedcore.errors import InternalError
from pagedcore.execution.cuda_kv_pool import CudaKVPool, _runs
from pagedcore.execution.cuda_streams import EngineStream
from pagedcore_kernels.layout import LayerShape, TokenMajorLayout
from virtual_gpu.driver_api import DriverApi
from virtual_gpu.machine import Event, Machine
from virtual_gpu.torch_cuda import virtual_gpus

LAYOUT = TokenMajorLayout(4, torch.bfloat16, (LayerShape(1, 16, 16),))


@pytest.fixture(autouse=True, params=["batches", "single copies"])
def gpus(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """Where the pools are: GPUs whose driver has a call for many copies, and others."""
    with virtual_gpus() as machine:
        api = DriverApi(machine, 13000 if request.param == "batches" else 12040)
        APIS.append(api)
        with patch("pagedcore_kernels.cuda.driver._bindings", lambda: api):
            yield machine
        APIS.remove(api)


APIS: list[DriverApi] = []


def filled(num_blocks: int) -> CudaKVPool:
    """A storage whose block i is full of i, with as much host memory."""
    storage = CudaKVPool(LAYOUT, num_blocks, EngineStream(torch.device("cuda", 0)))
    storage.allocate_host(num_blocks)
    storage.pool.copy_(torch.arange(num_blocks, dtype=torch.uint8)[:, None].expand_as(storage.pool))
    return storage


def test_a_transfer_is_reported_once_its_bytes_are_there() -> None:
    """Before the end nothing is reported, at the end the transfer is, and then no more."""
    storage = filled(8)
    storage.start_swap_out(7, [(3, 5), (4, 6), (1, 0)])
    assert storage.poll_transfers(wait=False) == []
    while not (reported := storage.poll_transfers(wait=False)):
        pass
    assert reported == [(7, True)]
    assert storage.read_host_blocks([5, 6, 0])[:, 0].tolist() == [3, 4, 1]
    assert storage.poll_transfers(wait=True) == []


def test_waiting_ends_with_a_transfer() -> None:
    """With ``wait`` at least one is reported; blocks go out and come back as they were."""
    storage = filled(8)
    storage.start_swap_out(1, [(2, 2)])
    assert storage.poll_transfers(wait=True) == [(1, True)]
    storage.pool[2] = 99
    storage.start_swap_in(2, [(2, 7)])
    storage.start_swap_in(3, [(2, 6)])
    assert storage.poll_transfers(wait=True) == [(2, True), (3, True)]
    assert storage.read_blocks([7, 6, 2])[:, 0].tolist() == [2, 2, 99]


def test_a_wait_ends_without_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that does not end is not waited for longer than so many looks, and is reported when it does."""
    monkeypatch.setattr(Event, "questions_before_progress", 10_000)
    storage = filled(2)
    storage.start_swap_out(4, [(0, 1)])
    assert storage.poll_transfers(wait=True) == []
    storage._in_flight[0][1].synchronize()
    assert storage.poll_transfers(wait=False) == [(4, True)]


@pytest.mark.parametrize("is_broken_off", [False, True])
def test_a_pool_computes_in_order_with_its_callers_stream(is_broken_off: bool) -> None:
    """What the caller's stream was given before is copied, and what it is given afterwards sees the copies; whatever
    breaks a call off."""
    storage, side = filled(4), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        storage.pool[1].fill_(77)
        with pytest.raises(IndexError) if is_broken_off else nullcontext():
            storage.copy_blocks([(1, 2), (1, 4 if is_broken_off else 3)])
        assert storage.pool[2].tolist() == [77] * LAYOUT.block_bytes
        storage.pool[2].fill_(88)
        storage.start_swap_out(0, [(2, 0)])
        assert torch.cuda.current_stream() == side
    assert storage.poll_transfers(wait=True) == [(0, True)]
    assert storage.read_host_blocks([0])[0, 0] == 88


def test_blocks_are_read_and_written_whole() -> None:
    """What is written is what is read; other bytes than those of the blocks are refused."""
    storage = filled(4)
    contents = storage.read_blocks([3, 1])
    storage.write_blocks([0, 2], contents)
    assert storage.pool[:, -1].tolist() == [3, 1, 1, 3]
    with pytest.raises(InternalError, match="write"):
        storage.write_blocks([0], contents)


@pytest.mark.parametrize("pairs", [[], [(1, 1)], [(0, 4), (1, 5), (2, 6), (4, 7), (5, 9), (6, 10)]])
def test_neighbours_are_copied_together(pairs: list[tuple[int, int]]) -> None:
    """Runs of neighbours say the same pairs in fewer copies."""
    runs = list(_runs(pairs))
    assert [(here + i, there + i) for here, there, count in runs for i in range(count)] == pairs
    assert len(runs) <= len(pairs)
    assert len(pairs) < 6 or len(runs) == 3


SCATTERED = [(3, 5), (4, 6), (1, 0), (7, 2)]


def test_runs_are_one_call_where_the_driver_has_it(gpus: Machine) -> None:
    """Runs that are apart are one batch, and no copy of torch's; without the call they are a copy each. The host waits
    for neither."""
    storage, (api,) = filled(8), APIS
    torch.cuda.synchronize()
    gpus.counts.clear()
    storage.start_swap_out(1, SCATTERED)
    assert (gpus.counts["batches of copies"], gpus.counts["copies to the host"]) == (
        (1, 0) if api.version == 13000 else (0, 3))
    assert gpus.counts["waits"] == 0
    assert storage.poll_transfers(wait=True) == [(1, True)]
    assert storage.read_host_blocks([5, 6, 0, 2])[:, -1].tolist() == [3, 4, 1, 7]


def test_a_driver_that_says_no_is_asked_once() -> None:
    """One that has the call and does not support it is not asked again, and copies are made one by one."""
    storage, (api,) = filled(8), APIS
    api.copy_status = 801
    for number in range(2):
        storage.start_swap_out(number, SCATTERED)
    assert storage.poll_transfers(wait=True) == [(0, True), (1, True)]
    assert api.calls["cuMemcpyBatchAsync"] == (api.version == 13000)
    assert storage.read_host_blocks([2])[0, 0] == 7


@pytest.mark.parametrize("status", [1, 2, 400, 719])
def test_a_batch_that_fails_is_told(status: int) -> None:
    """The call raises with the driver's status, the transfer is not reported, and the next one is made."""
    storage, (api,) = filled(8), APIS
    if api.version < 13000:
        return
    api.copy_status = status
    with pytest.raises(InternalError, match=f"3 copies failed with status {status}"):
        storage.start_swap_out(0, SCATTERED)
    api.copy_status = 0
    storage.start_swap_out(1, SCATTERED)
    assert storage.poll_transfers(wait=True) == [(1, True)]


def test_what_was_queued_of_a_failed_transfer_comes_before_later_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a transfer that broke off are used again: what is computed in them afterwards stays."""
    storage, copies = filled(8), torch.Tensor.copy_
    storage.start_swap_out(0, [(6, 6), (7, 7), (2, 1)])
    assert storage.poll_transfers(wait=True) == [(0, True)]
    storage._batches, made = None, []

    def failing(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        made.append(self)
        if len(made) == 2:
            raise RuntimeError("no more")
        return copies(self, source, non_blocking=non_blocking)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", failing)
        with pytest.raises(RuntimeError, match="no more"):
            storage.start_swap_in(1, [(6, 0), (1, 4)])
    storage.pool[0] = 77
    assert storage.pool[0].tolist() == [77] * LAYOUT.block_bytes
    torch.cuda.synchronize()
    assert storage.pool[0].tolist() == [77] * LAYOUT.block_bytes


@pytest.mark.parametrize("pairs", [[(3, 5), (1, 8)], [(8, 1), (2, 5)], [(-1, 1), (2, 5)]])
def test_blocks_that_are_not_there_are_not_copied(pairs: list[tuple[int, int]]) -> None:
    """The driver would copy whatever memory it is told of."""
    storage, (api,) = filled(8), APIS
    if api.version == 13000:
        with pytest.raises(InternalError, match="of 8 and 8"):
            storage.start_swap_out(0, pairs)
    assert api.calls["cuMemcpyBatchAsync"] == 0


@pytest.mark.parametrize("is_released", [True, False])
def test_host_memory_is_pinned_until_the_last_copy_has_ended(
    is_released: bool, monkeypatch: pytest.MonkeyPatch, gpus: Machine
) -> None:
    """A pool that is closed, or collected, first ends its copies and then the pinning, once, and keeps no memory."""
    unpinned: list[bool] = []

    def are_over() -> bool:
        return not any(stream.computes for stream in gpus.streams)

    register = torch.cuda.cudart().cudaHostRegister  # type: ignore[no-untyped-call]
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=lambda address: unpinned.append(are_over())))
    storage = filled(2)
    storage.start_swap_out(0, [(0, 1)])
    slab = weakref.ref(storage._require_host())
    assert not are_over()
    if is_released:
        storage.close()
        assert unpinned == [True]
        assert slab() is None
    del storage
    gc.collect()
    assert unpinned == [True]
    assert slab() is None
