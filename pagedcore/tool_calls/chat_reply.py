"""``chat()`` of an engine of either kind: from messages to a request, and from its output to what was said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pagedcore.errors import InvalidRequest
from pagedcore.outputs import FinishReason, RequestOutput
from pagedcore.sampling_params import SamplingParams, validate_params
from pagedcore.tokenizer.chat import Chat
from pagedcore.tool_calls.chat_format import ChatFormat, ChatTurn
from pagedcore.tool_calls.events import ParsedCompletion, ToolCall

KEYWORDS: Final = ("tools", "tool_choice", "parallel_tool_calls", "template_arguments", "reasoning_effort")
"""What ``chat()`` takes besides messages, parameters and the options of a request."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """What the model said in a chat: its first completion, and with ``n`` above 1 all of them in ``completions``."""

    output: RequestOutput
    """Tokens, log-probabilities, usage and times."""
    completions: tuple[ParsedCompletion, ...]

    @property
    def content(self) -> str:
        """The text for the user, without reasoning and calls."""
        return self.completions[0].content

    @property
    def reasoning(self) -> str:
        """What the model thought before; empty for one that does not write it."""
        return self.completions[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools that it made."""
        return self.completions[0].tool_calls

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended: "length" is a reply that was cut off."""
        return self.output.outputs[0].finish_reason

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a message, for the next call's messages; a call that was cut off is left out."""
        calls = [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                 for call in self.tool_calls if call.is_complete]
        thought = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.content, **thought, **({"tool_calls": calls} if calls else {})}


def begin_chat(
    form: ChatFormat, messages: Any, params: SamplingParams | None, *, tools: Any, tool_choice: Any,
    parallel_tool_calls: Any, template_arguments: Any, reasoning_effort: Any,
) -> tuple[Chat, ChatTurn]:
    """Return the prompt of a chat, and how its completions are constrained and read.

    Raises:
        InvalidRequest: messages, parameters, tools or an argument of the template are refused, or a ``Chat`` is given
            beside what it has itself.
    """
    if type(messages) is Chat:
        prompt: Chat = messages
        for name, value in (("tools", tools), ("template_arguments", template_arguments),
                            ("reasoning_effort", reasoning_effort)):
            if value is not None:
                raise InvalidRequest(name, value, "None beside a Chat, which has its own")
    else:
        prompt = Chat(messages, tools, template_arguments=form.arguments(template_arguments, reasoning_effort))
    if type(parallel_tool_calls) is not bool:
        raise InvalidRequest("parallel_tool_calls", parallel_tool_calls, "True or False")
    return prompt, form.turn(prompt, validate_params(params), tool_choice, parallel_tool_calls)


def read_reply(turn: ChatTurn, output: RequestOutput) -> ChatReply:
    """Return what an output says. Raises the first error of a completion, ``TextFailed`` if one cannot be read."""
    output.raise_for_error()
    return ChatReply(output, tuple(turn.reader().read_all(one) for one in output.outputs))
