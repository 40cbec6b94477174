"""The central promise for conversations: parked, exported or preempted, they continue with the same bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from pagedcore.sessions.session import Session
from support.apart import Apart
from support.engine_builders import assert_all_free
from support.session_builders import FIRST, PARAMS, SECOND, Lab, first_turn, make_lab, second_turn

NUM_COMPUTED = len(FIRST) + 20 - 1
"""Positions of the first turn; its last token is computed in the second one."""

Way: TypeAlias = Callable[[Lab, Session], tuple[Session, int]]
"""What happens between two turns; returns the session that continues and the positions it is to find."""


@pytest.fixture(scope="module", params=[
    "demo", pytest.param("float32", marks=pytest.mark.slow), "bfloat16", "int8 KV",
])
def kind(request: pytest.FixtureRequest) -> str:
    """A model and its number format."""
    return str(request.param)


@pytest.fixture(scope="module")
def expected(kind: str) -> tuple[list[int], str]:
    """The second turn of a conversation that was never disturbed."""
    lab = make_lab(kind)
    return second_turn(lab, first_turn(lab))[:2]


def in_place(lab: Lab, session: Session) -> tuple[Session, int]:
    return session, NUM_COMPUTED


def forked(lab: Lab, session: Session) -> tuple[Session, int]:
    fork = session.fork()
    second_turn(lab, session, [70, 71])
    # Why: the original has computed the last token of the answer meanwhile, which is the fork's too.
    return fork, NUM_COMPUTED + 1


def forgotten(lab: Lab, session: Session) -> tuple[Session, int]:
    lab.flood()
    return session, 0


def parked(*tiers: str) -> Way:
    """Parked in each of these tiers in turn."""

    def park(lab: Lab, session: Session) -> tuple[Session, int]:
        for tier in tiers:
            state = session.park(tier)
            assert (state.tier, state.num_tokens_kept) == (tier, NUM_COMPUTED)
            lab.flood()
        return session, NUM_COMPUTED

    return park


def resumed(tier: str) -> Way:
    """Parked in this tier and resumed before the next turn."""

    def park_and_resume(lab: Lab, session: Session) -> tuple[Session, int]:
        parked(tier)(lab, session)
        assert session.resume() == NUM_COMPUTED
        assert session.parked is None
        return session, NUM_COMPUTED

    return park_and_resume


def expired(lab: Lab, session: Session) -> tuple[Session, int]:
    session.park("disk", ttl_s=10)
    lab.clock.advance(11)
    lab.flood()
    assert session.parked is None
    return session, 0


def cut_off(lab: Lab, session: Session) -> tuple[Session, int]:
    """Its second turn is aborted half-way; what is compared is a fork of it from before that."""
    fork = session.fork()
    request = fork.extend(SECOND)
    while len(request.sequences[0].output_token_ids) < 7:
        lab.engine.step()
    request.abort()
    lab.flood()
    return session, 0


WAYS: dict[str, Way] = {
    "in_place": in_place,
    "forked": forked,
    "forgotten": forgotten,
    "on_host": parked("host"),
    "on_host_and_resumed": resumed("host"),
    "on_disk": parked("disk"),
    "on_disk_and_resumed": resumed("disk"),
    "from_host_to_disk": parked("host", "disk"),
    "expired": expired,
    "cut_off": cut_off,
}


@pytest.fixture(scope="module")
def lab(kind: str) -> Lab:
    """One engine for all ways."""
    return make_lab(kind)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_conversation_goes_on_with_the_same_bytes(
    kind: str, expected: tuple[list[int], str], lab: Lab, way: Way
) -> None:
    """Continued, forked, evicted, parked on host and disk, resumed or expired: tokens and logits are the same bytes."""
    lab.flood()
    session, num_cached = way(lab, first_turn(lab))
    *result, num_found = second_turn(lab, session)
    assert tuple(result) == expected
    assert num_found == num_cached
    session.close()
    for other in list(lab.engine.sessions):
        other.close()
    assert_all_free(lab.engine)


@pytest.mark.parametrize("kinds", [("bfloat16", "int8 KV"), ("int8 KV", "bfloat16")], ids=str)
def test_kv_of_another_number_format_is_computed_again(kinds: tuple[str, str], tmp_path: Path) -> None:
    """The format of a KV file names that of the numbers: an engine with another imports the tokens and computes them,
    to the bytes of an engine that was given the tokens alone.
    """
    key, results = b"the key of both engines", []
    with make_lab(kinds[0], session_key=key).engine as engine, engine.session(PARAMS) as session:
        session.ask(FIRST)
        for name in ("whole", "bare"):
            session.export(tmp_path / name, include_kv=name == "whole")
    for name in ("whole", "bare"):
        lab = make_lab(kinds[1], session_key=key)
        with lab.engine as engine, engine.import_session(tmp_path / name) as session:
            results.append(second_turn(lab, session))
    assert results[0] == results[1]
    assert results[0][2] == 0


@pytest.mark.parametrize("kind", [
    "int8 KV", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("demo", "float32", "bfloat16")),
], indirect=True, scope="module")  # fmt: skip
def test_a_conversation_goes_on_in_another_process(
    kind: str, expected: tuple[list[int], str], lab: Lab, apart: Apart, tmp_path: Path
) -> None:
    """An exported session gives the same bytes in a new process, with its KV and without."""
    paths = [tmp_path / "whole.json", tmp_path / "bare.json"]
    with first_turn(lab) as session:
        for path in paths:
            session.export(path, include_kv=path is paths[0])
    assert len(list(tmp_path.iterdir())) == 3
    program = "import sys; from support.session_builders import go_on; go_on(*sys.argv[1:])"
    status, out, err = apart.outcome(program, kind, *map(str, paths))
    assert status == 0, err
    for line, num_cached in zip(out.splitlines()[-2:], (NUM_COMPUTED, 0), strict=True):
        assert json.loads(line) == [*expected, num_cached]


def test_an_answer_that_was_cut_off_is_completed(kind: str, expected: tuple[list[int], str], tmp_path: Path) -> None:
    """Aborted, forked or exported within an answer, ``ask(None)`` completes it: the same tokens, text and logits."""
    lab = make_lab(kind)
    session = first_turn(lab)
    request = session.extend(SECOND)
    while request.sequences[0].num_output_tokens < 9:
        lab.engine.step()
    fork = session.fork()
    session.export(tmp_path / "chat.json")
    request.abort()
    texts = []
    for one in (session, fork, lab.engine.import_session(tmp_path / "chat.json")):
        output = one.ask(None)
        assert list(output.outputs[0].token_ids) == expected[0]
        texts.append(output.outputs[0].text)
    assert len(set(texts)) == 1
    undisturbed = first_turn(make_lab(kind)).ask(SECOND, PARAMS)
    assert undisturbed.outputs[0].text == texts[0]
