"""What a caller's input costs, counted in lines and calls: linear in its own size, nothing where it is refused.

Times would depend on the machine; a line that is executed once per element of an input is seen by counting.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from pagedcore import SamplingParams
from pagedcore.config import limits
from pagedcore.engine.builder import build_components
from pagedcore.engine.engine import Engine
from pagedcore.errors import InvalidRequest
from pagedcore.request_options import RequestOptions
from pagedcore.requests import validation
from pagedcore.structured_output import StructuredOutput
from pagedcore.tokenizer.chat import validate_chat
from pagedcore.tokenizer.incremental_text import IncrementalText, StopMatcher
from pagedcore.tokenizer.piece_detokenizer import Decode
from pagedcore.tokenizer.stream_detokenizer import StreamDetokenizer, decode_window
from pagedcore.tokenizer.tokenizer import HFTokenizer
from support.doubles import FakeClock, ToyBackend
from support.text_builders import BUILDERS, make_fast


def cost(work: Callable[[], Any]) -> int:
    """Count the lines of Python that are executed and the functions of C that are called.

    The garbage collector is off meanwhile: finalizers and callbacks of other tests' objects are not this work's cost.
    """
    counted = 0

    def line(frame: Any, event: str, argument: Any) -> Any:
        nonlocal counted
        counted += event == "line"
        return line

    def call(frame: Any, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event == "c_call"

    collecting = gc.isenabled()
    gc.disable()
    sys.setprofile(call)
    sys.settrace(line)
    try:
        work()
    finally:
        sys.settrace(None)
        sys.setprofile(None)
        if collecting:
            gc.enable()
    return counted


def refused(work: Callable[[], Any]) -> Callable[[], None]:
    """Expect a refusal."""

    def attempt() -> None:
        try:
            work()
        except InvalidRequest:
            return
        raise AssertionError("it was not refused")

    return attempt


def require_linear(work_of: Callable[[int], Callable[[], Any]], size: int, per_item: float) -> None:
    """Doubling an input doubles what its size adds to the cost, at most; an item costs a bounded number of lines."""
    work_of(size // 4)()
    quarter, half, whole = (cost(work_of(one)) for one in (size // 4, size // 2, size))
    assert whole - half <= 2.2 * (half - quarter) + 50, (quarter, half, whole)
    assert whole - half <= per_item * (size - size // 2) + 50, (quarter, half, whole)


FIELDS: dict[str, tuple[Callable[[int], Any], int, float]] = {
    "stop": (lambda size: [f"{n}" * 60 for n in range(size)], limits.MAX_STOP_STRINGS, 40),
    "stop_token_ids": (lambda size: list(range(size)), limits.MAX_STOP_TOKEN_IDS, 12),
    "logit_bias": (lambda size: {str(n): 1.0 for n in range(size)}, limits.MAX_LOGIT_BIAS_ENTRIES, 40),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_parameter_costs_in_proportion_to_its_entries(name: str) -> None:
    """Up to its limit an entry costs a bounded number of lines; beyond it the refusal looks at none of them."""
    value_of, limit, per_entry = FIELDS[name]
    values = {size: {name: value_of(size)} for size in (limit // 4, limit // 2, limit, limit + 1, 1000 * limit)}
    require_linear(lambda size: lambda: SamplingParams.from_mapping(values[size]), limit, per_entry)
    few, many = (cost(refused(lambda size=size: SamplingParams.from_mapping(values[size])))  # type: ignore[misc]
                 for size in (limit + 1, 1000 * limit))
    assert many == few


def deep(depth: int) -> Any:
    inner: Any = []
    for _ in range(depth):
        inner = [inner]
    return inner


REFUSED: list[Callable[[int], Callable[[], Any]]] = [
    lambda size: lambda value=[1] * size: validation.validate_prompt_ids(value, 32, 64),
    lambda size: lambda value="a" * size: validation.validate_text(value, 8),
    lambda size: lambda value="\u00e9" * size: validation.validate_text(value, 8),
    lambda size: lambda value=[{"role": "user", "content": ""}] * size: validate_chat(value, 8),
    lambda size: lambda value=[{"role": "user", "content": "a" * size}]: validate_chat(value, 8),
    lambda size: lambda value={"a" * size: 1}: SamplingParams.from_mapping(value),
    lambda size: lambda value={f"n{n}": 1 for n in range(size)}: SamplingParams.from_mapping(value),
    lambda size: lambda value="a" * size: SamplingParams(stop=value),
    lambda size: lambda value=2 ** (8 * size): SamplingParams(max_tokens=value),
    lambda size: partial(SamplingParams, stop=deep(size)),
    lambda size: lambda value="a" * 100 * size: StructuredOutput(regex=value),
    lambda size: lambda value={"enum": [0] * 100 * size}: StructuredOutput(json_schema=value),
    lambda size: lambda value=["a"] * size: StructuredOutput(choice=value),
    lambda size: lambda value="a::=b\n" * size: StructuredOutput(ebnf=value),
    lambda size: partial(StructuredOutput, json_schema={"const": deep(size)}),
    lambda size: lambda value={"a" * size: 1}: StructuredOutput.from_mapping(value),
    lambda size: lambda value="a" * size: RequestOptions(request_id=value),
    lambda size: lambda value="a" * size: RequestOptions(cache_salt=value),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_a_refusal_costs_the_same_whatever_the_size(number: int) -> None:
    """A hundred times the input that is too large executes no line more."""
    few, many = (cost(refused(REFUSED[number](size))) for size in (1_100, 110_000))
    assert many <= few


def test_a_prompt_is_checked_in_pieces() -> None:
    """Lines per piece of 16,384 token ids, or of 4,096 characters that are not ASCII, and not per token."""
    ids, text = [1] * 2**18, "\u00e9" * 2**18
    require_linear(lambda size: lambda: validation.validate_prompt_ids(ids[:size], 32, 2**20), 2**18, 0.01)
    require_linear(lambda size: lambda: validation.validate_text(text[:size], 2**20), 2**18, 0.01)


class Ticks(FakeClock):
    """A millisecond passes between two looks. Why: what measured times teach an engine costs lines that depend on them.
    """

    def now(self) -> float:
        """Return the current time in seconds."""
        self.advance(1e-3)
        return super().now()


SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
    "bias": {"logit_bias": dict.fromkeys(range(32), 0.5)},
    "logprobs": {"logprobs": 20, "prompt_logprobs": 20},
    "stop": {"stop": [chr(0x4E00 + n) * 64 for n in range(8)], "stop_token_ids": list(range(28, 31)),
             "logit_bias": dict.fromkeys(range(28, 31), -100.0)},
    "random": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 1},
    "everything": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 20,
                   "logit_bias": dict.fromkeys(range(32), 0.5), "stop": ["\u4e00" * 64] * 8, "n": 2},
}


@pytest.mark.parametrize("name", [
    "penalties", "everything",
    *(pytest.param(name, marks=pytest.mark.slow) for name in SAMPLING if name not in ("penalties", "everything")),
])
def test_a_token_costs_the_same_late_in_a_completion_as_early(name: str) -> None:
    """With any parameters the lines of a step do not grow with the tokens before it; they are the same each time."""
    tokenizer = HFTokenizer(make_fast("byte_level"))

    def work_of(size: int) -> Callable[[], None]:
        params = SamplingParams(max_tokens=size, ignore_eos=True, **SAMPLING[name])
        # Why without guesses: they are counted where they are made, and how many there are is learned.
        settings: dict[str, Any] = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8, "num_threads": 1,
                                    "speculation": "off"}
        components = build_components(ToyBackend(), tokenizer=tokenizer, num_kv_blocks=300, **settings)
        engine = Engine(components, Ticks())
        engine.add_request([1, 2, 3], params)

        def work() -> None:
            outputs = []
            while engine.has_pending_requests():
                outputs = engine.step()
            # Why: what ends early has no late tokens.
            assert {one.finish_reason for one in outputs} == {"length"}

        return work

    work_of(16)()
    assert cost(work_of(64)) == cost(work_of(64))
    require_linear(work_of, 256, 2_000)


@pytest.mark.parametrize("kind", BUILDERS)
def test_text_costs_the_same_for_each_token(kind: str) -> None:
    """Every kind of detokenizer, with stop strings that hold all they can back: a bounded number of lines per token."""
    tokenizer = HFTokenizer(make_fast(kind))
    ids = tokenizer.encode("the quick brown fox " * 80)

    def work_of(size: int) -> Callable[[], None]:
        text = IncrementalText(tokenizer.new_detokenizer(), tuple(f"{'the quick brown fox ' * 3}{n}" for n in range(4)))

        def work() -> None:
            for token_id in ids[:size]:
                text.push([token_id])
            text.finish()

        return work

    require_linear(work_of, 256, 100)


def never_certain() -> tuple[Decode, list[int]]:
    """A decoding whose text is never certain, and how many tokens it was given each time."""
    given: list[int] = []

    def decode(window: Sequence[int]) -> str:
        given.append(len(window))
        return "\ufffd" * len(window)

    return decode, given


def test_tokens_without_certain_text_are_not_decoded_again_and_again() -> None:
    """A caller can bias a completion to bytes of no characters: the tokens decoded stay linear in their number."""
    totals = []
    for size in (128, 256, 512):
        decode, given = never_certain()
        detokenizer = StreamDetokenizer(decode, lambda decode=decode: decode_window(decode))  # type: ignore[misc]
        for _ in range(size):
            detokenizer.push([1])
        assert detokenizer.finish() == "\ufffd" * size
        totals.append(sum(given))
    assert totals[2] - totals[1] <= 2.5 * (totals[1] - totals[0]), totals


@pytest.mark.parametrize("stop", [["a" * 64] * 8, ["a" * 63 + "b"] + ["a" * n for n in range(57, 64)], ["ab" * 32] * 8])
def test_stop_strings_hold_back_less_than_their_length(stop: list[str]) -> None:
    """However the text goes on, a push looks at less than a stop string of earlier text."""
    matcher = StopMatcher([one + "!" for one in stop] if len(set(stop)) > 1 else [one[:-1] + "!" for one in stop])
    for letter in "ab" * 500 + "a" * 500:
        matcher.push(letter)
        assert len(matcher._held) <= limits.MAX_STOP_LENGTH
    assert len(matcher._prefixes) <= limits.MAX_STOP_STRINGS * limits.MAX_STOP_LENGTH


def test_a_chat_template_costs_in_proportion_to_the_messages() -> None:
    """A message costs a bounded number of lines, and so does an error that quotes the template."""
    fast = make_fast("byte_level")
    fast.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% if m.content == 'no' %}"
        "{{ raise_exception('this template refuses such a message') }}{% endif %}{% endfor %}"
    )
    try:
        tokenizer = HFTokenizer(fast)
        messages = [{"role": "user", "content": "a b c"}] * 1024
        tokenizer.encode_chat(messages[:2])
        require_linear(lambda size: lambda: tokenizer.encode_chat(messages[:size]), 1024, 100)
        bad = [*messages, {"role": "user", "content": "no"}]
        assert cost(refused(lambda: tokenizer.encode_chat(bad))) < 1024 * 100 + 5_000
    finally:
        fast.chat_template = None


def test_a_body_costs_in_proportion_to_its_values_and_pieces() -> None:
    """Numbers and objects cost a few lines each, strings and lists some for each 512 KiB, a piece of a stream a few."""
    body = pytest.importorskip("pagedcore_http.body")
    requests = pytest.importorskip("starlette.requests")

    def parsing(value: Any) -> Callable[[int], Callable[[], Any]]:
        texts = {size: json.dumps({"a": [value] * size}).encode() for size in (2_000, 4_000, 8_000)}
        return lambda size: lambda: body._parse_long(texts[size], 10**6)

    require_linear(parsing(7), 8_000, 12)
    require_linear(parsing({}), 8_000, 16)
    require_linear(parsing("a"), 8_000, 1)
    require_linear(parsing([]), 8_000, 9)
    few, many = (cost(refused(lambda size=size: body._parse_long(b'{"a":[' + b"[]," * size, 10**6)))  # type: ignore[misc]
                 for size in (20_000, 200_000))
    assert many <= few + 20

    def reading(size: int) -> Callable[[], Any]:
        async def receive() -> Any:
            nonlocal left
            left -= 1
            return {"type": "http.request", "body": b" ", "more_body": left > 0}

        left = size
        request = requests.Request({"type": "http", "headers": []}, receive)
        return lambda: asyncio.run(body._read(request, 10**6))

    require_linear(reading, 4_000, 40)
