"""Arguments of chat templates, such as ``enable_thinking``: what a caller may give to which template.

An argument is part of the prompt, so that a caller may give only what a template reads by itself, and nothing that the
chat or the tokenizer has already. A template of one's own is none of them: templates are programs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol, runtime_checkable

from pagedcore.config.limits import MAX_COUNT, MAX_TEMPLATE_ARGUMENT_LENGTH, MAX_TEMPLATE_ARGUMENTS
from pagedcore.errors import InvalidPrompt, InvalidRequest, describe_name, did_you_mean

NO_ARGUMENTS: Final[Mapping[str, Any]] = MappingProxyType({})
"""Those of a chat that has none of its own."""
RESERVED: Final = frozenset({
    "messages", "conversation", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt",
    "continue_final_message", "tokenizer_kwargs", "return_dict", "return_tensors", "return_assistant_tokens_mask",
    "padding", "truncation", "max_length",
})
"""What a template, or what renders it, has from elsewhere."""
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of ``reasoning_effort``."""
_SWITCHES: Final = ("enable_thinking", "thinking")
"""Arguments by which templates switch reasoning on and off."""
_NAME: Final = re.compile("[A-Za-z_][A-Za-z0-9_]{0,39}")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_VALUES: Final = f"true, false, a number, or text of at most {MAX_TEMPLATE_ARGUMENT_LENGTH} characters"


@runtime_checkable
class TakesArguments(Protocol):
    """A tokenizer whose ``encode_chat``, ``encode_chat_turn`` and ``render_chat`` take ``arguments`` too: a mapping of
    names to values, ``add_generation_prompt`` and ``continue_final_message`` among them.
    """

    @property
    def template_arguments(self) -> frozenset[str]:
        """The names that a caller may give."""


def validate_arguments(what: str, given: object) -> Mapping[str, Any]:
    """Return a copy of the arguments of a chat, none for ``None``; which of them a template reads is not known here.

    Raises:
        InvalidPrompt: they are no mapping or too many, a name is none or reserved, or a value is no truth value, finite
            number or short text.
    """
    if given is None:
        return NO_ARGUMENTS
    if not isinstance(given, Mapping):
        raise InvalidPrompt(what, given, "names with values")
    if len(given) > MAX_TEMPLATE_ARGUMENTS:
        raise InvalidPrompt(what, len(given), f"at most {MAX_TEMPLATE_ARGUMENTS} arguments")
    return {name: _value(what, name, value) for name, value in given.items()}


def _value(what: str, name: object, value: Any) -> Any:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidPrompt(what, describe_name(name), "names of variables of the template", is_described=True)
    if name in RESERVED or name.endswith(("_token", "_tokens")):
        advice = "Build the engine with chat_template=..., or pagedcore serve with --chat-template FILE."
        raise InvalidPrompt(f"{what}.{name}", value, "left out: it is no argument of a template",
                            advice if name == "chat_template" else "")
    is_number = (type(value) is int and abs(value) <= MAX_COUNT) or (type(value) is float and math.isfinite(value))
    is_text = type(value) is str and len(value) <= MAX_TEMPLATE_ARGUMENT_LENGTH and not _SURROGATE.search(value)
    if not (type(value) is bool or is_number or is_text):
        raise InvalidPrompt(f"{what}.{name}", value, _VALUES)
    return value


def require_read(what: str, arguments: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise ``InvalidPrompt`` for an argument whose name is none of those that a template reads."""
    for name in arguments:
        if name not in names:
            allowed = f"one of {', '.join(sorted(names))}" if names else "none, because this chat template reads none"
            raise InvalidPrompt(f"{what}.{name}", "a name that the chat template does not read", allowed,
                                did_you_mean(name, names), is_described=True)


def arguments_of_effort(
    effort: object, names: Collection[str], known: Sequence[str] = EFFORTS
) -> dict[str, Any]:
    """Return the arguments that an effort of reasoning becomes, of those that a template reads; ``None`` is none.

    A template without any of them reasons as it does, or not at all.

    Args:
        effort: one of ``EFFORTS``.
        names: of the arguments that the template reads.
        known: of ``EFFORTS``, what the models of a template know that writes the word itself.

    Raises:
        InvalidRequest: it is none of ``EFFORTS``, or the models do not know it.
    """
    if effort is None:
        return {}
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise InvalidRequest("reasoning_effort", effort, f"one of {', '.join(EFFORTS)}, or null")
    if "reasoning_effort" in names and effort not in known:
        allowed = f"one of {', '.join(known)} for this model, or null"
        raise InvalidRequest("reasoning_effort", repr(effort), allowed, is_described=True)
    found = {"reasoning_effort": effort, **dict.fromkeys(_SWITCHES, effort != "none")}
    return {name: value for name, value in found.items() if name in names}
