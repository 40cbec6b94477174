"""Grammars that expand to more than their text, of every kind and in every place where one can be written."""

from __future__ import annotations

from typing import Any, Final

ROW: Final = "a?" * 2000
"""A derivative of it has two million branches."""


def doubled(terminal: str, times: int) -> str:
    """A terminal that is there two to the power of ``times`` times, because each refers to the next one twice."""
    return "start: A0\n" + "".join(f"A{n}: A{n + 1} A{n + 1}\n" for n in range(times)) + f"A{times}: {terminal}"


EXPANDING: Final[dict[str, dict[str, Any]]] = {
    "optional": {"regex": "a?" * 30_000},
    "any character": {"regex": ".?" * 12_000},
    "starred": {"regex": "a*b*" * 8_000},
    "counted": {"regex": "a{0,9}" * 8_000},
    "empty alternative": {"regex": "(a|)" * 8_000},
    "set": {"regex": "[a\\]b]?" * 8_000},
    "class": {"regex": r"\W?" * 4_000},
    "many classes": {"regex": r"\w" * 30_000},
    "lazy": {"regex": "a??" * 8_000},
    "in groups": {"regex": ("(?:" + "a?" * 100 + ")") * 100},
    "nested": {"regex": "(?i:" * 60 + ROW + ")" * 60},
    "behind a text": {"regex": "hello" * 100 + ROW},
    "in an alternative": {"regex": "a|b(" + ROW + ")"},
    "named": {"regex": "(?P<x>" + ROW + ")"},
    "among blanks": {"regex": "(?x)" + "a ? " * 2000},
    "among comments": {"regex": "(?x)" + "a ?#)\n" * 2000},
    "behind a comment in a set": {"regex": "(?x)[b#[\n]" + ROW + "]]"},
    "verbose for a while": {"regex": "(?x: [c] )" + "a?" * 2000 + "# )"},
    "Lark": {"lark": f"start: A\nA: /{ROW}/"},
    "verbose Lark": {"lark": "start: A\nA: /" + "a ? " * 2000 + "/x"},
    "items": {"lark": "start: A\nA: " + '"a"? ' * 4000},
    "in brackets": {"lark": "start: A\nA: " + '["a"] ' * 4000},
    "counted items": {"lark": "start: A\nA: " + '"a"{0,3} "b"~0..2 ' * 2000},
    "complements": {"lark": "start: A\nA: " + '~"a" ' * 4000},
    "several lines": {"lark": "start: A\nA: " + '"b"\n | "a"? ' + '"a"? ' * 4000},
    "doubled": {"lark": doubled("/.?/", 14)},
    "without end": {"lark": doubled("/.?/", 2000)},
    "before what it refers to": {"lark": f"A: B B\nstart: A\nB: /{'a?' * 1000}/"},
    "stop": {"lark": f"start[stop=/{ROW}/]: /b/"},
    "rule with a limit": {"lark": f"start: a\na[max_tokens=3]: {'B ' * 2000}\nB: /a?/"},
    "ignored": {"lark": f'start: "b"\n%ignore /{ROW}/'},
    "within": {"lark": f"start: %lark {{ start: B\nB: /{ROW}/ }}"},
    "rule": {"lark": "start: " + '"a"? ' * 4000},
    "EBNF": {"ebnf": "root ::= " + "[a-z]? " * 4000},
    "pattern": {"json_schema": {"type": "string", "pattern": f"^{ROW}$"}},
    "patterns": {"json_schema": {"prefixItems": [{"type": "string", "pattern": f"^{n}{'.?' * 100}$"}
                                                 for n in range(40)]}},
    "name": {"json_schema": {"patternProperties": {f"^{ROW}$": {}}}},
    "whitespace": {"json_schema": {"type": "object", "x-guidance": {"whitespace_pattern": ROW}}},
    "tool": {"lark": f'start: %json {{"type": "string", "pattern": "^{ROW}$"}}'},
}
"""Of every kind that the library expands, in every place where one can be written."""
