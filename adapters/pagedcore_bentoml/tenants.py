"""What keeps the tenants of a service apart where a call comes without its client's credentials.

Endpoints of one's own can lose them in three ways: they ask the engine itself, they call another endpoint of their
service, which BentoML makes an HTTP call without headers, or they belong to a service that ``depends`` on this one.
"""

from __future__ import annotations

import functools
import inspect
import logging
from hmac import compare_digest
from secrets import token_hex
from typing import Any, Final

import bentoml
from starlette.requests import Request

from pagedcore import AsyncEngine
from pagedcore_bentoml.wire import is_from_sibling
from pagedcore_http.refusals import SaltNotDerived

_log = logging.getLogger(__name__)
_HEADER: Final = "x-pagedcore-self"
_USE: Final = "Call self.complete(ctx, prompt) or self.deltas(ctx, prompt) instead, or pass the tenant's cache_salt."


def no_tenant(what: str) -> SaltNotDerived:
    """Return the error of a call whose tenant is unknown; the service's log has it too."""
    error = SaltNotDerived(f"this service tells tenants apart by salt_of, and {what}. {_USE}")
    _log.error("%s", error)
    return error


def current_request() -> Request | None:
    """Return the HTTP call that this task or thread answers for BentoML; ``None`` outside of one."""
    try:
        request: Request = bentoml.Context().request
    except LookupError:
        return None
    return request


class SelfCalls:
    """Tells the calls that a service makes to itself from those of its clients.

    Safety: by a key that only this process knows, because such a call names its own tenant.
    """

    def __init__(self) -> None:
        self._key = token_hex(16)

    def mark(self, proxy: Any) -> None:
        """Have BentoML's proxy of a service to itself send the key, if its calls stay in this process."""
        # Why this one only: the client without an event loop hands its calls to it.
        if proxy.to_async.app is not None:
            proxy.to_async.default_headers[_HEADER] = self._key

    def is_without_client(self, request: Request) -> bool:
        """Whether no client has sent this call: the service itself has, or one that depends on it."""
        key = request.headers.get(_HEADER, "")
        return compare_digest(key.encode(), self._key.encode()) or is_from_sibling(request)


class SaltedEngine:
    """An engine whose requests name their tenant: a method that takes their options refuses to go without a salt.

    Everything else is the engine's own.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        """Return what the engine has of this name."""
        member = getattr(self._engine, name)
        if not inspect.isroutine(member) or "options" not in inspect.signature(member).parameters:
            return member

        @functools.wraps(member)
        def salted(*args: Any, **keywords: Any) -> Any:
            if keywords.get("cache_salt") is None:
                raise no_tenant(f"its engine was asked by {name}() without a cache_salt")
            return member(*args, **keywords)

        return salted
