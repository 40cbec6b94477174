"""The rules of the virtual GPUs, each as CUDA has it: order, memory, devices, recording, time and errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from virtual_gpu.machine import Machine
from virtual_gpu.torch_cuda import virtual_gpus


def ones(*size: int, device: str = "cuda") -> torch.Tensor:
    return torch.ones(*size, device=device)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_copy_reads_pinned_memory_late_and_other_memory_at_once(is_pinned: bool, gpus: Machine) -> None:
    """What the host writes after it has started a copy arrives, if the memory is pinned and the copy does not block."""
    host = torch.empty(4, pin_memory=is_pinned).fill_(1.0)
    there, waited = host.to("cuda", non_blocking=True), torch.zeros(4, device="cuda")
    assert gpus.counts["waits"] == 0
    host.fill_(2.0)
    assert there.tolist() == [2.0 if is_pinned else 1.0] * 4
    waited.copy_(host)
    host.fill_(3.0)
    assert waited.tolist() == [2.0] * 4
    assert gpus.counts["pageable copies to the device"] == 2 * (not is_pinned)


def test_a_copy_to_the_host_is_there_when_somebody_waited(gpus: Machine) -> None:
    """Into pinned memory nothing waits, into other memory the copy does."""
    values, pinned = ones(3) + 1, torch.empty(3, pin_memory=True).fill_(0.0)
    pinned.copy_(values, non_blocking=True)
    assert pinned.tolist() == [0.0] * 3
    assert gpus.counts["waits"] == 0
    torch.cuda.current_stream().synchronize()
    assert pinned.tolist() == [2.0] * 3
    assert values.cpu().tolist() == [2.0] * 3
    assert gpus.counts["waits"] == 2


@pytest.mark.parametrize("waits", [True, False])
def test_streams_wait_for_each_other_only_if_they_are_told_to(waits: bool, gpus: Machine) -> None:
    """Without an edge, what one stream computes is not there for another."""
    values, side = torch.zeros(2, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    values += 3
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        seen = values * 1
        assert seen.tolist() == [3.0 if waits else 0.0] * 2


def test_a_stream_runs_ahead_of_one_that_nobody_waits_for(gpus: Machine) -> None:
    """A copy on its own stream reads what later work on the first stream has written, if that is not held back."""
    values, side, saved = ones(2), torch.cuda.Stream(), torch.empty(2, pin_memory=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        saved.copy_(values, non_blocking=True)
    values.zero_()
    torch.cuda.current_stream().synchronize()
    side.synchronize()
    assert saved.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("says_so", [True, False])
def test_freed_memory_is_given_out_again_at_once(says_so: bool, gpus: Machine) -> None:
    """A tensor that a second stream reads is overwritten when its memory is used again, unless the stream is named."""
    values, side = ones(1000), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        seen = values + 0
    if says_so:
        values.record_stream(side)
    address = values.data_ptr()
    del values
    other = torch.zeros(1000, device="cuda")
    assert (other.data_ptr() == address) != says_so
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(side):
        assert (seen.tolist()[0] == 1.0) == says_so


def test_new_memory_is_not_zero(gpus: Machine) -> None:
    """What was not written has no value that anything could be right by."""
    assert torch.empty(4, dtype=torch.uint8, device="cuda").tolist() == [0xA5] * 4


def test_memory_has_an_end() -> None:
    """Beyond it torch's error is raised; freed memory is had again, but stays the process's."""
    with virtual_gpus(Machine(memory_bytes=1 << 20)):
        first = torch.zeros(3 << 18, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            torch.zeros(2 << 18, dtype=torch.uint8, device="cuda")
        del first
        second = torch.zeros(2 << 18, dtype=torch.uint8, device="cuda")
        assert second.tolist()[-1] == 0
        assert torch.cuda.mem_get_info() == (1 << 18, 1 << 20)


@pytest.mark.parametrize(("compute", "message"), [
    (lambda: ones(2) + ones(2, device="cuda:1"), "cuda:0 and cuda:1"),
    (lambda: torch.cat([ones(2), torch.ones(2)]), "cpu and cuda:0"),
    (lambda: torch.ones(2).add_(ones(2)), "cpu and cuda:0"),
    (lambda: torch.nn.functional.embedding(torch.tensor([0]), ones(2, 2)), "cpu and cuda:0"),
])
def test_tensors_of_several_devices_do_not_go_together(
    compute: Callable[[], torch.Tensor], message: str, gpus: Machine
) -> None:
    """As on hardware, an operation that mixes devices is an error, which names them."""
    with pytest.raises(RuntimeError, match=f"at least two devices, {message}"):
        compute()


def test_numbers_and_indices_of_the_host_go_with_a_gpu(gpus: Machine) -> None:
    """A tensor without dimensions is a number, and torch copies indices itself."""
    assert (ones(2) * torch.tensor(3.0)).tolist() == [3.0, 3.0]
    assert torch.arange(5, device="cuda")[torch.tensor([4, 0])].tolist() == [4, 0]
    assert ones(2, device="cuda:1").to("cuda:0").device == torch.device("cuda:0")
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        ones(2).numpy()


def late_event() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.default_stream())
    return event


@pytest.mark.parametrize("forbidden", [
    lambda one: one.cpu(), lambda one: one.sum().item(), lambda one: one[one > 0], lambda one: one.copy_(torch.ones(2)),
    lambda one: torch.cuda.synchronize(), lambda one: torch.cuda.current_stream().synchronize(),
    lambda one: torch.cuda.default_stream().synchronize(), lambda one: late_event().query(),
    lambda one: torch.cuda.current_stream().wait_stream(torch.cuda.default_stream()),
    lambda one: torch.cuda.Stream().wait_stream(torch.cuda.current_stream()),
], ids=["to-host", "item", "mask", "pageable", "device", "own-stream", "other-stream", "event", "uncaptured", "fork"])
def test_what_cannot_be_recorded_is_refused(forbidden: Callable[[torch.Tensor], object], gpus: Machine) -> None:
    """Waits, copies from pageable memory and edges to what is outside void a recording."""
    one = ones(2)
    with pytest.raises(torch.AcceleratorError, match="captur"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        forbidden(one)
    assert (one + 1).tolist() == [2.0, 2.0]


def test_the_default_stream_is_not_recorded(gpus: Machine) -> None:
    """A recording needs a stream of its own."""
    with pytest.raises(torch.AcceleratorError, match="capturing"), torch.cuda.graph(
        torch.cuda.CUDAGraph(), stream=torch.cuda.default_stream()
    ):
        pass


def test_a_recording_computes_nothing_until_it_is_launched(gpus: Machine) -> None:
    """Each launch reads the same addresses anew and allocates nothing; its memory is nobody else's."""
    graph, numbers, side = torch.cuda.CUDAGraph(), torch.zeros(3, device="cuda"), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            doubled = (numbers + 0.5) * 2
        torch.cuda.current_stream().wait_stream(side)
        result = doubled - 1
    address = doubled.data_ptr()
    del doubled
    others = [torch.zeros(3, device="cuda") for _ in range(5)]
    assert address not in [one.data_ptr() for one in others]
    before = gpus.counts["allocations"]
    for value in (1.0, 4.0):
        numbers.fill_(value)
        graph.replay()
        assert result.tolist() == [value * 2] * 3
    assert (gpus.counts["allocations"], gpus.counts["graph launches"]) == (before, 2)


def test_host_and_gpu_work_at_the_same_time() -> None:
    """The clock takes the longer of the two, for streams beside each other too; events measure a stream."""
    with virtual_gpus(Machine(device_seconds=lambda name: 1.0, host_seconds=0.25)) as gpus:
        one, side, events = ones(2), torch.cuda.Stream(), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize()
        begin = gpus.now
        events[0].record()
        for _ in range(8):
            one.add_(1)
        events[1].record()
        with torch.cuda.stream(side):
            for _ in range(4):
                one.mul_(1)
        with pytest.raises(torch.AcceleratorError, match="not ready"):
            events[0].elapsed_time(events[1])
        assert gpus.now - begin == 12 * 0.25
        torch.cuda.synchronize()
        assert events[0].elapsed_time(events[1]) == pytest.approx(8250.0, abs=300.0)
        assert gpus.now - begin == pytest.approx(8.25, abs=0.3)


def test_an_error_on_the_gpu_is_its_end(gpus: Machine) -> None:
    """It shows when somebody waits, and from then on everything fails with it."""
    wrong = ones(2)[torch.tensor([7], device="cuda")]
    for call in (wrong.cpu, lambda: ones(1), torch.cuda.synchronize, torch.cuda.Event().record):
        with pytest.raises(torch.AcceleratorError, match="device-side assert"):
            call()


def test_each_thread_has_its_own_device_and_stream(gpus: Machine) -> None:
    """They begin with the first GPU's default stream, and without a context."""
    found, mine = [], torch.cuda.Stream("cuda:1")

    def look() -> None:
        found.extend([gpus.has_context, torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream])

    with torch.cuda.stream(mine):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert (torch.cuda.current_device(), torch.cuda.current_stream()) == (1, mine)
    assert found == [False, 0, 0]
    assert torch.cuda.current_device() == 0


def test_torch_is_as_it_was() -> None:
    """Afterwards torch has no CUDA again, and makes modules as before."""
    names = torch.cuda.Stream, torch.empty, torch.Tensor.is_pinned, torch.version.cuda
    with virtual_gpus():
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 2
    assert names == (torch.cuda.Stream, torch.empty, torch.Tensor.is_pinned, torch.version.cuda)
    with pytest.raises(AssertionError, match="not compiled with CUDA"):
        torch.empty(1, device="cuda")
    with torch.device("meta"):
        assert torch.nn.Linear(2, 2).weight.device.type == "meta"


E4M3, E5M2, BF16, F32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32


def scaled_product(
    *, rows: int = 3, depth: int = 32, columns: int = 16, formats: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    scales: tuple[tuple[int, ...], tuple[int, ...]] | None = None, scale_dtype: torch.dtype = F32,
    turned: bool = True, out_dtype: torch.dtype = BF16, bias_dtype: torch.dtype | None = None, **more: Any,
) -> torch.Tensor:
    """A product of FP8 on a GPU, as torch has it."""
    first = torch.ones(rows, depth, device="cuda").to(formats[0])
    second = torch.ones(columns, depth, device="cuda").to(formats[1]).t()
    second = second if turned else second.contiguous()
    scale_a, scale_b = (torch.full(one, 0.5, device="cuda", dtype=scale_dtype)
                        for one in scales or ((rows, 1), (1, columns)))
    bias = None if bias_dtype is None else torch.ones(columns, device="cuda", dtype=bias_dtype)
    return torch._scaled_mm(first, second, scale_a, scale_b, bias=bias, out_dtype=out_dtype, **more)


@pytest.mark.parametrize("more", [
    {}, {"bias_dtype": BF16}, {"scales": ((1,), (1,))}, {"rows": 1, "use_fast_accum": True},
    {"formats": (E5M2, E4M3)}, {"bias_dtype": torch.float16, "out_dtype": torch.float16},
])
def test_a_scaled_product_is_one_operation(more: dict[str, Any], gpus: Machine) -> None:
    """It is queued like others, can be recorded, and has a scale for each row and column, or one for all."""
    before, graph = gpus.counts["waits"], torch.cuda.CUDAGraph()
    gpus.trace = []
    found = scaled_product(**more)
    assert gpus.trace.count("aten::_scaled_mm") == 1
    gpus.trace = None
    assert gpus.counts["waits"] == before
    assert found.tolist() == [[32 / 4 + ("bias_dtype" in more)] * 16] * len(found)
    values, scale = torch.ones(16, 16, device="cuda").to(E4M3), torch.ones(1, device="cuda")
    with torch.cuda.graph(graph):
        recorded = torch._scaled_mm(values, values.t(), scale, scale, out_dtype=BF16)
    graph.replay()
    assert recorded[0].tolist() == [16.0] * 16


@pytest.mark.parametrize(("capability", "more", "said"), [
    ((8, 6), {}, "compute capability >= 9.0 or 8.9"), ((9, 0), {"depth": 24}, "mat1 to be divisible by 16"),
    ((8, 9), {"columns": 24}, "must be divisible by 16"), ((9, 0), {"formats": (E5M2, E5M2)}, "one of them e4m3"),
    ((9, 0), {"formats": (BF16, E4M3)}, "to be Float8"), ((10, 0), {"turned": False}, "row-major and column-major"),
    ((9, 0), {"scales": ((3,), (16,))}, "scaling conf"), ((9, 0), {"scales": ((1,), (1, 16))}, "scaling conf"),
    ((9, 0), {"scale_dtype": BF16}, "scaling conf"), ((9, 0), {"out_dtype": E4M3}, "high precision output"),
    ((9, 0), {"bias_dtype": torch.float16}, "Bias must"),
    ((9, 0), {"bias_dtype": F32, "out_dtype": F32}, "Bias must"),
])
def test_a_scaled_product_has_rules(
    capability: tuple[int, int], more: dict[str, Any], said: str, gpus: Machine
) -> None:
    """Other GPUs, formats, sizes, layouts, scales and biases are errors, as they are where hardware is."""
    gpus.capability = capability
    with pytest.raises(RuntimeError, match=said):
        scaled_product(**more)
