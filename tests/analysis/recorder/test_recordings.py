"""What a recording holds and does not hold, what recording costs, and what a reader refuses."""

from __future__ import annotations

import gzip
import json
import os
import random
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pagedcore.analysis.recorder import recording as recordings
from pagedcore.analysis.recorder.recording import Recording, read_recording
from pagedcore.analysis.recorder.ring import _EVENT_BYTES
from pagedcore.analysis.recorder.token_rows import MAX_TOKENS
from pagedcore.analysis.replay.decisions import replay_decisions
from pagedcore.analysis.replay.lives import recorded_outcome
from pagedcore.analysis.replay.point import find_point, settings_for
from pagedcore.analysis.replay.what_if import compare
from pagedcore.config.engine_config import EngineConfig
from pagedcore.errors import EngineOverloaded, ForkedProcess, InvalidConfig, RecordingError, RequestTooLarge
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler import chunk_ends
from pagedcore.scheduler.scheduler import Scheduler
from support.doubles import FakeClock, ToyBackend, ToyHybrid, ToyWindowed, make_sequence
from support.recordings import dumped, lines_of, ring_of, run_all, toy_engine, write_lines
from support.torture import first_seed, scaled

PROMPTS = [[1, 2, 3, 4, 5], [1, 2, 3, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9], [4]]


def text_of(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes())


def test_no_token_shows(tmp_path: Path) -> None:
    """Two engines whose prompts have all different tokens, but the same beginnings in common and the same order, leave
    the same recording: it says of tokens where sequences part and which is smaller, and nothing else.
    """
    class Constant(ToyBackend):
        def forward(self, batch):  # type: ignore[no-untyped-def]
            """Choose a token that is larger than those of all prompts."""
            logits = super().forward(batch)
            logits[:], logits[:, 31] = 0, 1
            return logits

    texts = []
    for shift in (0, 20):
        with toy_engine(backend=Constant()) as engine:
            run_all(engine, [[shift + token for token in prompt] for prompt in PROMPTS], max_tokens=1)
            engine.dump_recording(tmp_path / "one.gz")
        lines = lines_of(tmp_path / "one.gz")
        for line in lines:
            if isinstance(line, list) and line[1:2] == ["request"]:
                line[2][0] = ""
        texts.append(lines[1:])
    assert texts[0] == texts[1]


def test_no_secret_shows(tmp_path: Path) -> None:
    """Neither a caller's salt, nor a label, nor a stop text, nor a cache root or key is in a recording, unlike ids and
    seeds; nor are tokens, which only "tokens" writes.
    """
    with toy_engine() as engine:
        one = engine.add_request([5, 6, 7], cache_salt="the salt", request_id="the label")
        key = one.sequences[0].cache_root
        engine.step()
        engine.dump_recording(tmp_path / "one.gz")
    text = text_of(tmp_path / "one.gz")
    assert one.request_id.encode() in text
    for secret in (b"the salt", b"the label", key.hex().encode(), b"[5,6,7"):
        assert secret not in text
    with toy_engine("tokens") as engine:
        engine.add_request([5, 6, 7], cache_salt="the salt", request_id="the label")
        engine.step()
        engine.dump_recording(tmp_path / "one.gz")
    assert b"[5,6,7" in text_of(tmp_path / "one.gz")
    assert b"the salt" not in text_of(tmp_path / "one.gz")


def test_the_ring_is_bounded(tmp_path: Path) -> None:
    """However many steps there are, at most two segments are kept, each of half the ring's steps; what is left is
    replayed from the state that its first segment has.
    """
    with toy_engine() as engine:
        recorder = ring_of(engine)
        recorder._max_steps = 5
        for _ in range(6):
            run_all(engine, PROMPTS)
        assert [segment.num_steps for segment in recorder.segments][:1] == [5]
        assert len(recorder.segments) == 2
        recording = dumped(engine, tmp_path)
    found = replay_decisions(recording)
    assert (found.difference, found.num_segments) == (None, 2)
    assert 5 < found.num_steps <= 11


def test_the_ring_is_bounded_in_bytes() -> None:
    """A ring of few bytes begins a segment with almost every step, and keeps two."""
    with toy_engine() as engine:
        recorder = ring_of(engine)
        recorder._max_bytes = 1
        run_all(engine, PROMPTS)
        assert [segment.num_steps for segment in recorder.segments] == [1, 1]


def test_a_decode_step_costs_four_entries() -> None:
    """Recording adds four entries to a step that only decodes, and no copy of a table, a key or a sequence."""
    with toy_engine(num_kv_blocks=32) as engine:
        for prompt in PROMPTS:
            engine.add_request(prompt)
        for _ in range(6):
            engine.step()
        recorder = ring_of(engine)
        events = recorder.segments[-1].events
        num_before = len(events)
        engine.step()
        assert [event[1] for event in events[num_before:]] == ["schedule", "reserve", "observe", "commit"]
        for _, _, arguments, decision in events[num_before:]:
            assert not any(isinstance(one, dict) for one in arguments), decision


def test_a_refusal_is_recorded_wherever_it_comes_from(tmp_path: Path) -> None:
    """A full queue refuses a request, a turn and a completion that goes on; a pool refuses what it is too small for.
    Each counts once, by its error, and however many come between two steps they are one event, with the bytes of one.
    """
    with toy_engine(max_num_waiting=2) as engine:
        ended, aborted = engine.add_request([1], SamplingParams(max_tokens=1)), engine.add_request([2])
        engine.step()
        aborted.abort()
        for _ in range(2):
            engine.add_request([3])
        recorder = ring_of(engine)
        num_bytes, known = recorder.segments[-1].num_bytes, set(recorder._known)
        for _ in range(50):
            for refused in (lambda: engine.add_request([4] * 9), lambda: ended.extend([5]),
                            lambda: engine.requests.complete_turn(aborted)):
                with pytest.raises(EngineOverloaded):
                    refused()
            with pytest.raises(RequestTooLarge):
                engine.scheduler.add_sequences(make_sequence([6], 10_000, sequence_id=77))
        assert (recorder.segments[-1].num_bytes - num_bytes, recorder._known) == (_EVENT_BYTES, known)
        recording = dumped(engine, tmp_path)
    events = [given for _, verb, given, _ in recording.segments[-1]["events"] if verb == "refused"]
    assert events == [[{"EngineOverloaded": 150, "RequestTooLarge": 50}]]
    assert recorded_outcome(recording).num_refused == 200
    assert replay_decisions(recording).difference is None


def test_without_it_nothing_is_tapped() -> None:
    """The default records nothing: the scheduler's verbs are its own, and a dump is refused with the way to get one."""
    with toy_engine("off") as engine:
        assert not {"schedule", "commit"} & vars(engine.scheduler).keys()
        assert type(engine.scheduler) is Scheduler
        with pytest.raises(RecordingError, match='flight_recorder="on"'):
            engine.dump_recording("nowhere")


def test_what_was_taken_stays_as_it_was(tmp_path: Path) -> None:
    """Written later, after further steps, a recording is the one of the moment when it was taken."""
    engine = toy_engine()
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=6, ignore_eos=True))
    engine.step()
    write = engine.take_recording()
    at_once = dumped(engine, tmp_path)
    engine.step()
    write(tmp_path / "later.gz")
    assert lines_of(tmp_path / "later.gz") == lines_of(tmp_path / "recording.gz")
    assert len(dumped(engine, tmp_path).segments[0]["events"]) > len(at_once.segments[0]["events"])


def test_only_the_owner_reads_it(tmp_path: Path) -> None:
    """The file has the rights of its owner only, also where another one with more rights was before."""
    (tmp_path / "one.gz").write_bytes(b"")
    (tmp_path / "one.gz").chmod(0o644)
    with toy_engine() as engine:
        run_all(engine, PROMPTS)
        engine.dump_recording(tmp_path / "one.gz")
    assert stat.S_IMODE((tmp_path / "one.gz").stat().st_mode) == 0o600


def test_an_interrupt_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a dump leaves the file that was there, and nothing beside it."""
    (tmp_path / "one.gz").write_bytes(b"before")
    with toy_engine() as engine:
        run_all(engine, PROMPTS)
        for moment in (1, 4, 20):
            calls = iter(range(moment))
            monkeypatch.setattr(gzip.GzipFile, "write", lambda *_, calls=calls: _or_interrupt(calls))
            with pytest.raises(KeyboardInterrupt):
                engine.dump_recording(tmp_path / "one.gz")
            assert [one.name for one in tmp_path.iterdir()] == ["one.gz"]
            assert (tmp_path / "one.gz").read_bytes() == b"before"


def _or_interrupt(calls: Any) -> int:
    if next(calls, None) is None:
        raise KeyboardInterrupt
    return 0


def test_a_fork_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked child is refused, so that it cannot replace its parent's recording."""
    with toy_engine() as engine:
        run_all(engine, PROMPTS)
        own = os.getpid()
        with monkeypatch.context() as patch:
            patch.setattr("pagedcore.analysis.recorder.ring.os.getpid", lambda: own + 1)
            with pytest.raises(ForkedProcess):
                engine.dump_recording(tmp_path / "one.gz")
    assert not list(tmp_path.iterdir())


def a_file(folder: Path, backend: ToyBackend | None = None) -> Path:
    host = None if backend is not None else 12 * 4 * ToyBackend.kv_bytes_per_token
    settings = {"num_kv_blocks": 20} if isinstance(backend, ToyWindowed) else {}
    with toy_engine(backend=backend, host_kv_memory=host, preemption="swap", clock=FakeClock(), **settings) as engine:
        assert (engine.stats().num_windows > 0) == isinstance(backend, ToyWindowed)
        ring_of(engine)._max_steps = 6
        run_all(engine, [*PROMPTS, [8] * 9], max_tokens=12)
        engine.dump_recording(folder / "one.gz")
    return folder / "one.gz"


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    """Every beginning of a file, and any other file, is refused with the one typed error."""
    path = a_file(tmp_path)
    whole = path.read_bytes()
    for length in (0, 1, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(RecordingError):
            read_recording(path)
    path.write_bytes(gzip.compress(b"[" * 100_000))
    with pytest.raises(RecordingError, match="is none"):
        read_recording(path)
    path.write_bytes(b"PK\x03\x04 no recording")
    with pytest.raises(RecordingError, match="damaged"):
        read_recording(path)


@pytest.mark.parametrize(("change", "words"), [
    (lambda lines: lines[0].update(format="another"), "is none"),
    (lambda lines: lines[0].update(version=99), "version"),
    (lambda lines: lines[0].update(version=3), "version"),
    (lambda lines: lines[1].append([0, -1, 0, MAX_TOKENS + 1]), "tokens"),
    (lambda lines: lines[1].append([0, 10**9, 0, 1]), "row"),
    (lambda lines: lines[1].append([0, 0, 10**6, 10**6]), "row"),
    (lambda lines: lines[2]["settings"].update(num_blocks=10**12), "blocks"),
    (lambda lines: lines[2]["settings"].update(num_blocks=9), "large"),
    (lambda lines: lines[2]["settings"].update(max_num_seqs="4"), "max_num_seqs"),
    (lambda lines: _second(lines)["state"]["sequences"].append(0.5), "again"),
    (lambda lines: lines[2]["state"]["costs"].update(loss_share=float("nan")), "again|state"),
    (lambda lines: _described(lines).update(num_scored=10**9), "more of a sequence"),
    (lambda lines: _described(lines).update(num_keys=10**9), "more of a sequence"),
    (lambda lines: lines[2]["state"]["device"]["counts"].__setitem__(0, 7), "state"),
    (lambda lines: lines.append([0.0, "eval", ["1"], None]), "kind"),
    (lambda lines: lines.append([0.0, "refused", [{"EngineOverloaded": -5}], None]), "no count"),
    (lambda lines: lines.append([0.0, "refused", [{"EngineOverloaded": True}], None]), "no count"),
    (lambda lines: lines.append([0.0, "refused", [{"EngineOverloaded": "b"}], None]), "no count"),
    (lambda lines: lines.append([0.0, "refused", [[1]], None]), "the file is none"),
])
def test_a_forged_file_is_refused(change: Any, words: str, tmp_path: Path) -> None:
    """A field that promises more than is read, or a state that no engine can be in, is refused by what it is."""
    path = a_file(tmp_path)
    lines = lines_of(path)
    change(lines)
    write_lines(path, lines)
    with pytest.raises(RecordingError, match=words):
        replay_decisions(read_recording(path))


def test_a_file_of_version_4_is_read(tmp_path: Path) -> None:
    """It says of no block whether only sequences without a completion have held it, and is decided again as it was."""
    path = a_file(tmp_path)
    lines, num_entries = lines_of(path), 0
    lines[0]["version"] = 4
    for segment in lines[2:]:
        for memory in (segment["state"]["device"], segment["state"]["host"]) if isinstance(segment, dict) else ():
            memory["entries"] = [[*entry[:6], *entry[7:]] for entry in memory["entries"]]
            num_entries += len(memory["entries"])
    assert num_entries
    write_lines(path, lines)
    assert replay_decisions(read_recording(path)).difference is None


def _second(lines: list[Any]) -> Any:
    """The second of the lines that begin a segment."""
    return [line for line in lines if isinstance(line, dict)][2]


def _described(lines: list[Any]) -> Any:
    """The first description of a sequence in a segment's state."""
    states = [line["state"] for line in lines[2:] if isinstance(line, dict)]
    return next(state["sequences"][0] for state in states if state["sequences"])


def test_a_pool_that_nobody_can_have_is_refused(tmp_path: Path) -> None:
    """Settings that a recording is replayed with are bounded as its own are."""
    with pytest.raises(RecordingError, match="at most"):
        compare(read_recording(a_file(tmp_path)), {"num_blocks": 10**12})


def test_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that is larger than the limit is not read to its end, however small its file."""
    monkeypatch.setattr(recordings, "MAX_TEXT_BYTES", 1000)
    with gzip.open(tmp_path / "bomb.gz", "wb") as file:
        file.write(b" " * 10_000)
    with pytest.raises(RecordingError, match="1000 bytes"):
        read_recording(tmp_path / "bomb.gz")
    monkeypatch.setattr(recordings, "MAX_FILE_BYTES", 10)
    with pytest.raises(RecordingError, match="10 bytes"):
        read_recording(tmp_path / "bomb.gz")


_VALUES = (None, -1, 0, 1, 3, 10**6, 2**70, 0.5, 1e308, float("nan"), "", "x", [], [1], {}, True, "\ud800",
           json.loads("[" * 400 + "]" * 400))


@pytest.mark.parametrize("backend", [None, ToyHybrid(), ToyWindowed()], ids=["", "states", "windows"])
def test_no_forged_value_gets_through(
    backend: ToyBackend | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever value is put in the place of any other, a file is replayed, differs, or is refused with the typed error;
    no other error comes out, nothing hangs and nothing large is allocated.
    """
    monkeypatch.setattr(chunk_ends, "LEAST_SAVED", 2)
    path = a_file(tmp_path, backend)
    whole = lines_of(path)
    for seed in range(first_seed(), first_seed() + scaled(20)):
        rng = random.Random(seed)
        lines = json.loads(json.dumps(whole))
        for _ in range(rng.choice([1, 1, 3])):
            _forge(lines, rng)
        write_lines(path, lines)
        with suppress(RecordingError):
            recording = read_recording(path)
            for use in (replay_decisions, _compare, _find, _settings):
                with suppress(RecordingError, InvalidConfig):
                    use(recording)


def _compare(recording: Recording) -> None:
    compare(recording, {"num_blocks": 40})


def _find(recording: Recording) -> None:
    recording.header["has_tokens"] = True
    find_point(recording, "", 0)


def _settings(recording: Recording) -> None:
    EngineConfig(**settings_for(recording, 10))


def _forge(lines: list[Any], rng: random.Random) -> None:
    holder: Any = lines
    while True:
        place = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        value = holder[place]
        if isinstance(value, dict | list) and value and rng.random() < 0.9:
            holder = value
            continue
        holder[place] = rng.choice(_VALUES)
        return
