"""The cache salt of a call: one part that the operator derives from credentials, one part that the caller names."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Final

from starlette.exceptions import HTTPException

from pagedcore.errors import PagedcoreError
from pagedcore_http.refusals import SaltNotDerived

_log = logging.getLogger(__name__)
Salt = str | bytes | None
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


async def derive_salt(
    hook: Callable[[], Salt | Awaitable[Salt]], passed_on: tuple[type[Exception], ...] = ()
) -> Salt:
    """Return the salt that the operator's hook derives, a plain function or an ``async`` one.

    Raises:
        HTTPException: Starlette's, a ``PagedcoreError``, or one of ``passed_on``: what the hook raised.
        SaltNotDerived: it raised something else, or returned neither ``None`` nor text or bytes.
    """
    try:
        derived = hook()
        salt = await derived if inspect.isawaitable(derived) else derived
    except Exception as error:  # no call may continue without its tenant's salt
        if isinstance(error, (PagedcoreError, HTTPException, *passed_on)):
            raise
        raise _no_salt(f"raised {type(error).__name__}") from None
    if salt is not None and (not isinstance(salt, str | bytes) or not salt):
        raise _no_salt("returned neither None nor text or bytes of any length above 0")
    return salt


def _no_salt(reason: str) -> SaltNotDerived:
    # Safety: without the exception, whose message and frames may hold the caller's credentials.
    _log.error("salt_of %s; the call is refused", reason)
    return SaltNotDerived("the service could not derive the cache salt of this call; its log has the reason.")
