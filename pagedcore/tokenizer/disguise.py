"""Disguises the contents of a chat, so that the rendered chat shows which of its characters came from them.

A template renders contents in which characters of control tokens are replaced, one for one, by others that the chat
does not have. Whatever it then joins, trims or cuts, no part of a control token that is written out came from them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from json import dumps
from typing import Any, Final

from pagedcore.errors import InvalidPrompt
from pagedcore.tokenizer.plain_values import plain

_SUBSTITUTES: Final = (range(0x2800, 0x2900), range(0x1D800, 0x1DA00), range(0xF0000, 0xFFFFE))
"""Braille, SignWriting, and planes for private use. Python writes the former two as they are, as it does ``<``, and
nothing trims, changes or normalises any of them."""
_ESCAPE: Final = re.compile(r"\\u[0-9a-f]{4}")
_LOOKS: Final = frozenset((
    "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier",
    "isnumeric", "isprintable", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex",
    "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip",
))
"""Methods of a text that say what it has, or where, or cut it there."""


def texts_in(value: Any) -> list[str]:
    """Return every text in messages or tools, the names of members included."""
    texts, left = list[str](), [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            texts += map(str, one)
            texts += [each for each in one.values() if type(each) is str]
            left += [each for each in one.values() if type(each) is not str]
        elif isinstance(one, str):
            texts.append(one)
        elif isinstance(one, list | tuple):
            left += one
        elif one is not None and not isinstance(one, int | float):
            # Why: a mapping of another kind, or an object; it becomes what the template gets for it.
            left.append(plain(one))
    return texts


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
        taken = set(chain.from_iterable({*text, *_ESCAPE.findall(text)} for text in texts))
        replaced = sorted(set(chain.from_iterable(map(hidden, texts))))
        free = (one for one in map(chr, chain(*_SUBSTITUTES)) if taken.isdisjoint((one, *_ESCAPE.findall(dumps(one)))))
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
        return type(value)(map(self.hide, value)) if isinstance(value, list | tuple) else value

    def unescaped(self, text: str) -> str:
        """Return a text in which JSON of ASCII alone has disguised characters as they are; it has ``<`` as it is."""
        for one in self._substitutes.values() if "\\u" in text else ():
            text = text.replace(dumps(one)[1:-1], one)
        return text

    def show(self, text: str) -> str:
        """Return a text without disguise."""
        return text.translate(self._shown)

    @contextmanager
    def worn(self) -> Iterator[None]:
        """Render with contents in this disguise."""
        token = _WORN.set(self)
        try:
            yield
        finally:
            _WORN.reset(token)


_WORN: Final = ContextVar[Disguise | None]("pagedcore_disguise", default=None)


def seen(value: Any) -> Any:
    """Return what a template compares: a value of the rendering that runs here, without disguise."""
    if (disguise := _WORN.get()) is None:
        return value
    if isinstance(value, str):
        return disguise.show(value)
    if isinstance(value, dict):
        return {seen(key): one for key, one in value.items()}
    return type(value)(map(seen, value)) if type(value) in (list, tuple) else value


def seeing(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a text that looks for undisguised text in it; what it cuts out keeps its disguise."""
    if _WORN.get() is None or method.__name__ not in _LOOKS:
        return method
    text, name = str(method.__self__), method.__name__  # type: ignore[attr-defined]

    def looks(*args: Any, **kwargs: Any) -> Any:
        if name == "replace":
            return _replaced(text, *args, **kwargs)
        shown, given = seen(text), (seen(args), {key: seen(one) for key, one in kwargs.items()})
        found = getattr(shown, name)(*given[0], **given[1])
        if isinstance(found, str):
            begin = 0 if name in ("rstrip", "removesuffix") else len(shown) - len(
                shown.lstrip(*given[0]) if name == "strip" else found)
            return text[begin : begin + len(found)]
        if not isinstance(found, list | tuple):
            return found
        separator = (given[0] or (given[1].get("sep"),))[0] if "split" in name and name != "splitlines" else ""
        return type(found)(_pieces(text, shown, found, None if name == "splitlines" else separator))

    return looks


def _pieces(text: str, shown: str, found: Iterable[str], separator: str | None) -> Iterator[str]:
    """Yield the pieces of a text that stand between separators in it, ``None`` for white space."""
    at = 0
    for piece in found:
        at = shown.index(piece, at) if separator is None else at
        yield text[at : at + len(piece)]
        at += len(piece) + len(separator or "")


def _replaced(text: str, old: str, new: str, count: int = -1) -> str:
    if not old:
        return text.replace(old, new, count)
    return new.join(_pieces(text, seen(text), seen(text).split(seen(old), count), seen(old)))
