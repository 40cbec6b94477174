"""How many threads compute, and what the host's torch and OpenMP see of it: nothing."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from pagedcore_kernels.cpu.runtime import openmp, threads
from pagedcore_kernels.cpu.runtime.threads import Computing, num_threads, torch_beside_kernels
from support.doubles import raising

libgomp_only = pytest.mark.skipif(openmp.openmp_threads() is None, reason="torch brings no libgomp here")


def openmp_setting() -> int:
    (path,) = (Path(torch.__file__).parent / "lib").glob("libgomp*.so*")
    return int(ctypes.CDLL(str(path)).omp_get_max_threads())


@libgomp_only
def test_torch_computes_alone_beside_kernels_and_the_host_gets_its_setting_back() -> None:
    """Inside, torch uses one thread; another thread never sees that; afterwards everything is as before."""
    torch.set_num_threads(3)
    seen: list[int] = []
    with Computing(2), torch_beside_kernels():
        assert torch.get_num_threads() == openmp_setting() == 1
        assert num_threads() == 2
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
    assert seen == [3]
    assert torch.get_num_threads() == openmp_setting() == num_threads() == 3


@libgomp_only
def test_the_setting_returns_after_an_error() -> None:
    """A forward that fails leaves the host's setting alone."""
    torch.set_num_threads(3)
    with pytest.raises(KeyError), Computing(2), torch_beside_kernels():
        raise KeyError
    assert torch.get_num_threads() == openmp_setting() == num_threads() == 3


def interrupt_at(num_lines: int, computing: Computing) -> bool:
    """Compute, and raise KeyboardInterrupt before that line of ``threads.py``; return whether it came so far."""
    left = num_lines

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != threads.__file__:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        with computing, torch_beside_kernels():
            pass
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@libgomp_only
def test_the_setting_returns_wherever_an_interrupt_comes() -> None:
    """Ctrl-C before any line of the way in and out leaves the host's setting alone, and that of kernels outside of the
    context is the host's again after the next use of it."""
    torch.set_num_threads(3)
    lines = 0
    while interrupt_at(lines + 1, computing := Computing(2)):
        lines += 1
        assert torch.get_num_threads() == openmp_setting() == 3, f"interrupted before line {lines}"
        with computing:
            assert num_threads() == 2
        assert num_threads() == 3, f"interrupted before line {lines}"
    assert lines > 20


@libgomp_only
def test_a_backend_may_run_an_engine_of_its_own() -> None:
    """One computation inside of another leaves the outer one its threads, and the host its setting."""
    torch.set_num_threads(3)
    with Computing(2), torch_beside_kernels():
        with Computing(2, uses_openmp=True), torch_beside_kernels():
            pass
        assert (num_threads(), torch.get_num_threads()) == (2, 1)
    assert torch.get_num_threads() == openmp_setting() == num_threads() == 3


@libgomp_only
def test_torch_has_its_threads_where_kernels_run_on_them() -> None:
    """Where torch computes much, both use its threads, as many as were asked for."""
    torch.set_num_threads(1)
    with Computing(2, uses_openmp=True), torch_beside_kernels():
        assert torch.get_num_threads() == openmp_setting() == 2
    assert torch.get_num_threads() == 1


def test_outside_of_an_engine_torch_is_left_alone() -> None:
    """A model that is called without a number of threads computes as the host says."""
    torch.set_num_threads(3)
    with torch_beside_kernels():
        assert torch.get_num_threads() == 3


def test_without_libgomp_there_is_nothing_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where torch has no libgomp, kernels run on the team and torch is left alone; a lack of file handles says nothing.
    """
    monkeypatch.setattr(openmp.torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    assert openmp.openmp_threads.__wrapped__() is None
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    assert openmp.openmp_threads.__wrapped__() is None
    monkeypatch.setattr(os, "scandir", raising(OSError(errno.EMFILE, "Too many open files")))
    monkeypatch.setattr(os, "listdir", raising(OSError(errno.EMFILE, "Too many open files")))
    with pytest.raises(OSError, match="Too many"):
        openmp.openmp_threads.__wrapped__()
