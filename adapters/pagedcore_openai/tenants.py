"""Who calls: API keys, each of which is a tenant, and the hosts under which a loopback server may be addressed."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Iterable
from hashlib import sha256
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import Request

from pagedcore.errors import InvalidConfig
from pagedcore_http.refusals import RefusedAtTheDoor

MIN_KEY_LENGTH: Final = 16
MAX_KEY_LENGTH: Final = 512
_TAG: Final = b"pagedcore api key 1\0"
_ADVICE: Final = 'One can be made with: python -c "import secrets; print(secrets.token_urlsafe(32))"'


class ApiKeys:
    """The keys that may call; every key is a tenant with a cache of its own.

    Keeps digests only. A given key is compared with all of them, in a time that does not depend on the keys.

    Raises:
        InvalidConfig: a key is not 16 to 512 printable ASCII characters without spaces; the message has its place in
            the list and its length.
    """

    def __init__(self, keys: Iterable[str], admin_key: str | None = None) -> None:
        """Take the tenants' keys, and one that may also read ``/metrics``, which shows all tenants together."""
        admin_keys = [] if admin_key is None else [admin_key]
        self._tenants = tuple(_digest(_checked(key, f"key {place}")) for place, key in enumerate(keys, start=1))
        self._admins = tuple(_digest(_checked(key, "the admin key")) for key in admin_keys)
        if not self._tenants and not self._admins:
            raise InvalidConfig("API keys: got none, needed is at least one.")

    def tenant_of(self, request: Request, *, is_for_admins: bool = False) -> bytes:
        """Return the secret name of the tenant whose key a request has, to derive its salt from.

        Raises:
            RefusedAtTheDoor: 401, the request has no key, or one that is not known; 403, it needs the admin key.
        """
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = _digest(key.strip()) if scheme.lower() == "bearer" else b""
        # Safety: every comparison is made, so that the time says nothing of which one was equal.
        is_tenant, is_admin = (sum(hmac.compare_digest(given, one) for one in known) > 0
                               for known in (self._tenants, self._admins))
        if not (is_tenant or is_admin):
            raise InvalidKey(key)
        if is_for_admins and not is_admin:
            raise RefusedAtTheDoor(HTTPStatus.FORBIDDEN, "API key", "a tenant's key", "the admin key")
        return given


class InvalidKey(RefusedAtTheDoor):
    """A call has no API key, or one that is not known."""

    def __init__(self, key: str) -> None:
        super().__init__(HTTPStatus.UNAUTHORIZED, "API key", key or None, "Authorization: Bearer with a known API key")


def _digest(key: str) -> bytes:
    return sha256(_TAG + key.encode("utf-8", "surrogatepass")).digest()


def _checked(key: str, what: str) -> str:
    is_plain = key.isascii() and key.isprintable() and " " not in key
    if not is_plain or not MIN_KEY_LENGTH <= len(key) <= MAX_KEY_LENGTH:
        raise InvalidConfig(
            f"API keys: {what} has {len(key)} characters, allowed are {MIN_KEY_LENGTH} to {MAX_KEY_LENGTH} printable "
            f"ASCII characters without spaces. {_ADVICE}"
        )
    return key


def require_own_host(request: Request, hosts: Collection[str] | None) -> None:
    """Refuse a call that a page of another site has made through a browser on this machine.

    Args:
        request: its headers Host and Origin are looked at.
        hosts: names of this server, without ports; ``None``: any, because it is reached from elsewhere anyway.

    Raises:
        RefusedAtTheDoor: 403.
    """
    if hosts is None:
        return
    origin = request.headers.get("origin")
    for what, address in (("Host", f"//{request.headers.get('host', '')}"), ("Origin", origin)):
        if address is not None and _host_of(address) not in hosts:
            raise RefusedAtTheDoor(HTTPStatus.FORBIDDEN, f"header {what}", "another host", f"one of {', '.join(hosts)}")


def _host_of(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None
