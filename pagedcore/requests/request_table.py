"""The engine's register of requests: makes them, numbers and seeds their sequences, finds them again.

Knows neither blocks nor text. Every id handed out here is made here, so that no caller can name another's request.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from pagedcore.errors import RequestStateError
from pagedcore.kv_cache.block_hash import BlockHasher
from pagedcore.requests.input_processor import ProcessedRequest
from pagedcore.requests.request import Request, RequestOwner
from pagedcore.requests.sequence_snapshot import SequenceSnapshot
from pagedcore.sequence import Sequence, SequenceStatus

_SEED_STRIDE = 0x9E3779B97F4A7C15  # Why: odd, so that consecutive multiples do not meet modulo a power of two
_SEED_RANGE = 2**63


class RequestTable:
    """All requests that were accepted and not removed.

    Invariant: every sequence of every request in the book maps back to that request, and no other sequence does.
    """

    def __init__(self, owner: RequestOwner, seed: int, hasher: BlockHasher, *, shares_prefixes: bool) -> None:
        self._owner = owner
        self._hasher = hasher
        self._shares_prefixes = shares_prefixes
        self._seed = seed
        self._by_id: dict[str, Request] = {}
        self._by_sequence: dict[int, Request] = {}
        self._num_sequences = 0
        self._num_arrivals = 0

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, request_id: str) -> Request | None:
        """Return the request with exactly this id."""
        return self._by_id.get(request_id)

    def request_of(self, sequence: Sequence) -> Request:
        """Return the request a sequence belongs to."""
        return self._by_sequence[sequence.sequence_id]

    def add(self, prepared: ProcessedRequest, now_s: float) -> Request:
        """Make a request with one sequence per answer and enter it."""
        arrival = self.next_arrival()
        first_seed = prepared.params.seed
        if first_seed is None:
            first_seed = self._seed + arrival * _SEED_STRIDE
        request_id = secrets.token_hex(16)
        root = self._cache_root(prepared.cache_salt, request_id)
        sequences = [
            self._make_sequence(prepared, arrival, (first_seed + index * _SEED_STRIDE) % _SEED_RANGE, root)
            for index in range(prepared.params.n)
        ]
        if prepared.params.prompt_logprobs is not None:
            # Why: the first one reports the prompt for all of them; the others wait for what it computes.
            sequences[0].prompt_logprobs = []
        request = Request(request_id, sequences, prepared.params, self._owner, prepared.priority)
        request.timeline.arrival_s = now_s
        return self._enter(request)

    def adopt(
        self, history: SequenceSnapshot, stop_token_ids: frozenset[int], *, priority: int, cache_root: bytes | None,
        cache_salt: bytes,
    ) -> Request:
        """Make a finished request with one sequence of a known past and enter it; ``None``: a root for its salt."""
        request_id = secrets.token_hex(16)
        self._num_sequences += 1
        sequence = Sequence(
            self._num_sequences, list(history.token_ids), history.params, max_tokens=history.max_tokens,
            seed=history.seed, stop_token_ids=stop_token_ids, priority=priority, arrival=self.next_arrival(),
            cache_root=cache_root if cache_root is not None else self._cache_root(cache_salt, request_id),
        )
        sequence.move_to(SequenceStatus.FINISHED)
        sequence.num_prompt_tokens, sequence.finish_reason = history.num_prompt_tokens, history.finish_reason
        sequence.logprobs = list(history.logprobs)
        if history.params.prompt_logprobs is not None:
            sequence.prompt_logprobs = list(history.prompt_logprobs)
        return self._enter(Request(request_id, [sequence], history.params, self._owner, priority))

    def _enter(self, request: Request) -> Request:
        self._by_id[request.request_id] = request
        self._by_sequence |= {sequence.sequence_id: request for sequence in request.sequences}
        return request

    def branch(self, sequence: Sequence, index: int = 0) -> Sequence:
        """Enter a further sequence of a request, which goes on from the same tokens with the seed number ``index``."""
        self._num_sequences += 1
        other = sequence.branch(self._num_sequences, seed=(sequence.seed + index * _SEED_STRIDE) % _SEED_RANGE)
        self._by_sequence[other.sequence_id] = self._by_sequence[sequence.sequence_id]
        return other

    def strike(self, sequence: Sequence) -> None:
        """Forget a sequence that ``branch`` entered."""
        del self._by_sequence[sequence.sequence_id]

    def remove(self, request: Request) -> bool:
        """Forget a request; return whether it was known."""
        if self._by_id.pop(request.request_id, None) is None:
            return False
        for sequence in request.sequences:
            del self._by_sequence[sequence.sequence_id]
        return True

    def require_extensible(self, request: Request) -> Sequence:
        """Return the one finished sequence of a request that may go on.

        Raises:
            RequestStateError: the request was removed, is running, or has several answers.
        """
        if request.request_id not in self._by_id:
            raise RequestStateError("extend", "removed", "finished and kept", "Add a new request instead.")
        if not request.is_done:
            raise RequestStateError("extend", "running", "finished", "Step until is_done, or abort it.")
        if len(request.sequences) > 1:
            raise RequestStateError("extend", "one with several answers", "one with n=1")
        return request.sequences[0]

    def begin_turn(self, request: Request, sequence: Sequence, prepared: ProcessedRequest, now_s: float) -> None:
        """Start the next turn of a finished request, with the new part of the prompt."""
        request.begin_turn(prepared.params, now_s)
        sequence.begin_turn(
            prepared.token_ids, prepared.params, max_tokens=prepared.max_tokens,
            stop_token_ids=prepared.stop_token_ids, arrival=self.next_arrival(),
        )

    def reopen(self, request: Request, sequence: Sequence, now_s: float) -> None:
        """Go on with the turn of a finished request, which was cut off."""
        request.begin_turn(request.params, now_s)
        sequence.reopen_turn(self.next_arrival())

    def next_arrival(self) -> int:
        """Number the next arrival."""
        self._num_arrivals += 1
        return self._num_arrivals

    def _cache_root(self, cache_salt: bytes, request_id: str) -> bytes:
        extras = {"salt": cache_salt}
        if not self._shares_prefixes:
            # Why: a request's answers and turns still share with each other.
            extras["request"] = request_id.encode()
        return self._hasher.root(extras)

    def _make_sequence(self, prepared: ProcessedRequest, arrival: int, seed: int, cache_root: bytes) -> Sequence:
        self._num_sequences += 1
        return Sequence(
            self._num_sequences, prepared.token_ids, prepared.params, max_tokens=prepared.max_tokens, seed=seed,
            stop_token_ids=prepared.stop_token_ids, priority=prepared.priority, arrival=arrival,
            cache_root=cache_root,
        )
