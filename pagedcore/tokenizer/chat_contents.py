"""Keeps what is in messages and tools from becoming control tokens: forged turns of a user, a web page or a schema.

A chat is rendered as it is. Where contents have a text that could be a control token, or a part of one, it is rendered
a second time with disguised contents, which shows the control tokens that the template wrote. If the chat has others,
it is tokenised again with their text as ordinary text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Any, Final, Protocol

from tokenizers import AddedToken, Tokenizer

from pagedcore.errors import InvalidPrompt
from pagedcore.protocols import ChatMessage
from pagedcore.tokenizer.control_tokens import ControlTokens
from pagedcore.tokenizer.disguise import Disguise, texts_in
from pagedcore.tokenizer.ordinary_text import OrdinaryText
from pagedcore.tokenizer.plain_values import plain

_LIMIT: Final = "messages and tools without the text of control tokens, which this tokenizer cannot read as other text"
_ADVICE: Final = "Leave it out, or let contents of chats have control tokens with control_tokens_in_chats."


class Render(Protocol):
    """Renders a chat."""

    def __call__(
        self, messages: Sequence[ChatMessage], *, tools: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
    ) -> str:
        """Return the text."""


class ChatContents:
    """Guards the chats of one tokenizer; safe to use from several threads."""

    def __init__(self, added: Mapping[int, AddedToken], template: str, backend: Tokenizer | None) -> None:
        """Take added tokens, the source of a template, and what tokenises in Rust, if anything does."""
        self._backend = backend
        if backend is None:
            normalize: Callable[[str], str] = partial(unicodedata.normalize, "NFKC")
            self._control = ControlTokens(added, template, normalize, lambda *_: True)
        else:
            normalize = str if backend.normalizer is None else backend.normalizer.normalize_str
            self._control = ControlTokens(added, template, normalize, partial(finds, backend.model))

    @cached_property
    def _ordinary(self) -> OrdinaryText | None:
        return None if self._backend is None else OrdinaryText(self._backend, self._control)

    def checked(
        self, token_ids: list[int], text: str | None, render: Render, messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any],
    ) -> list[int]:
        """Return the tokens of a chat: ``token_ids``, if the template wrote all control tokens in it.

        Args:
            token_ids: of the chat as it is.
            text: that was tokenised; ``None``: not known.
            render: gives this text, and that of other contents.
            messages: the chat's.
            tools: the chat's.
            arguments: the chat's, for its template.

        Raises:
            InvalidPrompt: it did not, and this tokenizer, or its model, reads their text in no other way.
        """
        contents = (messages, tools, list(arguments.values()))
        if not self._control.suspects(contents):
            return token_ids
        text = render(messages, tools=tools, arguments=arguments) if text is None else text
        disguise = Disguise(chain(texts_in(contents), (text,)), self._control.telling)
        with disguise.worn():
            disguised = disguise.unescaped(render(
                disguise.hide(plain(messages)), tools=disguise.hide(plain(tools)),
                arguments={name: disguise.hide(value) for name, value in arguments.items()},
            ))
        shown = disguise.show(disguised)
        # Why: a template that looks for single characters may write another text. For harmless contents it must not.
        if (shown == text or not self._control.is_whole_in(contents)) and self._is_written(
                token_ids, text, disguised, is_same=shown == text):
            return token_ids
        ordinary = self._ordinary
        found = None if ordinary is None else ordinary.encode(shown, ordinary.written(disguised))
        if found is None:
            raise InvalidPrompt("messages", messages, _LIMIT, _ADVICE)
        return found

    def _is_written(self, token_ids: list[int], text: str, disguised: str, *, is_same: bool) -> bool:
        """Whether the template wrote all control tokens of a text."""
        if self._control.count_in(text) != self._control.count_in(disguised):
            return False
        if self._ordinary is None or (is_same and not self._control.is_normalized):
            return True
        return self._ordinary.has_only(token_ids, self._ordinary.written(disguised))


def finds(model: Any, token_id: int, text: str) -> bool:
    """Whether a model of the library of tokenizers has a token for a text, rather than for pieces of it."""
    try:
        return any(token.id == token_id for token in model.tokenize(text))
    except Exception:  # Why any: the library raises the bare Exception, for text that a model does not know.
        return False
