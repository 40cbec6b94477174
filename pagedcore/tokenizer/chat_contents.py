"""Keeps what is in messages and tools from becoming control tokens: forged turns of a user, a web page or a schema.

A chat is rendered as it is. Where contents have a text that could be a control token, or a part of one, it is rendered
a second time with disguised contents, which shows the control tokens that the template wrote. If the chat has others,
it is tokenised again with their text as ordinary text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
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

    def __call__(self, messages: Sequence[ChatMessage], *, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the text."""


class ChatContents:
    """Guards the chats of one tokenizer; safe to use from several threads."""

    def __init__(self, added: Mapping[int, AddedToken], template: str, backend: Tokenizer | None) -> None:
        """Take added tokens, the source of a template, and what tokenises in Rust, if anything does."""
        normalizer = None if backend is None else backend.normalizer
        normalize = normalizer.normalize_str if normalizer is not None else partial(unicodedata.normalize, "NFKC")
        self._backend, self._control = backend, ControlTokens(added, template, normalize)

    @cached_property
    def _ordinary(self) -> OrdinaryText | None:
        return None if self._backend is None else OrdinaryText(self._backend, self._control)

    def checked(
        self, token_ids: list[int], text: str | None, render: Render, messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
    ) -> list[int]:
        """Return the tokens of a chat: ``token_ids``, if the template wrote all control tokens in it.

        Args:
            token_ids: of the chat as it is.
            text: that was tokenised; ``None``: not known.
            render: gives this text, and that of other contents.
            messages: the chat's.
            tools: the chat's.

        Raises:
            InvalidPrompt: it did not, and this tokenizer, or its model, reads their text in no other way.
        """
        contents = (messages, tools)
        if not self._control.suspects(contents):
            return token_ids
        text = render(messages, tools=tools) if text is None else text
        disguise = Disguise(chain(texts_in(contents), (text,)), self._control.telling)
        with disguise.worn():
            disguised = disguise.unescaped(render(disguise.hide(plain(messages)), tools=disguise.hide(plain(tools))))
        shown = disguise.show(disguised)
        # Why: a template that looks for single characters may write another text. For harmless contents it must not.
        is_same = shown == text or not self._control.is_whole_in(contents)
        found = self._as_is(token_ids, text, disguised) if is_same else None
        if found is None and self._ordinary is not None:
            found = self._ordinary.encode(shown, self._ordinary.written(disguised))
        if found is None:
            raise InvalidPrompt("messages", messages, _LIMIT, _ADVICE)
        return found

    def _as_is(self, token_ids: list[int], text: str, disguised: str) -> list[int] | None:
        """Return the tokens of a text if it has the control tokens that the template wrote, and no other."""
        if self._ordinary is None:
            is_fit = self._control.count_in(text) == self._control.count_in(disguised)
        else:
            is_fit = self._ordinary.has_only(token_ids, text, self._ordinary.written(disguised))
        return token_ids if is_fit else None
