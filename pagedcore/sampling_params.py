"""How one request wants its tokens chosen. Frozen, and completely checked when it is made.

``config/field_rules.py`` has the rules for single values. What depends on the model or the prompt (vocabulary size,
room for the completion) is checked by ``requests/validation.py``. What the numbers do to logits is in
``execution/sampler.py``, and what beams do in ``requests/beam_search.py``.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import Field, InitVar, dataclass, field, fields, replace
from inspect import Parameter, Signature
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar

from pagedcore import errors
from pagedcore.config import field_rules, limits
from pagedcore.config.field_rules import BOOLEAN, EARLY_STOPPING, Check, FieldRule, integer, number, one_of
from pagedcore.config.keywords import refuses_unknown
from pagedcore.structured_output import StructuredOutput

if TYPE_CHECKING:
    from pagedcore.protocols import LogitsProcessor


_Given = TypeVar("_Given", contravariant=True)
_Stored = TypeVar("_Stored", covariant=True)


class Takes(Protocol[_Given, _Stored]):
    """Says to type checkers, and to no one else, that a field accepts more types than it stores."""

    def __get__(self, instance: object, owner: object = None, /) -> _Stored:
        """Return what is stored."""

    def __set__(self, instance: object, value: _Given, /) -> None:
        """Accept what a caller gives."""


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """What has to be known of a parameter besides its type; doors and files look at the fields."""

    check: Check
    """Returns what is stored, or raises the parameter's error."""
    with_beams: bool = True
    """Whether a beam search may have another value than the default."""
    is_local: bool = False
    """Whether only a caller in the engine's process may give it."""


def _parameter(default: Any, rule: FieldRule[Any] | Check, *, with_beams: bool = True, is_local: bool = False) -> Any:
    check = rule.raising(errors.InvalidSampling) if isinstance(rule, FieldRule) else rule
    return field(default=default, metadata={"facts": ParameterFacts(check, with_beams, is_local)})


def _function(name: str, value: Any) -> Any:
    if value is not None and not callable(value):
        raise errors.InvalidSampling(name, value, "a function of token ids and a row of logits, or None")
    return value


def _structured(_: str, value: Any) -> StructuredOutput | None:
    return None if value is None else StructuredOutput.from_mapping(value)


_MODE: Final = one_of("raw", "processed", elsewhere={"raw_logprobs": "raw", "processed_logprobs": "processed"})
"""With the words of vLLM."""


class _Remembers:
    """Holds what is no parameter, so that it is not compared, printed or iterated over with them."""

    __slots__ = ("given",)

    given: frozenset[str]
    """The parameters that the caller gave, whatever their values: the model's defaults do not replace them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams(_Remembers):
    """Sampling parameters of one request; the names and meanings are the field's common ones.

    Completions that are chosen among several (``best_of``, ``beam_width``) are delivered together, at the end.
    Numbers are Python's own ``int`` and ``float``: booleans and NumPy scalars are refused. They act in this
    order: logits_processor, logit_bias, repetition_penalty, presence and frequency penalties, allowed_token_ids,
    bad_words, no_repeat_ngram_size, min_tokens, suppress_tokens, begin_suppress_tokens, forced_eos_token_id,
    structured, temperature, top_k, top_p, min_p.

    Raises:
        InvalidRequest: a field is out of range; the subclass, ``what`` and the message say which and why.
        UnknownParameter: there is no parameter of a name; it is a ``TypeError`` too.
    """

    max_tokens: int | None = _parameter(None, integer(1, limits.MAX_COUNT).or_none().raising(errors.InvalidMaxTokens))
    """Most tokens of the completion, at least 1; ``None``: as many as the context has room for."""
    min_tokens: int = _parameter(0, integer(0, limits.MAX_COUNT).raising(errors.InvalidMinTokens))
    """No stop token or end token of the model is chosen before the completion has this many tokens, with ``ignore_eos``
    too; 0 to ``max_tokens``."""
    temperature: float = _parameter(0.0, number(0.0, limits.MAX_TEMPERATURE), with_beams=False)
    """Divides the logits, 0 to 10; 0 always takes the most likely token, the lowest id of equal ones."""
    top_k: int = _parameter(0, integer(0, limits.MAX_COUNT), with_beams=False)
    """Keep this many of the most likely tokens, 1 to the vocabulary's size; 0: all."""
    top_p: float = _parameter(1.0, number(0.0, 1.0, above_low=True), with_beams=False)
    """Keep the fewest most likely tokens whose probabilities reach this sum, above 0 to 1; 1: all."""
    min_p: float = _parameter(0.0, number(0.0, 1.0), with_beams=False)
    """Keep tokens at least this many times as probable as the most likely one, 0 to 1; 0: all."""
    presence_penalty: float = _parameter(0.0, number(-limits.MAX_PENALTY, limits.MAX_PENALTY), with_beams=False)
    """Subtracted once from the logit of every token in the completion, -2 to 2."""
    frequency_penalty: float = _parameter(0.0, number(-limits.MAX_PENALTY, limits.MAX_PENALTY), with_beams=False)
    """Subtracted from a token's logit once for each time the completion has it, -2 to 2."""
    repetition_penalty: float = _parameter(
        1.0, number(0.0, limits.MAX_REPETITION_PENALTY, above_low=True), with_beams=False)
    """Divides positive, multiplies negative logits of tokens in prompt or completion, above 0 to 10; 1: off."""
    logit_bias: Mapping[int, float] | None = _parameter(None, field_rules.logit_bias, with_beams=False)
    """Added to the logits of these token ids, -100 to 100 each, at most 300 of them."""
    stop: Takes[str | Sequence[str], tuple[str, ...]] = _parameter((), field_rules.stop_strings, with_beams=False)
    """The completion ends before the first of these texts: one string, or up to 8, of 1 to 64 characters."""
    stop_outside: Takes[Sequence[str | int] | None, tuple[str | int, str | int] | None] = _parameter(
        None, field_rules.stop_markers)
    """Where ``stop`` does not act: between two markers at the beginning of the completion, of which each is a text of
    up to 64 characters or the id of a special token; an empty first one: from the beginning to the second one."""
    stop_token_ids: Takes[Sequence[int], tuple[int, ...]] = _parameter((), field_rules.token_ids)
    """The completion ends with the first of these tokens, at most 64, besides the model's own end tokens."""
    ignore_eos: bool = _parameter(False, BOOLEAN)
    """Continue past the model's own end tokens."""
    seed: int | None = _parameter(None, integer(0, limits.MAX_SEED).or_none().raising(errors.InvalidSeed))
    """Where the randomness starts, 0 to 2**63 - 1; ``None``: the engine derives one for the request."""
    n: int = _parameter(1, integer(1, limits.MAX_SEQUENCES_PER_REQUEST).raising(errors.TooManySequences))
    """Completions of the same prompt, 1 to 16."""
    best_of: int | None = _parameter(
        None, integer(1, limits.MAX_SEQUENCES_PER_REQUEST).or_none().raising(errors.TooManySequences), with_beams=False)
    """Compute this many completions, ``n`` to 16, and return the ``n`` best: those with the highest mean, over their
    tokens, of the log-probability under the model's own distribution, the first of equal ones; ``None``: ``n``. If
    one of them fails, the request fails."""
    beam_width: int = _parameter(1, integer(1, limits.MAX_SEQUENCES_PER_REQUEST).raising(errors.TooManySequences))
    """Beam search with this many beams, ``n`` to 16; 1: off. ``num_beams``, as transformers calls it, is accepted
    too. It is deterministic and cannot be combined with ``stop`` or a parameter that shapes the distribution."""
    length_penalty: float = _parameter(1.0, number(-limits.MAX_LENGTH_PENALTY, limits.MAX_LENGTH_PENALTY))
    """A beam's score is the sum of its log-probabilities divided by its length to this power, -10 to 10."""
    early_stopping: bool | Literal["never"] = _parameter(False, EARLY_STOPPING)
    """Beam search ends: ``True``, with ``beam_width`` ended beams; ``False``, when at the present length no beam
    can become better than these; "never", when at no length one can."""
    logprobs: int | None = _parameter(None, integer(0, limits.MAX_LOGPROBS).or_none().raising(errors.TooManyLogprobs))
    """Report each token's log-probability and this many alternatives, 0 to 20; ``None``: report nothing."""
    prompt_logprobs: int | None = _parameter(
        None, integer(0, limits.MAX_LOGPROBS).or_none().raising(errors.TooManyLogprobs))
    """Report the same for the prompt's tokens, once per request (``RequestOutput.prompt_logprobs``), with this many
    of the likeliest tokens at each position, 0 to 20. Such a prompt is computed even if it is in the prefix cache."""
    structured: Takes[StructuredOutput | Mapping[str, Any] | None, StructuredOutput | None] = _parameter(
        None, _structured, with_beams=False)
    """What the completion has to look like: a JSON schema, a regular expression, a choice, a grammar; or a mapping of
    the fields of ``StructuredOutput``. It ends where nothing may follow. It cannot be combined with ``min_tokens``,
    ``ignore_eos`` or ``beam_width``; ``stop`` and ``stop_token_ids`` end it wherever they occur."""
    logits_processor: LogitsProcessor | None = _parameter(None, _function, with_beams=False, is_local=True)
    """Called before each token with the completion's token ids and a copy of its row of logits; returns the row that
    the other parameters act on. What it raises or returns wrongly ends this request only (``ProcessorFailed``). It runs
    on the engine's thread, so all requests wait for it. It cannot be combined with ``beam_width``."""
    bad_words: Takes[Sequence[str], tuple[str, ...]] = _parameter((), field_rules.bad_words, with_beams=False)
    """No completion has these words where they are tokenised by themselves, with or without a space before: at most 128
    of up to 32 characters. The last token that would complete one is masked, as in vLLM. The engine turns them into
    ``bad_words_ids``."""
    bad_words_ids: Takes[Sequence[Sequence[int]], tuple[tuple[int, ...], ...]] = _parameter(
        (), field_rules.bad_sequences, with_beams=False)
    """The same as sequences of token ids, at most 256 of up to 132 tokens."""
    allowed_token_ids: Takes[Sequence[int] | None, tuple[int, ...] | None] = _parameter(
        None, field_rules.allowed_token_ids, with_beams=False)
    """Only these tokens may come, 1 to 4,096; an end token only if it is one of them. ``None``: all."""
    include_stop_str_in_output: bool = _parameter(False, BOOLEAN)
    """Whether the text has the one of ``stop`` that ended it."""
    skip_special_tokens: bool = _parameter(True, BOOLEAN)
    """Whether special tokens, the end token among them, are left out of the text of the completion."""
    truncate_prompt_tokens: int | None = _parameter(None, field_rules.TRUNCATION)
    """Keep so many of the last tokens of the prompt, or with -1 as many as leave room for ``max_tokens``, or for one
    token; ``None``: a prompt that is too long is refused. Tokens of a template or the beginning of a document may be
    among those that are cut off."""
    suppress_tokens: Takes[Sequence[int], tuple[int, ...]] = _parameter((), field_rules.suppressed_tokens)
    """These tokens never come, at most 4,096, besides those of the model's ``generation_config.json``."""
    begin_suppress_tokens: Takes[Sequence[int], tuple[int, ...]] = _parameter(
        (), field_rules.suppressed_tokens, with_beams=False)
    """These tokens do not come first, at most 4,096."""
    no_repeat_ngram_size: int = _parameter(0, integer(0, limits.MAX_NGRAM), with_beams=False)
    """No so many tokens in a row come twice, in prompt and completion together, 1 to 64; 0: off."""
    forced_eos_token_id: Takes[int | Sequence[int] | None, tuple[int, ...] | None] = _parameter(
        None, field_rules.forced_tokens, with_beams=False)
    """The ``max_tokens``-th token is this one, or one of these, at most 64; ``None``: off."""
    return_logits: bool = _parameter(False, BOOLEAN, with_beams=False, is_local=True)
    """Return the logits that the model gave for each token, before anything changes them (``CompletionOutput.logits``,
    ``TokenLogprobs.logits``), at most 256 MiB of them for a request; ``logprobs`` is 0 then unless it is more. It
    cannot be combined with ``beam_width``."""
    logprobs_mode: Literal["raw", "processed"] = _parameter("raw", _MODE, with_beams=False)
    """Whose log-probabilities are reported of a completion: "raw", the model's own, or "processed", those of the
    distribution that the token was drawn from, after all of the above. Tokens that could not be drawn are no
    alternatives then; at temperature 0 it is the distribution at temperature 1 with all tokens that no mask forbids.
    It changes no token, and those of prompts are always the model's. "processed" cannot be combined with ``best_of``
    above ``n``, whose completions are compared by the model's own."""

    if TYPE_CHECKING:
        # Why a field there: its keyword is accepted too, and type checkers make the constructor of the fields.
        num_beams: Takes[int | None, int] = _parameter(None, integer(1, limits.MAX_SEQUENCES_PER_REQUEST))
    else:
        # Why: ``dataclasses.replace`` passes every field, and of such a pseudo-field what the old parameters have. This
        # is those themselves, so that what was not given stays so unless it is replaced.
        _origin: InitVar[SamplingParams | None] = field(default=None, repr=False)

        def __init__(self, *, _origin: SamplingParams | None = None, **given: Any) -> None:
            if not isinstance(_origin, SamplingParams | None):
                raise errors.UnknownParameter.named("parameter name", "_origin", NAMES)
            self._take(given)
            names = given.keys()
            if _origin is not None:
                changed = (name for name in names if given[name] is not getattr(_origin, name))
                names = _origin.given.union(changed)
            object.__setattr__(self, "given", frozenset(names))

        def __getstate__(self) -> list[Any]:
            return [*(getattr(self, name) for name in _FACTS), self.given]

        def __setstate__(self, state: list[Any]) -> None:
            for name, value in zip((*_FACTS, "given"), state, strict=True):
                object.__setattr__(self, name, value)

        @property
        def num_beams(self) -> int:
            """Another name for ``beam_width``, here and as a keyword."""
            return self.beam_width

    def _take(self, given: dict[str, Any]) -> None:
        if (num_beams := given.pop("num_beams", None)) is not None:
            check, width = _FACTS["beam_width"].check, given.get("beam_width", 1)
            given["beam_width"] = check("num_beams", num_beams)
            # Why: ``dataclasses.replace`` passes every field, so the default width may not come from the caller.
            if check("beam_width", width) not in (1, num_beams):
                allowed = f"{width}, as beam_width: both are the same parameter"
                raise errors.TooManySequences("num_beams", num_beams, allowed)
        for name, default, check in _CHECKS:
            object.__setattr__(self, name, check(name, given[name]) if name in given else default)
        if self.return_logits and self.logprobs is None:
            object.__setattr__(self, "logprobs", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise errors.InvalidMinTokens("min_tokens", self.min_tokens, f"0 to max_tokens, {self.max_tokens} here")
        self._require_consistent()

    def _require_consistent(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            allowed = f"n to {limits.MAX_SEQUENCES_PER_REQUEST}, n is {self.n} here"
            raise errors.TooManySequences("best_of", self.best_of, allowed)
        if self.logprobs_mode == "processed" and self.num_sequences > self.n and self.beam_width == 1:
            raise errors.InvalidSampling("logprobs_mode", self.logprobs_mode, "'raw' where best_of is above n")
        if self.n > self.beam_width > 1:
            raise errors.TooManySequences("n", self.n, f"1 to beam_width, {self.beam_width} here")
        for name, default, _ in _CHECKS if self.beam_width > 1 else ():
            if not _FACTS[name].with_beams and getattr(self, name) != default:
                raise errors.InvalidSampling(name, getattr(self, name), f"{default!r} where beam_width is above 1")
        for name, off in _NO_ENDS_STRUCTURED.items() if self.structured is not None else ():
            if (value := getattr(self, name)) != off:
                raise errors.InvalidSampling(name, value, f"{off} with structured output",
                                             "The grammar decides where the completion ends.")
        for name in _NOT_STRUCTURED if self.structured is not None else ():
            if value := getattr(self, name):
                raise errors.InvalidSampling(name, value, "not given with structured output",
                                             "The grammar decides which tokens may come.")

    @property
    def num_sequences(self) -> int:
        """Sequences that are computed at the same time."""
        return max(self.n, self.best_of or 1, self.beam_width)

    @property
    def num_initial_sequences(self) -> int:
        """Sequences that need a place in the waiting queue; a beam search starts with one."""
        return 1 if self.beam_width > 1 else self.num_sequences

    @property
    def has_candidates(self) -> bool:
        """Whether completions are chosen at the end, among more sequences than are returned."""
        return self.beam_width > 1 or self.num_sequences > self.n

    @property
    def adjusts_logits(self) -> bool:
        """Whether a processor, bias, penalties or masks of its own change the logits."""
        return self.logits_processor is not None or self.logit_bias is not None or self.repetition_penalty != 1.0 or (
            bool(self.presence_penalty or self.frequency_penalty)
        ) or bool(self.bad_words_ids) or self.allowed_token_ids is not None or self.no_repeat_ngram_size > 0 or (
            self.forced_eos_token_id is not None
        )

    def num_step_logprobs(self, num_ends: int) -> int | None:
        """Return how many of the likeliest tokens a step reports of a sequence that ``num_ends`` of them would end;
        ``None``: it reports nothing, not even of the chosen one."""
        if self.beam_width > 1:
            return max(self.beam_width + num_ends + len(self.suppress_tokens), self.logprobs or 0)
        return 0 if self.logprobs is None and self.has_candidates else self.logprobs

    def with_defaults(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return parameters that have these values where nothing was given; they count as given then.

        Those that cannot be combined with what was given are left out: of a beam search what shapes the distribution,
        of structured output what decides which tokens may come and where it ends. ``min_tokens`` is at most
        ``max_tokens``.
        """
        unfit = {*_NOT_STRUCTURED, *_NO_ENDS_STRUCTURED} if self.structured is not None else ()
        chosen = {
            name: value for name, value in defaults.items()
            if name not in self.given and name not in unfit and (self.beam_width == 1 or _FACTS[name].with_beams)
        }
        if not chosen:
            return self
        if self.max_tokens is not None and "min_tokens" in chosen:
            chosen["min_tokens"] = min(chosen["min_tokens"], self.max_tokens)
        made = replace(self, **chosen)
        object.__setattr__(made, "given", self.given.union(chosen))
        return made

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        """Make parameters from decoded JSON or any other mapping of names to values.

        ``defaults`` are values for names that the mapping does not have, which do not count as given.
        ``logit_bias`` may have its token ids as decimal strings, the only keys JSON has. As a mapping may come from
        another process, it cannot have a ``logits_processor``, which is code, nor ask for ``return_logits``.

        Raises:
            UnknownParameter: there is no parameter of a name; unknown names are never ignored.
            InvalidRequest: as from the constructor.
        """
        if not isinstance(mapping, Mapping):
            raise errors.UnknownParameter("sampling parameters", mapping, "a mapping of parameter names to values")
        for name in mapping:
            if name not in NAMES:
                raise errors.UnknownParameter.named("parameter name", name, tuple(_FACTS))
        for name in LOCAL_NAMES:
            if (value := mapping.get(name)) is not None and value is not False:
                raise errors.InvalidSampling(name, value, "given to SamplingParams, in the engine's process, only")
        values = dict(mapping)
        if isinstance(values.get("logit_bias"), Mapping):
            values["logit_bias"] = field_rules.with_integer_keys(values["logit_bias"])
        made = cls(**{**(defaults or {}), **values})
        if defaults:
            object.__setattr__(made, "given", made.given.difference(defaults.keys() - values.keys()))
        return made


def validate_params(params: object) -> SamplingParams:
    """Return sampling parameters, those of a greedy completion for ``None``. Raises ``InvalidSampling`` otherwise."""
    if params is None:
        return SamplingParams()
    # Safety: a subclass may have other values than those that were checked.
    if type(params) is not SamplingParams:
        advice = "SamplingParams.from_mapping takes a mapping."
        raise errors.InvalidSampling("params", params, "SamplingParams, or None", advice)
    return params


def _parameter_of(one: Field[Any]) -> Parameter:
    """Return a field as a keyword of the constructor, and let its type be what it stores."""
    accepted = stored = str(one.type)
    match ast.parse(stored, mode="eval").body:
        case ast.Subscript(value=ast.Name(id="Takes"), slice=ast.Tuple(elts=[given, kept])):
            accepted, stored = ast.unparse(given), ast.unparse(kept)
    SamplingParams.__annotations__[one.name] = one.type = stored
    return Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=accepted)


_FACTS: Final[Mapping[str, ParameterFacts]] = MappingProxyType(
    {one.name: one.metadata["facts"] for one in fields(SamplingParams)})
_NO_ENDS_STRUCTURED: Final[Mapping[str, Any]] = MappingProxyType({"min_tokens": 0, "ignore_eos": False})
"""What a grammar decides: the end, and below the tokens."""
_NOT_STRUCTURED: Final = (
    "bad_words", "bad_words_ids", "allowed_token_ids", "no_repeat_ngram_size", "forced_eos_token_id")
_CHECKS: Final = tuple((one.name, one.default, _FACTS[one.name].check) for one in fields(SamplingParams))
SamplingParams._origin = property(lambda params: params)  # type: ignore[attr-defined]
SamplingParams.__init__.__signature__ = Signature([  # type: ignore[attr-defined]
    Parameter("self", Parameter.POSITIONAL_OR_KEYWORD), *map(_parameter_of, fields(SamplingParams)),
    Parameter("num_beams", Parameter.KEYWORD_ONLY, default=None, annotation="int | None"),
], return_annotation="None")
SamplingParams.__init__ = refuses_unknown(  # type: ignore[method-assign]
    "parameter name", hidden=("_origin",))(SamplingParams.__init__)
LOCAL_NAMES: Final = tuple(name for name, facts in _FACTS.items() if facts.is_local)
"""Parameters that only a caller in the engine's process may give."""
NAMES: Final = (*_FACTS, "num_beams")
"""What a request may say of its sampling."""
