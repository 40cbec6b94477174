"""The hooks a plugin may implement, one sentence each, and what they receive.

A plugin is a module or an object whose functions carry ``hookimpl``. It is found by the entry-point group
``pagedcore`` or handed over explicitly. ``manager.py`` finds plugins and calls them.

    from pagedcore.plugins.hookspecs import hookimpl

    @hookimpl
    def pagedcore_request_finished(request):
        print(request.request_id, request.outputs[0].finish_reason)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pluggy

if TYPE_CHECKING:
    from pagedcore.outputs import RequestOutput
    from pagedcore.plugins.registry import Registry
    from pagedcore.requests.stats import StepStats

PROJECT_NAME: Final = "pagedcore"
"""Name of the Pluggy project and of the entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What was chosen when an engine was built; it stays the same for the engine's life."""

    model: str
    """The model's name; of a directory, the last part only."""
    dtype: str
    attention_backend: str
    scheduling_policy: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    is_schedule_invariant: bool


@hookspec
def pagedcore_register(registry: Registry) -> None:
    """Add named, lazily imported implementations to the registry's tables."""


@hookspec
def pagedcore_engine_start(engine: EngineInfo) -> None:
    """Note that an engine was built, with what was chosen, and is about to take requests."""


@hookspec
def pagedcore_engine_stop(engine: EngineInfo) -> None:
    """Note that an engine was closed."""


@hookspec
def pagedcore_step(stats: StepStats) -> None:
    """Look at what a step did; runs on the engine's thread and must not block."""


@hookspec(firstresult=True)
def pagedcore_request_context() -> object:
    """Return what a request that is being submitted belongs to, such as a span; runs where it is submitted."""


@hookspec
def pagedcore_request_finished(request: RequestOutput, context: object) -> None:
    """Look at a request whose completions have all finished; runs on the engine's thread and must not block.

    ``context`` is what ``pagedcore_request_context`` returned for it, ``None`` without one.
    """
