"""What a call says besides its prompt: sampling parameters, a time limit and the options of the request.

LangChain passes the keywords of a call to callbacks, tracers and response caches. A salt is a secret, so these see a
pseudonym in its place: equal for equal salts of one process, and of no use to find the salt.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

from pydantic import SecretBytes, SecretStr

from pagedcore import SamplingParams
from pagedcore.errors import InvalidRequest
from pagedcore.request_options import OptionKeywords

_PSEUDONYM_KEY: Final = os.urandom(32)


@dataclass(frozen=True, slots=True)
class Call:
    """One call, with the fields of its model resolved."""

    params: SamplingParams
    timeout_s: float | None
    options: OptionKeywords = field(repr=False)


def hide_salt(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords whose salt, if they have one, is a pydantic secret."""
    salt = keywords.get("cache_salt")
    secret = SecretStr(salt) if isinstance(salt, str) else SecretBytes(salt) if isinstance(salt, bytes) else salt
    return {**keywords, "cache_salt": secret} if "cache_salt" in keywords else dict(keywords)


def reveal_secret(salt: Any) -> Any:
    """Return what the engine takes for a salt or a key."""
    return salt.get_secret_value() if isinstance(salt, SecretStr | SecretBytes) else salt


def mask_salt(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords for callbacks, tracers and caches: with the salt's pseudonym, or without a salt."""
    shown = {name: value for name, value in keywords.items() if name != "cache_salt"}
    if shown.get("logits_processor") is not None:
        # Why another one each time: code cannot be compared, so that no cache may find what it has made.
        shown["logits_processor"] = f"function-{os.urandom(16).hex()}"
    salt = reveal_secret(keywords.get("cache_salt"))
    if salt is None:
        return shown
    # Safety: keyed by the process, because a short salt could be found by trying all of them.
    data = salt.encode("utf-8", "surrogatepass") if isinstance(salt, str) else salt
    known = data if isinstance(data, bytes) else b""
    return {**shown, "cache_salt": f"salt-{blake2b(known, key=_PSEUDONYM_KEY, digest_size=16).hexdigest()}"}


def require_single_label(num_prompts: int, keywords: Mapping[str, Any]) -> None:
    """Refuse one label for several prompts.

    Raises:
        InvalidRequest: ``request_id`` is given with more than one prompt.
    """
    if num_prompts > 1 and keywords.get("request_id") is not None:
        raise InvalidRequest("request_id", keywords["request_id"], "a label of one prompt",
                             f"This call has {num_prompts} prompts; call once per prompt to label each.")
