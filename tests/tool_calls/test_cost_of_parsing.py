"""What reading a completion costs: characters are counted, not seconds."""

from __future__ import annotations

from itertools import product
from typing import Any, SupportsIndex

import pytest

from tool_calls.test_parsers import FORMATS, parser_of

SIZES = {1: 64, 10**9: 2048}
"""How long the shorter text is, in characters, for pieces of each length."""
REPEATED = [
    " ", "\n", "; ", "x ", "<tool_cal", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[TOOL_CALLS] add", "[CALL_ID]",
    "<|python_tag|> ", "{", '{"a":1,', '{"name":"add","parameters":{}};', '[TOOL_CALLS][{"name":"add","arguments":{}}]',
    '<tool_call>{"name":"add","arguments":{}}</tool_call>', "<think>", "</think>",
    "<arg_key>a</arg_key><arg_value>1</arg_value>", "<arg_ke", "<|end|><|start|>assistant<|channel|>final<|message|>",
    "<parameter=a>\n", "<|cha",
]
BEFORE = [
    "", "text", '{"name":"add","parameters":{"a":1', '<tool_call>{"name":"add","arguments":{}}', "<|python_tag|>",
    '[TOOL_CALLS][{"name":"add","arguments":{}}', "[TOOL_CALLS]add[CALL_ID]",
    "<tool_call>add<arg_key>a</arg_key><arg_value>", "<tool_call>\n<function=add>\n<parameter=a>",
    "<|channel|>", "<tool_call>add<arg_key>",
]


class Counted(str):
    """Text that counts the characters which are read or copied of it and of all that is made of it."""

    __slots__ = ()
    total = 0

    def _made(self, text: str, num_read: int) -> Counted:
        Counted.total += num_read
        return Counted(text)

    def __add__(self, other: str) -> Counted:
        return self._made(str.__add__(self, other), len(self) + len(other))

    def __radd__(self, other: str) -> Counted:
        return self._made(str.__add__(other, self), len(self) + len(other))

    def __getitem__(self, key: SupportsIndex | slice) -> Counted:
        part = str.__getitem__(self, key)
        return self._made(part, len(part))

    def lstrip(self, characters: str | None = None, /) -> Counted:
        return self._made(str.lstrip(self, characters), len(self))

    def rstrip(self, characters: str | None = None, /) -> Counted:
        return self._made(str.rstrip(self, characters), len(self))

    def partition(self, separator: str, /) -> Any:
        Counted.total += len(self)
        return tuple(Counted(part) for part in str.partition(self, separator))


def cost(name: str, reasoning: str, text: str, piece: int) -> int:
    """Characters that a parser reads and copies of a text that comes in pieces."""
    parser, Counted.total = parser_of(name, reasoning), 0
    for place in range(0, len(text), piece):
        parser.push(Counted(text[place : place + piece]))
    parser.finish()
    return Counted.total


@pytest.mark.parametrize(("name", "reasoning", "piece"), [
    # Every format with every size of pieces, with each way of reasoning in turn; `make slow` takes all.
    pytest.param(name, reasoning, piece, marks=[] if (row + column - place) % 3 == 0 else [pytest.mark.slow])
    for row, name in enumerate(FORMATS) for column, piece in enumerate(SIZES)
    for place, reasoning in enumerate(("", "closed", "open"))
])
def test_a_text_four_times_as_long_costs_four_times_as_much(name: str, reasoning: str, piece: int) -> None:
    """Whatever is repeated, after whatever, no format reads or copies its characters the more often the longer it is,
    neither character by character nor in one piece."""
    growths = {}
    for before, repeated in product(BEFORE[:2] if reasoning else BEFORE, REPEATED):
        text = repeated * (SIZES[piece] // len(repeated))
        costs = [cost(name, reasoning, before + text * times, piece) for times in (1, 4)]
        growths[before, repeated] = costs[1] / costs[0]
    assert max(growths.values()) < 5, max(growths, key=lambda one: growths[one])
