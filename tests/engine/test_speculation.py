"""Exact speculation, end to end: with drafts and without, every answer is the same, whatever the drafts are.

The other answers come from an engine without drafts, and the drafts from who knows them, makes mistakes, ends early and
goes on behind the end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from pagedcore import Engine, SamplingParams
from pagedcore.errors import InvalidRequest
from pagedcore.outputs import RequestOutput
from pagedcore.protocols import FloatArray
from pagedcore.requests.request import Request
from support.drafts import Adversary, let_guess
from support.engine_builders import assert_all_free, run
from support.torture import first_seed, scaled

PROMPTS = ["What is 12 + 30?", "Name a colour.", "12 12 12 12", "Repeat: a b c a b c a b c"]
FORMS: list[dict[str, Any]] = [
    {"regex": "[0-9]{2,4}"}, {"choice": ["forty-two", "not known"]}, {"regex": "(ab|cd){1,9}"},
    {"json_schema": {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}},
]


def damp(output_token_ids: list[int], logits: FloatArray) -> FloatArray:
    """Let no token follow itself; raise after some completions, as a user's code may."""
    if len(output_token_ids) > 3 and sum(output_token_ids) % 23 == 0:
        raise ValueError("not this one")
    logits[output_token_ids[-1:]] = -np.inf
    return logits


def drawn_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    """Draw what a request may ask for, everything that looks at tokens before among it."""
    some = [rng.randrange(vocab_size) for _ in range(3)]
    given: dict[str, Any] = {"max_tokens": rng.choice([1, 8, 40]), "seed": rng.randrange(5)}
    for name, value in {
        "temperature": rng.choice([0.4, 1.0, 2.0]), "top_k": 20, "top_p": 0.9, "min_p": 0.02,
        "repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4,
        "min_tokens": rng.randint(0, given["max_tokens"]), "logprobs": rng.choice([0, 3]),
        "stop": rng.choice([["a"], [" "], ["1", "e"]]), "stop_token_ids": some, "logit_bias": {some[0]: 4.0},
        "no_repeat_ngram_size": 2, "bad_words_ids": [some[:1], some[1:]], "suppress_tokens": some[:1],
        "n": 2, "prompt_logprobs": 1, "return_logits": True, "ignore_eos": True,
    }.items():
        if rng.random() < (0.5 if name in ("temperature", "ignore_eos") else 0.15):
            given[name] = value
    if rng.random() < 0.2:
        given["structured"] = rng.choice(FORMS)
        given["max_tokens"] += 30
    elif rng.random() < 0.2:
        given["logits_processor"] = damp
    if given.get("return_logits"):
        given["logprobs"] = 0
    if "n" in given and rng.random() < 0.5:
        given["best_of"] = 3
    return SamplingParams(**given)


def drawn_requests(rng: random.Random, engine: Engine, count: int) -> list[tuple[str, SamplingParams]]:
    """Draw requests that an engine takes."""
    asked: list[tuple[str, SamplingParams]] = []
    while len(asked) < count:
        try:
            one = rng.choice(PROMPTS), drawn_params(rng, engine.input_processor.vocab_size)
            engine.prepare(*one)
        except InvalidRequest:
            continue
        asked.append(one)
    return asked


def told(output: RequestOutput) -> list[Any]:
    """What of a request has to be equal."""
    return [
        (one.token_ids, one.text, one.logprobs, one.finish_reason, one.stop_reason, one.score, type(one.error),
         [entry.logits.tobytes() for entry in one.logprobs or () if entry.logits is not None])
        for one in output.outputs
    ] + [output.prompt_logprobs]


class Known:
    """The whole answers of an engine without drafts."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def learn(self, request: Request) -> None:
        """Take the tokens of its completions."""
        self.texts += [list(one.token_ids) for one in request.sequences]

    def __call__(self, token_ids: Sequence[int], most: int) -> list[int]:
        """Return how one of the texts that begin so goes on."""
        size = len(token_ids)
        found = [text for text in self.texts if len(text) > size and text[:size] == list(token_ids)]
        return found[0][size : size + most] if found else []


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Engine, Engine]]:
    """Two engines of the demo model; the second one, in whose small pool requests preempt each other, has drafts."""
    small = {"num_kv_blocks": 11, "block_size": 8, "max_num_seqs": 8, "host_kv_memory": "256KiB", "preemption": "swap"}
    with Engine.from_pretrained("demo") as plain, Engine.from_pretrained(
        "demo", max_num_batched_tokens=24, check_invariants=True, speculation="auto", **small
    ) as drafting:
        yield plain, drafting


def test_answers_are_the_same_bytes_with_drafts_and_without(engines: tuple[Engine, Engine]) -> None:
    """Everything that a request may ask for, in a small pool, with requests that come late and others that leave."""
    plain, drafting = engines
    known, vocab_size = Known(), plain.input_processor.vocab_size
    rng = random.Random(f"speculation {first_seed()}")
    asked, expected = drawn_requests(rng, drafting, scaled(40)), []
    for one in asked:
        request = plain.add_request(*one)
        run(plain)
        known.learn(request)
        expected.append(plain.output_of(request))
        request.remove()
    source = Adversary(known, vocab_size)
    let_guess(drafting, source, vocab_size)
    live: list[Request] = []
    for one in asked:
        while not drafting.can_accept(3):
            drafting.step()
        live.append(drafting.add_request(*one))
        for _ in range(rng.choice([0, 0, 3])):
            drafting.step()
        if rng.random() < 0.1:
            drafting.abort_request(live[-1].request_id)
    run(drafting)
    stats = drafting.stats()
    assert stats.num_accepted_tokens > scaled(40)
    assert stats.num_accepted_tokens < stats.num_drafted_tokens
    assert stats.num_preemptions > 0
    for want, request in zip(expected, live, strict=True):
        got = drafting.output_of(request)
        if any(one.finish_reason == "abort" for one in got.outputs):
            continue
        assert told(got) == told(want), request
        request.remove()
    assert_all_free(drafting)
    assert not source.live
