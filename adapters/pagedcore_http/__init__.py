"""What every HTTP door shares, over Starlette: body limits, event streams, error to status, disconnect, drain, salts.

Knows no web framework beyond Starlette and nothing of the engine but its errors. Starlette comes with the framework of
the door, such as ``pagedcore[bentoml]`` or FastAPI; importing this package alone needs neither.

The names below are for programs of one's own: see "In your FastAPI program" in the documentation.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pagedcore_http.drain import DrainSignal, OpenCalls
    from pagedcore_http.event_stream import ClientGone, EventStream, TextStream, run_until_disconnect
    from pagedcore_http.events import frame
    from pagedcore_http.programs import answer_refusals
    from pagedcore_http.refusals import NotServing

__all__ = ["ClientGone", "DrainSignal", "EventStream", "NotServing", "OpenCalls", "TextStream", "answer_refusals",
           "frame", "run_until_disconnect"]

_HOMES: Final = {
    "ClientGone": "event_stream", "DrainSignal": "drain", "EventStream": "event_stream", "NotServing": "refusals",
    "OpenCalls": "drain", "TextStream": "event_stream", "answer_refusals": "programs",
    "frame": "events", "run_until_disconnect": "event_stream",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'pagedcore_http' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"pagedcore_http.{_HOMES[name]}"), name)
    return value
