"""The text of completions with those special tokens that mark calls and reasoning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pagedcore.protocols import Detokenizer


class ShowsMarkers:
    """A detokenizer that writes some special tokens.

    Args:
        new: starts a detokenizer that leaves them out.
        special_ids: their ids, by what is written for them.
    """

    def __init__(self, new: Callable[[], Detokenizer], special_ids: Mapping[str, int]) -> None:
        self._new, self._detokenizer = new, new()
        self._marker_of = {token_id: marker for marker, token_id in special_ids.items()}

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that has become certain."""
        if not any(token_id in self._marker_of for token_id in token_ids):
            return self._detokenizer.push(token_ids)
        return "".join(self._one(token_id) for token_id in token_ids)

    def finish(self) -> str:
        """Return the rest of the text."""
        return self._detokenizer.finish()

    def _one(self, token_id: int) -> str:
        if token_id not in self._marker_of:
            return self._detokenizer.push((token_id,))
        text, self._detokenizer = self._detokenizer.finish(), self._new()
        return text + self._marker_of[token_id]
