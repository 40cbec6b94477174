"""Requests of an ``AsyncEngine`` that wait for company: its thread keeps serving everything else."""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import Any

import pytest

from pagedcore import AsyncEngine, SamplingParams
from pagedcore.errors import EngineClosed, QueueTimeout
from pagedcore.serving.engine_loop import EngineLoop
from support.async_helpers import wait_until
from support.doubles import ToyBackend, toy_answer

FOUR = SamplingParams(max_tokens=4, ignore_eos=True)
HOUR_MS = 3_600_000


def make(**settings: Any) -> AsyncEngine:
    """An engine whose gate only company opens."""
    defaults = {"num_kv_blocks": 32, "max_num_seqs": 4, "max_num_batched_tokens": 8, "min_batch_size": 3}
    return AsyncEngine.from_pretrained(ToyBackend(), **{**defaults, "max_wait_ms": HOUR_MS, **settings})


def test_the_request_that_completes_the_number_starts_all() -> None:
    """Two requests wait for an hour, the third one starts them: all complete, with their own tokens."""
    with make() as engine:
        futures = [engine.submit([number], FOUR) for number in range(2)]
        assert engine.stats().num_running == 0
        assert not any(future.done() for future in futures)
        futures.append(engine.submit([2], FOUR))
        for number, future in enumerate(futures):
            assert future.result(timeout=60).outputs[0].token_ids == tuple(toy_answer([number], 4))


def test_a_lonely_request_starts_by_itself() -> None:
    """Without company a request starts after max_wait_ms."""
    with make(max_wait_ms=5) as engine:
        assert engine.submit([1], FOUR).result(timeout=60).outputs[0].token_ids == tuple(toy_answer([1], 4))


def test_a_cancelled_request_leaves_the_queue() -> None:
    """An abort is carried out while all wait, and the one that is gone is no company for others."""
    with make() as engine:
        gone = engine.submit([1], FOUR)
        assert engine.stats().num_waiting == 1
        gone.cancel()
        kept = [engine.submit([number], FOUR) for number in range(2)]
        while engine.stats().num_waiting != 2:
            pass
        assert not any(future.done() for future in kept)
        kept.append(engine.submit([2], FOUR))
        assert [len(future.result(timeout=60).outputs[0].token_ids) for future in kept] == [4] * 3
        with pytest.raises(CancelledError):
            gone.result()


def test_a_gated_request_times_out() -> None:
    """queue_timeout_s ends a request that waits for company."""
    with make(queue_timeout_s=0.02) as engine:
        output = engine.submit([1], FOUR).result(timeout=60)
        assert isinstance(output.outputs[0].error, QueueTimeout)


def test_close_ends_what_waits_for_company() -> None:
    """Closing does not wait for the gate, and the waiting caller gets EngineClosed."""
    engine = make()
    future = engine.submit([1], FOUR)
    assert engine.stats().num_waiting == 1
    engine.close()
    with pytest.raises(EngineClosed):
        future.result(timeout=60)


def test_health_is_ready_while_all_wait() -> None:
    """A thread that waits for company leaves its marks: it is neither idle for too long nor silent."""
    with make() as engine:
        future = engine.submit([1], FOUR)
        for _ in range(3):
            mark = engine._progress.mark
            wait_until(lambda mark=mark: engine._progress.mark != mark)  # type: ignore[misc]
        assert engine.health().status == "ready"
        assert not future.done()


def test_the_lull_is_bounded_by_max_wait_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    """max_wait_ms=0 lets the first request of an idle engine start without a look for others."""
    gathered: list[float] = []
    monkeypatch.setattr(EngineLoop, "_gather", lambda loop: gathered.append(loop._gather_s))
    for wait_ms, most_s in ((0, 0.0), (None, 0.01), (2, 0.002)):
        with make(min_batch_size=1, max_wait_ms=wait_ms) as engine:
            engine.submit([1], FOUR).result(timeout=60)
        assert gathered[-1] == most_s
