"""Who calls: API keys, each of which is a tenant, and the hosts and origins that a browser may call by and from."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import Request

from pagedcore.errors import InvalidConfig
from pagedcore.request_options import RequestOptions
from pagedcore_http.refusals import RefusedAtTheDoor

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
MIN_KEY_LENGTH: Final = 16
MAX_KEY_LENGTH: Final = 512
_TAG: Final = b"pagedcore api key 1\0"
_MORE_HOSTS: Final = "pagedcore serve --allow-host NAME, or openai_app(hosts=...), adds one."
_MORE_ORIGINS: Final = "pagedcore serve --allow-origin SITE, or openai_app(origins=...), adds one."
Right = tuple[str, str | None]
"""A model that a key may use, and with which adapter: ``None``: alone, "*": alone and with each."""
_ADVICE: Final = 'One can be made with: python -c "import secrets; print(secrets.token_urlsafe(32))"'


class ApiKeys:
    """The keys that may call; every key is a tenant with a cache of its own.

    Keeps digests only. A given key is compared with all of them, in a time that does not depend on the keys.

    Raises:
        InvalidConfig: a key is not 16 to 512 printable ASCII characters without spaces; the message has its place in
            the list and its length.
    """

    ALL: Final = "*"
    """The name of all adapters of a model, behind its colon."""

    def __init__(
        self, keys: Iterable[str], admin_key: str | None = None, *, weights: Mapping[str, float] | None = None,
        models: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        """Take the tenants' keys, and one for operators, which may use everything.

        Args:
            keys: of those who may call.
            admin_key: may also read ``/metrics``, which shows all tenants together, and change what is served; it
                cannot be limited to names.
            weights: of keys for ``scheduling_policy="fair"``, 1 for those without. Raises ``InvalidRequest`` for one.
            models: what a key may use: "name" is a model without adapters, "name:adapter" one with an adapter, and
                "name:*" one without and with each. Everything else is for that key as if it were not served. Keys
                without an entry may use all.
        """
        admin_keys = [] if admin_key is None else [admin_key]
        self._tenants = tuple(_digest(_checked(key, f"key {place}")) for place, key in enumerate(keys, start=1))
        self._admins = tuple(_digest(_checked(key, "the admin key")) for key in admin_keys)
        if not self._tenants and not self._admins:
            raise InvalidConfig("API keys: got none, needed is at least one.")
        self._weights = {_digest(key): RequestOptions(weight=weight).weight for key, weight in (weights or {}).items()}
        if not self._weights.keys() <= {*self._tenants, *self._admins}:
            raise InvalidConfig("API keys: a weight is given for a key that is not among them.")
        self._models = {_digest(key): tuple(names) for key, names in (models or {}).items()}
        if not self._models.keys() <= {*self._tenants} - {*self._admins}:
            raise InvalidConfig("API keys: models are given for a key that is not among those of tenants.")

    def rights(self, served: Collection[str]) -> dict[bytes, frozenset[Right]]:
        """Return what tenants may use of the models that are served; those that are not there may use all.

        Raises:
            InvalidConfig: a key may use a model that is not served. The message has no name, which may be a key that
                was written behind another one without a comma.
        """
        return {tenant: frozenset(self._right(name, tenant, served) for name in names)
                for tenant, names in self._models.items()}

    def _right(self, name: str, tenant: bytes, served: Collection[str]) -> Right:
        if name in served:
            return name, None
        base, _, own = name.rpartition(":")
        if base not in served or not own:
            raise InvalidConfig(
                f"API keys: key {self._tenants.index(tenant) + 1} is given a name that is not served, allowed is a "
                f"model, model:adapter or model:{self.ALL} of {', '.join(served)}. A comma separates keys.")
        return base, own

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
            raise RefusedAtTheDoor(HTTPStatus.FORBIDDEN, "API key", "a tenant's key", "the admin key",
                                   is_described=True)
        return given

    @property
    def has_admin(self) -> bool:
        """Whether there is an admin key."""
        return bool(self._admins)

    def is_admin(self, tenant: bytes) -> bool:
        """Whether what ``tenant_of`` returned is the admin key's."""
        return tenant in self._admins

    def weight_of(self, tenant: bytes) -> float:
        """Return the weight of a tenant that ``tenant_of`` has returned."""
        return self._weights.get(tenant, 1.0)


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


@dataclass(frozen=True)
class Browsers:
    """From where a browser may call: it carries out what the pages of any site ask of it, on the user's own machine.

    Args:
        hosts: names of this server, without ports, by which it may be addressed; ``None``: any.
        origins: pages of other sites that may call, such as "https://chat.example"; ``None``: any, unless ``hosts`` are
            known. The headers that browsers want for it are the app's.

    Raises:
        InvalidConfig: a host has a scheme, a port or a path, or an origin has no scheme or has a path.
    """

    hosts: Collection[str] | None
    origins: Collection[str] | None

    def __post_init__(self) -> None:
        for host in self.hosts or ():
            if not host or any(mark in host for mark in "/ @") or (":" in host and host.count(":") < 2):
                raise InvalidConfig(f"host: got {host!r}, allowed is a name without scheme, port and path.")
        for origin in self.origins or ():
            parts = urlsplit(origin)
            if parts.scheme not in ("http", "https") or not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}":
                raise InvalidConfig(f"origin: got {origin!r}, allowed is http:// or https:// with a name, and a port.")

    def require_own(self, request: Request) -> None:
        """Refuse a call that a page of another site has made through a browser.

        Raises:
            RefusedAtTheDoor: 403, the header Host names another server (a name rebound to this address), or Origin is
                neither this server's, by the Host or by its ``hosts``, nor one of ``origins``.
        """
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if self.hosts is not None and _parts_of(f"//{host}")[0] not in self.hosts:
            raise _refused("Host", "another name", self.hosts, _MORE_HOSTS)
        is_checked = origin is not None and (self.hosts is not None or self.origins is not None)
        if is_checked and origin not in (self.origins or ()):
            self._require_own_origin(origin or "", host)

    def _require_own_origin(self, origin: str, host: str) -> None:
        name, port = _parts_of(origin)
        own_name, own_port = _parts_of(f"{origin.partition(':')[0]}://{host}")
        is_own = name is not None and (name, port) == (own_name, own_port)
        # Why not the port of a proxy: it may hand its own Host on. On this machine other ports are other programs.
        is_proxy = name in (self.hosts or ()) and name not in LOOPBACK
        is_loopback = name in LOOPBACK and own_name in LOOPBACK and port == own_port
        if not (is_own or is_proxy or is_loopback):
            raise _refused("Origin", "the page of another site", self.origins or self.hosts or (), _MORE_ORIGINS)


def _refused(header: str, given: str, allowed: Collection[str], advice: str) -> RefusedAtTheDoor:
    return RefusedAtTheDoor(HTTPStatus.FORBIDDEN, f"header {header}", given,
                            f"one of {', '.join(sorted(allowed))}" if allowed else "this server's own", advice,
                            is_described=True)


def _parts_of(address: str) -> tuple[str | None, int | None]:
    """Return the name and the port of an address, with the scheme's own port where it gives none."""
    try:
        parts = urlsplit(address)
        return parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return None, None
