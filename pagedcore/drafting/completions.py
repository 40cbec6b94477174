"""The latest completions behind each cache root, kept to be repeated. Bounded, and the oldest go first.

Security: a root never sees completions of another one. What was answered under one salt changes neither the tokens nor
the steps of a request with another; how long another root's completions are kept is all that the bound connects.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from pagedcore.drafting.text_index import TextIndex

MOST_KEPT_TOKENS: Final = 262_144
"""Of all roots together; 16 bytes each."""
HALF_TOKENS: Final = 16_384
"""A root's tokens are in two halves: when the newer one has so many, the older one goes, and a new one begins."""
MOST_ROOTS: Final = 1_024
NUM_BEFORE: Final = 8
"""Tokens of a prompt's end that are kept with a completion, so that its beginning is found."""
_END: Final = -1
"""Between two completions: it is no token, and so in no match and no draft."""


class KeptText:
    """Some completions one after the other, and their index, which whoever searches brings up to date."""

    __slots__ = ("index", "number", "tokens")

    def __init__(self, number: int) -> None:
        # Why a number: a place in a text that is gone is not taken for one in the next.
        self.number, self.tokens, self.index = number, array("i"), TextIndex()


class Completions:
    """Completions by root.

    Invariant: at most ``MOST_KEPT_TOKENS`` tokens in at most ``MOST_ROOTS`` roots, at most two halves for each.
    """

    def __init__(self) -> None:
        # Of each root the newer half first; the root that had the latest completion is the last.
        self._texts: OrderedDict[bytes, list[KeptText]] = OrderedDict()
        self.num_tokens = 0
        self._num_made = 0

    def add(self, root: bytes, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Keep a completion, of a very long one the end."""
        start = max(0, num_prompt_tokens - NUM_BEFORE, len(token_ids) + 1 - HALF_TOKENS)
        if len(token_ids) <= num_prompt_tokens:
            return
        texts = self._texts.setdefault(root, [])
        if not texts or len(texts[0].tokens) + len(token_ids) - start >= HALF_TOKENS:
            self._num_made += 1
            texts.insert(0, KeptText(self._num_made))
            self.num_tokens -= sum(len(text.tokens) for text in texts[2:])
            del texts[2:]
        texts[0].tokens.extend([*token_ids[start:], _END])
        self.num_tokens += len(token_ids) - start + 1
        self._texts.move_to_end(root)
        while self.num_tokens > MOST_KEPT_TOKENS or len(self._texts) > MOST_ROOTS:
            _, gone = self._texts.popitem(last=False)
            self.num_tokens -= sum(len(text.tokens) for text in gone)

    def texts(self, root: bytes) -> Sequence[KeptText]:
        """Return what is kept of a root, the newer half first."""
        return self._texts.get(root, ())
