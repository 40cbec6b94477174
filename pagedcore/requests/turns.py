"""How requests get further turns: a finished one goes on, one that was cut off is completed, a copy is taken in.

The engine's door for everything that has a past. Steps are the engine's business, the conversation as its caller sees
it is ``session``'s.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from pagedcore.errors import InvalidMaxTokens, RequestStateError
from pagedcore.protocols import Clock
from pagedcore.requests.candidate_groups import Contests
from pagedcore.requests.input_processor import ProcessedRequest, Prompt
from pagedcore.requests.output_text import CompletionTexts
from pagedcore.requests.request import Request
from pagedcore.requests.request_table import RequestTable
from pagedcore.requests.sequence_snapshot import SequenceSnapshot
from pagedcore.requests.stats import Counters
from pagedcore.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedcore.engine.builder import EngineComponents


class Turns:
    """The turns of one engine's requests, the first one included."""

    def __init__(
        self, parts: EngineComponents, requests: RequestTable, answers: CompletionTexts, contests: Contests,
        counters: Counters, clock: Clock,
    ) -> None:
        self._input_processor = parts.input_processor
        self._scheduler = parts.scheduler
        self._requests = requests
        self._answers = answers
        self._contests = contests
        self._counters = counters
        self._clock = clock

    def start(self, request: Request, num_new_tokens: int) -> None:
        """Let a turn's sequences wait: the answers themselves, or those among which they will be chosen."""
        starting = request.sequences
        if request.params.is_contest:
            for sequence in request.sequences:
                self._answers.open(sequence)
            starting = self._contests.open(request)
        for sequence in starting:
            self._answers.open(sequence)
            self._scheduler.add_sequence(sequence)
        self._counters.num_prompt_tokens += num_new_tokens

    def prepare(
        self, prompt: Prompt, known_token_ids: SequenceOf[int], params: SamplingParams, priority: int
    ) -> ProcessedRequest:
        """Tokenise and validate what follows known tokens; callable from any thread. Raises as ``Request.extend``."""
        return self._input_processor.prepare_continuation(prompt, list(known_token_ids), params, priority)

    def begin(self, request: Request, prepared: ProcessedRequest) -> None:
        """Continue a finished request with what was prepared for it. Raises as ``Request.extend``."""
        sequence = self._requests.require_extensible(request)
        num_tokens = len(sequence.token_ids) + len(prepared.token_ids) + prepared.max_tokens
        self._scheduler.require_room(num_tokens, prepared.params.num_initial_sequences)
        self._requests.begin_turn(request, sequence, prepared, self._clock.now())
        self.start(request, len(prepared.token_ids))

    def extend(self, request: Request, prompt: Prompt, params: SamplingParams | None) -> None:
        """Continue a finished request; see ``Request.extend``."""
        sequence = self._requests.require_extensible(request)
        params = params if params is not None else request.params
        self.begin(request, self.prepare(prompt, sequence.token_ids, params, request.priority))

    def complete(self, request: Request) -> None:
        """Go on with an answer that was cut off: aborted, failed, or copied while it ran.

        Raises:
            RequestStateError: the answer came to its own end, or the request cannot be extended.
            InvalidMaxTokens: the answer could grow beyond this engine's context.
            RequestTooLarge: the answer could grow larger than this engine's pool.
            EngineOverloaded: the waiting queue is full.
        """
        sequence = self._requests.require_extensible(request)
        if sequence.finish_reason not in ("abort", "error"):
            raise RequestStateError("complete", "complete", "cut off within an answer", "Give a prompt to go on.")
        if sequence.max_total_tokens > (most := self._input_processor.max_model_len):
            raise InvalidMaxTokens(
                "max_tokens", sequence.max_tokens, f"1 to {most - sequence.num_prompt_tokens}",
                "The answer was begun with a longer context. Give a prompt to go on.",
            )
        self._scheduler.require_room(sequence.max_total_tokens)
        self._requests.reopen(request, sequence, self._clock.now())
        self._answers.restore(sequence)
        self._scheduler.add_sequence(sequence)

    def adopt(
        self, history: SequenceSnapshot, *, priority: int, cache_root: bytes | None = None, cache_salt: bytes = b""
    ) -> Request:
        """Make a finished request with this past.

        Args:
            history: checked by the caller.
            priority: of its further turns.
            cache_root: whose blocks it shares; ``None``: those of everybody with the same salt.
            cache_salt: as in ``ProcessedRequest``.
        """
        eos = frozenset() if history.params.ignore_eos else self._input_processor.eos_token_ids
        request = self._requests.adopt(
            history, eos.union(history.params.stop_token_ids), priority=priority, cache_root=cache_root,
            cache_salt=cache_salt,
        )
        sequence = request.sequences[0]
        self._answers.restore(sequence)
        self._answers.finish(sequence)
        return request
