"""Long lists as JSON, in pieces of less than a millisecond, between which the event loop serves other calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

AT_ONCE: Final = 64
"""Entries of a piece: log-probabilities of one token each, with twenty alternatives."""
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


async def map_in_pieces(
    function: Callable[[_Item], _Result], items: Sequence[_Item], at_once: int = AT_ONCE
) -> list[_Result]:
    """Return the result for each item, in order; ``at_once`` of them take less than a few milliseconds."""
    results: list[_Result] = []
    for start in range(0, len(items), at_once):
        if start:
            await asyncio.sleep(0)
        results += map(function, items[start : start + at_once])
    return results


async def with_list(text: str, name: str, items: Sequence[_Item], encode: Callable[[_Item], str]) -> str:
    """Add a list, its entries written by ``encode``, to the JSON object in ``text``, which has fields already."""
    return f'{text[:-1]},"{name}":[{",".join(await map_in_pieces(encode, items))}]}}'
