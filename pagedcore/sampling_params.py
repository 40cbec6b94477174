"""How one request wants its tokens chosen. Frozen, and completely checked when it is made.

What depends on the model or the prompt (vocabulary size, room for the answer) is checked at the door, by
``validation.py``; what the numbers do to logits is in ``execution/sampler.py``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from pagedcore.errors import (
    InvalidBias,
    InvalidMaxTokens,
    InvalidMinTokens,
    InvalidRequest,
    InvalidSampling,
    InvalidSeed,
    InvalidStop,
    InvalidToken,
    TooManyLogprobs,
    TooManySequences,
    UnknownParameter,
)
from pagedcore.limits import (
    MAX_COUNT,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_SEQUENCES_PER_REQUEST,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request; the names and meanings are the field's common ones.

    Numbers are Python's own ``int`` and ``float``: booleans and NumPy scalars are refused. They act in this
    order: logit_bias, repetition_penalty, presence and frequency penalties, min_tokens, temperature, top_k,
    top_p, min_p.

    Raises:
        InvalidRequest: a field is out of range; the subclass, ``what`` and the message say which and why.
    """

    max_tokens: int | None = None
    """Most tokens of the answer, at least 1; ``None``: as many as the context has room for."""
    min_tokens: int = 0
    """No stop token is chosen before the answer has this many tokens; 0 to ``max_tokens``."""
    temperature: float = 0.0
    """Divides the logits, 0 to 10; 0 always takes the most likely token, the lowest id of equal ones."""
    top_k: int = 0
    """Keep this many of the most likely tokens, 1 to the vocabulary's size; 0: all."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities reach this sum, above 0 to 1; 1: all."""
    min_p: float = 0.0
    """Keep tokens at least this many times as probable as the most likely one, 0 to 1; 0: all."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token the answer holds, -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time the answer holds it, -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides positive, multiplies negative logits of tokens in prompt or answer, above 0 to 10; 1: off."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids, -100 to 100 each, at most 300 of them."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these texts: one string, or up to 8, of 1 to 64 characters."""
    stop_token_ids: tuple[int, ...] = ()
    """The answer ends with the first of these tokens, at most 64, besides the model's own end tokens."""
    ignore_eos: bool = False
    """Go on past the model's own end tokens."""
    seed: int | None = None
    """Where the randomness starts, 0 to 2**63 - 1; ``None``: the engine derives one for the request."""
    n: int = 1
    """Answers to the same prompt, 1 to 16."""
    logprobs: int | None = None
    """Report each token's log-probability and this many alternatives, 0 to 20; ``None``: report nothing."""

    if TYPE_CHECKING:
        # Why: more types are accepted than stored, and a dataclass declares one type per field.
        def __init__(
            self,
            *,
            max_tokens: int | None = None,
            min_tokens: int = 0,
            temperature: float = 0.0,
            top_k: int = 0,
            top_p: float = 1.0,
            min_p: float = 0.0,
            presence_penalty: float = 0.0,
            frequency_penalty: float = 0.0,
            repetition_penalty: float = 1.0,
            logit_bias: Mapping[int, float] | None = None,
            stop: str | Sequence[str] = (),
            stop_token_ids: Sequence[int] = (),
            ignore_eos: bool = False,
            seed: int | None = None,
            n: int = 1,
            logprobs: int | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name, normalise in _NORMALISERS.items():
            object.__setattr__(self, name, normalise(name, getattr(self, name)))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidMinTokens("min_tokens", self.min_tokens, f"0 to max_tokens, {self.max_tokens} here")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> SamplingParams:
        """Make parameters from decoded JSON or any other mapping of names to values.

        ``logit_bias`` may have its token ids as decimal strings, the only keys JSON has.

        Raises:
            UnknownParameter: a name is not a parameter's; names are never ignored.
            InvalidRequest: as from the constructor.
        """
        if not isinstance(mapping, Mapping):
            raise UnknownParameter("sampling parameters", mapping, "a mapping of parameter names to values")
        for name in mapping:
            if name not in _NORMALISERS:
                known = ", ".join(_NORMALISERS)
                raise UnknownParameter("parameter name", name, f"one of {known}", _suggestion(name))
        values = dict(mapping)
        if isinstance(values.get("logit_bias"), Mapping):
            values["logit_bias"] = _with_integer_keys(values["logit_bias"])
        return cls(**values)


_Normaliser = Callable[[str, Any], Any]


def _number(low: float, high: float, *, low_is_allowed: bool = True) -> _Normaliser:
    limit = f"a finite number {f'from {low:g}' if low_is_allowed else f'above {low:g}'} to {high:g}"

    def normalise(name: str, value: Any) -> float:
        # Why: NaN fails every comparison, so the range is asked for, not what lies outside it.
        if type(value) not in (int, float) or not (low < value <= high or (low_is_allowed and value == low)):
            raise InvalidSampling(name, value, limit)
        return float(value)

    return normalise


def _integer(error: type[InvalidRequest], low: int, high: int, *, is_optional: bool = False) -> _Normaliser:
    limit = f"an integer from {low} to {high}" + (" or None" if is_optional else "")

    def normalise(name: str, value: Any) -> int | None:
        if value is None and is_optional:
            return None
        if type(value) is not int or not low <= value <= high:
            raise error(name, value, limit)
        return value

    return normalise


def _boolean(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise InvalidSampling(name, value, "True or False")
    return value


def _stop_strings(name: str, value: Any) -> tuple[str, ...]:
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


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise InvalidStop(name, value, "a list or tuple of token ids")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise InvalidStop(name, len(value), f"at most {MAX_STOP_TOKEN_IDS} token ids")
    for token_id in value:
        _require_token_id(name, token_id)
    return tuple(value)


def _logit_bias(name: str, value: Any) -> LogitBias | None:
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


def _with_integer_keys(bias: Mapping[Any, Any]) -> Mapping[Any, Any]:
    if len(bias) > MAX_LOGIT_BIAS_ENTRIES:
        return bias
    return {_as_token_id(key): value for key, value in islice(bias.items(), MAX_LOGIT_BIAS_ENTRIES)}


def _as_token_id(key: Any) -> Any:
    is_decimal = isinstance(key, str) and len(key) <= len(str(MAX_COUNT)) and key.isascii() and key.isdigit()
    return int(key) if is_decimal else key


def _suggestion(name: Any) -> str:
    # Why: the advice names a known parameter; the caller's own text is never repeated.
    close = difflib.get_close_matches(name[:32], _NORMALISERS, n=1) if isinstance(name, str) else []
    return f"Did you mean {close[0]}?" if close else ""


_NORMALISERS: Final[Mapping[str, _Normaliser]] = {
    "max_tokens": _integer(InvalidMaxTokens, 1, MAX_COUNT, is_optional=True),
    "min_tokens": _integer(InvalidMinTokens, 0, MAX_COUNT),
    "temperature": _number(0.0, MAX_TEMPERATURE),
    "top_k": _integer(InvalidSampling, 0, MAX_COUNT),
    "top_p": _number(0.0, 1.0, low_is_allowed=False),
    "min_p": _number(0.0, 1.0),
    "presence_penalty": _number(-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": _number(-MAX_PENALTY, MAX_PENALTY),
    "repetition_penalty": _number(0.0, MAX_REPETITION_PENALTY, low_is_allowed=False),
    "logit_bias": _logit_bias,
    "stop": _stop_strings,
    "stop_token_ids": _token_ids,
    "ignore_eos": _boolean,
    "seed": _integer(InvalidSeed, 0, MAX_SEED, is_optional=True),
    "n": _integer(TooManySequences, 1, MAX_SEQUENCES_PER_REQUEST),
    "logprobs": _integer(TooManyLogprobs, 0, MAX_LOGPROBS, is_optional=True),
}
