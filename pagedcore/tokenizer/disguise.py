"""Disguises the contents of a chat, so that the rendered chat shows which of its characters came from them.

A template renders contents in which characters of control tokens are replaced, one for one, by others that the chat
does not have. Whatever it then joins, trims or cuts, no part of a control token that is written out came from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any, Final

from pagedcore.errors import InvalidPrompt

#: Braille, SignWriting, and planes for private use. Python writes the former two as they are, as it does ``<``, and
#: nothing trims, changes or normalises any of them.
_SUBSTITUTES: Final = (range(0x2800, 0x2900), range(0x1D800, 0x1DA00), range(0xF0000, 0xFFFFE))


def texts_in(value: Any) -> list[str]:
    """Return every text in messages or tools, the names of members included."""
    texts, left = list[str](), [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            texts.append(one)
        elif isinstance(one, dict):
            texts += map(str, one)
            left += one.values()
        elif isinstance(one, list | tuple):
            left += one
        elif one is not None and not isinstance(one, int | float):
            # Why: a mapping of another kind, or an object; it becomes what the template gets for it.
            left.append(plain(one))
    return texts


def plain(value: Any) -> Any:
    """Return messages or tools as lists, dicts, texts and numbers, as templates get them from transformers."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return plain(dump())
    # Why: what cannot be looked into must not reach the prompt.
    return value if isinstance(value, int | float) else f"<{type(value).__name__}>"


class Disguise:
    """Other characters for some of one chat."""

    def __init__(self, texts: Iterable[str], hidden: Callable[[str], Iterable[str]]) -> None:
        """Choose characters.

        Args:
            texts: all texts of the chat, and the rendered one.
            hidden: the characters of a text to replace.

        Raises:
            InvalidPrompt: the chat has nearly all characters that there are.
        """
        self._hidden = hidden
        texts = list(texts)
        taken = set(chain.from_iterable(map(set, texts)))
        replaced = sorted(set(chain.from_iterable(map(hidden, texts))))
        free = (one for one in map(chr, chain(*_SUBSTITUTES)) if one not in taken)
        self._substitutes = dict(zip(replaced, free, strict=False))
        if len(self._substitutes) < len(replaced):
            raise InvalidPrompt("messages", f"{len(taken)} different characters", "fewer of them", is_described=True)
        self._shown = {ord(substitute): one for one, substitute in self._substitutes.items()}

    def hide(self, value: Any) -> Any:
        """Return messages or tools with everything in them disguised."""
        if isinstance(value, str):
            return value.translate({ord(one): self._substitutes[one] for one in self._hidden(value)})
        if isinstance(value, dict):
            return {self.hide(key): self.hide(one) for key, one in value.items()}
        return [self.hide(one) for one in value] if isinstance(value, list) else value

    def show(self, text: str) -> str:
        """Return a text without disguise."""
        return text.translate(self._shown)
