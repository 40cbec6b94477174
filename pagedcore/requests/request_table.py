"""The engine's requests: made, numbered and seeded here, found again, and continued by further turns.

Every id given out is made here, so that no caller can name another's request. What becomes of a request's tokens is
``output_processor``'s business; a conversation as its caller sees it is in ``sessions``.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final

from pagedcore.errors import EngineAsleep, InvalidMaxTokens, InvalidRequest, RequestStateError, WeightsIncomplete
from pagedcore.lora.registry import AdapterRegistry, LoadedAdapter
from pagedcore.outputs import FinishReason, RequestMetrics, TokenLogprobs, WeightsVersion
from pagedcore.protocols import Clock, Constraint
from pagedcore.request_options import RequestOptions
from pagedcore.requests.candidate_groups import SEED_RANGE, SEED_STRIDE
from pagedcore.requests.input_processor import InputProcessor, ProcessedRequest, Prompt
from pagedcore.requests.output_processor import OutputProcessor
from pagedcore.requests.request import Request, RequestOwner
from pagedcore.requests.validation import index_of_completion
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.sequence import Sequence, SequenceStatus

_AFTER_ALL: Final = 2**62
"""Id and arrival of what is only asked about: later than all that came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSnapshot:
    """A sequence between two turns as plain values: enough to continue it in another request, engine or process.

    The randomness of a completion is a function of seed and position, its text a function of its tokens, so neither a
    sampler's nor a detokenizer's state is kept; both are made again.

    Invariant: ``1 <= num_prompt_tokens <= len(token_ids)``.
    """

    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    """Tokens before the latest completion."""
    params: SamplingParams
    """Of the latest turn."""
    max_tokens: int
    """Most tokens of the latest completion."""
    seed: int
    finish_reason: FinishReason
    """How the latest completion ended; "abort" for one that was cut off and can be completed."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """As far as they are known; they are in no file, and are computed again for a turn that asks for them."""
    weights: tuple[tuple[int, WeightsVersion], ...] = ()
    """As of a ``Sequence``; in no file."""

    @classmethod
    def of(cls, sequence: Sequence) -> SequenceSnapshot:
        """Copy a sequence; a completion that has not ended counts as cut off here."""
        return cls(
            token_ids=tuple(sequence.token_ids), num_prompt_tokens=sequence.num_prompt_tokens, params=sequence.params,
            max_tokens=sequence.max_tokens, seed=sequence.seed, finish_reason=sequence.finish_reason or "abort",
            logprobs=tuple(sequence.logprobs), prompt_logprobs=tuple(sequence.prompt_logprobs or ()),
            weights=sequence.weights,
        )


@dataclass(eq=False, repr=False)
class RequestTable:
    """All requests that were accepted and not removed.

    Invariant: no two requests of one salt have the same label.
    """

    owner: RequestOwner
    inputs: InputProcessor
    outputs: OutputProcessor
    scheduler: Scheduler
    sequence_ids: Iterator[int]
    clock: Clock
    seed: int
    """Requests without a seed of their own are seeded from this one, by their arrival."""
    shares_prefixes: bool
    adapters: AdapterRegistry
    num_short_tokens: int | None = None
    """As of a ``Sequence``: what the model says."""
    weights: WeightsVersion = field(default=WeightsVersion(0), init=False)
    """What the model computes with."""
    lacks_weights: bool = field(default=False, init=False)
    """Whether it has some of these and some of those, so that every turn is refused."""
    sleep_level: int = field(default=0, init=False)
    """As of ``EngineAsleep``, so that every turn is refused; 0: it is awake."""
    _by_id: dict[str, Request] = field(default_factory=dict, init=False)
    _labels: set[tuple[bytes, str | None]] = field(default_factory=set, init=False)
    _arrivals: Iterator[int] = field(default_factory=lambda: count(1), init=False)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._by_id.values()))

    def find(self, request_id: str) -> Request | None:
        """Return the request with exactly this id. Raises ``InvalidRequest`` for an id that is no text."""
        if not isinstance(request_id, str):
            raise InvalidRequest("request_id", request_id, "text, as a request's request_id is")
        return self._by_id.get(request_id)

    def labelled(self, label: str, salt: str | bytes | None) -> Request | None:
        """Return the request that its caller has given a label, under the caller's salt. Raises ``InvalidSalt``."""
        wanted = (RequestOptions(cache_salt=salt).salt, label)
        if wanted not in self._labels:
            return None
        return next((one for one in self if (one.options.salt, one.options.request_id) == wanted), None)

    def accept(
        self, processed: ProcessedRequest, accepted: list[Request] | None = None, held_s: float = 0.0
    ) -> Request:
        """Make a request with one sequence per completion, let it wait, and append it to ``accepted``.

        It arrived ``held_s`` seconds ago, and its time limits began there.

        Raises ``InvalidRequest`` if its label is taken, ``UnknownAdapter`` if its adapter is not loaded any more,
        ``EngineOverloaded``; then nothing changed.
        """
        self._require_weights()
        options, params = processed.options, processed.params
        adapter = None if options.lora is None else self.adapters.find(options.lora)
        label = (options.salt, options.request_id)
        if label in self._labels:
            raise InvalidRequest(
                "request_id", options.request_id, "a label that no request of the same salt has at present",
                "Remove the other request first, or choose another label.",
            )
        arrival, request_id = next(self._arrivals), secrets.token_hex(16)
        seed = params.seed if params.seed is not None else self.seed + arrival * SEED_STRIDE
        arrival_s = self.clock.now() - held_s
        root, seen = self._root(options.salt, request_id, self.shares_prefixes, adapter), options.without_salt()
        sequences = self._new_sequences(
            processed, params.n, self.sequence_ids, (arrival, arrival_s), root, seen, seed, adapter)
        if params.prompt_logprobs is not None:
            # Why: the first one reports the prompt for all of them; the others wait for what it computes.
            sequences[0].prompt_logprobs = []
        request = Request(request_id, sequences, params, options, self.owner, arrival_s)
        request.context, request.adapter, request.root = processed.context, adapter, root
        if processed.new_reader is not None:
            request.reader = processed.new_reader()
            sequences[0].hidden_from = request.reader.first
        if processed.scored_as is not None:
            (sequences[0].scored_as,) = self._new_sequences(
                processed.scored_as, 1, count(_AFTER_ALL), (arrival, arrival_s), root, seen)
        if processed.num_unscored is not None:
            sequences[0].hidden_from = len(processed.token_ids)
            sequences[0].prompt_logprobs = [None] * processed.num_unscored  # type: ignore[list-item]
        try:
            if not processed.has_candidates:
                for one in self.outputs.observers:
                    one.request_comes(request)
            self._start(request, processed)
            if options.request_id is not None:
                self._labels.add(label)
            self._by_id[request_id] = request
            if accepted is not None:
                accepted.append(request)
        except BaseException:
            # Why: an interrupt may come between any two lines; the caller undoes what the scheduler knows.
            self._forget(request)
            raise
        return request

    def begin_turn(self, request: Request, processed: ProcessedRequest, index: int | None = None) -> None:
        """Continue a finished request with what was processed for it. Raises as ``Request.extend``."""
        sequence, params = self.require_extensible(request, index), processed.params
        self.scheduler.waiting.require_room(params.num_initial_sequences)
        with self._beginning(request, sequence):
            request.params, request.context = params, processed.context
            if sequence.prompt_logprobs is None:
                # Why: the first one has scored the prompt that it shares with this one.
                sequence.prompt_logprobs = request.sequences[0].prompt_logprobs
            sequence.begin_turn(
                processed.token_ids, params, max_tokens=processed.max_tokens,
                stop_token_ids=processed.stop_token_ids, arrival=next(self._arrivals),
                arrival_s=request.metrics.arrival_s, constraint=processed.constraint,
            )
            request.dropped += [one for one in request.sequences if one is not sequence]
            request.sequences = [sequence, *(
                sequence.branch(next(self.sequence_ids), seed=(sequence.seed + place * SEED_STRIDE) % SEED_RANGE)
                for place in range(1, params.n)
            )]
            self._start(request, processed)
        # Why last: what is interrupted here is removed with the request.
        for one in request.dropped:
            self.scheduler.remove_sequence(one)
            self.outputs.remove_text(one)
        request.dropped = []

    def process_turn(
        self, request: Request, prompt: Prompt, params: SamplingParams | None, index: int | None
    ) -> ProcessedRequest:
        """Process the prompt of a request's next turn. Raises as ``Request.extend``."""
        sequence = self.require_extensible(request, index)
        params = params if params is not None else request.params
        return self.inputs.process(prompt, params, request.options, list(sequence.token_ids))

    def complete_turn(self, request: Request, constraint: Constraint | None = None) -> None:
        """Continue a completion that was cut off: aborted, failed, or copied while it ran, under its constraint.

        Raises:
            RequestStateError: the completion came to its own end, or the request cannot be extended.
            InvalidMaxTokens: the completion could grow beyond this engine's context.
            RequestTooLarge: it could grow larger than this engine's pool.
            EngineOverloaded: the waiting queue is full.
        """
        sequence = self.require_extensible(request)
        if sequence.finish_reason not in ("abort", "error"):
            raise RequestStateError("complete", "complete", "cut off within a completion", "Give a prompt to go on.")
        longest = self.inputs.max_model_len
        if sequence.max_total_tokens > longest:
            raise InvalidMaxTokens(
                "max_tokens", sequence.max_tokens, f"1 to {longest - sequence.num_prompt_tokens}",
                "The completion was begun with a longer context. Give a prompt to go on.",
            )
        self.scheduler.require_room(sequence.max_total_tokens)
        with self._beginning(request, sequence):
            sequence.reopen_turn(next(self._arrivals), request.metrics.arrival_s)
            sequence.constrain(constraint)
            self.scheduler.add_sequences(sequence)
            self.outputs.reopen_text(request, sequence)

    def revive(
        self, snapshot: SequenceSnapshot, options: RequestOptions, root: bytes | None = None, *,
        is_shared: bool = True, adapter: LoadedAdapter | None = None,
    ) -> Request:
        """Make a finished request with this past, which the caller has checked and which ``adopt`` is to keep.

        It shares the blocks of ``root``, another request's; ``None``: those of all with the same salt, unless it is not
        ``is_shared``: then only its own turns and forks find its blocks.
        """
        request_id = secrets.token_hex(16)
        root = root or self._root(options.salt, request_id, self.shares_prefixes and is_shared, adapter)
        sequence = Sequence(
            next(self.sequence_ids), list(snapshot.token_ids), snapshot.params, max_tokens=snapshot.max_tokens,
            seed=snapshot.seed, stop_token_ids=self.inputs.stop_token_ids(snapshot.params),
            options=options.without_salt(), arrival=next(self._arrivals),
            cache_root=self._root_now(root), num_short_tokens=self.num_short_tokens, adapter=_number_of(adapter),
            weights=snapshot.weights or self._weights_now,
        )
        sequence.move_to(SequenceStatus.FINISHED)
        sequence.num_prompt_tokens, sequence.finish_reason = snapshot.num_prompt_tokens, snapshot.finish_reason
        sequence.logprobs = list(snapshot.logprobs)
        if snapshot.params.prompt_logprobs is not None:
            sequence.prompt_logprobs = list(snapshot.prompt_logprobs)
        request = Request(request_id, [sequence], snapshot.params, options, self.owner)
        request.root, request.adapter = root, adapter
        return request

    def take_weights(self, weights: WeightsVersion) -> None:
        """Have every request, also one that has finished, go on with other weights; the caller forgets all blocks."""
        self.weights = weights
        for request in self:
            root = self._root_now(request.root)
            for sequence in (*request.sequences, *request.dropped):
                sequence.draw_with(weights, root)
            if request.reader is not None and not request.is_done:
                request.reader.begin_anew()
                request.sequences[0].hidden_from = request.reader.first

    def adopt(self, request: Request) -> None:
        """Keep a request that ``revive`` has made, with its text, until it is removed."""
        self._by_id[request.request_id] = request
        self.outputs.reopen_text(request, request.sequences[0]).finish_text()

    def remove(self, request: Request) -> None:
        """Remove a finished request; a second call does nothing."""
        if request.request_id in self._by_id:
            for sequence in (*request.sequences, *request.dropped):
                self.scheduler.remove_sequence(sequence)
            self._forget(request)

    def withdraw(self, requests: Iterable[Request]) -> None:
        """Abort and remove requests."""
        for request in requests:
            if not request.is_done:
                self.outputs.abort(request)
            self.remove(request)

    def require_extensible(self, request: Request, index: int | None = None) -> Sequence:
        """Return the sequence of a request that can be continued. Raises as ``Request.extend``."""
        self._require_weights()
        if request.sequences[0].status is SequenceStatus.REMOVED:
            raise RequestStateError("extend", "removed", "finished and kept", "Add a new request instead.")
        if not request.is_done:
            raise RequestStateError("extend", "running", "finished", "Step until is_done, or abort it.")
        return request.sequences[index_of_completion(index, len(request.sequences))]

    def require_awake(self) -> None:
        """Raise ``EngineAsleep`` if the engine is."""
        if self.sleep_level:
            raise EngineAsleep(self.sleep_level)

    def _require_weights(self) -> None:
        self.require_awake()
        if self.lacks_weights:
            raise WeightsIncomplete

    @contextmanager
    def _beginning(self, request: Request, sequence: Sequence) -> Iterator[None]:
        """Begin a turn; what breaks that off leaves request, tokens and text as they were.

        The caller undoes what the scheduler knows.
        """
        before, num_tokens = copy(sequence), len(sequence.token_ids)
        params, metrics, sequences = request.params, request.metrics, request.sequences
        try:
            request.metrics = RequestMetrics(self.clock.now())
            yield
        except BaseException:
            self.outputs.groups.by_request.pop(request.request_id, None)
            for one in request.sequences[1:] if request.sequences is not sequences else ():
                self.outputs.by_sequence.pop(one.sequence_id, None)
            sequence.revert(before, num_tokens)
            request.params, request.metrics, request.sequences, request.dropped = params, metrics, sequences, []
            self.outputs.reopen_text(request, sequence, sequences.index(sequence)).finish_text()
            raise

    def _forget(self, request: Request) -> None:
        for sequence in (*request.sequences, *request.dropped):
            self.outputs.remove_text(sequence)
        self.outputs.news.extend(partial(one.request_ended, request) for one in self.outputs.observers)
        self._labels.discard((request.options.salt, request.options.request_id))
        self._by_id.pop(request.request_id, None)
        if request.adapter is not None:
            self.adapters.forget_unused()

    @property
    def num_by_adapter(self) -> Counter[int]:
        """How many of these requests have an adapter, by its number."""
        return Counter(one.adapter.number for one in self._by_id.values() if one.adapter is not None)

    def _start(self, request: Request, processed: ProcessedRequest) -> None:
        """Let a turn wait: its own sequences, or the candidates among which its completions will be chosen."""
        if processed.has_candidates:
            self.outputs.groups.open_group(request)
        else:
            self.scheduler.add_sequences(*request.sequences)
        for index, sequence in enumerate(request.sequences):
            self.outputs.open_text(request, sequence, index)
        self.outputs.counters.num_prompt_tokens += len(processed.token_ids)
        self.outputs.news.extend(partial(one.request_accepted, request) for one in self.outputs.observers)

    def sequences_of_quote(self, processed: ProcessedRequest) -> list[Sequence]:
        """Make the sequences that a request would have if it came now, as the latest of all; nothing knows them."""
        latest, adapter = (_AFTER_ALL, self.clock.now()), self.adapters.find(processed.options.lora)
        root = self._root(processed.options.salt, "", self.shares_prefixes, adapter)
        return self._new_sequences(processed, processed.params.num_sequences, count(_AFTER_ALL), latest, root,
                                   processed.options.without_salt(), adapter=adapter)

    def _new_sequences(
        self, processed: ProcessedRequest, num: int, ids: Iterator[int], arrival: tuple[int, float], root: bytes,
        seen: RequestOptions, seed: int = 0, adapter: LoadedAdapter | None = None,
    ) -> list[Sequence]:
        root, weights, number = self._root_now(root), self._weights_now, _number_of(adapter)
        return [
            Sequence(
                next(ids), processed.token_ids, processed.params, max_tokens=processed.max_tokens,
                seed=(seed + index * SEED_STRIDE) % SEED_RANGE, stop_token_ids=processed.stop_token_ids, options=seen,
                arrival=arrival[0], arrival_s=arrival[1], cache_root=root,
                num_short_tokens=self.num_short_tokens, adapter=number, weights=weights,
                constraint=processed.constraint.branch() if processed.constraint is not None else None,
            )
            for index in range(num)
        ]

    @property
    def _weights_now(self) -> tuple[tuple[int, WeightsVersion], ...]:
        """As ``Sequence.weights`` of one that begins now."""
        return ((0, self.weights),) if self.weights.number else ()

    def _root_now(self, root: bytes) -> bytes:
        """Return the cache root of sequences of a request's root, with the weights that there are now."""
        if not self.weights.number:
            return root
        number = str(self.weights.number).encode()
        return self.scheduler.kv_cache.device.hasher.root({"root": root, "weights": number})

    def _root(
        self, salt: bytes, request_id: str, is_shared: bool, adapter: LoadedAdapter | None = None
    ) -> bytes:
        # Why: without sharing, a request's completions and turns still share with each other.
        own = {} if is_shared else {"request": request_id.encode()}
        if adapter is not None:
            # Safety: another adapter makes other keys and values of the same tokens.
            own["adapter"] = adapter.digest
        return self.scheduler.kv_cache.device.hasher.root({"salt": salt, **own})


def _number_of(adapter: LoadedAdapter | None) -> int | None:
    return None if adapter is None else adapter.number
