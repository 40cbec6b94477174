"""The memory that callers and helpers of a team meet in: what is where, in bytes from its start.

Invariant: it is never freed, so a helper that is late touches nothing that is gone.
"""

from __future__ import annotations

from typing import Final

LINE: Final = 64
"""Cache lines keep apart what different threads write; all offsets are in bytes."""

# The first line is what waiting helpers look at; it changes once per run.
GENERATION: Final = 0
"""Counts runs that were opened; helpers wait for it to change."""
STOP: Final = 16
"""1 when helpers are to end."""
SHORT_UNTIL_NS: Final = 24
"""Until when helpers spin shortly."""
CALLER_CPU: Final = 32
"""The processor that the caller of the newest run was on."""
NUM_HELPERS: Final = 40
NUM_OPEN: Final = 48
"""Runs in progress: while there is one, the next one is not late yet."""

NUM_SLEEPERS: Final = LINE
"""Helpers that sleep, or are about to."""

NUM_WAKES: Final = 2 * LINE
"""How often a caller had to wake helpers through the operating system."""
NUM_SLEEPS_OF_CALLERS: Final = 2 * LINE + 8
"""How often a caller slept because a helper held its work for longer than the bound."""
NUM_LONG_SLEEPS: Final = 2 * LINE + 16
"""How often a thread slept for longer than it may spin."""
NUM_RUNS: Final = 2 * LINE + 24
"""Runs that were opened to helpers."""
NUM_SHARED: Final = 2 * LINE + 32
"""Joins of helpers."""
LAST_LOSS_NS: Final = 2 * LINE + 40
"""When a caller had last waited for a helper without a core."""
NUM_ALIVE: Final = 3 * LINE
"""Helpers that have not ended."""

# Addresses of C functions, and numbers that go with them.
CLOCK_GETTIME: Final = 4 * LINE
CLOCK_NUMBER: Final = 4 * LINE + 8
SYSCALL: Final = 4 * LINE + 16
"""0 where there is no futex: then the condition variable is used."""
FUTEX_NUMBER: Final = 4 * LINE + 24
MUTEX_LOCK: Final = 4 * LINE + 32
MUTEX_UNLOCK: Final = 4 * LINE + 40
CONDITION_WAIT: Final = 4 * LINE + 48
CONDITION_BROADCAST: Final = 4 * LINE + 56
MUTEX: Final = 5 * LINE
CONDITION: Final = 7 * LINE
SCHED_GETCPU: Final = 9 * LINE
"""0 where threads cannot be placed."""
GETAFFINITY: Final = 9 * LINE + 8
SETAFFINITY: Final = 9 * LINE + 16
GETTID: Final = 9 * LINE + 24

GET_ATTRIBUTES_NUMBER: Final = 9 * LINE + 32
"""Numbers of the system calls ``sched_getattr`` and ``sched_setattr``."""
SET_ATTRIBUTES_NUMBER: Final = 9 * LINE + 40

FESETENV: Final = 9 * LINE + 48
"""0 where the floating-point state of a thread is left as it is."""

SLOTS: Final = 10 * LINE
NUM_SLOTS: Final = 16
# Of each slot:
STATE: Final = 0
"""Places left, times ``PLACE``, plus helpers inside."""
ENTRY: Final = 8
PARAMETERS: Final = 16
CALLER_SLEEPS: Final = 24
OWNED: Final = 32
"""1 while a caller uses the slot."""
LAST_END_NS: Final = 40
SPIN_OF_CALLER_NS: Final = 48
"""How long a caller spins at most until its helpers are done."""

MEMORY_OF_SLOT: Final = 64
"""Address of the team's memory, on a line that is never written."""
SLOT_BYTES: Final = 2 * LINE

HELPERS: Final = SLOTS + NUM_SLOTS * SLOT_BYTES
MOST_HELPERS: Final = 255
# Of each helper, a line, then two processor masks of two lines each:
THREAD_ID: Final = 0
"""Its number in the operating system; 0 until it has begun."""
SLEEPS: Final = 8
NEEDS_PLACING: Final = 16
"""1 once it woke on the processor of its caller."""
PLACEMENT: Final = 24
"""``WHOLE``; ``PLACED`` while its mask leaves a processor out, the whole mask being kept in the first of the two; or
``CHANGES`` while a thread changes it, which no other one waits for."""
MEMORY: Final = 32
"""Address of the team's memory."""
SPIN_NS: Final = 40
"""How long it spins at most until the next run."""
WHOLE_MASK: Final = LINE
PLACED_MASK: Final = 3 * LINE
MASK_BYTES: Final = 2 * LINE
HELPER_BYTES: Final = 5 * LINE
MEMORY_BYTES: Final = HELPERS + MOST_HELPERS * HELPER_BYTES

WHOLE, PLACED, CHANGES = 0, 1, 2

PLACE: Final = 1 << 16
"""One place, in a state."""
INSIDE: Final = PLACE - 1
"""The bits of a state that count helpers inside."""
