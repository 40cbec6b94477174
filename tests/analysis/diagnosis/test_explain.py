"""Why a request waits, in numbers; and what an engine says unasked when a step fails or nothing progresses."""

from __future__ import annotations

import errno
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest

from pagedcore import AsyncEngine, Engine, RequestOutput, SamplingParams
from pagedcore.analysis.recorder.dumps import MAX_DUMPS
from pagedcore.analysis.recorder.recording import read_recording
from pagedcore.analysis.replay.decisions import replay_decisions
from pagedcore.engine.wait_log import STALL_S, WaitLog
from pagedcore.errors import EngineHung
from pagedcore.serving.commands import Commands, Places
from pagedcore.serving.engine_loop import EngineLoop, StreamFlusher
from pagedcore.serving.stream import CompletionFuture
from support.async_helpers import wait_until
from support.doubles import FakeClock, FlakyBackend, GatedBackend, ToyBackend, raising
from support.recordings import toy_engine


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def steps(engine: Engine, clock: FakeClock, number: int) -> None:
    for _ in range(number):
        clock.advance(0.5)
        engine.step()


def test_blocks_and_their_holders() -> None:
    """A request that finds no room waits for blocks: how many it lacks, who holds how many, for how long, and for which
    reasons it has waited so far.
    """
    clock = FakeClock()
    with toy_engine("off", clock=clock, max_num_batched_tokens=64) as engine:
        holder = engine.add_request([1] * 20, params(6))
        steps(engine, clock, 1)
        asker = engine.add_request([2] * 17, params(3))
        behind = engine.add_request([3], params(1))
        steps(engine, clock, 4)
        found = engine.explain(asker.request_id)
        assert (found.state, found.reason, found.waited_s) == ("waiting", "blocks", 2.0)
        assert [(one.request_id, one.num_blocks, one.since_s) for one in found.holders] == [
            (holder.request_id, 6, 2.0)
        ]
        assert (found.num_lacking, found.num_available, found.num_pool_blocks) == (5, 2, 8)
        assert dict(found.waits_s)["blocks"] == pytest.approx(1.5)
        assert "1 requests hold 6 of 8 blocks, for up to 2.0 s; 2 are available, it lacks 5" in str(found)
        assert engine.explain(behind.request_id).num_before == 1
        assert engine.explain(holder.request_id).state == "decode"
        steps(engine, clock, 3)
        assert engine.explain(holder.request_id).state == "finished"
        assert engine.explain("nobody's").state == "unknown"


@pytest.mark.parametrize(("settings", "reason"), [
    ({"max_num_seqs": 1}, "rows"),
    ({"max_num_batched_tokens": 1, "max_num_seqs": 1, "admission": "guaranteed"}, "rows"),
    ({"min_batch_size": 3, "max_wait_ms": 60_000}, "company"),
    ({"scheduling_policy": "static"}, "batch"),
])
def test_other_reasons(settings: dict[str, Any], reason: str) -> None:
    """Rows, company and a static batch are told apart, as in ``StepStats.waits``."""
    with toy_engine("off", **settings) as engine:
        engine.add_request([1, 2, 3], params(5))
        if reason != "company":
            engine.step()
        other = engine.add_request([9, 2, 3], params(5), request_id="a label")
        found = engine.explain("a label")
        assert (found.request_id, found.reason) == (other.request_id, reason)


def test_a_shared_beginning() -> None:
    """A request whose prompt another one computes at the moment waits for that, not for blocks."""
    with toy_engine("off", num_kv_blocks=32) as engine:
        engine.add_request([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], params(2))
        engine.step()
        other = engine.add_request([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], params(2))
        assert engine.explain(other.request_id).reason in ("prefix", "tokens")
        engine.step()


def test_a_preempted_request_knows_its_pauses() -> None:
    """Each preemption is a pause with its start, and its end when the request runs again; waiting counts from there."""
    clock = FakeClock()
    with toy_engine("off", clock=clock, preemption="recompute", num_kv_blocks=6) as engine:
        requests = [engine.add_request([one, 2, 3], params(16)) for one in range(3)]
        paused = None
        while engine.has_pending_requests():
            steps(engine, clock, 1)
            paused = next((one for one in requests if one.metrics.pauses_s and not one.is_done), paused)
            if paused is not None and paused.metrics.pauses_s[-1][1] is None and not paused.is_done:
                found = engine.explain(paused.request_id)
                if found.reason:
                    assert found.waited_s == clock.now() - paused.metrics.pauses_s[-1][0]
                    assert found.num_preemptions >= 1
        assert paused is not None
        for one in requests:
            pauses = one.metrics.pauses_s
            assert len(pauses) == one.output().metrics.num_preemptions
            assert all(end_s is not None and end_s >= start_s for start_s, end_s in pauses)


def test_the_log_of_reasons_adds_up() -> None:
    """The seconds of all reasons between two times are the time between them, as far back as the log goes."""
    log = WaitLog()
    for now_s, reason in ((1.0, "blocks"), (3.0, "tokens"), (4.0, ""), (6.0, "blocks")):
        log.note(now_s, reason)
    assert dict(log.since(2.0, 7.0)) == {"blocks": 2.0, "tokens": 1.0, "new": 2.0}
    assert log.since(6.5, 7.0) == (("blocks", 0.5),)


def test_a_failed_step_leaves_a_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the model fails, the request's error names the file with the last steps, which can be replayed; only so many
    are written, and not one after the other; what could not be written does not count.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    clock = FakeClock()
    with toy_engine(backend=FlakyBackend(raise_on_step=3), clock=clock) as engine:
        request = engine.add_request([1, 2, 3], params(9))
        steps(engine, clock, 4)
        assert request.error is not None
        (path,) = tmp_path.glob("pagedcore-recording-*/failed-step.jsonl.gz")
        assert str(path) in request.error.__notes__[0]
        assert replay_decisions(read_recording(path)).difference is None
        engine.note_trouble("again")
        with monkeypatch.context() as patch:
            patch.setattr(tempfile, "mkdtemp", raising(OSError(errno.EMFILE, "Too many open files")))
            for _ in range(MAX_DUMPS):
                clock.advance(100.0)
                engine.note_trouble("again")
        assert len(list(tmp_path.glob("*/*.gz"))) == 1
        for _ in range(2 * MAX_DUMPS):
            clock.advance(100.0)
            engine.note_trouble("again")
        assert len(list(tmp_path.glob("*/*.gz"))) == MAX_DUMPS


def test_a_step_that_computes_ends_a_standstill() -> None:
    """Two steps without rows are no stall if others came between them, however long ago the first one was."""
    engine = toy_engine()
    engine.wait_log.stands_still(engine.clock.now() - 60.0, is_idle=True)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=2))
    engine.step()
    assert not engine.wait_log.is_idle


def test_a_stall_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """When nothing was computed for some seconds although there is work, one line of the log says which request waits
    for what, and the recording is written.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    clock, backend = FakeClock(), ToyBackend()
    host = 16 * 4 * backend.kv_bytes_per_token
    with toy_engine(backend=backend, clock=clock, host_kv_memory=host, preemption="swap", num_kv_blocks=6) as engine:
        for one in range(2):
            engine.add_request([one, 2, 3], params(16))
        store = backend.cache_store
        store.is_slow = store.is_hung = True
        while not engine.stats().num_preemptions:
            steps(engine, clock, 1)
        engine.abort_request(next(one.request_id for one in engine.requests if not one.metrics.pauses_s))
        with caplog.at_level(logging.WARNING, logger="pagedcore"):
            for _ in range(12):
                clock.advance(STALL_S / 10)
                engine.step()
        (line,) = [one.getMessage() for one in caplog.records if "although there is work" in one.message]
        assert "on their way" in line
        assert list(tmp_path.glob("pagedcore-recording-*/stall.jsonl.gz"))
        store.is_hung = False


async def test_an_engine_on_its_thread_explains() -> None:
    """``AsyncEngine.explain`` answers between two steps, by the engine's id or the caller's label; a request that the
    engine has no room for yet is "held".
    """
    backend = GatedBackend()
    backend.gate.set()
    engine = AsyncEngine(Engine.from_pretrained(
        backend, num_kv_blocks=8, block_size=4, max_num_seqs=1, max_num_waiting=2,
    ))
    try:
        backend.gate.clear()
        futures = [engine.submit([1, 2, 3], params(4), request_id=f"label {one}") for one in range(2)]
        wait_until(backend.is_entered.is_set)
        backend.gate.set()
        found = await engine.explain("label 1")
        assert found.reason in ("rows", "") or found.state == "finished"
        assert (await engine.explain("no label")).state == "unknown"
        for future in futures:
            future.result(60)
    finally:
        backend.gate.set()
        await engine.aclose()


def test_a_held_request_is_known_by_its_label() -> None:
    """What the loop holds because the engine's queue is full says so, and how many are before it."""
    clock = FakeClock()
    with toy_engine("off", clock=clock, max_num_waiting=1) as engine:
        loop = EngineLoop(engine, Commands(Places(8, lambda: 0)), StreamFlusher(0.0, clock))
        for place in range(3):
            sink = CompletionFuture[RequestOutput]()
            loop._commands.places.take(sink, 1, False)
            loop.accept(engine.prepare([1, 2], params(2), request_id=f"label {place}"), sink)
        clock.advance(2.0)
        assert loop.explain("label 0").state == "waiting"
        found = loop.explain("label 2")
        assert (found.state, found.waited_s, found.num_before) == ("held", 2.0, 1)


def test_a_hang_leaves_a_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine thread that is given up leaves the recording of the steps before, written by the watchdog."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    backend = GatedBackend()
    engine = AsyncEngine(toy_engine(backend=backend), dead_after_s=0.2)
    try:
        future = engine.submit([1, 2, 3], params(4))
        with pytest.raises(EngineHung):
            future.result(60)
        wait_until(lambda: bool(list(tmp_path.glob("*/hang.jsonl.gz"))))
    finally:
        backend.gate.set()
        engine.close()
