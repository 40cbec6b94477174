"""Device memory: one address space for all buffers of a launch, with gaps between them so that a stray access faults.

Owns the mapping between NumPy arrays and device addresses. Arrays that overlap in host memory (two views of one
pool, the same array twice) overlap on the device in the same way. A strided view makes exactly its own elements
accessible. A read-only array may be read only. Never touches the caller's arrays except in ``copy_back``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided

from pagedcore_ptxsim.errors import LaunchError, MemoryFault
from pagedcore_ptxsim.handovers import HandoverDetector
from pagedcore_ptxsim.scalar_types import UNSIGNED, Array, Index

BASE = 0x7F0000000000
"""Address of the first byte. Far above any 32-bit number, so that a truncated pointer is out of bounds."""
GAP = 4096
"""Bytes between buffers, which no access may touch."""
ALIGN = 256
_READ, _WRITE = 1, 2


@dataclass
class Buffer:
    """A mapped array: its device address, the view of its device bytes, and what to call it in an error."""

    array: Array
    address: int
    device: Array
    name: str


class GlobalMemory:
    """The bytes, and for each byte whether it may be read or written.

    Invariant: ``flags`` has one entry per byte of ``bytes``; 0 in every gap; sizes are multiples of 16.
    """

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._pending: list[tuple[Array, str]] = []
        self.bytes = np.zeros(0, np.uint8)
        self.flags = np.zeros(0, np.uint8)
        self._views: dict[int, Array] = {}
        self.handovers: HandoverDetector | None = None

    def map(self, named: list[tuple[Array, str]]) -> list[int]:
        """Copy arrays in; returns their addresses (of element 0 each). Once per memory."""
        groups = _overlapping([array for array, _ in named])
        top, placed = GAP, []
        for low, high, phase, members in groups:
            start = -(-top // ALIGN) * ALIGN + phase
            placed += [(i, start - low) for i in members]
            top = start + high - low + GAP
        size = -(-top // 16) * 16 + 16
        self.bytes, self.flags = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        self._views = {1: self.bytes, **{n: self.bytes.view(UNSIGNED[n]) for n in (2, 4, 8)},
                       16: self.bytes.view(np.complex128)}
        shift = dict(placed)
        for i, (array, name) in enumerate(named):
            self.buffers.append(self._place(array, name, _address(array) + shift[i]))
        return [buffer.address for buffer in self.buffers]

    def _place(self, array: Array, name: str, offset: int) -> Buffer:
        device = self._shaped(self.bytes, array, offset)
        device[...] = array
        flag = np.uint8(_READ | (_WRITE if array.flags.writeable else 0))
        if array.flags.c_contiguous:
            self.flags[offset:offset + array.nbytes] |= flag
        else:
            cells = self._shaped(self.flags, array.view(f"V{array.dtype.itemsize}"), offset)
            marked = np.frombuffer(cells.tobytes(), np.uint8) | flag
            cells[...] = marked.view(cells.dtype).reshape(array.shape)
        return Buffer(array, BASE + offset, device, name)

    @staticmethod
    def _shaped(memory: Array, like: Array, offset: int) -> Array:
        # Safety: offset and strides are those of a view that lay inside one span, and the span is allocated here.
        if not like.size:
            return np.zeros(like.shape, like.dtype)
        first = memory[offset:offset + like.dtype.itemsize].view(like.dtype)
        return as_strided(first, like.shape, like.strides)

    def copy_back(self) -> None:
        """Write device contents into every mapped array that is writable."""
        for buffer in self.buffers:
            if buffer.array.flags.writeable:
                buffer.array[...] = buffer.device

    def locate(self, addresses: Array, size: int, lanes: Index, store: bool) -> Index:
        """Positions, in units of ``size`` bytes, of int64 ``addresses``; faults where one may not be accessed."""
        offsets = addresses - BASE
        inside = offsets.view(np.uint64) <= np.uint64(max(len(self.bytes) - size, 0))
        if not inside.all():
            self._refuse(addresses, ~inside, size, lanes, store)
        odd = offsets & (size - 1)
        if odd.any():
            wrong = lanes[odd != 0]
            raise MemoryFault(f"global access of {size} bytes at {int(addresses[odd != 0][0]):#x}, "
                              f"which is no multiple of {size}", wrong)
        allowed = self._allowed(offsets, size, _WRITE if store else _READ)
        if not allowed.all():
            self._refuse(addresses, ~allowed, size, lanes, store)
        return np.right_shift(offsets, size.bit_length() - 1)

    def _allowed(self, offsets: Array, size: int, flag: int) -> Array:
        width = min(size, 8)
        wanted = UNSIGNED[width].type(int.from_bytes(bytes([flag]) * width, "little"))
        cells = self.flags.view(UNSIGNED[width])
        first = np.right_shift(offsets, width.bit_length() - 1)
        ok: Array = (cells[first] & wanted) == wanted
        return ok if size <= 8 else ok & ((cells[first + 1] & wanted) == wanted)

    def _refuse(self, addresses: Array, wrong: Array, size: int, lanes: Index, store: bool) -> None:
        address = int(addresses[wrong][0])
        what = f"global {'store' if store else 'load'} of {size} bytes at {address:#x}"
        raise MemoryFault(f"{what}: {self.describe(address, size)}", lanes[wrong])

    def describe(self, address: int, size: int) -> str:
        """Where an address lies relative to the nearest buffer, in words."""
        def distance(buffer: Buffer) -> int:
            low, high = self._span(buffer)
            return max(low - address, address + size - high, 0)
        if not self.buffers:
            return "the launch has no buffers"
        nearest = min(self.buffers, key=distance)
        low, high = self._span(nearest)
        shape = f"{nearest.name} ({nearest.array.dtype}{list(nearest.array.shape)})"
        if address < low:
            return f"{low - address} bytes before {shape}"
        if address >= high:
            return f"{address - high} bytes past the end of {shape}"
        if address + size > high:
            return f"across the end of {shape}"
        read_only = not nearest.array.flags.writeable
        return f"inside {shape}, which is read-only" if read_only else f"between the elements of {shape}"

    def _span(self, buffer: Buffer) -> tuple[int, int]:
        low, high = _bounds(buffer.array)
        shift = buffer.address - _address(buffer.array)
        return low + shift, high + shift

    def read(self, where: Index, size: int) -> Array:
        """The items at ``where``: uint8[n, size]."""
        return self._views[size][where].view(np.uint8).reshape(-1, size)

    def write(self, where: Index, size: int, data: Array) -> None:
        """Store uint8[n, size] at ``where``."""
        self._views[size][where] = np.ascontiguousarray(data).view(self._views[size].dtype).reshape(-1)


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _bounds(array: Array) -> tuple[int, int]:
    return np.lib.array_utils.byte_bounds(array) if array.size else (_address(array), _address(array))


def _phase(array: Array) -> int:
    """Bytes from the start of the allocation that ``array`` is a view of: keeps its alignment on the device."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return (_bounds(array)[0] - _bounds(owner)[0]) % ALIGN


def _overlapping(arrays: list[Array]) -> list[tuple[int, int, int, list[int]]]:
    """Group arrays whose host bytes overlap: (lowest address, end, alignment of the lowest, members)."""
    for array in arrays:
        if array.dtype.hasobject:
            raise LaunchError(f"an array of dtype {array.dtype} cannot be copied to a device: pass numbers")
    spans = sorted((*_bounds(array), i) for i, array in enumerate(arrays))
    groups: list[tuple[int, int, int, list[int]]] = []
    for low, high, i in spans:
        if groups and low < groups[-1][1]:
            first, end, phase, members = groups[-1]
            groups[-1] = (first, max(high, end), phase, [*members, i])
        else:
            groups.append((low, high, _phase(arrays[i]), [i]))
    return groups
