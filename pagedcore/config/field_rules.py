"""What one sampling parameter accepts and how it is stored; ``sampling_params`` says which parameter is which.

A normaliser takes a parameter's name and a caller's value, and returns what is stored or raises the parameter's error.
Next: ``limits.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Literal

from pagedcore.config.limits import (
    MAX_COUNT,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from pagedcore.errors import InvalidBias, InvalidRequest, InvalidSampling, InvalidStop, InvalidToken


class LogitBias(Mapping[int, float]):
    """What is added to which token's logit: an immutable mapping, so that parameters can be hashed.

    Invariant: the entries never change; they were checked by the ``SamplingParams`` that hold them.
    """

    __slots__ = ("_entries",)

    def __init__(self, entries: Mapping[int, float]) -> None:
        self._entries = dict(entries)

    def __getitem__(self, token_id: int) -> float:
        return self._entries[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __hash__(self) -> int:
        return hash(frozenset(self._entries.items()))

    def __repr__(self) -> str:
        return f"LogitBias({self._entries})"


Normaliser = Callable[[str, Any], Any]
"""Takes a name and a value; returns what is stored."""


def number(low: float, high: float, *, low_is_allowed: bool = True) -> Normaliser:
    """Make the normaliser of a finite number in a range, stored as a float."""
    limit = f"a finite number {f'from {low:g}' if low_is_allowed else f'above {low:g}'} to {high:g}"

    def normalise(name: str, value: Any) -> float:
        # Why: NaN fails every comparison, so the range is asked for, not what lies outside it.
        if type(value) not in (int, float) or not (low < value <= high or (low_is_allowed and value == low)):
            raise InvalidSampling(name, value, limit)
        return float(value)

    return normalise


def integer(error: type[InvalidRequest], low: int, high: int, *, is_optional: bool = False) -> Normaliser:
    """Make the normaliser of an integer in a range, with an error of its own."""
    limit = f"an integer from {low} to {high}" + (" or None" if is_optional else "")

    def normalise(name: str, value: Any) -> int | None:
        if value is None and is_optional:
            return None
        if type(value) is not int or not low <= value <= high:
            raise error(name, value, limit)
        return value

    return normalise


def boolean(name: str, value: Any) -> bool:
    """Accept ``True`` and ``False``."""
    if type(value) is not bool:
        raise InvalidSampling(name, value, "True or False")
    return value


def early_stopping(name: str, value: Any) -> bool | Literal["never"]:
    """Accept ``True``, ``False`` and "never"."""
    if type(value) is bool:
        return value
    if type(value) is str and value == "never":
        return "never"
    raise InvalidSampling(name, value, 'True, False or "never"')


def stop_strings(name: str, value: Any) -> tuple[str, ...]:
    """Accept one string, or a list or tuple of them; stored as a tuple."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple):
        raise InvalidStop(name, value, "a string, or a list or tuple of strings")
    if len(texts) > MAX_STOP_STRINGS:
        raise InvalidStop(name, len(texts), f"at most {MAX_STOP_STRINGS} strings")
    for text in texts:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH or _holds_surrogate(text):
            raise InvalidStop(name, text, f"strings of 1 to {MAX_STOP_LENGTH} characters without surrogates")
    return tuple(texts)


def _holds_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _require_token_id(name: str, token_id: Any) -> None:
    if type(token_id) is not int or not 0 <= token_id <= MAX_COUNT:
        raise InvalidToken(name, token_id, "token ids: integers from 0 to the vocabulary's size - 1")


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Accept a list or tuple of token ids; stored as a tuple."""
    if not isinstance(value, list | tuple):
        raise InvalidStop(name, value, "a list or tuple of token ids")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise InvalidStop(name, len(value), f"at most {MAX_STOP_TOKEN_IDS} token ids")
    for token_id in value:
        _require_token_id(name, token_id)
    return tuple(value)


def logit_bias(name: str, value: Any) -> LogitBias | None:
    """Accept a mapping of token ids to numbers; stored as a ``LogitBias``."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidBias(name, value, "a mapping of token ids to numbers, or None")
    if len(value) > MAX_LOGIT_BIAS_ENTRIES:
        raise InvalidBias(name, len(value), f"at most {MAX_LOGIT_BIAS_ENTRIES} entries")
    entries = dict(islice(value.items(), MAX_LOGIT_BIAS_ENTRIES))
    for token_id, bias in entries.items():
        _require_token_id(name, token_id)
        if type(bias) not in (int, float) or not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise InvalidBias(name, bias, f"finite numbers from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}")
    return LogitBias({token_id: float(bias) for token_id, bias in entries.items()})


def with_integer_keys(bias: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return a bias with keys that are decimal strings as integers; what is none is left for the refusal."""
    if len(bias) > MAX_LOGIT_BIAS_ENTRIES:
        return bias
    return {_as_token_id(key): value for key, value in islice(bias.items(), MAX_LOGIT_BIAS_ENTRIES)}


def _as_token_id(key: Any) -> Any:
    is_decimal = isinstance(key, str) and len(key) <= len(str(MAX_COUNT)) and key.isascii() and key.isdigit()
    return int(key) if is_decimal else key
