"""pagedcore on Ray Serve: replicas of an engine behind one OpenAI-compatible ingress that knows their prefix caches.

    from ray import serve
    from pagedcore_ray import llm_app

    serve.run(llm_app("demo", num_replicas=2))                # then: OpenAI(base_url="http://127.0.0.1:8000/v1")

Uses only public names of pagedcore and the app of ``pagedcore_openai``. Ray is imported when one of the names below is
first used. Read ``application.py`` for what is deployed, ``remote_engine.py`` for the way of a call to a replica, and
``prefix_table.py`` for which replica that is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from pagedcore.errors import MissingDependency

if TYPE_CHECKING:
    from pagedcore_ray.application import create, llm_app
    from pagedcore_ray.remote_engine import ReplicaLost
    from pagedcore_ray.router import PrefixAffinityRouter

__all__ = ["PrefixAffinityRouter", "ReplicaLost", "create", "llm_app"]

_HOMES: Final = {
    "PrefixAffinityRouter": "pagedcore_ray.router",
    "ReplicaLost": "pagedcore_ray.remote_engine",
    "create": "pagedcore_ray.application",
    "llm_app": "pagedcore_ray.application",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'pagedcore_ray' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("ray", "starlette"):
            raise
        raise MissingDependency(f"pagedcore_ray needs {error.name}. Install pagedcore[ray].") from error
    globals()[name] = value
    return value
