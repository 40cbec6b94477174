"""From a prompt and given completions to requests that score them, and from their outputs to what callers get.

Each completion is a text that begins with the prompt, generates nothing and has the tokens behind the prompt scored. So
they share what the prefix cache has of the prompt, and their scores are those of a completion that the engine made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pagedcore.errors import InvalidPrompt, InvalidText, PromptTooLong, RequestFailed
from pagedcore.outputs import CompletionScore, RequestOutput
from pagedcore.request_options import NO_OPTIONS, RequestOptions
from pagedcore.requests import validation
from pagedcore.requests.embedding import Text
from pagedcore.requests.input_processor import InputProcessor, ProcessedRequest, Prompt
from pagedcore.sampling_params import SamplingParams

_PARAMS: Final = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0)
_ONE_TOKEN: Final = SamplingParams(max_tokens=1)


@dataclass(frozen=True, slots=True)
class CompletionScorer:
    """Validated: the prompt that completions are scored behind."""

    inputs: InputProcessor
    prompt_ids: list[int]

    @classmethod
    def of(cls, inputs: InputProcessor, prompt: Prompt) -> CompletionScorer:
        """Tokenise the prompt. Raises as ``Engine.add_request``."""
        return cls(inputs, inputs.process(prompt, _ONE_TOKEN, NO_OPTIONS).token_ids)

    def process(self, completion: Text, options: RequestOptions) -> ProcessedRequest:
        """Tokenise and validate one completion; callable from any thread.

        Raises:
            InvalidRequest: it is empty, too long behind the prompt, or neither text nor token ids; or an option is
                refused.
            TextFailed: the tokenizer failed on it.
        """
        inputs = self.inputs
        inputs.check_options(options)
        given: Any = completion
        if isinstance(completion, str):
            if not completion:
                raise InvalidText("completion", completion, "text of at least 1 character")
            given = inputs.tokens_of_text(completion, adds_special_tokens=False)
        elif not isinstance(completion, list | tuple):
            raise InvalidPrompt("completion", completion, "text, or a list of token ids")
        num_prompt, most = len(self.prompt_ids), min(inputs.max_model_len, inputs.num_pool_tokens - 1)
        if num_prompt + len(given) > most:
            raise PromptTooLong("completion", len(given), f"at most {most - num_prompt} tokens behind this prompt")
        ids = validation.validate_prompt_ids(given, inputs.vocab_size, inputs.max_model_len + 1)
        return ProcessedRequest(
            [*self.prompt_ids, *ids], _PARAMS, options, 1, frozenset(), has_candidates=False, context=inputs.context(),
            num_unscored=num_prompt - 1,
        )

    def score_of(self, output: RequestOutput) -> CompletionScore:
        """Return the score of a request that has ended.

        Raises:
            RequestFailed: it failed; or it was aborted.
        """
        output.raise_for_error()
        num_prompt, num_tokens = len(self.prompt_ids), len(output.prompt_token_ids)
        entries = (output.prompt_logprobs or ())[num_prompt:num_tokens]
        logprobs = tuple(one.logprob for one in entries if one is not None)
        if len(logprobs) < num_tokens - num_prompt:
            raise RequestFailed("the request was aborted before its completion was computed")
        return CompletionScore(output.prompt_token_ids[num_prompt:], logprobs, num_prompt, output.num_cached_tokens)
