"""Which tokens of a tokenizer control a chat, and which contents could hold their text or complete it.

Control tokens are all special added tokens, and those other added tokens that the chat template writes. How contents
are kept from becoming them is in ``ordinary_text.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from typing import Any, Final

from tokenizers import AddedToken

from pagedcore.tokenizer.disguise import texts_in

_ROLES: Final = frozenset(("system", "user", "assistant", "tool", "developer", "function", "model"))
"""Roles that templates write without naming them, into their control tokens at times."""
_MAX_CHARACTERS: Final = 4096
"""Characters of which it is remembered what they are normalised to."""


class ControlTokens:
    """The control tokens of one tokenizer and its template; tokens of white space alone are none."""

    def __init__(
        self, added: Mapping[int, AddedToken], template: str, normalize: Callable[[str], str],
        is_found_later: Callable[[int, str], bool],
    ) -> None:
        """Find the control tokens.

        Args:
            added: all added tokens by id.
            template: the source of the chat template.
            normalize: what is done to text before tokens that are ``normalized`` are looked for, and by the model.
            is_found_later: whether the model finds a token, by id and text, in text without added ones.
        """
        self._literals, self._words = _written_by(template)
        self.texts = {token_id: token.content for token_id, token in added.items()
                      if token.content.strip() and (token.special or self._writes(token.content))}
        """By id."""
        is_needed = any(added[one].normalized or is_found_later(one, text) for one, text in self.texts.items())
        self._normalize = normalize if is_needed else None
        stripped = [text.strip() for text in self.texts.values()]
        self._ends = frozenset(end for text in stripped for end in (text[0], text[-1]))
        self._all, self._longest = "\0".join(stripped), max(map(len, stripped), default=0)

    def suspects(self, contents: Any) -> bool:
        """Whether contents have a text that could be, or join to, the text of a control token."""
        texts = texts_in(contents)
        if not self._begins_token and not self._ends_in("\0".join(texts)):
            return False
        return any(map(self.telling, texts))

    def telling(self, text: str) -> set[str]:
        """Return the characters of a text of which every control token has one that has any part of the text.

        These are the first and the last characters of control tokens. Where the template writes the beginning of a
        token alone, such as ``'<' + name + '>'``, a text may also be the middle of one.
        """
        if text in self._words:
            return set()
        return self._ends_in(text) or (set("".join(text.split())) if self._is_middle(text) else set())

    def is_whole_in(self, contents: Any) -> bool:
        """Whether contents have the whole text of a control token."""
        return any(any(self.count_in(text)) for text in texts_in(contents))

    @property
    def is_normalized(self) -> bool:
        """Whether some of them are looked for after text was normalised, so that other texts become them too."""
        return self._normalize is not None

    def count_in(self, text: str) -> list[int]:
        """Return how often a text has the text of each control token, as it is or normalized."""
        change = self._normalize or str
        return [given.count(token) for given in {text, change(text)} for token in self.texts.values()]

    def _ends_in(self, text: str) -> set[str]:
        if self._normalize is None:
            return {end for end in self._ends if end in text}
        return set(filter(self._gives_end, set(text)))

    def _writes(self, token: str) -> bool:
        """Whether the template writes a token, perhaps by a role in the middle of it."""
        if any(token in one for one in self._literals):
            return True
        parts = (token.split(role) for role in _ROLES if role in token)
        return any(len(two) == 2 and all(part and any(part in one for one in self._literals) for part in two)
                   for two in parts)

    def _is_middle(self, text: str) -> bool:
        text = text.strip()
        if not text or len(text) > self._longest or not self._begins_token:
            return False
        return (text if self._normalize is None else self._normalize(text).strip()) in self._all

    @cached_property
    def _begins_token(self) -> bool:
        """Whether a literal of the template ends with the beginning of a control token."""
        begins = tuple({text[:length] for text in self.texts.values() for length in range(1, len(text))})
        return any(one.rstrip().endswith(begins) for one in self._literals)

    @cached_property
    def _gives_end(self) -> Callable[[str], bool]:
        change, ends = self._normalize or str, self._ends
        return lru_cache(_MAX_CHARACTERS)(lambda one: one in ends or not ends.isdisjoint(change(one)))


def _written_by(template: str) -> tuple[list[str], frozenset[str]]:
    """Return the literals of a template, and the words that it knows: those it names, and roles."""
    from jinja2 import Environment, TemplateError

    literals, named, before = list[str](), set[str](), ""
    try:
        for _, kind, value in Environment().lex(template):
            if kind == "data":
                literals.append(value)
            elif kind == "string":
                literals.append(value[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape"))
                named.add(literals[-1])
            elif kind == "name" and before == ".":
                named.add(value)
            before = value
    except (TemplateError, UnicodeError):
        return [template], _ROLES
    return literals, _ROLES.union(filter(str.isidentifier, named))
