"""Recordings of an engine that guesses tokens ahead: decided again, run under other settings, and read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from analysis.replay.test_what_if import Paced
from pagedcore import SamplingParams
from pagedcore.analysis.recorder.recording import read_recording
from pagedcore.analysis.replay.decisions import replay_decisions
from pagedcore.analysis.replay.lives import Life, lives_of, recorded_outcome
from pagedcore.analysis.replay.point import find_point
from pagedcore.analysis.replay.what_if import WhatIf
from pagedcore.errors import RecordingError
from support.doubles import FakeClock
from support.drafts import Adversary, let_guess
from support.recordings import lines_of, toy_engine, write_lines

LENGTHS = (13, 29, 5, 32, 14, 7)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The recording of an engine whose drafts are often right, and the number of those that were."""
    path = tmp_path_factory.mktemp("recording") / "drafts.gz"
    answers: list[list[int]] = []

    def knows(tokens: Sequence[int], most: int) -> Sequence[int]:
        return next((one[len(tokens) :][:most] for one in answers if one[: len(tokens)] == list(tokens)), ())

    for is_drafting in (False, True):
        clock = FakeClock()
        with toy_engine("tokens", Paced(clock), clock, num_kv_blocks=24, max_num_batched_tokens=24) as engine:
            if is_drafting:
                let_guess(engine, Adversary(knows, 97), 97)
            requests = []
            for place, length in enumerate(LENGTHS):
                params = SamplingParams(max_tokens=length, ignore_eos=True)
                requests.append(engine.add_request([place, 1, 2, 3, 4], params, request_id=f"number {place}"))
                engine.step()
            while engine.has_pending_requests():
                engine.step()
            answers += [request.sequences[0].token_ids for request in requests]
            engine.dump_recording(path)
            num_right = engine.stats().num_accepted_tokens
    assert answers[: len(LENGTHS)] == answers[len(LENGTHS) :]
    return path, num_right


def test_steps_with_drafts_are_decided_again(file: tuple[Path, int]) -> None:
    """Every decision is equal, and each sequence has the tokens that were accepted, those behind drafts too."""
    recording, num_right = read_recording(file[0]), file[1]
    assert num_right > 20
    replayed = replay_decisions(recording)
    assert replayed.difference is None
    lives = lives_of(recording)
    assert [life.length for life in lives] == [5 + length for length in LENGTHS]
    assert sum(kept for life in lives for _, kept in life.drafts.values()) == num_right
    (name,) = [given[0] for _, verb, given, _ in recording.segments[0]["events"] if verb == "request"][3:4]
    assert len(find_point(recording, name, 30).token_ids) == 35


def test_the_same_settings_take_the_recorded_drafts(file: tuple[Path, int]) -> None:
    """On the virtual clock, rows have the drafts that they had, and as many are right: the requests end in the same
    order and in as many steps, give or take one for an arrival."""
    recording = read_recording(file[0])
    before, again = recorded_outcome(recording), WhatIf(recording, {}, leave_at=(0, 0)).run()
    assert again.finished == before.finished
    assert abs(again.num_steps - before.num_steps) <= 1
    fewer = WhatIf(recording, {"max_num_batched_tokens": 8}).run()
    assert sorted(fewer.finished) == sorted(before.finished)
    assert fewer.num_steps > before.num_steps


def test_a_recording_is_left_anywhere(file: tuple[Path, int]) -> None:
    """Between a step's tokens and those behind its drafts too: every request ends, and no block is lost."""
    recording = read_recording(file[0])
    places = [place for place, event in enumerate(recording.segments[0]["events"]) if event[1] in ("accept", "settle")]
    for place in places[2:50:9]:
        what_if = WhatIf(recording, {}, leave_at=(0, place))
        assert sorted(what_if.run().finished) == sorted(recorded_outcome(recording).finished)
        assert what_if.scheduler.stats().num_blocks_used == 0


def test_drafts_at_a_place_between_recorded_rows() -> None:
    """A row that begins among the accepted drafts of a recorded one has what is left of them; one behind them, none."""
    life = Life(0, {}, None, 0.0, 0, drafts={10: (6, 3), 20: (1, 0)})  # type: ignore[arg-type]
    assert [life.drafts_at(place) for place in (9, 10, 12, 13, 14, 20, 21)] == [
        (0, 0), (6, 3), (4, 1), (3, 0), (0, 0), (1, 0), (0, 0)]


def test_a_forged_number_of_drafts_is_seen(file: tuple[Path, int], tmp_path: Path) -> None:
    """More drafts than there is room for, or drafts of no row, are other decisions or refused, never followed."""
    for count in (10**9, -1, 1.5, "1"):
        lines = lines_of(file[0])
        plan = next(line[3][1] for line in lines if isinstance(line, list) and line[1] == "schedule" and "drafts" in
                    line[3][1])
        plan["drafts"][0][1] = count
        write_lines(tmp_path / "forged.gz", lines)
        assert is_refused(tmp_path / "forged.gz")


def is_refused(path: Path) -> Any:
    try:
        return replay_decisions(read_recording(path)).difference
    except RecordingError as error:
        return error


def test_a_file_of_version_5_is_read(tmp_path: Path) -> None:
    """Nothing was drafted or counted then."""
    with toy_engine() as engine:
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=4))
        while engine.has_pending_requests():
            engine.step()
        engine.dump_recording(tmp_path / "one.gz")
    lines = lines_of(tmp_path / "one.gz")
    lines[0]["version"] = 5
    for segment in lines[2:]:
        if isinstance(segment, dict):
            del segment["state"]["counters"]["num_drafted_tokens"], segment["state"]["counters"]["num_accepted_tokens"]
    write_lines(tmp_path / "one.gz", lines)
    assert replay_decisions(read_recording(tmp_path / "one.gz")).difference is None
