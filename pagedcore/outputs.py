"""What a caller gets back: completions, deltas of a stream, and what an engine says of requests. Plain frozen data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from pagedcore_kernels.interface import FloatArray

FinishReason = Literal["stop", "length", "abort", "error"]
_SHOWN: Final = 160
"""Characters of a completion that its ``repr`` has."""
_WAITS: Final = {
    "company": "it waits for company (min_batch_size)",
    "prefix": "another request computes the beginning that both share",
    "transfer": "KV blocks are on their way between host and device",
    "rows": "all rows of the batch are taken (max_num_seqs)",
    "tokens": "the token budget of a step is used up (max_num_batched_tokens)",
    "blocks": "too few KV blocks are free",
    "stall": "it runs, lacks a KV block, and waits for another sequence to end",
    "phase": "the present step has decode rows only (phases)",
    "tenant": "its tenant has as many rows or blocks as it may (policy_options)",
    "batch": "a static batch has to end first",
    "adapter": "its adapter is being loaded, or waits for a slot (max_adapters)",
    "new": "it starts with the next step",
    "stuck": "no plan can be made",
}
"""What the reasons of an ``Explanation`` say."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one token under the model's own (unmodified) distribution, or, with
    ``logprobs_mode="processed"``, under the one that it was drawn from."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely (token id, log-probability) pairs, best first."""
    logits: FloatArray | None = field(default=None, compare=False, repr=False)
    """With ``return_logits``: float32 [vocab_size], the model's own, read-only."""


class WeightsVersion(NamedTuple):
    """Which weights an engine computes with, as they were loaded."""

    number: int
    """0 for those that the engine was made with; each further load has a number that no other of this process has."""
    label: str = ""
    """What its caller calls it; several loads may have the same."""

    def __str__(self) -> str:
        """Return the label with the number behind it."""
        return f"{self.label}#{self.number}" if self.number else "0"


@dataclass(frozen=True, slots=True)
class TokenText:
    """What one token stands for."""

    text: str
    """For people: U+FFFD for what is only a part of a character, the vocabulary's name for a token without text."""
    utf8: bytes | None
    """The bytes that it adds to the text; ``None`` if it has none of its own (e.g. EOS) or they are unknown."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a request."""

    index: int
    """Which of the request's ``n`` completions this is."""
    text: str
    """The text so far, without special tokens and without a matched stop string unless the parameters ask for them."""
    token_ids: tuple[int, ...]
    """The tokens, with an end-of-sequence token that stopped it."""
    finish_reason: FinishReason | None = None
    """``None`` while running."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One entry per token when asked for."""
    error: Exception | None = None
    """Why, when ``finish_reason`` is "error"."""
    score: float | None = None
    """What the completion was chosen by, higher is better: with ``best_of`` the mean of its tokens' log-probabilities,
    in beam search their sum divided by the number of tokens to the power ``length_penalty``."""
    itl_s: tuple[float, ...] = field(default=(), compare=False)
    """Seconds from each token to the next; empty for a completion that was chosen among several at the end."""
    stop_reason: str | int | None = None
    """The stop text or the stop token of the request's own that ended it; ``None`` where it ended by itself, with the
    model's end token, or has not ended with "stop"."""
    weights: tuple[WeightsVersion, ...] = field(default=(), compare=False)
    """Of each token, the weights that it was drawn with; empty: those that the engine was made with, all of them."""

    def __repr__(self) -> str:
        """Return what fits a line: the text, shortened in the middle, and how it ended."""
        error = "" if self.error is None else f", {type(self.error).__name__}"
        return (f"CompletionOutput({self.index}, {_shortened(self.text)!r}, {len(self.token_ids)} tokens, "
                f"{self.finish_reason!r}{error})")

    @property
    def logits(self) -> FloatArray | None:
        """With ``return_logits``: the model's own logits of each token, float32 [tokens, vocab_size], a new array;
        ``None`` without it, and where a token has none because the completion came from a file."""
        import numpy as np

        rows = [one.logits for one in self.logprobs or ()]
        known = [row for row in rows if row is not None]
        return np.stack(known) if known and len(known) == len(rows) else None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of the engine's clock, and how often it was preempted."""

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    pauses_s: tuple[tuple[float, float | None], ...] = ()
    """When it was preempted, and when it ran again; ``None``: it waits still."""

    @property
    def queue_s(self) -> float | None:
        """Seconds from the arrival to the first step that computes it; ``None`` before it."""
        return None if self.first_scheduled_s is None else self.first_scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the arrival to the first token; ``None`` before it."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s


class Interval(NamedTuple):
    """An estimate of a moment, in seconds from the estimate on."""

    low: float
    likely: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """When a request would start and end if it came now, and what the estimate rests on.

    Each interval is meant to hold for 95 of 100 requests; its bounds come from the errors of the engine's own earlier
    quotes. With fewer than 50 of these (``num_quotes``) they are wide: from 0 to twice the worst case so far.
    """

    start: Interval
    """When the first step computes a part of it."""
    first_token: Interval
    end: Interval
    """Of the last of its completions."""
    is_length_known: bool
    """Whether each completion has exactly ``max_tokens`` tokens; if not, its length was learnt from others."""
    num_steps: int
    """Steps that the cost of a step was fitted to."""
    num_lengths: int
    """Finished completions that lengths were learnt from; with none, each counts as ``max_tokens`` long."""
    num_quotes: int
    """Earlier quotes whose errors the intervals come from."""
    is_exact: bool = False
    """Whether a dry run of the scheduler gave it, step by step, instead of a formula."""


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter that requests may name as their ``lora``."""

    name: str
    digest: str
    """Over its configuration and its numbers, 64 hexadecimal digits: the same wherever its files are."""
    num_bytes: int
    """What it takes of ``adapter_memory`` while it is in a slot."""
    rank: int
    """The largest rank of its matrices."""
    is_in_slot: bool
    """Whether a request that comes now starts without waiting for its files."""
    num_requests: int
    """Requests, and open sessions, that have it."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request took, all its completions together, in tokens."""

    num_prompt_tokens: int
    """Everything before the completion, counted once however many completions there are."""
    num_cached_tokens: int
    """Of these, the ones whose keys and values were already in the cache."""
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All completions of one request at one moment."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    is_finished: bool
    num_cached_tokens: int
    """Prompt tokens whose keys and values were already in the cache when this turn began."""
    metrics: RequestMetrics
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Where ``SamplingParams.prompt_logprobs`` asks for them: one entry for each of ``prompt_token_ids``, as far as
    they are computed. The first is ``None``, because nothing comes before it."""
    client_request_id: str | None = None
    """The caller's own label, ``request_id`` of the door that took the request."""
    vector: FloatArray | None = field(default=None, compare=False, repr=False)
    """Of a text that was embedded, once it is computed: as in ``Embedding``."""

    def __repr__(self) -> str:
        """Return what fits a notebook: a line, and one for each completion."""
        label = "" if self.client_request_id is None else f", label {self.client_request_id!r}"
        head = (f"RequestOutput({self.request_id!r}{label}, {len(self.prompt_token_ids)} prompt tokens, "
                f"{self.num_cached_tokens} of them cached, {'finished' if self.is_finished else 'running'}")
        return "".join([head, *(f",\n    {one!r}" for one in self.outputs), ")"])

    @property
    def usage(self) -> Usage:
        """What the request has taken."""
        num_output_tokens = sum(len(one.token_ids) for one in self.outputs)
        return Usage(len(self.prompt_token_ids), self.num_cached_tokens, num_output_tokens)

    def raise_for_error(self) -> None:
        """Raise the error of the first completion that has one."""
        for completion in self.outputs:
            if completion.error is not None:
                raise completion.error


@dataclass(frozen=True, slots=True)
class CompletionScore:
    """How likely a given completion is behind its prompt, under the model's own distribution or another one."""

    token_ids: tuple[int, ...]
    """Of the completion."""
    logprobs: tuple[float, ...]
    """The log-probability of each of them, given everything before it; minus infinity for one that would not be drawn.
    """
    num_prompt_tokens: int
    num_cached_tokens: int
    """Tokens at the beginning whose keys and values were already in the cache."""

    @property
    def total(self) -> float:
        """The log-probability of the whole completion."""
        return math.fsum(self.logprobs)

    @property
    def mean(self) -> float:
        """The same for each token, by which completions of different lengths are compared."""
        return self.total / len(self.logprobs)


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of one text. NumPy takes it for its vector, and several for a matrix: ``numpy.array(embeddings)``."""

    vector: FloatArray = field(compare=False, repr=False)
    """float32 [dimensions], read-only."""
    num_prompt_tokens: int
    """Tokens of the text, with its prompt and what the tokenizer adds."""
    num_cached_tokens: int
    """Of these, the ones whose keys and values were already in the cache."""
    metrics: RequestMetrics = field(compare=False, repr=False)
    """When things happened to it."""

    def __array__(self, dtype: object = None, copy: bool | None = None) -> FloatArray:
        import numpy as np

        return np.array(self.vector, dtype=dtype, copy=copy is not False)  # type: ignore[call-overload,no-any-return]

    def __len__(self) -> int:
        return len(self.vector)


@dataclass(frozen=True, slots=True)
class Classification:
    """How likely each class of a text is."""

    labels: tuple[str, ...] = field(repr=False)
    """The names of the classes, as the model's configuration has them."""
    probs: tuple[float, ...]
    """The probability of each: of one among them, or of each by itself; numbers of a regression are as they are."""
    logits: tuple[float, ...] = field(repr=False)
    """The numbers that they were made of."""
    num_prompt_tokens: int
    """Tokens of the text, with what the tokenizer adds."""
    num_cached_tokens: int
    """Of these, the ones whose keys and values were already in the cache."""
    metrics: RequestMetrics = field(compare=False, repr=False)
    """When things happened to it."""

    @property
    def label(self) -> str:
        """The name of the most likely class."""
        return self.labels[self.probs.index(max(self.probs))]

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class PairScore:
    """How relevant a document is to a query."""

    index: int
    """The place of the document, or of the pair, in the call."""
    score: float
    """The relevance, higher is better: from 0 to 1, unless the model's directory says otherwise."""
    logit: float = field(repr=False)
    """The number that it was made of; of a model that answers yes or no, by how much the logit of yes is larger."""
    num_prompt_tokens: int
    """Tokens of the query and the document together, with what is written around them."""
    num_cached_tokens: int
    """Of these, the ones whose keys and values were already in the cache."""
    metrics: RequestMetrics = field(compare=False, repr=False)
    """When things happened to it."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What was added to one completion since its last delta; concatenated texts are the completion's text."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: Exception | None = None
    num_prompt_tokens: int = 0
    usage: Usage | None = None
    """On the last delta of a stream: what the whole request took."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """On the last delta of a stream, if asked for: as in ``RequestOutput``."""
    metrics: RequestMetrics | None = field(default=None, compare=False)
    """On the last delta of a stream: when things happened to the request."""
    itl_s: tuple[float, ...] = field(default=(), compare=False)
    """On the last delta of a completion: as in ``CompletionOutput``."""
    stop_reason: str | int | None = None
    """On the last delta of a completion: as in ``CompletionOutput``."""
    weights: tuple[WeightsVersion, ...] = field(default=(), compare=False)
    """Of each token: as in ``CompletionOutput``."""


def _shortened(text: str) -> str:
    half = _SHOWN // 2
    return text if len(text) <= _SHOWN else f"{text[:half]} ... {text[-half:]}"


class Holder(NamedTuple):
    """A request that holds KV blocks."""

    request_id: str
    num_blocks: int
    since_s: float
    """Seconds since it first started."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where a request stands; ``str`` gives one line. For operators: it names other requests by the engine's ids."""

    request_id: str
    state: str
    """"waiting", "prefill", "decode", "finished" or "unknown"; "held": an ``AsyncEngine``'s queue has no room yet."""
    reason: str = ""
    """Why it does not compute now, as the keys of ``StepStats.waits``, or "stuck"; empty if it does."""
    waited_s: float = 0.0
    """Seconds since it arrived, or since it was preempted last, if it waits."""
    waits_s: tuple[tuple[str, float], ...] = ()
    """These seconds by reason, longest first, as far back as is known."""
    num_before: int = 0
    """Sequences that wait before it."""
    num_preemptions: int = 0
    num_blocks: int = 0
    """KV blocks that it holds."""
    num_lacking: int = 0
    """KV blocks that it would need now beyond those."""
    num_available: int = 0
    """KV blocks without a holder."""
    num_pool_blocks: int = 0
    holders: tuple[Holder, ...] = ()
    """Who holds blocks, most first, at most eight."""

    def __str__(self) -> str:
        if not self.reason:
            return f"{self.state}, {self.num_blocks} KV blocks"
        parts = [f"{self.state} {self.waited_s:.1f} s: {_WAITS.get(self.reason, self.reason)}"]
        if self.holders:
            held = sum(one.num_blocks for one in self.holders)
            oldest_s = max(one.since_s for one in self.holders)
            parts.append(
                f"{len(self.holders)} requests hold {held} of {self.num_pool_blocks} blocks, for up to "
                f"{oldest_s:.1f} s; {self.num_available} are available, it lacks {self.num_lacking}"
            )
        if self.num_before:
            parts.append(f"{self.num_before} sequences wait before it")
        if self.num_preemptions:
            parts.append(f"it was preempted {self.num_preemptions} times")
        if len(self.waits_s) > 1:
            parts.append("so far " + ", ".join(f"{reason} {seconds:.1f} s" for reason, seconds in self.waits_s))
        return "; ".join(parts)
