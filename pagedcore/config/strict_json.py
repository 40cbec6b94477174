"""JSON as the standard has it, for everything that is read from outside of the process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

_Pairs = list[tuple[str, Any]]


def _unique(pairs: _Pairs) -> dict[str, Any]:
    if len(members := dict(pairs)) < len(pairs):
        raise ValueError("two members have one name")
    return members


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)


def load_json(text: str, make_object: Callable[[_Pairs], dict[str, Any]] | None = _unique) -> Any:
    """Decode JSON without NaN and infinities, which Python's decoder takes, and without two members of one name.

    ``make_object`` makes objects of their members otherwise; ``None``: the last of several with one name counts.
    Raises ``ValueError``, whose text may repeat what was read, and ``RecursionError`` for what is nested too deep.
    """
    return json.loads(text, object_pairs_hook=make_object, parse_constant=_refuse)
