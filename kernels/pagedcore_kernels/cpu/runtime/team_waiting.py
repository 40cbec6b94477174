"""How the threads of a team wait and where they run: sleeping and waking, how long to spin, and on which processor.

The bound for spinning shrinks while other threads want the cores, because a thread that spins takes time from the one
that it waits for and from the neighbours, and grows back when nothing else wants them.
Read ``team_loop.py`` for who waits.
"""

from __future__ import annotations

from typing import Final

from numba import njit

from pagedcore_kernels.cpu.runtime import team_memory as at
from pagedcore_kernels.cpu.runtime.atomics import (
    add_shared,
    call_function,
    exchange_if,
    load_shared,
    read_clock,
    store_shared,
)
from pagedcore_kernels.cpu.simd import load_int64, stack_int64, store_int64

#: After how much time awake a helper asks the system whether other threads have had its core.
_LOOK_NS: Final = 1_000_000
#: So much of it is a slice of time; interrupts and short work take less.
_SLICE_NS: Final = 500_000
#: ``getrusage`` of the calling thread, where in its result the involuntary context switches are, and its size.
_RUSAGE_THREAD, _SWITCHES, _RUSAGE_WORDS = 1, 17, 18
#: 64-bit words of a mask of processors.
_MASK_WORDS: Final = at.MASK_BYTES // 8
#: ``CLOCK_THREAD_CPUTIME_ID`` of Linux; without effect where ``GETRUSAGE`` is 0.
_THREAD_CLOCK: Final = 3
LEAST_SPIN_NS: Final = 5_000
#: Longer than the pause between two steps: where a machine is virtual, a processor that sleeps for a moment is given to
#: others and may come back milliseconds later.
MOST_SPIN_NS: Final = 2_000_000
#: Awake so long without a loss, a helper doubles the bound: fifty losses a second keep it where it is.
_DOUBLING_NS: Final = 20_000_000
#: Operations of Linux's futex, without sharing between processes.
_FUTEX_WAIT, _FUTEX_WAKE = 128, 129


@njit(inline="always")
def now_ns(c: int) -> int:
    """Time of a clock that never goes back, in nanoseconds."""
    time: int = read_clock(load_int64(c, at.CLOCK_GETTIME // 8), load_int64(c, at.CLOCK_NUMBER // 8))
    return time


@njit(inline="always")
def sleep_while(c: int, address: int, value: int) -> None:
    """Sleep while the word at ``address`` has ``value``; may return early."""
    syscall = load_int64(c, at.SYSCALL // 8)
    if syscall != 0:
        # The low 32 bits are compared; they come first in memory.
        call_function(syscall, load_int64(c, at.FUTEX_NUMBER // 8), address, _FUTEX_WAIT, value, 0)
    else:
        call_function(load_int64(c, at.MUTEX_LOCK // 8), c + at.MUTEX, 0, 0, 0, 0)
        while load_shared(address) == value:
            call_function(load_int64(c, at.CONDITION_WAIT // 8), c + at.CONDITION, c + at.MUTEX, 0, 0, 0)
        call_function(load_int64(c, at.MUTEX_UNLOCK // 8), c + at.MUTEX, 0, 0, 0, 0)


@njit(inline="always")
def wake(c: int, address: int, count: int) -> None:
    """Wake up to ``count`` threads that sleep while the word at ``address`` has the value it had."""
    syscall = load_int64(c, at.SYSCALL // 8)
    if syscall != 0:
        call_function(syscall, load_int64(c, at.FUTEX_NUMBER // 8), address, _FUTEX_WAKE, count, 0)
    else:
        # Why with the lock: a thread between its look at the word and its sleep would miss the signal.
        call_function(load_int64(c, at.MUTEX_LOCK // 8), c + at.MUTEX, 0, 0, 0, 0)
        call_function(load_int64(c, at.CONDITION_BROADCAST // 8), c + at.CONDITION, 0, 0, 0, 0)
        call_function(load_int64(c, at.MUTEX_UNLOCK // 8), c + at.MUTEX, 0, 0, 0, 0)


@njit(inline="always")
def present_cpu(c: int) -> int:
    """Number of the processor that the calling thread is on; -1 where that is not known."""
    function = load_int64(c, at.SCHED_GETCPU // 8)
    return call_function(function, 0, 0, 0, 0, 0) & 0xFFFF if function != 0 else -1


@njit(inline="always")
def leave_cpu(c: int, helper: int, cpu: int) -> None:
    """Keep a helper off a processor until ``return_mask``; does nothing if it may be on no other one."""
    before = load_shared(helper + at.PLACEMENT)
    if before == at.CHANGES or exchange_if(helper + at.PLACEMENT, before, at.CHANGES) == 0:
        return
    thread_id = load_shared(helper + at.THREAD_ID)
    failed = 0
    if before == at.WHOLE:
        function = load_int64(c, at.GETAFFINITY // 8)
        failed = call_function(function, thread_id, at.MASK_BYTES, helper + at.WHOLE_MASK, 0, 0)
    others = 0
    if failed & 0xFFFFFFFF == 0:
        for word in range(_MASK_WORDS):
            bits = load_int64(helper + at.WHOLE_MASK, word)
            if word == cpu // 64:
                bits &= ~(1 << (cpu % 64))
            store_int64(helper + at.PLACED_MASK, word, bits)
            others |= bits
    if others != 0:
        call_function(load_int64(c, at.SETAFFINITY // 8), thread_id, at.MASK_BYTES, helper + at.PLACED_MASK, 0, 0)
        before = at.PLACED
    store_shared(helper + at.PLACEMENT, before)


@njit(inline="always")
def return_mask(c: int, helper: int) -> None:
    """Let this helper run wherever it might before ``leave_cpu``; leave it where somebody else has put it since."""
    if exchange_if(helper + at.PLACEMENT, at.PLACED, at.CHANGES) != 0:
        thread_id, present = load_shared(helper + at.THREAD_ID), stack_int64(_MASK_WORDS)
        changes = call_function(load_int64(c, at.GETAFFINITY // 8), thread_id, at.MASK_BYTES, present, 0, 0)
        for word in range(_MASK_WORDS):
            changes |= load_int64(present, word) ^ load_int64(helper + at.PLACED_MASK, word)
        if changes == 0:
            call_function(load_int64(c, at.SETAFFINITY // 8), thread_id, at.MASK_BYTES, helper + at.WHOLE_MASK, 0, 0)
        store_shared(helper + at.PLACEMENT, at.WHOLE)


@njit(inline="always")
def note_sleep(helper: int, slept_ns: int) -> None:
    """Leave a sleep out of the time since the last look: a helper that never spins for long must get there too."""
    store_int64(helper + at.LOOKED_NS, 0, load_int64(helper + at.LOOKED_NS, 0) + slept_ns)


@njit(inline="always")
def _look(c: int, helper: int, now: int) -> int:
    """Note what this helper has had of its core up to now; return the switches to other threads since the last look."""
    usage = stack_int64(_RUSAGE_WORDS)
    function = load_int64(c, at.GETRUSAGE // 8)
    if function == 0 or call_function(function, _RUSAGE_THREAD, usage, 0, 0, 0) & 0xFFFFFFFF != 0:
        return 0
    before = load_int64(helper + at.SEEN_SWITCHES, 0)
    store_int64(helper + at.SEEN_SWITCHES, 0, load_int64(usage, _SWITCHES))
    store_int64(helper + at.SEEN_CPU_NS, 0, read_clock(load_int64(c, at.CLOCK_GETTIME // 8), _THREAD_CLOCK))
    store_int64(helper + at.LOOKED_NS, 0, now)
    switches: int = load_int64(usage, _SWITCHES) - before
    return switches


@njit(inline="always")
def adapt_spin(c: int, helper: int, now: int) -> None:
    """Halve the bound for spinning if other threads had this helper's core for a slice of time, else let it grow.

    Why switches and time: what interrupts the core for a moment needs no room made for it, and a hypervisor that takes
    it away gives it back later to a thread that sleeps.
    """
    elapsed = now - load_int64(helper + at.LOOKED_NS, 0)
    if elapsed < _LOOK_NS:
        return
    cpu_before = load_int64(helper + at.SEEN_CPU_NS, 0)
    switches = _look(c, helper, now)
    lost = elapsed - (load_int64(helper + at.SEEN_CPU_NS, 0) - cpu_before)
    spin = load_shared(c + at.SPIN_NS)
    if switches > 0 and lost > _SLICE_NS:
        add_shared(c + at.NUM_DESCHEDULED, 1)
        store_shared(c + at.SPIN_NS, max(LEAST_SPIN_NS, spin // 2))
    else:
        store_shared(c + at.SPIN_NS, min(MOST_SPIN_NS, spin + spin * min(elapsed, _DOUBLING_NS) // _DOUBLING_NS))
