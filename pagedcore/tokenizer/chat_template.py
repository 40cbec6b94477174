"""Renders a conversation with the tokenizer's own chat template and turns its failures into typed errors.

The template is code of the model's author and runs in the sandbox of ``transformers``. Its errors may quote the
conversation, so an error message repeats only words of the template itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pagedcore.errors import InvalidPrompt
from pagedcore.protocols import ChatMessage

_ACCEPTED: Final = "a conversation that the model's chat template accepts"
#: Stands for the completion before a further turn: any text that no template writes by itself.
_COMPLETION: Final = "pagedcore-answer-marker"
_BEFORE: Final = ({"role": "user", "content": "question"}, {"role": "assistant", "content": _COMPLETION})
#: Shorter quotes of a template are not useful.
_MIN_QUOTE: Final = 8
_MAX_QUOTE: Final = 200


def apply_chat_template(
    tokenizer: Any, messages: Sequence[ChatMessage], *, tokenize: bool, before: Sequence[ChatMessage] = ()
) -> Any:
    """Render ``before`` and the messages up to where the assistant's completion begins, as text or as token ids.

    Raises:
        InvalidPrompt: there is no message, one is not a mapping, the tokenizer has no template, or the template
            refuses the conversation.
    """
    if not messages:
        raise InvalidPrompt("messages", 0, "at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidPrompt(f"messages[{index}]", message, "a mapping, usually with role and content")
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidPrompt("messages", messages, "text or token ids, because this tokenizer has no chat template",
                            "Pass the prompt as one text, or use a model made for chat.")
    plain = [dict(message) for message in (*before, *messages)]
    # Why: a template can raise any exception (a missing key, None + text), and each is caused by the prompt.
    try:
        return tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=tokenize, return_dict=False)
    except Exception as error:
        advice = _own_words(str(error), tokenizer.chat_template) or f"It failed with {type(error).__name__}."
    # Safety: raised outside the handler, so that no chained exception carries the conversation.
    raise InvalidPrompt("messages", messages, _ACCEPTED, advice)


def render_turn(tokenizer: Any, messages: Sequence[ChatMessage]) -> str:
    """Render what follows a completion when ``messages`` come next, up to where the next completion begins.

    The template renders a stand-in conversation before the messages. Everything up to its completion is cut off, so
    the text begins with what closes a turn.

    Raises:
        InvalidPrompt: as ``apply_chat_template``, or the place of the completion cannot be found.
    """
    text: str = apply_chat_template(tokenizer, messages, tokenize=False, before=_BEFORE)
    # Safety: a message that holds the stand-in as well must not choose where the conversation is cut.
    if text.count(_COMPLETION) != 1:
        limit = "text or token ids, because this chat template does not write an earlier completion exactly once"
        raise InvalidPrompt("messages", messages, limit)
    return text.partition(_COMPLETION)[2]


def _own_words(message: str, template: object) -> str:
    """Return the longest beginning of an error message that the template itself contains, as a sentence."""
    text = "\0".join(map(str, template.values())) if isinstance(template, Mapping) else str(template)
    message = message[:_MAX_QUOTE]
    length = next((n for n in range(len(message), 0, -1) if message[:n] in text), 0)
    if length < _MIN_QUOTE:
        return ""
    return f"The template says: {message[:length].strip()}{'' if length == len(message) else ' ...'}"
