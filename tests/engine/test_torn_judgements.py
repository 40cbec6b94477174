"""Ctrl-C and other threads' exceptions at any line of a call that answers at its end: nothing of it stays."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedcore.analysis.diagnosis.invariants import check, snapshot
from pagedcore.engine.engine import Engine
from pagedcore.text_head import PairDefaults, TextHead
from support.doubles import VOCAB_SIZE, ToyBackend
from support.engine_builders import make_engine
from support.interrupts import Lost, interrupted_at, lose
from support.step_scenario import LetterTokenizer, params

QUERY, DOCUMENTS = "what", ["the lazy dog", "a", "quick brown foxes"]


class Judge(ToyBackend):
    """Has a head over its states."""

    pair_defaults = PairDefaults()

    def __init__(self, labels: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.text_head = TextHead(weight=np.random.default_rng(5).normal(size=(max(1, len(labels)), VOCAB_SIZE)),
                                  labels=labels)


class PairTokenizer(LetterTokenizer):
    """Reads what it writes, one token a letter, and joins two texts."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenise a text."""
        return [ord(letter) % 26 for letter in text]

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Tokenise two texts."""
        return [*self.encode(first), 26, *self.encode(second)]

    def encode_chat(self, messages: Any) -> list[int]:
        """There are no chats."""
        raise AssertionError

    def encode_chat_turn(self, messages: Any, known_token_ids: Any) -> list[int]:
        """There are no chats."""
        raise AssertionError


GREEDY = params(3, stop=["zz"])
CALLS: dict[str, tuple[tuple[str, ...], Callable[[Engine], list[Any]]]] = {
    "classify": (("joy", "anger"), lambda engine: [one.logits for one in engine.classify(
        DOCUMENTS, show_progress=False, request_id="label")]),
    "rerank": ((), lambda engine: [(one.index, one.logit) for one in engine.rerank(
        QUERY, DOCUMENTS, top_n=2, show_progress=False, request_id="label")]),
    "score pairs": (("relevant",), lambda engine: [one.logit for one in engine.score_pairs(
        [(QUERY, one) for one in DOCUMENTS], show_progress=False)]),
    "embed": ((), lambda engine: [one.vector.tobytes() for one in engine.embed(
        DOCUMENTS, show_progress=False, request_id="label")]),
    "score": ((), lambda engine: [one.logprobs for one in engine.score(QUERY, DOCUMENTS, show_progress=False)]),
    "generate": ((), lambda engine: [one.outputs[0].text for one in engine.generate(
        DOCUMENTS, GREEDY, show_progress=False, request_id="label")]),
}
"""The classes of the model that answers, and a call with what it returns."""


def engine_of(labels: tuple[str, ...]) -> Engine:
    return make_engine(Judge(labels), tokenizer=PairTokenizer(), check_invariants=False)


def broken_off(name: str, act: Callable[[], None], raised: type[BaseException], num_lines: int, seed: int) -> None:
    """Break a call off at so many lines, beside a request of another caller; then it is made again."""
    labels, call = CALLS[name]
    engine = engine_of(labels)
    wanted = call(engine)
    with interrupted_at(0, lambda: None) as count:
        call(engine)
    rng, last, num_broken = random.Random(seed), count[0], 0
    # Why its end too: there a call lets go of what it has asked for.
    for line in rng.sample(range(1, last + 1), num_lines) + rng.sample(range(last - 150, last + 1), num_lines // 3):
        neighbour = engine.add_request([1, 2, 3])
        try:
            with interrupted_at(line, act) as count:
                call(engine)
            # Why not an error: a few of the last lines depend on how long steps took.
            assert count[0] < line
        except raised:
            num_broken += 1
        assert check(snapshot(engine.scheduler)) == [], f"line {line}"
        engine.step()
        assert [*engine.requests] == [neighbour], f"line {line}"
        neighbour.abort()
        neighbour.remove()
        engine.step()
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0), f"line {line}"
        assert call(engine) == wanted, f"line {line}"
    assert num_broken >= num_lines
    engine.close()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_may_break_off_at_any_line(name: str) -> None:
    """By Ctrl-C under Python's own handler too: it reaches the caller, requests of others and all laws stay, nothing
    runs on, and the same call, under the same label, has the same answer."""
    broken_off(name, lose, Lost, 9, seed=1)
    broken_off(name, lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt, 9, seed=2)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_call_may_break_off_at_many_lines(name: str) -> None:
    """As above."""
    broken_off(name, lose, Lost, 400, seed=1)
    broken_off(name, lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt, 400, seed=2)
