"""Two GPUs without hardware: queues that run as late as CUDA's rules allow, graphs, a virtual clock and counters.

Owns what has happened and when. An operation is queued on a stream and runs when somebody waits for it, so a missing
wait, memory that is used again too early and a value that is read too soon show as wrong numbers. ``tensors.py`` makes
operations out of what torch is asked for, ``memory.py`` has the memory, ``driver_api.py`` launches kernels.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

CAPTURING = "CUDA error: operation not permitted when stream is capturing"
ISOLATED = "CUDA error: dependency created on uncaptured work in another stream"


@dataclass
class Item:
    """One operation in a queue: what it does and the name that its cost goes by."""

    run: Callable[[], object]
    name: str


@dataclass
class Wait:
    """The point of another stream that has to be reached first."""

    stream: Stream
    position: int


class Capture:
    """What is recorded between two calls: operations, in the order in which they were given."""

    def __init__(self, origin: Stream, pool: object) -> None:
        self.pool, self.items, self.error = pool, list[Item](), ""
        self.origin, self.members = origin, {origin}
        self.unjoined: set[Stream] = set()

    def refuse(self) -> torch.AcceleratorError:
        """Note that something was done that cannot be recorded; the recording is void."""
        self.error = CAPTURING
        return torch.AcceleratorError(CAPTURING)


class Machine:
    """The GPUs of one test.

    Args:
        is_late: whether operations wait in their queues; without, each runs as soon as it is there.
        memory_bytes: of each GPU.
        device_seconds: what an operation of a name takes on a GPU.
        host_seconds: what it takes the host to queue one.
    """

    num_devices = 2
    capability = 9, 0
    num_sms = 8
    shared_bytes = 232448

    def __init__(
        self, *, is_late: bool = True, memory_bytes: int = 2**33,
        device_seconds: Callable[[str], float] = lambda name: 10e-6, host_seconds: float = 5e-6,
    ) -> None:
        self.is_late, self.memory_bytes = is_late, memory_bytes
        self.device_seconds, self.host_seconds = device_seconds, host_seconds
        self.now = 0.0
        """The host's time in seconds: it grows by what the host queues and by what it waits for."""
        self.counts: Counter[str] = Counter()
        self.trace: list[str] | None = None
        """The names of all that is queued or recorded, once somebody puts a list here; of a graph, that it is launched.
        """
        self.lock = threading.RLock()
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self.captures: list[tuple[Capture, str, int]] = []
        self.pinned: list[tuple[int, int]] = []
        self.failure: str | None = None
        """The error that the context is dead of."""
        self._local = threading.local()
        self._handles = iter(range(0x1000, 1 << 30, 16))
        self._defaults = [Stream(self, index, handle=0) for index in range(self.num_devices)]

    # A thread's device and streams.

    @property
    def device(self) -> int:
        """The calling thread's current GPU."""
        return getattr(self._local, "device", 0)

    @device.setter
    def device(self, index: int) -> None:
        if not 0 <= index < self.num_devices:
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        self._local.device, self._local.has_context = index, True

    @property
    def has_context(self) -> bool:
        """Whether the calling thread has a context, which torch makes when it first needs one."""
        return getattr(self._local, "has_context", False)

    def index_of(self, device: Any) -> int:
        """The number of a device as torch takes it; ``None`` and "cuda" are the current one."""
        if device is None:
            return self.device
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return self.device if index is None else index

    def new_handle(self) -> int:
        """What names a stream that is not a default one."""
        return next(self._handles)

    def stream(self, index: int | None = None) -> Stream:
        """The calling thread's current stream of a GPU."""
        index = self.device if index is None else index
        return getattr(self._local, "streams", {}).get(index) or self._defaults[index]

    def default_stream(self, index: int) -> Stream:
        return self._defaults[index]

    def set_stream(self, stream: Stream) -> None:
        self._local.__dict__.setdefault("streams", {})[stream.index] = stream

    def enter(self, stream: Stream) -> None:
        """Make a stream and its GPU current until ``leave``."""
        self._local.__dict__.setdefault("before", []).append((self.device, self.stream(stream.index)))
        self.device = stream.index
        self.set_stream(stream)

    def leave(self) -> None:
        """Make current what was before the last ``enter``."""
        device, stream = self._local.before.pop()
        self.set_stream(stream)
        self.device = device

    def push(self, index: int) -> None:
        """Make a GPU's context current until ``pop``."""
        self._local.__dict__.setdefault("pushed", []).append((self.device, self.has_context))
        self.device = index

    def pop(self) -> None:
        """Make current what was before the last ``push``, which may be no context."""
        self._local.device, self._local.has_context = self._local.pushed.pop()

    def stream_of_handle(self, handle: int, index: int) -> Stream | None:
        """The stream that a driver's handle names on a GPU."""
        if handle == 0:
            return self._defaults[index]
        return next((one for one in self.streams if one.cuda_stream == handle and one.index == index), None)

    # Waiting, and what forbids it.

    def require_alive(self) -> None:
        if self.failure is not None:
            raise torch.AcceleratorError(self.failure)

    def die(self, message: str, cause: BaseException | None = None) -> None:
        """The context is of no use from now on, as after an illegal address."""
        self.failure = self.failure or f"CUDA error: {message}"
        raise torch.AcceleratorError(self.failure) from cause

    def require_unrecorded(self) -> None:
        """Refuse what may not happen while the calling thread, or with mode "global" any thread, records."""
        thread = threading.get_ident()
        for capture, mode, owner in self.captures:
            if mode == "global" or owner == thread:
                raise capture.refuse()

    def wait(self, stream: Stream, position: int, time: float) -> None:
        """Let the host wait until a stream has got somewhere."""
        self.require_alive()
        with self.lock:
            stream.run_to(position)
            self.now = max(self.now, time)
        self.require_alive()

    def synchronize(self, index: int) -> None:
        """Wait for all streams of a GPU."""
        self.require_unrecorded()
        self.counts["waits"] += 1
        for stream in sorted((one for one in self.streams if one.index == index), key=lambda one: one.cuda_stream):
            self.wait(stream, stream.put, stream.ready)

    @contextmanager
    def record(self, graph: Graph, stream: Stream, pool: object, mode: str) -> Iterator[None]:
        """Record what this block queues on a stream, and on streams that wait for it, into a graph."""
        self.require_alive()
        if stream.cuda_stream == 0:
            raise torch.AcceleratorError(CAPTURING)
        self.synchronize(stream.index)
        self.counts["graphs recorded"] += 1
        capture = stream.capture = Capture(stream, object() if pool is None else pool)
        self.captures.append((capture, mode, threading.get_ident()))
        try:
            with stream:
                yield
        finally:
            self.captures = [one for one in self.captures if one[0] is not capture]
            for member in capture.members:
                member.capture = None
        if capture.error:
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")
        if capture.unjoined:
            raise torch.AcceleratorError("CUDA error: capture sequence contains a fork that was not joined")
        graph.items, graph.index, graph.pool_handle = capture.items, stream.index, capture.pool


class Stream:
    """A queue of operations; has the members of ``torch.cuda.Stream``."""

    def __init__(self, machine: Machine, index: int, handle: int) -> None:
        self.machine, self.index, self.cuda_stream = machine, index, handle
        self.device = torch.device("cuda", index)
        self.queue: deque[Item | Wait] = deque()
        self.put = self.done = self.launched = 0
        self.ready = 0.0
        """When all that was queued so far is over, on the virtual clock."""
        self.capture: Capture | None = None
        machine.streams.add(self)

    @property
    def computes(self) -> bool:
        """Whether an operation is queued; waits for other streams are none."""
        return any(isinstance(one, Item) for one in self.queue)

    def enqueue(self, item: Item) -> None:
        """Queue an operation, or record it."""
        machine = self.machine
        machine.require_alive()
        with machine.lock:
            machine.now += machine.host_seconds
            if machine.trace is not None:
                machine.trace.append(item.name)
            if self.capture is not None:
                self.capture.items.append(item)
                if self is not self.capture.origin:
                    self.capture.unjoined.add(self)
                return
            self.launch(item)

    def launch(self, item: Item) -> None:
        """Put an operation behind the others, at no cost for the host."""
        with self.machine.lock:
            self.ready = max(self.ready, self.machine.now) + self.machine.device_seconds(item.name)
            self.queue.append(item)
            self.put += 1
            self.launched += 1
            if not self.machine.is_late:
                self.run_to(self.put)

    def run_to(self, position: int) -> None:
        """Run what is queued up to a position, and what that waits for."""
        while self.done < position and self.machine.failure is None:
            item = self.queue.popleft()
            self.done += 1
            if isinstance(item, Wait):
                item.stream.run_to(item.position)
                continue
            try:
                with torch.inference_mode():
                    item.run()
            except Exception as error:
                what = getattr(error, "cuda_error", "device-side assert triggered")
                self.machine.die(f"{what} ({item.name}: {error})", error)

    def synchronize(self) -> None:
        if self.capture is not None:
            raise self.capture.refuse()
        self.machine.require_unrecorded()
        self.machine.counts["waits"] += 1
        self.machine.wait(self, self.put, self.ready)

    def query(self) -> bool:
        if self.capture is not None:
            raise self.capture.refuse()
        return self.done >= self.put

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        self.machine.require_alive()
        if event.stream is None:
            return
        if event.capture is not None:
            self._join(event.capture, event.stream)
        elif self.capture is not None:
            self.capture.error = ISOLATED
            raise torch.AcceleratorError(ISOLATED)
        else:
            with self.machine.lock:
                self.queue.append(Wait(event.stream, event.position))
                self.put += 1
                self.ready = max(self.ready, event.time)

    def _join(self, capture: Capture, other: Stream) -> None:
        """Take part in a recording, or take back what took part in it."""
        if capture.error or other.capture is not capture:
            raise torch.AcceleratorError(ISOLATED)
        capture.unjoined.discard(other)
        if self.capture is None:
            self.capture = capture
            capture.members.add(self)
            capture.unjoined.add(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self.machine.enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.machine.leave()


class Event:
    """A point of a stream; has the members of ``torch.cuda.Event``."""

    questions_before_progress = 2
    """How often an event says that it was not reached, while nobody waits for it."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.is_timed = enable_timing
        self.stream: Stream | None = None
        self.capture: Capture | None = None
        self.position = self.questions = 0
        self.time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or in_use().stream()
        stream.machine.require_alive()
        self.stream, self.position, self.questions = stream, stream.put, 0
        self.time, self.capture = max(stream.ready, stream.machine.now), stream.capture

    def wait(self, stream: Stream | None = None) -> None:
        (stream or in_use().stream()).wait_event(self)

    def query(self) -> bool:
        if self.stream is None:
            return True
        if self.capture is not None:
            raise self.capture.refuse()
        machine = self.stream.machine
        machine.require_unrecorded()
        machine.require_alive()
        machine.counts["event queries"] += 1
        self.questions += 1
        if self.stream.done < self.position and self.questions > self.questions_before_progress:
            machine.wait(self.stream, self.position, self.time)
            return True
        return self.stream.done >= self.position

    def synchronize(self) -> None:
        if self.stream is None:
            return
        if self.capture is not None:
            raise self.capture.refuse()
        self.stream.machine.require_unrecorded()
        self.stream.machine.counts["waits"] += 1
        self.stream.machine.wait(self.stream, self.position, self.time)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds on the virtual clock until another event."""
        for event in (self, end):
            if not event.is_timed or event.stream is None:
                raise ValueError("Both events must be recorded, with enable_timing=True")
            if event.stream.done < event.position:
                raise torch.AcceleratorError("CUDA error: device not ready")
        return (end.time - self.time) * 1e3


class Graph:
    """Operations that are queued together; has the members of ``torch.cuda.CUDAGraph``."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.items: list[Item] = []
        self.index, self.pool_handle = 0, None

    def replay(self) -> None:
        machine = in_use()
        machine.require_alive()
        machine.counts["graph launches"] += 1
        if machine.trace is not None:
            machine.trace.append("graph")
        machine.now += machine.host_seconds
        stream = machine.stream(self.index)
        if stream.capture is not None:
            raise stream.capture.refuse()
        for item in self.items:
            stream.launch(item)

    def pool(self) -> object:
        return self.pool_handle

    def reset(self) -> None:
        self.items = []


MACHINES: list[Machine] = []
"""The machine that ``torch.cuda`` means now, if there is one."""


def in_use() -> Machine:
    """The machine that ``torch.cuda`` means now.

    Raises:
        AssertionError: there is none; torch says so too.
    """
    if not MACHINES:
        raise AssertionError("Torch not compiled with CUDA enabled")
    return MACHINES[-1]
