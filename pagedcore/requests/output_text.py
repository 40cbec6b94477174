"""The completions of live sequences: the text of each so far, and how much of it its reader has taken.

Owns one ``PendingOutput`` per sequence, which carries everything that the output side needs to know of it. It knows
nothing of scheduling; ``output_processor`` adds the tokens that a step committed.
"""

from __future__ import annotations

from dataclasses import replace

from pagedcore.outputs import CompletionOutput, Delta, RequestOutput
from pagedcore.protocols import Tokenizer
from pagedcore.requests.candidate_groups import Beams, CandidateGroup
from pagedcore.requests.request import Request
from pagedcore.sequence import Sequence
from pagedcore.tokenizer.incremental_text import IncrementalText


class PendingOutput:
    """One completion of a request on the way to its reader.

    Invariant: its text is the concatenation of the texts of all its deltas, taken or not.
    """

    __slots__ = ("_num_taken_parts", "_num_taken_tokens", "_parts", "group", "index", "request", "sequence", "stream")

    def __init__(self, request: Request, sequence: Sequence, index: int, group: CandidateGroup | None) -> None:
        self.request = request
        self.sequence = sequence
        self.index = index
        """Which of the request's completions it is."""
        self.group = group
        """Where the sequence is a candidate; ``None``: it is a completion itself."""
        self.begin_turn()

    def begin_turn(self) -> None:
        """Begin with no text."""
        self.stream: IncrementalText | None = None
        """Turns tokens into text, if there is a tokenizer, until the end."""
        self._parts: list[str] = []
        self._num_taken_parts = 0
        self._num_taken_tokens = 0

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._parts)

    def add_token(self, token_id: int) -> bool:
        """Add the text that a committed token makes certain; return whether a stop string was met."""
        if self.stream is None:
            return False
        delta = self.stream.push((token_id,))
        self._parts.append(delta.text)
        return delta.is_stopped

    def finish_text(self) -> bool:
        """Add the text that was held back until the end; return whether that met a stop string."""
        stream, self.stream = self.stream, None
        if stream is None:
            return False
        self._parts.append(stream.finish())
        return stream.is_stopped

    def mark_taken(self) -> None:
        """Count everything there is as taken."""
        self._num_taken_parts = len(self._parts)
        self._num_taken_tokens = self.sequence.num_output_tokens

    def take_delta(self) -> Delta:
        """Return what was added since the last delta, with the end if the completion has ended."""
        sequence, request = self.sequence, self.request
        text = "".join(self._parts[self._num_taken_parts :])
        token_ids = tuple(sequence.token_ids[sequence.num_prompt_tokens + self._num_taken_tokens :])
        self._num_taken_parts = len(self._parts)
        self._num_taken_tokens += len(token_ids)
        reason = sequence.finish_reason
        wants_logprobs = sequence.params.logprobs is not None and token_ids
        logprobs = tuple(sequence.logprobs[-len(token_ids) :]) if wants_logprobs else None
        error = request.error if reason == "error" else None
        # Why: by position, because keywords would cost a quarter of the time, for every token of a step loop.
        return Delta(
            request.request_id, self.index, text, token_ids, reason, logprobs, error, sequence.num_prompt_tokens
        )

    def completion(self) -> CompletionOutput:
        """Describe the completion as it stands."""
        sequence = self.sequence
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=tuple(sequence.output_token_ids),
            finish_reason=sequence.finish_reason,
            logprobs=tuple(sequence.logprobs) if sequence.params.logprobs is not None else None,
            error=self.request.error if sequence.finish_reason == "error" else None,
            score=sequence.score,
        )


class CompletionTexts:
    """The pending output of all live sequences, by sequence id.

    Invariant: a sequence is here from the time its request was accepted until it is removed.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.by_sequence: dict[int, PendingOutput] = {}

    def open(
        self, request: Request, sequence: Sequence, index: int = 0, group: CandidateGroup | None = None
    ) -> PendingOutput:
        """Begin the completion of a turn, with no text; a beam needs none before it is chosen."""
        pending = self.by_sequence.get(sequence.sequence_id)
        if pending is None:
            pending = self.by_sequence[sequence.sequence_id] = PendingOutput(request, sequence, index, group)
        else:
            pending.begin_turn()
        if self._tokenizer is not None and not isinstance(group, Beams):
            params = sequence.params
            pending.stream = IncrementalText(self._tokenizer.new_detokenizer(), params.stop, params.min_tokens)
        return pending

    def reopen(self, request: Request, sequence: Sequence) -> PendingOutput:
        """Begin a completion that has tokens already, all of them taken, with the text that they make certain."""
        pending = self.open(request, sequence)
        for token_id in sequence.output_token_ids:
            pending.add_token(token_id)
        pending.mark_taken()
        return pending

    def of(self, request: Request) -> list[PendingOutput]:
        """Return the pending output of a request's own sequences, in order; without text after their removal."""
        return [
            self.by_sequence.get(sequence.sequence_id) or PendingOutput(request, sequence, index, None)
            for index, sequence in enumerate(request.sequences)
        ]

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, and with it what was not taken; one that is not here is no error."""
        if (pending := self.by_sequence.pop(sequence.sequence_id, None)) is not None:
            pending.begin_turn()
            pending.mark_taken()

    def output_of(self, request: Request) -> RequestOutput:
        """Describe all completions of a request as they stand."""
        num_preemptions = sum(sequence.num_preemptions for sequence in request.sequences)
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=tuple(request.prompt_token_ids),
            outputs=[pending.completion() for pending in self.of(request)],
            is_finished=request.is_done,
            num_cached_tokens=request.sequences[0].num_cached_tokens or 0,
            metrics=replace(request.metrics, num_preemptions=num_preemptions),
            prompt_logprobs=request.prompt_logprobs,
            client_request_id=request.client_request_id,
        )
