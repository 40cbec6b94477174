"""What all endpoints of one app share: its models, its callers' keys and salts, its limits and its calls in flight."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from starlette.requests import Request

from pagedcore import SharedEngines
from pagedcore.errors import EngineInUse, InvalidConfig, InvalidRequest, UnknownAdapter
from pagedcore.request_options import RequestOptions
from pagedcore_http.body import body_limit, read_object
from pagedcore_http.drain import OpenCalls
from pagedcore_http.event_stream import run_until_disconnect
from pagedcore_http.refusals import NotServing, RefusedAtTheDoor
from pagedcore_http.salts import Caller, Salt, combine_salts, derive_salt
from pagedcore_openai.calls import ServedModel
from pagedcore_openai.errors import FieldMissing, ModelNotFound
from pagedcore_openai.live import LiveView
from pagedcore_openai.names import ServedNames
from pagedcore_openai.tenants import ApiKeys, Browsers
from pagedcore_openai.times import Timed

_log = logging.getLogger(__name__)

SaltHook = Callable[[Request], Salt | Awaitable[Salt]]
SeesSalt = Callable[[bytes], bool]


@dataclass(frozen=True, eq=False)
class Owner:
    """Whose requests have a salt: the derived part of it, without what the caller has named."""

    derived: Salt


class TooManyCalls(RefusedAtTheDoor):
    """As many calls are in flight as the app takes."""

    def __init__(self, limit: int) -> None:
        super().__init__(HTTPStatus.TOO_MANY_REQUESTS, "calls in flight", limit + 1, f"at most {limit}")


@dataclass
class Service:
    """The state of one app.

    Raises:
        InvalidConfig: there is no model, or a limit is not positive.
    """

    models: Mapping[str, ServedModel]
    api_keys: ApiKeys | None
    salt_hook: SaltHook | None
    browsers: Browsers
    max_body_bytes: int | None
    max_open_calls: int
    body_s: float
    shows_metrics: bool
    page_files: Mapping[str, tuple[bytes, str]] = field(default_factory=dict)
    """The files of the page by name; empty: there is no page."""
    max_priority: int | None = None
    weight_hook: Callable[[Request], float] | None = None
    shows_recordings: bool = False
    adapter_roots: tuple[Path, ...] = ()
    """Directories below which the admin key may load adapters; empty: there are no routes for that."""
    weights_dir: Path | None = None
    """Where admins may load weights from; ``None``: nowhere."""
    shared: SharedEngines | None = None
    """What wakes the models that calls use; ``None``: those that sleep hold their calls."""
    open_calls: OpenCalls = field(default_factory=OpenCalls)
    live: dict[str, LiveView] = field(init=False)
    """By model."""
    names: ServedNames = field(init=False)
    _owners: WeakValueDictionary[Any, Owner] = field(init=False, default_factory=WeakValueDictionary)
    """By salt, of the calls in flight."""

    def __post_init__(self) -> None:
        self.live = {name: LiveView(one.engine) for name, one in self.models.items()}
        if not self.models:
            raise InvalidConfig("models: got none, needed is at least one.")
        self.names = ServedNames(self.models, self.api_keys)
        if self.adapter_roots and (self.api_keys is None or not self.api_keys.has_admin):
            raise InvalidConfig("adapter_roots: they need an admin key, because whoever loads an adapter names files.")
        for name in ("max_body_bytes", "max_open_calls", "body_s"):
            if (given := getattr(self, name)) is not None and not given > 0:
                raise InvalidConfig(f"{name}: got {given}, allowed is a number above 0.")
        if self.max_body_bytes is None:
            self.max_body_bytes = max(body_limit(one.max_model_len) for one in self.models.values())

    def admit(self, request: Request, *, is_for_admins: bool = False, needs_key: bool = True) -> bytes | None:
        """Return the tenant of a call's key; ``None`` without keys. Raises ``RefusedAtTheDoor``."""
        self.browsers.require_own(request)
        if self.api_keys is None or not needs_key:
            return None
        return self.api_keys.tenant_of(request, is_for_admins=is_for_admins)

    def owner_of(self, salt: Salt, derived: Salt) -> Owner:
        """Return who has a salt; it is known as long as the result is kept. A salt never has two owners."""
        return self._owners.setdefault(salt, Owner(derived))

    async def view_of(self, request: Request, tenant: bytes | None) -> tuple[Hashable, SeesSalt | None]:
        """Return what a caller sees of the live view: a key for all who see the same, and whose salts; ``None``: all.

        Raises ``SaltNotDerived``.
        """
        if tenant is not None and self.api_keys is not None and self.api_keys.is_admin(tenant):
            return "all", None
        if tenant is None and self.salt_hook is None:
            return "all", None
        derived = (await self.caller_of(request, tenant)).derived
        own = combine_salts(derived, None) or b""

        def sees(salt: bytes) -> bool:
            owner = self._owners.get(salt)
            return salt == own or (owner is not None and owner.derived == derived)

        return ("own", derived), sees

    def require_room(self) -> None:
        """Raise ``TooManyCalls`` if more calls are in flight than may be."""
        if self.open_calls.num_open > self.max_open_calls:
            raise TooManyCalls(self.max_open_calls)

    async def caller_of(self, request: Request, tenant: bytes | None) -> Caller:
        """Return who a call is from; its salt is derived by the operator's hook, else from the key. Raises
        ``SaltNotDerived``.
        """
        hook, keys = self.salt_hook, self.api_keys
        salt = tenant if hook is None else await derive_salt(lambda: hook(request))
        if self.weight_hook is not None:
            weight = self.weight_hook(request)
        else:
            weight = 1.0 if keys is None or tenant is None else keys.weight_of(tenant)
        return Caller(salt, weight, self.max_priority)

    async def read_body(self, request: Request) -> dict[str, Any]:
        """Return the object in a body. Raises as ``read_object``; ``RefusedAtTheDoor`` (408) if it comes too slowly."""
        try:
            async with asyncio.timeout(self.body_s):
                return await read_object(request, self.max_body_bytes or 0)
        except TimeoutError:
            raise RefusedAtTheDoor(HTTPStatus.REQUEST_TIMEOUT, "body", None,
                                   f"a whole one within {self.body_s:g} seconds") from None

    def model_of(self, fields: Mapping[str, Any], tenant: bytes | None) -> ServedModel:
        """Return the model that a tenant's call names, perhaps with an adapter of it; without a name the only one.

        Raises:
            ModelNotFound: no model has the name, or the tenant may not use it.
            UnknownAdapter: the same of an adapter that is named beside it.
            FieldMissing: no name, and several models.
            NotServing: its engine makes no progress.
        """
        name, lora = fields["model"] if "model" in fields else self.names.only(tenant), fields.get("lora")
        if name is None:
            raise FieldMissing("model", "the name of a model that is served")
        if (served := self.names.find(name, tenant, lora)) is None:
            raise ModelNotFound(name)
        if served.lora is None and isinstance(lora, str) and not (
                lora in served.engine.adapter_names and self.names.may_use(tenant, self.names.base_of(served), lora)):
            raise UnknownAdapter.named(lora)
        if served.engine.health().status == "dead":
            raise NotServing("the engine of this process makes no progress; ask another one.")
        return served

    async def begin(self, request: Request, served: ServedModel, call: Timed) -> None:
        """Keep the model of a call awake until it is answered; the time of the wake is the call's.

        Raises:
            InvalidRequest: its engine would refuse an option, and nothing is woken for that.
            RefusedAtTheDoor: as ``use``.
            RequestTimeout, DeadlineMissed: it had to be answered by now.
            ClientGone: the client has left meanwhile.
        """
        if self.shared is not None:
            served.engine.input_processor.check_options(RequestOptions(**call.options))
            await call.after(run_until_disconnect(request.receive, self.use(request, served)))

    async def use(self, request: Request, served: ServedModel) -> None:
        """Keep a model awake until a call is answered. Raises ``RefusedAtTheDoor`` (503) if it cannot be woken now."""
        if self.shared is None:
            return
        name = self.names.base_of(served)
        try:
            await request.state.until_answered.enter_async_context(self.shared.use(name))
        except (InvalidConfig, InvalidRequest, EngineInUse, MemoryError) as error:
            _log.warning("%s: it could not be woken: %s", name, str(error) or type(error).__name__)
            raise RefusedAtTheDoor(
                HTTPStatus.SERVICE_UNAVAILABLE, "model", f"{name}, which sleeps",
                "one that is awake, or that there is room to wake: others are in use, or its files were changed",
                is_described=True) from None
