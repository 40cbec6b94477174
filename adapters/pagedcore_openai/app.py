"""The ASGI app: routes, start and end. The engines belong to its host, or to the app if ``create`` built them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagedcore import AsyncEngine, SharedEngines, engine_metrics
from pagedcore.errors import InvalidConfig
from pagedcore_http.drain import DrainSignal
from pagedcore_http.present_objects import PresentObjects
from pagedcore_openai.adapters import LoadAdapter, UnloadAdapter, roots_of
from pagedcore_openai.calls import ServedModel
from pagedcore_openai.chat import ChatCall
from pagedcore_openai.completions import TextCall
from pagedcore_openai.embeddings import EmbeddingCall
from pagedcore_openai.endpoints import (
    Completing,
    Detokenize,
    Health,
    Metrics,
    Models,
    Recording,
    StoredResponse,
    Tokenize,
)
from pagedcore_openai.errors import openai_refusal
from pagedcore_openai.judgements import ClassifyCall, RerankCall, ScoreCall
from pagedcore_openai.page import Live, Page, page_files
from pagedcore_openai.pooled import Pooled
from pagedcore_openai.responses import ResponseCall
from pagedcore_openai.service import SaltHook, Service
from pagedcore_openai.sleep import IsSleeping, Sleep, WakeUp
from pagedcore_openai.tenants import ApiKeys, Browsers
from pagedcore_openai.weights import UpdateWeights

Engines = AsyncEngine | Mapping[str, AsyncEngine] | SharedEngines
DRAIN_S: Final = 25.0
MAX_OPEN_CALLS: Final = 1024
BODY_S: Final = 60.0
CLOSE_LIMIT_S: Final = 5.0
"""Longest wait for a step in flight when an engine is closed, in seconds."""
DEFAULT_NAME: Final = "pagedcore"
_APP_OPTIONS: Final = frozenset({
    "api_keys", "salt_of", "hosts", "max_body_bytes", "max_open_calls", "body_s", "drain_s",
    "metrics", "page", "origins", "max_priority", "weight_of", "recordings", "adapter_roots", "weights_dir",
})
_ROUTES: Final[tuple[tuple[str, str, Any], ...]] = (
    ("POST", "/chat/completions", partial(Completing, kind=ChatCall)),
    ("POST", "/completions", partial(Completing, kind=TextCall)),
    ("POST", "/responses", partial(Completing, kind=ResponseCall)),
    ("GET", "/responses/{response}", StoredResponse),
    ("DELETE", "/responses/{response}", StoredResponse),
    ("POST", "/embeddings", partial(Pooled, kind=EmbeddingCall)),
    ("POST", "/rerank", partial(Pooled, kind=RerankCall)),
    ("POST", "/v2/rerank", partial(Pooled, kind=RerankCall)),
    ("POST", "/score", partial(Pooled, kind=ScoreCall)),
    ("POST", "/classify", partial(Pooled, kind=ClassifyCall)),
    ("GET", "/models", Models),
    ("GET", "/models/{model:path}", Models),
    ("POST", "/tokenize", Tokenize),
    ("POST", "/detokenize", Detokenize),
    ("GET", "/health", Health),
    ("GET", "/metrics", Metrics),
    ("GET", "/recording", Recording),
    ("POST", "/load_lora_adapter", LoadAdapter),
    ("POST", "/unload_lora_adapter", UnloadAdapter),
    ("POST", "/update_weights", UpdateWeights),
    ("POST", "/sleep", Sleep),
    ("POST", "/wake_up", WakeUp),
    ("GET", "/is_sleeping", IsSleeping),
)
_STAINLESS: Final = ("Arch", "Async", "Custom-Poll-Interval", "Helper", "Helper-Method", "Lang", "OS",
                     "Package-Version", "Poll-Helper", "Raw-Response", "Read-Timeout", "Retry-Count", "Runtime",
                     "Runtime-Version", "Timeout")
_OF_CLIENTS: Final = (
    "Authorization", "Content-Type", "HTTP-Referer", "Idempotency-Key", "OpenAI-Beta", "OpenAI-Organization",
    "OpenAI-Project", "User-Agent", "X-Request-ID", "X-Title", *(f"X-Stainless-{name}" for name in _STAINLESS),
)
"""Headers that OpenAI's client for browsers, and programs on top of it, send. None has an effect but the first two; not
every name, because a hook of the host may take a tenant from one that its proxy sets."""
_FOR_CLIENTS: Final = ("Retry-After", "X-Request-ID")
"""Headers of responses that a page of another site may read, because clients do."""
_PAGE_ROUTES: Final[tuple[tuple[str, Any], ...]] = (("/", Page), ("/page/{name}", Page), ("/live", Live))


class OpenAIApp(Starlette):
    """OpenAI's HTTP interface over one engine or several; ``openai_app`` and ``create`` make one.

    Every path exists with ``/v1`` before it and without, so that the app can be mounted at "/v1" and anywhere else.

    Invariant: a request of an engine is aborted as soon as its client has disconnected.
    Invariant: no request reaches an engine before its tenant's salt is known.
    """

    def __init__(
        self, service: Service, drain_s: float, owned: Collection[AsyncEngine | SharedEngines] = ()
    ) -> None:
        self.service = service
        self.drain_s = drain_s
        self._owned = owned
        for one in service.models.values():
            engine_metrics(one.engine)
        # Safety: without an admin key, anybody who calls could let all others wait.
        has_no_admin = service.api_keys is None or not service.api_keys.has_admin
        hidden = {Metrics: not service.shows_metrics, Recording: not service.shows_recordings,
                  LoadAdapter: not service.adapter_roots, UnloadAdapter: not service.adapter_roots,
                  UpdateWeights: service.weights_dir is None,
                  Sleep: has_no_admin, WakeUp: has_no_admin, IsSleeping: has_no_admin}
        routes = [Route(prefix + path, endpoint, methods=[method])
                  for method, path, make in _ROUTES if not hidden.get(make, False)
                  for endpoint in (make(service),) for prefix in ("", "/v1")]
        if service.page_files:
            routes += [Route(path, make(service), methods=["GET"]) for path, make in _PAGE_ROUTES]
        # Why the app's own: without these headers a browser shows a page of another site nothing of a response.
        cors = [Middleware(CORSMiddleware, allow_origins=list(service.browsers.origins),
                           allow_methods=sorted({method for method, _, _ in _ROUTES}), allow_headers=_OF_CLIENTS,
                           expose_headers=_FOR_CLIENTS)] if service.browsers.origins else []
        super().__init__(routes=routes, lifespan=_lifespan, exception_handlers={HTTPException: _refuse},
                         middleware=cors)

    async def drain(self) -> int:
        """Refuse new calls and wait for those in flight; return how many are left after ``drain_s`` seconds.

        The engines that the app owns are then closed, which ends those calls with an error. Live views end at once.
        """
        for view in self.service.live.values():
            view.end()
        num_left = await self.service.open_calls.drain(self.drain_s)
        if num_left:
            await self.aclose()
        return num_left

    async def aclose(self) -> None:
        """Close what the app owns."""
        await asyncio.gather(*(one.aclose(CLOSE_LIMIT_S) for one in self._owned))


@asynccontextmanager
async def _lifespan(app: Any) -> AsyncGenerator[None, None]:
    """From a server's start to its end: SIGTERM and Ctrl-C wait for the drain, and owned engines are closed."""
    farewell = DrainSignal(app.drain, (signal.SIGTERM, signal.SIGINT))
    farewell.install()
    present_objects = PresentObjects()
    present_objects.keep()
    if app.service.shared is not None:
        await app.service.shared.__aenter__()
    try:
        yield
    finally:
        farewell.remove()
        # Why: where a signal has ended the server, the drain has happened.
        if not app.service.open_calls.is_draining:
            await app.drain()
        await app.aclose()
        present_objects.release()


async def _refuse(_: Request, error: Exception) -> Response:
    return openai_refusal(error).response()


def openai_app(
    engines: Engines, *, name: str = DEFAULT_NAME, api_keys: ApiKeys | None = None,
    salt_of: SaltHook | None = None, hosts: Collection[str] | None = None, max_body_bytes: int | None = None,
    max_open_calls: int = MAX_OPEN_CALLS, body_s: float = BODY_S, drain_s: float = DRAIN_S,
    metrics: bool = False, page: bool = False, origins: Collection[str] | None = None,
    max_priority: int | None = None, weight_of: Callable[[Request], float] | None = None, recordings: bool = False,
    adapter_roots: Collection[str] = (), weights_dir: str | os.PathLike[str] | None = None,
    owned: Collection[AsyncEngine | SharedEngines] = (),
) -> OpenAIApp:
    """Make the app around engines.

    Args:
        engines: one engine, or several by the names that requests give as their ``model``; of ``SharedEngines`` calls
            wake those that sleep.
        name: the name of the one engine.
        api_keys: who may call; ``None``: everybody, which is for apps that are mounted behind authentication.
        salt_of: derives the cache salt of a call's tenant from its Starlette request, instead of from the API key.
        hosts: names under which the app may be addressed, against pages of other sites; ``None``: any.
        origins: other sites whose pages may call, such as "https://chat.example"; they get the headers that browsers
            want for it. ``None``: those with one of ``hosts``, or any if these are ``None`` too.
        page: whether there is the page at ``/``, with the live view of the batch at ``/live``.
        max_body_bytes: largest body; ``None``: 16 bytes for each token of the longest context, at most 4 MiB, and 256
            KiB besides.
        max_open_calls: most calls in flight; more are refused with 429.
        body_s: longest time for a body to arrive, in seconds.
        drain_s: longest wait for calls in flight at the end, in seconds.
        metrics: whether there is ``/metrics``, which counts all tenants together; with keys it needs the admin key.
        weight_of: the weight of a call's tenant from its Starlette request, instead of from ``api_keys``.
        max_priority: the highest ``priority`` that a body may ask for; ``None``: any.
        recordings: whether there is ``/recording``, what the flight recorders have of all tenants together, with tokens
            if the engines keep these; with keys it needs the admin key, without them everybody who may call has it.
        adapter_roots: directories below which the admin key may load adapters, by ``/v1/load_lora_adapter``; empty:
            adapters are those that the engines were given.
        weights_dir: whose directories and GGUF files ``/update_weights`` may load into a running engine; with keys it
            needs the admin key, without them everybody who may call has it. ``None``: there is none.
        owned: engines that the app closes at its end; the owner of the others does.

    Raises:
        InvalidConfig: there is no engine, a limit is not positive, a host or an origin is none, or adapter roots are
            no directories, or without an admin key.
        EngineClosed: an engine was closed.
    """
    models = {key: ServedModel.of(key, engine) for key, engine in _by_name(engines, name).items()}
    service = Service(models, api_keys, salt_of, Browsers(hosts, origins), max_body_bytes, max_open_calls, body_s,
                      metrics, page_files() if page else {}, max_priority, weight_of, recordings,
                      roots_of(adapter_roots), None if weights_dir is None else Path(weights_dir),
                      engines if isinstance(engines, SharedEngines) else None)
    return OpenAIApp(service, drain_s, owned)


def _by_name(engines: Engines, name: str) -> Mapping[str, AsyncEngine]:
    if isinstance(engines, AsyncEngine):
        return {name: engines}
    return engines.engines if isinstance(engines, SharedEngines) else engines


def create(
    model: Any, *, name: str | None = None, memory: int | str | None = None, idle_s: float | None = None,
    **settings: Any,
) -> OpenAIApp:
    """Build the engines and the app that owns them, as ``expose("openai", model=...)`` does.

    Args:
        model: what ``AsyncEngine.from_pretrained`` takes, or an ``AsyncEngine``, which its owner closes; or a mapping
            of names to either. Several models draw equal shares of one ``MemoryBudget``.
        name: the name of the one model; ``None``: as it is called on the hub or in the file system.
        memory, idle_s: as for ``SharedEngines.from_pretrained``; with either, calls wake the models that they name.
        settings: options of ``openai_app``, and keywords of ``AsyncEngine.from_pretrained`` for each engine.

    Raises:
        InvalidConfig: as from ``openai_app`` and ``AsyncEngine.from_pretrained``.
        RequestFailed: a model fails on its first token.
    """
    options = {option: settings.pop(option) for option in _APP_OPTIONS & settings.keys()}
    models = model if isinstance(model, Mapping) else {name or _name_of(model): model}
    given = {key: one for key, one in models.items() if isinstance(one, AsyncEngine)}
    may_sleep = memory is not None or idle_s is not None
    if given and (may_sleep or len(given) < len(models)):
        raise InvalidConfig("models: got an engine, allowed are models, or engines alone without memory and idle_s.")
    if given:
        return openai_app(given, **options)
    with ExitStack() as undo:
        shared = SharedEngines.from_pretrained(models, memory=memory, idle_s=idle_s, **settings)
        undo.callback(shared.close)
        # Why: what nothing puts to sleep but an admin is woken by nobody else.
        app = openai_app(shared if may_sleep else shared.engines, owned=[shared], **options)
        undo.pop_all()
    return app


def _name_of(model: Any) -> str:
    """Return a name that shows no path."""
    if isinstance(model, str) and not os.path.isdir(model):
        return model
    return Path(model).resolve().name if isinstance(model, str | os.PathLike) else DEFAULT_NAME
