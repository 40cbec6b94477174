"""The text side of running sequences: what each answer says so far, and what a step added to it.

Owns one ``TextStream`` per sequence. Knows nothing of scheduling; the engine tells it which tokens were committed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedcore.outputs import CompletionOutput, FinishReason
from pagedcore.ports import Tokenizer
from pagedcore.request import Request, Sequence
from pagedcore.text.text_stream import TextStream


@dataclass(slots=True)
class _Answer:
    stream: TextStream | None
    parts: list[str] = field(default_factory=list)


class AnswerBook:
    """Texts of all live answers, by sequence id.

    Invariant: the text of an answer is the concatenation of every delta handed out for it.
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
            stream = TextStream(self._tokenizer.new_detokenizer(), sequence.params.stop, sequence.params.min_tokens)
        self._answers[sequence.sequence_id] = _Answer(stream)

    def restore(self, sequence: Sequence) -> None:
        """Begin an answer that has tokens already, with the text that they make certain."""
        self.open(sequence)
        for token_id in sequence.output_token_ids:
            self.add_token(sequence, token_id)

    def close(self, sequence: Sequence) -> None:
        """Forget an answer."""
        self._answers.pop(sequence.sequence_id, None)

    def add_token(self, sequence: Sequence, token_id: int) -> tuple[str, bool]:
        """Take a committed token; return the text that became certain, and whether a stop string was met."""
        answer = self._answers[sequence.sequence_id]
        if answer.stream is None:
            return "", False
        delta = answer.stream.push((token_id,))
        answer.parts.append(delta.text)
        return delta.text, delta.is_stopped

    def finish(self, sequence: Sequence) -> tuple[str, bool]:
        """Return the text held back until the end, and whether that end met a stop string."""
        answer = self._answers[sequence.sequence_id]
        stream, answer.stream = answer.stream, None
        if stream is None:
            return "", False
        rest = stream.finish()
        answer.parts.append(rest)
        return rest, stream.is_stopped

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
