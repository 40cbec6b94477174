"""Random schemas, followed by random tokens without a model: another library accepts whatever comes to its end."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.errors import InvalidGrammar
from pagedcore.structured.grammars import Grammars
from pagedcore.structured_output import StructuredOutput
from pagedcore.tokenizer.tokenizer import HFTokenizer
from support.torture import scaled

END = 2
TOKENIZER = HFTokenizer.from_directory(DEMO_MODEL_DIR)
NAMES = ["a", "b", "long name", "é\"\\", "日本", ""]

small = st.integers(-50, 50)
leaves = st.one_of(
    st.tuples(small, small).map(lambda pair: {"type": "integer", "minimum": min(pair), "maximum": max(pair)}),
    st.tuples(small, small).map(lambda pair: {"type": "number", "exclusiveMinimum": min(pair), "maximum": max(pair) + 1,
                                              "multipleOf": 0.25}),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}]),
    st.tuples(st.integers(0, 3), st.integers(3, 6)).map(
        lambda pair: {"type": "string", "minLength": pair[0], "maxLength": pair[1]}),
    st.sampled_from(["^[a-c]{2,4}$", "^é+x{0,2}$", "^(yes|no)$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern, "maxLength": 9}),
    st.lists(st.one_of(small, st.text(max_size=4), st.none(), st.booleans()), min_size=1, max_size=4).map(
        lambda values: {"enum": values}),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Arrays, objects with some properties required, and alternatives."""
    properties = st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
    return st.one_of(
        st.tuples(inner, st.integers(0, 2), st.integers(2, 3)).map(
            lambda three: {"type": "array", "items": three[0], "minItems": three[1], "maxItems": three[2]}),
        st.tuples(properties, st.integers(0, 4)).map(
            lambda pair: {"type": "object", "properties": pair[0], "required": sorted(pair[0])[: pair[1]],
                          "additionalProperties": False}),
        st.lists(inner, min_size=1, max_size=3).map(lambda several: {"anyOf": several}),
    )


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    """Those of the demo model's vocabulary."""
    return Grammars(TOKENIZER, 2048, frozenset({END}))


@pytest.mark.torture
@settings(max_examples=scaled(12))
@given(schema=st.recursive(leaves, containers, max_leaves=6), seed=st.integers(0, 2**32 - 1))
def test_every_completion_of_a_random_schema_is_valid(grammars: Grammars, schema: Any, seed: int) -> None:
    """Tokens that are allowed lead to an end, and what ends is accepted by the other library."""
    cursor, tokens = grammars.compile(StructuredOutput(json_schema=schema)), list[int]()
    rng = np.random.default_rng(seed)
    while len(tokens) < 600 and END not in tokens:
        rows = np.zeros((1, 2048), np.float32)
        assert grammars.mask_rows(rows, [(0, cursor, tokens)]) == {}
        allowed = np.flatnonzero(rows[0] == 0.0)
        tokens.append(END if END in allowed else int(rng.choice(allowed)))
    assert tokens.pop() == END
    text = TOKENIZER.decode(tokens)
    assert Draft202012Validator(schema).is_valid(json.loads(text)), text


@pytest.mark.torture
@settings(max_examples=scaled(15))
@given(text=st.text(max_size=40), kind=st.sampled_from(["regex", "lark", "ebnf", "json_schema"]))
def test_random_text_is_a_grammar_or_refused(grammars: Grammars, text: str, kind: str) -> None:
    """No text makes anything but a grammar or an ``InvalidGrammar``, which stays short and on one line."""
    for one in (text, f"start: {text}", f"root ::= {text}", f'{{"{text[:3]}": {text}}}'):
        refusal = refusal_of(grammars, {kind: one})
        assert len(refusal) < 500
        assert not refusal or refusal.isprintable()


def refusal_of(grammars: Grammars, wanted: dict[str, Any]) -> str:
    """Compile; return what a refusal says."""
    try:
        grammars.compile(StructuredOutput(**wanted))
    except InvalidGrammar as refusal:
        return str(refusal)
    return ""
