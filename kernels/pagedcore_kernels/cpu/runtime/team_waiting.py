"""How the threads of a team wait and where they run: sleeping and waking, how long to spin, and on which processor.

Every helper, and every caller, has a bound of its own for spinning. It shrinks while other programs want the cores,
because a thread that spins takes time from the one that it waits for and from the neighbours, and grows afterwards.
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

_MASK_WORDS: Final = at.MASK_BYTES // 8
"""64-bit words of a mask of processors."""
LEAST_SPIN_NS: Final = 100_000
"""Longer than the pause between two kernels of a step."""
MOST_SPIN_NS: Final = 2_000_000
"""Longer than the pause between two steps: where a machine is virtual, a processor that sleeps for a moment is given to
others and may come back milliseconds later."""
SHORT_SPIN_NS: Final = 5_000
"""The bound of helpers that lose their cores with work in hand: shorter than the pause between two kernels."""
_LOSS_NS, _CLOSE_NS, _SHORT_FOR_NS = 1_000_000, 20_000_000, 100_000_000
"""A caller that waits for so long waits for a helper that has lost its core. After two such waits that are so close,
helpers spin shortly for so long."""
HELPER_SLICE_NS: Final = 100_000
"""Helpers run in slices of this length, the least that Linux knows."""
_ATTRIBUTE_WORDS, _SLICE = 6, 3
"""``struct sched_attr`` in 64-bit words: its size and policy, the flags, nice and priority, the slice, two more."""
_FUTEX_WAIT, _FUTEX_WAKE = 128, 129
"""Operations of Linux's futex, without sharing between processes."""
inlined = njit(forceinline=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""For parts of the compiled loops. Numba's own way to inline copies a part's statements at each use, and the loops then
take twice as long to compile."""


@inlined
def now_ns(c: int) -> int:
    """Time of a clock that never goes back, in nanoseconds."""
    time: int = read_clock(load_int64(c, at.CLOCK_GETTIME // 8), load_int64(c, at.CLOCK_NUMBER // 8))
    return time


@inlined
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


@inlined
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


@inlined
def present_cpu(c: int) -> int:
    """Number of the processor that the calling thread is on; -1 where that is not known."""
    function = load_int64(c, at.SCHED_GETCPU // 8)
    return call_function(function, 0, 0, 0, 0, 0) & 0xFFFF if function != 0 else -1


@inlined
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


@inlined
def return_mask(c: int, helper: int) -> None:
    """Let this helper run wherever it might before ``leave_cpu``; leave it where another program has put it since."""
    if exchange_if(helper + at.PLACEMENT, at.PLACED, at.CHANGES) != 0:
        thread_id, present = load_shared(helper + at.THREAD_ID), stack_int64(_MASK_WORDS)
        changes = call_function(load_int64(c, at.GETAFFINITY // 8), thread_id, at.MASK_BYTES, present, 0, 0)
        for word in range(_MASK_WORDS):
            changes |= load_int64(present, word) ^ load_int64(helper + at.PLACED_MASK, word)
        if changes == 0:
            call_function(load_int64(c, at.SETAFFINITY // 8), thread_id, at.MASK_BYTES, helper + at.WHOLE_MASK, 0, 0)
        store_shared(helper + at.PLACEMENT, at.WHOLE)


@inlined
def shorten_slice(c: int) -> None:
    """Ask Linux (6.12 or later) to give the calling thread its time in short slices; its share stays the same.

    Why: a thread with a shorter slice than the present one is given the core as soon as it wakes, so a helper computes
    while its caller does. With the same slices it gets the core at a tick, when its caller's time is over.
    """
    syscall = load_int64(c, at.SYSCALL // 8)
    words = stack_int64(_ATTRIBUTE_WORDS)
    get, put = load_int64(c, at.GET_ATTRIBUTES_NUMBER // 8), load_int64(c, at.SET_ATTRIBUTES_NUMBER // 8)
    knows = syscall != 0 and call_function(syscall, get, 0, words, _ATTRIBUTE_WORDS * 8, 0) & 0xFFFFFFFF == 0
    # Linux says 0 where a thread has no slice of its own: before 6.12, and in policies that know none.
    if knows and load_int64(words, _SLICE) != 0:
        store_int64(words, _SLICE, HELPER_SLICE_NS)
        call_function(syscall, put, 0, words, 0, 0)


@inlined
def spin_bound(c: int, helper: int, now: int) -> int:
    """How long a helper may spin from now on, in nanoseconds."""
    bound: int = SHORT_SPIN_NS if now < load_shared(c + at.SHORT_UNTIL_NS) else load_shared(helper + at.SPIN_NS)
    return bound


@inlined
def note_wait(c: int, start: int, end: int) -> None:
    """Note when a caller has waited for its helpers; after long waits helpers sleep between kernels for a while.

    Why: a neighbour that shares a helper's core alone takes it at a tick, work in hand, from a helper that stays awake.
    A helper that sleeps between kernels leaves out some of them instead. Where callers lose their cores as often as
    helpers do, such waits are rare: both are on their cores at the same time.
    """
    if end - start > _LOSS_NS:
        if start - load_shared(c + at.LAST_LOSS_NS) < _CLOSE_NS:
            store_shared(c + at.SHORT_UNTIL_NS, end + _SHORT_FOR_NS)
        store_shared(c + at.LAST_LOSS_NS, end)


@inlined
def adapt_spin(c: int, bound: int, slept_ns: int) -> None:
    """Change the bound at address ``bound`` after a sleep of so many nanoseconds.

    A sleep that no spinning would have spared shortens it: beside busy programs it means that the thread that is waited
    for has lost its core. Other sleeps lengthen it.
    """
    spin = load_shared(bound)
    if slept_ns > MOST_SPIN_NS:
        add_shared(c + at.NUM_LONG_SLEEPS, 1)
        store_shared(bound, max(LEAST_SPIN_NS, spin // 2))
    else:
        store_shared(bound, min(MOST_SPIN_NS, spin + spin // 2))
