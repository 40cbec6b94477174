"""From the values of one call to the engine and back: completions, batches of them, and streams.

The engine validates all values but those that it never sees.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, cast

from pagedcore import AsyncEngine, Chat, Delta, Infill, RequestOutput, SamplingParams
from pagedcore.errors import InvalidPrompt, InvalidRequest, InvalidSampling, RequestTimeout, UnknownParameter
from pagedcore.request_options import CALLERS_OPTIONS, TIMEOUT, OptionKeywords, sampling_advice
from pagedcore_bentoml.wire import BatchCompletion, Completion, completion_of
from pagedcore_http.salts import Caller

MAX_BATCH_PROMPTS: Final = 256
"""Prompts of one batch: they wait for room together, and one caller's must not fill the process."""


@dataclass(frozen=True, slots=True)
class Call:
    """What comes with a prompt, as the caller wrote it."""

    sampling: Any
    timeout_s: Any
    given: Mapping[str, Any] = field(repr=False)
    """Every option that a caller may give."""
    caller: Caller = field(default_factory=Caller)

    @classmethod
    def of(cls, asked: Mapping[str, Any]) -> Call:
        """Take what is a call's among the arguments of an endpoint."""
        return cls(asked.get("sampling"), asked["timeout_s"], {name: asked[name] for name in CALLERS_OPTIONS})

    @classmethod
    def in_python(cls, params: Any, timeout_s: Any, options: Mapping[str, Any]) -> Call:
        """Take what an endpoint of a subclass says. Raises ``UnknownParameter``."""
        for name in options.keys() - CALLERS_OPTIONS.keys():
            raise UnknownParameter.named("option", name, ("timeout_s", *CALLERS_OPTIONS), sampling_advice(name))
        return cls(params, timeout_s, {**CALLERS_OPTIONS, **options})

    @property
    def cache_salt(self) -> Any:
        """The salt as the caller named it."""
        return self.given["cache_salt"]

    @property
    def options(self) -> OptionKeywords:
        """The options of the one prompt, with what the service says of its caller. Raises ``InvalidRequest``."""
        return self.options_with(self.given["request_id"])

    def options_with(self, label: Any) -> OptionKeywords:
        """Return the options of a prompt with this label. Raises ``InvalidRequest``."""
        return self.caller.options(cast(OptionKeywords, {**self.given, "request_id": label}))

    def params(self) -> SamplingParams:
        """Return the parameters of the one prompt. Raises ``InvalidRequest``."""
        return _params(self.sampling)

    def params_of_each(self, num_prompts: int) -> Sequence[SamplingParams]:
        """Return the parameters of each prompt of a batch. Raises ``InvalidRequest``."""
        if not isinstance(self.sampling, list):
            return [_params(self.sampling)] * num_prompts
        if len(self.sampling) != num_prompts:
            raise InvalidSampling("sampling", len(self.sampling), f"one for all, or {num_prompts}, one for each prompt")
        return [_params_at(place, sampling) for place, sampling in enumerate(self.sampling)]

    def options_of_each(self, num_prompts: int) -> Sequence[OptionKeywords]:
        """Return the options of each prompt of a batch. Raises ``InvalidRequest`` for one label of several prompts."""
        label = self.given["request_id"]
        if label is None:
            return [self.options] * num_prompts
        labels = label if isinstance(label, list) else [label]
        if len(labels) != num_prompts:
            given = label if isinstance(label, str) else len(labels)
            raise InvalidRequest("request_id", given, f"a list of {num_prompts}, one for each prompt")
        return [self.options_with(label) for label in labels]

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Cancel the block when the caller's time is up.

        Raises:
            InvalidRequest: the time is not a number of seconds, or longer than thirty days.
            RequestTimeout: it is up.
        """
        seconds = TIMEOUT.check("timeout_s", self.timeout_s)
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise RequestTimeout(seconds or 0.0) from None


def _params(sampling: Any) -> SamplingParams:
    if isinstance(sampling, SamplingParams):
        return sampling
    return SamplingParams.from_mapping({} if sampling is None else sampling)


def _params_at(place: int, sampling: Any) -> SamplingParams:
    with _refused_at(f"sampling[{place}]"):
        return _params(sampling)


@contextmanager
def _refused_at(where: str) -> Iterator[None]:
    """Let a refusal name the entry of a batch that it is about."""
    try:
        yield
    except InvalidRequest as error:
        what = error.what
        rest = what.removeprefix("prompt") if what.startswith("prompt") else "" if " " in what else f".{what}"
        error.what = where + rest
        error.args = (str(error).replace(what, error.what, 1), *error.args[1:])
        raise


async def _output_at(place: int, future: Future[RequestOutput]) -> RequestOutput:
    with _refused_at(f"prompts[{place}]"):
        return await asyncio.wrap_future(future)


def around(prompt: Any, suffix: Any) -> Any:
    """Return a prompt with the text behind its completion; ``None`` or empty: without. Raises ``InvalidPrompt``."""
    return prompt if suffix is None or suffix == "" else Infill(prompt, suffix)


async def output_of(engine: AsyncEngine, prompt: Any, call: Call) -> RequestOutput:
    """Complete one prompt; cancelling this aborts the request.

    Raises:
        PagedcoreError: as from ``AsyncEngine.submit``, or the error of a completion.
    """
    params = call.params()
    async with call.in_time():
        output = await asyncio.wrap_future(engine.submit(prompt, params, **call.options))
    output.raise_for_error()
    return output


async def complete(engine: AsyncEngine, prompt: Any, call: Call) -> Completion:
    """Do the same; return what a response has of it."""
    return await completion_of(await output_of(engine, prompt, call))


@dataclass(frozen=True, slots=True)
class ChatTools:
    """What a caller says of a chat besides its messages, as it was written."""

    tools: Any
    choice: Any
    is_parallel: Any
    template_arguments: Any = None
    reasoning_effort: Any = None
    adds_prompt: Any = None
    continues: Any = None

    @classmethod
    def of(cls, asked: Mapping[str, Any]) -> ChatTools:
        """Take what is a chat's among the arguments of an endpoint."""
        return cls(asked["tools"], asked["tool_choice"], asked["parallel_tool_calls"], asked["chat_template_kwargs"],
                   asked["reasoning_effort"], asked["add_generation_prompt"], asked["continue_final_message"])


async def complete_chat(engine: AsyncEngine, messages: Any, tools: ChatTools, call: Call) -> Completion:
    """Complete a chat, whose model may call tools; cancelling this aborts the request. Raises as ``complete``."""
    if type(tools.is_parallel) is not bool:
        raise InvalidRequest("parallel_tool_calls", tools.is_parallel, "true or false")
    form = engine.chat_format
    arguments = form.arguments(tools.template_arguments, tools.reasoning_effort, "chat_template_kwargs")
    prompt = Chat.prompt_of(
        messages, tools.tools, arguments, add_generation_prompt=tools.adds_prompt,
        continue_final_message=tools.continues)
    turn = form.turn(prompt, call.params(), tools.choice, tools.is_parallel)
    async with call.in_time():
        output = await asyncio.wrap_future(engine.submit(prompt, turn.params, **call.options))
    output.raise_for_error()
    return await completion_of(output, turn)


async def complete_all(engine: AsyncEngine, prompts: Any, call: Call) -> BatchCompletion:
    """Complete several prompts, in order; cancelling this aborts all of them.

    Raises:
        InvalidRequest: a prompt, its parameters or their number is refused, and with it the batch; ``what`` has the
            place of the prompt.
        EngineOverloaded: the waiting queue is full.
    """
    if not isinstance(prompts, list) or not 1 <= len(prompts) <= MAX_BATCH_PROMPTS:
        given = len(prompts) if isinstance(prompts, list) else prompts
        raise InvalidPrompt("prompts", given, f"a list of 1 to {MAX_BATCH_PROMPTS} prompts")
    params, options = call.params_of_each(len(prompts)), call.options_of_each(len(prompts))
    futures: list[Future[RequestOutput]] = []
    try:
        async with call.in_time():
            for place, (prompt, its_params, its_options) in enumerate(zip(prompts, params, options, strict=True)):
                with _refused_at(f"prompts[{place}]"):
                    # Why: a full queue refuses the first and so the batch; the others wait for their room.
                    futures.append(engine.submit(prompt, its_params, wait_for_room=place > 0, **its_options))
                # Why: each may take a millisecond or two to tokenise.
                await asyncio.sleep(0)
            outputs = await asyncio.gather(*map(_output_at, count(), futures))
    finally:
        for future in futures:
            future.cancel()
    return BatchCompletion(completions=[await completion_of(output) for output in outputs])


def deltas_of(engine: AsyncEngine, prompt: Any, call: Call) -> AsyncGenerator[Delta, None]:
    """Complete one prompt delta by delta; closing the generator aborts the request. Raises as ``AsyncEngine.generate``,
    and ``InvalidRequest`` for parameters at once."""
    return engine.generate(prompt, call.params(), timeout_s=call.timeout_s, **call.options)
