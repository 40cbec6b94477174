"""Health is judged by progress: a thread that exists but does not get on is not healthy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from pagedcore.engine.builder import build_components
from pagedcore.engine.engine import Engine
from pagedcore.errors import EngineClosed, InvalidLogits
from pagedcore.sampling_params import SamplingParams
from pagedcore.serving.async_engine import AsyncEngine
from pagedcore.serving.health import IDLE_CHECK_S, MAX_FAILED_STEPS, Health, Progress
from support.async_helpers import broken_step, complete, wait_until
from support.doubles import FakeClock, FlakyBackend, ToyBackend, ToyStore, toy_answer
from support.engine_builders import make_engine


def judge(progress: Progress, is_alive: bool = True) -> Health:
    return progress.judge(is_alive=is_alive, degraded_after_s=10.0)


class BlockedBackend(ToyBackend):
    """A toy whose forward begins and does not end before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def forward(self, batch):  # type: ignore[no-untyped-def]
        self.go_on.wait()
        return super().forward(batch)


@pytest.fixture
def blocked() -> Iterator[BlockedBackend]:
    """A backend that hangs until the test is over."""
    backend = BlockedBackend()
    yield backend
    backend.go_on.set()


def test_silence_degrades_and_progress_makes_ready_again() -> None:
    """The verdict depends on the time since the last mark alone; no silence is as good as a thread that was given up.
    """
    clock = FakeClock()
    progress = Progress(clock)
    seen = []
    for seconds in (9.0, 2.0, 1e6):
        clock.advance(seconds)
        seen.append(judge(progress).status)
    progress.step_ended(has_output=False, has_failed=False)
    assert [*seen, judge(progress).status] == ["ready", "degraded", "degraded", "ready"]
    progress.is_given_up = True
    assert judge(progress).status == "dead"


def test_failed_steps_in_a_row_degrade_and_one_good_step_heals() -> None:
    """A model that fails step after step is said so; a look around in between does not heal it."""
    progress = Progress(FakeClock())
    for _ in range(MAX_FAILED_STEPS):
        assert judge(progress).status == "ready"
        progress.step_ended(has_output=True, has_failed=True)
        progress.step_ended(has_output=False, has_failed=False)
    assert judge(progress) == Health("degraded", f"the last {MAX_FAILED_STEPS} steps failed", 0.0, MAX_FAILED_STEPS)
    progress.step_ended(has_output=True, has_failed=False)
    assert judge(progress).status == "ready"


class NoLogitsBackend(ToyBackend):
    """A toy that returns nothing usable for any request."""

    def forward(self, batch):  # type: ignore[no-untyped-def]
        return super().forward(batch) * float("nan")


async def test_requests_that_fail_by_themselves_are_not_failed_steps() -> None:
    """However many in a row end with an error of their own."""
    async with AsyncEngine(make_engine(NoLogitsBackend())) as engine:
        for _ in range(2 * MAX_FAILED_STEPS):
            output = await asyncio.wrap_future(engine.submit([1]))
            assert isinstance(output.outputs[0].error, InvalidLogits)
            assert engine.health().status == "ready"


async def test_health_turns_bad_when_loop_thread_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose thread ended by a defect is dead at once, without waiting for a limit."""
    inner = make_engine()
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    engine = AsyncEngine(inner)
    assert engine.health().status == "ready"
    monkeypatch.setattr(inner, "step_pending", broken_step)
    with pytest.raises(EngineClosed):
        await complete(engine, [1], 5)
    assert engine.health().status == "dead"
    await asyncio.to_thread(wait_until, lambda: not engine.is_alive)


async def test_health_turns_bad_when_loop_thread_hangs(blocked: BlockedBackend) -> None:
    """A thread that exists but sits in one step is degraded, and ready again after its next step."""
    with AsyncEngine(make_engine(blocked)) as engine:
        hanging = asyncio.create_task(complete(engine, [1], 3))
        await asyncio.to_thread(wait_until, lambda: engine.health(degraded_after_s=0.05).status == "degraded")
        assert engine.is_alive
        blocked.go_on.set()
        assert await hanging == toy_answer([1], 3)
        assert engine.health().status == "ready"


async def test_waiting_for_blocks_on_their_way_is_no_progress() -> None:
    """A thread that looks around while a transfer keeps everybody waiting is degraded; with the blocks it is ready."""
    engine = Engine(build_components(
        ToyBackend(), num_kv_blocks=6, block_size=4, max_num_seqs=4, max_num_batched_tokens=16,
        host_kv_memory=48 * 4 * ToyBackend.kv_bytes_per_token, preemption="swap",
    ), FakeClock())
    for prompt, max_tokens in (([3] * 16, 4), ([4] * 20, 4)):
        engine.generate([prompt], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    store: ToyStore = engine.components.runner.backend.cache_store  # type: ignore[attr-defined]
    store.is_slow = store.is_hung = True
    prompt = [*([3] * 16), 1]
    async with AsyncEngine(engine) as running:
        waiting = asyncio.create_task(complete(running, prompt, 3))
        await asyncio.to_thread(wait_until, lambda: bool(store.under_way))
        await asyncio.to_thread(wait_until, lambda: running.health(degraded_after_s=0.05).status == "degraded")
        store.is_hung = False
        assert await waiting == toy_answer(prompt, 3)
        # Why: the mark comes after the answer.
        await asyncio.to_thread(
            wait_until, lambda: running.health(degraded_after_s=IDLE_CHECK_S + 1.0).status == "ready")


def test_an_idle_engine_keeps_showing_progress() -> None:
    """Nothing to do is not a standstill: the thread looks around and leaves its mark."""
    with AsyncEngine(make_engine()) as engine:
        wait_until(lambda: engine.health().silent_s > 0.5 * IDLE_CHECK_S)
        wait_until(lambda: engine.health().silent_s < 0.5 * IDLE_CHECK_S)


async def test_a_model_that_fails_every_step_is_degraded() -> None:
    """The engine survives each failed step, but says that the model is at fault."""
    class Broken(FlakyBackend):
        def forward(self, batch):  # type: ignore[no-untyped-def]
            raise RuntimeError("the device is gone")

    with AsyncEngine(make_engine(Broken())) as engine:
        for _ in range(MAX_FAILED_STEPS):
            assert engine.health().status == "ready"
            await complete(engine, [1], 3)
        await asyncio.to_thread(wait_until, lambda: engine.health().status == "degraded")


def test_a_closed_engine_is_dead() -> None:
    """After closing there is nothing left to hope for."""
    engine = AsyncEngine(make_engine())
    engine.close()
    assert engine.health().status == "dead"
