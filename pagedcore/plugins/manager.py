"""Finds plugins, checks them one by one, keeps a record of each, and calls the observing hooks.

Every engine gets a fresh manager, so that engines share no state. A third party's broken plugin is recorded and left
out; a broken one that was handed over explicitly is an error. An entry point is code of an installed distribution that
runs when it is loaded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any, Final, Literal

import pluggy

from pagedcore._version import __version__
from pagedcore.errors import InvalidConfig, is_passing
from pagedcore.plugins import builtin, hookspecs
from pagedcore.plugins.hookspecs import PROJECT_NAME, EngineInfo
from pagedcore.plugins.installed import entry_points_of, name_and_version
from pagedcore.plugins.registry import Registry

if TYPE_CHECKING:
    from pagedcore.outputs import RequestOutput
    from pagedcore.requests.stats import StepStats

_log = logging.getLogger(__name__)

_BUILTIN: Final = "builtin"
_OBSERVED: Final = ("pagedcore_engine_start", "pagedcore_engine_stop", "pagedcore_step", "pagedcore_request_context",
                    "pagedcore_request_finished")


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """What became of one plugin."""

    name: str
    distribution: str
    version: str
    state: Literal["active", "blocked", "failed"]
    reason: str = ""
    hooks: tuple[str, ...] = ()


class PluginManager:
    """The plugins of one engine: their records, the tables they filled, and their hooks.

    Invariant: a plugin is active if and only if its hooks can be called and its entries are in the registry.
    """

    def __init__(self, block: Iterable[str] = ()) -> None:
        self.registry = Registry()
        self._blocked = frozenset(block)
        self._records: dict[str, PluginRecord] = {}
        self._pluggy = pluggy.PluginManager(PROJECT_NAME)
        self._pluggy.add_hookspecs(hookspecs)

    @property
    def records(self) -> list[PluginRecord]:
        """One per plugin, in the order in which they were met."""
        return list(self._records.values())

    def add(self, plugin: object, name: str, *, distribution: str = "", version: str = "") -> None:
        """Register a plugin, a module or an object, and let it fill the tables; a blocked one is only noted.

        Raises:
            InvalidConfig: the name is taken, a hook is unknown, or its entries clash; nothing of it stays.
        """
        if name in self._records:
            taken_by = self._records[name].distribution or "another plugin"
            raise InvalidConfig(f"plugin name {name!r} is taken by {taken_by}; rename or block one of them.")
        if name in self._blocked:
            self._records[name] = PluginRecord(name, distribution, version, "blocked", "switched off")
            return
        try:
            hash(plugin)  # Why: Pluggy keeps plugins in sets when one of them is to be called alone
            self._pluggy.register(plugin, name)
            self._pluggy.check_pending()
            if register := dict(self.callers("pagedcore_register")).get(name):
                with self.registry.registering(name) as registry:
                    register(registry=registry)
        except Exception as error:
            if self._pluggy.has_plugin(name):
                self._pluggy.unregister(name=name)
            if isinstance(error, pluggy.PluginValidationError | TypeError | ValueError):
                raise InvalidConfig(f"plugin {name!r}: {error}") from error
            raise
        hooks = tuple(sorted(caller.name for caller in self._pluggy.get_hookcallers(plugin) or ()))
        self._records[name] = PluginRecord(name, distribution, version, "active", hooks=hooks)

    def try_add(self, entry_point: EntryPoint) -> None:
        """Load and register a plugin found by name; a failure of it is noted and logged, never raised.

        Raises:
            InvalidConfig: the system lacks file handles or memory now: without the plugin there would be an engine that
                lacks it for good.
        """
        name, dist = entry_point.name, entry_point.dist
        distribution, version = name_and_version(dist) if dist else ("", "")
        try:
            plugin = None if name in self._blocked else entry_point.load()
            self.add(plugin, name, distribution=distribution, version=version)
        except (Exception, SystemExit) as error:  # an import of a third party can raise anything, even an exit
            if is_passing(error):
                raise InvalidConfig(f"plugin {name!r}: it cannot be loaded now ({type(error).__name__}: the system "
                                    "lacks file handles or memory). Free some, and try again.") from error
            reason = f"{type(error).__name__}: {error}"
            # Why: two distributions may claim one name; the second record must not replace the first
            key = name if name not in self._records else f"{name} of {distribution}"
            self._records[key] = PluginRecord(key, distribution, version, "failed", reason)
            _log.warning("plugin %s was left out: %s", key, reason)

    def callers(self, hook: str) -> list[tuple[str, Callable[..., Any]]]:
        """Return a (plugin name, callable) for each active plugin that implements ``hook``, oldest first."""
        names = {implementation.plugin_name for implementation in getattr(self._pluggy.hook, hook).get_hookimpls()}
        plugins = self._pluggy.get_plugins()
        return [(name, self._pluggy.subset_hook_caller(hook, plugins - {plugin}))
                for name, plugin in self._pluggy.list_name_plugin() if name in names]


class EngineHooks:
    """Tells observers what happens in one engine.

    One that raises anything, ``SystemExit`` too, is logged the first time, its later failures are silent, and the
    others are called all the same. Only ``KeyboardInterrupt`` on the main thread is raised on, because it may be
    Ctrl-C; on other threads Python never raises it by itself.

    Invariant: no method raises because of an observer, Ctrl-C aside.
    """

    def __init__(self, manager: PluginManager, *, at_the_end: Callable[[], None] = lambda: None) -> None:
        """Look up the observers of ``manager``; ``at_the_end`` is called after those of the engine's end."""
        self.at_the_end = at_the_end
        self._set_callers({hook: manager.callers(hook) for hook in _OBSERVED})
        self._reported: set[str] = set()
        self._info: EngineInfo | None = None

    def add(self, manager: PluginManager) -> Callable[[], None]:
        """Add the observers of another manager and return what removes them; if the engine has started, its start is
        reported to them first."""
        added = EngineHooks(manager)
        if self._info is not None:
            added.engine_started(self._info)
        self._set_callers({hook: [*callers, *added._callers[hook]] for hook, callers in self._callers.items()})
        return lambda: self._remove(added)

    def _remove(self, added: EngineHooks) -> None:
        self._set_callers({
            hook: [one for one in callers if one not in added._callers[hook]] for hook, callers in self._callers.items()
        })

    def _set_callers(self, callers: dict[str, list[tuple[str, Callable[..., Any]]]]) -> None:
        # Why new lists each time: an observer may be removed while it is called.
        self._callers = callers
        self.observes_steps = bool(callers["pagedcore_step"])
        """Whether a step has an observer; if not, its statistics need not be built."""
        self.observes_requests = bool(callers["pagedcore_request_finished"])
        """Whether a finished request has an observer; if not, its output need not be built."""

    def engine_started(self, info: EngineInfo) -> None:
        """Tell that the engine is about to take requests."""
        self._info = info
        self._tell("pagedcore_engine_start", engine=info)

    def engine_stopped(self, info: EngineInfo) -> None:
        """Tell that the engine was closed, then carry out what its builder left for the end."""
        try:
            self._tell("pagedcore_engine_stop", engine=info)
        finally:
            self.at_the_end()

    def step_done(self, stats: StepStats) -> None:
        """Tell what a step did."""
        self._tell("pagedcore_step", stats=stats)

    def request_context(self) -> object:
        """Return what an observer says that a request belongs to which is being submitted here; callable anywhere."""
        return self._tell("pagedcore_request_context") if self._callers["pagedcore_request_context"] else None

    def request_finished(self, output: RequestOutput, context: object = None) -> None:
        """Report a request whose completions have all finished."""
        self._tell("pagedcore_request_finished", request=output, context=context)

    def _tell(self, hook: str, **what: object) -> object:
        result = None
        for name, call in self._callers[hook]:
            try:
                result = call(**what) or result
            except BaseException as error:  # an observer must not be able to hurt the engine
                if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():
                    raise
                if name not in self._reported:
                    self._reported.add(name)
                    _log.exception("plugin %s raised in a hook; later failures are not logged", name)
        return result


def create_plugin_manager(
    plugins: Iterable[object] = (), block: Iterable[str] = (), entry_points: bool = True
) -> PluginManager:
    """Find every plugin: what comes with pagedcore, then entry points, then ``plugins``.

    Args:
        plugins: modules or objects whose functions carry ``hookimpl``.
        block: names of plugins to leave out; the environment variable ``PAGEDCORE_DISABLE_PLUGINS`` adds more,
            separated by commas. What comes with pagedcore cannot be blocked.
        entry_points: whether to load the entry points of the group ``pagedcore``; any value of the environment variable
            ``PAGEDCORE_DISABLE_PLUGIN_AUTOLOAD`` switches them off.

    Raises:
        InvalidConfig: one of ``plugins`` cannot be registered.
    """
    disabled = map(str.strip, os.environ.get("PAGEDCORE_DISABLE_PLUGINS", "").split(","))
    manager = PluginManager({*block, *disabled} - {_BUILTIN})
    manager.add(builtin, _BUILTIN, distribution=PROJECT_NAME, version=__version__)
    if entry_points and not os.environ.get("PAGEDCORE_DISABLE_PLUGIN_AUTOLOAD"):
        for found in sorted(entry_points_of(group=PROJECT_NAME), key=lambda found: found.name):
            manager.try_add(found)
    for plugin in plugins:
        manager.add(plugin, getattr(plugin, "__name__", type(plugin).__name__))
    return manager


def expose(name: str, /, *, model: Any, **settings: Any) -> Any:
    """Build the adapter called ``name`` around a model: the way from a framework into an engine.

    ``expose("async-generator", model="demo")`` returns a callable that produces async generators;
    ``pagedcore plugins --table adapters`` lists the names.

    Args:
        name: an entry of the plugin table ``adapters``.
        model: what ``Engine.from_pretrained`` takes.
        settings: what the adapter takes; fields of ``EngineConfig`` among them.

    Raises:
        InvalidConfig: no adapter has that name, or a setting is refused.
        MissingDependency: the adapter's framework is not installed; the message names the extra.
    """
    return create_plugin_manager().registry.adapters.load(name)(model, **settings)
