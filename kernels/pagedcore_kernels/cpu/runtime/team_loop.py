"""How a caller and the helper threads of a team share one kernel: the compiled loops, and the memory they meet in.

A caller *opens* a run in a slot of its own: entry, parameters and a number of places. A helper that sees an open run
takes a place, calls the entry, and leaves. The caller calls the entry too; when that returns, no work is left to claim,
so the caller *closes* the run (no places any more) and waits for the helpers inside. A helper that is late, because it
slept or had lost its core, finds the run closed: only a helper that holds work is waited for.

Threads wait by spinning for a bounded time and then sleep: a helper for the next run, a caller for the last helper.

Invariant: a run has at most as many joins as places, so a kernel may number its threads.

Read ``team.py`` for who starts the helpers and who calls ``run``.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import types

from pagedcore_kernels.cpu.runtime import team_memory as at
from pagedcore_kernels.cpu.runtime.atomics import (
    add_shared,
    and_shared,
    call_function,
    exchange_if,
    load_shared,
    pause,
    store_shared,
)
from pagedcore_kernels.cpu.runtime.compiled import CompiledEntry, compile_entry
from pagedcore_kernels.cpu.runtime.float_state import DEFAULT
from pagedcore_kernels.cpu.runtime.team_waiting import (
    SHORT_SPIN_NS,
    adapt_spin,
    inlined,
    leave_cpu,
    note_wait,
    now_ns,
    present_cpu,
    return_mask,
    shorten_slice,
    sleep_while,
    spin_bound,
    wake,
)
from pagedcore_kernels.cpu.simd import address_of, load_int64

_RECENT_NS: Final = 300_000
"""An engine whose last kernel ended so recently is likely to have another one soon, and gets its share of the helpers.
"""


@inlined
def _help(c: int) -> int:
    """Join open runs, one of each slot; return how many."""
    num_joined = 0
    for number in range(at.NUM_SLOTS):
        slot = c + at.SLOTS + number * at.SLOT_BYTES
        state = load_shared(slot + at.STATE)
        while state >= at.PLACE:
            if exchange_if(slot + at.STATE, state, state - at.PLACE + 1) != 0:
                call_function(load_shared(slot + at.ENTRY), load_shared(slot + at.PARAMETERS), 0, 0, 0, 0)
                add_shared(c + at.NUM_SHARED, 1)
                if add_shared(slot + at.STATE, -1) == 1 and load_shared(slot + at.CALLER_SLEEPS) != 0:
                    wake(c, slot + at.STATE, 1)
                num_joined += 1
                break
            state = load_shared(slot + at.STATE)
    return num_joined


@inlined
def _await_run(c: int, helper: int, seen: int) -> None:
    """Wait until the generation is another than ``seen``."""
    begin = start = now_ns(c)
    bound = spin_bound(c, helper, begin)
    while load_shared(c + at.GENERATION) == seen:
        pause()
        now = now_ns(c)
        if load_shared(c + at.NUM_OPEN) > 0:
            start = now
        # Why a second bound: the caller of a run that stays open has lost its core.
        if now - start > bound or now - begin > 2 * bound:
            break
    if load_shared(c + at.GENERATION) == seen:
        return_mask(c, helper)
        store_shared(helper + at.SLEEPS, 1)
        add_shared(c + at.NUM_SLEEPERS, 1)
        asleep_since = now_ns(c)
        while load_shared(c + at.GENERATION) == seen:
            sleep_while(c, c + at.GENERATION, seen)
        add_shared(c + at.NUM_SLEEPERS, -1)
        store_shared(helper + at.SLEEPS, 0)
        # Why: a sleep after hardly any spinning says nothing of the bound.
        if bound > SHORT_SPIN_NS:
            adapt_spin(c, helper + at.SPIN_NS, now_ns(c) - asleep_since)
        cpu = present_cpu(c)
        if cpu >= 0 and cpu == load_shared(c + at.CALLER_CPU):
            store_shared(helper + at.NEEDS_PLACING, 1)
            leave_cpu(c, helper, cpu)


@inlined
def _call_helpers(c: int, count: int) -> None:
    """Let up to ``count`` helpers look for open runs."""
    add_shared(c + at.GENERATION, 1)
    if load_shared(c + at.NUM_SLEEPERS) > 0:
        cpu = present_cpu(c)
        store_shared(c + at.CALLER_CPU, cpu)
        for number in range(load_shared(c + at.NUM_HELPERS)):
            helper = c + at.HELPERS + number * at.HELPER_BYTES
            if load_shared(helper + at.SLEEPS) != 0 and load_shared(helper + at.NEEDS_PLACING) != 0:
                leave_cpu(c, helper, cpu)
        add_shared(c + at.NUM_WAKES, 1)
        wake(c, c + at.GENERATION, count)


@inlined
def _places(c: int, slot: int, wanted: int) -> int:
    """How many of ``wanted`` helpers this caller gets: an equal share of all threads with every other busy engine."""
    now, num_busy = now_ns(c), 1
    for number in range(at.NUM_SLOTS):
        other = c + at.SLOTS + number * at.SLOT_BYTES
        if other != slot and (
            load_shared(other + at.OWNED) != 0 or now - load_shared(other + at.LAST_END_NS) < _RECENT_NS
        ):
            num_busy += 1
    return (wanted + 1 + num_busy - 1) // num_busy - 1


@inlined
def _await_helpers(c: int, slot: int) -> None:
    """Wait until no helper is inside the run of a slot, which is closed."""
    start = now_ns(c)
    bound = load_shared(slot + at.SPIN_OF_CALLER_NS)
    while load_shared(slot + at.STATE) != 0:
        pause()
        if now_ns(c) - start > bound:
            break
    if load_shared(slot + at.STATE) != 0:
        add_shared(c + at.NUM_SLEEPS_OF_CALLERS, 1)
        store_shared(slot + at.CALLER_SLEEPS, 1)
        asleep_since = now_ns(c)
        inside = load_shared(slot + at.STATE)
        while inside != 0:
            sleep_while(c, slot + at.STATE, inside)
            inside = load_shared(slot + at.STATE)
        store_shared(slot + at.CALLER_SLEEPS, 0)
        awake_since = now_ns(c)
        adapt_spin(c, slot + at.SPIN_OF_CALLER_NS, awake_since - asleep_since)
        note_wait(c, start, awake_since)


@cache
def helper_loop() -> CompiledEntry:
    """Compile what a helper does: ``void *helper(void *own)``, as ``pthread_create`` wants it.

    ``own`` is the helper's part of the memory; its word ``MEMORY`` is the address of the whole.
    """

    def help_callers(own: Any) -> Any:
        helper = address_of(own)
        c = load_int64(helper, at.MEMORY // 8)
        gettid = load_int64(c, at.GETTID // 8)
        if gettid != 0:
            store_shared(helper + at.THREAD_ID, call_function(gettid, 0, 0, 0, 0, 0) & 0xFFFFFFFF)
        fesetenv = load_int64(c, at.FESETENV // 8)
        if fesetenv != 0:
            call_function(fesetenv, DEFAULT, 0, 0, 0, 0)
        shorten_slice(c)
        while True:
            seen = load_shared(c + at.GENERATION)
            if load_shared(c + at.STOP) != 0:
                break
            if _help(c) == 0:
                _await_run(c, helper, seen)
        add_shared(c + at.NUM_ALIVE, -1)
        return own

    return compile_entry(help_callers, types.voidptr(types.voidptr))


@inlined
def _run_call(slot: int, entry: int, parameters: int, helpers: int) -> None:
    """Call a kernel on the calling thread and, if they have time, on helpers.

    Without places, or while another caller uses the slot, the caller is the only thread.
    """
    c = load_int64(slot, at.MEMORY_OF_SLOT // 8)
    if exchange_if(slot + at.OWNED, 0, 1) == 0:
        call_function(entry, parameters, 0, 0, 0, 0)
        return
    places = _places(c, slot, helpers)
    if places > 0:
        store_shared(slot + at.ENTRY, entry)
        store_shared(slot + at.PARAMETERS, parameters)
        store_shared(slot + at.STATE, places * at.PLACE)
        add_shared(c + at.NUM_RUNS, 1)
        add_shared(c + at.NUM_OPEN, 1)
        _call_helpers(c, places)
    call_function(entry, parameters, 0, 0, 0, 0)
    if places > 0:
        if and_shared(slot + at.STATE, at.INSIDE) & at.INSIDE != 0:
            _await_helpers(c, slot)
        add_shared(c + at.NUM_OPEN, -1)
    now = now_ns(c)
    store_shared(slot + at.LAST_END_NS, now)
    store_shared(slot + at.OWNED, 0)


@cache
def run_loop() -> CompiledEntry:
    """Compile what a caller does: ``void run(slot, entry, parameters, helpers)``, all 64 bits wide."""

    def run(slot: int, entry: int, parameters: int, helpers: int) -> None:
        _run_call(slot, entry, parameters, helpers)

    return compile_entry(run, types.void(*[types.int64] * 4))


@cache
def run_all_loop() -> CompiledEntry:
    """Compile what a caller does with a list: ``void run_all(slot, calls, number, helpers)``, all 64 bits wide.

    A call is three words: entry, parameters, and the most threads it may have.
    """

    def run_all(slot: int, calls: int, number: int, helpers: int) -> None:
        for i in range(number):
            entry, parameters = load_int64(calls, 3 * i), load_int64(calls, 3 * i + 1)
            most = min(helpers, load_int64(calls, 3 * i + 2) - 1)
            if most > 0:
                _run_call(slot, entry, parameters, most)
            else:
                call_function(entry, parameters, 0, 0, 0, 0)

    return compile_entry(run_all, types.void(*[types.int64] * 4))


@cache
def wake_loop() -> CompiledEntry:
    """Compile how helpers are woken ahead of their first kernel: ``void wake(memory, helpers)``, both 64 bits wide."""

    def wake(memory: int, helpers: int) -> None:
        _call_helpers(memory, helpers)

    return compile_entry(wake, types.void(types.int64, types.int64))
