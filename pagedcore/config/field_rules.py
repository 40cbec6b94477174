"""What one field accepts, how it is stored, and what a refusal says; its users choose the error."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar

from pagedcore.config import limits
from pagedcore.errors import (
    InvalidBias,
    InvalidConfig,
    InvalidRequest,
    InvalidSampling,
    InvalidStop,
    InvalidToken,
    describe,
    did_you_mean,
    show,
)

_T = TypeVar("_T")
NO_NAMES: Final[Mapping[str, str]] = MappingProxyType({})
_LONGEST_WORD: Final = 64
_LARGEST: Final = sys.float_info.max
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_DECIMAL: Final = re.compile(f"[0-9]{{1,{len(str(limits.MAX_COUNT))}}}")

MakeError = Callable[[str, Any, str, str], Exception]
"""Makes the error for a field's name, its value, what is allowed, and advice: ``InvalidRequest`` and most of its kinds.
"""
Check = Callable[[str, Any], Any]
"""Takes a field's name and value; returns what is stored, or raises the field's error."""


def invalid_setting(name: str, value: Any, limit: str, advice: str = "") -> InvalidConfig:
    """Make the error of a refused setting, which shows it."""
    return InvalidConfig(f"{name}: got {show(value)}, allowed is {limit}. {advice}".rstrip())


def invalid_secret(name: str, value: Any, limit: str, advice: str = "") -> InvalidConfig:
    """Make the error of a refused setting that is a secret."""
    return InvalidConfig(f"{name}: got {describe(value)}, allowed is {limit}. {advice}".rstrip())


@dataclass(frozen=True, slots=True)
class FieldRule(Generic[_T]):
    """What one field accepts: ``accepts`` decides, ``limit`` says it in an error, ``stored`` converts the value, and
    ``advise`` says what may have been meant by one that is not accepted.
    """

    accepts: Callable[[Any], bool]
    limit: str
    stored: Callable[[Any], _T] = lambda value: value
    advise: Callable[[Any], str] = lambda value: ""

    def check(self, name: str, value: Any, error: MakeError = InvalidRequest) -> _T:
        """Return what is stored for a value; raise ``error(name, value, limit, advice)`` if it is not accepted."""
        if not self.accepts(value):
            raise error(name, value, self.limit, self.advise(value))
        return self.stored(value)

    def raising(self, error: MakeError) -> Check:
        """Return the check of this rule with an error of its own."""
        return lambda name, value: self.check(name, value, error)

    def or_none(self) -> FieldRule[_T | None]:
        """Return a rule that also accepts ``None``."""
        return FieldRule(
            lambda value: value is None or self.accepts(value), f"{self.limit}, or None",
            lambda value: None if value is None else self.stored(value), self.advise,
        )


def integer(low: int, high: int) -> FieldRule[int]:
    """Accept integers in a range, no booleans."""
    return FieldRule(lambda value: type(value) is int and low <= value <= high, f"an integer from {low} to {high}")


def number(low: float, high: float = _LARGEST, *, above_low: bool = False) -> FieldRule[float]:
    """Accept Python's own finite numbers in a range, without ``low`` itself if ``above_low``; stored as floats."""
    return _in_range(low, high, above_low, lambda value: type(value) in (int, float), "a finite number")


def seconds(low: float, high: float = _LARGEST, *, above_low: bool = False) -> FieldRule[float]:
    """Accept a duration: like ``number``, but also subclasses of ``float``, as ``numpy.float64`` is."""
    return _in_range(low, high, above_low, lambda value: isinstance(value, int | float) and not isinstance(value, bool),
                     "a finite number of seconds")


def _in_range(
    low: float, high: float, above_low: bool, is_number: Callable[[Any], bool], what: str
) -> FieldRule[float]:
    words = f"{what} {'above' if above_low else 'from'} {low:.15g}" + (f" to {high:.15g}" if high < _LARGEST else "")
    # Why: NaN fails every comparison, so the test is for being inside the range.
    return FieldRule(
        lambda value: is_number(value) and (low < value <= high or (value == low and not above_low)), words, float
    )


def one_of(*choices: str, elsewhere: Mapping[str, str] = NO_NAMES) -> FieldRule[Any]:
    """Accept one of several words; ``elsewhere`` has those that other projects use for them, which are advised on."""
    return FieldRule(lambda value: isinstance(value, str) and value in choices, f"one of {', '.join(choices)}",
                     advise=partial(_nearest, choices, elsewhere))


def matching(pattern: str, limit: str, *examples: str, elsewhere: Mapping[str, str] = NO_NAMES) -> FieldRule[str]:
    """Accept text that a regular expression matches as a whole; the rest is for advice, as of ``one_of``."""
    compiled = re.compile(pattern)
    return FieldRule(lambda value: isinstance(value, str) and compiled.fullmatch(value) is not None, limit,
                     advise=partial(_nearest, examples, elsewhere))


def _nearest(choices: Sequence[str], elsewhere: Mapping[str, str], given: Any) -> str:
    word = given.strip().lower() if isinstance(given, str) and len(given) < _LONGEST_WORD else ""
    return f"Did you mean {elsewhere[word]}?" if word in elsewhere else did_you_mean(word, choices)


COUNT: Final = integer(1, limits.MAX_COUNT)
PRIORITY: Final = integer(-limits.MAX_PRIORITY, limits.MAX_PRIORITY)
NAME: Final[FieldRule[str]] = FieldRule(lambda value: isinstance(value, str) and bool(value), "a name")
TEMPLATE: Final[FieldRule[str]] = FieldRule(
    lambda value: isinstance(value, str) and 1 <= len(value) <= limits.MAX_TEMPLATE_LENGTH
    and not _SURROGATE.search(value), f"the text of a template, of 1 to {limits.MAX_TEMPLATE_LENGTH} characters"
)
OPTIONS: Final[FieldRule[Mapping[str, Any]]] = FieldRule(
    lambda value: isinstance(value, Mapping) and all(isinstance(name, str) for name in value), "names with values"
)
BOOLEAN: Final[FieldRule[bool]] = FieldRule(lambda value: type(value) is bool, "True or False")
EARLY_STOPPING: Final[FieldRule[Any]] = FieldRule(
    lambda value: type(value) is bool or (type(value) is str and value == "never"), 'True, False or "never"'
)
LABEL: Final[FieldRule[str]] = FieldRule(
    lambda label: isinstance(label, str) and 1 <= len(label) <= limits.MAX_REQUEST_ID_LENGTH and label.isprintable(),
    f"printable text of 1 to {limits.MAX_REQUEST_ID_LENGTH} characters",
)
ADAPTER_NAME: Final = matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
                               "1 to 64 letters, digits, and _ - . behind the first of them")
ADAPTERS: Final[FieldRule[Mapping[str, Any]]] = FieldRule(
    lambda value: isinstance(value, Mapping) and len(value) <= limits.MAX_ADAPTERS
    and all(ADAPTER_NAME.accepts(name) and isinstance(place, str | os.PathLike) for name, place in value.items()),
    f"up to {limits.MAX_ADAPTERS} names of {ADAPTER_NAME.limit}, each with a directory",
)
SECRET: Final[FieldRule[Any]] = FieldRule(
    lambda value: isinstance(value, str | bytes) and 16 <= len(value) <= 1024 and not (
        isinstance(value, str) and _SURROGATE.search(value)
    ), "a secret of 16 to 1024 characters or bytes"
)
_TOKEN_ID: Final[FieldRule[int]] = FieldRule(
    integer(0, limits.MAX_COUNT).accepts, "token ids: integers from 0 to the vocabulary's size - 1"
)
_STOP: Final[FieldRule[str]] = FieldRule(
    lambda text: isinstance(text, str) and 1 <= len(text) <= limits.MAX_STOP_LENGTH and not _SURROGATE.search(text),
    f"strings of 1 to {limits.MAX_STOP_LENGTH} characters without surrogates",
)
_BAD_WORD: Final[FieldRule[str]] = FieldRule(
    lambda text: isinstance(text, str) and 1 <= len(text) <= limits.MAX_BAD_WORD_LENGTH
    and bool(text.strip()) and not _SURROGATE.search(text),
    f"words of 1 to {limits.MAX_BAD_WORD_LENGTH} characters without surrogates",
)
TRUNCATION: Final[FieldRule[Any]] = FieldRule(
    lambda value: value is None or (type(value) is int and (value == -1 or 1 <= value <= limits.MAX_COUNT)),
    f"an integer from 1 to {limits.MAX_COUNT}, -1 for what the context has room for, or None",
)
_BIAS: Final = number(-limits.MAX_LOGIT_BIAS, limits.MAX_LOGIT_BIAS)


class LogitBias(Mapping[int, float]):
    """The numbers added to tokens' logits: an immutable mapping, so that parameters can be hashed."""

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


def stop_strings(name: str, value: Any) -> tuple[str, ...]:
    """Accept one string, or a list or tuple of them; stored as a tuple."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple):
        raise InvalidStop(name, value, "a string, or a list or tuple of strings")
    if len(texts) > limits.MAX_STOP_STRINGS:
        raise InvalidStop(name, len(texts), f"at most {limits.MAX_STOP_STRINGS} strings")
    return tuple(_STOP.check(name, text, InvalidStop) for text in texts)


def stop_markers(name: str, value: Any) -> tuple[str | int, str | int] | None:
    """Accept two markers, each a text or a token id, of which the first may be empty; stored as a tuple."""
    if value is None:
        return None
    limit = f"None, or two of them, each a text of up to {limits.MAX_STOP_LENGTH} characters or a token id"
    if not isinstance(value, list | tuple) or len(value) != 2 or value[1] == "":
        raise InvalidStop(name, value, limit)
    for marker in value:
        is_text = isinstance(marker, str) and len(marker) <= limits.MAX_STOP_LENGTH and not _SURROGATE.search(marker)
        if not is_text and not (type(marker) is int and 0 <= marker <= limits.MAX_COUNT):
            raise InvalidStop(name, marker, limit)
    return value[0], value[1]


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Accept a list or tuple of token ids; stored as a tuple."""
    if not isinstance(value, list | tuple):
        raise InvalidStop(name, value, "a list or tuple of token ids")
    if len(value) > limits.MAX_STOP_TOKEN_IDS:
        raise InvalidStop(name, len(value), f"at most {limits.MAX_STOP_TOKEN_IDS} token ids")
    return tuple(_TOKEN_ID.check(name, token_id, InvalidToken) for token_id in value)


def bad_words(name: str, value: Any) -> tuple[str, ...]:
    """Accept a list or tuple of words; stored as a tuple."""
    if not isinstance(value, list | tuple):
        raise InvalidSampling(name, value, "a list or tuple of strings")
    if len(value) > limits.MAX_BAD_WORDS:
        raise InvalidSampling(name, len(value), f"at most {limits.MAX_BAD_WORDS} words")
    return tuple(_BAD_WORD.check(name, word, InvalidSampling) for word in value)


def bad_sequences(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """Accept a list or tuple of lists or tuples of token ids; stored as tuples."""
    if not isinstance(value, list | tuple) or not all(isinstance(one, list | tuple) for one in value[:1024]):
        raise InvalidSampling(name, value, "a list of lists of token ids")
    if len(value) > limits.MAX_BAD_SEQUENCES:
        raise InvalidSampling(name, len(value), f"at most {limits.MAX_BAD_SEQUENCES} sequences")
    for one in value:
        if not 1 <= len(one) <= limits.MAX_BAD_SEQUENCE_LENGTH:
            raise InvalidSampling(name, len(one), f"sequences of 1 to {limits.MAX_BAD_SEQUENCE_LENGTH} token ids")
    return tuple(tuple(_TOKEN_ID.check(name, token_id, InvalidToken) for token_id in one) for one in value)


def allowed_token_ids(name: str, value: Any) -> tuple[int, ...] | None:
    """Accept a list or tuple of at least one token id; stored as a tuple in ascending order."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= limits.MAX_ALLOWED_TOKEN_IDS:
        given = len(value) if isinstance(value, list | tuple) else value
        raise InvalidSampling(name, given, f"a list of 1 to {limits.MAX_ALLOWED_TOKEN_IDS} token ids, or None")
    return tuple(sorted({_TOKEN_ID.check(name, token_id, InvalidToken) for token_id in value}))


def suppressed_tokens(name: str, value: Any) -> tuple[int, ...]:
    """Accept a list or tuple of token ids; stored as a tuple in ascending order."""
    if not isinstance(value, list | tuple) or len(value) > limits.MAX_SUPPRESSED_TOKENS:
        given = len(value) if isinstance(value, list | tuple) else value
        raise InvalidSampling(name, given, f"a list of up to {limits.MAX_SUPPRESSED_TOKENS} token ids")
    return tuple(sorted({_TOKEN_ID.check(name, token_id, InvalidToken) for token_id in value}))


def forced_tokens(name: str, value: Any) -> tuple[int, ...] | None:
    """Accept a token id, or a list or tuple of at least one; stored as a tuple in ascending order."""
    if value is None:
        return None
    ids = value if isinstance(value, list | tuple) else (value,)
    if not 1 <= len(ids) <= limits.MAX_STOP_TOKEN_IDS:
        allowed = f"a token id, a list of 1 to {limits.MAX_STOP_TOKEN_IDS} of them, or None"
        raise InvalidSampling(name, len(ids), allowed)
    return tuple(sorted({_TOKEN_ID.check(name, token_id, InvalidToken) for token_id in ids}))


def logit_bias(name: str, value: Any) -> LogitBias | None:
    """Accept a mapping of token ids to numbers; stored as a ``LogitBias``."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidBias(name, value, "a mapping of token ids to numbers, or None")
    if len(value) > limits.MAX_LOGIT_BIAS_ENTRIES:
        raise InvalidBias(name, len(value), f"at most {limits.MAX_LOGIT_BIAS_ENTRIES} entries")
    return LogitBias({
        _TOKEN_ID.check(name, token_id, InvalidToken): _BIAS.check(name, bias, InvalidBias)
        for token_id, bias in islice(value.items(), limits.MAX_LOGIT_BIAS_ENTRIES)
    })


def with_integer_keys(bias: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return a bias with its decimal strings among the keys as integers; ``logit_bias`` refuses other keys."""
    if len(bias) > limits.MAX_LOGIT_BIAS_ENTRIES:
        return bias
    entries = islice(bias.items(), limits.MAX_LOGIT_BIAS_ENTRIES)
    return {int(key) if isinstance(key, str) and _DECIMAL.fullmatch(key) else key: value for key, value in entries}
