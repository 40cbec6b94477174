"""The text side of running sequences: what each answer says so far, and what of it was told to its reader.

Owns one ``IncrementalText`` per sequence. Knows nothing of scheduling; the engine tells it which tokens were committed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedcore.outputs import CompletionOutput, FinishReason
from pagedcore.protocols import Tokenizer
from pagedcore.requests.request import Request
from pagedcore.sequence import Sequence
from pagedcore.tokenizer.incremental_text import IncrementalText

PendingOutput = tuple[Request, Sequence]
"""An answer of a request that has something to tell."""


@dataclass(slots=True)
class _Answer:
    stream: IncrementalText | None
    parts: list[str] = field(default_factory=list)
    num_told_parts: int = 0
    num_told_tokens: int = 0


class CompletionTexts:
    """Texts of all live answers, by sequence id.

    Invariant: the text of an answer is the concatenation of all its news, taken or not.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._answers: dict[int, _Answer] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def open(self, sequence: Sequence) -> None:
        """Begin the answer of a new turn, with no text."""
        stream = None
        if self._tokenizer is not None:
            detokenizer, params = self._tokenizer.new_detokenizer(), sequence.params
            stream = IncrementalText(detokenizer, params.stop, params.min_tokens)
        self._answers[sequence.sequence_id] = _Answer(stream)

    def restore(self, sequence: Sequence) -> None:
        """Begin an answer that has tokens already, with the text that they make certain; all of it was told before."""
        self.open(sequence)
        for token_id in sequence.output_token_ids:
            self.add_token(sequence, token_id)
        self.take_news(sequence)

    def close(self, sequence: Sequence) -> None:
        """Forget an answer."""
        self._answers.pop(sequence.sequence_id, None)

    def add_token(self, sequence: Sequence, token_id: int) -> bool:
        """Take a committed token, add the text that becomes certain, and say whether a stop string was met."""
        answer = self._answers[sequence.sequence_id]
        if answer.stream is None:
            return False
        delta = answer.stream.push((token_id,))
        answer.parts.append(delta.text)
        return delta.is_stopped

    def finish(self, sequence: Sequence) -> bool:
        """Add the text held back until the end, and say whether that end met a stop string."""
        answer = self._answers[sequence.sequence_id]
        stream, answer.stream = answer.stream, None
        if stream is None:
            return False
        answer.parts.append(stream.finish())
        return stream.is_stopped

    def take_news(self, sequence: Sequence) -> tuple[str, tuple[int, ...]]:
        """Return the text and the tokens that were not taken yet; of an answer that was forgotten, nothing."""
        answer = self._answers.get(sequence.sequence_id)
        if answer is None:
            return "", ()
        text = "".join(answer.parts[answer.num_told_parts :])
        token_ids = tuple(sequence.token_ids[sequence.num_prompt_tokens + answer.num_told_tokens :])
        answer.num_told_parts = len(answer.parts)
        answer.num_told_tokens += len(token_ids)
        return text, token_ids

    def text(self, sequence: Sequence) -> str:
        """Return the answer's text so far."""
        answer = self._answers.get(sequence.sequence_id)
        return "".join(answer.parts) if answer is not None else ""

    def completions(self, request: Request) -> list[CompletionOutput]:
        """Describe all answers of a request as they stand."""
        return [self._completion(index, sequence, request) for index, sequence in enumerate(request.sequences)]

    def _completion(self, index: int, sequence: Sequence, request: Request) -> CompletionOutput:
        reason: FinishReason | None = sequence.finish_reason
        return CompletionOutput(
            index=index,
            text=self.text(sequence),
            token_ids=tuple(sequence.output_token_ids),
            finish_reason=reason,
            logprobs=tuple(sequence.logprobs) if sequence.params.logprobs is not None else None,
            error=request.error if reason == "error" else None,
            score=sequence.score,
        )
