"""What grammars expand to, counted before the library sees them: never too little, and little for usual ones."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pagedcore.config import limits
from pagedcore.errors import InvalidGrammar
from pagedcore.structured.grammar_size import size_of_lark, size_of_regex
from pagedcore.structured.grammar_source import source_of
from pagedcore.structured.grammars import _LIMITS, Grammars
from pagedcore.structured_output import StructuredOutput
from pagedcore.tool_calls.formats import ToolGrammar
from pagedcore.tool_calls.hermes import HermesFormat
from pagedcore.tool_calls.llama3 import Llama3Format
from pagedcore.tool_calls.mistral import MistralFormat
from support.hostile_grammars import EXPANDING
from support.torture import first_seed, scaled

SCHEMAS = [one["schema"] for one in json.loads((Path(__file__).parent / "schemas.json").read_text())]

@pytest.mark.parametrize("name", EXPANDING)
def test_what_expands_to_too_much_is_refused_before_the_library_sees_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal says what, how much, and the limit, and repeats nothing."""
    grammars = Grammars(None, 10, frozenset({0}))
    monkeypatch.setattr(grammars, "_read_vocabulary", lambda: pytest.fail("it was not refused"))
    said = rf"what it expands to: got at least \d+, allowed is at most {limits.MAX_GRAMMAR_SIZE}"
    with pytest.raises(InvalidGrammar, match=said) as one:
        grammars.compile(StructuredOutput(**EXPANDING[name]))
    assert len(str(one.value)) < 220


WORD = {"type": "string", "pattern": "^[a-z]+$"}
TOOLS = [{"name": "f", "parameters": {"type": "object", "properties": {"a": WORD}}}, {"name": "g"}]
USUAL: dict[str, dict[str, Any]] = {
    **{f"schema {place}": {"json_schema": schema} for place, schema in enumerate(SCHEMAS)},
    "address": {"regex": r"^[\w.%+-]+@[\w.-]+\.\p{L}{2,}$"},
    "date": {"regex": r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])(T\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:\d\d)?)?"},
    "long text": {"regex": r"(?s:.{0,60000})"},
    "words": {"regex": "|".join(f"w{n}" for n in range(5000))},
    "literal": {"regex": "a" * 65_000},
    "choices": {"choice": [f"choice {n}" for n in range(1000)]},
    "arithmetic": {"lark": 'start: sum\nsum: (sum ("+" | "-"))? product\nproduct: (product ("*" | "/"))? item\n'
                           'item: NUMBER | "(" sum ")"\nNUMBER: /[0-9]+(\\.[0-9]+)?/\n%ignore /[ \\t]+/'},
    "optional rules": {"lark": "start: " + "a? " * 200 + '\na: "x" b?\nb: /[a-z]+/ "," a'},
    "terminals of terminals": {"lark": "start: A0\n" + "".join(f"A{n}: A{n + 1}?\n" for n in range(900)) + 'A900: "x"'},
    **{f"{form.markers[0]} {tag}": {"lark": form.grammar(TOOLS, ToolGrammar("", {}, **more))}
       for form in (HermesFormat(), Llama3Format(), MistralFormat())
       for tag, more in (("auto", {}), ("required", {"is_required": True}))},
}


@pytest.mark.parametrize("name", USUAL)
def test_what_people_write_is_small(name: str) -> None:
    """It is compiled without trying it in a child process first."""
    assert source_of(StructuredOutput(**USUAL[name])).size <= limits.MAX_UNTRIED_GRAMMAR_SIZE


@pytest.mark.parametrize("terminal", ["/a/ & /b/", '"c" | (/a+/ & ~/aa/)', "~B", "~(B | /x/)"])
def test_an_intersection_or_a_complement_is_not_small(terminal: str) -> None:
    """Whether an intersection matches anything is a search without a limit, however short its text."""
    assert size_of_lark(f"start: A\nA: {terminal}\nB: /b/") > limits.MAX_UNTRIED_GRAMMAR_SIZE


@pytest.mark.parametrize("piece", [
    "#", "[#", r"\p{", "(?<)", "()", "A:A A\n", "A:B\n", "A[a]:B C\n", "%json [", '"', "<a",
])
def test_counting_takes_no_longer_than_the_text_is_long(piece: str) -> None:
    """What ends nowhere, refers to itself, or is defined a thousand times is read once."""
    text = (piece * 65_000)[:65_000]
    started = time.thread_time()
    size_of_regex(text)
    size_of_lark(text)
    assert time.thread_time() - started < 4.0


def random_regex(rng: random.Random, num_parts: int) -> str:
    """A regular expression with about so many parts, most of them optional."""
    if num_parts <= 1:
        return rng.choice(["a", "b", ".", r"\w", r"\W", r"\pL", "[a-c]", "[^a]", "é", "ab", "(?i:k)", "[à-ÿα-ω]"])
    half = rng.randint(1, num_parts - 1)
    kind = rng.random()
    if kind < 0.25:
        return f"(?:{random_regex(rng, half)}|{random_regex(rng, num_parts - half)})"
    if kind < 0.45:
        return f"(?:{random_regex(rng, num_parts - 1)}){rng.choice(['?', '*', '+', '{0,3}', '{2}', '{0,1000}'])}"
    if kind < 0.6:
        part = random_regex(rng, min(half, 12))
        return f"(?:{part}){rng.choice('?*')}" * (2 * num_parts // len(part) + 1)
    return random_regex(rng, half) + random_regex(rng, num_parts - half)


@pytest.mark.torture
def test_groups_that_mean_nothing_make_no_expression_smaller() -> None:
    """The library forgets groups: what they hold counts with all that comes behind, however it is bracketed."""
    rng = random.Random(first_seed())
    for _ in range(scaled(20)):
        parts = [random_regex(rng, 3) for _ in range(rng.randint(2, 40))]
        flat, grouped = "".join(parts), parts
        while len(grouped) > 1:
            place = rng.randrange(len(grouped) - 1)
            grouped[place : place + 2] = [f"(?:{grouped[place]}{grouped[place + 1]})"]
        assert size_of_regex(grouped[0]) == size_of_regex(flat)


_COMPILE = """
import json, sys, threading, time
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
tokens, limits = LLTokenizer("byte"), json.loads(sys.stdin.readline())
def all_of_them():
    for line in sys.stdin:
        started = time.thread_time()
        LLMatcher(tokens, LLMatcher.grammar_from_regex(json.loads(line)), log_level=0, limits=LLParserLimits(**limits))
        most = [one for one in open("/proc/self/status") if one.startswith("VmHWM")][0]
        print(time.thread_time() - started, int(most.split()[1]) * 1024, flush=True)
threading.stack_size(2**28)
thread = threading.Thread(target=all_of_them)
thread.start()
thread.join()
"""


@pytest.mark.torture
def test_the_library_takes_no_more_for_what_is_not_refused() -> None:
    """Of random expressions up to the limit, each takes less than a second, and all together less than 100 MiB."""
    rng, texts = random.Random(first_seed()), ["a"]
    while len(texts) < 1 + scaled(25):
        text = random_regex(rng, int(2 ** rng.uniform(4, 12)))[: limits.MAX_GRAMMAR_BYTES]
        if 2**10 < size_of_regex(text).branches <= limits.MAX_GRAMMAR_SIZE:
            texts.append(text)
    lines = "".join(json.dumps(one) + "\n" for one in (_LIMITS, *texts))
    command = [sys.executable, "-I", "-c", _COMPILE]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=True)
    seconds, num_bytes = zip(*(map(float, line.split()) for line in done.stdout.splitlines()), strict=True)
    assert max(seconds) < 1.0
    assert num_bytes[-1] - num_bytes[0] < 100 * 2**20


@pytest.mark.parametrize(("rules", "is_small"), [
    ('a: "y" | {0}', False), ('a: b "y" | {0}\nb: a "z"', False), ('?a: "y" | {0}', False),
    ('a: "y"\nb: "z" | {0}', True), ('a: c\nb: c | {0}\nc: "z"', True),
])
def test_long_rules_that_refer_to_themselves_are_tried(rules: str, is_small: bool) -> None:
    """By themselves or through others; a long rule that does not, and a short one that does, are compiled at once."""
    many = " | ".join(f'a "x{n}"' for n in range(1000))
    assert (size_of_lark(f"start: a\n{rules.format(many)}") <= limits.MAX_UNTRIED_GRAMMAR_SIZE) == is_small
    assert size_of_lark("start: a\n" + rules.format('a "x" a')) <= limits.MAX_UNTRIED_GRAMMAR_SIZE
