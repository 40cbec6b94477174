"""The cache salt of a call: one part that the operator derives from credentials, one part that the caller names."""

from __future__ import annotations

from hashlib import sha256
from typing import Final

_TAG: Final = b"pagedcore http salt 1"


def combine_salts(derived: str | bytes | None, named: str | bytes | None) -> bytes | None:
    """Return the salt of a call; ``None`` if it has neither part.

    A caller cannot leave its tenant's part of the cache by naming a salt: different pairs give different salts, as
    the SHA-256 of both parts, each after its presence and its length.
    """
    if derived is None and named is None:
        return None
    digest = sha256(_TAG)
    for part in (derived, named):
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(b"\0" if data is None else b"\1" + len(data).to_bytes(8, "big") + data)
    return digest.digest()
