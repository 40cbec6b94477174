"""What goes over the wire: the inputs and outputs of the service's four endpoints, as BentoML's schema shows them.

The input models describe; they do not judge: a value goes to the engine's one validator as it came, so that ``true`` is
never taken for a number. A body that cannot be read is noted in the request's scope, for the endpoint to refuse.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any, Final

from bentoml import IODescriptor, get_current_service
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from starlette.requests import Request

from pagedcore import RequestOutput
from pagedcore.errors import PagedcoreError
from pagedcore_bentoml.body import MAX_BODY_BYTES, read_fields

REFUSAL_KEY: Final = "pagedcore_bentoml.refusal"
"""Where a request's scope holds the error of a body that was refused."""
LEAST_LOGPROB: Final = -9999.0
_PICKLE: Final = "application/vnd.bentoml+pickle"

Prompt = Annotated[Any, WithJsonSchema({
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}},
              {"type": "array", "items": {"type": "object"}}],
    "description": "Text, token ids, or chat messages with role and content.",
})]
Messages = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "object"}})]
Prompts = Annotated[Any, WithJsonSchema({"type": "array", "items": {}})]
Sampling = Annotated[Any, WithJsonSchema({"type": "object", "description": "Fields of SamplingParams."})]
SamplingOfEach = Annotated[Any, WithJsonSchema({"description": "Fields of SamplingParams, or a list, one for each."})]
Priority = Annotated[Any, WithJsonSchema({"type": "integer"})]
Seconds = Annotated[Any, WithJsonSchema({"type": "number", "description": "Longest time to the end of the answer."})]


class EndpointInput(IODescriptor):
    """What all endpoints take."""

    # Safety: BentoML logs what pydantic says, so that must not repeat a prompt.
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    @classmethod
    async def from_http_request(cls, request: Request, serde: Any) -> Any:
        """Read the body within limits; what is refused is noted in the scope and read as nothing."""
        try:
            if is_from_sibling(request):
                return await super().from_http_request(request, serde)
            required = [name for name, field in cls.model_fields.items() if field.is_required()]
            return cls.model_construct(**await read_fields(request, cls.model_fields, required, _max_body_bytes()))
        except PagedcoreError as error:
            request.scope[REFUSAL_KEY] = error
            return cls.model_construct(**dict.fromkeys(cls.model_fields))


def is_from_sibling(request: Request) -> bool:
    """Whether BentoML's own ``depends`` sent this over the private Unix socket that it made for this service.

    Between its processes BentoML speaks pickle. Whoever can open that socket owns the process anyway; from any other
    place the same content type is refused, by BentoML at the main door and by ``body`` everywhere else.
    """
    return request.client is None and request.headers.get("content-type", "") == _PICKLE


def _max_body_bytes() -> int:
    return getattr(get_current_service(), "max_body_bytes", MAX_BODY_BYTES)


class PromptInput(EndpointInput):
    """One prompt."""

    prompt: Prompt
    sampling: Sampling = None
    priority: Priority = 0
    timeout_s: Seconds = None


class ChatInput(EndpointInput):
    """One conversation."""

    messages: Messages
    sampling: Sampling = None
    priority: Priority = 0
    timeout_s: Seconds = None


class BatchInput(EndpointInput):
    """Several prompts of one caller."""

    prompts: Prompts
    sampling: SamplingOfEach = None
    priority: Priority = 0
    timeout_s: Seconds = None


class Logprobs(BaseModel):
    """Log-probabilities of one token; JSON has no infinity, so -9999 stands for a token that cannot be."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = Field(default_factory=list)


class Answer(BaseModel):
    """One answer of a request."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[Logprobs] = Field(default_factory=list)
    """One entry per token when asked for; never null, which BentoML's clients cannot read in a list's place."""
    error: str | None = None
    """Only in a batch, where one failure leaves the others alone."""


class TokenUsage(BaseModel):
    """What a request took, all its answers together, in tokens."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


class Completion(IODescriptor):
    """All answers to one prompt."""

    request_id: str
    outputs: list[Answer]
    usage: TokenUsage
    prompt_logprobs: list[Logprobs | None] = Field(default_factory=list)
    """One entry per token of the prompt when asked for; of the first, null."""


class BatchCompletion(IODescriptor):
    """The completions of a batch, in the order of its prompts."""

    completions: list[Completion]


def completion_of(output: RequestOutput) -> Completion:
    """Write an engine's output for the wire."""
    answers = [
        Answer(index=answer.index, text=answer.text, token_ids=list(answer.token_ids),
               finish_reason=answer.finish_reason, error=None if answer.error is None else str(answer.error),
               logprobs=[logprobs_of(entry) for entry in answer.logprobs or ()])
        for answer in output.outputs
    ]
    return Completion(
        request_id=output.request_id, outputs=answers, usage=TokenUsage(**asdict(output.usage)),
        prompt_logprobs=prompt_logprobs_of(output.prompt_logprobs),
    )


def logprobs_of(entry: Any) -> Logprobs:
    """Write one token's log-probabilities for the wire."""
    return Logprobs(token_id=entry.token_id, logprob=max(entry.logprob, LEAST_LOGPROB), top=list(entry.top))


def prompt_logprobs_of(entries: Iterable[Any] | None) -> list[Logprobs | None]:
    """Write those of a prompt, nothing where they were not asked for."""
    return [None if entry is None else logprobs_of(entry) for entry in entries or ()]
