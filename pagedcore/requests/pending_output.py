"""One completion on the way to its reader: its tokens become text, and its text becomes deltas.

Steps add tokens, and readers take deltas whenever they like. The tokenizer may be the user's own: its failures are
this completion's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from pagedcore.errors import TextFailed
from pagedcore.outputs import CompletionOutput, Delta
from pagedcore.requests.request import Request
from pagedcore.sequence import Sequence
from pagedcore.tokenizer.incremental_text import IncrementalText

if TYPE_CHECKING:
    from pagedcore.requests.candidate_groups import CandidateGroup


@dataclass(slots=True, eq=False, repr=False)
class PendingOutput:
    """One completion of a request on the way to its reader.

    Invariant: its text is the concatenation of the texts of all its deltas, taken or not.
    """

    request: Request
    sequence: Sequence
    index: int
    """Which of the request's completions it is."""
    group: CandidateGroup | None
    """Where the sequence is a candidate; ``None``: it is a completion itself."""
    open_stream: Callable[[], IncrementalText] | None = None
    """Makes ``stream`` with the first token; ``None``: there is no tokenizer, or no further text."""
    stream: IncrementalText | None = None
    """Turns tokens into text until the end."""
    failure: TextFailed | None = None
    """Why there is no further text, where the tokenizer has failed."""
    matched_stop: str | None = None
    """The stop string that ended the text."""
    times_s: list[float] = field(default_factory=list)
    """When each token of this turn was committed, as far as that was seen; of beams and other candidates nothing is."""
    _parts: list[str] = field(default_factory=list)
    _num_taken_parts: int = 0
    _num_taken_tokens: int = 0

    def begin_turn(self) -> None:
        """Begin with no text."""
        self.open_stream = self.stream = self.failure = self.matched_stop = None
        self._parts, self._num_taken_parts, self._num_taken_tokens = [], 0, 0
        self.times_s = []

    def add_token(self, token_id: int) -> bool:
        """Add the text that a committed token makes certain; return whether a stop string was met."""
        try:
            return self._push(token_id)
        except MemoryError:
            return self.replay()
        except Exception as error:  # the tokenizer may be the user's own; its failure is this request's
            self._fail(error)
            return False

    def replay(self) -> bool:
        """Make the text of all tokens anew, after a failure in between; return as ``add_token`` for the last one."""
        self.stream = self.failure = self.matched_stop = None
        self._parts, is_stopped = [], False
        try:
            for token_id in self.sequence.output_token_ids:
                is_stopped = self._push(token_id)
        except Exception as error:  # as above
            self._fail(error)
            return False
        return is_stopped

    def finish_text(self) -> bool:
        """Add the text that was held back until the end; return whether that met a stop string."""
        try:
            try:
                return self._finish()
            except MemoryError:
                self.replay()
                return self._finish()
        except Exception as error:  # as above
            self._fail(error)
            return False

    def _push(self, token_id: int) -> bool:
        if self.stream is None:
            if self.open_stream is None:
                return False
            self.stream = self.open_stream()
        delta = self.stream.push((token_id,))
        self._parts.append(delta.text)
        if delta.is_stopped:
            self.matched_stop = self.stream.matched_stop
        return delta.is_stopped

    def _finish(self) -> bool:
        if self.stream is None:
            self.open_stream = None
            return False
        self._parts.append(self.stream.finish())
        is_stopped, self.matched_stop = self.stream.is_stopped, self.stream.matched_stop
        self.stream = self.open_stream = None
        return is_stopped

    def _fail(self, error: Exception) -> None:
        self.stream, self.open_stream = None, None
        self.failure = TextFailed(f"the tokenizer failed on the tokens of this request: {type(error).__name__}")
        self.failure.__cause__ = error

    def take_back(self, num_tokens: int, block_size: int) -> None:
        """Be live again with so many tokens of the sequence and their text; what was taken of it stays taken."""
        num_lost = len(self.sequence.token_ids) - num_tokens
        del self.times_s[max(0, len(self.times_s) - num_lost) :]
        self.sequence.take_back(num_tokens, block_size)
        self.replay()
        if not any(one.finish_reason == "error" for one in self.request.sequences):
            self.request.error = None

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
        delta = Delta(
            request.request_id, self.index, text, token_ids, reason, logprobs, error, sequence.num_prompt_tokens
        )
        if sequence.weights and token_ids:
            end = self._num_taken_tokens
            delta = replace(delta, weights=sequence.weights_of_output()[end - len(token_ids) : end])
        if reason is None:
            return delta
        return replace(delta, itl_s=self._intervals_s(), stop_reason=self._stop_reason())

    def completion(self) -> CompletionOutput:
        """Describe the completion as it stands."""
        sequence = self.sequence
        return CompletionOutput(
            self.index, "".join(self._parts), tuple(sequence.output_token_ids), sequence.finish_reason,
            logprobs=tuple(sequence.logprobs) if sequence.params.logprobs is not None else None,
            error=self.request.error if sequence.finish_reason == "error" else None, score=sequence.score,
            itl_s=self._intervals_s(), stop_reason=self._stop_reason(), weights=sequence.weights_of_output(),
        )

    def _stop_reason(self) -> str | int | None:
        sequence = self.sequence
        if sequence.finish_reason != "stop" or self.matched_stop is not None:
            return self.matched_stop
        last = sequence.token_ids[-1]
        return last if last in sequence.params.stop_token_ids else None

    def _intervals_s(self) -> tuple[float, ...]:
        return tuple(after - before for before, after in pairwise(self.times_s))
