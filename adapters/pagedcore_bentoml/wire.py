"""Inputs and outputs of the service's endpoints that complete, as BentoML's schema shows them.

The input models describe values and leave their validation to the engine, so that ``true`` is never taken for a number.
The error of a body that cannot be read is kept in the request's scope, for the endpoint to refuse.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from inspect import Parameter, Signature
from typing import Annotated, Any, Final, TypeVar

from bentoml import IODescriptor, get_current_service
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, create_model
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pagedcore import CompletionOutput, RequestOutput, TokenLogprobs
from pagedcore.errors import PagedcoreError
from pagedcore.request_options import CALLERS_OPTIONS, OPTIONS
from pagedcore.tool_calls.chat_format import ChatTurn
from pagedcore_http.body import MAX_BODY_BYTES, read_fields
from pagedcore_http.event_stream import EventStream
from pagedcore_http.events import stop_of
from pagedcore_http.json_pieces import map_in_pieces, with_list
from pagedcore_http.refusals import CLIENT_CLOSED_REQUEST

F = TypeVar("F", bound=Callable[..., Any])
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
Seconds = Annotated[Any, WithJsonSchema({"type": "number", "description": "Longest time to the last token."})]
Tools = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "object"},
                                       "description": "Function tools, as OpenAI's chats have them."})]
ToolChoice = Annotated[Any, WithJsonSchema({"description": "auto, none, required, or an object with a tool's name."})]
Parallel = Annotated[Any, WithJsonSchema({"type": "boolean", "description": "Whether several calls are allowed."})]
TemplateArguments = Annotated[Any, WithJsonSchema({"type": "object", "description": "Of the model's chat template."})]
Flag = Annotated[Any, WithJsonSchema({"type": "boolean", "description": "How the prompt of the chat ends."})]
Effort = Annotated[Any, WithJsonSchema({"type": "string", "description": "Of reasoning: none, low, medium, high, ..."})]
Suffix = Annotated[Any, WithJsonSchema({"type": "string", "description": "Text behind the gap to be filled."})]
LabelOfEach = Annotated[Any, WithJsonSchema({"description": "A list of labels, one for each prompt."})]


class EndpointInput(IODescriptor):
    """Base of the inputs; BentoML maps positional arguments of a call to fields in their order."""

    # Safety: BentoML logs pydantic's errors, so these must not repeat a prompt or a salt.
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    @classmethod
    async def from_http_request(cls, request: Request, serde: Any) -> Any:
        """Read the body within limits; the error of a refused one is kept in the scope."""
        try:
            if is_from_sibling(request):
                return await super().from_http_request(request, serde)
            required = [name for name, field in cls.model_fields.items() if field.is_required()]
            return cls.model_construct(**await read_fields(request, cls.model_fields, required, _max_body_bytes()))
        except PagedcoreError as error:
            request.scope[REFUSAL_KEY] = error
        except ClientDisconnect:
            request.scope[REFUSAL_KEY] = HTTPException(CLIENT_CLOSED_REQUEST, "the client left before its body's end.")
        return cls.model_construct(**dict.fromkeys(cls.model_fields))


def is_from_sibling(request: Request) -> bool:
    """Whether BentoML's own ``depends`` sent this over the private Unix socket that it made for this service.

    Between its processes BentoML uses pickle. A process that can open that socket controls this one anyway; from any
    other place the same content type is refused, by BentoML at the main service and by ``read_fields`` elsewhere.
    """
    return request.client is None and request.headers.get("content-type", "") == _PICKLE


def _max_body_bytes() -> int:
    return getattr(get_current_service(), "body_limit", MAX_BODY_BYTES)


def option_fields() -> dict[str, Any]:
    """Return the fields of the options that callers may give, and of the limit of time."""
    schemas = {name: WithJsonSchema(dict(OPTIONS[name].schema or {})) for name in CALLERS_OPTIONS}
    made = [(name, (Annotated[Any, schemas[name]], default)) for name, default in CALLERS_OPTIONS.items()]
    # Why there: the order of the fields is that of a call's positional arguments.
    return dict([made[0], ("timeout_s", (Seconds, None)), *made[1:]])


PromptInput: Final = create_model(
    "PromptInput", __base__=EndpointInput, __module__=__name__, __doc__="One prompt.",
    prompt=(Prompt, ...), sampling=(Sampling, None), **option_fields(), suffix=(Suffix, None),
)
ChatInput: Final = create_model(
    "ChatInput", __base__=EndpointInput, __module__=__name__, __doc__="One conversation.",
    messages=(Messages, ...), sampling=(Sampling, None), **option_fields(), tools=(Tools, None),
    tool_choice=(ToolChoice, None), parallel_tool_calls=(Parallel, True),
    chat_template_kwargs=(TemplateArguments, None),
    reasoning_effort=(Effort, None), add_generation_prompt=(Flag, None), continue_final_message=(Flag, None),
)
BatchInput: Final = create_model(
    "BatchInput", __base__=EndpointInput, __module__=__name__, __doc__="Several prompts of one caller.",
    prompts=(Prompts, ...), sampling=(SamplingOfEach, None), **{**option_fields(), "request_id": (LabelOfEach, None)},
)


@cache
def _parameters_of(spec: Any) -> Signature:
    made = [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation="Any",
                  default=Parameter.empty if field.is_required() else field.default)
        for name, field in spec.model_fields.items()
    ]
    context = Parameter("ctx", Parameter.POSITIONAL_OR_KEYWORD, annotation="bentoml.Context", default=None)
    return Signature([*made, context])


def takes(spec: Any) -> Callable[[F], F]:
    """Make a decorator: a method of any arguments says that its parameters are an input's fields, and a context."""

    def decorate(method: F) -> F:
        signature, itself = inspect.signature(method), Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [itself, *_parameters_of(spec).parameters.values()]
        method.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return method

    return decorate


def arguments_of(spec: Any, given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of such a method by name, defaults among them. Raises ``TypeError`` for others."""
    bound = _parameters_of(spec).bind(*given, **named)
    bound.apply_defaults()
    return bound.arguments


class Logprobs(BaseModel):
    """Log-probabilities of one token; JSON has no infinity, so -9999 stands for a token that cannot be."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = Field(default_factory=list)


class Call(BaseModel):
    """One call of a tool, as the model wrote it."""

    id: str
    name: str
    arguments: str
    is_complete: bool = True


class Answer(BaseModel):
    """One completion of a request."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop text of the caller's own, or the token, that ended it."""
    logprobs: list[Logprobs] = Field(default_factory=list)
    """One entry per token when asked for; never null, which BentoML's clients cannot read in a list's place."""
    tool_calls: list[Call] = Field(default_factory=list)
    """Only in a chat."""
    reasoning: str = ""
    """Only in a chat, of a model that reasons."""
    error: str | None = None
    """Only in a batch, where one failure leaves the others alone."""


class TokenUsage(BaseModel):
    """Tokens of a request, all its completions together."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


class EndpointOutput(IODescriptor):
    """An output that is sent whole."""

    @classmethod
    async def to_http_response(cls, obj: Any, serde: Any) -> Response:
        """Return the response, its long lists encoded in pieces."""
        if serde.media_type != JSON:
            response: Response = await super().to_http_response(obj, serde)
            return response
        return Response(await obj.json_in_pieces(), media_type=JSON)

    @abstractmethod
    async def json_in_pieces(self) -> str:
        """Return the JSON of ``model_dump_json``."""


class Completion(EndpointOutput):
    """All completions of one prompt."""

    request_id: str
    outputs: list[Answer]
    usage: TokenUsage
    prompt_logprobs: list[Logprobs | None] = Field(default_factory=list)
    """One entry per token of the prompt when asked for; of the first, null."""

    async def json_in_pieces(self) -> str:
        """Return the JSON of ``model_dump_json``, without ``prompt_logprobs`` that nobody asked for."""
        completions = [
            await with_list(one.model_dump_json(exclude={"logprobs"}), "logprobs", one.logprobs, json_of)
            for one in self.outputs
        ]
        text = self.model_dump_json(exclude={"outputs", "prompt_logprobs"})
        if self.prompt_logprobs:
            text = await with_list(text, "prompt_logprobs", self.prompt_logprobs, json_of)
        return await with_list(text, "outputs", completions, str)


class BatchCompletion(EndpointOutput):
    """The completions of a batch, in the order of its prompts."""

    completions: list[Completion]

    async def json_in_pieces(self) -> str:
        """Return the JSON of ``model_dump_json``."""
        return f'{{"completions":[{",".join([await one.json_in_pieces() for one in self.completions])}]}}'


class EventText(IODescriptor):
    """The output of a streaming endpoint: text in the form of server-sent events."""

    media_type = "text/event-stream"

    @classmethod
    def model_json_schema(cls, *_: Any, **__: Any) -> dict[str, Any]:
        """Return the schema of text."""
        return {"type": "string"}

    @classmethod
    async def to_http_response(cls, obj: Any, serde: Any) -> EventStream:
        """Return the response that sends what an endpoint's generator yields."""
        return EventStream(obj)


async def completion_of(output: RequestOutput, turn: ChatTurn | None = None) -> Completion:
    """Return the model of an engine's output, read as a chat's if it is one."""
    completions = [
        Answer(token_ids=list(one.token_ids), error=None if one.error is None else str(one.error),
               logprobs=await map_in_pieces(logprobs_of, one.logprobs or ()), **_text_of(one, turn))
        for one in output.outputs
    ]  # fmt: skip
    return Completion(
        request_id=output.request_id, outputs=completions, usage=TokenUsage(**asdict(output.usage)),
        prompt_logprobs=await map_in_pieces(prompt_logprobs_of, output.prompt_logprobs or ()),
    )


def _text_of(one: CompletionOutput, turn: ChatTurn | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"index": one.index, "text": one.text, "finish_reason": one.finish_reason,
                              **stop_of(one)}
    if turn is None or turn.is_plain:
        return fields
    reader = turn.reader()
    parsed = reader.read_all(one)
    return {**fields, "finish_reason": reader.reason(one), "text": parsed.content, "reasoning": parsed.reasoning,
            "tool_calls": [Call(**asdict(call)) for call in parsed.tool_calls]}


def logprobs_of(entry: TokenLogprobs) -> Logprobs:
    """Return the model of one token's log-probabilities."""
    return Logprobs(token_id=entry.token_id, logprob=max(entry.logprob, LEAST_LOGPROB), top=list(entry.top))


def prompt_logprobs_of(entry: TokenLogprobs | None) -> Logprobs | None:
    """Return the model of a prompt token's; the first token has none."""
    return None if entry is None else logprobs_of(entry)


def json_of(entry: Logprobs | None) -> str:
    """Return their JSON."""
    return "null" if entry is None else entry.model_dump_json()
