"""What a caller may say of a request besides its prompt and its sampling parameters.

Every door takes the fields of ``RequestOptions`` as keywords (``OptionKeywords``) and passes on one object.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypedDict

from pagedcore.config.field_rules import LABEL, PRIORITY, FieldRule, seconds
from pagedcore.config.limits import MAX_SALT_BYTES, MAX_TIMEOUT_S
from pagedcore.errors import InvalidSalt

TIMEOUT: Final[FieldRule[float | None]] = seconds(0, MAX_TIMEOUT_S, above_low=True).or_none()
"""What every door accepts as the longest time to the end of a completion, in seconds; ``None``: no limit."""


class OptionKeywords(TypedDict, total=False):
    """The keywords of every door that accepts a request; see ``RequestOptions``."""

    priority: int
    cache_salt: str | bytes | None
    request_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Who a request is for and how urgent it is.

    Raises:
        InvalidRequest: the priority is no integer from -1,000,000 to 1,000,000, or the label is no printable text of
            1 to 128 characters; ``InvalidSalt``: the salt is neither text nor bytes, or not 1 to 64 bytes.
    """

    priority: int = 0
    """Higher runs first under a policy that has priorities; others refuse any but 0."""
    cache_salt: str | bytes | None = field(default=None, repr=False)
    """Requests with different salts never share cached blocks, and neither speed nor usage of one tells what another
    asked. Give each tenant its own."""
    request_id: str | None = None
    """The caller's own label for logs and hooks (``RequestOutput.client_request_id``), unique among requests of one
    salt. Requests are aborted and looked up by the engine's own random id."""
    salt: bytes = field(init=False, repr=False)
    """The salt as it enters cache keys; empty for requests without one."""

    def __post_init__(self) -> None:
        if type(self.priority) is not int or self.priority:
            PRIORITY.check("priority", self.priority)
        object.__setattr__(self, "salt", _salt_bytes(self.cache_salt))
        if self.request_id is not None:
            LABEL.check("request_id", self.request_id)


def _salt_bytes(salt: object) -> bytes:
    if salt is None:
        return b""
    given = salt.encode("utf-8", "surrogatepass") if isinstance(salt, str) else salt
    # Safety: a salt may be a secret, so the message has its type and size only.
    if not isinstance(given, bytes):
        raise InvalidSalt("cache_salt", type(salt), "text or bytes")
    if not 1 <= len(given) <= MAX_SALT_BYTES:
        raise InvalidSalt("cache_salt", salt, f"1 to {MAX_SALT_BYTES} bytes")
    return given
