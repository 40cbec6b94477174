"""pagedcore on Ray Serve: replicas of an engine behind one OpenAI-compatible ingress that knows their prefix caches.

    from ray import serve
    from pagedcore_ray import llm_app

    serve.run(llm_app("demo", num_replicas=2))                # then: OpenAI(base_url="http://127.0.0.1:8000/v1")

Uses only public names of pagedcore and the app of ``pagedcore_openai``. Ray is imported when one of the names below is
first used. Read ``application.py`` for what is deployed, ``remote_engine.py`` for the way of a call to a replica, and
``prefix_table.py`` for which replica that is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pagedcore.lazy_names import lazy_names

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

__getattr__ = lazy_names(__name__, _HOMES, extra="pagedcore[ray]", brought=("ray", "starlette"))
