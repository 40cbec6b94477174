"""Texts and numbers that a grammar asks for come out as they were asked for, whatever the tokenizer makes of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import normalizers

pytest.importorskip("llguidance")

from pagedcore import AsyncEngine, Chat, Engine, SamplingParams, StructuredOutput
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.errors import InvalidGrammar
from pagedcore.structured import vocabulary
from pagedcore.structured.grammars import Grammars
from pagedcore.structured.vocabulary import Vocabulary
from pagedcore.tokenizer.tokenizer import HFTokenizer
from support.text_builders import make_fast

TOKENIZER = HFTokenizer.from_directory(DEMO_MODEL_DIR)
SPECIAL = ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "a<|im_end|>b")
NOT_COMPOSED = ("cafe\u0301", "\u1112\u1161\u11ab", "A\u030a", "\u212b", "\u2126", "\uf900", "\u0958", "a\u0308\u0304")


@pytest.fixture(scope="module", params=["as it is", "NFC"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The demo model, and with the normalizer that Qwen's tokenizers have."""
    directory = tmp_path_factory.mktemp("model") / "demo"
    shutil.copytree(DEMO_MODEL_DIR, directory)
    if request.param == "NFC":
        path = Path(directory, "tokenizer.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": {"type": "NFC"}}))
    with Engine.from_pretrained(directory, num_kv_blocks=512) as engine:
        yield engine


def text_of(engine: Engine, **wanted: Any) -> str:
    params = SamplingParams(max_tokens=80, structured=StructuredOutput(**wanted))
    (output,) = engine.generate(["What is 2 + 3?"], params)[0].outputs
    assert output.finish_reason == "stop"
    return output.text


@pytest.mark.parametrize("literal", [*SPECIAL, *NOT_COMPOSED])
def test_a_literal_is_written_as_it_is(engine: Engine, literal: str) -> None:
    """Where the text of a special token is asked for, that text is meant, and no token that ends or begins a turn."""
    spelled = "".join(rf"\x{{{ord(one):x}}}" for one in literal)
    assert text_of(engine, choice=[literal]) == literal
    assert text_of(engine, regex=spelled) == literal
    assert text_of(engine, lark=f"start: {json.dumps(literal, ensure_ascii=False)}") == literal
    schema = {"type": "object", "properties": {literal: {"const": literal}}, "required": [literal],
              "additionalProperties": False}
    assert json.loads(text_of(engine, json_schema=schema)) == {literal: literal}


def test_the_arguments_of_a_tool_may_be_such_texts() -> None:
    """In a call as elsewhere."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"t": {"const": SPECIAL[0]}}, "required": ["t"]}}}
    with AsyncEngine.from_pretrained("demo") as engine:
        chat = Chat([{"role": "user", "content": "Call it."}], tools=[tool])
        turn = engine.chat_format.turn(chat, SamplingParams(max_tokens=96), "required", False)
        (call,) = turn.reader().read_all(engine.submit(chat, turn.params).result().outputs[0]).tool_calls
        assert json.loads(call.arguments) == {"t": SPECIAL[0]}


def test_a_grammar_may_name_special_tokens(engine: Engine) -> None:
    """By name as by id, outside of texts, expressions, comments and schemas."""
    lark = ('start: "<|im_start|>" part // <|im_start|>\n'
            'part: /x<\\|im_start\\|>/ %json {"const": "<|im_start|>"} <|im_start|>')
    params = SamplingParams(max_tokens=80, structured={"lark": lark})
    (output,) = engine.generate(["What is 2 + 3?"], params)[0].outputs
    assert output.text == '<|im_start|>x<|im_start|>"<|im_start|>"'
    assert output.token_ids.count(1) == 1


NUMBERS = (2**53 + 1, -(2**60) - 1, 1152921504606846977, 2**64, 10**30)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("schema", [
    lambda one: {"const": one}, lambda one: {"enum": [1, one]}, lambda one: {"const": {"id": [one]}},
    lambda one: {"type": "integer", "minimum": one},
    lambda one: {"type": "object", "properties": {"a": {"const": one}}},
    lambda one: {"anyOf": [{"type": "string"}, {"type": "integer", "exclusiveMaximum": one}]},
])
def test_integers_that_a_double_does_not_hold_are_refused(grammars: Grammars, number: int, schema: Any) -> None:
    """They came out as other numbers."""
    with pytest.raises(InvalidGrammar, match=rf"{number}|integer of \d+ bits"):
        grammars.compile(StructuredOutput(json_schema=schema(number)))


@pytest.mark.parametrize("number", [2**53, -(2**53), 2**60, -(2**62), 2**54 + 4])
def test_integers_that_a_double_holds_are_kept(engine: Engine, grammars: Grammars, number: int) -> None:
    """Digit by digit, as values and as bounds."""
    assert text_of(engine, json_schema={"const": number}) == str(number)
    assert text_of(engine, json_schema={"type": "integer", "minimum": number, "maximum": number}) == str(number)
    assert not accepts(grammars, {"type": "integer", "minimum": number, "maximum": number}, str(number + 1))


def test_the_largest_integer_of_64_bits_is_a_bound(grammars: Grammars) -> None:
    """Programs' schemas have it, and the library has it exactly."""
    schema = {"type": "integer", "maximum": 2**63 - 1}
    assert accepts(grammars, schema, str(2**63 - 1))
    assert not accepts(grammars, schema, str(2**63))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    """Those of the demo model, without the model."""
    return Grammars(TOKENIZER, 2048, frozenset({2}))


def accepts(grammars: Grammars, schema: Any, text: str) -> bool:
    """Whether a grammar accepts a text as a whole."""
    cursor: Any = grammars.compile(StructuredOutput(json_schema=schema))
    matcher, ids = cursor.matcher_after([]), TOKENIZER.encode(text, add_special_tokens=False)
    return matcher.validate_tokens(ids) == len(ids) and cursor.matcher_after(ids).is_accepting()


def test_required_members_of_a_pattern(engine: Engine) -> None:
    """They are written, once."""
    schema = {"type": "object", "patternProperties": {"^a$": {"type": "integer", "minimum": 0, "maximum": 9}},
              "additionalProperties": False, "required": ["a"]}
    (member,) = json.loads(text_of(engine, json_schema=schema), object_pairs_hook=list)
    assert (member[0], member[1] in range(10)) == ("a", True)


@pytest.mark.parametrize(("form", "right", "wrong"), [
    ("date-time", "2024-02-03T04:05:06Z", "2024-02-03T04:05:60Z"),
    ("date-time", "0001-02-03T04:05:06.789+01:00", "0000-02-03T04:05:06Z"),
    ("date", "0999-12-31", "0000-12-31"), ("time", "23:59:59Z", "23:59:60Z"),
])
def test_dates_are_those_that_programs_read(grammars: Grammars, form: str, right: str, wrong: str) -> None:
    """No leap seconds, no year 0; a pattern beside the format is kept as well."""
    assert accepts(grammars, {"type": "string", "format": form}, json.dumps(right))
    assert not accepts(grammars, {"type": "string", "format": form}, json.dumps(wrong))
    both = {"type": "string", "format": form, "pattern": "[5-9]$|[5-9]Z$"}
    assert accepts(grammars, both, json.dumps(right)) == (right.rstrip("Z")[-1] in "56789")


@pytest.mark.parametrize("schema", [
    {"type": "array", "items": {"const": 1}, "maxItems": 1, "minItems": 1, "uniqueItems": False},
    {"type": "array", "items": {"const": 1}, "maxItems": 1, "minItems": 1, "format": "path"},
])
def test_words_that_ask_for_nothing_are_left_out(engine: Engine, schema: Any) -> None:
    """``uniqueItems: false``, and formats that are annotations."""
    assert json.loads(text_of(engine, json_schema=schema)) == [1]


@pytest.mark.parametrize(("schema", "words"), [
    ({"type": "string", "pattern": "^(?=.*secret)a"}, r"regex parse error: error: look-around.*\.$"),
    ({"type": "string", "pattern": "[secret"}, r"regex parse error: error: unclosed character class\.$"),
    ({"type": "number", "minimum": -3.4e38}, r"^json_schema, minimum: got -3\.4e\+38, "),
    ({"type": "number", "exclusiveMaximum": 1e19}, r"^json_schema, exclusiveMaximum: got 1e\+19, "),
])
def test_what_the_library_cannot_read_is_refused_with_the_reason(
    grammars: Grammars, schema: Any, words: str
) -> None:
    """An expression without a word of it, a bound by its name; a bound of integers, and a smaller one, are kept."""
    with pytest.raises(InvalidGrammar, match=words) as refused:
        accepts(grammars, schema, "1")
    assert "secret" not in str(refused.value)
    assert accepts(grammars, {"type": "integer", "maximum": 1e20}, "1")
    assert accepts(grammars, {"type": "number", "maximum": 1e18}, "1")


def test_a_tool_loses_what_cannot_be_kept_unless_it_is_strict() -> None:
    """A pattern with look-ahead, a number beyond doubles: the call is made without them, or refused by name."""
    parameters = {"type": "object", "required": ["d"], "properties": {
        "d": {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]},
        "n": {"type": "integer", "maximum": 2**64}, "f": {"type": "number", "maximum": 3.4e38}}}
    with AsyncEngine.from_pretrained("demo") as engine:
        for is_strict in (False, True):
            tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": is_strict}}
            chat = Chat([{"role": "user", "content": "Call it."}], tools=[tool])
            turn = engine.chat_format.turn(chat, SamplingParams(max_tokens=16), "required", False)
            if is_strict:
                with pytest.raises(InvalidGrammar, match=str(2**64)):
                    engine.submit(chat, turn.params).result()
            else:
                assert engine.submit(chat, turn.params).result().outputs[0].error is None


def test_a_declared_member_has_one_spelling(grammars: Grammars) -> None:
    """Written with an escape it is the same member, whose schema holds for it."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    assert accepts(grammars, schema, '{"a": 1, "b": "x\\n\\""}')
    assert not accepts(grammars, schema, '{"a": 1, "\\u0061": "x"}')
    assert not accepts(grammars, {**schema, "required": ["b"]}, '{"a": 1, "\\u0062": "x"}')
    loose = {**schema, "x-guidance": {"json_allowed_escapes": 'nrbtf\\"u'}}
    assert accepts(grammars, loose, '{"a": 1, "\\u0061": "x"}')


def spelled(grammars: Grammars, tokenizer: HFTokenizer, size: int, end: int, **wanted: Any) -> str:
    """What the first token that is allowed makes, again and again, until the end."""
    cursor, tokens = grammars.compile(StructuredOutput(**wanted)), list[int]()
    while end not in tokens:
        rows = np.zeros((1, size), np.float32)
        assert grammars.mask_rows(rows, [(0, cursor, tokens)]) == {}
        tokens.append(int(rows[0].argmax()))
    return b"".join(tokenizer.token_text(token_id).utf8 or b"" for token_id in tokens[:-1]).decode()


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("can_force", [True, False])
def test_every_kind_of_vocabulary_spells_texts(kind: str, can_force: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the tokens of a text cannot be foretold, as with a normalizer that nobody knows."""
    fast = make_fast(kind)
    if not can_force:
        monkeypatch.setattr(vocabulary, "_CHANGING", ())
        before = [] if fast.backend_tokenizer.normalizer is None else [fast.backend_tokenizer.normalizer]
        fast.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), *before])
    tokenizer = HFTokenizer(fast)
    size = max(tokenizer._tokenizer.get_vocab().values()) + 1
    grammars = Grammars(tokenizer, size, frozenset({0}))
    assert Vocabulary(tokenizer, size, frozenset({0})).can_force == can_force
    for literal in ("<|im_end|>", "</s>", "a<unk>b", "cafe\u0301", '{"x": 1}'):
        assert spelled(grammars, tokenizer, size, 0, choice=[literal]) == literal
        assert json.loads(spelled(grammars, tokenizer, size, 0, json_schema={"const": literal})) == literal
        lark = f"start: {json.dumps(literal, ensure_ascii=False)}"
        assert spelled(grammars, tokenizer, size, 0, lark=lark) == literal
