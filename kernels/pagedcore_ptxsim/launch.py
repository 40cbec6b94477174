"""Launch a kernel of a PTX text on NumPy arrays: the one function that callers need, and its report.

``launch`` copies the arrays to simulated device memory, runs every block, copies back what the kernel wrote, and
raises a ``PtxFault`` for what would be a bug on a GPU. Read next: ``scheduler`` for how threads advance.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from pagedcore_ptxsim.batch import WARP, Batch, Dim3, Geometry, Symbols
from pagedcore_ptxsim.counters import Counters, Work
from pagedcore_ptxsim.errors import LaunchError, UnsupportedPtx
from pagedcore_ptxsim.global_memory import GlobalMemory
from pagedcore_ptxsim.handovers import MAX_BLOCKS, HandoverDetector
from pagedcore_ptxsim.ops import MAKERS
from pagedcore_ptxsim.parser import parse
from pagedcore_ptxsim.scalar_types import Array, Index, numpy_type
from pagedcore_ptxsim.scheduler import Maker, Scheduler
from pagedcore_ptxsim.syntax import Instruction, Kernel, Parameter, Program, Variable

Argument = Array | np.generic | int | float
MAX_THREADS = 1024
_SHARED_ACCESSES = ("ld", "st", "atom", "red")


@dataclass(frozen=True)
class Report:
    """What a launch did.

    instructions: how many were issued, each for a group of threads at once. thread_instructions: summed over
    threads (an upper bound where predicates turn some off). barriers: block barriers passed, summed over blocks.
    counts: per PTX line, how often its instruction was issued; 0 for code that never ran.
    work: what each class of ``counters.CLASSES`` did, warp by warp, if the launch was counted; conflict_lines: per PTX
    line its bank conflicts.
    """

    kernel: str
    blocks: int
    instructions: int
    thread_instructions: int
    barriers: int
    counts: Mapping[int, int]
    opcodes: Mapping[str, int]
    work: Mapping[str, Work] = field(default_factory=dict)
    conflict_lines: Mapping[int, int] = field(default_factory=dict)

    @property
    def unexecuted(self) -> list[int]:
        """PTX lines of instructions that no thread reached."""
        return [line for line, count in self.counts.items() if not count]

    @property
    def coverage(self) -> float:
        """Share of the kernel's instructions that ran, 0 to 1."""
        return 1 - len(self.unexecuted) / max(len(self.counts), 1)


def launch(ptx: str, kernel_name: str | None, grid: int | Sequence[int], block: int | Sequence[int],
           args: Sequence[Argument], *, dynamic_shared_bytes: int = 0, check_races: bool = True,
           block_order: Sequence[int] | None = None, blocks_at_once: int = 64, max_steps: int = 20_000_000,
           count: bool = False) -> Report:
    """Run one kernel of ``ptx`` and return a report; arrays among ``args`` are changed in place.

    kernel_name: its name, any part of it that only it has, or None for the only kernel of the text.
    grid, block: an integer or up to three. args: one per kernel parameter; a NumPy array is passed as the device
    address of its first element (views of one array overlap on the device too, read-only arrays may not be stored
    to), an integer or float as itself. dynamic_shared_bytes: as at a CUDA launch.
    check_races: look for data races on shared memory, and for data that a block leaves to another in global memory
    without a hand-over. block_order: the order in which blocks start, a permutation of their numbers.
    blocks_at_once: how many advance together. max_steps: instructions after which a batch is given up.
    count: whether the report has ``work``.

    Raises ``LaunchError`` for wrong arguments, ``PtxSyntaxError`` and ``UnsupportedPtx`` for text it cannot run, and
    a ``PtxFault`` that quotes the PTX line for out-of-bounds and misaligned accesses, uninitialised shared reads,
    races, warp operations in divergent code, barriers that cannot open, and copies not waited for. After a fault the
    arrays keep what they held.
    """
    program = parse(ptx)
    kernel = find_kernel(program, kernel_name)
    geometry = _geometry(kernel, grid, block, dynamic_shared_bytes)
    order = _order(block_order, geometry.blocks)
    memory = GlobalMemory()
    symbols = _symbols(program, kernel, args, geometry, memory)
    if check_races and 1 < geometry.blocks <= MAX_BLOCKS:
        granule = _granule(kernel, "shared")
        memory.handovers = HandoverDetector(len(memory.bytes), geometry.blocks, geometry.threads, granule)
    tally = _Tally(kernel)
    counters = Counters(geometry) if count else None
    pool = _POOL if counters is None else _Pool(counters.makers(MAKERS))
    for blocks in np.array_split(order, max(-(-len(order) // blocks_at_once), 1)):
        scheduler = pool.take(kernel, geometry, symbols, memory, len(blocks), check_races)
        scheduler.run(blocks, max_steps)
        tally.add(scheduler)
        pool.give_back(scheduler, check_races)
    memory.copy_back()
    return tally.report(geometry.blocks, counters)


def unsupported(ptx: str, kernel_name: str | None) -> list[str]:
    """Return what the interpreter lacks for a kernel, an entry per instruction, without running it."""
    program = parse(ptx)
    kernel = find_kernel(program, kernel_name)
    geometry, memory = Geometry((1, 1, 1), (WARP, 1, 1), 0), GlobalMemory()
    try:
        symbols = _symbols(program, kernel, [0] * len(kernel.parameters), geometry, memory)
        return Scheduler(Batch(kernel, geometry, symbols, memory, 1, False), MAKERS).unsupported()
    except UnsupportedPtx as error:
        return [str(error)]


class _Pool:
    """Schedulers that ran before, with their decoded steps: decoding takes longer than running short kernels.

    Invariant: a scheduler is either here or with one launch, never both, so launches of several threads do not meet.
    A kernel that names module variables is not kept: its steps hold their addresses.
    """

    SIZE = 8
    MAX_THREADS = 8192

    def __init__(self, makers: Mapping[str, Maker]) -> None:
        self._makers = dict(makers)
        self._idle: OrderedDict[tuple[object, ...], Scheduler] = OrderedDict()
        self._lock = Lock()

    def take(self, kernel: Kernel, geometry: Geometry, symbols: Symbols, memory: GlobalMemory, blocks: int,
             check_races: bool) -> Scheduler:
        """A scheduler for so many blocks of a launch, used before or new."""
        with self._lock:
            found = self._idle.pop(_key(kernel, geometry, blocks * geometry.threads, check_races), None)
        if found is not None and not symbols.memory:
            found.batch.bind(geometry, symbols, memory)
            return found
        return Scheduler(Batch(kernel, geometry, symbols, memory, blocks, check_races), self._makers)

    def give_back(self, scheduler: Scheduler, check_races: bool) -> None:
        """Keep a scheduler whose launch went well."""
        batch = scheduler.batch
        if batch.symbols.memory or batch.count > self.MAX_THREADS:
            return
        batch.bind(batch.geometry, batch.symbols, GlobalMemory())
        with self._lock:
            self._idle[_key(batch.kernel, batch.geometry, batch.count, check_races)] = scheduler
            while len(self._idle) > self.SIZE:
                self._idle.popitem(last=False)


def _key(kernel: Kernel, geometry: Geometry, threads: int, check_races: bool) -> tuple[object, ...]:
    """What has to agree for a scheduler to serve another launch."""
    # Safety: a kept scheduler holds its kernel, so the id cannot be another kernel's while the entry exists.
    return id(kernel), geometry.block, geometry.dynamic_shared, threads, check_races


_POOL = _Pool(MAKERS)


class _Tally:
    """Sums what the schedulers of a launch counted."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.counts = np.zeros(len(kernel.code), np.int64)
        self.thread_instructions = self.barriers = 0

    def add(self, scheduler: Scheduler) -> None:
        self.counts += scheduler.counts
        self.thread_instructions += scheduler.thread_instructions
        self.barriers += scheduler.barriers

    def report(self, blocks: int, counters: Counters | None) -> Report:
        opcodes: Counter[str] = Counter()
        lines: Counter[int] = Counter()
        for instruction, count in zip(self.kernel.code, self.counts.tolist(), strict=True):
            lines[instruction.line] += count
            if count:
                opcodes[instruction.opcode] += count
        return Report(self.kernel.name, blocks, int(self.counts.sum()), self.thread_instructions, self.barriers,
                      dict(lines), dict(opcodes), counters.work() if counters else {},
                      +counters.conflict_lines if counters else {})


def find_kernel(program: Program, name: str | None) -> Kernel:
    """The kernel called ``name``, or the only one whose name contains it. Raises ``LaunchError``."""
    if name is not None and name in program.kernels:
        return program.kernels[name]
    found = [kernel for kernel in program.kernels.values() if name is None or name in kernel.name]
    if len(found) != 1:
        raise LaunchError(f"{len(found)} kernels match {name!r}; the text has {', '.join(program.kernels)}")
    return found[0]


def _dimensions(given: int | Sequence[int], what: str) -> Dim3:
    sizes = (given,) if isinstance(given, int | np.integer) else tuple(given)
    padded = (*(int(size) for size in sizes), 1, 1, 1)
    if not 1 <= len(sizes) <= 3 or min(padded) < 1:
        raise LaunchError(f"{what} is {given}; give one to three positive integers")
    return padded[0], padded[1], padded[2]


def _geometry(kernel: Kernel, grid: int | Sequence[int], block: int | Sequence[int], dynamic: int) -> Geometry:
    geometry = Geometry(_dimensions(grid, "grid"), _dimensions(block, "block"), int(dynamic))
    threads = geometry.real_threads
    limit = kernel.max_block or MAX_THREADS
    if threads > limit:
        raise LaunchError(f"a block of {threads} threads; {kernel.name} allows {limit}")
    if kernel.required_block and threads != kernel.required_block:
        raise LaunchError(f"a block of {threads} threads; {kernel.name} requires {kernel.required_block}")
    if dynamic < 0:
        raise LaunchError(f"dynamic_shared_bytes is {dynamic}; it cannot be negative")
    return geometry


def _order(given: Sequence[int] | None, blocks: int) -> Index:
    order = np.arange(blocks) if given is None else np.asarray(given, np.intp)
    if len(order) != blocks or not np.array_equal(np.sort(order), np.arange(blocks)):
        raise LaunchError(f"block_order has to hold every number from 0 to {blocks - 1} once")
    return order


def _symbols(program: Program, kernel: Kernel, args: Sequence[Argument], geometry: Geometry,
             memory: GlobalMemory) -> Symbols:
    if len(args) != len(kernel.parameters):
        raise LaunchError(f"{len(args)} arguments; {kernel.name} has {len(kernel.parameters)} parameters: "
                          + ", ".join(f"{i} .{parameter.type}" for i, parameter in enumerate(kernel.parameters)))
    variables = [*program.variables, *kernel.variables]
    stored = [v for v in variables if v.space in ("global", "const") and v.size and v.name in kernel.names]
    arrays = [(arg, f"argument {i}") for i, arg in enumerate(args) if isinstance(arg, np.ndarray)]
    addresses = memory.map([*arrays, *((_content(v), f"variable {v.name}") for v in stored)])
    of_argument = iter(addresses)
    values = {parameter.name: _parameter_bytes(i, parameter, next(of_argument) if isinstance(arg, np.ndarray) else arg)
              for i, (parameter, arg) in enumerate(zip(kernel.parameters, args, strict=True))}
    shared, size = _lay_out([v for v in variables if v.space == "shared"], geometry.dynamic_shared)
    local, local_size = _lay_out([v for v in variables if v.space == "local"], 0)
    return Symbols(shared, {v.name: address for v, address in zip(stored, of_argument, strict=True)}, values, local,
                   size, local_size, _granule(kernel, "global"))


def _content(variable: Variable) -> Array:
    content = np.frombuffer(variable.data.ljust(variable.size, b"\0"), np.uint8).copy()
    content.flags.writeable = variable.space == "global"
    return content


def _lay_out(variables: list[Variable], dynamic: int) -> tuple[dict[str, int], int]:
    """Offsets of variables in the order of the text, and the size of all; dynamic arrays lie after the static ones."""
    offsets, top = {}, 0
    for variable in variables:
        if variable.size:
            top = -(-top // variable.align) * variable.align
            offsets[variable.name] = top
            top += variable.size
    dynamic_names = [variable for variable in variables if not variable.size]
    if dynamic_names:
        align = max(16, *(variable.align for variable in dynamic_names))
        top = -(-top // align) * align
        offsets |= {variable.name: top for variable in dynamic_names}
    return offsets, top + dynamic


def _parameter_bytes(position: int, parameter: Parameter, value: Argument | bytes) -> bytes:
    """A parameter as the bytes the kernel loads."""
    dtype = numpy_type(parameter.type)
    if isinstance(value, bool | np.bool_) or (dtype.kind != "f" and isinstance(value, int | np.integer)):
        number = int(value)
        bits = 8 * dtype.itemsize
        if not -(1 << bits - 1) <= number < 1 << bits:
            raise LaunchError(f"argument {position} is {number}, which does not fit its {bits} bits")
        return (number & ((1 << bits) - 1)).to_bytes(dtype.itemsize, "little")
    if isinstance(value, int | float | np.number) and parameter.type in ("f32", "f64", "b32", "b64"):
        return np.array(value, f"f{dtype.itemsize}").tobytes()
    raise LaunchError(f"argument {position} is a {type(value).__name__}; the parameter is .{parameter.type}: "
                      "pass an array, an integer or a float")


def _granule(kernel: Kernel, other: str) -> int:
    """Bytes of the narrowest access that may be to shared or global memory, whichever is not the ``other``."""
    widths = [_width(instruction) for instruction in kernel.code if instruction.name in _SHARED_ACCESSES
              and not instruction.has(other, "param", "const", "local")]
    return min([4, *widths])


def _width(instruction: Instruction) -> int:
    return numpy_type(instruction.types[-1]).itemsize if instruction.types else 4
