"""From a prompt and given completions to requests that score them, and from their outputs to what callers get.

Each completion is a text that begins with the prompt, generates nothing and has the tokens behind the prompt scored. So
they share what the prefix cache has of the prompt, and their scores are those of a completion that the engine made:
by the model's own distribution, or by the one that a request with the same parameters draws from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pagedcore.errors import InvalidPrompt, InvalidSampling, InvalidText, PromptTooLong, RequestFailed
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
    scored_as: ProcessedRequest | None
    """The request that draws from the distribution of the scores; ``None``: they are of the model's own."""

    @classmethod
    def of(
        cls, inputs: InputProcessor, prompt: Prompt, params: SamplingParams | None = None,
        temperature: float | None = None,
    ) -> CompletionScorer:
        """Tokenise the prompt, and compile what the parameters have of a grammar. Arguments as ``Engine.score``.

        Raises:
            InvalidRequest: as ``Engine.add_request``, or both parameters and a temperature are given.
        """
        if temperature is not None:
            if params is not None:
                raise InvalidSampling("temperature", temperature, "None where params are given, which have their own")
            params = SamplingParams(temperature=temperature, logprobs_mode="processed")
        processed = inputs.process(prompt, _ONE_TOKEN if params is None else params, NO_OPTIONS)
        return cls(inputs, processed.token_ids, processed if processed.params.logprobs_mode == "processed" else None)

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
            num_unscored=num_prompt - 1, scored_as=self.scored_as,
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
