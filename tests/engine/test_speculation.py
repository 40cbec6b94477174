"""Exact speculation, end to end: with drafts and without, every answer is the same, whatever the drafts are.

The other answers come from an engine without drafts, and the drafts from who knows them, makes mistakes, ends early and
goes on behind the end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from pagedcore import Engine, SamplingParams
from pagedcore.drafting.offers import Chances
from pagedcore.errors import InvalidConfig, InvalidDrafts, InvalidLogits, InvalidRequest
from pagedcore.outputs import RequestOutput
from pagedcore.protocols import FloatArray, RaggedRows
from pagedcore.requests.request import Request
from pagedcore.scheduler.step_time import StepTimeModel
from scheduler_lives.faults import Faults, SimTokenizer, letters
from support.doubles import VOCAB_SIZE, ToyBackend, toy_answer
from support.drafts import Adversary, FirstCosts, let_guess
from support.engine_builders import assert_all_free, make_engine, run
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
        "min_tokens": rng.randint(0, given["max_tokens"]),
        "stop": rng.choice([["a"], [" "], ["1", "e"]]), "stop_token_ids": some, "logit_bias": {some[0]: 4.0},
        "no_repeat_ngram_size": 2, "bad_words_ids": [some[:1], some[1:]], "suppress_tokens": some[:1],
        "n": 2, "prompt_logprobs": 1, "return_logits": True, "ignore_eos": True,
    }.items():
        if rng.random() < (0.5 if name in ("temperature", "ignore_eos") else 0.15):
            given[name] = value
    if rng.random() < 0.5:
        given["logprobs"] = rng.choice([0, 3])
    if rng.random() < 0.2:
        given["structured"] = rng.choice(FORMS)
        given["max_tokens"] += 30
    elif rng.random() < 0.2:
        given["logits_processor"] = damp
    if given.get("return_logits"):
        given["logprobs"] = 0
    if "logprobs" in given:
        given["logprobs_mode"] = rng.choice(["raw", "processed"])
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


def forced_of(engine: Engine) -> Any:
    """What its grammars leave no choice about."""
    grammars: Any = engine.input_processor.grammars
    return grammars.forced


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
    asked, expected = drawn_requests(rng, drafting, scaled(30)), []
    for one in asked:
        request = plain.add_request(*one)
        run(plain)
        known.learn(request)
        expected.append(plain.output_of(request))
        request.remove()
    source = Adversary(known, vocab_size)
    let_guess(drafting, source, vocab_size, forced=forced_of(drafting))
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
    assert stats.num_accepted_tokens > scaled(30)
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


class Script:
    """A source that proposes what a function says, of sequences that have begun."""

    def __init__(self, propose: Any) -> None:
        self._propose = propose
        self.num_begun = 0

    def begin(self, sequence_id: int, root: bytes, token_ids: Sequence[int]) -> None:
        """Count it."""
        self.num_begun += 1

    def chances(self, sequence_id: int, token_ids: Sequence[int]) -> Chances:
        """Promise everything."""
        return Chances(1.0, 1.0)

    def observe(self, sequence_id: int, num_tokens: int, num_offered: int, num_kept: int) -> None:
        """Learn nothing."""

    def forget(self, sequence_id: int, token_ids: Sequence[int], keep: bool) -> None:
        """Keep nothing."""

    def propose(self, sequence_id: int, token_ids: Sequence[int], most: int) -> Any:
        """Propose what the function says."""
        return self._propose(list(token_ids), most)


def right(token_ids: list[int], most: int) -> tuple[int, ...]:
    """What the toy will say."""
    return tuple(toy_answer(token_ids, most))


def wrong(token_ids: list[int], most: int) -> tuple[int, ...]:
    """Begin with two right tokens, and go on with others."""
    tokens = toy_answer(token_ids, most)
    return tuple(tokens[:2] + [(one + 1) % VOCAB_SIZE for one in tokens[2:]])


PROMPT = [3, 5, 7, 9, 11]


def guessing(source: Any, backend: Any = None, **settings: Any) -> Engine:
    """Make an engine over a toy that has drafts of a source."""
    settings = {"num_kv_blocks": 32, "max_num_batched_tokens": 32, "speculation": "auto", **settings}
    engine = make_engine(backend, **settings)
    let_guess(engine, source if hasattr(source, "begin") else Script(source), VOCAB_SIZE)
    return engine


def test_right_drafts_save_steps_and_wrong_ones_save_fewer() -> None:
    """With six right drafts a step has seven tokens, with two right ones three; the answer is the same."""
    for source, num_steps in ((right, 1 + 4), (wrong, 1 + 9)):
        engine = guessing(source)
        request = engine.add_request(PROMPT, SamplingParams(max_tokens=28, ignore_eos=True))
        assert run(engine) == num_steps
        assert list(engine.output_of(request).outputs[0].token_ids) == toy_answer(PROMPT, 28)
        assert engine.output_of(request).outputs[0].itl_s.count(0.0) < 28
        assert engine.stats().num_accepted_tokens == 28 - num_steps
        assert_all_free(engine)


@pytest.mark.parametrize("proposed", [
    [1, 2], (1, VOCAB_SIZE), (-1,), (1,) * 7, (True,), (np.int64(1),), None, ZeroDivisionError("mine"),
], ids=str)
def test_a_source_that_is_not_to_be_trusted_ends_speculation_and_nothing_else(proposed: Any) -> None:
    """What is no tuple of tokens, or too many, never reaches the model; the statistics say why there are no drafts."""
    def propose(token_ids: list[int], most: int) -> Any:
        if isinstance(proposed, Exception):
            raise proposed
        return proposed

    engine = guessing(propose)
    outputs = engine.generate([PROMPT], SamplingParams(max_tokens=9, ignore_eos=True))
    assert list(outputs[0].outputs[0].token_ids) == toy_answer(PROMPT, 9)
    stats = engine.stats()
    assert (stats.num_drafted_tokens, stats.speculation[:4]) == (0, "off:")
    speculation = engine.scheduler.speculation
    assert speculation is not None
    assert isinstance(speculation.failure, InvalidDrafts)


@pytest.mark.parametrize("more", [
    {"stop_token_ids": [4]}, {"stop": [letters(toy_answer([3, 5, 7, 9, 11], 7)[6:])]},
    {"temperature": 1.0, "min_tokens": 3, "repetition_penalty": 1.2},
])
def test_a_processor_sees_no_beginning_that_is_none(more: dict[str, Any]) -> None:
    """With drafts, most of them wrong, it is called with the same tokens and the same rows as without."""
    seen: list[tuple[list[int], bytes]] = []

    def note(output_token_ids: list[int], logits: FloatArray) -> FloatArray:
        seen.append((list(output_token_ids), logits.tobytes()))
        return damp(output_token_ids, logits) if "stop" not in more else logits

    params = SamplingParams(max_tokens=16, logits_processor=note, seed=3, ignore_eos=True, **more)
    calls = []
    for source in (None, wrong, Adversary(toy_answer, VOCAB_SIZE)):
        make = make_engine if source is None else partial(guessing, source)
        engine = make(tokenizer=Letters())
        seen.clear()
        output = engine.generate([PROMPT], params)[0].outputs[0]
        calls.append((output.token_ids, output.finish_reason, list(seen)))
        assert source is None or engine.stats().num_drafted_tokens > 0 or "stop" in more
    assert calls[0] == calls[1] == calls[2]


class Letters(SimTokenizer):
    """A tokenizer of numbers whose texts are letters."""

    def __init__(self) -> None:
        super().__init__(Faults(random.Random(0), is_on=False))


class Brittle(ToyBackend):
    """A toy whose logits are broken behind every beginning but the right one, and at one place behind that too."""

    def __init__(self, num_right: int) -> None:
        super().__init__()
        self._right, self._num_right = PROMPT + toy_answer(PROMPT, 40), num_right

    def logits_after(self, token_ids: Any) -> FloatArray:
        """Break the row where it does not belong."""
        logits = super().logits_after(token_ids)
        known = token_ids.tolist()
        if known != self._right[: len(known)] or len(known) == len(PROMPT) + self._num_right:
            logits[3] = np.nan
        return logits


@pytest.mark.parametrize("temperature", [0.0, 1e-4])
def test_a_broken_row_counts_where_it_is_reached_and_nowhere_else(temperature: float) -> None:
    """Rows behind wrong drafts may be NaN; one behind right drafts ends the request with the tokens before it."""
    params = SamplingParams(max_tokens=20, temperature=temperature, ignore_eos=True)
    for source in (wrong, right, Adversary(toy_answer, VOCAB_SIZE)):
        for num_right in (9, 100):
            output = guessing(source, Brittle(num_right)).generate([PROMPT], params)[0].outputs[0]
            whole = num_right > 20
            assert list(output.token_ids) == toy_answer(PROMPT, 20 if whole else num_right)
            assert (output.finish_reason, type(output.error)) == (
                ("length", type(None)) if whole else ("error", InvalidLogits))


class Single(ToyBackend):
    """A toy that can return one row of logits for each sequence only, and has little memory."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def forward(self, batch: RaggedRows) -> FloatArray:
        """Fail where there are more rows."""
        if len(batch.logits_rows) > len(batch.seq_ids):
            raise self._error
        return super().forward(batch)


@pytest.mark.parametrize(("error", "says"), [(ValueError("one row each"), "off:"), (MemoryError(), "on")])
def test_a_model_that_fails_on_drafts_computes_the_step_without(error: Exception, says: str) -> None:
    """No request ends that would not have ended without drafts; a failure that is about them ends these."""
    engine = guessing(right, Single(error))
    outputs = engine.generate([PROMPT, PROMPT[1:]], SamplingParams(max_tokens=9, ignore_eos=True))
    for prompt, output in zip((PROMPT, PROMPT[1:]), outputs, strict=True):
        assert list(output.outputs[0].token_ids) == toy_answer(prompt, 9)
    assert engine.stats().speculation[:4] == says
    assert engine.stats().num_accepted_tokens == 0
    assert_all_free(engine)


def test_a_sequence_that_becomes_long_has_no_draft_behind_the_border() -> None:
    """Where a model turns long sequences by other angles, what is behind the border is computed anew, all of it."""
    backend = ToyBackend()
    backend.num_short_tokens = 16
    engine = guessing(right, backend)
    request = engine.add_request(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True))
    run(engine)
    assert list(engine.output_of(request).outputs[0].token_ids) == toy_answer(PROMPT, 30)
    assert engine.stats().num_accepted_tokens > 15


def test_drafts_have_what_is_left_and_nothing_is_taken_for_them() -> None:
    """Tokens of the step, logits, and blocks that hold nothing, or one cached block that the row would take for its
    next tokens: with none left there is none, and nothing is preempted for one.
    """
    for settings in ({"max_num_batched_tokens": 4}, {"num_kv_blocks": 8, "max_num_seqs": 4}):
        engine = guessing(Adversary(toy_answer, VOCAB_SIZE), **settings)
        engine.generate([[20, 21]], SamplingParams(max_tokens=24, ignore_eos=True))
        for start in range(4):
            engine.add_request([start, 1, 2], SamplingParams(max_tokens=6, ignore_eos=True))
        while engine.has_pending_requests():
            engine.scheduler.begin_step(0.0)
            plan, bare = engine.scheduler.schedule(), engine.scheduler.schedule(32)
            if len(plan.rows) == 4 == settings.get("max_num_batched_tokens"):
                assert not plan.num_drafts
            assert [(one.sequence, one.start, one.known_end) for one in plan.rows] == [
                (one.sequence, one.start, one.end) for one in bare.rows]
            assert (plan.admitted, plan.preempted, plan.freed) == (bare.admitted, bare.preempted, bare.freed)
            num_unused = engine.scheduler.kv_cache.device.num_unused_blocks
            num_evicted = sum(row.num_new_blocks for row in plan.rows) - num_unused
            num_grown = sum(row.num_new_blocks > other.num_new_blocks
                            for row, other in zip(plan.rows, bare.rows, strict=True))
            assert num_evicted <= sum(row.num_new_blocks for row in bare.rows) + num_grown
            engine.step()
        assert_all_free(engine)


def test_drafts_go_on_where_every_block_of_the_pool_is_cached() -> None:
    """A pool that earlier requests have filled gives a row one block ahead, and evicts no more for drafts."""
    engine = guessing(right, num_kv_blocks=32, block_size=2)
    for start in range(40):
        engine.generate([[start % VOCAB_SIZE] * 9], SamplingParams(max_tokens=1))
    assert engine.scheduler.kv_cache.device.num_unused_blocks == 0
    request = engine.add_request(PROMPT, SamplingParams(max_tokens=28, ignore_eos=True))
    engine.step()
    num_steps = 0
    while engine.has_pending_requests():
        assert engine.scheduler.schedule().rows[0].num_new_blocks <= 2
        engine.step()
        num_steps += 1
    assert list(engine.output_of(request).outputs[0].token_ids) == toy_answer(PROMPT, 28)
    assert num_steps <= 14
    assert_all_free(engine)


def test_the_logits_of_drafts_are_bounded() -> None:
    """They count for the same bound as those of scored prompts."""
    engine = guessing(right)
    engine.scheduler.rules = replace(engine.scheduler.rules, max_scored_tokens=3)
    engine.add_request(PROMPT, SamplingParams(max_tokens=28, ignore_eos=True))
    engine.add_request(PROMPT[1:], SamplingParams(max_tokens=28, ignore_eos=True))
    engine.step()
    while engine.has_pending_requests():
        assert engine.scheduler.schedule().num_drafts <= 3
        engine.step()
    assert engine.stats().num_accepted_tokens > 20


def test_who_asks_for_none_has_none() -> None:
    """A request may say so, an engine may, and a model whose positions cannot be taken back says so for it."""
    source = Script(right)
    engine = guessing(source)
    request = engine.add_request(PROMPT, SamplingParams(max_tokens=9, ignore_eos=True), speculate=False)
    run(engine)
    assert len(engine.output_of(request).outputs[0].token_ids) == 9
    assert (source.num_begun, engine.stats().num_drafted_tokens) == (0, 0)
    engine.generate([PROMPT], SamplingParams(max_tokens=9, beam_width=2))
    assert (source.num_begun, engine.stats().num_drafted_tokens) == (0, 0)

    class Forward(ToyBackend):
        takes_positions_back = False

    class Varying(ToyBackend):
        is_schedule_invariant = False

    assert make_engine().scheduler.speculation is None
    for backend, reason in ((Forward, "cannot take computed positions back"), (Varying, "depend on the schedule")):
        auto = make_engine(backend(), speculation="auto")
        assert auto.scheduler.speculation is None
        assert reason in auto.stats().speculation
        with pytest.raises(InvalidConfig, match=reason):
            make_engine(backend(), speculation={"sources": ["text"]})


def test_the_built_in_sources_are_right_where_a_text_repeats_itself() -> None:
    """A bias that makes the toy repeat its prompt gives drafts of it; so does a completion that came before."""

    def repeat(output_token_ids: list[int], logits: FloatArray) -> FloatArray:
        logits[PROMPT[len(output_token_ids) % len(PROMPT)]] = 100.0
        return logits

    params = SamplingParams(max_tokens=40, logits_processor=repeat, ignore_eos=True)
    engine = make_engine(speculation="auto", num_kv_blocks=64, max_num_batched_tokens=32)
    speculation = engine.scheduler.speculation
    assert speculation is not None
    # Why: one step that stands still on a busy machine would say that drafts cost more than they save.
    speculation.costs = FirstCosts(StepTimeModel())
    output = engine.generate([PROMPT * 2], params)[0].outputs[0]
    assert list(output.token_ids) == PROMPT * 8
    assert engine.stats().num_accepted_tokens >= 20


def test_what_a_grammar_forces_is_computed_in_one_step(engines: tuple[Engine, Engine]) -> None:
    """A form with few choices takes fewer steps than it has tokens, and is the same text."""
    plain, drafting = engines
    form = {"regex": "(yes|no), and that is all [0-9]"}
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=4, structured=form)
    wanted = plain.generate([PROMPTS[0]], params)[0].outputs[0]
    let_guess(drafting, Script(lambda token_ids, most: ()), plain.input_processor.vocab_size, 16,
              forced_of(drafting))
    num_steps = drafting.stats().num_steps
    output = drafting.generate([PROMPTS[0]], params)[0].outputs[0]
    assert output == replace(wanted, itl_s=output.itl_s)
    assert drafting.stats().num_steps - num_steps <= len(output.token_ids) - 6


def test_a_model_that_chooses_the_likeliest_tokens_itself_does_so_for_drafts(engines: tuple[Engine, Engine]) -> None:
    """Where no logits are written, tokens that may not come yet are barred at the place of each draft."""
    plain, drafting = engines
    known, vocab_size = Known(), plain.input_processor.vocab_size
    asked = [SamplingParams(max_tokens=20, min_tokens=count, suppress_tokens=[40, 41]) for count in (0, 7, 15)]
    wanted = []
    for params in asked:
        request = plain.add_request(PROMPTS[0], params)
        run(plain)
        known.learn(request)
        wanted.append(plain.output_of(request).outputs[0])
    let_guess(drafting, Adversary(known, vocab_size), vocab_size)
    before = drafting.stats().num_accepted_tokens
    for params, want in zip(asked, wanted, strict=True):
        got = drafting.generate([PROMPTS[0]], params)[0].outputs[0]
        assert (got.token_ids, got.text, got.finish_reason) == (want.token_ids, want.text, want.finish_reason)
    assert drafting.stats().num_accepted_tokens > before + 5
    runner = drafting.components.runner
    assert runner._greedy is not None
    assert runner._greedy.decodes_greedily
