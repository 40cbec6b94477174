"""Requests with adapters, from acceptance to end, over a toy model whose answers tell which one they had."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from pagedcore import Engine, SamplingParams
from pagedcore.analysis.recorder.recording import read_recording
from pagedcore.analysis.replay.decisions import replay_decisions
from pagedcore.config.limits import MAX_ADAPTER_LOAD_S, MAX_ADAPTERS
from pagedcore.config.memory_budget import MemoryBudget
from pagedcore.errors import (
    AdapterFailed,
    AdapterMismatch,
    AdaptersBusy,
    InvalidAdapter,
    InvalidConfig,
    InvalidRequest,
    QueueTimeout,
    RequestFailed,
    UnknownAdapter,
)
from pagedcore.requests.request import Request
from support.adapters import AdaptedBackend, adapted_answer, write_adapter
from support.doubles import FakeClock, ToyBackend
from support.engine_builders import assert_all_free, make_engine, run

PROMPT = [1, 2, 3, 4, 5]
SIX = SamplingParams(max_tokens=6, ignore_eos=True)
NAMES = {"a": 1, "b": 2, "c": 3, "d": 4}


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """Four adapters, and their directories by name."""
    return {name: write_adapter(tmp_path / name, seed) for name, seed in NAMES.items()}


class Bytes(os.PathLike[bytes]):
    """A path in bytes."""

    def __fspath__(self) -> bytes:
        return b"bytes"


def engine_with(places: dict[str, str], backend: AdaptedBackend | None = None, **settings: Any) -> Engine:
    """An engine with two slots."""
    given = {"adapters": places, "max_adapters": 2, "adapter_memory": 1000, **settings}
    return make_engine(backend or AdaptedBackend(), **given)


def answer_of(request: Request) -> list[int]:
    """The tokens of a request's first completion."""
    return list(request.output().outputs[0].token_ids)


@pytest.mark.parametrize("settings", [
    {}, {"num_kv_blocks": 9, "preemption": "recompute"}, {"num_kv_blocks": 9, "host_kv_memory": 4096},
    {"speculation": "auto"}, {"enable_prefix_caching": False}, {"phases": "separate"},
], ids=["plain", "preempted", "swapped", "drafts", "unshared", "phases"])
def test_each_request_has_its_own_adapter_in_any_company(places: dict[str, str], settings: dict[str, Any]) -> None:
    """Equal prompts under five adapters, twice each, answer as they would alone; two slots are enough for four."""
    backend = AdaptedBackend()
    with engine_with(places, backend, **settings) as engine:
        asked = [None, *NAMES, None, *NAMES]
        requests = [engine.add_request(PROMPT, SamplingParams(max_tokens=12, ignore_eos=True), lora=one)
                    for one in asked]
        run(engine)
        for name, request in zip(asked, requests, strict=True):
            assert answer_of(request) == adapted_answer(PROMPT, 12, NAMES.get(name or "", 0))
        assert max(backend.distinct) == 2
        assert engine.stats().num_adapter_loads >= 2
        assert_all_free(engine)


def test_an_unknown_name_is_refused_before_anything_is_taken(places: dict[str, str]) -> None:
    """At once, by every verb, and without a word about the names of others."""
    with engine_with(places) as engine:
        for call in (lambda: engine.add_request(PROMPT, SIX, lora="x"), lambda: engine.session(lora="x"),
                     lambda: engine.embed([PROMPT], lora="x"), lambda: engine.score(PROMPT, [[1]], lora="x"),
                     lambda: engine.quote(PROMPT, SIX, lora="x"), lambda: engine.unload_adapter("x")):
            with pytest.raises(UnknownAdapter, match="lora") as refused:
                call()
            assert not any(f"'{name}'" in str(refused.value) for name in NAMES)
        assert not list(engine.requests)
    with make_engine() as bare, pytest.raises(UnknownAdapter):
        bare.add_request(PROMPT, SIX, lora="a")


@pytest.mark.parametrize("name", ["../x", "a/b", ".a", "", "a:b", "a\n", "ä", "a" * 65, 7, None])
def test_a_name_cannot_be_a_path(places: dict[str, str], name: Any) -> None:
    """Nor have a colon, which separates it from a model's name."""
    with engine_with(places) as engine:
        with pytest.raises(InvalidRequest):
            engine.load_adapter(name, places["a"])
        if name is not None:
            with pytest.raises(InvalidRequest):
                engine.add_request(PROMPT, SIX, lora=name)


@pytest.mark.parametrize("path", [
    "a" * 300, "a/" * 5000, "a\0b", "a\ud800", "circle", "circle/in", b"bytes", Bytes(), 7, None,
], ids=lambda path: repr(path)[:9])  # fmt: skip
def test_a_directory_is_whatever_a_caller_says(tmp_path: Path, path: Any) -> None:
    """Also what is no path, or none that can be looked at."""
    (tmp_path / "circle").symlink_to("circle")
    with engine_with({}) as engine, pytest.raises(InvalidAdapter, match="directory"):
        engine.load_adapter("x", str(tmp_path / path) if isinstance(path, str) else path)


def test_a_name_that_is_loaded_again_is_another_adapter_for_new_requests_only(
    places: dict[str, str], tmp_path: Path
) -> None:
    """What runs keeps its own, and its KV serves nobody who has the new one."""
    with engine_with(places) as engine:
        before = engine.add_request(PROMPT, SIX, lora="a")
        engine.step()
        shown = engine.load_adapter("a", write_adapter(tmp_path / "new", 9))
        after = engine.add_request(PROMPT, SIX, lora="a")
        assert shown.name == "a"
        assert shown.digest != before.adapter.digest.hex()
        run(engine)
        assert answer_of(before) == adapted_answer(PROMPT, 6, 1)
        assert answer_of(after) == adapted_answer(PROMPT, 6, 9)
        assert after.output().num_cached_tokens == 0


def test_unloading_while_requests_run_and_wait_ends_none(places: dict[str, str]) -> None:
    """Eight streams of an adapter end as they would have; the name is gone at once, the slot with the last of them."""
    backend = AdaptedBackend()
    with engine_with({"a": places["a"]}, backend) as engine:
        requests = [engine.add_request([*PROMPT, one], SIX, lora="a") for one in range(8)]
        engine.step()
        engine.unload_adapter("a")
        assert not engine.adapters()
        with pytest.raises(UnknownAdapter):
            engine.add_request(PROMPT, SIX, lora="a")
        run(engine)
        for one, request in enumerate(requests):
            assert answer_of(request) == adapted_answer([*PROMPT, one], 6, 1)
            assert backend.slots
            request.remove()
        assert not backend.slots
        assert not engine.scheduler.adapters.sizes


def test_the_same_files_are_one_adapter_whatever_their_place_and_name(places: dict[str, str], tmp_path: Path) -> None:
    """They share a slot, and the KV of their requests."""
    with engine_with({"a": places["a"]}) as engine:
        engine.load_adapter("other", write_adapter(tmp_path / "copy", 1))
        first, second = (engine.add_request(PROMPT, SIX, lora=name) for name in ("a", "other"))
        run(engine)
        assert second.output().num_cached_tokens > 0
        assert answer_of(first) == answer_of(second)
        assert engine.stats().num_adapters_in_slots == 1
        assert len(engine.adapters()) == 2
        assert engine.identity_of("a") == engine.identity_of("other") != engine.identity == engine.identity_of(None)


def test_kv_is_shared_under_one_adapter_and_never_under_two(places: dict[str, str]) -> None:
    """Nor with the model alone; completions, branches and turns of one request have its own."""
    with engine_with(places, max_adapters=4) as engine:
        for name in (None, "a", "b"):
            cold, warm = (engine.add_request([*range(1, 13)], SIX, lora=name) for _ in range(2))
            run(engine)
            assert (cold.output().num_cached_tokens, warm.output().num_cached_tokens) == (0, 8)
        several = engine.add_request(PROMPT, SamplingParams(n=3, max_tokens=4, temperature=1.0, seed=5), lora="a")
        beams = engine.add_request(PROMPT, SamplingParams(beam_width=2, max_tokens=4), lora="a")
        run(engine)
        assert {one.adapter for one in several.sequences} == {several.adapter.number}  # type: ignore[union-attr]
        assert beams.output().outputs[0].token_ids


def test_texts_are_embedded_and_scored_under_an_adapter(places: dict[str, str]) -> None:
    """The numbers are that adapter's."""
    with engine_with(places) as engine:
        bare, adapted = (engine.embed([PROMPT], lora=name)[0].vector.tolist() for name in (None, "a"))
        assert bare != adapted
        scores = [engine.score(PROMPT, [[3, 4]], lora=name)[0].logprobs for name in (None, "a", "b")]
        assert len(set(scores)) == 3


def test_a_slow_file_stops_only_those_who_wait_for_it(places: dict[str, str]) -> None:
    """They hold no block meanwhile, and say what they wait for; a quote counts on it."""
    backend = AdaptedBackend()
    with engine_with({"a": places["a"]}, backend, max_adapters=1, flight_recorder="on") as engine:
        engine.load_adapter("b", places["b"])
        backend.may_read.clear()
        slow, fast = engine.add_request(PROMPT, SIX, lora="b"), engine.add_request(PROMPT, SIX)
        while not fast.is_done:
            engine.step()
        assert slow.phases == ("waiting",)
        assert engine.explain(slow.request_id).reason == "adapter"
        assert "adapter" in str(engine.explain(slow.request_id))
        assert engine.explain(slow.request_id).num_blocks == 0
        assert not engine.step()
        assert engine.is_stalled
        backend.may_read.set()
        run(engine)
        assert answer_of(slow) == adapted_answer(PROMPT, 6, 2)


def test_a_request_that_waits_for_its_adapter_is_shed_by_name(places: dict[str, str]) -> None:
    """It keeps its time limits."""
    backend, clock = AdaptedBackend(), FakeClock()
    engine = Engine(_components(backend, {"a": places["a"]}, max_adapters=1), clock)
    engine.load_adapter("b", places["b"])
    engine.turn_rules.queue_timeout_s = 5.0
    backend.may_read.clear()
    request = engine.add_request(PROMPT, SIX, lora="b")
    engine.step()
    clock.advance(6.0)
    engine.step()
    backend.may_read.set()
    assert isinstance(request.error, QueueTimeout)
    assert "its adapter" in str(request.error)
    engine.close()


def _components(backend: AdaptedBackend, places: dict[str, str], **settings: Any) -> Any:
    from pagedcore.engine.builder import build_components

    return build_components(backend, adapters=places, adapter_memory=1000, num_kv_blocks=16, block_size=4,
                            max_num_seqs=4, max_num_batched_tokens=8, check_invariants=True, **settings)


@pytest.mark.parametrize("how", ["gone", "other", "late"])
def test_a_read_that_fails_ends_those_who_wait_for_it_and_nobody_else(
    places: dict[str, str], tmp_path: Path, how: str
) -> None:
    """Files that are gone, that are another adapter's by now, or that do not come."""
    backend, clock = AdaptedBackend(), FakeClock()
    engine = Engine(_components(backend, {"a": places["a"]}, max_adapters=1), clock)
    engine.load_adapter("b", places["b"])
    if how == "gone":
        os.unlink(Path(places["b"]) / "adapter_config.json")
    elif how == "other":
        write_adapter(tmp_path / "b", 99)
    else:
        backend.may_read.clear()
    failing = [engine.add_request(PROMPT, SIX, lora="b") for _ in range(3)]
    others = [engine.add_request(PROMPT, SIX, lora=name) for name in (None, "a")]
    engine.step()
    clock.advance(MAX_ADAPTER_LOAD_S + 1 if how == "late" else 0.0)
    while not failing[0].is_done:
        engine.step()
    backend.may_read.set()
    run(engine)
    for request in failing:
        assert isinstance(request.error, AdapterFailed)
        assert isinstance(request.error, RequestFailed)
        assert request.error.__cause__ is not None
    assert [answer_of(one) for one in others] == [adapted_answer(PROMPT, 6, seed) for seed in (0, 1)]
    assert engine.stats().num_adapter_failures == 1
    engine.close()


def test_memory_and_names_are_bounded_whoever_loads(places: dict[str, str], tmp_path: Path) -> None:
    """What could never be in memory is refused by its head, and names are as many as may be."""
    backend = AdaptedBackend()
    with engine_with({}, backend, adapter_memory=250) as engine:
        with pytest.raises(InvalidAdapter, match="251, allowed is up to adapter_memory"):
            engine.load_adapter("large", write_adapter(tmp_path / "large", 5, num_bytes=251))
        assert not backend.reads
        assert not engine.adapters()
        for number in range(MAX_ADAPTERS):
            engine.load_adapter(f"n{number}", write_adapter(tmp_path / "many", number, num_bytes=100))
            assert engine.stats().adapter_bytes <= 250
            assert len(backend.slots) <= 2
        with pytest.raises(InvalidAdapter, match="names"):
            engine.load_adapter("more", places["a"])


def test_loads_at_a_time_are_bounded_and_two_threads_may_load_one_name(places: dict[str, str]) -> None:
    """The third is told to come later; of the two, one has the name."""
    backend = AdaptedBackend()
    with engine_with({}, backend) as engine:
        backend.may_read.clear()
        read: list[Any] = []
        threads = [threading.Thread(target=lambda place=place: read.append(engine.adapter_registry.read("x", place)))
                   for place in (places["a"], places["b"])]
        for thread in threads:
            thread.start()
        while engine.adapter_registry._reads._value:  # type: ignore[attr-defined]
            pass
        with pytest.raises(AdaptersBusy, match="Retry later"):
            engine.load_adapter("y", places["c"])
        backend.may_read.set()
        for thread in threads:
            thread.join()
        shown = [engine.add_adapter(one) for one in read]
        assert [one.name for one in engine.adapters()] == ["x"]
        assert engine.adapters()[0].digest == shown[-1].digest
        assert len(engine.scheduler.adapters.sizes) == 1


def test_ctrl_c_while_a_directory_is_read_leaves_nothing(places: dict[str, str]) -> None:
    """The name is as it was, and another load may begin."""
    backend = AdaptedBackend()
    with engine_with({}, backend) as engine:
        reads, backend.read_adapter = backend.read_adapter, _interrupted  # type: ignore[method-assign,assignment]
        for _ in range(5):
            with pytest.raises(KeyboardInterrupt):
                engine.load_adapter("a", places["a"])
        backend.read_adapter = reads  # type: ignore[method-assign]
        assert not engine.adapters()
        assert engine.load_adapter("a", places["a"]).is_in_slot


def _interrupted(directory: str) -> Any:
    raise KeyboardInterrupt


def test_a_fork_does_not_count_what_its_parent_is_loading(places: dict[str, str]) -> None:
    """Threads that were inside of ``load_adapter`` take no place in the child; in the parent they end as they would."""
    backend = AdaptedBackend()
    with engine_with({}, backend, check_invariants=False) as engine:
        backend.may_read.clear()
        threads = [threading.Thread(target=engine.adapter_registry.read, args=(name, places[name])) for name in "ab"]
        for thread in threads:
            thread.start()
        while engine.adapter_registry._reads._value:  # type: ignore[attr-defined]
            pass
        if (child := os.fork()) == 0:
            backend.may_read = threading.Event()
            backend.may_read.set()
            names = [engine.load_adapter(name, places[name]).name for name in "cab"]
            os._exit(0 if names == ["c", "a", "b"] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with pytest.raises(AdaptersBusy):
            engine.load_adapter("c", places["c"])
        backend.may_read.set()
        for thread in threads:
            thread.join()
        assert engine.load_adapter("c", places["c"]).is_in_slot


def test_a_fork_reads_what_its_parent_was_reading(places: dict[str, str]) -> None:
    """Its requests do not wait for a thread that it does not have."""
    backend = AdaptedBackend()
    with engine_with({"a": places["a"]}, backend, max_adapters=1, check_invariants=False) as engine:
        engine.load_adapter("b", places["b"])
        backend.may_read.clear()
        request = engine.add_request(PROMPT, SIX, lora="b")
        engine.step()
        if (child := os.fork()) == 0:
            backend.may_read = threading.Event()
            backend.may_read.set()
            for _ in range(2_000):
                if not request.is_done:
                    engine.step()
            os._exit(0 if answer_of(request) == adapted_answer(PROMPT, 6, 2) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        backend.may_read.set()


def test_a_session_keeps_its_adapter_and_says_it_in_its_file(places: dict[str, str], tmp_path: Path) -> None:
    """It continues with it whatever the name stands for; where it is not loaded, or another is named, it is refused."""
    path = tmp_path / "session.json"
    with engine_with(places) as engine:
        session = engine.session(SIX, lora="a")
        session.ask(PROMPT)
        engine.load_adapter("a", write_adapter(tmp_path / "new", 9))
        fork = session.fork()
        outputs = [list(one.ask([7, 8]).outputs[0].token_ids) for one in (session, fork)]
        history = [*PROMPT, *adapted_answer(PROMPT, 6, 1), 7, 8]
        assert outputs == [adapted_answer(history, 6, 1)] * 2
        session.export(path)
        with pytest.raises(AdapterMismatch):
            engine.import_session(path)
        with pytest.raises(AdapterMismatch):
            engine.import_session(path, lora="a")
        engine.load_adapter("was-a", places["a"])
        imported = engine.import_session(path)
        assert engine.import_session(path, lora="was-a").token_ids == imported.token_ids
        history += [*outputs[0], 9]
        assert list(imported.ask([9]).outputs[0].token_ids) == adapted_answer(history, 6, 1)
        engine.session(SIX).export(tmp_path / "bare.json")
        with pytest.raises(AdapterMismatch, match="made with none"):
            engine.import_session(tmp_path / "bare.json", lora="b")
    with make_engine(AdaptedBackend()) as without, pytest.raises(AdapterMismatch, match="lora="):
        without.import_session(path)


def test_decisions_with_adapters_can_be_taken_again(places: dict[str, str], tmp_path: Path) -> None:
    """A recording has which adapters came and left, and a replay of it decides the same."""
    with engine_with(places, flight_recorder="tokens") as engine:
        for name in (None, *NAMES, "a", "c"):
            engine.add_request(PROMPT, SIX, lora=name)
        run(engine)
        engine.dump_recording(tmp_path / "dump")
    replayed = replay_decisions(read_recording(tmp_path / "dump"))
    assert replayed.difference is None
    assert replayed.num_steps > 6


def test_a_quote_of_a_request_whose_adapter_is_not_there_counts_its_files(places: dict[str, str]) -> None:
    """By as much as the latest ones took; an exact one takes them to be there at once."""
    with engine_with({"a": places["a"], "b": places["b"]}, max_adapters=1) as engine:
        engine.scheduler.adapters.load_s = 30.0
        here, there = (engine.quote(PROMPT, SIX, lora=name).start.likely for name in ("a", "b"))
        assert there - here == pytest.approx(30.0)
        assert engine.quote(PROMPT, SIX, lora="b", exact=True).is_exact


def test_settings_are_checked_before_anything_is_allocated(places: dict[str, str], tmp_path: Path) -> None:
    """A model without adapters, slots without adapters, a missing directory, and a budget that has not so much."""
    for settings, message in (
        ({"max_adapters": 0}, "max_adapters"),
        ({"adapters": {"a": str(tmp_path / "none")}}, "adapters, a: .*directory"),
        ({"adapters": {"../a": places["a"]}}, "adapters"), ({"max_adapters": MAX_ADAPTERS + 1}, "max_adapters"),
        ({"adapter_memory": 50}, "adapters, a: .*adapter_memory"), ({"adapter_memory": "x"}, "adapter_memory"),
        ({"kv_cache_memory": MemoryBudget(900), "num_kv_blocks": None}, "memory budget"),
    ):
        with pytest.raises(InvalidConfig, match=message):
            engine_with(places, **settings)
    with pytest.raises(InvalidConfig, match="allowed is 0 with this model"):
        make_engine(ToyBackend(), max_adapters=2)
    budget = MemoryBudget(10_000)
    with engine_with(places, kv_cache_memory=budget, num_kv_blocks=10):
        assert budget.left_bytes == 10_000 - 1000 - 10 * 64
    assert budget.left_bytes == 10_000


def test_an_engine_gives_the_slots_of_its_model_back(places: dict[str, str]) -> None:
    """So that the next engine over the same model finds them empty."""
    backend = AdaptedBackend()
    for _ in range(2):
        with engine_with(places, backend) as engine:
            request = engine.add_request(PROMPT, SIX, lora="b")
            run(engine)
            assert answer_of(request) == adapted_answer(PROMPT, 6, 2)
        assert not backend.slots
