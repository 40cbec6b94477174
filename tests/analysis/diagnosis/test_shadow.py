"""Shadow tags: a slot that is not what a step expects to read is reported in that step, before anything is computed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedcore.analysis.diagnosis import shadow
from pagedcore.demo_model.questions import demo_questions
from pagedcore.engine.engine import Engine
from pagedcore.errors import InternalError
from pagedcore.execution.kv_pool import KVPool
from pagedcore.execution.kv_transfers import KVTransfers
from pagedcore.kv_cache.prefix_cache import PrefixCache
from pagedcore.requests.request import Request
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.sessions.session import Session
from support.doubles import FlakyBackend, ToyBackend, toy_answer
from support.engine_builders import assert_all_free, make_engine, run
from support.toy_sessions import BLOCK, PARAMS, ask, flood, make

Patch = pytest.MonkeyPatch
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


def tight_engine() -> Engine:
    """Three requests that grow into each other, and a host to swap to."""
    return make_engine(num_kv_blocks=8, host_kv_memory=24 * BLOCK, preemption="swap", max_num_batched_tokens=16)


def fill(engine: Engine) -> list[Request]:
    return [engine.add_request([one, 1, 4, one, 5], GREEDY) for one in range(3)]


def table_of(engine: Engine, request: Request) -> list[int]:
    return engine.scheduler.kv_cache.device.table(request.sequences[0].sequence_id).block_ids.tolist()


def expect_report(engine: Engine, what: str) -> None:
    """The next step that computes anything reports a wrong slot, and the model never saw it."""
    backend = engine._runner.backend
    assert isinstance(backend, ToyBackend)
    before = backend.num_steps
    with pytest.raises(InternalError) as caught:
        engine.step()
    # Why: tables that are wrong may fail once more when the step is undone.
    found = str(caught.value.__context__ or caught.value)
    assert re.search(f"sequence .* {what}", found)
    assert backend.num_steps == before


def test_a_wrong_block_in_a_table_is_reported() -> None:
    """A table that names another sequence's block: that block holds other tokens."""
    engine = make_engine()
    first, second = (engine.add_request([one, 2, 3, 4, 5], GREEDY) for one in (1, 9))
    for _ in range(3):
        engine.step()
    theirs, own = (engine.scheduler.kv_cache.device.table(one.sequences[0].sequence_id) for one in (first, second))
    own._ids[0] = theirs.block_ids[0]
    expect_report(engine, r"reads position 0 in block \d+, which holds this position of other tokens")


def test_two_blocks_in_the_wrong_order_are_reported() -> None:
    """The right blocks in the wrong places: each holds other positions."""
    engine = make_engine()
    request = engine.add_request([1, 2, 3, 4, 1, 2, 3, 4, 1], GREEDY)
    for _ in range(3):
        engine.step()
    table = engine.scheduler.kv_cache.device.table(request.sequences[0].sequence_id)
    table._ids[:2] = table._ids[:2][::-1].copy()
    expect_report(engine, r"reads position 0 in block \d+, which holds position 4")


def test_a_block_of_another_root_is_reported() -> None:
    """Equal tokens under another salt are another tenant's, although no completion would change."""
    engine = make_engine()
    first, second = (engine.add_request([1, 2, 3, 4, 5], GREEDY, cache_salt=salt) for salt in ("a", "b"))
    for _ in range(3):
        engine.step()
    theirs, own = (engine.scheduler.kv_cache.device.table(one.sequences[0].sequence_id) for one in (first, second))
    own._ids[0] = theirs.block_ids[0]
    expect_report(engine, r"reads position 0 in block \d+, which holds position 0 of another cache root")


def test_a_block_that_is_freed_too_early_is_reported() -> None:
    """Freed while a sequence has it in its table: the law of references says so after the step."""
    engine = make_engine()
    request = engine.add_request([1, 2, 3, 4, 5], GREEDY)
    for _ in range(3):
        engine.step()
    engine.scheduler.kv_cache.device.cache.free_block(table_of(engine, request)[1])
    with pytest.raises(InternalError, match="S2: block"):
        engine.step()


def test_a_load_into_the_wrong_blocks_is_reported(monkeypatch: Patch) -> None:
    """What comes back from the host in the wrong order is reported before it is read."""
    engine = tight_engine()
    fill(engine)

    def muddle(self: KVTransfers, transfers: object) -> None:
        for one in list(transfers):  # type: ignore[call-overload]
            turned = tuple(
                move._replace(destination=other.destination)
                for move, other in zip(one.moves, reversed(one.moves), strict=True)
            )
            object.__setattr__(one, "moves", turned if one.direction.name == "IN" else one.moves)
            begin(self, [one])

    begin = KVTransfers.start
    monkeypatch.setattr(KVTransfers, "start", muddle)
    with pytest.raises(InternalError, match=r"tags: sequence .* reads position"):
        run(engine)


@pytest.mark.parametrize("direction", ["start_swap_out", "start_swap_in"])
def test_a_swap_that_never_happened_is_reported(direction: str, monkeypatch: Patch) -> None:
    """A transfer that is booked and not started leaves a block that holds nothing."""
    engine = tight_engine()
    fill(engine)
    store = engine.components.store
    assert store is not None
    monkeypatch.setattr(store, direction, lambda transfer_id, pairs: store._store._ended.append((transfer_id, True)))  # type: ignore[attr-defined]
    with pytest.raises(InternalError, match=r"tags: sequence .* which holds"):
        run(engine)


def test_a_copy_that_is_dropped_is_reported(monkeypatch: Patch) -> None:
    """The shared beginning of a partly equal block that is not copied is missing."""
    engine = make_engine(max_num_batched_tokens=16)
    engine.add_request([1, 2, 3, 4, 5, 6, 7], SamplingParams(max_tokens=1))
    run(engine)
    monkeypatch.setattr(KVTransfers, "copy", lambda self, pairs, blocks: None)
    engine.add_request([1, 2, 3, 4, 5, 6, 9], GREEDY)
    expect_report(engine, r"reads position 4 in block \d+, which holds nothing")


def test_a_prefix_found_in_the_wrong_block_is_reported(monkeypatch: Patch) -> None:
    """A cache that names another block than the one with the contents."""
    engine = make_engine(max_num_batched_tokens=16)
    for first in (1, 2):
        engine.add_request([first, 2, 3, 4, 5], SamplingParams(max_tokens=1))
        run(engine)
    find = PrefixCache.find

    def mislead(self: PrefixCache, content: object) -> int | None:
        found = find(self, content)  # type: ignore[arg-type]
        return next((one.block_id for one in self.registered if one.content.token_ids[0] == 2), found)

    monkeypatch.setattr(PrefixCache, "find", mislead)
    engine.add_request([1, 2, 3, 4, 9], GREEDY)
    expect_report(engine, r"reads position 0 in block \d+, which holds this position of other tokens")


def test_parked_blocks_that_are_read_back_in_the_wrong_order_are_reported(monkeypatch: Patch) -> None:
    """Tags travel with the bytes through a file: what is written to the wrong block is reported at the next turn."""
    engine = make(num_host_blocks=0)
    session = engine.session()
    ask(session, *range(12))
    assert session.park("disk").tier == "disk"
    flood(engine)
    store = engine.components.store
    assert store is not None
    shadow_write = store.write_blocks
    monkeypatch.setattr(store, "write_blocks", lambda ids, blocks: shadow_write(ids, blocks[::-1]))
    with pytest.raises(InternalError, match=r"tags: sequence .* reads position 0 in block"):
        ask(session, 7)


def test_what_was_read_is_not_remembered_for_ever(monkeypatch: Patch) -> None:
    """The tags of so many blocks are kept; older ones count as those of another process, and nothing is reported."""
    monkeypatch.setattr(shadow, "_MOST_READ", 3)
    engine = make()
    store = engine.sessions.parking.store
    assert isinstance(store, shadow.ShadowStore)
    sessions = [engine.session(PARAMS) for _ in range(4)]
    for number, session in enumerate(sessions):
        ask(session, number, 2, 3, 4, 5, 6)
        session.park("disk")
        assert len(store._read) <= 3
    flood(engine)
    for session in sessions:
        ask(session, 7)


def test_what_a_failed_step_computed_counts_as_nothing(monkeypatch: Patch) -> None:
    """A sequence that continues behind positions whose forward raised is reported."""
    engine = make_engine(FlakyBackend(raise_on_step=1))
    engine.add_request([1, 2, 3, 4, 5], GREEDY)
    monkeypatch.setattr(engine._outputs, "fail", lambda plan, error: [])
    monkeypatch.setattr(Scheduler, "rollback", lambda self, plan: self.commit(plan, {1: 7}))
    engine.step()
    expect_report(engine, r"reads position 0 in block \d+, which holds nothing")


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_freed_blocks_are_nan_and_are_never_read(kv_cache_dtype: str, monkeypatch: Patch) -> None:
    """Under real kernels every freed block of the pool is NaN, and no completion changes; a store that drops its copies
    turns a completion into an error instead of a wrong text."""
    prompts = [question.prompt for question in demo_questions(12, seed=3)]
    settings = {"num_kv_blocks": 8, "block_size": 16, "host_kv_memory": "1MiB", "preemption": "swap",
                "kv_cache_dtype": kv_cache_dtype}
    texts = []
    for is_checked in (False, True):
        with Engine.from_pretrained("demo", check_invariants=is_checked, **settings) as engine:
            outputs = engine.generate(prompts, SamplingParams(max_tokens=40), show_progress=False)
            texts.append([one.outputs[0].token_ids for one in outputs])
            assert engine.stats().num_preemptions > 0
            if is_checked:
                blocks = engine.scheduler.kv_cache.device
                for block in range(blocks.num_blocks):
                    blocks.cache.evict_block(block)
                engine.observers[0].step_ended()
                assert len(blocks._pool.free_blocks) == blocks.num_blocks
                assert (engine._runner.backend.cache_store.pool.numpy() == 0xFF).all()  # type: ignore[attr-defined]
    assert texts[0] == texts[1]
    monkeypatch.setattr(KVPool, "start_swap_in", lambda self, number, _: self._ended.append((number, True)))
    with Engine.from_pretrained("demo", check_invariants=True, **settings) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=40), show_progress=False)
        answers = [one.outputs[0] for one in outputs]
        assert "error" in {answer.finish_reason for answer in answers}
        good = [place for place, answer in enumerate(answers) if answer.finish_reason != "error"]
        assert [answers[place].token_ids for place in good] == [texts[0][place] for place in good]


class Life:
    """Requests and sessions of every kind over one engine, chosen by a seed; every completion is compared."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng, self.folder = random.Random(seed), folder
        self.engine = make(num_kv_blocks=14, max_num_batched_tokens=12, max_num_waiting=64)
        self.sessions: list[Session] = []
        self.open: list[tuple[Request, list[int], int]] = []
        self.num_requests = 0

    def prompt(self) -> list[int]:
        length = self.rng.randrange(1, 12)
        return [self.rng.choice([(0, 1, 2)[place % 3], self.rng.randrange(4)]) for place in range(length)]

    def happen(self) -> None:
        kinds: list[Callable[[], None]] = [self.ask, self.ask, self.ask, self.turn, self.abort, self.end_session]
        self.rng.choice(kinds)()
        for _ in range(self.rng.randrange(3)):
            if self.engine.has_pending_requests():
                self.engine.step()
        for one in [one for one in self.open if one[0].is_done]:
            self.settle(*one)

    def ask(self) -> None:
        if self.engine.can_accept(3):
            prompt, length, n = self.prompt(), self.rng.randrange(1, 8), self.rng.choice([1, 1, 3])
            params = SamplingParams(max_tokens=length, ignore_eos=True, n=n)
            salt = self.rng.choice([None, "one"])
            self.open.append((self.engine.add_request(prompt, params, cache_salt=salt), prompt, length))
            self.num_requests += 1

    def abort(self) -> None:
        if self.open:
            self.rng.choice(self.open)[0].abort()

    def settle(self, request: Request, prompt: list[int], length: int) -> None:
        for one in request.output().outputs:
            assert list(one.token_ids) == toy_answer(prompt, length)[: len(one.token_ids)]
            assert one.finish_reason == "abort" or len(one.token_ids) == length
        request.remove()
        self.open.remove((request, prompt, length))

    def turn(self) -> None:
        if len(self.sessions) < 4:
            self.sessions.append(self.engine.session(PARAMS))
        session = self.rng.choice(self.sessions)
        if len(session.token_ids) > 40:
            return
        self.num_requests += 1
        ask(session, *self.prompt()[:4])
        what = self.rng.randrange(6)
        if what < 2:
            session.park(("host", "disk")[what])
        elif what == 2:
            session.resume()
        elif what == 3:
            self.sessions.append(session.fork())
        elif what == 4:
            session.export(self.folder / "session.json", include_kv=True)
            self.sessions.append(self.engine.import_session(self.folder / "session.json"))

    def end_session(self) -> None:
        if len(self.sessions) > 3:
            self.sessions.pop(self.rng.randrange(len(self.sessions))).close()


def test_a_thousand_requests_of_every_kind_pass(tmp_path: Path, monkeypatch: Patch) -> None:
    """Prefix hits, swaps, forks, parked, exported and imported sessions, aborts: no tag is wrong, nothing is left."""
    monkeypatch.setattr("os.fsync", lambda handle: None)
    life = Life(1, tmp_path)
    while life.num_requests < 1000:
        life.happen()
    for session in life.sessions:
        session.close()
    run(life.engine)
    stats = life.engine.stats()
    assert min(stats.num_preemptions, stats.swapped_in_bytes, stats.num_cached_tokens) > 0
    assert_all_free(life.engine)
