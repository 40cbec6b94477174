"""How one request wants its tokens chosen. Frozen, and completely checked when it is made.

``config/field_rules.py`` has the rules for single values. What depends on the model or the prompt (vocabulary size,
room for the completion) is checked by ``requests/validation.py``. What the numbers do to logits is in
``execution/sampler.py``, and what beams do in ``requests/beam_search.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from pagedcore import errors
from pagedcore.config import field_rules, limits
from pagedcore.config.field_rules import BOOLEAN, EARLY_STOPPING, Check, integer, number
from pagedcore.config.keywords import refuses_unknown
from pagedcore.structured_output import StructuredOutput

if TYPE_CHECKING:
    from pagedcore.protocols import LogitsProcessor


@dataclass(frozen=True, init=False, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request; the names and meanings are the field's common ones.

    Completions that are chosen among several (``best_of``, ``beam_width``) are delivered together, at the end.
    Numbers are Python's own ``int`` and ``float``: booleans and NumPy scalars are refused. They act in this
    order: logits_processor, logit_bias, repetition_penalty, presence and frequency penalties, allowed_token_ids,
    bad_words, min_tokens, structured, temperature, top_k, top_p, min_p.

    Raises:
        InvalidRequest: a field is out of range; the subclass, ``what`` and the message say which and why.
        UnknownParameter: there is no parameter of a name; it is a ``TypeError`` too.
    """

    max_tokens: int | None = None
    """Most tokens of the completion, at least 1; ``None``: as many as the context has room for."""
    min_tokens: int = 0
    """No stop token or end token of the model is chosen before the completion has this many tokens, with ``ignore_eos``
    too; 0 to ``max_tokens``."""
    temperature: float = 0.0
    """Divides the logits, 0 to 10; 0 always takes the most likely token, the lowest id of equal ones."""
    top_k: int = 0
    """Keep this many of the most likely tokens, 1 to the vocabulary's size; 0: all."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities reach this sum, above 0 to 1; 1: all."""
    min_p: float = 0.0
    """Keep tokens at least this many times as probable as the most likely one, 0 to 1; 0: all."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token in the completion, -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time the completion has it, -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides positive, multiplies negative logits of tokens in prompt or completion, above 0 to 10; 1: off."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids, -100 to 100 each, at most 300 of them."""
    stop: tuple[str, ...] = ()
    """The completion ends before the first of these texts: one string, or up to 8, of 1 to 64 characters."""
    stop_outside: tuple[str | int, str | int] | None = None
    """Where ``stop`` does not act: between two markers at the beginning of the completion, of which each is a text of
    up to 64 characters or the id of a special token; an empty first one: from the beginning to the second one."""
    stop_token_ids: tuple[int, ...] = ()
    """The completion ends with the first of these tokens, at most 64, besides the model's own end tokens."""
    ignore_eos: bool = False
    """Continue past the model's own end tokens."""
    seed: int | None = None
    """Where the randomness starts, 0 to 2**63 - 1; ``None``: the engine derives one for the request."""
    n: int = 1
    """Completions of the same prompt, 1 to 16."""
    best_of: int | None = None
    """Compute this many completions, ``n`` to 16, and return the ``n`` best: those with the highest mean, over their
    tokens, of the log-probability under the model's own distribution, the first of equal ones; ``None``: ``n``. If
    one of them fails, the request fails."""
    beam_width: int = 1
    """Beam search with this many beams, ``n`` to 16; 1: off. ``num_beams``, as transformers calls it, is accepted
    too. It is deterministic and cannot be combined with ``stop`` or a parameter that shapes the distribution."""
    length_penalty: float = 1.0
    """A beam's score is the sum of its log-probabilities divided by its length to this power, -10 to 10."""
    early_stopping: bool | Literal["never"] = False
    """Beam search ends: ``True``, with ``beam_width`` ended beams; ``False``, when at the present length no beam
    can become better than these; "never", when at no length one can."""
    logprobs: int | None = None
    """Report each token's log-probability and this many alternatives, 0 to 20; ``None``: report nothing."""
    prompt_logprobs: int | None = None
    """Report the same for the prompt's tokens, once per request (``RequestOutput.prompt_logprobs``), with this many
    of the likeliest tokens at each position, 0 to 20. Such a prompt is computed even if it is in the prefix cache."""
    structured: StructuredOutput | None = None
    """What the completion has to look like: a JSON schema, a regular expression, a choice, a grammar; or a mapping of
    the fields of ``StructuredOutput``. It ends where nothing may follow. It cannot be combined with ``min_tokens``,
    ``ignore_eos`` or ``beam_width``; ``stop`` and ``stop_token_ids`` end it wherever they occur."""
    logits_processor: LogitsProcessor | None = None
    """Called before each token with the completion's token ids and a copy of its row of logits; returns the row that
    the other parameters act on. What it raises or returns wrongly ends this request only (``ProcessorFailed``). It runs
    on the engine's thread, so all requests wait for it. It cannot be combined with ``beam_width``."""
    bad_words: tuple[str, ...] = ()
    """No completion has these words where they are tokenised by themselves, with or without a space before: at most 128
    of up to 32 characters. The last token that would complete one is masked, as in vLLM. The engine turns them into
    ``bad_words_ids``."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """The same as sequences of token ids, at most 256 of up to 132 tokens."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens may come, 1 to 4,096; an end token only if it is one of them. ``None``: all."""
    include_stop_str_in_output: bool = False
    """Whether the text has the one of ``stop`` that ended it."""
    skip_special_tokens: bool = True
    """Whether special tokens, the end token among them, are left out of the text of the completion."""
    truncate_prompt_tokens: int | None = None
    """Keep so many of the last tokens of the prompt, or with -1 as many as leave room for ``max_tokens``, or for one
    token; ``None``: a prompt that is too long is refused. Tokens of a template or the beginning of a document may be
    among those that are cut off."""
    return_logits: bool = False
    """Return the logits that the model gave for each token, before anything changes them (``CompletionOutput.logits``,
    ``TokenLogprobs.logits``), at most 256 MiB of them for a request; ``logprobs`` is 0 then unless it is more. It
    cannot be combined with ``beam_width``."""

    # Why: written out, because more types are accepted than stored, and ``num_beams`` is no field of its own.
    @refuses_unknown("parameter name")
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
        stop_outside: Sequence[str | int] | None = None,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        seed: int | None = None,
        n: int = 1,
        best_of: int | None = None,
        beam_width: int = 1,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        structured: StructuredOutput | Mapping[str, Any] | None = None,
        logits_processor: LogitsProcessor | None = None,
        bad_words: Sequence[str] = (),
        bad_words_ids: Sequence[Sequence[int]] = (),
        allowed_token_ids: Sequence[int] | None = None,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        return_logits: bool = False,
        num_beams: int | None = None,
    ) -> None:
        given = dict(locals())
        if num_beams is not None:
            given["beam_width"] = _CHECKS["beam_width"]("num_beams", num_beams)
            # Why: ``dataclasses.replace`` passes every field, so the default width may not come from the caller.
            if _CHECKS["beam_width"]("beam_width", beam_width) not in (1, num_beams):
                allowed = f"{beam_width}, as beam_width: both are the same parameter"
                raise errors.TooManySequences("num_beams", num_beams, allowed)
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, given[name]))
        if self.return_logits and self.logprobs is None:
            object.__setattr__(self, "logprobs", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise errors.InvalidMinTokens("min_tokens", self.min_tokens, f"0 to max_tokens, {self.max_tokens} here")
        self._require_consistent()

    def _require_consistent(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            allowed = f"n to {limits.MAX_SEQUENCES_PER_REQUEST}, n is {self.n} here"
            raise errors.TooManySequences("best_of", self.best_of, allowed)
        if self.n > self.beam_width > 1:
            raise errors.TooManySequences("n", self.n, f"1 to beam_width, {self.beam_width} here")
        for name in _NOT_WITH_BEAMS if self.beam_width > 1 else ():
            default = type(self).__dataclass_fields__[name].default
            if getattr(self, name) != default:
                raise errors.InvalidSampling(name, getattr(self, name), f"{default!r} where beam_width is above 1")
        for name, off in (("min_tokens", 0), ("ignore_eos", False)) if self.structured is not None else ():
            if (value := getattr(self, name)) != off:
                raise errors.InvalidSampling(name, value, f"{off} with structured output",
                                             "The grammar decides where the completion ends.")
        for name in ("bad_words", "bad_words_ids", "allowed_token_ids") if self.structured is not None else ():
            if value := getattr(self, name):
                raise errors.InvalidSampling(name, value, "not given with structured output",
                                             "The grammar decides which tokens may come.")

    @property
    def num_beams(self) -> int:
        """Another name for ``beam_width``, here and as a keyword."""
        return self.beam_width

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
        ) or bool(self.bad_words_ids) or self.allowed_token_ids is not None

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> SamplingParams:
        """Make parameters from decoded JSON or any other mapping of names to values.

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
                raise errors.UnknownParameter.named("parameter name", name, NAMES)
        for name in LOCAL_NAMES:
            if (value := mapping.get(name)) is not None and value is not False:
                raise errors.InvalidSampling(name, value, "given to SamplingParams, in the engine's process, only")
        values = dict(mapping)
        if isinstance(values.get("logit_bias"), Mapping):
            values["logit_bias"] = field_rules.with_integer_keys(values["logit_bias"])
        return cls(**values)


def _function(name: str, value: Any) -> Any:
    if value is not None and not callable(value):
        raise errors.InvalidSampling(name, value, "a function of token ids and a row of logits, or None")
    return value


_NOT_WITH_BEAMS: Final = (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "stop", "best_of", "structured", "logits_processor", "bad_words", "bad_words_ids",
    "allowed_token_ids", "return_logits",
)
_CHECKS: Final[Mapping[str, Check]] = {
    "max_tokens": integer(1, limits.MAX_COUNT).or_none().raising(errors.InvalidMaxTokens),
    "min_tokens": integer(0, limits.MAX_COUNT).raising(errors.InvalidMinTokens),
    "temperature": number(0.0, limits.MAX_TEMPERATURE).raising(errors.InvalidSampling),
    "top_k": integer(0, limits.MAX_COUNT).raising(errors.InvalidSampling),
    "top_p": number(0.0, 1.0, above_low=True).raising(errors.InvalidSampling),
    "min_p": number(0.0, 1.0).raising(errors.InvalidSampling),
    "presence_penalty": number(-limits.MAX_PENALTY, limits.MAX_PENALTY).raising(errors.InvalidSampling),
    "frequency_penalty": number(-limits.MAX_PENALTY, limits.MAX_PENALTY).raising(errors.InvalidSampling),
    "repetition_penalty": number(0.0, limits.MAX_REPETITION_PENALTY, above_low=True).raising(errors.InvalidSampling),
    "logit_bias": field_rules.logit_bias,
    "stop": field_rules.stop_strings,
    "stop_outside": field_rules.stop_markers,
    "stop_token_ids": field_rules.token_ids,
    "ignore_eos": BOOLEAN.raising(errors.InvalidSampling),
    "seed": integer(0, limits.MAX_SEED).or_none().raising(errors.InvalidSeed),
    "n": integer(1, limits.MAX_SEQUENCES_PER_REQUEST).raising(errors.TooManySequences),
    "best_of": integer(1, limits.MAX_SEQUENCES_PER_REQUEST).or_none().raising(errors.TooManySequences),
    "beam_width": integer(1, limits.MAX_SEQUENCES_PER_REQUEST).raising(errors.TooManySequences),
    "length_penalty": number(-limits.MAX_LENGTH_PENALTY, limits.MAX_LENGTH_PENALTY).raising(errors.InvalidSampling),
    "early_stopping": EARLY_STOPPING.raising(errors.InvalidSampling),
    "logprobs": integer(0, limits.MAX_LOGPROBS).or_none().raising(errors.TooManyLogprobs),
    "prompt_logprobs": integer(0, limits.MAX_LOGPROBS).or_none().raising(errors.TooManyLogprobs),
    "structured": lambda name, value: None if value is None else StructuredOutput.from_mapping(value),
    "logits_processor": _function,
    "bad_words": field_rules.bad_words,
    "bad_words_ids": field_rules.bad_sequences,
    "allowed_token_ids": field_rules.allowed_token_ids,
    "include_stop_str_in_output": BOOLEAN.raising(errors.InvalidSampling),
    "skip_special_tokens": BOOLEAN.raising(errors.InvalidSampling),
    "truncate_prompt_tokens": field_rules.TRUNCATION.raising(errors.InvalidSampling),
    "return_logits": BOOLEAN.raising(errors.InvalidSampling),
}
LOCAL_NAMES: Final = ("logits_processor", "return_logits")
"""Parameters that only a caller in the engine's process may give."""
NAMES: Final = (*_CHECKS, "num_beams")
"""What a request may say of its sampling."""
