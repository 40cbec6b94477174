"""The most tools of a request: their grammar is long, and only because of the schemas in it."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("llguidance")

from pagedcore import Chat, SamplingParams, StructuredOutput
from pagedcore.config import limits
from pagedcore.errors import InvalidGrammar
from pagedcore.structured.grammars import Grammars
from support.scripted_model import TEMPLATES, ScriptedBackend, scripted_engine, scripted_tokenizer

END = 2
BEFORE = {"hermes": '<tool_call>\n{"name": "NAME", "arguments": ', "llama3": '{"name": "NAME", "parameters": ',
          "mistral": "[TOOL_CALLS]NAME[ARGS]"}


def tool(place: int) -> dict[str, Any]:
    """A tool with a name of the most characters, and as long as each of the most tools may be."""
    properties = {"text": {"type": "string", "description": "d" * 700}, "number": {"type": "integer"}}
    name = f"{place:03}".rjust(64, "n")
    return {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": properties, "required": ["text", "number"]}}}


@pytest.mark.parametrize("form", BEFORE)
def test_the_most_tools_can_be_called_in_every_format(form: str) -> None:
    """Their grammar compiles, and allows a call of the last one with its arguments and no others."""
    tools = [tool(place) for place in range(limits.MAX_TOOLS)]
    assert 0.8 * limits.MAX_TOOLS_LENGTH < len(json.dumps(tools)) > 200_000
    with scripted_engine("Hello.", form) as engine:
        turn = engine.chat_format.turn(Chat([{"role": "user", "content": "hi"}], tools), SamplingParams(), "required")
    wanted, tokenizer = turn.params.structured, scripted_tokenizer(TEMPLATES[form])
    assert wanted is not None
    constraint = Grammars(tokenizer, ScriptedBackend.vocab_size, frozenset({END})).compile(wanted)
    call = BEFORE[form].replace("NAME", tools[-1]["function"]["name"]) + '{"text": "a", "number": '
    written = tokenizer.encode(call, add_special_tokens=False)
    matcher: Any = constraint.matcher_after(written)  # type: ignore[attr-defined]
    assert not matcher.is_error()
    allowed = [text for text in ("5", "t", '"') if matcher.deep_copy().try_consume_tokens(
        tokenizer.encode(text, add_special_tokens=False))]
    assert allowed == ["5"]


SCHEMA = json.dumps({"type": "object", "description": "d" * 200_000})
RULES = "start: a\n" + "".join(f'a{number}: "b"\n' for number in range(9000))


@pytest.mark.parametrize(("lark", "what"), [
    (RULES, "lark without its JSON schemas"), (f"{RULES}b: %json {SCHEMA}", "lark without its JSON schemas"),
    ("start: a\na: %json " + SCHEMA[:-1] + " " * 9, "lark without its JSON schemas"),
    ("start: " + "%json {a} " * 20_000, "lark without its JSON schemas"),
    ("start: a\n" + "\n".join(f"a{number}: %json {SCHEMA}" for number in range(3)), "lark"),
])
def test_only_schemas_make_a_grammar_long(lark: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text besides them has the limit of every grammar, what is no JSON belongs to it, and all have one together.
    Where one is none, the search ends: otherwise it would read on from thousands of places."""
    assert StructuredOutput(lark=f"start: a\na: %json {SCHEMA}").lark
    searched, decode = list[int](), json.JSONDecoder.raw_decode

    def counting(self: json.JSONDecoder, text: str, idx: int = 0) -> Any:
        searched.append(idx)
        return decode(self, text, idx)

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", counting)
    with pytest.raises(InvalidGrammar) as refused:
        StructuredOutput(lark=lark)
    assert refused.value.what == what
    assert len(searched) <= 1
