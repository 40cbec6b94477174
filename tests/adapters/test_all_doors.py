"""Door fuzzing through every adapter: one refused field has one class of error at all doors, and leaves nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from random import Random
from typing import Any

import pytest

from adapters.doors import (
    ASYNC_ENGINE,
    CANARY,
    GENERATOR,
    HTTP,
    LANGCHAIN,
    MAX_MODEL_LEN,
    Ask,
    EndlessBackend,
    LetterTokenizer,
    Question,
    by_chain,
    by_chat,
    by_complete,
    by_generate,
    by_http_batch,
    by_submit,
    house,
    is_json,
    outcome_of,
)
from pagedcore import SamplingParams
from pagedcore.config import limits
from pagedcore.errors import InvalidRequest, InvalidSampling, PagedcoreError, TextFailed
from pagedcore.requests.validation import validate_timeout
from support.doubles import VOCAB_SIZE, toy_answer
from support.engine_builders import make_engine, run
from support.torture import first_seed, scaled

BASE = {"max_tokens": 2}
FIELDS = sorted(one.name for one in fields(SamplingParams))
EDGES = sorted({0, 1, 2, 8, 10, 16, 20, 64, 100, 300, VOCAB_SIZE, MAX_MODEL_LEN, MAX_MODEL_LEN - 2, limits.MAX_COUNT,
                limits.MAX_SEED, 2**32, 2**64, limits.MAX_PRIORITY, int(limits.MAX_TIMEOUT_S)})


def nested(depth: int, holder: Any = list) -> Any:
    inner: Any = 1
    for _ in range(depth):
        inner = [inner] if holder is list else {"a": inner}
    return inner


WRONG: list[Any] = [
    None, True, False, 1.5, -0.0, 5e-324, 1e308, math.nan, math.inf, -math.inf, 10**30, -(10**30), 10**400, -(10**400),
    "", "1", CANARY, "a" * 65, "\ud800", CANARY + "\udfff", b"", b"bytes", [], [[]], ["a"] * 9, [1, "a"], [None], [1.5],
    {}, {"a": 1}, {"1": 1}, {"1": math.nan}, {"99": 1}, {"5": 101}, {"-1": 0}, {1: 2}, {str(n): 0 for n in range(301)},
    nested(60), nested(70), nested(3000), nested(60, dict), (), (1,), {1, 2}, 1j, object(), SamplingParams, len,
    "a" * 10**5, list(range(300)), ["\ud800"], [CANARY], {CANARY: CANARY},
]
CHATS: list[list[Any]] = [
    *[[{"role": "user", "content": text}] for text in ("ab", "!", 1, "a" * 90, "a" * 1025, "\ud800", ["a"], None)],
    [{"role": CANARY, "content": "a"}], [{"role": None, "content": "a"}], [{"role": "user"}], [{"content": "a"}], [{}],
    [{"role": "user", "content": "a"}, 1], [{"role": "user", "content": ""}] * 1025,
]
PROMPTS: list[Any] = [
    [1], [0], [VOCAB_SIZE - 1], [VOCAB_SIZE], [-1], [2**31], [2**63], [2**64], [10**400], [True], [1.0], [1, CANARY],
    [1, None], [math.nan], [1] * (MAX_MODEL_LEN - 2), [1] * (MAX_MODEL_LEN - 1), [1] * MAX_MODEL_LEN, [1] * 16_400, "a",
    "a" * 62, "a" * 63, "a" * 64, "a" * (16 * MAX_MODEL_LEN), "a" * (16 * MAX_MODEL_LEN + 1), "\u00e9" * 512, "no!",
    "!" * 3000, {"role": "user", "content": "a"}, *CHATS,
]
NAMES = ["temprature", "", "__class__", "self", "max_tokens ", "Max_Tokens", CANARY, "\ud800", "a" * 10_000]


def questions(seed: int, count: int) -> Iterator[Question]:
    """Valid questions of which one field is set to anything."""
    random = Random(f"doors {seed}")
    for _ in range(count):
        edge = random.choice(EDGES) + random.choice([-1, 0, 1])
        value = random.choice([*WRONG, *[random.choice([1, 1, -1]) * edge] * 12, float(edge), random.random() * 4])
        match random.choice(["sampling", "sampling", "sampling", "prompt", "prompt", "option", "name", "mapping"]):
            case "sampling":
                # Why a seed: without one a draw depends on the requests before it.
                yield Question([1, 2], {**BASE, "seed": 5, random.choice(FIELDS): value})
            case "prompt":
                yield Question(random.choice([value, *[random.choice(PROMPTS)] * 4]), BASE)
            case "option":
                name = random.choice(["priority", "cache_salt", "request_id", "timeout_s"])
                length = random.choice([0, 1, 63, 64, 65, 127, 128, 129])
                text = random.choice(["a", "\n", "\u00e9", "\ud800", "\u202e"]) * length
                yield Question([1, 2], BASE, {name: random.choice([value, text, edge])})
            case "name":
                yield Question([1, 2], {**BASE, random.choice(NAMES): random.choice([1, value])})
            case "mapping":
                yield Question([1, 2], value)


class Reference:
    """What the engine itself says, without any door: tokens, or the class of the refusal."""

    def __init__(self) -> None:
        self._engine = make_engine(EndlessBackend(), tokenizer=LetterTokenizer(), max_model_len=MAX_MODEL_LEN,
                                   num_kv_blocks=300)

    def outcome(self, question: Question, *, has_timeout: bool) -> list[int] | str:
        """Ask; a time limit is checked, and no other is given."""
        options = dict(question.options)
        timeout_s = options.pop("timeout_s", None)
        try:
            params = question.params
            if has_timeout:
                validate_timeout(timeout_s)
            request = self._engine.add_request(question.prompt, params, **options)
        except PagedcoreError as error:
            return type(error).__name__
        run(self._engine)
        tokens = [token for one in request.output().outputs for token in one.token_ids]
        request.remove()
        return tokens


def can_say(ask: Ask, question: Question) -> bool:
    """Whether a caller of this door can write the question so that the door sees the same values."""
    if ask in HTTP:
        whole = [question.prompt, question.sampling, dict(question.options)]
        # Why: null is no parameters at all, and a batch has a list of labels and of parameters.
        lists = [question.sampling, question.options.get("request_id")] if ask is by_http_batch else []
        return depth_of(whole) < 60 and is_json(whole) and question.sampling is not None and not any(
            isinstance(one, list) for one in lists)
    if ask in LANGCHAIN and isinstance(question.sampling, dict) and callable(question.sampling.get("logits_processor")):
        # Why: it is in the engine's process, so that it may give code, which no mapping has.
        return False
    if ask in LANGCHAIN:
        sampling = question.sampling
        # Why: there are texts only, ``None`` is nothing said, streams have one completion, ``logprobs=True`` means 0.
        # And LangChain writes keywords out itself, which recurses.
        return isinstance(question.prompt, str) and isinstance(sampling, dict) and depth_of(sampling) < 100 and all(
            type(name) is str and name not in ("logprobs", "n", "best_of", "self", "stop") for name in sampling
        ) and None not in [*sampling.values(), *question.options.values()]
    return True


def depth_of(value: Any) -> int:
    depth, level = 0, [value]
    while level := [child for one in level if isinstance(one, list | dict)
                    for child in (one.values() if isinstance(one, dict) else one[:400])]:
        depth += 1
    return depth


def is_brief(question: Question) -> bool:
    """Whether a time limit, if it is valid, is too short to be kept for certain."""
    timeout_s = question.options.get("timeout_s")
    return type(timeout_s) in (int, float) and 0 < timeout_s < 1


@pytest.mark.torture
@pytest.mark.parametrize(("doors", "num_cases"),
                         [(ASYNC_ENGINE, 300), (GENERATOR, 300), (LANGCHAIN, 450), (HTTP, 250)],
                         ids=["AsyncEngine", "async generator", "LangChain", "BentoML"])
async def test_what_is_refused_is_refused_alike_at_every_door(doors: tuple[Ask, ...], num_cases: int) -> None:
    """Any field with any value: the tokens or the class of error that the engine itself gives, at every door of an
    adapter; what was refused has changed no counter, holds nothing, and the next request is completed.
    """
    num_asked, expected, reference = 0, toy_answer([1, 2], 2), Reference()
    async with house() as opened:
        await asyncio.sleep(0)
        tasks, before = len(asyncio.all_tasks()), opened.figures()
        for number, question in enumerate(questions(first_seed(), scaled(num_cases))):
            ask = doors[number % len(doors)]
            if ask in LANGCHAIN and not isinstance(question.prompt, str) and question.prompt == [1, 2]:
                question = Question("ab", question.sampling, question.options)
            if not can_say(ask, question) or is_brief(question):
                continue
            told = Question([{"role": "user", "content": question.prompt}], question.sampling, question.options) if (
                ask is by_chat) else question
            wanted = reference.outcome(told, has_timeout=ask not in (by_submit, by_complete))
            outcome = await outcome_of(ask(opened, question))
            assert outcome == wanted, (first_seed(), number, ask.__name__, repr(question)[:300])
            num_asked += 1
            if isinstance(outcome, str):
                assert opened.figures() == before, (first_seed(), number, ask.__name__, repr(question)[:300])
            if num_asked % 50 == 0:
                assert await by_submit(opened, Question([1, 2], BASE)) == expected
                assert opened.is_idle()
            before = opened.figures() if num_asked % 50 == 0 or not isinstance(outcome, str) else before
        assert len(asyncio.all_tasks()) == tasks
        assert num_asked >= scaled(num_cases) // 5


class Forged(SamplingParams):
    """Says other things than were checked."""

    @property
    def num_sequences(self) -> int:
        raise ZeroDivisionError(CANARY)


OTHER_TYPES: list[Any] = [{}, {"max_tokens": 3}, "", CANARY, 0, 5, True, (), [SamplingParams()], object(),
                          SamplingParams, Forged()]


@pytest.mark.parametrize("params", OTHER_TYPES)
async def test_parameters_of_another_type_are_refused_at_every_door(params: Any) -> None:
    """Whatever is given for SamplingParams, empty values and subclasses among them: InvalidSampling, nothing taken."""
    with make_engine() as engine:
        request = engine.add_request([1], SamplingParams(max_tokens=1))
        run(engine)
        session = engine.session()
        calls = [lambda: engine.add_request([1], params), lambda: engine.prepare([1], params),
                 lambda: request.extend([1], params), lambda: engine.session(params), lambda: session.ask([1], params),
                 lambda: next(session.stream([1], params)), lambda: engine.generate([[1], [2]], [None, params])]
        for call in calls:
            require_refused_params(call)
        assert not engine.has_pending_requests()
        assert request.output().outputs[0].token_ids == tuple(toy_answer([1], 1))
    async with house() as opened:
        before = opened.figures()
        for call in (lambda: opened.engine.submit([1], params), lambda: next(opened.engine.generate_sync([1], params)),
                     lambda: next(iter(opened.generator.sync([1], params)))):
            require_refused_params(call)
        async with opened.engine.session() as talk:
            for coroutine in (anext(opened.engine.generate([1], params)), anext(opened.generator([1], params)),
                              opened.generator.complete([1], params), opened.engine.session(params).open(),
                              talk.ask([1], params)):
                with pytest.raises(InvalidSampling, match="params"):
                    await coroutine
        assert (opened.figures(), opened.is_idle()) == (before, True)


def require_refused_params(call: Callable[[], object]) -> None:
    with pytest.raises(InvalidSampling, match="params") as refused:
        call()
    assert (refused.value.what, CANARY in str(refused.value)) == ("params", False)


@pytest.mark.parametrize(("prompts", "params", "what"), [
    *[(prompts, None, "prompts") for prompts in ("text", b"ab", 5, None, {"a": 1}, object())],
    ([[1], [2]], [None], "params"), ([[1]], "greedy", "params"), ([[1]], {"max_tokens": 1}, "params"),
    ([[1]], [{"max_tokens": 1}], "params"), ([[1]], 5, "params"), ([[1], None], None, "prompt"),
    ([1, 2], None, "prompt"), ([[[1]]], None, "prompt"), (iter([[1], None]), None, "prompt"),
])
def test_a_batch_of_another_type_is_refused_as_a_whole(prompts: Any, params: Any, what: str) -> None:
    """No prompts, parameters of another type or number: InvalidRequest, and no prompt was started."""
    with make_engine() as engine:
        with pytest.raises(InvalidRequest) as refused:
            engine.generate(prompts, params)
        assert (refused.value.what, len(list(engine.requests)), engine.stats().num_steps) == (what, 0, 0)
        outputs = engine.generate(([1], [2]), SamplingParams(max_tokens=2))
        assert [list(one.outputs[0].token_ids) for one in outputs] == [toy_answer([1], 2), toy_answer([2], 2)]


FAILING: list[Any] = ["no!", "!" * 3000, [{"role": "user", "content": "!"}], [{"role": CANARY, "content": "a"}]]


@pytest.mark.parametrize("prompt", FAILING)
async def test_a_tokenizer_that_raises_fails_its_request_alone(prompt: Any, caplog: pytest.LogCaptureFixture) -> None:
    """TextFailed with the tokenizer's error as its cause, whatever the length; over HTTP a 500 of that type without
    the error's words or a traceback; a stream beside it gets its tokens.
    """
    async with house(max_model_len=512) as opened:
        neighbour = asyncio.create_task(by_generate(opened, Question([3, 4], {"max_tokens": 40})))
        question = Question(prompt, BASE)
        for ask in (*ASYNC_ENGINE, *GENERATOR, *HTTP):
            assert await outcome_of(ask(opened, question)) == "TextFailed", ask.__name__
        with pytest.raises(TextFailed) as failed:
            await by_submit(opened, question)
        assert isinstance(failed.value.__cause__, ZeroDivisionError | KeyError)
        async with opened.engine.session() as talk:
            with pytest.raises(TextFailed):
                await talk.ask(prompt)
            assert await talk.ask([1], question.params)
        assert await neighbour == toy_answer([3, 4], 40)
        assert await by_submit(opened, Question([1, 2], BASE)) == toy_answer([1, 2], 2)
        assert opened.is_idle()
    assert [record for record in caplog.records if record.exc_info] == []


def test_a_name_that_the_tokenizer_cannot_give_is_typed() -> None:
    """``token_text`` of a tokenizer whose ``decode`` raises is a TextFailed too."""
    tokenizer = LetterTokenizer()
    tokenizer.decode = lambda token_ids: [][1]  # type: ignore[method-assign]
    with make_engine(tokenizer=tokenizer) as engine, pytest.raises(TextFailed) as failed:
        engine.token_text(1)
    assert isinstance(failed.value.__cause__, IndexError)


@pytest.mark.parametrize(("stop", "outcome"), [("k", "text"), (["k"], "text"), (("k",), "text"), (5, "InvalidStop"),
                                               (b"k", "InvalidStop"), ([1], "InvalidStop"), ({"k": 1}, "InvalidStop")])
async def test_stop_strings_of_any_type_through_langchain(stop: Any, outcome: str) -> None:
    """One string is one stop string, not one for each letter; what is no text is refused as everywhere."""
    async with house() as opened:
        text = await outcome_of(by_chain(opened, Question("ab", {"max_tokens": 3, "stop": stop})))
        assert text == outcome if outcome != "text" else isinstance(text, list)
        one = await outcome_of(by_chain(opened, Question("ab", {"max_tokens": 9, "stop": "".join(LETTERS)})))
        assert one == toy_answer(LetterTokenizer().encode("ab"), 9)


LETTERS = LetterTokenizer().decode(range(VOCAB_SIZE))
