"""The threads of a step: as many as the host, the operator and the machine allow, and no bit depends on them."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from pagedcore import Engine, SamplingParams
from pagedcore.errors import InvalidConfig
from pagedcore.execution import compute_threads
from pagedcore.execution.compute_threads import ComputeThreads, Way
from pagedcore_kernels.cpu.runtime import openmp
from pagedcore_kernels.cpu.runtime.team import the_team
from pagedcore_kernels.cpu.runtime.threads import num_threads
from support.interrupts import Lost, interrupted_at


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process could use eight cores, on any machine."""
    monkeypatch.setattr(compute_threads, "num_usable_cores", lambda: 8)


def threads_inside(threads: ComputeThreads) -> int:
    with threads.step(4):
        return num_threads()


@pytest.mark.parametrize(("most", "host", "expected"), [(None, 3, 3), (None, 99, 8), (2, 3, 2), (5, 3, 5), (99, 1, 8)])
def test_the_number_of_threads(most: int | None, host: int, expected: int) -> None:
    """The host's number for torch, or the operator's own, but never more than the cores there are."""
    torch.set_num_threads(host)
    assert threads_inside(ComputeThreads(most)) == expected


def test_a_host_that_changes_its_mind_is_followed() -> None:
    """``torch.set_num_threads`` counts from the next step on."""
    threads = ComputeThreads()
    torch.set_num_threads(3)
    assert threads_inside(threads) == 3
    torch.set_num_threads(2)
    assert threads_inside(threads) == 2


def test_a_first_step_may_be_interrupted_at_any_line() -> None:
    """The threads that a host changed to are there for the next step, whatever broke off the one that found out."""

    def interrupt() -> int:
        line, is_over = 0, False
        while not is_over:
            line += 1
            threads = ComputeThreads(2)
            with suppress(Lost), interrupted_at(line) as count, threads.step(4):
                pass
            is_over = count[0] < line
            with threads.step(4):
                assert threads.last_way in threads._contexts
        return line

    # Why a thread: an interrupt within a switch of torch's threads leaves that thread's setting as it was switched.
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(interrupt).result() > 20


def test_other_libraries_products_keep_their_number_of_threads() -> None:
    """Where torch multiplies, the number of threads could change bits: it is never judged."""
    torch.set_num_threads(2)
    threads = ComputeThreads(computes_in_torch=True)
    for _ in range(200):
        assert threads_inside(threads) == 2
        assert threads.last_way == Way(2, uses_openmp=True)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_bad_numbers_of_threads_are_refused(value: object) -> None:
    """The setting is a count or None; what is wrong is named before anything is loaded."""
    with pytest.raises(InvalidConfig, match="num_threads"):
        Engine.from_pretrained("demo", num_threads=value)


def test_a_setting_of_one_thread_uses_no_helper() -> None:
    """With ``num_threads=1`` an engine computes on its own thread alone, with the same completions."""
    torch.set_num_threads(2)
    completions, joins = [], []
    for number in (1, 2):
        with Engine.from_pretrained("demo", num_threads=number) as engine:
            before = the_team().counters().num_runs
            outputs = engine.generate(["What is 2 + 3?"] * 4, SamplingParams(max_tokens=8), show_progress=False)
            completions.append([output.outputs[0].token_ids for output in outputs])
            joins.append(the_team().counters().num_runs - before)
    assert completions[0] == completions[1]
    assert joins[0] == 0 < joins[1]


def test_switching_between_one_thread_and_all_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the number of threads changes between two steps, log-probabilities are the same bits."""
    torch.set_num_threads(3)
    params = SamplingParams(max_tokens=24, logprobs=3, ignore_eos=True)

    def run(engine: Engine) -> list[object]:
        outputs = engine.generate(["What is 2 + 3?", "Name a colour."] * 3, params, show_progress=False)
        return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]

    with Engine.from_pretrained("demo", enable_prefix_caching=False) as engine:
        expected, ways, chosen = run(engine), [Way(3), Way(1)], []
        choice = engine._runner._threads._choice
        monkeypatch.setattr(choice, "choose", lambda *_: chosen.append(ways[len(chosen) % 2]) or chosen[-1])
        assert run(engine) == expected
    assert len(chosen) > 20


def test_a_foreign_backend_keeps_torchs_threads() -> None:
    """While a model of another library computes, torch has the host's number of threads."""
    from support.doubles import ToyBackend

    seen: list[int] = []

    class Watching(ToyBackend):
        def forward(self, batch):  # type: ignore[no-untyped-def]
            seen.append(torch.get_num_threads())
            return super().forward(batch)

    torch.set_num_threads(3)
    with Engine.from_pretrained(Watching()) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3), show_progress=False)
    assert set(seen) == {3}


def test_the_host_finds_its_settings_as_they_were() -> None:
    """Loading, stepping and closing an engine change no number of threads of torch, on this thread or another."""
    torch.set_num_threads(3)
    with Engine.from_pretrained("demo") as engine:
        engine.generate(["What is 2 + 3?"], SamplingParams(max_tokens=4), show_progress=False)
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 3


FORK = """
import os, signal, sys, torch
from pagedcore import Engine, SamplingParams
# Not by torch.set_num_threads: torch then has a pool of threads that crashes at the end of a child that starts any.
torch.ones(1 << 22).exp()
def complete(engine, **options):
    params = SamplingParams(**{"max_tokens": 8} | options)
    outputs = engine.generate(["What is 2 + 3?"] * 4, params, show_progress=False)
    return [one.outputs[0].token_ids for one in outputs]
# Float32 everywhere: its blocks are large enough for torch to copy them with several threads.
engine = Engine.from_pretrained("demo", dtype="float32")
expected = complete(engine)
child = os.fork()
if child == 0:
    assert complete(Engine.from_pretrained("demo", dtype="float32")) == expected
    assert complete(engine) == expected
    # Ctrl-C in the middle of a kernel or between two: far less time than the completions take.
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.002)
        complete(engine, max_tokens=64, ignore_eos=True)
        sys.exit("was not interrupted")
    except KeyboardInterrupt:
        assert not engine.has_pending_requests()
    assert complete(engine) == expected
    assert torch.get_num_threads() == 2
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert complete(engine) == expected
"""


def test_a_forked_child_can_build_an_engine() -> None:
    """In a child of a process whose engine and torch have computed on several threads, a new engine works.

    So does the parent's own engine, also after Ctrl-C in the child.
    """
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", FORK], env=environment, check=True, timeout=280)


def test_a_forked_child_never_waits_for_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    """There even an engine whose products are torch's computes without OpenMP's helpers, which are gone."""
    monkeypatch.setattr(openmp, "_is_forked", True)
    torch.set_num_threads(2)
    from pagedcore_kernels.cpu.runtime.threads import Computing, torch_beside_kernels

    with Computing(2, uses_openmp=True), torch_beside_kernels():
        assert torch.get_num_threads() == 1
    with openmp.usable_torch():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
