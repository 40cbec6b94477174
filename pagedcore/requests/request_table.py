"""The engine's requests: made, numbered and seeded here, found again, and continued by further turns.

Every id given out is made here, so that no caller can name another's request. What becomes of a request's tokens is
``output_processor``'s business; a conversation as its caller sees it is in ``sessions``.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from itertools import count
from typing import Final

from pagedcore.errors import InvalidMaxTokens, InvalidRequest, RequestStateError
from pagedcore.kv_cache.block_hash import BlockHasher
from pagedcore.protocols import Clock
from pagedcore.request_options import RequestOptions
from pagedcore.requests.input_processor import InputProcessor, ProcessedRequest, Prompt
from pagedcore.requests.output_processor import OutputProcessor
from pagedcore.requests.request import Request, RequestOwner
from pagedcore.requests.sequence_snapshot import SequenceSnapshot
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.sequence import Sequence, SequenceStatus

_SEED_STRIDE: Final = 0x9E3779B97F4A7C15  # Why: odd, so that consecutive multiples do not meet modulo a power of two
_SEED_RANGE: Final = 2**63


class SequenceNumbers:
    """Numbers the sequences of one engine, and seeds those that continue another."""

    def __init__(self) -> None:
        self.ids = count(1)

    def branch(self, sequence: Sequence, index: int) -> Sequence:
        """Return a sequence that continues another one's tokens, with the seed number ``index``."""
        return sequence.branch(next(self.ids), seed=(sequence.seed + index * _SEED_STRIDE) % _SEED_RANGE)


class RequestTable:
    """All requests that were accepted and not removed.

    Invariant: no two requests of one salt have the same label.
    """

    def __init__(
        self, owner: RequestOwner, inputs: InputProcessor, outputs: OutputProcessor, scheduler: Scheduler,
        numbers: SequenceNumbers, hasher: BlockHasher, clock: Clock, *, seed: int, shares_prefixes: bool,
    ) -> None:
        self._owner = owner
        self._inputs = inputs
        self._outputs = outputs
        self._scheduler = scheduler
        self._numbers = numbers
        self._hasher = hasher
        self._clock = clock
        self._seed = seed
        self._shares_prefixes = shares_prefixes
        self._by_id: dict[str, Request] = {}
        self._labels: set[tuple[bytes, str]] = set()
        self._num_arrivals = 0

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, request_id: str) -> Request | None:
        """Return the request with exactly this id."""
        return self._by_id.get(request_id)

    def accept(self, processed: ProcessedRequest) -> Request:
        """Make a request with one sequence per completion and let it wait.

        Raises:
            InvalidRequest: its label is taken; ``EngineOverloaded``: the waiting queue is full. Then nothing changed.
        """
        options, params = processed.options, processed.params
        if options.request_id is not None and (options.salt, options.request_id) in self._labels:
            raise InvalidRequest(
                "request_id", options.request_id, "a label that no request of the same salt has at present",
                "Remove the other request first, or choose another label.",
            )
        arrival, request_id = self._next_arrival(), secrets.token_hex(16)
        seed = params.seed if params.seed is not None else self._seed + arrival * _SEED_STRIDE
        root, arrival_s, sequences = self._root(options.salt, request_id), self._clock.now(), list[Sequence]()
        for index in range(params.n):
            sequences.append(Sequence(
                next(self._numbers.ids), processed.token_ids, params, max_tokens=processed.max_tokens,
                seed=(seed + index * _SEED_STRIDE) % _SEED_RANGE, stop_token_ids=processed.stop_token_ids,
                priority=options.priority, arrival=arrival, cache_root=root,
            ))
        if params.prompt_logprobs is not None:
            # Why: the first one reports the prompt for all of them; the others wait for what it computes.
            sequences[0].prompt_logprobs = []
        request = Request(request_id, sequences, params, options, self._owner, arrival_s)
        self._start(request, processed)
        self._by_id[request_id] = request
        if options.request_id is not None:
            self._labels.add((options.salt, options.request_id))
        return request

    def begin_turn(self, request: Request, processed: ProcessedRequest) -> None:
        """Continue a finished request with what was processed for it. Raises as ``Request.extend``."""
        sequence = self.require_extensible(request)
        self._scheduler.waiting.require_room(processed.params.num_initial_sequences)
        request.begin_turn(processed.params, self._clock.now())
        sequence.begin_turn(
            processed.token_ids, processed.params, max_tokens=processed.max_tokens,
            stop_token_ids=processed.stop_token_ids, arrival=self._next_arrival(),
        )
        self._start(request, processed)

    def extend(self, request: Request, prompt: Prompt, params: SamplingParams | None) -> None:
        """Continue a finished request; see ``Request.extend``."""
        sequence = self.require_extensible(request)
        params = params if params is not None else request.params
        processed = self._inputs.process_turn(prompt, list(sequence.token_ids), params, request.options)
        self.begin_turn(request, processed)

    def complete_turn(self, request: Request) -> None:
        """Continue a completion that was cut off: aborted, failed, or copied while it ran.

        Raises:
            RequestStateError: the completion came to its own end, or the request cannot be extended.
            InvalidMaxTokens: the completion could grow beyond this engine's context.
            RequestTooLarge: it could grow larger than this engine's pool.
            EngineOverloaded: the waiting queue is full.
        """
        sequence = self.require_extensible(request)
        if sequence.finish_reason not in ("abort", "error"):
            raise RequestStateError("complete", "complete", "cut off within a completion", "Give a prompt to go on.")
        longest = self._inputs.max_model_len
        if sequence.max_total_tokens > longest:
            raise InvalidMaxTokens(
                "max_tokens", sequence.max_tokens, f"1 to {longest - sequence.num_prompt_tokens}",
                "The completion was begun with a longer context. Give a prompt to go on.",
            )
        self._scheduler.require_room(sequence.max_total_tokens)
        request.begin_turn(request.params, self._clock.now())
        sequence.reopen_turn(self._next_arrival())
        self._scheduler.add_sequences(sequence)
        self._outputs.texts.reopen(request, sequence)

    def adopt(
        self, snapshot: SequenceSnapshot, options: RequestOptions, cache_root: bytes | None = None
    ) -> Request:
        """Make a finished request with this past.

        Args:
            snapshot: checked by the caller.
            options: of its further turns.
            cache_root: whose blocks it shares; ``None``: those of all requests with the same salt.
        """
        request_id = secrets.token_hex(16)
        sequence = Sequence(
            next(self._numbers.ids), list(snapshot.token_ids), snapshot.params, max_tokens=snapshot.max_tokens,
            seed=snapshot.seed, stop_token_ids=self._inputs.stop_token_ids(snapshot.params), priority=options.priority,
            arrival=self._next_arrival(),
            cache_root=cache_root if cache_root is not None else self._root(options.salt, request_id),
        )
        sequence.move_to(SequenceStatus.FINISHED)
        sequence.num_prompt_tokens, sequence.finish_reason = snapshot.num_prompt_tokens, snapshot.finish_reason
        sequence.logprobs = list(snapshot.logprobs)
        if snapshot.params.prompt_logprobs is not None:
            sequence.prompt_logprobs = list(snapshot.prompt_logprobs)
        request = self._by_id[request_id] = Request(request_id, [sequence], snapshot.params, options, self._owner)
        self._outputs.texts.reopen(request, sequence).finish_text()
        return request

    def remove(self, request: Request) -> bool:
        """Remove a finished request; return whether it was known."""
        if self._by_id.pop(request.request_id, None) is None:
            return False
        if request.options.request_id is not None:
            self._labels.discard((request.options.salt, request.options.request_id))
        for sequence in request.sequences:
            self._scheduler.remove_sequence(sequence)
            self._outputs.texts.remove(sequence)
        return True

    def require_extensible(self, request: Request) -> Sequence:
        """Return the one finished sequence of a request that may be continued.

        Raises:
            RequestStateError: the request was removed, is running, or has several completions.
        """
        if request.request_id not in self._by_id:
            raise RequestStateError("extend", "removed", "finished and kept", "Add a new request instead.")
        if not request.is_done:
            raise RequestStateError("extend", "running", "finished", "Step until is_done, or abort it.")
        if len(request.sequences) > 1:
            raise RequestStateError("extend", "one with several completions", "one with n=1")
        return request.sequences[0]

    def _start(self, request: Request, processed: ProcessedRequest) -> None:
        """Let a turn wait: its own sequences, or the candidates among which its completions will be chosen."""
        groups, texts = self._outputs.groups, self._outputs.texts
        candidates = groups.make_candidates(request) if processed.has_candidates else []
        self._scheduler.add_sequences(*(candidates or request.sequences))
        for index, sequence in enumerate(request.sequences):
            texts.open(request, sequence, index)
        if candidates:
            groups.open_group(request, candidates)
        self._outputs.counters.num_prompt_tokens += len(processed.token_ids)

    def _root(self, salt: bytes, request_id: str) -> bytes:
        extras = {"salt": salt}
        if not self._shares_prefixes:
            # Why: a request's completions and turns still share with each other.
            extras["request"] = request_id.encode()
        return self._hasher.root(extras)

    def _next_arrival(self) -> int:
        self._num_arrivals += 1
        return self._num_arrivals
