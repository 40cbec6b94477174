"""What a hostile caller can write into a grammar: refused, or bounded in time, depth and memory; nothing crashes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

import pytest

from architecture.sources import PACKAGE_PARENTS
from pagedcore.config import limits
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.errors import GrammarsBusy, InvalidGrammar
from pagedcore.structured.deep_stack import DeepStack
from pagedcore.structured.grammars import Grammars
from pagedcore.structured_output import StructuredOutput
from pagedcore.tokenizer.tokenizer import HFTokenizer


def chain(length: int, wrap: Any) -> dict[str, Any]:
    """A schema whose definitions refer to each other in a row."""
    links = {f"a{n}": wrap({"$ref": f"#/$defs/a{n + 1}"}) for n in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "string"}}}


def nested(depth: int, wrap: Any) -> Any:
    inner: Any = {"type": "string"}
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def rules(length: int, name: str) -> str:
    return f"start: {name}0\n" + "".join(f"{name}{n}:{name}{n + 1}\n" for n in range(length)) + f'{name}{length}:"x"'


DEEP: dict[str, dict[str, Any]] = {
    "references": {"json_schema": chain(1900, lambda one: one)},
    "properties": {"json_schema": chain(900, lambda one: {"type": "object", "properties": {"x": one}})},
    "all of": {"json_schema": chain(1100, lambda one: {"allOf": [one, {}]})},
    "rules": {"lark": rules(5200, "a")},
    "terminals": {"lark": rules(5200, "A")},
    "twice each": {"json_schema": chain(40, lambda one: {"allOf": [one, one]})},
    "terminals twice": {"lark": "start: A0\n" + "".join(f"A{n}: A{n + 1} A{n + 1}\n" for n in range(40)) + 'A40: "x"'},
    "rules twice": {"lark": "start: a0\n" + "".join(f"a{n}: a{n + 1} a{n + 1}\n" for n in range(40)) + 'a40: "x"'},
    "ambiguous": {"lark": 'start: s\ns: s s | s s s | "a" |'},
    "any of all": {"json_schema": {"allOf": [{"anyOf": [{"properties": {f"a{n}": {"const": 1}}},
                                                        {"properties": {f"b{n}": {"const": 2}}}]} for n in range(20)]}},
    "repetition": {"regex": "((a{0,1000}){0,1000}){0,1000}"},
    "states": {"regex": "(.*a.{20}|.*b.{21}|.*c.{22}){3}"},
    "stars": {"regex": "a" + "?" * 60_000},
    "negations": {"lark": "start: A\nA: " + "~" * 30_000 + '"a"'},
    "long items": {"json_schema": {"type": "array", "items": {"type": "string"}, "minItems": 10**9}},
    "long text": {"json_schema": {"type": "string", "minLength": 10**9}},
    "digits": {"json_schema": {"type": "integer", "minimum": 10**300, "maximum": 10**308}},
    "reverse text": {"choice": ["\u202e\U0001f600\u0000", "e\u0301", "\u200b"]},
}
"""Grammars as large or deep as they may be, of every kind that recurses or multiplies."""

_PROGRAM = """
import json, sys
import numpy as np
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.errors import InvalidGrammar
from pagedcore.structured.grammars import Grammars
from pagedcore.structured_output import StructuredOutput
from pagedcore.tokenizer.tokenizer import HFTokenizer
grammars = Grammars(HFTokenizer.from_directory(DEMO_MODEL_DIR), 2048, frozenset({2}))
for line in sys.stdin:
    try:
        cursor, tokens, failures = grammars.compile(StructuredOutput(**json.loads(line))), [], {}
        while not failures and len(tokens) < 40 and 2 not in tokens:
            rows = np.zeros((1, 2048), np.float32)
            failures = grammars.mask_rows(rows, [(0, cursor, tokens)])
            allowed = np.flatnonzero(rows[0] == 0.0)
            tokens.append(int(allowed[len(allowed) // 2]) if len(allowed) else 2)
        print("failed" if failures else "followed", flush=True)
    except InvalidGrammar:
        print("refused", flush=True)
"""


def test_the_deepest_grammars_crash_nothing() -> None:
    """Each is refused, fails its own request, or is followed; the process lives."""
    lines = "".join(json.dumps(one) + "\n" for one in DEEP.values())
    environment = {"PYTHONPATH": ":".join(map(str, PACKAGE_PARENTS)), "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], input=lines, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (len(done.stdout.splitlines()), done.stderr[-2000:])
    outcomes = dict(zip(DEEP, done.stdout.split(), strict=True))
    assert set(outcomes.values()) <= {"refused", "failed", "followed"}
    assert outcomes["reverse text"] == outcomes["references"] == "followed"
    assert outcomes["terminals twice"] == outcomes["any of all"] == "refused"


CYCLE: dict[str, Any] = {}
CYCLE["allOf"] = [CYCLE]
SHARED = [{"const": "x" * 1000}] * 1000
TOO_LARGE: dict[str, Any] = {
    "bytes": {"json_schema": '{"const": "' + "x" * 92_160 + '"}'},
    "object": {"json_schema": {"enum": list(range(70_000))}},
    "depth": {"json_schema": nested(1000, lambda one: {"items": one})},
    "cycle": {"json_schema": CYCLE},
    "shared": {"json_schema": {"anyOf": SHARED * 10}},
    "choices": {"choice": ["a"] * 10_000},
    "regex": {"regex": "a" * 92_160},
    "brackets": {"regex": "(" * 8_000 + "a" * 92_160},
    "surrogate": {"regex": "\ud800"},
    "rules": {"ebnf": 'a ::= "b"\n' * 10_000},
    "no JSON": {"json_schema": {"const": {1, 2}}},
    "number": {"json_schema": {"const": float("nan")}},
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_is_too_large_is_refused_before_it_is_compiled(name: str) -> None:
    """The refusal names the field and holds nothing of its value."""
    value = TOO_LARGE[name]
    with pytest.raises(InvalidGrammar) as refusal:
        StructuredOutput(**value)
    assert refusal.value.what in value
    assert refusal.value.__context__ is None
    assert len(str(refusal.value)) < 200


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    """Those of the demo model, without the model."""
    return Grammars(HFTokenizer.from_directory(DEMO_MODEL_DIR), 2048, frozenset({2}))


BOMBS: dict[str, dict[str, Any]] = {
    "multiple": {"json_schema": {"type": "integer", "multipleOf": 99_999_999}},
    "multiples": {"json_schema": {"allOf": [{"multipleOf": 9_973}, {"multipleOf": 9_967}]}},
    "inside": {"lark": 'start: %json {"type": "integer", "multiple\\u004ff": 99999999}'},
    "not JSON": {"lark": 'start: %json {"type": "integer", // here\n"multipleOf": 99999999}'},
    "library": {"lark": '{"grammars": [{"json_schema": {"type": "integer", "multipleOf": 99999999}}]}'},
    "patterns": {"json_schema": {"patternProperties": {f"^p{n}[a-z]*$": {} for n in range(300)}}},
    "properties": {"json_schema": {"properties": {f"p{n}": {} for n in range(4000)}}},
    "remote": {"json_schema": {"$ref": "https://example.com/schema.json"}},
    "file": {"json_schema": {"$ref": "file:///etc/passwd"}},
    "look-around": {"regex": "(?=a)b"},
    "unknown keyword": {"json_schema": {"type": "array", "uniqueItems": True}},
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_would_take_too_long_is_refused(grammars: Grammars, name: str) -> None:
    """Keywords that multiply, references to elsewhere, and what the library does not know."""
    with pytest.raises(InvalidGrammar) as refusal:
        grammars.compile(StructuredOutput(**BOMBS[name]))
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize("name", ["multiple", "multiples", "inside"])
def test_multiples_are_refused_before_they_are_compiled(grammars: Grammars, name: str) -> None:
    """Wherever they are written, and however: what counts is the least common multiple of all."""
    with pytest.raises(InvalidGrammar, match="multipleOf, the common multiple of all: got 99"):
        grammars.compile(StructuredOutput(**BOMBS[name]))


def test_compiling_that_takes_too_long_is_given_up() -> None:
    """The caller is refused after the limit, others while all threads are busy; later there is room again."""
    stack, go_on, states = DeepStack(1, 0.02), threading.Event(), list[str]()
    with pytest.raises(TimeoutError):
        stack.run(lambda: go_on.wait() and states.append("late"))
    with pytest.raises(GrammarsBusy):
        stack.run(lambda: None)
    go_on.set()
    while not states:
        pass
    assert DeepStack(1, 10).run(lambda: "done") == "done"
    assert threading.stack_size() == 0


def test_an_error_of_the_work_is_the_callers_and_frees_its_thread() -> None:
    """What is raised on the thread is raised here, as often as it is called."""
    stack = DeepStack(1, 10)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            stack.run(lambda: 1 / 0)


def test_the_grammars_of_all_requests_together_are_bounded(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A further one is refused until others have ended."""
    monkeypatch.setattr(limits, "MAX_LIVE_GRAMMAR_BYTES", 500)
    wanted = StructuredOutput(choice=["x" * 150])
    live = [grammars.compile(wanted), grammars.compile(wanted)]
    with pytest.raises(GrammarsBusy):
        grammars.compile(wanted)
    branch = live.pop().branch()
    with pytest.raises(GrammarsBusy):
        grammars.compile(wanted)
    del branch
    assert grammars.compile(wanted) is not None
