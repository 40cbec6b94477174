"""The engine's side of the observing hooks: free without observers, unharmed when one fails.

``hookspecs.py`` says what observers receive.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pagedcore.outputs import RequestOutput
    from pagedcore.plugins.hookspecs import EngineInfo
    from pagedcore.plugins.manager import PluginManager
    from pagedcore.requests.stats import StepStats

_log = logging.getLogger(__name__)
_OBSERVED: Final = ("pagedcore_engine_start", "pagedcore_engine_stop", "pagedcore_step", "pagedcore_request_finished")


class EngineHooks:
    """Tells observers what happens in one engine.

    One that raises is logged the first time, its later failures are silent, and the others are called all the same.

    Invariant: no method raises because of an observer.
    """

    def __init__(self, manager: PluginManager, *, at_the_end: Callable[[], None] = lambda: None) -> None:
        """Look up the observers of ``manager``; ``at_the_end`` is called after those of the engine's end."""
        self._at_the_end = at_the_end
        self._callers = {hook: manager.callers(hook) for hook in _OBSERVED}
        self._reported: set[str] = set()
        self._info: EngineInfo | None = None

    def add(self, manager: PluginManager) -> None:
        """Add the observers of another manager; if the engine has started, its start is reported to them first."""
        added = EngineHooks(manager)
        if self._info is not None:
            added.engine_started(self._info)
        for hook, callers in added._callers.items():
            self._callers[hook] += callers

    @property
    def observes_steps(self) -> bool:
        """Whether a step has an observer; if not, its statistics need not be built."""
        return bool(self._callers["pagedcore_step"])

    @property
    def observes_requests(self) -> bool:
        """Whether a finished request has an observer; if not, its output need not be built."""
        return bool(self._callers["pagedcore_request_finished"])

    def engine_started(self, info: EngineInfo) -> None:
        """Tell that the engine is about to take requests."""
        self._info = info
        self._tell("pagedcore_engine_start", engine=info)

    def engine_stopped(self, info: EngineInfo) -> None:
        """Tell that the engine was closed, then carry out what its builder left for the end."""
        self._tell("pagedcore_engine_stop", engine=info)
        self._at_the_end()

    def step_done(self, stats: StepStats) -> None:
        """Tell what a step did."""
        self._tell("pagedcore_step", stats=stats)

    def request_finished(self, output: RequestOutput) -> None:
        """Report a request whose completions have all finished."""
        self._tell("pagedcore_request_finished", request=output)

    def _tell(self, hook: str, **what: object) -> None:
        for name, call in self._callers[hook]:
            try:
                call(**what)
            except Exception:  # an observer must not be able to hurt the engine
                if name not in self._reported:
                    self._reported.add(name)
                    _log.exception("plugin %s raised in a hook; later failures are not logged", name)
