"""Whether two tokenizers have the same tokens, so that one model's tokens mean the same to another one."""

from __future__ import annotations

import json
from typing import Any

from pagedcore.protocols import HasVocabulary


def different_token(one: object, other: object) -> int | None:
    """Return the first token id that stands for something else in another tokenizer, or for nothing.

    Returns:
        ``None`` if there is none, or one of the tokenizers does not list its tokens.
    """
    if not (isinstance(one, HasVocabulary) and isinstance(other, HasVocabulary)):
        return None
    texts = one.to_json(), other.to_json()
    if texts[0] is None or texts[1] is None or texts[0] == texts[1]:
        return None
    first, second = _tokens(json.loads(texts[0])), _tokens(json.loads(texts[1]))
    differing = [token_id for token_id in first.keys() | second.keys() if first.get(token_id) != second.get(token_id)]
    return min(differing, default=None)


def lists_tokens(tokenizer: object) -> bool:
    """Whether a tokenizer can be compared."""
    return isinstance(tokenizer, HasVocabulary) and tokenizer.to_json() is not None


def _tokens(whole: dict[str, Any]) -> dict[int, str]:
    """Return what each id stands for."""
    known = whole["model"].get("vocab", {})
    pairs = known.items() if isinstance(known, dict) else [(entry[0], place) for place, entry in enumerate(known)]
    return {token_id: text for text, token_id in pairs} | {
        one["id"]: one["content"] for one in whole.get("added_tokens") or ()}
