"""Conversations over the toy backend: turns, parking, forks and their bounds, with every law checked on the way."""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import pagedcore.sessions.session
from pagedcore.analysis.diagnosis.invariants import check, snapshot
from pagedcore.engine.engine import Engine
from pagedcore.errors import (
    EngineClosed,
    EngineOverloaded,
    InvalidRequest,
    PromptTooLong,
    RequestTooLarge,
    SessionStateError,
    TooManySequences,
    TooManySessions,
)
from pagedcore.sampling_params import SamplingParams
from pagedcore.sessions import kv_file
from pagedcore.sessions.parking import ParkedFile
from pagedcore.sessions.session import Session
from support.doubles import VOCAB_SIZE, FakeClock, ToyBackend, ToyStore, toy_answer
from support.engine_builders import assert_all_free
from support.toy_sessions import PARAMS, ask, flood, make


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow beyond sixteen bytes; pytest's own output may be such a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def store_of(engine: Engine) -> ToyStore:
    """The store that moves the engine's blocks."""
    return engine.components.runner.backend.cache_store  # type: ignore[attr-defined]


def test_turns_reuse_all_that_was_computed() -> None:
    """Each turn finds every position of the turns before, the very last token excepted."""
    engine = make()
    with engine.session(PARAMS) as session:
        assert [ask(session, 1, 2, 3), ask(session, 4), ask(session, 5, 6)] == [0, 7, 13]
        assert engine.stats().num_blocks_used == 0
    assert_all_free(engine)


def test_others_advance_while_a_session_is_asked() -> None:
    """Asking steps the engine: a request that waits meanwhile is answered as well."""
    engine = make()
    request = engine.add_request([9, 8, 7], PARAMS)
    ask(engine.session(PARAMS), 1, 2, 3)
    assert request.is_done
    assert request.sequences[0].output_token_ids == toy_answer([9, 8, 7], 5)


def test_a_stream_gives_the_same_tokens_and_can_be_left() -> None:
    """The deltas of a stream make up the answer; leaving it early aborts the turn and the session stays usable."""
    engine = make()
    session = engine.session(PARAMS)
    tokens = [token for delta in session.stream([1, 2, 3]) for token in delta.token_ids]
    assert tokens == toy_answer([1, 2, 3], 5)
    stream = session.stream([4])
    first = next(stream)
    stream.close()
    assert not session.is_answering
    assert session.token_ids == (1, 2, 3, *tokens, 4, *first.token_ids)
    ask(session, 7)
    session.close()
    assert_all_free(engine)


def test_sixteen_sessions_share_a_pool_for_four() -> None:
    """Interleaved at random, parked here and there, every answer is right and nothing leaks."""
    rng = random.Random(5)
    engine = make(num_host_blocks=40)
    sessions = [engine.session(PARAMS) for _ in range(16)]
    tiers = set()
    for _ in range(6):
        for number in rng.sample(range(16), 16):
            session = sessions[number]
            known = list(session.token_ids)
            if len(known) > 45:
                continue
            ask(session, number, 1)
            if (chance := rng.random()) < 0.4:
                tiers.add(session.park("host").tier)
            elif chance < 0.6:
                tiers.add(session.park("disk").tier)
    assert tiers >= {"host", "disk"}
    together = [session.extend([3]) for session in sessions]
    while engine.has_pending_requests():
        engine.step()
    for session, request in zip(sessions, together, strict=True):
        end = request.sequences[0].num_prompt_tokens
        assert list(session.token_ids[end:]) == toy_answer(session.token_ids[:end], 5)
    for session in sessions:
        session.close()
    assert_all_free(engine)
    assert engine.stats().num_host_blocks_used == 0


def test_a_parked_session_survives_the_flood() -> None:
    """What is pinned on the host is there when everything else was used by others; what is not pinned is gone."""
    engine = make()
    parked, idle = engine.session(PARAMS), engine.session(PARAMS)
    ask(parked, 1, 2, 3)
    ask(idle, 3, 2, 1)
    state = parked.park("host")
    assert (state.tier, state.num_tokens_kept, parked.parked) == ("host", 7, state)
    flood(engine)
    assert (ask(parked, 4), ask(idle, 4)) == (7, 0)
    assert parked.parked is None
    assert engine.stats().num_host_blocks_used == 0


def test_what_the_host_lost_is_moved_there_again() -> None:
    """A session whose host copies were evicted while the device still has them is copied out, the tail included."""
    engine = make()
    session = engine.session(PARAMS)
    ask(session, 1, 2, 3, 4, 5, 6)
    host = engine.scheduler.kv_cache.host
    for cached in host.cache.registered:
        if cached.content.is_first:
            host.cache.evict_block(cached.block_id)
    assert session.park("host").num_tokens_kept == 10
    flood(engine)
    assert ask(session, 4) == 10


def test_parked_sessions_take_at_most_half_of_the_host() -> None:
    """When sessions have pinned half of the host's blocks the next one goes to disk, and the rest stays usable."""
    engine = make(num_host_blocks=8)
    sessions = [engine.session(PARAMS) for _ in range(4)]
    tiers = []
    for number, session in enumerate(sessions):
        ask(session, number, 2, 3)
        tiers.append(session.park("host").tier)
    assert tiers == ["host", "host", "disk", "disk"]
    flood(engine)
    assert [ask(session, 9) for session in sessions] == [7, 7, 7, 7]


def test_from_disk_to_the_host() -> None:
    """Parked on the host after the disk, a session is brought back whole first; without room for that it stays."""
    engine = make(num_kv_blocks=8)
    session, similar = engine.session(PARAMS), engine.session(PARAMS)
    ask(session, *range(1, 15))
    session.park("disk")
    flood(engine)
    ask(similar, 1, 2, 3, 4, 5)
    request = engine.add_request([2] * 24, SamplingParams(max_tokens=8, ignore_eos=True))
    while len(request.sequences[0].output_token_ids) < 2:
        engine.step()
    assert session.park("host").tier == "disk"
    request.abort()
    assert session.park("host").tier == "host"
    assert len(engine.sessions.parking.directory.files) == 0
    flood(engine)
    assert ask(session, 4) == 18


def test_from_the_host_to_the_disk() -> None:
    """What is moved to a file stays no longer on the host."""
    engine = make()
    session = engine.session(PARAMS)
    ask(session, 1, 2, 3)
    session.park("host")
    assert session.park("disk").tier == "disk"
    assert engine.stats().num_host_blocks_used == 0
    flood(engine)
    assert ask(session, 4) == 7


def test_an_export_has_what_the_file_holds_beyond_the_memories(tmp_path: Path) -> None:
    """A session that is parked on disk is exported with all its KV, although its beginning is on the device."""
    engine = make()
    session, similar = engine.session(PARAMS), engine.session(PARAMS)
    ask(session, *range(1, 15))
    session.park("disk")
    flood(engine)
    ask(similar, 1, 2, 3, 4, 5)
    session.export(tmp_path / "chat.json")
    assert ask(make().import_session(tmp_path / "chat.json"), 4) == 18


def test_a_turn_follows_what_it_was_prepared_for() -> None:
    """A turn that was prepared before another one began is refused, and nothing of it is kept."""
    session = make().session(PARAMS)
    turn = session.turn_operation([1, 2, 3], None)
    prepare = next(turn)
    ask(session, 4)
    before = session.token_ids
    with pytest.raises(SessionStateError, match="further on"):
        turn.send(prepare())
    assert session.token_ids == before


@pytest.mark.parametrize("num_host_blocks", [0, 6])
def test_a_file_is_not_read_where_the_host_has_no_room(
    num_host_blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parked on the host after the disk, a session that cannot go there stays as it lies, for the new time."""
    clock = FakeClock()
    engine = make(num_host_blocks, clock, disk_kv_dir=str(tmp_path))
    session = engine.session(PARAMS)
    ask(session, *range(1, 15))
    session.park("disk", ttl_s=5)
    files = list(tmp_path.glob("*/*"))
    monkeypatch.setattr(ParkedFile, "read", None)
    state = session.park("host", ttl_s=9)
    assert (state.tier, state.num_tokens_kept, state.expires_s) == ("disk", 18, 9.0)
    assert list(tmp_path.glob("*/*")) == files
    monkeypatch.undo()
    flood(engine)
    assert ask(session, 4) == 18


def test_with_nothing_to_keep_nothing_is_kept() -> None:
    """A session whose KV is gone everywhere, or was never trusted, is parked as tokens and breaks no law."""
    engine = make()
    session = engine.session(PARAMS)
    ask(session, 1, 2, 3)
    flood(engine)
    for tier in ("host", "disk"):
        assert session.park(tier).tier == "tokens"  # type: ignore[arg-type]
        assert check(snapshot(engine.scheduler)) == []
    assert ask(session, 4) == 0


@pytest.mark.parametrize("num_host_blocks", [0, 1])
def test_without_a_host_parking_goes_to_disk(num_host_blocks: int) -> None:
    """No host tier, or one too small, is no error: the KV is kept on disk, and the result says so."""
    engine = make(num_host_blocks=num_host_blocks)
    session = engine.session(PARAMS)
    ask(session, 1, 2, 3)
    assert session.park("host").tier == "disk"
    flood(engine)
    assert ask(session, 4) == 7


def test_what_cannot_be_written_is_not_kept(tmp_path: Any) -> None:
    """A directory that cannot be made costs the KV, not the session; the result says that only tokens are kept."""
    (tmp_path / "file").write_text("in the way")
    engine = make(disk_kv_dir=str(tmp_path / "file" / "kv"))
    session = engine.session(PARAMS)
    ask(session, 1, 2, 3)
    state = session.park("disk")
    assert (state.tier, state.num_tokens_kept, session.parked) == ("tokens", 0, state)
    flood(engine)
    assert ask(session, 4) == 0


def test_a_full_disk_costs_the_kv_alone(tmp_path: Path) -> None:
    """Where the disk takes no byte, only tokens are kept, and no part of a file is left behind."""
    engine = make(disk_kv_dir=str(tmp_path))
    session = engine.session(PARAMS)
    ask(session, 1, 2, 3)
    with full_disk():
        assert session.park("disk").tier == "tokens"
        assert (len(engine.sessions.parking.directory.files), list(tmp_path.glob("*/*"))) == (0, [])
        with pytest.raises(OSError, match="large"):
            session.export(tmp_path / "chat.json")
    assert list(tmp_path.glob("*/*")) == []
    assert ask(session, 4) == 7


def test_a_file_that_cannot_be_removed_harms_nobody(tmp_path: Path) -> None:
    """Whether a session continues, expires or is closed: a file that stays is no reason to fail."""
    clock = FakeClock()
    engine = make(clock=clock, disk_kv_dir=str(tmp_path))
    sessions = [engine.session(PARAMS) for _ in range(4)]
    for number, session in enumerate(sessions):
        ask(session, number, 2, 3)
        session.park("disk", ttl_s=5 if number == 1 else None)
    for file in list(tmp_path.glob("*/*")):
        file.unlink()
        (file / "in the way").mkdir(parents=True)
    assert ask(sessions[0], 4) == 7
    clock.advance(6)
    engine.step()
    assert sessions[1].parked is None
    sessions[2].close()
    assert len(list(tmp_path.glob("*/*"))) == 4
    engine.close()
    assert list(tmp_path.iterdir()) == []


CALLS: dict[str, Callable[[Session, Path], Any]] = {
    "ask": lambda session, path: session.ask([4], PARAMS),
    "stream": lambda session, path: list(session.stream([4], PARAMS)),
    "park on the host": lambda session, path: session.park("host"),
    "park on disk": lambda session, path: session.park("disk"),
    "resume": lambda session, path: session.resume(),
    "export": lambda session, path: session.export(path / "chat.json"),
}


@pytest.mark.parametrize("is_parked", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_the_keyboard_may_interrupt_any_file_and_any_step(
    name: str, is_parked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in a step or while a file is read or written, a session is between two turns, keeps no file that it
    does not use, leaves what was exported before as it was, and continues with the right tokens."""
    at, num_calls = -1, 0

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == at + 1:
                raise KeyboardInterrupt
            return function(*arguments)

        return call

    while num_calls > at:
        at += 1
        kv_dir = tmp_path / f"kv {at}"
        engine = make(disk_kv_dir=str(kv_dir))
        session = engine.session(PARAMS)
        ask(session, 1, 2, 3)
        session.export(tmp_path / "chat.json")
        session.park("disk" if is_parked else "host")
        num_calls = 0
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr("os.fsync", watched(os.fsync))
            patch.setattr(kv_file, "read_bounded", watched(kv_file.read_bounded))
            patch.setattr(ToyBackend, "forward", watched(ToyBackend.forward))
            CALLS[name](session, tmp_path)
        assert not session.is_answering
        assert check(snapshot(engine.scheduler)) == []
        num_files = int((state := session.parked) is not None and state.tier == "disk")
        assert len(list(kv_dir.glob("*/*"))) == len(engine.sessions.parking.directory.files) == num_files
        assert make().import_session(tmp_path / "chat.json").token_ids[:3] == (1, 2, 3)
        assert not list(tmp_path.glob(".*"))
        ask(session, 9)
        session.close()
        assert_all_free(engine)
    assert at == {"ask": (5, 6), "stream": (5, 6), "park on the host": (0, 1), "park on disk": (2, 0), "resume": (0, 1),
                  "export": (4, 5)}[name][is_parked]


def test_files_go_with_what_they_are_for(tmp_path: Any) -> None:
    """A KV file is readable by its owner only, and gone when the session continues, expires or is closed."""
    clock = FakeClock()
    engine = make(disk_kv_dir=str(tmp_path / "kv"), clock=clock)
    session = engine.session(PARAMS)

    def files() -> list[Any]:
        return list((tmp_path / "kv").glob("*/*"))

    ask(session, 1, 2, 3)
    session.park("disk")
    assert [file.stat().st_mode & 0o777 for file in files()] == [0o600]
    ask(session, 4)
    assert files() == []
    session.park("disk", ttl_s=5)
    session.park("disk", ttl_s=9)
    clock.advance(8)
    engine.step()
    assert len(files()) == 1
    clock.advance(2)
    engine.step()
    assert files() == []
    session.park("disk")
    session.close()
    assert files() == []


def test_a_private_directory_goes_with_the_engine() -> None:
    """Without a directory of its own the engine makes a private one, and removes it when it is closed."""
    engine = make()
    session = engine.session(PARAMS)
    ask(session, 1, 2, 3)
    session.park("disk")
    [path] = engine.sessions.parking.directory.files
    assert path.parent.stat().st_mode & 0o777 == 0o700
    engine.close()
    assert not path.parent.exists()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_parked_kv_expires(tier: Any) -> None:
    """After its time, by the engine's clock, the KV is dropped, in a step or when the session is looked at."""
    clock = FakeClock()
    engine = make(clock=clock)
    session, other = engine.session(PARAMS), engine.session(PARAMS)
    ask(session, 1, 2, 3)
    ask(other, 9, 8, 7)
    session.park(tier, ttl_s=10)
    other.park(tier, ttl_s=100)
    clock.advance(9.5)
    assert session.parked is not None
    clock.advance(0.5)
    assert session.parked is None
    flood(engine)
    assert (ask(session, 4), ask(other, 4)) == (0, 7)


def test_every_parked_session_expires_in_its_own_time() -> None:
    """The second one to expire does so, too."""
    clock = FakeClock()
    engine = make(clock=clock)
    sessions = [engine.session(PARAMS) for _ in range(3)]
    for index, session in enumerate(sessions):
        ask(session, index + 1, 2, 3)
        session.park("host", ttl_s=10 * (index + 1))
    for num_left in (2, 1, 0):
        clock.advance(10)
        assert sum(session.parked is not None for session in sessions) == num_left


def test_forks_go_their_own_ways() -> None:
    """A fork shares what there is, and nothing that either says later reaches the other."""
    engine = make()
    session = engine.session(PARAMS)
    ask(session, 1, 2, 3, 4, 5, 6)
    fork = session.fork()
    assert fork.token_ids == session.token_ids
    assert (ask(fork, 7), ask(session, 8)) == (10, 11)
    assert ask(fork.fork(), 9) == 16
    for one in list(engine.sessions):
        one.close()
    assert_all_free(engine)


def test_every_sequence_of_a_session_is_known_to_go_on(tmp_path: Path) -> None:
    """Asked, forked or imported: what it leaves is kept for the next turn whatever others do."""
    engine = make()
    session = engine.session(PARAMS)
    ask(session, 1, 2, 3)
    session.export(tmp_path / "chat.json")
    for other in (session, session.fork(), engine.import_session(tmp_path / "chat.json")):
        assert other._request is not None
        assert other._request.sequences[0].is_in_session
    assert not engine.add_request([1, 2], PARAMS).sequences[0].is_in_session


def test_a_label_stays_with_its_session_when_a_fork_is_closed() -> None:
    """A fork has no label, empty or not, so its end frees none; the label is free again when its session is closed."""
    engine = make()
    empty = engine.session(PARAMS, request_id="chat 1")
    early = empty.fork()
    ask(empty, 1, 2, 3)
    ask(early, 1, 2, 3)
    late = empty.fork()
    ask(late, 4)
    assert [one.output().client_request_id for one in (empty, early, late)] == ["chat 1", None, None]
    early.close()
    late.close()
    with pytest.raises(InvalidRequest, match="request_id"):
        engine.add_request([1], request_id="chat 1")
    ask(empty, 5)
    empty.close()
    assert engine.add_request([1], request_id="chat 1").client_request_id == "chat 1"


def test_a_fork_shares_also_where_strangers_may_not() -> None:
    """Without prefix caching requests share nothing, but a fork is of the same conversation."""
    engine = make(enable_prefix_caching=False)
    session = engine.session(PARAMS)
    ask(session, 1, 2, 3, 4, 5, 6)
    assert ask(session.fork(), 7) == 10
    stranger = engine.session(PARAMS)
    assert ask(stranger, 1, 2, 3, 4, 5, 6) == 0


def test_salts_are_kept_apart() -> None:
    """Sessions of different salts share nothing; a fork has its original's salt."""
    engine = make()
    session = engine.session(PARAMS, cache_salt="tenant 1")
    ask(session, 1, 2, 3, 4, 5, 6)
    assert ask(engine.session(PARAMS, cache_salt="tenant 2"), 1, 2, 3, 4, 5, 6) == 0
    assert ask(engine.session(PARAMS, cache_salt="tenant 1"), 1, 2, 3, 4, 5, 6) == 5
    assert ask(session.fork(), 7) == 10


@pytest.mark.parametrize("order", ["oldest first", "newest first", "failed"])
def test_parking_while_transfers_are_slow(order: str) -> None:
    """Parked while its blocks are on their way, a session keeps what arrives; asked too early, it waits for it."""
    engine = make()
    store = store_of(engine)
    store.is_slow = True
    sessions = [engine.session(PARAMS) for _ in range(3)]
    for number, session in enumerate(sessions):
        ask(session, number, 2, 3)
        assert session.park("host").tier == "host"
        assert check(snapshot(engine.scheduler)) == []
    assert len(store.under_way) == 3
    for transfer_id in sorted(store.under_way, reverse=order == "newest first"):
        store.end(transfer_id, is_ok=order != "failed")
        engine.step()
    store.is_slow = False
    flood(engine)
    found = 0 if order == "failed" else 7
    assert [session.parked is not None and session.parked.num_tokens_kept for session in sessions] == [found] * 3
    assert [ask(session, 9) for session in sessions] == [found] * 3


def test_asked_before_its_blocks_have_arrived() -> None:
    """A turn that begins while the session's blocks are still on their way to the host gets the right answer."""
    engine = make()
    store_of(engine).is_slow = True
    session = engine.session(PARAMS)
    ask(session, 1, 2, 3)
    session.park("host")
    assert ask(session, 4) == 7
    session.park("host")
    session.close()
    for transfer_id in list(store_of(engine).under_way):
        store_of(engine).end(transfer_id)
    store_of(engine).is_slow = False
    flood(engine)
    assert_all_free(engine)
    assert engine.stats().num_host_blocks_used == 0


def test_closed_and_aborted_while_blocks_move() -> None:
    """Closing a session whose blocks are on their way, out or in, leaks nothing."""
    engine = make()
    store = store_of(engine)
    session, other = engine.session(PARAMS), engine.session(PARAMS)
    ask(session, 1, 2, 3)
    ask(other, 3, 2, 1)
    session.park("host")
    other.park("host")
    flood(engine)
    store.is_slow = True
    assert session.resume() == 7
    request = other.extend([5])
    engine.step()
    session.close()
    request.abort()
    for transfer_id in list(store.under_way):
        store.end(transfer_id)
    store.is_slow = False
    engine.step()
    assert ask(other, 6) >= 0
    other.close()
    assert_all_free(engine)
    assert engine.stats().num_host_blocks_used == 0


def test_resume_takes_no_room_from_others() -> None:
    """While running requests may need every block, nothing is brought back; it stays where it is."""
    engine = make(num_kv_blocks=8)
    session, on_disk = engine.session(PARAMS), engine.session(PARAMS)
    ask(session, *range(1, 15))
    ask(on_disk, *range(15, 29))
    session.park("host")
    on_disk.park("disk")
    flood(engine)
    request = engine.add_request([2] * 24, SamplingParams(max_tokens=8, ignore_eos=True))
    while len(request.sequences[0].output_token_ids) < 2:
        engine.step()
    assert session.resume() == 0
    assert on_disk.resume() <= 4
    assert session.parked is not None
    assert on_disk.parked is not None
    while engine.has_pending_requests():
        engine.step()
    assert request.sequences[0].output_token_ids == toy_answer([2] * 24, 8)
    assert session.resume() == 18
    assert session.parked is None
    assert (ask(session, 4), ask(on_disk, 4)) == (18, 18)


def test_a_block_is_left_for_everybody_who_runs() -> None:
    """What is brought back leaves a block for each running request, which may need one in the next step."""
    engine = make(num_kv_blocks=12)
    on_host, on_disk = engine.session(PARAMS), engine.session(PARAMS)
    ask(on_host, *range(1, 15))
    ask(on_disk, *range(15, 29))
    on_host.park("host")
    on_disk.park("disk")
    flood(engine)
    request = engine.add_request([2] * 24, SamplingParams(max_tokens=12, ignore_eos=True))
    while request.sequences[0].num_computed_tokens < 26:
        engine.step()
    assert engine.scheduler.kv_cache.device.num_available_blocks == 5
    assert (on_host.resume(), on_disk.resume()) == (0, 16)
    while engine.has_pending_requests():
        engine.step()
    assert engine.stats().num_preemptions == 0
    assert (on_host.resume(), on_disk.resume()) == (18, 18)


def test_the_same_words_on_their_way_twice() -> None:
    """Of two sessions with the same words, moved to the host at the same time, the parked one keeps what it has even
    when the copy of the other one, which came first, would be evicted."""
    engine = make()
    store = store_of(engine)
    store.is_slow = True
    first, second = engine.session(PARAMS), engine.session(PARAMS)
    requests = [session.extend([1, 2, 3]) for session in (first, second)]
    while not all(request.is_done for request in requests):
        engine.step()
    assert second.park("host").num_tokens_kept == 7
    for transfer_id in sorted(store.under_way):
        store.end(transfer_id)
    store.is_slow = False
    flood(engine)
    assert ask(second, 4) == 7


def test_a_turn_that_is_refused_changes_nothing() -> None:
    """Refused for its length, its parameters or a full queue, a session stays as it was, parked where it was."""
    engine = make(max_num_waiting=4)
    session = engine.session(PARAMS)
    ask(session, 1, 2, 3)
    session.park("disk")
    before = session.token_ids, session.parked
    with pytest.raises(PromptTooLong):
        session.ask([1] * 60)
    with pytest.raises(InvalidRequest):
        session.ask([VOCAB_SIZE])
    with pytest.raises(TooManySequences):
        session.ask([1], SamplingParams(n=2))
    waiting = [engine.add_request([7, number], PARAMS) for number in range(4)]
    with pytest.raises(EngineOverloaded):
        session.ask([1])
    assert (session.token_ids, session.parked) == before
    while engine.has_pending_requests():
        engine.step()
    assert all(request.is_done for request in waiting)
    assert ask(session, 4) == 7


def test_what_may_be_asked_when() -> None:
    """While a turn is under way only export and fork are allowed; after the end nothing is."""
    engine = make()
    session = engine.session(PARAMS)
    with pytest.raises(SessionStateError, match="the session is empty"):
        session.ask(None)
    assert session.park("disk").tier == "tokens"
    assert (session.resume(), session.fork().token_ids) == (0, ())
    session.extend([1, 2, 3])
    for refused in (lambda: session.ask([1]), session.park, session.resume):
        with pytest.raises(SessionStateError, match="is answering, it has to be between two turns"):
            refused()
    while session.is_answering:
        engine.step()
    with pytest.raises(SessionStateError, match="cut off within a completion"):
        session.ask(None)
    for bad in ({"tier": "tape"}, {"ttl_s": 0}, {"ttl_s": float("nan")}, {"ttl_s": True}, {"ttl_s": 1e9}):
        with pytest.raises(InvalidRequest):
            session.park(**bad)
    session.close()
    session.close()
    for call in (lambda: session.ask([1]), session.park, session.resume, session.fork, lambda: session.export("x")):
        with pytest.raises(SessionStateError, match="is closed, it has to be open"):
            call()
    other = engine.session(PARAMS)
    engine.close()
    with pytest.raises(SessionStateError):
        other.ask([1])
    with pytest.raises(EngineClosed):
        engine.session()


def test_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many sessions as the limit can be open; closing one makes room for the next."""
    monkeypatch.setattr(pagedcore.sessions.session, "MAX_SESSIONS", 3)
    engine = make()
    sessions = [engine.session(PARAMS) for _ in range(2)]
    ask(sessions[0], 1, 2, 3)
    sessions[0].fork()
    for another in (engine.session, sessions[0].fork):
        with pytest.raises(TooManySessions, match="3 are open"):
            another()
    sessions[1].close()
    engine.session()


def test_an_answer_too_long_for_the_pool_is_not_begun() -> None:
    """A session that has outgrown the pool gets a typed error, and stays usable with shorter answers."""
    engine = make(num_kv_blocks=8, num_host_blocks=0)
    session = engine.session(PARAMS)
    ask(session, *range(1, 21))
    with pytest.raises(RequestTooLarge):
        session.ask([1], SamplingParams(max_tokens=20))
    ask(session, 1)


def test_a_seed_of_its_own_makes_a_fork_differ() -> None:
    """Turns draw from the session's seed, whatever the order of requests; a turn may bring its own."""
    hot = SamplingParams(max_tokens=12, temperature=5.0, ignore_eos=True)
    other_seed = SamplingParams(max_tokens=12, temperature=5.0, ignore_eos=True, seed=99)
    engine = make()
    session = engine.session(hot)
    session.ask([1, 2, 3])
    forks = [session.fork() for _ in range(3)]
    engine.generate([[5, 5, 5]], hot)
    first, second = (fork.ask([4]).outputs[0].token_ids for fork in forks[:2])
    assert first == second == session.ask([4]).outputs[0].token_ids
    assert forks[2].ask([4], other_seed).outputs[0].token_ids != first
