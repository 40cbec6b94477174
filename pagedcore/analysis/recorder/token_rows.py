"""Token rows of a recording: what a replay needs of tokens without saying which they are.

Decisions depend on tokens through two questions only: up to where two sequences are equal, and which of two is smaller
where they part. So a token is written as its rank among the different tokens that follow the same beginning in this
recording: equal beginnings stay equal, and the order stays, so that every look-up in a prefix cache finds the same.
Ranks are no function of the tokens alone: nobody who guesses a prompt can check the guess against a file.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as ListOf
from typing import Any, Final

from pagedcore.errors import RecordingError

MAX_ROWS: Final = 2**18
MAX_TOKENS: Final = 2**23
"""Of all rows of a file together: what a reader expands, 32 MiB."""


class TokenRows:
    """Rows of tokens while a recording is written.

    Args:
        keeps_tokens: write the tokens themselves.
    """

    def __init__(self, *, keeps_tokens: bool) -> None:
        self._keeps_tokens = keeps_tokens
        self.rows: list[tuple[bytes, array[int]]] = []

    def add(self, root: bytes, token_ids: array[int]) -> int:
        """Add the tokens of one life behind a cache root; return the row's number. They may grow until ``encode``."""
        self.rows.append((root, token_ids))
        return len(self.rows) - 1

    def encode(self, known_roots: dict[bytes, int]) -> list[list[Any]]:
        """Return each row as [root, row before it in order, equal tokens, length], or as [root, tokens].

        ``known_roots`` has, and gets, the number of every root.
        """
        roots = [known_roots.setdefault(root, len(known_roots)) for root, _ in self.rows]
        if self._keeps_tokens:
            return [[root, row.tolist()] for root, (_, row) in zip(roots, self.rows, strict=True)]
        order = sorted(range(len(roots)), key=lambda one: (roots[one], self.rows[one][1]))
        encoded: list[list[Any]] = [[]] * len(roots)
        before = -1
        for number in order:
            is_other = before < 0 or roots[before] != roots[number]
            num_equal = 0 if is_other else _num_equal(self.rows[before][1], self.rows[number][1])
            encoded[number] = [roots[number], -1 if is_other else before, num_equal, len(self.rows[number][1])]
            before = number
        return encoded


def decode(encoded: ListOf[Any]) -> list[tuple[int, array[int]]]:
    """Return (root, tokens or ranks) of each row. Raises ``RecordingError`` before it makes too much of them."""
    if len(encoded) > MAX_ROWS:
        raise RecordingError(f"{len(encoded)} rows of tokens, at most {MAX_ROWS} are read")
    lengths = [len(row[1]) if len(row) == 2 else row[3] for row in encoded]
    if not all(isinstance(length, int) and length >= 0 for length in lengths) or sum(lengths) > MAX_TOKENS:
        raise RecordingError(f"its tokens are more than the {MAX_TOKENS} that are read")
    rows: dict[int, tuple[int, array[int]]] = {}
    waiting: dict[int, list[int]] = {}
    for number, row in enumerate(encoded):
        if len(row) == 2:
            rows[number] = row[0], array("q", row[1])
        else:
            waiting.setdefault(row[1], []).append(number)
    ready = waiting.pop(-1, [])
    while ready:
        number = ready.pop()
        root, before, num_equal, length = encoded[number]
        rows[number] = root, _row_after(rows[before][1] if before >= 0 else array("q"), num_equal, length)
        ready += waiting.pop(number, [])
    if len(rows) != len(encoded):
        raise RecordingError("a row of tokens refers to no other row")
    return [rows[number] for number in range(len(encoded))]


def _row_after(before: array[int], num_equal: int, length: int) -> array[int]:
    if not 0 <= num_equal <= min(length, len(before)):
        raise RecordingError("a row of tokens shares more than there is")
    row = before[:num_equal]
    if num_equal < length:
        row.append(before[num_equal] + 1 if num_equal < len(before) else 0)
    row.frombytes(bytes(8 * (length - len(row))))
    return row


def _num_equal(one: array[int], other: array[int]) -> int:
    shortest = min(len(one), len(other))
    if one[:shortest] == other[:shortest]:
        return shortest
    low, high = 0, shortest
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle)
    return low

