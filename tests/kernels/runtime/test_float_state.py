"""The floating-point state of threads that compute is the default, and the host finds its own afterwards."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest
import torch

from pagedcore_kernels.cpu.runtime.float_state import DefaultFloatState, use_default_floats
from pagedcore_kernels.cpu.runtime.openmp import openmp_threads
from pagedcore_kernels.cpu.runtime.team import Team
from support.host_floats import DEFAULT, MODES, host_floats, state_of_this_thread, states_of, x86_glibc_only

pytestmark = x86_glibc_only


@pytest.mark.parametrize("mode", MODES)
def test_inside_it_is_the_default_and_afterwards_what_it_was(mode: str) -> None:
    """Nested, by an exception, and after code of the host has changed it inside."""
    state = DefaultFloatState()
    with host_floats(mode) as before:
        assert before != DEFAULT
        with state:
            assert state_of_this_thread() == DEFAULT
            with suppress(KeyError), state:
                torch.set_flush_denormal(True)
                use_default_floats()
                assert state_of_this_thread() == DEFAULT
                raise KeyError
            assert state_of_this_thread() == DEFAULT
        assert state_of_this_thread() == before


def test_no_function_of_python_runs_on_the_way_in_or_out() -> None:
    """Python raises interrupts at the beginning and between the lines of its functions, and there would be one with the
    state changed and no context to change it back."""
    state, called = DefaultFloatState(), list[str]()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        with state:
            pass
    finally:
        sys.setprofile(None)
    assert called == []


def test_helpers_have_the_default_whoever_starts_them() -> None:
    """A thread begins with the state of the one that makes it."""
    team = Team()
    with host_floats("up") as host:
        assert states_of(team.launcher(0, 1)) == {host.modes, DEFAULT.modes}
    assert team.close()


@pytest.mark.skipif(openmp_threads() is None, reason="torch brings no libgomp here")
def test_threads_of_torch_are_included_where_they_compute() -> None:
    """They began with what the host had set, compute with the default, and have their own state back afterwards."""

    openmp = openmp_threads()
    assert openmp is not None

    def compute() -> None:
        with host_floats("up") as host:
            assert states_of(openmp.run) == {host.modes}
        both = {host.modes, DEFAULT.modes}
        assert states_of(openmp.run) == both
        with DefaultFloatState():
            assert states_of(openmp.run) == both
        with DefaultFloatState(2):
            assert states_of(openmp.run) == {DEFAULT.modes}
        assert states_of(openmp.run) == both

    # Why: what threads help is a property of the one that they help, and no test has used this one.
    with ThreadPoolExecutor(1) as host_thread:
        host_thread.submit(compute).result()
