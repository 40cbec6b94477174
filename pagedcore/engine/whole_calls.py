"""Calls of an engine that end with their completions: many prompts, or one chat."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

from pagedcore.analysis.quotes.quoting import Quoting
from pagedcore.config.keywords import refuses_unknown
from pagedcore.engine.step import StepRunner
from pagedcore.outputs import RequestOutput
from pagedcore.protocols import ChatMessage
from pagedcore.request_options import OptionKeywords, read_options, sampling_advice
from pagedcore.requests.chat import Chat
from pagedcore.requests.infill import Infill
from pagedcore.requests.input_processor import ProcessedRequest, Prompt, is_single
from pagedcore.requests.pending_output import PendingOutput
from pagedcore.requests.request import Request
from pagedcore.requests.stats import EngineStats
from pagedcore.requests.text_verbs import TextVerbs
from pagedcore.requests.validation import pair_with_params
from pagedcore.sampling_params import SamplingParams
from pagedcore.tool_calls.chat_format import ChatFormat
from pagedcore.tool_calls.chat_reply import KEYWORDS, ChatReply, begin_chat, read_reply


class WholeCalls(Quoting, TextVerbs):
    """The part of an engine that completes prompts by its own steps."""

    chat_format: ChatFormat
    _steps: StepRunner

    @abstractmethod
    def prepare(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[OptionKeywords]
    ) -> ProcessedRequest:
        """As ``Engine`` has it."""

    @abstractmethod
    def accept(self, processed: ProcessedRequest, accepted: list[Request] | None = None) -> Request:
        """As ``Engine`` has it."""

    @abstractmethod
    def can_accept(self, num_sequences: int = 1) -> bool:
        """As ``Engine`` has it."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """As ``Engine`` has it."""

    @abstractmethod
    def _step_or_sleep(self) -> list[PendingOutput]: ...

    @abstractmethod
    def _withdraw(self, requests: Iterable[Request]) -> None: ...

    @refuses_unknown("keyword", sampling_advice)
    def generate(
        self, prompts: Iterable[Prompt] | Chat | Infill,
        params: SamplingParams | Iterable[SamplingParams] | None = None, *, show_progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete many prompts and return their outputs in the same order; other requests advance along with them.

        Args:
            prompts: any number, from a list or another iterable, which is read to its end before anything runs; they
                are fed to the waiting queue as it has room. One list of chat messages is one prompt, as is an
                ``Infill``.
            params: one for all, or one per prompt.
            show_progress: a progress bar; ``None`` shows it on terminals and in notebooks only.

        Raises:
            InvalidRequest: a prompt or its parameters are refused; then none was started.
        """
        given = [prompts] if is_single(prompts) else prompts
        return self._complete([self.prepare(prompt, one) for prompt, one in pair_with_params(given, params)],
                              show_progress)

    def chat(
        self, messages: Sequence[ChatMessage] | Chat, params: SamplingParams | None = None, *,
        tools: Sequence[Mapping[str, Any]] | None = None, tool_choice: Any = None, parallel_tool_calls: bool = True,
        template_arguments: Mapping[str, Any] | None = None, reasoning_effort: str | None = None,
        **options: Unpack[OptionKeywords],
    ) -> ChatReply:
        """Complete one chat and return what the model says; other requests advance along with it.

        Args:
            messages: of the chat, with roles and contents, or a ``Chat``.
            params: as for ``add_request``, like the options.
            tools: that the model may call, as for ``Chat``.
            tool_choice: which of them, and whether it has to: "auto", "none", "required" or
                ``{"type": "function", "function": {"name": ...}}``.
            parallel_tool_calls: whether it may make several calls at once.
            template_arguments: as for ``Chat``, such as ``{"enable_thinking": False}``.
            reasoning_effort: "none" to "max", for a template that reads such an argument.
            **options: as for ``add_request``.

        Raises:
            InvalidRequest: the chat, its tools or its parameters are refused.
            RequestFailed: a completion failed.
        """
        asked = read_options(options, *KEYWORDS)
        prompt, turn = begin_chat(
            self.chat_format, messages, params, tools=tools, tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls, template_arguments=template_arguments,
            reasoning_effort=reasoning_effort)
        (output,) = self._complete([self._input_processor.process(prompt, turn.params, asked)])
        return read_reply(turn, output)

    def _complete(
        self, processed: Iterable[ProcessedRequest], show_progress: bool | None = False
    ) -> list[RequestOutput]:
        from tqdm.auto import tqdm

        waiting, requests = deque(processed), list[Request]()
        # Why: a notebook's output is no terminal, which is what tqdm looks for by itself.
        by_default = False if "ipykernel" in sys.modules else None
        is_hidden = by_default if show_progress is None else not show_progress
        with self._steps.exclusive(), tqdm(total=len(waiting), unit="request", disable=is_hidden) as bar:
            try:
                while waiting or not all(request.is_done for request in requests):
                    while waiting and self.can_accept(waiting[0].params.num_initial_sequences):
                        # Why not appended here: an interrupt between the two calls would leave the request behind.
                        self.accept(waiting.popleft(), requests)
                    self._step_or_sleep()
                    if not bar.disable and (done := sum(request.is_done for request in requests)) > bar.n:
                        bar.set_postfix(tokens=self.stats().num_generated_tokens, refresh=False)
                        bar.update(done - bar.n)
                return [request.output() for request in requests]
            finally:
                self._withdraw(requests)
