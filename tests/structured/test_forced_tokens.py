"""What a grammar forces is what its masks leave, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")

from pagedcore import StructuredOutput
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.protocols import Constraint
from pagedcore.structured.grammars import Grammars
from pagedcore.tokenizer.tokenizer import HFTokenizer

TOKENIZER, END = HFTokenizer.from_directory(DEMO_MODEL_DIR), 2
SCHEMA = {
    "type": "object", "required": ["commit", "kind"], "additionalProperties": False,
    "properties": {"commit": {"type": "string", "maxLength": 8}, "kind": {"enum": ["aardvark", "albatross"]}},
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, 2048, frozenset({END}))


def allowed(grammars: Grammars, cursor: Constraint, tokens: Sequence[int]) -> list[int]:
    """The tokens that a mask leaves."""
    rows = np.zeros((1, 2048), np.float32)
    assert grammars.mask_rows(rows, [(0, cursor, tokens)]) == {}
    return list(np.flatnonzero(rows[0] == 0.0))


@pytest.mark.parametrize("wanted", [
    {"json_schema": SCHEMA}, {"choice": ["the same beginning, one end", "the same beginning, another"]},
    {"regex": "a{12}(b|c)d{9}"}, {"lark": 'start: "x" <|im_end|> "y"'},
])
def test_forced_tokens_are_the_only_ones_allowed(grammars: Grammars, wanted: dict[str, Any]) -> None:
    """Along random completions, each forced token is the one that the mask of its place leaves, and a wish for fewer
    gives the first of them. Asking changes no mask."""
    rng, num_forced = np.random.default_rng(0), 0
    for _ in range(6):
        cursor, tokens = grammars.compile(StructuredOutput(**wanted)), list[int]()
        other = cursor.branch()
        while len(tokens) < 60 and END not in tokens:
            forced = grammars.forced(cursor, tokens, 5)
            assert forced[:2] == grammars.forced(cursor, tokens, 2)
            ahead = [*tokens]
            for token in forced:
                assert allowed(grammars, other, ahead) == [token]
                ahead.append(token)
            num_forced += len(forced)
            tokens.append(int(rng.choice(allowed(grammars, cursor, tokens))))
    assert num_forced > 20


def test_a_grammar_that_failed_forces_nothing(grammars: Grammars) -> None:
    """Tokens that are not allowed leave a matcher without anything that could come next."""
    cursor = grammars.compile(StructuredOutput(choice=["aaaa bbbb"]))
    assert grammars.forced(cursor, [], 9)
    assert grammars.forced(cursor, TOKENIZER.encode("bbbb"), 9) == ()
