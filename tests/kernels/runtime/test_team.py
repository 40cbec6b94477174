"""The helper threads of the process: they take part when they have time, sleep when there is nothing to do, and end."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from kernels.runtime.kernels_for_tests import count_kernel, hold_kernel
from pagedcore_kernels.cpu.runtime import team as team_module
from pagedcore_kernels.cpu.runtime import team_memory as at
from pagedcore_kernels.cpu.runtime import team_waiting
from pagedcore_kernels.cpu.runtime.kernel import Kernel, ParameterBlock
from pagedcore_kernels.cpu.runtime.team import Team, call_numbers
from support.apart import Apart

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of threads")


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not become true"
        time.sleep(0.002)


@pytest.fixture(params=[True, False], ids=["futex", "condition variable"])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    one = Team(has_futex=request.param)
    yield one
    assert one.close(timeout_s=60)


class Held:
    """A call of ``hold_kernel`` on a thread of its own and a helper, which returns when it is released."""

    def __init__(self, team: Team, slot: int) -> None:
        self.words = np.zeros(2, np.int64)
        self._block = ParameterBlock(4)
        self.caller = threading.Thread(target=self._call, args=(team.launcher(slot, 1),), daemon=True)
        self.caller.start()

    def _call(self, launch: Callable[[int, int, int], None]) -> None:
        state, own_id = int(self.words.ctypes.data), ctypes.cast(ctypes.CDLL(None).pthread_self, ctypes.c_void_p).value
        self._block.fill(state, state + 8, own_id, threading.get_ident())
        launch(hold_kernel().address, self._block.address, 1)

    @property
    def is_holding(self) -> bool:
        """Whether the helper is inside."""
        return int(self.words[0]) == 1

    def release(self) -> None:
        self.words[1] = 1


def count(team: Team, slot: int, num_helpers: int, kernel: Kernel | None = None) -> bool:
    """Count a thousand numbers up; whether each was counted once."""
    numbers, flag, block = np.zeros(1000, np.int64), np.zeros(1, np.float32), ParameterBlock(4)
    block.fill(numbers.ctypes.data, len(numbers), flag.ctypes.data)
    team.launcher(slot, num_helpers)((kernel or count_kernel()).address, block.address, num_helpers)
    return bool((numbers == 1).all())


def thread_ids(team: Team) -> list[int]:
    offsets = [at.HELPERS + i * at.HELPER_BYTES for i in range(team.num_helpers)]
    wait_until(lambda: all(team._read(offset + at.THREAD_ID) for offset in offsets))
    return [team._read(offset + at.THREAD_ID) for offset in offsets]


def num_asleep(team: Team) -> int:
    """How many helpers sleep. The team counts one that is only about to: such a one finds a run without being woken."""
    counted = team._read(at.NUM_SLEEPERS)
    if sys.platform != "linux":
        return counted
    states = [Path(f"/proc/self/task/{number}/stat").read_text().rpartition(")")[2] for number in thread_ids(team)]
    return min(counted, sum(state.split()[0] == "S" for state in states))


@pytest.mark.parametrize("num_helpers", [0, 1, 3])
def test_work_is_done_once(team: Team, num_helpers: int) -> None:
    """Many short runs one after the other give out every item once, however helpers come and go."""
    assert all(count(team, 1, num_helpers) for _ in range(300))
    assert team.counters().num_runs == (300 if num_helpers else 0)
    assert team.counters().num_joins <= 300 * num_helpers


def test_a_helper_that_holds_work_is_waited_for(team: Team) -> None:
    """A run ends when the last helper inside has left, and not before."""
    held = Held(team, 1)
    wait_until(lambda: held.is_holding)
    held.caller.join(timeout=0.05)
    assert held.caller.is_alive()
    held.release()
    held.caller.join(timeout=60)
    assert not held.caller.is_alive()
    assert held.words[0] == 2
    assert team.counters().num_joins == 1


def test_a_helper_that_is_late_is_not_waited_for(team: Team) -> None:
    """While the only helper is busy elsewhere, other callers do all their work themselves."""
    held = Held(team, 1)
    wait_until(lambda: held.is_holding)
    assert all(count(team, 2, 1) for _ in range(100))
    assert held.caller.is_alive()
    held.release()
    held.caller.join(timeout=60)


def test_a_slot_in_use_serves_nobody_else(team: Team) -> None:
    """A second caller in a slot computes alone instead of waiting for the first one."""
    held = Held(team, 1)
    wait_until(lambda: held.is_holding)
    runs = team.counters().num_runs
    assert count(team, 1, 1)
    assert team.counters().num_runs == runs
    held.release()
    held.caller.join(timeout=60)


def test_callers_at_once_get_right_results(team: Team) -> None:
    """Engines of one process share the helpers: each has its own work done, once."""
    results: list[bool] = []

    def compute(slot: int) -> None:
        results.extend([count(team, slot, 2) for _ in range(200)])

    callers = [threading.Thread(target=compute, args=(slot,)) for slot in (1, 2, 3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    assert results == [True] * 600


def test_helpers_sleep_when_there_is_nothing_to_do(team: Team) -> None:
    """Soon after the last run all helpers sleep, and the next run wakes them once."""
    count(team, 1, 2)
    wait_until(lambda: num_asleep(team) == 2)
    before = team.counters().num_wakes
    count(team, 1, 2)
    assert team.counters().num_wakes == before + 1


def test_a_helper_spins_for_longer_when_the_next_run_comes_soon_after_it_fell_asleep(team: Team) -> None:
    """Pauses a little longer than the bound lengthen it until the helper stays awake through them."""
    count(team, 1, 1)
    wait_until(lambda: num_asleep(team) == 1)
    team._words[(at.HELPERS + at.SPIN_NS) // 8] = team_waiting.LEAST_SPIN_NS
    while team.counters().spin_ns < 5 * team_waiting.LEAST_SPIN_NS:
        wait_until(lambda: num_asleep(team) == 1)
        count(team, 1, 1)
        if team.counters().num_long_sleeps > 100:
            # Why: where an idle virtual processor takes milliseconds to come back, no pause is a little longer.
            pytest.skip("to wake a thread takes longer here than any bound")


def test_a_helper_spins_for_less_when_the_next_run_comes_late(team: Team) -> None:
    """After a few pauses that no spinning could have bridged, a helper sleeps after the shortest bound."""
    team.grow(1)
    assert team.counters().spin_ns == team_waiting.MOST_SPIN_NS
    for _ in range(10):
        wait_until(lambda: num_asleep(team) == 1)
        time.sleep(3 * team_waiting.MOST_SPIN_NS / 1e9)
        # Why: after two waits close together, as on a busy machine, helpers sleep at once and learn nothing from it.
        team._words[at.LAST_LOSS_NS // 8] = 0
        count(team, 1, 1)
    wait_until(lambda: team.counters().spin_ns == team_waiting.LEAST_SPIN_NS)
    assert team.counters().num_long_sleeps >= 5


def test_helpers_hardly_spin_while_they_lose_their_cores_with_work_in_hand(team: Team) -> None:
    """One long wait of a caller changes nothing; two that are close together do, for a while."""
    for num_waits in (1, 2):
        held = Held(team, 1)
        wait_until(lambda held=held: held.is_holding)  # type: ignore[misc]
        wait_until(lambda: team._read(at.SLOTS + at.SLOT_BYTES + at.CALLER_SLEEPS) == 1)
        held.release()
        held.caller.join(timeout=60)
        if num_waits == 1:
            assert team._read(at.LAST_LOSS_NS) > 0
            assert team._read(at.SHORT_UNTIL_NS) == 0
            # The second wait may begin late on a busy machine.
            team._words[at.LAST_LOSS_NS // 8] = time.monotonic_ns() + 10**12
    assert team._read(at.SHORT_UNTIL_NS) > team._read(at.LAST_LOSS_NS)
    team._words[at.SHORT_UNTIL_NS // 8] = time.monotonic_ns() + 10**12
    # Two more that are close together would end it in a moment.
    team._words[at.LAST_LOSS_NS // 8] = 0
    # The wait that is going on began before, and its end changes a bound in the middle; so does every later one if
    # nothing says otherwise. A helper that has joined a run has ended it; the caller alone may do those that are short.
    held = Held(team, 1)
    wait_until(lambda: held.is_holding)
    held.release()
    held.caller.join()
    wait_until(lambda: num_asleep(team) == 1)
    team._words[(at.HELPERS + at.SPIN_NS) // 8] = 1_000_000
    for _ in range(20):
        team._words[at.LAST_LOSS_NS // 8] = 0
        count(team, 1, 1)
        wait_until(lambda: num_asleep(team) == 1)
    assert team.counters().spin_ns == 1_000_000


class Attributes(ctypes.Structure):
    """``struct sched_attr`` of Linux."""

    _fields_ = (
        ("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64), ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32), ("slice_ns", ctypes.c_uint64), ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )  # fmt: skip

    @classmethod
    def of(cls, thread_id: int) -> Attributes:
        one = cls()
        number = call_numbers()[1]
        assert ctypes.CDLL(None).syscall(number, thread_id, ctypes.byref(one), ctypes.sizeof(one), 0) == 0
        return one


SLICES = """
import os, sys
from kernels.runtime.test_team import Attributes, Team, count, num_asleep, team_waiting, thread_ids, wait_until
os.nice(3)
os.sched_setscheduler(0, {policy}, os.sched_param(0))
before = Attributes.of(0)
child = os.fork()
team = Team()
assert count(team, 1, 1)
(helper,) = thread_ids(team)
# A helper has a number before it has asked.
wait_until(lambda: num_asleep(team) == 1)
after, own = Attributes.of(0), Attributes.of(helper)
assert (after.policy, after.nice, after.slice_ns) == ({policy}, 3, before.slice_ns), "the host's"
assert (own.policy, own.nice) == ({policy}, 3), "the helper's"
# Linux before 6.12 has no slices of threads' own, and says 0.
is_short = before.slice_ns and {policy} != os.SCHED_IDLE
assert own.slice_ns == (team_waiting.HELPER_SLICE_NS if is_short else before.slice_ns), own.slice_ns
assert team.close(timeout_s=200)
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.skipif(call_numbers() is None, reason="the numbers of Linux's system calls are not known here")
@pytest.mark.parametrize("policy", ["os.SCHED_OTHER", "os.SCHED_BATCH", "os.SCHED_IDLE"])
def test_helpers_ask_for_short_slices_and_nothing_else(apart: Apart, policy: str) -> None:
    """Policy and niceness are the host's, and so are its other threads, also in a host that yields to all others."""
    apart.run(SLICES.replace("{policy}", policy))


@linux_only
def test_helpers_take_no_time_when_they_sleep(team: Team) -> None:
    """A sleeping helper uses no processor at all."""
    count(team, 1, 2)
    wait_until(lambda: num_asleep(team) == 2)

    def used() -> list[int]:
        lines = [Path(f"/proc/self/task/{number}/stat").read_text().rpartition(")")[2] for number in thread_ids(team)]
        return [int(line.split()[11]) + int(line.split()[12]) for line in lines]

    before = used()
    time.sleep(0.3)
    assert used() == before


@linux_only
def test_helpers_block_all_signals_and_have_names(team: Team) -> None:
    """Signals reach the threads of the program, which can tell from its thread list whose the helpers are."""
    count(team, 1, 1)
    (number,) = thread_ids(team)
    status = Path(f"/proc/self/task/{number}/status").read_text()
    blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
    # SIGKILL and SIGSTOP cannot be blocked; the two that the C library keeps for itself stay open.
    assert all(blocked & 1 << number - 1 for number in range(1, 32) if number not in (9, 19))
    assert Path(f"/proc/self/task/{number}/comm").read_text().strip() == "pagedcore-1"


@linux_only
def test_a_placed_helper_stays_off_its_callers_processor_until_it_sleeps(team: Team) -> None:
    """Once it woke there: it works elsewhere, if there is a processor elsewhere, and sleeps with its whole mask."""
    whole = os.sched_getaffinity(0)
    count(team, 1, 1)
    (number,) = thread_ids(team)
    for _ in range(5):
        wait_until(lambda: num_asleep(team) == 1)
        assert os.sched_getaffinity(number) == whole
        team._words[(at.HELPERS + at.NEEDS_PLACING) // 8] = 1
        held = Held(team, 1)
        wait_until(lambda held=held: held.is_holding)  # type: ignore[misc]
        assert len(whole - os.sched_getaffinity(number)) == min(1, len(whole) - 1)
        held.release()
        held.caller.join()


@linux_only
def test_a_placed_helper_stays_where_somebody_else_puts_it(team: Team) -> None:
    """An operator who confines all threads of a process while a helper is placed is not overruled when it sleeps."""
    whole = os.sched_getaffinity(0)
    count(team, 1, 1)
    (number,) = thread_ids(team)
    wait_until(lambda: num_asleep(team) == 1)
    team._words[(at.HELPERS + at.NEEDS_PLACING) // 8] = 1
    held = Held(team, 1)
    wait_until(lambda: held.is_holding)
    given = (whole - os.sched_getaffinity(number)) or whole
    os.sched_setaffinity(number, given)
    held.release()
    held.caller.join()
    wait_until(lambda: num_asleep(team) == 1)
    assert os.sched_getaffinity(number) == given


def test_helpers_end(team: Team) -> None:
    """Closing ends all helpers; kernels then run on their callers alone, and closing again does nothing."""
    def threads() -> set[int]:
        return {one.id for one in psutil.Process().threads()}

    before = threads()
    count(team, 1, 3)
    assert len(threads() - before) == 3
    assert team.close(timeout_s=60)
    # Why not at once: a thread that was joined is in the list for a moment longer.
    wait_until(lambda: threads() <= before)
    assert count(team, 1, 3)
    assert count(team, 1, 5)
    assert threads() <= before
    assert team.close()


def test_a_helper_that_hangs_is_left_behind(team: Team) -> None:
    """Closing does not wait for ever; what the helper works with stays until it is done."""
    held = Held(team, 1)
    wait_until(lambda: held.is_holding)
    assert not team.close(timeout_s=0.05)
    assert count(team, 2, 1)
    held.release()
    held.caller.join(timeout=60)
    assert held.words[0] == 2


def test_a_system_that_refuses_threads(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without helpers kernels run on their callers, which is logged once and not tried again for every kernel."""
    one = Team()
    calls: list[int] = []
    monkeypatch.setattr(team_module, "time", SimpleNamespace(monotonic=lambda: 100.0, sleep=time.sleep))
    monkeypatch.setattr(one, "_start_helper", lambda: calls.append(1) or False)
    assert all(count(one, 1, 2) for _ in range(3))
    assert calls == [1]
    assert one.close()


def test_a_refused_helper_comes_later(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A system that lacks threads is asked again after a while, by whoever wakes helpers, and says it once."""
    one, clock, refusals = Team(), SimpleNamespace(now=100.0), [errno.EAGAIN, errno.EAGAIN, 0]
    create = team_module._LIBC.pthread_create
    monkeypatch.setattr(team_module.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(team_module, "_LIBC", SimpleNamespace(
        pthread_create=lambda *of: refusals.pop(0) or create(*of), pthread_join=team_module._LIBC.pthread_join,
        pthread_setname_np=team_module._LIBC.pthread_setname_np))
    one.launcher(1, 1)
    assert one.num_helpers == 0
    clock.now += team_module.RETRY_S
    for _ in range(3):
        one.wake(1)
    assert (one.num_helpers, refusals) == (0, [0])
    clock.now += team_module.RETRY_S
    one.wake(1)
    assert (one.num_helpers, refusals) == (1, [])
    assert caplog.text.count("could not be started") == 1
    monkeypatch.undo()
    assert count(one, 1, 1)
    assert one.close()


END = """
import sys, threading
from kernels.runtime.test_team import Held, count, wait_until
from pagedcore_kernels.cpu.runtime import team
team.END_TIMEOUT_S = 0.2
the_team = team.the_team()
if sys.argv[1] == "hangs":
    held = Held(the_team, 1)
    wait_until(lambda: held.is_holding)
elif sys.argv[1] == "computes":
    def compute():
        while True:
            count(the_team, 1, 2)
    threading.Thread(target=compute, daemon=True).start()
    wait_until(lambda: the_team.counters().num_runs > 10)
else:
    count(the_team, 1, 2)
print("last line")
"""


@pytest.mark.parametrize("what", ["sleeps", "computes", "hangs"])
def test_the_interpreter_ends(apart: Apart, what: str) -> None:
    """A process ends cleanly while helpers sleep, while another thread computes, and while a helper hangs."""
    code = END.replace("team.END_TIMEOUT_S = 0.2", "team.Team.close.__defaults__ = (0.2,)")
    assert apart.outcome(code, what) == (0, "last line\n", "")


FORK = """
import os
from kernels.runtime.test_team import Held, count, wait_until
from pagedcore_kernels.cpu.runtime.team import the_team
def be_helped():
    assert count(the_team(), 1, 2)
    held = Held(the_team(), 1)
    wait_until(lambda: held.is_holding)
    held.release()
    held.caller.join()
be_helped()
child = os.fork()
if child == 0:
    be_helped()
    raise SystemExit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
be_helped()
"""


PLACED_FORK = """
import os
from kernels.runtime.test_team import Held, count, num_asleep, thread_ids, wait_until
from pagedcore_kernels.cpu.runtime import team_memory as at
from pagedcore_kernels.cpu.runtime.team import the_team
team = the_team()
assert count(team, 1, 1)
wait_until(lambda: num_asleep(team) == 1)
# As if another thread were just placing the helper; that thread does not exist in the child.
team._words[(at.HELPERS + at.PLACEMENT) // 8] = at.CHANGES
child = os.fork()
if child == 0:
    whole = os.sched_getaffinity(0)
    assert count(team, 1, 1)
    wait_until(lambda: num_asleep(team) == 1)
    (number,) = thread_ids(team)
    team._words[(at.HELPERS + at.NEEDS_PLACING) // 8] = 1
    held = Held(team, 1)
    wait_until(lambda: held.is_holding)
    is_placed = len(whole - os.sched_getaffinity(number)) == min(1, len(whole) - 1)
    held.release()
    held.caller.join()
    raise SystemExit(7 if is_placed else "the child's helper was not placed")
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


TOUCH = """
import os
import numpy as np
from kernels.runtime.kernels_for_tests import count_kernel
from kernels.runtime.test_team import count, num_asleep, thread_ids, wait_until
from pagedcore_kernels.cpu.runtime import team_memory as at
from pagedcore_kernels.cpu.runtime import team_waiting
from pagedcore_kernels.cpu.runtime.kernel import ParameterBlock
from pagedcore_kernels.cpu.runtime.team import the_team
team = the_team()
assert count(team, 1, 1)
(number,) = thread_ids(team)
wait_until(lambda: num_asleep(team) == 1)
team._words[(at.HELPERS + at.NEEDS_PLACING) // 8] = 1
launch, block, numbers = team.launcher(1, 1), ParameterBlock(4), np.zeros(2, np.int64)
block.fill(numbers.ctypes.data, 1, numbers[1:].ctypes.data)
child = os.fork()
if child == 0:
    launch(count_kernel().address, block.address, 1)
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert os.sched_getaffinity(number) == os.sched_getaffinity(0)
"""


@linux_only
def test_a_forked_child_leaves_its_parents_helpers_alone(apart: Apart) -> None:
    """An engine that a child inherits computes there without touching threads of the parent."""
    apart.run(TOUCH)


@linux_only
def test_a_forked_child_places_its_own_helpers(apart: Apart) -> None:
    """Also when the parent was placing one in the moment of the fork."""
    apart.run(PLACED_FORK)


def test_a_forked_child_has_helpers_of_its_own(apart: Apart) -> None:
    """After a fork both processes compute with helpers, and both end cleanly."""
    apart.run(FORK)
