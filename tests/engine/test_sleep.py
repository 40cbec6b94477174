"""An engine that gives its memory back for a while, and is the same one afterwards."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedcore import Engine, MemoryBudget, SamplingParams
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.errors import (
    EngineAsleep,
    EngineClosed,
    EngineInUse,
    InvalidRequest,
    InvalidWeights,
    MemoryBudgetExceeded,
)
from pagedcore.models import new_weights
from support.changed_demo import changed_weights, write_demo
from support.engine_builders import make_engine
from support.lora_directories import random_matrices, write_adapter

PROMPT = list(range(40, 80))
DRAWN = SamplingParams(max_tokens=12, temperature=1.0, seed=5, logprobs=2, ignore_eos=True)
FILE = "model.safetensors"
LEVELS: list[Any] = [1, 2]


@pytest.fixture
def budget() -> MemoryBudget:
    return MemoryBudget("32MiB")


@pytest.fixture
def engine(budget: MemoryBudget, tmp_path: Path) -> Iterator[Engine]:
    settings: dict[str, Any] = {"kv_cache_memory": budget.share("16MiB"), "host_kv_memory": "2MiB"}
    with Engine.from_pretrained("demo", max_num_seqs=8, flight_recorder="tokens", check_invariants=True,
                                disk_kv_dir=str(tmp_path), **settings) as one:
        yield one


def answer(engine: Engine) -> tuple[Any, ...]:
    output = engine.generate([PROMPT], DRAWN)[0].outputs[0]
    return output.token_ids, output.logprobs


def num_large_tensors() -> int:
    """Tensors of this process that only a model or a pool has."""
    gc.collect()
    return sum(type(one) is torch.Tensor and not one.is_meta and one.nbytes > 40_000 for one in gc.get_objects())


@pytest.mark.parametrize("level", LEVELS)
def test_it_is_the_same_engine_afterwards(
    level: Any, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers, names, sessions wherever they were parked, finished requests that go on, and recordings."""
    with Engine.from_pretrained("demo", max_num_seqs=8) as oracle, oracle.session(DRAWN) as known:
        known.ask(PROMPT)
        expected = known.ask([7, 8, 9]).outputs[0].token_ids
    before, named = answer(engine), (engine.identity, engine.weights)
    sessions = [engine.session(DRAWN) for _ in range(3)]
    for one in sessions:
        one.ask(PROMPT)
    sessions[0].park("host")
    kept = sessions[1].park("disk")
    finished = engine.add_request(PROMPT, DRAWN)
    while not finished.is_done:
        engine.step()
    engine.sleep(level)
    engine.sleep(1)
    assert engine.sleep_level == level
    for refused in (lambda: answer(engine), lambda: sessions[1].ask([7, 8, 9]), lambda: finished.extend([7, 8, 9]),
                    lambda: engine.embed([PROMPT]), lambda: engine.new_weights().__enter__()):
        with pytest.raises(EngineAsleep, match=r"wake\(\)"):
            refused()
    assert [engine.step(), engine.idle(), sessions[1].resume()] == [[], False, 0]
    assert sessions[1].park("host") == sessions[1].parked == kept
    assert "parking" not in caplog.text
    sessions[2].export(tmp_path / "asleep")
    engine.wake()
    engine.wake()
    assert (engine.sleep_level, engine.identity, engine.weights) == (0, *named)
    output = engine.generate([PROMPT], DRAWN)[0]
    assert (output.outputs[0].token_ids, output.outputs[0].logprobs, output.num_cached_tokens) == (*before, 0)
    turns = [one.ask([7, 8, 9]).outputs[0].token_ids for one in (*sessions, engine.import_session(tmp_path / "asleep"))]
    assert turns == [expected] * 4
    finished.extend([7, 8, 9])
    while not finished.is_done:
        engine.step()
    assert finished.output().outputs[0].token_ids == expected
    engine.dump_recording(tmp_path / "recording")


def test_kv_in_a_file_is_used_afterwards(engine: Engine) -> None:
    """A conversation that was parked on the disk computes only what is new."""
    session = engine.session(DRAWN)
    session.ask(PROMPT)
    num_kept = session.park("disk").num_tokens_kept
    engine.sleep(2)
    engine.wake()
    assert session.ask([7, 8, 9]).num_cached_tokens == num_kept > 0


def test_memory_is_given_back_and_drawn_again(budget: MemoryBudget, engine: Engine) -> None:
    """The pool at level 1, all weights at level 2; a wake that gets no memory leaves no engine that has some."""
    before, total = answer(engine), budget.total_bytes
    left, num_awake = budget.left_bytes, num_large_tensors()
    engine.sleep(1)
    num_without_pool = num_large_tensors()
    assert budget.left_bytes == total
    engine.sleep(2)
    assert num_large_tensors() <= num_without_pool - 5 < num_awake
    with make_engine(num_kv_blocks=None, kv_cache_memory=budget.share("24MiB")):
        with pytest.raises(MemoryBudgetExceeded):
            engine.wake()
        assert engine.sleep_level == 2
        with pytest.raises(EngineAsleep):
            answer(engine)
    assert budget.left_bytes == total
    engine.wake()
    assert (budget.left_bytes, answer(engine)) == (left, before)
    engine.sleep(1)
    engine.close()
    assert budget.left_bytes == total
    with pytest.raises(EngineClosed):
        engine.wake()


@pytest.mark.parametrize("settings", [
    {"speculative_model": "demo"}, {"adapters": "one"}, {"quantization": "w8a8"}, {"dtype": "float32"},
    {"linear_backend": "onednn"},
], ids=lambda settings: next(iter(settings)))
def test_every_kind_of_weights_comes_back(settings: dict[str, Any], tmp_path: Path) -> None:
    """Those of a model that guesses with their bytes in the budget, of adapters, quantised ones, and other products."""
    lora = settings.get("adapters")
    if lora:
        sizes = {f"model.layers.{layer}.self_attn.o_proj": (192, 192) for layer in range(4)}
        settings = {"adapters": {lora: str(write_adapter(tmp_path, random_matrices(sizes, 4, 1), rank=4))}}
    budget = MemoryBudget("2GiB" if lora else "64MiB")
    with Engine.from_pretrained("demo", max_num_seqs=4, kv_cache_memory=budget, check_invariants=True, num_kv_blocks=32,
                                **settings, **({"adapter_memory": "8MiB"} if lora else {})) as engine:
        def told() -> Any:
            outputs = engine.generate([PROMPT, PROMPT[:9]], DRAWN, **({"lora": lora} if lora else {}))
            return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]

        before, left, asleep = told(), budget.left_bytes, list[int]()
        for _ in range(2):
            engine.sleep(2)
            assert budget.left_bytes == budget.total_bytes - (2**23 if lora else 0)
            asleep.append(num_large_tensors())
            engine.wake()
            assert (told(), budget.left_bytes) == (before, left)
        assert asleep[0] == asleep[1] < num_large_tensors() / 2


@pytest.mark.parametrize("running", ["wait", "abort"])
def test_requests_end_first(running: Any, engine: Engine) -> None:
    """As they would have, or as aborted ones."""
    expected = answer(engine)[0]
    request = engine.add_request(PROMPT, DRAWN)
    while not request.sequences[0].output_token_ids:
        engine.step()
    engine.sleep(running=running)
    output = request.output().outputs[0]
    assert output.finish_reason == ("length" if running == "wait" else "abort")
    assert output.token_ids == expected[: len(output.token_ids)]


def test_what_cannot_be_made_again_is_refused_by_name(engine: Engine) -> None:
    """Weights without files, a backend of one's own, other levels; an engine that was refused is awake."""
    with engine.new_weights() as new:
        new.load(changed_weights())
    with pytest.raises(InvalidRequest, match="level: got 2 of weights that were given in memory"):
        engine.sleep(2)
    for wrong in (0, 3, True, "1"):
        with pytest.raises(InvalidRequest, match="level"):
            engine.sleep(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="running"):
        engine.sleep(1, running="keep")  # type: ignore[arg-type]
    before = answer(engine)
    engine.sleep(1)
    engine.wake()
    assert answer(engine) == before
    with make_engine() as own, pytest.raises(InvalidRequest, match="a backend of your own"):
        own.sleep()


def test_weights_that_were_loaded_later_come_back(tmp_path: Path, engine: Engine) -> None:
    """From their own directory, and under their own number."""
    with engine.new_weights("7") as new:
        new.load(write_demo(tmp_path, changed_weights()))
    before, version = answer(engine), engine.weights
    engine.sleep(2)
    engine.wake()
    assert (answer(engine), engine.weights) == (before, version)


@pytest.mark.parametrize("is_seen", [True, False])
def test_other_files_are_refused(is_seen: bool, tmp_path: Path) -> None:
    """By the time of their last change, and by what is in them; the right ones wake the engine."""
    file, saved = write_demo(tmp_path, load_file(DEMO_MODEL_DIR / "model.safetensors")) / FILE, tmp_path / "saved"
    with Engine.from_pretrained(tmp_path) as engine:
        before, times = answer(engine), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
        engine.sleep(2)
        file.rename(saved)
        save_file(changed_weights(), file, {"format": "pt"})
        assert file.stat().st_size == saved.stat().st_size
        if not is_seen:
            os.utime(file, ns=times)
        with pytest.raises(InvalidWeights, match="changed or removed" if is_seen else "others than before"):
            engine.wake()
        assert engine.sleep_level == 2
        saved.rename(file)
        engine.wake()
        assert answer(engine) == before


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
def test_a_wake_that_breaks_off_leaves_it_asleep(
    kind: type[BaseException], budget: MemoryBudget, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While weights are read, and when the pool is made; another wake is whole."""
    before = answer(engine)
    engine.sleep(2)
    num_asleep = num_large_tensors()

    def fail(*_: Any) -> None:
        if kind is KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGINT)
        raise kind

    backend: Any = engine.components.runner.backend
    for broken, name in ((new_weights, "require_same_form"), (type(backend.cache_store), "open_again"),
                         (type(backend), "become")):
        with monkeypatch.context() as patch:
            patch.setattr(broken, name, fail)
            with pytest.raises(kind):
                engine.wake()
        assert (engine.sleep_level, budget.left_bytes) == (2, budget.total_bytes)
        assert num_large_tensors() <= num_asleep
    engine.wake()
    assert answer(engine) == before


def test_one_change_at_a_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """No sleep while weights are loaded, and nothing from another thread while it wakes."""
    before = answer(engine)
    with engine.new_weights() as new:
        new.load(DEMO_MODEL_DIR)
        with pytest.raises(EngineInUse):
            engine.sleep()
    assert engine.sleep_level == 0
    engine.sleep(2)
    errors = list[BaseException | None]()

    def try_it(call: Any) -> None:
        try:
            call()
            errors.append(None)
        except Exception as error:
            errors.append(error)

    def meanwhile(*_: Any) -> None:
        for call in (engine.wake, engine.sleep, engine.close, lambda: answer(engine)):
            thread = threading.Thread(target=try_it, args=(call,))
            thread.start()
            thread.join()

    monkeypatch.setattr(new_weights, "require_same_form", meanwhile)
    engine.wake()
    assert [type(one) for one in errors] == [EngineInUse, EngineInUse, EngineInUse, EngineInUse]
    assert answer(engine) == before
