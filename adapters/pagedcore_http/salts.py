"""Who a call is from: what the operator derives from credentials, and what the caller may add to it.

A salt has one part of each. The tenant's name and weight are the operator's alone, and so is the highest priority.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

from starlette.exceptions import HTTPException

from pagedcore.errors import InvalidRequest, PagedcoreError
from pagedcore.request_options import OptionKeywords, RequestOptions
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


@dataclass(frozen=True, slots=True)
class Caller:
    """What the operator says of the caller of one call."""

    derived: Salt = field(default=None, repr=False)
    """The derived part of the salt, which also names the tenant."""
    weight: float = 1.0
    max_priority: int | None = None

    @property
    def tenant(self) -> str:
        """A name by which policies tell tenants apart: a digest, which says nothing of the salt; empty without one."""
        salt = combine_salts(self.derived, None)
        return "" if salt is None else sha256(_TAG + b" tenant\0" + salt).hexdigest()[:32]

    def options(self, given: OptionKeywords) -> OptionKeywords:
        """Return the options of a call: what the caller gave, and what only the operator says.

        Raises:
            InvalidRequest: an option is refused, or the priority is above ``max_priority``.
        """
        priority = RequestOptions(**given).priority
        if self.max_priority is not None and priority > self.max_priority:
            raise InvalidRequest("priority", priority, f"at most {self.max_priority}")
        return {**given, "cache_salt": combine_salts(self.derived, given.get("cache_salt")), "tenant": self.tenant,
                "weight": self.weight}


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
