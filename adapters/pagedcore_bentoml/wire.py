"""What goes over the wire: the inputs and outputs of the service's four endpoints, as BentoML's schema shows them.

The input models describe; they do not judge: a value goes to the engine's one validator as it came, so that ``true`` is
never taken for a number. A body that cannot be read is noted in the request's scope, for the endpoint to refuse.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict
from typing import Annotated, Any, Final

from bentoml import IODescriptor, get_current_service
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from pagedcore import RequestOutput, TokenLogprobs
from pagedcore.errors import PagedcoreError
from pagedcore_bentoml.body import MAX_BODY_BYTES, read_fields
from pagedcore_bentoml.pieces import map_in_pieces, with_list

REFUSAL_KEY: Final = "pagedcore_bentoml.refusal"
"""Where a request's scope holds the error of a body that was refused."""
LEAST_LOGPROB: Final = -9999.0
JSON: Final = "application/json"
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


class EndpointOutput(IODescriptor):
    """What an endpoint gives back whole."""

    @classmethod
    async def to_http_response(cls, obj: Any, serde: Any) -> Response:
        """Write it, long lists in pieces."""
        if serde.media_type != JSON:
            response: Response = await super().to_http_response(obj, serde)
            return response
        return Response(await obj.json_in_pieces(), media_type=JSON)

    @abstractmethod
    async def json_in_pieces(self) -> str:
        """Return what ``model_dump_json`` does."""


class Completion(EndpointOutput):
    """All answers to one prompt."""

    request_id: str
    outputs: list[Answer]
    usage: TokenUsage
    prompt_logprobs: list[Logprobs | None] = Field(default_factory=list)
    """One entry per token of the prompt when asked for; of the first, null."""

    async def json_in_pieces(self) -> str:
        """Return what ``model_dump_json`` does."""
        answers = [
            await with_list(answer.model_dump_json(exclude={"logprobs"}), "logprobs", answer.logprobs, json_of)
            for answer in self.outputs
        ]
        text = self.model_dump_json(exclude={"outputs", "prompt_logprobs"})
        text = await with_list(text, "prompt_logprobs", self.prompt_logprobs, json_of)
        return await with_list(text, "outputs", answers, str)


class BatchCompletion(EndpointOutput):
    """The completions of a batch, in the order of its prompts."""

    completions: list[Completion]

    async def json_in_pieces(self) -> str:
        """Return what ``model_dump_json`` does."""
        return f'{{"completions":[{",".join([await one.json_in_pieces() for one in self.completions])}]}}'


async def completion_of(output: RequestOutput) -> Completion:
    """Write an engine's output for the wire."""
    answers = [
        Answer(index=answer.index, text=answer.text, token_ids=list(answer.token_ids),
               finish_reason=answer.finish_reason, error=None if answer.error is None else str(answer.error),
               logprobs=await map_in_pieces(logprobs_of, answer.logprobs or ()))
        for answer in output.outputs
    ]  # fmt: skip
    return Completion(
        request_id=output.request_id, outputs=answers, usage=TokenUsage(**asdict(output.usage)),
        prompt_logprobs=await map_in_pieces(prompt_logprobs_of, output.prompt_logprobs or ()),
    )


def logprobs_of(entry: TokenLogprobs) -> Logprobs:
    """Write one token's log-probabilities for the wire."""
    return Logprobs(token_id=entry.token_id, logprob=max(entry.logprob, LEAST_LOGPROB), top=list(entry.top))


def prompt_logprobs_of(entry: TokenLogprobs | None) -> Logprobs | None:
    """Write those of a token of a prompt, whose first has none."""
    return None if entry is None else logprobs_of(entry)


def json_of(entry: Logprobs | None) -> str:
    """Write them as JSON."""
    return "null" if entry is None else entry.model_dump_json()
