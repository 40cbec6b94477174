"""Renders a conversation with the tokenizer's own chat template and turns its failures into typed errors.

The template is code of the model's author and runs in a sandbox (``template_sandbox.py``). Its errors may quote the
conversation, so an error message repeats only words of the template itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from pagedcore.errors import InvalidPrompt
from pagedcore.protocols import ChatMessage
from pagedcore.tokenizer.template_arguments import NO_ARGUMENTS, RESERVED

_ACCEPTED: Final = "a conversation that the model's chat template accepts"
_CONTINUED: Final = "a conversation whose last message the model's chat template writes exactly once"
_IN_BOUNDS: Final = "a conversation that the model's chat template renders within its bounds"
_COMPLETION: Final = "pagedcore-answer-marker"
"""Stands for the completion before a further turn: any text that no template writes by itself."""
_END_OF_CONTENT: Final = "pagedcore-end-marker"
"""Stands for the end of a message that is continued, likewise."""
_BEFORE: Final = ({"role": "user", "content": "question"}, {"role": "assistant", "content": _COMPLETION})
_PROBE: Final[dict[str, Any]] = {"type": "function", "function": {
    "name": "pagedcore_probe", "description": "It does nothing.", "parameters": {"type": "object", "properties": {}}}}
"""A tool that no template names by itself."""
_MIN_QUOTE: Final = 8
"""Shorter quotes of a template are not useful."""
_MAX_QUOTE: Final = 200


class _NotContinued(Exception):
    """The end of a message's content cannot be found."""


def apply_chat_template(
    tokenizer: Any, messages: Sequence[ChatMessage], *, tokenize: bool, before: Sequence[ChatMessage] = (),
    tools: Sequence[Mapping[str, Any]] = (), arguments: Mapping[str, Any] = NO_ARGUMENTS,
) -> Any:
    """Render ``before`` and the messages up to where the assistant's completion begins, as text or as token ids.

    Tools are JSON schemas of functions, as transformers gives them to templates. Arguments are further variables of the
    template; with ``continue_final_message`` among them the text ends within the last message.

    Raises:
        InvalidPrompt: there is no message, one is not a mapping, the tokenizer has no template, or the template
            refuses the conversation or takes more for it than one rendering may.
    """
    if not messages:
        raise InvalidPrompt("messages", 0, "at least one message")
    for index, message in enumerate(messages):
        if type(message) is not dict and not isinstance(message, Mapping):
            raise InvalidPrompt(f"messages[{index}]", message, "a mapping, usually with role and content")
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidPrompt("messages", messages, "text or token ids, because this tokenizer has no chat template",
                            "Pass the prompt as one text, or use a model made for chat.")
    plain = [dict(message) for message in (*before, *messages)]
    from pagedcore.tokenizer.template_budget import OverBound

    # Why: a template can raise any exception (a missing key, None + text), and each is caused by the prompt.
    limit = _ACCEPTED
    try:
        return _rendered(tokenizer, plain, list(tools), tokenize, dict(arguments))
    except _NotContinued:
        limit, advice = _CONTINUED, ""
    except OverBound as error:
        limit, advice = _IN_BOUNDS, str(error)
    except Exception as error:
        advice = _own_words(str(error), template_source(tokenizer)) or f"It failed with {type(error).__name__}."
    # Safety: raised outside the handler, so that no chained exception carries the conversation.
    raise InvalidPrompt("messages", messages, limit, advice)


def _rendered(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any], tokenize: bool, arguments: dict[str, Any]
) -> Any:
    from pagedcore.tokenizer.template_sandbox import render

    own = getattr(type(tokenizer), "apply_chat_template", None)
    # Why: a tokenizer with a method of its own may have no template in Jinja.
    if own is not None and own.__module__ != "transformers.tokenization_utils_base":
        return tokenizer.apply_chat_template(messages, tokenize=tokenize, return_dict=False,
                                             **({"tools": tools} if tools else {}),
                                             **{"add_generation_prompt": True, **arguments})
    if arguments.pop("continue_final_message", False):
        text = _continued(partial(render, tokenizer, tools=tools, arguments=arguments), messages)
    else:
        text = render(tokenizer, messages, tools, arguments)
    return tokenizer(text, add_special_tokens=False).input_ids if tokenize else text


def _continued(render: Callable[[list[dict[str, Any]]], str], messages: list[dict[str, Any]]) -> str:
    """Render messages up to the end of the last one's content."""
    *others, last = messages
    text = render([*others, {**last, "content": last["content"] + _END_OF_CONTENT}])
    # Safety: a message that holds the mark as well must not choose where the conversation is cut.
    if text.count(_END_OF_CONTENT) != 1:
        raise _NotContinued
    return text.partition(_END_OF_CONTENT)[0]


def template_source(tokenizer: Any) -> str:
    """Return the source of a tokenizer's template, of all its variants; empty if it has none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\0".join(map(str, template.values())) if isinstance(template, Mapping) else str(template)


def arguments_read(tokenizer: Any) -> frozenset[str]:
    """Return the names of the arguments that a tokenizer's template reads, which a caller may give."""
    from pagedcore.tokenizer.template_sandbox import variables_read

    template = getattr(tokenizer, "chat_template", None) or ""
    sources = map(str, template.values()) if isinstance(template, Mapping) else (str(template),)
    own = {*RESERVED, *getattr(tokenizer, "special_tokens_map", ())}
    return frozenset().union(*map(variables_read, sources)) - own


def problem_of(source: str) -> str | None:
    """Return why a text is no template that could be rendered, as a sentence; ``None``: it is one."""
    from jinja2 import TemplateSyntaxError

    from pagedcore.tokenizer.template_sandbox import require_template

    try:
        require_template(source)
    except TemplateSyntaxError as error:
        return f"in line {error.lineno}: {error.message}"
    except Exception as error:  # what else a parser or the sandbox says, which is about the operator's own text
        return f"it cannot be compiled ({type(error).__name__}: {error})."
    return None


def knows_tools(tokenizer: Any) -> bool:
    """Whether a tokenizer's template writes tools into the prompt: it is rendered with one, and looked at.

    Raises:
        InvalidPrompt: it takes more than one rendering may.
    """
    if not template_source(tokenizer):
        return False
    try:
        text: str = apply_chat_template(tokenizer, _BEFORE[:1], tokenize=False, tools=(_PROBE,))
    except InvalidPrompt as error:
        if error.limit == _IN_BOUNDS:
            raise
        return False
    return str(_PROBE["function"]["name"]) in text


def render_turn(
    tokenizer: Any, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = (),
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
) -> str:
    """Render what follows a completion when ``messages`` come next, up to where the next completion begins.

    The template renders a stand-in conversation before the messages. Everything up to its completion is cut off, so
    the text begins with what closes a turn.

    Raises:
        InvalidPrompt: as ``apply_chat_template``, or the place of the completion cannot be found.
    """
    text: str = apply_chat_template(tokenizer, messages, tokenize=False, before=_BEFORE, tools=tools,
                                    arguments=arguments)
    # Safety: a message that holds the stand-in as well must not choose where the conversation is cut.
    if text.count(_COMPLETION) != 1:
        limit = "text or token ids, because this chat template does not write an earlier completion exactly once"
        raise InvalidPrompt("messages", messages, limit)
    return text.partition(_COMPLETION)[2]


def _own_words(message: str, text: str) -> str:
    """Return the longest beginning of an error message that the template itself contains, as a sentence."""
    message = message[:_MAX_QUOTE]
    length = next((n for n in range(len(message), 0, -1) if message[:n] in text), 0)
    if length < _MIN_QUOTE:
        return ""
    return f"The template says: {message[:length].strip()}{'' if length == len(message) else ' ...'}"
