"""``pagedcore serve``: the app in a process of its own, under uvicorn."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import uvicorn

from pagedcore.errors import InvalidConfig, describe_name
from pagedcore_http.drain import KEEP_IDLE_S
from pagedcore_openai.app import DRAIN_S, OpenAIApp, create
from pagedcore_openai.bounded_server import BoundedServer
from pagedcore_openai.connections import connections_within_handles
from pagedcore_openai.tenants import LOOPBACK, ApiKeys, Browsers

KEYS_VARIABLE: Final = "PAGEDCORE_API_KEYS"
ADMIN_VARIABLE: Final = "PAGEDCORE_ADMIN_KEY"
MAX_WAITING: Final = 1024
"""Requests that may wait, for a server; an engine's own default is made for callers in its process."""
GRACE_S: Final = 3
"""How long connections may stay open after the drain, in seconds."""
_ADVICE: Final[Mapping[int, str]] = {
    errno.EADDRINUSE: "another program uses it; take another one with --port, or any free one with --port 0",
    errno.EACCES: "this user may not use it; take one above 1023 with --port",
    errno.EADDRNOTAVAIL: "this machine does not have the address; 127.0.0.1 is the machine alone, 0.0.0.0 all networks",
}


def keys_of_environment(environment: Mapping[str, str] = os.environ) -> ApiKeys | None:
    """Return the keys in ``PAGEDCORE_API_KEYS``, separated by commas, and in ``PAGEDCORE_ADMIN_KEY``; or ``None``.

    Behind a key may be names, with spaces between: what it may use, as ``ApiKeys`` has it.

    Raises:
        InvalidConfig: a key is too short, too long or not plain ASCII, or there twice, or the variable is empty; the
            message does not repeat it.
    """
    if environment.get(KEYS_VARIABLE, "-").strip(" ,") == "":
        # Safety: a secret that was not filled in must not open the server to everybody.
        raise InvalidConfig(f"{KEYS_VARIABLE}: it is set and has no key; give it one, or unset it to serve without.")
    entries = [words for entry in environment.get(KEYS_VARIABLE, "").split(",") if (words := entry.split())]
    models = {key: names for key, *names in entries if names}
    if models and len({key for key, *_ in entries}) < len(entries):
        raise InvalidConfig(f"{KEYS_VARIABLE}: a key is there twice; give all its models behind one of them.")
    admin_key = environment.get(ADMIN_VARIABLE, "").strip() or None
    return ApiKeys([key for key, *_ in entries], admin_key, models=models) if entries or admin_key else None


def serve(
    models: Mapping[str, Any], *, host: str = "127.0.0.1", port: int = 8000, drain_s: float = DRAIN_S,
    announce: Callable[[str], None] = print, allow_hosts: Collection[str] = (), allow_origins: Collection[str] = (),
    page: bool = True, recordings: Literal["on", "tokens"] | None = None,
    weights_dir: str | None = None, opened: Callable[[str], None] = lambda url: None, **settings: Any,
) -> None:
    """Serve models until SIGTERM or Ctrl-C; the calls in flight then have ``drain_s`` seconds to end.

    Args:
        models: what ``create`` takes, by the names that requests give.
        host: address to listen on; a loopback address refuses calls that pages of other sites make.
        port: port to listen on; 0: any free one.
        drain_s: after it, calls that are left end with an error; the process ends a few seconds later at most.
        announce: is given the text that says where the server is, once it answers.
        allow_hosts: names by which the server may be addressed besides those of a loopback address; with them, by no
            other name on any address.
        allow_origins: other sites whose pages may call.
        page: whether there is a page at ``/``.
        recordings: as ``EngineConfig.flight_recorder``; there is ``/recording`` then. It needs the admin key; without
            any keys a loopback address may have "on".
        weights_dir: as for ``openai_app``; it needs the admin key.
        opened: is given the address of the page, once it answers.
        settings: as for ``create``.

    Raises:
        InvalidConfig: the address cannot be listened on, a key or a setting is refused, or this process may open too
            few files.
        RequestFailed: a model fails on its first token.
    """
    if (api_keys := keys_of_environment()) is not None:
        api_keys.rights(models)
    if recordings is not None:
        settings["flight_recorder"] = recordings
    if api_keys is None or not api_keys.has_admin:
        is_own = api_keys is None and host in LOOPBACK and not allow_hosts
        _refuse_without_admin(recordings, weights_dir, is_own=is_own)
    # Why any on other addresses: their names are not known here.
    hosts = {*LOOPBACK, *allow_hosts} if host in LOOPBACK or allow_hosts else None
    config = uvicorn.Config("", host=host, port=port, log_config=None, log_level="warning", access_log=False,
                            server_header=False, timeout_graceful_shutdown=GRACE_S, timeout_keep_alive=KEEP_IDLE_S,
                            lifespan="on", ws="none")
    Browsers(hosts, allow_origins)
    max_connections = connections_within_handles()
    # Why first: a taken port is said before a model is loaded.
    listener = _bind(config)
    with listener:
        if (given := settings.get("config")) is None or given.max_num_waiting is None:
            settings.setdefault("max_num_waiting", MAX_WAITING)
        app = create(models, api_keys=api_keys, hosts=hosts, origins=allow_origins, page=page, drain_s=drain_s,
                     metrics=True, recordings=recordings is not None, weights_dir=weights_dir,
                     **settings)
        config.app = app
        url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"

        def ready() -> None:
            announce(greeting(app, url, api_keys is not None))
            opened(f"{url}/")

        BoundedServer(config, ready, max_connections).run([listener])


def _refuse_without_admin(recordings: str | None, weights_dir: str | None, *, is_own: bool) -> None:
    """Refuse what only an admin may have; ``is_own``: those who may call are this machine's."""
    if recordings is not None and not (is_own and recordings != "tokens"):
        raise InvalidConfig(
            f"recordings: got {describe_name(recordings)}, needed is {ADMIN_VARIABLE}, because a recording "
            'shows all tenants together; only on a loopback address, without keys, "on" needs none.'
        )
    if weights_dir is not None:
        raise InvalidConfig(f"weights_dir: got a directory, needed is {ADMIN_VARIABLE} for those who load weights.")


def _bind(config: uvicorn.Config) -> Any:
    """Return the socket. Raises ``InvalidConfig`` with advice."""
    log = logging.getLogger("uvicorn.error")
    was_disabled, log.disabled = log.disabled, True
    cause: BaseException | None = None
    try:
        return config.bind_socket()
    except (SystemExit, OSError, OverflowError) as error:
        cause = error if not isinstance(error, SystemExit) else error.__context__
    finally:
        log.disabled = was_disabled
    reason = _ADVICE.get(getattr(cause, "errno", 0) or 0, "it is no address of this machine, or no port up to 65535")
    raise InvalidConfig(f"host and port: {config.host} and {config.port} cannot be listened on: {reason}.") from None


def greeting(app: OpenAIApp, url: str, has_keys: bool) -> str:
    """Return what tells a new user how to call."""
    names, key = list(app.service.models), "$KEY" if has_keys else "none"
    header = f' -H "Authorization: Bearer {key}"' if has_keys else ""
    body = f'{{"model": "{names[0]}", "messages": [{{"role": "user", "content": "What is 2 + 3?"}}]}}'
    page = f"\n  chat and the live view of the batch: {url}/" if app.service.page_files else ""
    warning = ""
    if urlsplit(url).hostname not in LOOPBACK and not has_keys:
        warning = f"\n  without keys, everybody who reaches this address may call; {KEYS_VARIABLE} sets them"
    return (
        f"serving {', '.join(names)} at {url}/v1 (Ctrl-C ends it; calls in flight get {app.drain_s:g} s)\n"
        f"  curl {url}/v1/chat/completions{header} -H 'Content-Type: application/json' -d '{body}'\n"
        f'  python: OpenAI(base_url="{url}/v1", api_key="{key}")'
        f"{page}"
        f"{warning}"
    )
