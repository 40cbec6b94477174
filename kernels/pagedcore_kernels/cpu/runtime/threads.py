"""How many threads the calling thread computes with, and which: the team's, or for a while OpenMP's.

Owns the setting, which belongs to the calling thread and is valid inside of ``Computing``. Outside of it, kernels run
on as many threads as torch would use.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from pagedcore_kernels.cpu.runtime.openmp import is_forked, openmp_threads
from pagedcore_kernels.cpu.runtime.team import the_team

_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
Launcher = Callable[[int, int, int], None]
"""``launch(entry, parameters, helpers)``, or ``launch(calls, number, helpers)`` of a list of calls."""


@dataclass(frozen=True, slots=True)
class _Threads:
    """What kernels run on."""

    num_threads: int
    """0: as many as torch uses."""
    launch: Launcher | None = None
    launch_all: Launcher | None = None
    wake: Callable[[], None] | None = None
    uses_openmp: bool = False


_OF_TORCH = _Threads(0)


class _Setting(threading.local):
    """What ``Computing`` sets, for one thread."""

    threads = _OF_TORCH
    of_host: tuple[int, int] | None = None
    """Threads of torch and of MKL that the host has set, while they are changed."""


_setting = _Setting()


def num_threads() -> int:
    """How many threads a kernel of the calling thread runs on at most."""
    return _setting.threads.num_threads or torch.get_num_threads()


def num_threads_of_torch() -> int:
    """How many threads torch uses for what the calling thread computes."""
    return torch.get_num_threads()


class Computing:
    """A context in which kernels run on so many threads, the calling one among them; one thread at a time enters it."""

    __slots__ = ("_before", "_own")

    def __init__(self, num_threads: int, *, slot: int = 0, uses_openmp: bool = False) -> None:
        """Prepare the context.

        Args:
            num_threads: at least 1.
            slot: the caller's place in the team; 0 is everybody's.
            uses_openmp: run kernels on torch's threads; without effect where torch does not use libgomp, and in a
                forked child.
        """
        openmp = openmp_threads() if uses_openmp and num_threads > 1 and not is_forked() else None
        if openmp is not None:
            self._own = _Threads(num_threads, openmp.run, uses_openmp=True)
        elif num_threads > 1:
            team, helpers = the_team(), num_threads - 1
            launchers = team.launcher(slot, helpers), team.list_launcher(slot, helpers)
            self._own = _Threads(num_threads, *launchers, partial(team.wake, helpers))
        else:
            self._own = _Threads(1)
        self._before = _OF_TORCH

    def __enter__(self) -> None:
        # Why asked: an interrupt may have come before the last exit was over, and what was before that is still known.
        if _setting.threads is not self._own:
            self._before = _setting.threads
        _setting.threads = self._own

    def __exit__(self, *_: object) -> None:
        if self._before is _OF_TORCH:
            _return_torch()
        _setting.threads = self._before


@contextmanager
def torch_beside_kernels() -> Iterator[None]:
    """Prepare for many kernels with some work of torch between them: wake the helpers for the first one, and let torch
    compute on the calling thread alone until the block is left, or on its threads if kernels do so too.

    Why: its helpers would spin on the cores of the team's. The setting of other threads, and of this one afterwards, is
    the host's. Outside of ``Computing`` nothing changes, nor inside of another such block.
    """
    openmp, threads = openmp_threads(), _setting.threads
    if threads.wake is not None:
        threads.wake()
    if openmp is None or threads is _OF_TORCH or _setting.of_host is not None:
        yield
        return
    wanted = threads.num_threads if threads.uses_openmp else 1
    # Why first: an interrupt may come between any two lines, and the host's number must be known then.
    _setting.of_host = torch.get_num_threads(), 0
    try:
        _setting.of_host = _setting.of_host[0], openmp.set(wanted, wanted)
        yield
    finally:
        _return_torch()


def _return_torch() -> None:
    """Give torch the host's numbers of threads back, unless that has been done.

    Why asked twice, by ``Computing`` too: an interrupt may come before the first time is over.
    """
    openmp, before = openmp_threads(), _setting.of_host
    if openmp is not None and before is not None:
        openmp.set(*before)
        _setting.of_host = None


def launch(entry: int, parameters: int, most_threads: int | None) -> None:
    """Call the C function at address ``entry`` with ``parameters`` on the present threads; see ``Kernel.run``."""
    threads = _setting.threads
    number = threads.num_threads or torch.get_num_threads()
    if most_threads is not None and most_threads < number:
        number = most_threads
    if number <= 1:
        _ENTRY(entry)(parameters)
    elif threads.launch is not None:
        threads.launch(entry, parameters, number - 1)
    else:
        the_team().launcher(0, number - 1)(entry, parameters, number - 1)


def launch_all(calls: npt.NDArray[np.int64]) -> None:
    """Make calls one after the other: int64 [n, 3] of entry, parameters and most threads; see ``launch``."""
    threads = _setting.threads
    if threads.launch_all is not None:
        threads.launch_all(calls.ctypes.data, len(calls), threads.num_threads - 1)
    else:
        for entry, parameters, most_threads in calls.tolist():
            launch(entry, parameters, most_threads)
