"""The floating-point state of the host's threads changes no bit of a result, and every call leaves it as it was."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch

from pagedcore.config.engine_config import EngineConfig
from pagedcore.engine.builder import build_components
from pagedcore.engine.engine import Engine
from pagedcore.execution import compute_threads
from pagedcore.models.loading import resolve_backend
from pagedcore.outputs import RequestOutput
from pagedcore.sampling_params import SamplingParams
from pagedcore.serving.async_engine import AsyncEngine
from pagedcore_kernels.cpu.runtime.openmp import openmp_threads
from support.doubles import FakeClock, ToyBackend
from support.engine_builders import make_engine
from support.families import tiny_model
from support.host_floats import DEFAULT, MODES, host_floats, set_mode, state_of_this_thread, states_of, x86_glibc_only
from support.interrupts import Lost, interrupted_at, lose
from support.step_scenario import params

pytestmark = x86_glibc_only
PROMPTS = [[7, 9, 11, 30, 5], [12, 60, 3]]
ASKED = SamplingParams(max_tokens=3, ignore_eos=True, seed=1, temperature=0.8, return_logits=True)
SETTINGS: dict[str, Any] = {"num_kv_blocks": 32, "enable_prefix_caching": False}


@pytest.fixture(autouse=True)
def _no_installed_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDCORE_DISABLE_PLUGIN_AUTOLOAD", "1")


def denormal_model() -> Any:
    """A model of which most logits are denormal numbers."""
    model = tiny_model("qwen2", tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[1::2] *= 1e-39
    return model


def answer_of(outputs: list[RequestOutput]) -> list[object]:
    return [(one.outputs[0].token_ids, one.outputs[0].logits.tobytes()) for one in outputs]


def ask(engine: Engine) -> list[object]:
    return answer_of(engine.generate(PROMPTS, ASKED, show_progress=False))


@pytest.fixture(scope="module")
def ordinary() -> Engine:
    return Engine.from_pretrained(denormal_model(), num_threads=1, **SETTINGS)


@pytest.mark.parametrize("mode", MODES)
def test_no_mode_of_the_host_reaches_a_result(
    mode: str, ordinary: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set before the model is loaded or afterwards, in the thread that loads or in the one that steps, with one thread
    and with two; and each would reach one if the step did not take care.
    """
    expected, model = ask(ordinary), denormal_model()
    with host_floats(mode):
        assert ask(ordinary) == expected
        engine = Engine.from_pretrained(model, num_threads=2, **SETTINGS)
        assert engine.stats().is_schedule_invariant
        assert ask(engine) == expected
    with ThreadPoolExecutor(1) as other:
        assert other.submit(ask, engine).result() == expected
    with host_floats(mode), monkeypatch.context() as careless:
        careless.setattr(ordinary._runner, "floats", nullcontext())
        careless.setattr(ordinary._runner._threads, "floats", nullcontext())
        assert ask(ordinary) != expected


def test_an_engine_thread_begins_with_the_mode_of_its_maker(ordinary: Engine) -> None:
    """An ``AsyncEngine`` answers as an engine does."""
    model = denormal_model()
    with host_floats("up"), AsyncEngine.from_pretrained(model, num_threads=2, **SETTINGS) as engine:
        outputs = [engine.submit(prompt, ASKED).result() for prompt in PROMPTS]
    assert answer_of(outputs) == ask(ordinary)


@pytest.mark.skipif(openmp_threads() is None, reason="torch brings no libgomp here")
def test_threads_of_torch_compute_with_the_default_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a model is loaded, and where torch multiplies its matrices. They began with a mode of the host's, and have
    it again afterwards.
    """
    openmp, seen = openmp_threads(), list[set[int]]()
    assert openmp is not None
    monkeypatch.setattr(compute_threads, "num_usable_cores", lambda: 2)

    class Backend(ToyBackend):
        computes_in_torch = True

        def forward(self, batch: Any) -> Any:
            seen.append(states_of(openmp.run))
            return super().forward(batch)

    def load(*_: object) -> ToyBackend:
        seen.append(states_of(openmp.run))
        return Backend()

    def live() -> None:
        torch.set_num_threads(2)
        with host_floats("up") as host:
            assert states_of(openmp.run) == {host.modes}
            backend = resolve_backend("a model", EngineConfig(model_backend="loads"), lambda table, name: load)
            assert states_of(openmp.run) == {host.modes}
            engine = make_engine(backend, num_threads=2)
            engine.add_request([1, 2], params(1))
            engine.step()
            assert states_of(openmp.run) == {host.modes}

    with ThreadPoolExecutor(1) as host_thread:
        host_thread.submit(live).result()
    assert seen == [{DEFAULT.modes}] * 2


def test_code_of_the_host_inside_a_step_changes_nothing_for_what_follows() -> None:
    """A clock, which stands for a policy and an observer too, and logits processors: they see the default, and what
    they set ends with them.
    """
    seen: list[int] = []

    def look_and_change(token_ids: list[int], row: Any) -> Any:
        seen.append(state_of_this_thread().modes)
        set_mode("up")
        return row

    class Backend(ToyBackend):
        def forward(self, batch: Any) -> Any:
            seen.append(state_of_this_thread().modes)
            return super().forward(batch)

    class Clock(FakeClock):
        def now(self) -> float:
            if state_of_this_thread().modes == DEFAULT.modes:
                set_mode("down")
            return super().now()

    with host_floats("towards zero") as host, Engine(build_components(Backend(), num_kv_blocks=16), Clock()) as engine:
        asked = SamplingParams(max_tokens=2, ignore_eos=True, logits_processor=look_and_change)
        requests = [engine.add_request([i], asked) for i in (1, 2)]
        while engine.has_pending_requests():
            engine.step()
            assert state_of_this_thread().modes == host.modes
    assert seen == [DEFAULT.modes] * 6
    assert [len(one.output().outputs[0].token_ids) for one in requests] == [2, 2]


def fail(batch: Any) -> Any:
    raise ValueError


def interrupt(batch: Any) -> Any:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("forward", "raised"), [(fail, None), (lambda batch: lose(), Lost),
                                                 (interrupt, KeyboardInterrupt)])
def test_a_step_that_fails_leaves_the_hosts_state(
    forward: Callable[[Any], Any], raised: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that raises, whatever another thread raises in this one, and Ctrl-C; and so does closing the engine."""
    engine = make_engine()
    engine.add_request([1, 2], params(3))
    with host_floats("up"), engine:
        with monkeypatch.context() as patch, pytest.raises(raised) if raised is not None else nullcontext():
            patch.setattr(engine._runner.backend, "forward", forward)
            engine.step()
        assert state_of_this_thread().modes != DEFAULT.modes
        engine.step()


def test_a_step_that_is_broken_off_at_any_line_leaves_the_hosts_state() -> None:
    """Whatever line of this package it is, and however the step is undone."""
    engine, line, is_over = make_engine(check_invariants=False), 0, False
    with host_floats("up") as host:
        while not is_over:
            line += 1
            request = engine.add_request([1, 2, 3], params(2))
            try:
                with interrupted_at(line):
                    engine.step()
                is_over = True
            except Lost:
                assert state_of_this_thread().modes == host.modes, f"line {line}"
            request.abort()
            request.remove()
    assert line > 100


def test_a_host_that_asks_for_sigfpe_gets_none_from_an_engine(ordinary: Engine) -> None:
    """Invalid operations and divisions by zero, which kernels may meet, end no process; the host's wish stays."""
    expected, model = ask(ordinary), denormal_model()
    # Why in a child: the signal would end this process.
    if (child := os.fork()) == 0:
        with suppress(BaseException):
            set_mode("trapping")
            before = state_of_this_thread().modes
            engine = Engine.from_pretrained(model, num_threads=2, host_kv_memory="1MiB", **SETTINGS)
            answers = [ask(engine), ask(ordinary)]
            os._exit(0 if answers == [expected] * 2 and state_of_this_thread().modes == before else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
