"""The handle of one request: what its caller holds, from acceptance to removal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

from pagedcore.errors import InvalidRequest, RequestStateError
from pagedcore.outputs import RequestMetrics, RequestOutput, TokenLogprobs, Usage
from pagedcore.request_options import RequestOptions
from pagedcore.sampling_params import SamplingParams
from pagedcore.sequence import Phase, Sequence

if TYPE_CHECKING:
    from pagedcore.lora.registry import LoadedAdapter
    from pagedcore.protocols import FloatArray


class RequestOwner(Protocol):
    """What a handle needs from the engine it belongs to."""

    def extend_request(
        self, request: Request, prompt: Any, params: SamplingParams | None, index: int | None
    ) -> None:
        """Continue a completion of a finished request."""

    def remove_request(self, request: Request) -> None:
        """Remove a finished request and free its blocks."""

    def abort_request(self, request_id: str) -> bool:
        """End a request now; unknown ids are no error."""

    def output_of(self, request: Request) -> RequestOutput:
        """Describe all completions as they stand."""


class ReadsHidden(Protocol):
    """Takes the hidden states of one sequence, which generates nothing."""

    @property
    def first(self) -> int:
        """The first position whose hidden state it wants; it wants all behind it too."""

    def read(self, start: int, states: FloatArray) -> bool:
        """Take the states of positions from ``start`` on, float32 [positions, hidden size]; return whether they are of
        use.

        A step that broke off is computed again, so that positions may come a second time, with the same states.
        """

    def begin_anew(self) -> None:
        """Forget all states: they will come again, and be others."""

    def vector(self) -> FloatArray:
        """Return what was made of all of them, float32 [dimensions]."""


class Request:
    """The handle of one request at the step level.

    Made by ``Engine.add_request``; usable only on the engine's thread. ``take_new_tokens`` reads tokens as they
    come, ``is_done`` says when to stop, then ``extend`` continues with the same cache, or ``remove`` frees it.

    Invariant: ``sequences`` has one entry for each of the ``SamplingParams.n`` completions. Where these are chosen at
        the end, they stay empty until then, and the scheduler knows only the candidates.
    """

    __slots__ = ("_num_taken", "_owner", "adapter", "context", "dropped", "error", "metrics", "options", "params",
                 "reader", "request_id", "root", "sequences")

    def __init__(
        self, request_id: str, sequences: list[Sequence], params: SamplingParams, options: RequestOptions,
        owner: RequestOwner, arrival_s: float = 0.0,
    ) -> None:
        self.request_id = request_id
        """The engine's own: random, never a caller's."""
        self.sequences = sequences
        self.dropped: list[Sequence] = []
        """Completions that the present turn does not continue, until they are removed."""
        self.params = params
        self.options = options
        self.error: Exception | None = None
        self.root = b""
        """What its blocks are shared by, whatever the weights are: the salt, and what else keeps requests apart."""
        self.reader: ReadsHidden | None = None
        """Takes the hidden states of a request that generates nothing."""
        self.adapter: LoadedAdapter | None = None
        """What its ``lora`` stood for when it was accepted."""
        self.context: object = None
        """What an observer says that the present turn belongs to."""
        self.metrics = RequestMetrics(arrival_s)
        """Times of the present turn."""
        self._owner = owner
        self._num_taken: dict[int, int] = {}

    @property
    def is_done(self) -> bool:
        """Whether every completion of this turn has finished."""
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Where each completion is: "waiting", "prefill", "decode" or "finished"."""
        return tuple(sequence.phase for sequence in self.sequences)

    @property
    def was_aborted(self) -> bool:
        """Whether a completion of this turn was ended by its caller."""
        return any(sequence.finish_reason == "abort" for sequence in self.sequences)

    @property
    def is_on_target(self) -> bool:
        """Whether this turn has ended by itself, and kept the targets of its options."""
        options, metrics, first_s = self.options, self.metrics, self.metrics.first_token_s
        if first_s is None and self.sequences[0].hidden_from is not None and not self.was_aborted:
            # Why: what generates nothing is there at once.
            first_s = metrics.finished_s
        if self.error is not None or first_s is None or metrics.finished_s is None:
            return False
        took_s, decode_s = metrics.finished_s - metrics.arrival_s, metrics.finished_s - first_s
        num_intervals = max(1, max(one.num_output_tokens for one in self.sequences) - 1)
        return (
            took_s <= (options.deadline_s or math.inf)
            and took_s - decode_s <= (options.ttft_ms or math.inf) / 1000.0
            and decode_s / num_intervals <= (options.tpot_ms or math.inf) / 1000.0
        )

    @property
    def client_request_id(self) -> str | None:
        """The caller's own label; see ``RequestOptions.request_id``."""
        return self.options.request_id

    @property
    def usage(self) -> Usage:
        """The tokens that the present turn took so far."""
        first = self.sequences[0]
        num_output_tokens = sum(sequence.num_output_tokens for sequence in self.sequences)
        return Usage(first.num_prompt_tokens, first.num_cached_tokens or 0, num_output_tokens)

    @property
    def prompt_token_ids(self) -> list[int]:
        """Everything before this turn's completion."""
        first = self.sequences[0]
        return first.token_ids[: first.num_prompt_tokens]

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """Log-probabilities of ``prompt_token_ids`` as far as they are known, if asked for; of the first, ``None``."""
        known = self.sequences[0].prompt_logprobs
        return None if known is None else (None, *known)

    def take_new_tokens(self, index: int = 0) -> list[int]:
        """Return the tokens of completion ``index`` that were not taken yet; each token is returned once.

        Raises ``InvalidRequest`` if there is no such completion.
        """
        if type(index) is not int or not 0 <= index < len(self.sequences):
            raise InvalidRequest("index", index, f"an integer from 0 to {len(self.sequences) - 1}")
        sequence = self.sequences[index]
        taken = max(self._num_taken.get(sequence.sequence_id, 0), sequence.num_prompt_tokens)
        self._num_taken[sequence.sequence_id] = len(sequence.token_ids)
        return sequence.token_ids[taken:]

    def output(self) -> RequestOutput:
        """Return all completions as they stand, with text where the engine has a tokenizer; also after ``remove``."""
        return self._owner.output_of(self)

    def extend(self, prompt: Any, params: SamplingParams | None = None, *, index: int | None = None) -> None:
        """Continue this finished request with more text or tokens, reusing what the cache still holds.

        Args:
            prompt: text, token ids, or chat messages that follow the conversation so far.
            params: for the new turn; ``None``: those of the turn before, so that it has as many completions again.
            index: the completion that is continued, needed where there are several; the others are removed.

        Raises:
            RequestStateError: the request is still running or was removed, or has several completions and no ``index``
                says which.
            InvalidRequest: as from ``Engine.add_request``; the request stays as it was.
            EngineOverloaded: the waiting queue is full; the request stays as it was.
        """
        self._owner.extend_request(self, prompt, params, index)

    def abort(self) -> bool:
        """End the request now and free its blocks; return whether it was still running."""
        return self._owner.abort_request(self.request_id)

    def remove(self) -> None:
        """Remove this finished request and free its blocks. Raises ``RequestStateError`` while it is running."""
        if not self.is_done:
            raise RequestStateError("remove", "running", "finished", "Call abort() first.")
        self._owner.remove_request(self)
