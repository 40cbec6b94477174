"""Finds plugins, checks them one by one, and keeps a record of each: active, blocked or failed.

Every engine gets a fresh manager, so that tests and engines do not share state. A third party's broken plugin
is recorded and left out; a broken one that was handed over explicitly is an error. Never runs an observer:
that is ``observers.py``.

An entry point is code of an installed distribution that runs when it is loaded. It is on by default, listed
by ``pagedcore plugins``, and switched off by ``block``, ``entry_points=False`` or the environment variables
below.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from importlib.metadata import entry_points as entry_points_of
from typing import Any, Final, Literal

import pluggy

from pagedcore._version import __version__
from pagedcore.errors import InvalidConfig
from pagedcore.plugins import builtin, hookspecs
from pagedcore.plugins.hookspecs import PROJECT_NAME
from pagedcore.plugins.registry import Registry

_log = logging.getLogger(__name__)

ENV_DISABLE: Final = "PAGEDCORE_DISABLE_PLUGINS"
"""Comma-separated names of plugins to block."""
ENV_NO_AUTOLOAD: Final = "PAGEDCORE_DISABLE_PLUGIN_AUTOLOAD"
"""Any value but the empty one switches entry points off."""
BUILTIN_NAME: Final = "builtin"
"""Name of the plugin that registers what comes with pagedcore; it cannot be blocked."""

PluginState = Literal["active", "blocked", "failed"]


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """What became of one plugin."""

    name: str
    distribution: str
    version: str
    state: PluginState
    reason: str = ""
    """Why it is blocked or failed."""
    hooks: tuple[str, ...] = ()
    """The hooks it implements."""


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
        """One record per plugin met, in the order they were met."""
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
            self._note(PluginRecord(name, distribution, version, "blocked", "switched off"))
            return
        try:
            self._register(plugin, name)
        except (pluggy.PluginValidationError, TypeError, ValueError) as error:
            raise InvalidConfig(f"plugin {name!r}: {error}") from error
        hooks = tuple(sorted(caller.name for caller in self._pluggy.get_hookcallers(plugin) or ()))
        self._note(PluginRecord(name, distribution, version, "active", hooks=hooks))

    def try_add(self, entry_point: EntryPoint) -> None:
        """Load and register a plugin found by name; every failure is noted and logged, never raised."""
        name, dist = entry_point.name, entry_point.dist
        distribution, version = (dist.name, dist.version) if dist else ("", "")
        try:
            plugin = None if name in self._blocked else entry_point.load()
            self.add(plugin, name, distribution=distribution, version=version)
        except (Exception, SystemExit) as error:  # an import of a third party can raise anything, even an exit
            reason = f"{type(error).__name__}: {error}"
            # Why: two distributions may claim one name; the second record must not replace the first
            key = name if name not in self._records else f"{name} of {distribution}"
            self._note(PluginRecord(key, distribution, version, "failed", reason))
            _log.warning("plugin %s was left out: %s", key, reason)

    def callers(self, hook: str) -> list[tuple[str, Callable[..., Any]]]:
        """Return a (plugin name, callable) for each active plugin that implements ``hook``, oldest first."""
        implementations: list[pluggy.HookImpl] = getattr(self._pluggy.hook, hook).get_hookimpls()
        names = {implementation.plugin_name for implementation in implementations}
        return [(name, self._only(hook, plugin))
                for name, plugin in self._pluggy.list_name_plugin() if name in names]

    def _only(self, hook: str, plugin: object) -> Callable[..., Any]:
        others = [other for other in self._pluggy.get_plugins() if other is not plugin]
        return self._pluggy.subset_hook_caller(hook, others)

    def _register(self, plugin: object, name: str) -> None:
        hash(plugin)  # Why: Pluggy keeps plugins in sets when one of them is to be called alone
        try:
            self._pluggy.register(plugin, name)
            self._pluggy.check_pending()
            callers = dict(self.callers("pagedcore_register"))
            if name in callers:
                with self.registry.registering(name) as registry:
                    callers[name](registry=registry)
        except Exception:
            if self._pluggy.has_plugin(name):
                self._pluggy.unregister(name=name)
            raise

    def _note(self, record: PluginRecord) -> None:
        self._records[record.name] = record


def create_plugin_manager(
    plugins: Iterable[object] = (), block: Iterable[str] = (), entry_points: bool = True
) -> PluginManager:
    """Find every plugin: what comes with pagedcore, then entry points, then ``plugins``.

    Args:
        plugins: modules or objects whose functions carry ``hookimpl``.
        block: names of plugins to leave out; ``PAGEDCORE_DISABLE_PLUGINS`` adds to them.
        entry_points: whether to load the entry points of the group ``pagedcore``; the environment variable
            ``PAGEDCORE_DISABLE_PLUGIN_AUTOLOAD`` also switches them off.

    Raises:
        InvalidConfig: one of ``plugins`` cannot be registered.
    """
    disabled = map(str.strip, os.environ.get(ENV_DISABLE, "").split(","))
    manager = PluginManager({*block, *disabled} - {BUILTIN_NAME})
    manager.add(builtin, BUILTIN_NAME, distribution=PROJECT_NAME, version=__version__)
    if entry_points and not os.environ.get(ENV_NO_AUTOLOAD):
        for found in sorted(entry_points_of(group=PROJECT_NAME), key=lambda found: found.name):
            manager.try_add(found)
    for plugin in plugins:
        manager.add(plugin, getattr(plugin, "__name__", type(plugin).__name__))
    return manager
