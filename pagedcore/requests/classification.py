"""From texts to requests whose last hidden state a head turns into classes, and from their outputs to what callers get.

Read ``embedding.py`` for what a text is and how it goes through the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagedcore.errors import InvalidPrompt, InvalidRequest, InvalidText, PromptTooLong
from pagedcore.outputs import Classification, RequestOutput
from pagedcore.request_options import RequestOptions
from pagedcore.requests import validation
from pagedcore.requests.embedding import Text, last_state, vector_of
from pagedcore.requests.input_processor import InputProcessor, ProcessedRequest
from pagedcore.text_head import TextHead, activated


@dataclass(frozen=True, slots=True)
class TextClassifier:
    """Validated: an engine whose model classifies texts."""

    inputs: InputProcessor
    head: TextHead

    @classmethod
    def of(cls, inputs: InputProcessor) -> TextClassifier:
        """Return the classifier of an engine's model. Raises ``InvalidRequest`` if it is none."""
        if inputs.head is None or not inputs.head.labels or not inputs.hidden_size:
            raise InvalidRequest("model", "one without classes", "one whose class ends with ForSequenceClassification",
                                 is_described=True)
        return cls(inputs, inputs.head)

    def process(self, text: Text, options: RequestOptions) -> ProcessedRequest:
        """Tokenise and validate one text; callable from any thread.

        Raises:
            InvalidRequest: the text is empty, too long, or neither text nor token ids; or an option is refused.
            TextFailed: the tokenizer failed on it.
        """
        inputs, given = self.inputs, text
        inputs.check_options(options)
        if isinstance(text, str):
            if not text:
                raise InvalidText("text", text, "text of at least 1 character")
            given = inputs.tokens_of_text(text)
        return checked_state(inputs, self.head, given, options, "text")

    def result_of(self, output: RequestOutput) -> Classification:
        """Return the classes of a request that has ended. Raises ``RequestFailed`` if it failed, or was aborted."""
        logits = self.head.logits(vector_of(output))
        return Classification(
            self.head.labels, activated(self.head.activation, logits), logits, len(output.prompt_token_ids),
            output.num_cached_tokens, output.metrics)


def checked_state(
    inputs: InputProcessor, head: TextHead, given: Any, options: RequestOptions, name: str,
    max_tokens: int | None = None,
) -> ProcessedRequest:
    """Return a request for the state that a head takes of a text's tokens.

    Args:
        inputs: of the engine.
        head: says which token counts.
        given: token ids, not looked at yet.
        options: of the request.
        name: what a refusal calls them.
        max_tokens: of the longest, where the model's directory says so.

    Raises:
        InvalidRequest: there are none, or too many, or they are no token ids.
    """
    if not isinstance(given, list | tuple):
        raise InvalidPrompt(name, given, "text, or a list of token ids")
    most = inputs.longest_text(max_tokens)
    if len(given) > most:
        raise PromptTooLong(name, len(given), f"at most {most} tokens")
    ids = validation.validate_prompt_ids(given, inputs.vocab_size, inputs.max_model_len + 1)
    return last_state(inputs, head.without_padding(ids), options)
