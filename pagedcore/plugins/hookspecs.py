"""The hooks a plugin may implement, one sentence each, and the plain data they receive.

A plugin is a module or an object whose functions carry ``hookimpl``. It is found by the entry-point group
``pagedcore`` or handed over explicitly. Owns no behaviour; ``manager.py`` finds plugins, ``observers.py``
calls them.

    from pagedcore.plugins.hookspecs import hookimpl

    @hookimpl
    def pagedcore_request_finished(request):
        print(request.request_id, request.outputs[0].finish_reason)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import pluggy

if TYPE_CHECKING:
    from pagedcore.outputs import RequestOutput
    from pagedcore.plugins.registry import Registry

PROJECT_NAME: Final = "pagedcore"
"""Name of the Pluggy project and of the entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What was chosen when an engine was built; it stays the same for the engine's life."""

    model: str
    """Name of the model, never a path outside the model's own directory name."""
    dtype: str
    attention_backend: str
    scheduling_policy: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    is_schedule_invariant: bool


class StepStats(Protocol):
    """The engine's counters after a step; ``Engine.stats()`` returns one."""

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks and are being computed."""
        ...

    @property
    def num_waiting(self) -> int:
        """Sequences in the waiting queue."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV pool."""
        ...

    @property
    def num_blocks_used(self) -> int:
        """Blocks somebody refers to."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps since the start; like every counter below it only grows."""
        ...

    @property
    def num_preemptions(self) -> int:
        """How often a running sequence lost its blocks."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens computed."""
        ...

    @property
    def num_generated_tokens(self) -> int:
        """Tokens sampled."""
        ...


@hookspec
def pagedcore_register(registry: Registry) -> None:
    """Add named, lazily imported implementations to the registry's tables."""


@hookspec
def pagedcore_engine_start(engine: EngineInfo) -> None:
    """Note that an engine was built and is about to take requests."""


@hookspec
def pagedcore_engine_stop(engine: EngineInfo) -> None:
    """Note that an engine was closed."""


@hookspec
def pagedcore_step(stats: StepStats) -> None:
    """Look at the counters after a step; runs on the engine's thread and must not block."""


@hookspec
def pagedcore_request_finished(request: RequestOutput) -> None:
    """Look at a request whose every answer has finished; runs on the engine's thread and must not block."""
