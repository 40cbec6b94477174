"""Typed tables of named implementations, imported on first use.

An entry is a name and a dotted target, so that listing what there is imports nothing. Owns names, duplicates and the
errors of a missing package; never decides which entry is used. ``builtin.py`` has the entries of pagedcore.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from pagedcore.errors import InvalidConfig, MissingDependency, did_you_mean
from pagedcore.protocols import AttentionFactory, LinearFactory, ModelBackend

if TYPE_CHECKING:
    from pagedcore.scheduler.policies import Policy
    from pagedcore.tool_calls.formats import ReasoningFormat, ToolFormat

T = TypeVar("T")

AdapterFactory = Callable[..., Any]
"""``(model, **settings) -> object``: what ``expose`` calls."""
ModelFactory = Callable[..., ModelBackend]
"""``(model, config, load) -> ModelBackend``: what the user calls a model, the ``EngineConfig``, and ``Registry.load``.
"""
PolicyFactory = Callable[[], "Policy"]
"""What ``EngineConfig.scheduling_policy`` names: a function without arguments that returns a ``Policy``."""

ToolFormatFactory = Callable[[], "ToolFormat"]
"""What ``EngineConfig.tool_parser`` names: a function without arguments that returns a ``ToolFormat``."""
ReasoningFormatFactory = Callable[[], "ReasoningFormat"]
"""The same for ``EngineConfig.reasoning_parser``."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One named implementation that has not necessarily been imported."""

    name: str
    target: str
    """``"package.module:attribute"``."""
    summary: str = ""
    extra: str = ""
    """The pip extra that brings what the target imports."""
    plugin: str = ""
    """The plugin that added it."""

    @property
    def module(self) -> str:
        """Dotted name of the module that has the implementation."""
        return self.target.partition(":")[0]

    @property
    def advice(self) -> str:
        """What to install when the target cannot be imported."""
        return f"Install pagedcore[{self.extra}]." if self.extra else f"It comes from plugin {self.plugin!r}."


class Table(Generic[T]):
    """The implementations of one seam, by name, in the order they were added.

    Invariant: a name belongs to one plugin; a second claim is an error that names both.
    """

    def __init__(self, seam: str) -> None:
        self.seam = seam
        self._entries: dict[str, Entry] = {}
        self._plugin = ""

    def add(self, name: str, target: str, *, summary: str = "", extra: str = "") -> None:
        """Register ``target`` ("package.module:attribute") under ``name`` without importing it.

        Raises:
            InvalidConfig: the name is taken, or the target does not have the form above.
        """
        module, _, attribute = target.partition(":")
        if not name or not module or not attribute:
            needed = 'a name and a target of the form "package.module:attribute"'
            raise InvalidConfig(f"{self.seam}: got the entry {name!r} for {target!r}, needed is {needed}.")
        if taken := self._entries.get(name):
            raise InvalidConfig(
                f"{self.seam}: {name!r} is registered by the plugin {taken.plugin!r} and again by "
                f"{self._plugin!r}; block one of them."
            )
        self._entries[name] = Entry(name, target, summary, extra, self._plugin)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    @property
    def names(self) -> list[str]:
        """The registered names, in order."""
        return list(self._entries)

    def find(self, name: str) -> Entry:
        """Return the entry called ``name``; raises ``InvalidConfig`` with the names there are if there is none."""
        if name not in self._entries:
            known = ", ".join(self.names) or "none"
            advice = did_you_mean(name, self.names)
            raise InvalidConfig(f"{self.seam}: {name!r} is not registered; known are {known}. {advice}".rstrip())
        return self._entries[name]

    def load(self, name: str) -> T:
        """Import and return the implementation called ``name``.

        Raises:
            InvalidConfig: the name or the attribute does not exist.
            MissingDependency: a package is not installed; the message names the extra.
        """
        entry = self.find(name)
        try:
            module = importlib.import_module(entry.module)
        except ImportError as error:
            missing = error.name or entry.module
            raise MissingDependency(f"{self.seam}: {name!r} needs {missing}. {entry.advice}") from error
        attribute = entry.target.partition(":")[2]
        if not hasattr(module, attribute):
            raise InvalidConfig(f"{self.seam}: {name!r} points to {entry.target}, which does not exist.")
        return cast(T, getattr(module, attribute))

    def can_import(self, name: str) -> bool:
        """Whether the entry's module imports here; this imports it. Raises ``InvalidConfig`` as ``load``."""
        try:
            self.load(name)
        except MissingDependency:
            return False
        return True


class Registry:
    """One table per seam; a plugin's ``pagedcore_register`` hook adds to them."""

    def __init__(self) -> None:
        self.adapters: Table[AdapterFactory] = Table("adapters")
        self.attention: Table[AttentionFactory] = Table("attention")
        self.linears: Table[LinearFactory] = Table("linears")
        self.models: Table[ModelFactory] = Table("models")
        self.reasoning_parsers: Table[ReasoningFormatFactory] = Table("reasoning_parsers")
        self.schedulers: Table[PolicyFactory] = Table("schedulers")
        self.tool_parsers: Table[ToolFormatFactory] = Table("tool_parsers")

    @property
    def tables(self) -> dict[str, Table[Any]]:
        """Every table by its seam's name."""
        return dict(vars(self))

    def find_table(self, seam: str) -> Table[Any]:
        """Return the table of a seam; raises ``InvalidConfig`` with the names there are if there is none."""
        if seam not in self.tables:
            raise InvalidConfig(f"table: {seam!r} does not exist; known are {', '.join(self.tables)}.")
        return self.tables[seam]

    def load(self, seam: str, name: str) -> Any:
        """Import and return the implementation called ``name`` of a seam; raises as ``Table.load``."""
        return self.find_table(seam).load(name)

    @contextmanager
    def registering(self, plugin: str) -> Iterator[Registry]:
        """Attribute what is added inside to ``plugin``; an exception takes all of it back."""
        before = {table: dict(table._entries) for table in self.tables.values()}
        for table in before:
            table._plugin = plugin
        try:
            yield self
        except BaseException:
            for table, entries in before.items():
                table._entries = entries
            raise
        finally:
            for table in before:
                table._plugin = ""
