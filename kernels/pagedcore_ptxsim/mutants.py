"""Broken variants of a PTX text, one change each, to prove that the checks around a kernel notice.

Kinds: ``barrier`` (a ``bar.sync`` or ``bar.warp.sync`` is gone), ``wait`` (a ``cp.async.wait_group`` is gone),
``relaxed wait`` (it leaves one group more open), ``commit`` (a ``commit_group`` is gone), ``predicate`` (a guarded
access or branch loses its guard: a guarded branch then is always taken, or never).
A mutant keeps every line number. Some are equivalent to the original, such as the last of two barriers in a row;
which of a kernel's mutants have to be caught is for its test to say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_BARRIER = re.compile(r"\b(?:bar\.sync|barrier\.sync(?:\.aligned)?|bar\.warp\.sync)\b[^;]*;")
_WAIT = re.compile(r"\bcp\.async\.wait_(?:group\s+(\d+)|all)\s*;")
_COMMIT = re.compile(r"\bcp\.async\.commit_group\s*;")
_GUARDED = re.compile(r"@!?%?\w+[ \t]+(?=(\w+))")
KINDS = ("barrier", "wait", "relaxed wait", "commit", "predicate")


@dataclass(frozen=True)
class Mutant:
    """One broken text. ``line`` is where, ``was`` the statement that changed."""

    kind: str
    line: int
    was: str
    ptx: str

    def __str__(self) -> str:
        return f"{self.kind}, line {self.line}: {self.was}"


def mutants(ptx: str, kinds: Sequence[str] = KINDS) -> list[Mutant]:
    """Every mutant of the given kinds, in the order of the kinds and of the text."""
    unknown = set(kinds) - set(KINDS)
    if unknown:
        raise ValueError(f"no mutants of kind {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    return [mutant for kind in kinds for mutant in _GENERATORS[kind](ptx)]


def _replaced(kind: str, ptx: str, match: re.Match[str], text: str) -> Mutant:
    start = ptx.rfind("\n", 0, match.start()) + 1
    end = ptx.find("\n", match.end())
    line = ptx.count("\n", 0, match.start()) + 1
    return Mutant(kind, line, ptx[start:end].strip(), ptx[:match.start()] + text + ptx[match.end():])


def _barriers(ptx: str) -> Iterator[Mutant]:
    return (_replaced("barrier", ptx, match, "") for match in _BARRIER.finditer(ptx))


def _waits(ptx: str) -> Iterator[Mutant]:
    return (_replaced("wait", ptx, match, "") for match in _WAIT.finditer(ptx))


def _relaxed(ptx: str) -> Iterator[Mutant]:
    for match in _WAIT.finditer(ptx):
        more = int(match.group(1) or 0) + 1
        yield _replaced("relaxed wait", ptx, match, f"cp.async.wait_group {more};")


def _commits(ptx: str) -> Iterator[Mutant]:
    return (_replaced("commit", ptx, match, "") for match in _COMMIT.finditer(ptx))


def _predicates(ptx: str) -> Iterator[Mutant]:
    """A guarded branch is taken always, and never; any other guarded instruction runs always."""
    for match in _GUARDED.finditer(ptx):
        yield _replaced("predicate", ptx, match, "")
        if match.group(1) == "bra":
            statement = re.compile(r"[^;]*;").match(ptx, match.start())
            if statement:
                yield _replaced("predicate", ptx, statement, "")


_GENERATORS = {"barrier": _barriers, "wait": _waits, "relaxed wait": _relaxed, "commit": _commits,
               "predicate": _predicates}
