"""Tokenises a rendered chat in which only what the template wrote becomes a control token.

A second tokenizer of the same model has stand-ins for control tokens, texts that nobody can guess, and so reads the
text of a control token as ordinary text. No switch of the given one is touched, as threads share them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Final

from tokenizers import AddedToken, Encoding, Tokenizer

from pagedcore.tokenizer.control_tokens import ControlTokens

_UNKNOWN: Final = "\U0010fffd"
"""A character of no vocabulary."""
_MAX_CUTS: Final = 8
"""Times that text is cut in which the model itself finds a control token."""
_LONG_TEXT: Final = 1024
"""As ``HFTokenizer.encode`` has it."""

Place = tuple[int, int, int]
"""A token in a text: its id, and where it begins and ends."""


class OrdinaryText:
    """Tokenises for one tokenizer; safe to use from several threads."""

    def __init__(self, backend: Tokenizer, control: ControlTokens) -> None:
        self._control = control.texts
        self._unknown = _unknown_ids(backend)
        added = backend.get_added_tokens_decoder()
        self._as_given = _Twin(backend, added, {})
        others = {token_id: one for token_id, one in added.items() if token_id not in self._control}
        # Safety: 96 random bits, so that no content has the text of a stand-in.
        secret = "".join(chr(0x100000 + secrets.randbelow(0xFFF0)) for _ in range(6))
        self._stand_ins = {token_id: f"{secret}{chr(0xF0000 + place)}" for place, token_id in enumerate(self._control)}
        self._cut = f"{secret}{chr(0x10FFF0)}"
        self._with_stand_ins = _Twin(backend, others, {**self._stand_ins, -1: self._cut})

    def written(self, disguised: str) -> list[Place]:
        """Return the control tokens that the template wrote into a chat with disguised contents."""
        # Why compared: what the model does not know may be a control token of some tokenizers.
        return [(one, begin, end) for one, begin, end, _ in self._as_given.places(disguised) if one in self._control
                and (one not in self._unknown or disguised[begin:end] == self._control[one])]

    def has_only(self, token_ids: Iterable[int], written: Iterable[Place]) -> bool:
        """Whether tokens have the control tokens that were written and no other, apart from what the model does not
        know."""
        return self._known(token_ids) == self._known(one for one, *_ in written)

    def encode(self, text: str, written: Iterable[Place]) -> list[int] | None:
        """Tokenise a chat with these control tokens in it; ``None`` if its model finds others in ordinary text."""
        pieces, at = list[str](), 0
        for token_id, begin, end in written:
            pieces += text[at:begin], self._stand_ins[token_id]
            at = end
        pieces.append(text[at:])
        for _ in range(_MAX_CUTS):
            text = "".join(pieces)
            tokens = self._with_stand_ins.places(text)
            forged = [begin for one, begin, _, is_added in tokens
                      if not is_added and one in self._control and one not in self._unknown]
            if not forged:
                ids = [one for one, *_ in tokens if one >= 0]
                return ids if self.has_only(ids, written) else None
            bounds = [0, *(begin + 1 for begin in forged), len(text)]
            pieces = [self._cut] * (2 * len(bounds) - 3)
            pieces[::2] = [text[begin:end] for begin, end in pairwise(bounds)]
        return None

    def _known(self, token_ids: Iterable[int]) -> list[int]:
        return [one for one in token_ids if one in self._control and one not in self._unknown]


class _Twin:
    """A tokenizer with another's model and other added tokens."""

    def __init__(self, backend: Tokenizer, added: Mapping[int, AddedToken], stand_ins: Mapping[int, str]) -> None:
        self._tokenizer = twin = Tokenizer(backend.model)
        if backend.normalizer is not None:
            twin.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            twin.pre_tokenizer = backend.pre_tokenizer
        twin.add_tokens([one for _, one in sorted(added.items())])
        twin.add_tokens([AddedToken(one, normalized=False) for one in stand_ins.values()])
        names = {**{token_id: one.content for token_id, one in added.items()}, **stand_ins}
        self._id_of = {twin.token_to_id(name): token_id for token_id, name in names.items()}

    def places(self, text: str) -> list[tuple[int, int, int, bool]]:
        """Return the tokens of a text: id of the other tokenizer, begin, end, and whether it is an added one."""
        encoding = self._encode(text)
        ids = self._id_of
        return [(ids.get(one, one), begin, end, one in ids)
                for one, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True)]

    def _encode(self, text: str) -> Encoding:
        if len(text) <= _LONG_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=False)
        # Why: this one releases the interpreter's lock.
        return self._tokenizer.encode_batch([text], add_special_tokens=False)[0]


def _unknown_ids(backend: Tokenizer) -> frozenset[int]:
    """Return the tokens that a model has for what it does not know."""
    try:
        return frozenset(token.id for token in backend.model.tokenize(_UNKNOWN))
    except Exception:  # Why any: the library raises the bare Exception, for a model without such a token.
        return frozenset()
