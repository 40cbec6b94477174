"""The helper threads of this process: they are started when kernels first want them, and end with the interpreter.

Owns their memory, their birth and their end. They are threads of the operating system that never run Python: they need
no interpreter state, hold no lock of it, and block all signals, so that signals reach the threads of the program that
this one is a guest of. How they work is in ``team_loop.py``.

Invariant: the memory and the compiled loops of a team live as long as the process.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import math
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from pagedcore_kernels.cpu.runtime import team_loop, team_waiting
from pagedcore_kernels.cpu.runtime import team_memory as at
from pagedcore_kernels.cpu.runtime.float_state import fesetenv_address

_log = logging.getLogger("pagedcore")
_LIBC = ctypes.CDLL(None)
_CALL_NUMBERS: Final = {
    "x86_64": (202, 315, 314), "aarch64": (98, 275, 274), "riscv64": (98, 275, 274), "ppc64le": (221, 356, 355),
    "s390x": (238, 346, 345),
}  # fmt: skip
"""Numbers of Linux's system calls ``futex``, ``sched_getattr`` and ``sched_setattr``, by processor."""
_CLOCK_NUMBER: Final = 6 if sys.platform == "darwin" else 1
"""``CLOCK_MONOTONIC``."""
END_TIMEOUT_S: Final = 5.0
"""How long the end of the interpreter waits for helpers that still hold work, in seconds."""
RETRY_S: Final = 10.0
"""How long a system that has refused a thread is not asked for another one, in seconds."""
_RUN = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
_WAKE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 2)


@dataclass(frozen=True, slots=True)
class TeamCounters:
    """What a team has done since it was made; differences of two readings mean something."""

    num_runs: int
    """Kernels that were opened to helpers."""
    num_joins: int
    """How often a helper took part in one."""
    num_wakes: int
    """How often a caller had to wake sleeping helpers through the operating system."""
    num_sleeps_of_callers: int
    """How often a caller slept until the last helper was done."""
    num_long_sleeps: int
    """How often a helper or a caller slept for longer than it may spin."""
    spin_ns: int
    """The shortest present bound of a helper for spinning, in nanoseconds; 0 without helpers."""


class Team:
    """Helper threads that take part in kernels; any thread may call any method."""

    def __init__(self, *, has_futex: bool | None = None) -> None:
        """Make a team without helpers.

        Args:
            has_futex: sleep by Linux's futex, else by a condition variable; ``None``: where there is a futex.
        """
        self._lock = threading.Lock()
        self._threads: list[ctypes.c_ulong] = []
        self._is_closed = False
        self._refused_s = -math.inf
        self._loops = team_loop.helper_loop(), team_loop.run_loop(), team_loop.wake_loop(), team_loop.run_all_loop()
        self._memory = _new_memory(call_numbers() if has_futex is not False else None)
        self._words = np.ctypeslib.as_array(
            ctypes.cast(self._memory, ctypes.POINTER(ctypes.c_int64)), (at.MEMORY_BYTES // 8,)
        )
        self._run, self._wake = _RUN(self._loops[1].address), _WAKE(self._loops[2].address)
        self._run_all = _RUN(self._loops[3].address)
        self.num_helpers = 0
        """How many helpers there are."""

    def launcher(self, slot: int, num_helpers: int) -> Callable[[int, int, int], None]:
        """Return ``launch(entry, parameters, num_helpers)`` for callers that use a slot.

        It calls the C function at address ``entry`` with ``parameters`` on its thread and on helpers that have time. It
        returns when the call on its thread and all those that helpers began have returned. ``entry`` takes work until
        none is left; a helper may call it at any time until then, or not at all.

        Args:
            slot: 0 to ``NUM_SLOTS - 1``; callers that have each their own get equal shares of the helpers.
            num_helpers: how many there have to be.
        """
        if num_helpers > self.num_helpers:
            self.grow(num_helpers)
        # Why a partial: this is called for every kernel, and a function of Python around it costs half as much again.
        return partial(self._run, self._memory + at.SLOTS + slot * at.SLOT_BYTES)

    def list_launcher(self, slot: int, num_helpers: int) -> Callable[[int, int, int], None]:
        """Return ``launch(calls, number, num_helpers)``, which makes a list of calls; see ``launcher``.

        ``calls`` is the address of as many triples of entry, parameters and most threads, 64 bits each.
        """
        if num_helpers > self.num_helpers:
            self.grow(num_helpers)
        return partial(self._run_all, self._memory + at.SLOTS + slot * at.SLOT_BYTES)

    def wake(self, num_helpers: int) -> None:
        """Wake so many helpers that sleep, so that they are awake when the next kernel comes; those that could not be
        started may be by now.
        """
        if num_helpers > self.num_helpers:
            self.grow(num_helpers)
        self._wake(self._memory, min(num_helpers, self.num_helpers))

    def grow(self, num_helpers: int) -> None:
        """Start helpers until there are ``num_helpers``, or as many as the system allows; none after ``close``.

        A system that refuses a thread is asked again after ``RETRY_S``, not for every kernel.
        """
        with self._lock:
            if time.monotonic() < self._refused_s + RETRY_S:
                return
            while len(self._threads) < min(num_helpers, at.MOST_HELPERS) and not self._is_closed:
                if not self._start_helper():
                    self._refused_s = time.monotonic()
                    return
            self.num_helpers = max(self.num_helpers, num_helpers)

    def counters(self) -> TeamCounters:
        """Read what the team has done."""
        helpers = range(at.HELPERS, at.HELPERS + self._read(at.NUM_HELPERS) * at.HELPER_BYTES, at.HELPER_BYTES)
        return TeamCounters(
            num_runs=self._read(at.NUM_RUNS),
            num_joins=self._read(at.NUM_SHARED),
            num_wakes=self._read(at.NUM_WAKES),
            num_sleeps_of_callers=self._read(at.NUM_SLEEPS_OF_CALLERS),
            num_long_sleeps=self._read(at.NUM_LONG_SLEEPS),
            spin_ns=min((self._read(helper + at.SPIN_NS) for helper in helpers), default=0),
        )

    def close(self, timeout_s: float = END_TIMEOUT_S) -> bool:
        """End the helpers; kernels run on their callers alone from now on. Whether all have ended in time.

        A helper that hangs is left behind with everything it may touch.
        """
        with self._lock:
            self._is_closed = True
            self._words[at.STOP // 8] = 1
            self._wake(self._memory, len(self._threads))
            end_s = time.monotonic() + timeout_s
            while (num_alive := self._read(at.NUM_ALIVE)) and time.monotonic() < end_s:
                time.sleep(0.0005)
            if num_alive == 0:
                for thread in self._threads:
                    _LIBC.pthread_join(thread, None)
                self._threads.clear()
            return num_alive == 0

    def begin_anew(self) -> None:
        """Forget the helpers, which a forked child does not have; new ones are started when they are wanted.

        Safety: the memory holds the numbers of the parent's threads, whose affinity this process could change.
        """
        self._lock = threading.Lock()
        self._threads.clear()
        self.num_helpers = 0
        for offset in (at.NUM_HELPERS, at.NUM_SLEEPERS, at.NUM_ALIVE, at.NUM_OPEN):
            self._words[offset // 8] = 0
        self._words[at.HELPERS // 8 :] = 0
        for number in range(at.NUM_SLOTS):
            slot = (at.SLOTS + number * at.SLOT_BYTES) // 8
            self._words[slot : slot + at.MEMORY_OF_SLOT // 8] = 0
            self._words[slot + at.SPIN_OF_CALLER_NS // 8] = team_waiting.MOST_SPIN_NS
        _LIBC.pthread_mutex_init(ctypes.c_void_p(self._memory + at.MUTEX), None)
        _LIBC.pthread_cond_init(ctypes.c_void_p(self._memory + at.CONDITION), None)

    def _read(self, offset: int) -> int:
        return int(self._words[offset // 8])

    def _start_helper(self) -> bool:
        thread = ctypes.c_ulong()
        # Why: a thread inherits the mask of the one that makes it, so there is no moment without it.
        before = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        try:
            self._words[at.NUM_ALIVE // 8] += 1
            own = self._memory + at.HELPERS + len(self._threads) * at.HELPER_BYTES
            ctypes.c_int64.from_address(own + at.MEMORY).value = self._memory
            ctypes.c_int64.from_address(own + at.SPIN_NS).value = team_waiting.MOST_SPIN_NS
            start = ctypes.c_void_p(self._loops[0].address), ctypes.c_void_p(own)
            error = _LIBC.pthread_create(ctypes.byref(thread), None, *start)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if error:
            self._words[at.NUM_ALIVE // 8] -= 1
            if self._refused_s == -math.inf:
                _log.warning("a helper thread could not be started (%s); kernels run on fewer threads until it can",
                             os.strerror(error))
            return False
        self._threads.append(thread)
        self._words[at.NUM_HELPERS // 8] = len(self._threads)
        if sys.platform == "linux":
            _LIBC.pthread_setname_np(thread, f"pagedcore-{len(self._threads)}".encode())
        return True


def call_numbers() -> tuple[int, int, int] | None:
    """Return the numbers of ``futex``, ``sched_getattr`` and ``sched_setattr``; ``None`` where they are not known."""
    return _CALL_NUMBERS.get(platform.machine()) if sys.platform == "linux" else None


def _new_memory(numbers: tuple[int, int, int] | None) -> int:
    """Return the address of a team's memory, which is never freed."""
    address = ctypes.c_void_p()
    size = at.MEMORY_BYTES
    if _LIBC.posix_memalign(ctypes.byref(address), ctypes.c_size_t(at.LINE), ctypes.c_size_t(size)):
        raise MemoryError(f"no memory for {size} bytes")
    assert address.value is not None  # Invariant: no error
    ctypes.memset(address.value, 0, size)
    _LIBC.pthread_mutex_init(ctypes.c_void_p(address.value + at.MUTEX), None)
    _LIBC.pthread_cond_init(ctypes.c_void_p(address.value + at.CONDITION), None)
    words = {
        at.CLOCK_GETTIME: _address(_LIBC.clock_gettime),
        at.CLOCK_NUMBER: _CLOCK_NUMBER,
        at.MUTEX_LOCK: _address(_LIBC.pthread_mutex_lock),
        at.MUTEX_UNLOCK: _address(_LIBC.pthread_mutex_unlock),
        at.CONDITION_WAIT: _address(_LIBC.pthread_cond_wait),
        at.CONDITION_BROADCAST: _address(_LIBC.pthread_cond_broadcast),
        at.FESETENV: fesetenv_address(),
    }
    if numbers is not None:
        words[at.SYSCALL] = _address(_LIBC.syscall)
        names = at.FUTEX_NUMBER, at.GET_ATTRIBUTES_NUMBER, at.SET_ATTRIBUTES_NUMBER
        words |= dict(zip(names, numbers, strict=True))
    if hasattr(_LIBC, "sched_getcpu") and hasattr(_LIBC, "gettid"):
        words |= {
            at.SCHED_GETCPU: _address(_LIBC.sched_getcpu),
            at.GETAFFINITY: _address(_LIBC.sched_getaffinity),
            at.SETAFFINITY: _address(_LIBC.sched_setaffinity),
            at.GETTID: _address(_LIBC.gettid),
        }
    for number in range(at.NUM_SLOTS):
        slot = at.SLOTS + number * at.SLOT_BYTES
        words |= {slot + at.MEMORY_OF_SLOT: address.value, slot + at.SPIN_OF_CALLER_NS: team_waiting.MOST_SPIN_NS}
    for offset, word in words.items():
        ctypes.c_int64.from_address(address.value + offset).value = word
    return address.value


def _address(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


_the_team: Team | None = None
_making = threading.Lock()


def the_team() -> Team:
    """Return the team of this process."""
    return _the_team or _make_team()


def _make_team() -> Team:
    global _the_team
    with _making:
        if _the_team is None:
            _the_team = Team()
            # Why not at the end of the process: what helpers compute with is taken apart before that.
            atexit.register(_the_team.close)
        return _the_team


def _begin_anew() -> None:
    """Let a forked child start helpers of its own."""
    global _making
    _making = threading.Lock()
    if _the_team is not None:
        _the_team.begin_anew()


os.register_at_fork(after_in_child=_begin_anew)
